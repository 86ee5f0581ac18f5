"""The engine over several devices: one device's samples, whose bits do not depend on what else runs."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny
from test_rollout_engine_decode import CASES, TINY
from test_rollout_engine_drafts import check_bits
from test_rollout_engine_pages import CONTEXT, PAGE, requests, same

from areax import models
from areax.models import paging
from areax.parallel import mesh
from areax.rollout.engine import attention, decode, prefill
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Sampling
from areax.rollout.servers.engine_mesh import EngineMesh

SLOTS = 4
# With fewer heads of keys and values than devices, windows, experts, latent vectors, delta nets, and Mamba.
MESHES = [
    *(pytest.param(*both, marks=pytest.mark.mesh) for both in (("qwen3", 4), ("qwen3_moe", 2), ("qwen3_5_text", 2))),
    *(pytest.param(case, 2, marks=pytest.mark.wide) for case in ("qwen3", "qwen3 window", "nemotron_h")),
]  # fmt: skip


def model(case):
    config = models.config_from_hf({"model_type": case.split()[0]} | TINY | CASES[case] | {"vocab_size": 96})
    return config, tiny.weights(models.table(config), 0.16)


def engine_of(case, tp, share=None, draft=1):
    """An engine whose pages are this share of what its slots may need."""
    config, params = model(case)
    memory = None
    if share:
        kinds = paging.kinds(config.records, CONTEXT, PAGE, 4, tp)
        counts = paging.counts(kinds, SLOTS, CONTEXT, PAGE, 4 * draft, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], SLOTS)
        memory = fixed + share * (paging.size_of(kinds, counts, SLOTS) - fixed)
    return Engine(
        config, params, slots=SLOTS, context=CONTEXT, steps=4, page=PAGE, mesh=EngineMesh(tp=tp), memory=memory,
        draft=draft,
    )  # fmt: skip


@pytest.mark.parametrize("case, tp", MESHES)
def test_samples_over_devices_are_those_of_one_device_and_of_requests_alone(case, tp):
    """Tokens, and log-probabilities within 1e-5 (delta nets 4e-5); bits with little memory, in company or alone."""
    with engine_of(case, 1) as one:
        wanted = one.generate(requests(case))
    with engine_of(case, tp, 0.4) as engine:
        found = engine.generate(requests(case))
        assert engine.stats()["preemptions"] > 0 and engine.flush()
        for i in (1, 5):
            [alone] = engine.generate(requests(case)[i : i + 1])
            assert same(alone, found[i])
            engine.flush()
    atol = 4e-5 if "qwen3_5" in case else 1e-5
    for a, b in zip(found, wanted, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logp, b.logp, atol=atol)


@pytest.mark.parametrize(
    "case", [pytest.param("qwen3", marks=pytest.mark.mesh), pytest.param("qwen3_5_text", marks=pytest.mark.wide)]
)
def test_drafts_change_no_bit_over_devices(case):
    with engine_of(case, 2, 0.4, draft=4) as engine:
        check_bits(engine, requests(case), 4)


@pytest.mark.mesh
def test_a_step_sends_two_sums_a_layer_and_no_pages():
    """And updates its part of the pages in place."""
    config, _ = model("qwen3")
    slots = engine_of("qwen3", 2)._slots
    with slots._on_mesh():
        compiled = decode.decode.lower(
            slots.weights, slots.cache.held, np.zeros_like(slots._state), slots.cache.table_KSX, 5, slots._tables,
            slots._masks.fill({}), config=slots.config, of_layer=slots.cache.of_layer, steps=4,
        ).compile()  # fmt: skip
    sent = collections.Counter(
        re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text())
    )
    wide = {key: n for key, n in sent.items() if f"{SLOTS},{config.embed}]" in key[0] or f"1,{config.embed}]" in key[0]}
    assert wide == {
        (f"f32[{SLOTS},{config.embed}]", "all-reduce"): 2 * config.layers,
        (f"f32[{SLOTS},1,{config.embed}]", "all-reduce"): 1,  # of embeddings
    }
    # Nothing is gathered but the likeliest tokens of requests that ask for them, and ids of tokens within one device.
    gathered = {key[0] for key in sent if key[1] != "all-reduce"}
    assert gathered <= {f"f32[{SLOTS},{config.vocab}]", f"s32[{SLOTS},1]"}
    held = jax.tree.leaves((slots.cache.held, slots._tables))
    own = sum(x.addressable_shards[0].data.nbytes for x in held)
    assert compiled.memory_analysis().alias_size_in_bytes == own


@pytest.mark.mesh
def test_prompts_are_computed_on_the_mesh(monkeypatch):
    """Else each device would attend to gathered pages."""
    meshes = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **k: meshes.append(mesh.size("tp")) or attend(*a, **k))
    prefill.prefill.clear_cache()
    with engine_of("qwen3", 2) as engine:
        engine.generate([dataclasses.replace(requests("qwen3")[2], sampling=Sampling(max_new_tokens=0))])
    assert meshes and set(meshes) == {2}


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp 9 needs 9 devices, got 8 of this process"):
        engine_of("qwen3", 9)
    with pytest.raises(ValueError, match="cannot be split over tp = 5 devices; use a divisor"):
        engine_of("qwen3", 5)
