"""The engine over several devices: one device's samples, whose bits do not depend on what else runs."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny
from test_rollout_engine_pages import CONTEXT, PAGE, requests, same
from test_rollout_engine_programs_decode import CASES, TINY
from test_rollout_engine_programs_drafts import check_bits

from areax import models
from areax.models import paging
from areax.parallel import mesh
from areax.parallel.planner import generation
from areax.parallel.planner.job import Job
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import attention, decode, prefill
from areax.rollout.engine.request import Sampling
from areax.rollout.servers.engine_mesh import ONE_DEVICE, EngineMesh

SLOTS = 4
# With fewer heads of keys and values than devices, windows, experts, latent vectors, delta nets, and Mamba.
MESHES = [
    *(pytest.param(case, EngineMesh(tp=tp), marks=pytest.mark.mesh)
      for case, tp in (("qwen3", 4), ("qwen3_moe", 2), ("qwen3_5_text", 2))),
    pytest.param("qwen3_moe", EngineMesh(ep=2, tp=2), marks=pytest.mark.mesh),
    *(pytest.param(case, EngineMesh(tp=2), marks=pytest.mark.wide)
      for case in ("qwen3", "qwen3 window", "nemotron_h")),
    *(pytest.param(case, EngineMesh(ep=ep), marks=pytest.mark.wide)
      for case, ep in (("qwen3_moe", 4), ("deepseek_v3", 3))),
]  # fmt: skip


def model(case):
    vocabulary = {"vocab_size": 192}  # more than a request may have reported
    config = models.config_from_hf({"model_type": case.split()[0]} | TINY | CASES[case] | vocabulary)
    return config, tiny.weights(models.table(config), 0.16)


def engine_of(case, mesh=ONE_DEVICE, share=None, draft=1):
    """An engine whose pages are this share of what its slots may need."""
    config, params = model(case)
    memory = 0.0
    if share:
        kinds = paging.kinds(config.records, CONTEXT, PAGE, 4, mesh.tp)
        counts = paging.counts(kinds, SLOTS, CONTEXT, PAGE, 4 * draft, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], SLOTS)
        memory = (fixed + share * (paging.size_of(kinds, counts, SLOTS) - fixed)) / 1e9
    return Engine(
        config, params, slots=SLOTS, context=CONTEXT, steps=4, page=PAGE, mesh=mesh, memory=memory, draft=draft
    )


@pytest.mark.sweep
@pytest.mark.parametrize("case, split", MESHES)
def test_samples_over_devices_are_those_of_one_device_and_of_requests_alone(case, split):
    """Tokens, and log-probabilities within 1e-5 (delta nets 4e-5); bits with little memory, in company or alone."""
    asked = requests(case)
    truncated = dataclasses.replace(asked[0].sampling, temperature=1.0, top_p=0.9, top_k=50)
    asked.append(dataclasses.replace(asked[0], rid="masked", sampling=truncated, sampling_mask=True))
    with engine_of(case) as one:
        wanted = one.generate(asked)
    with engine_of(case, split, 0.4) as engine:
        found = engine.generate(asked)
        assert engine.stats()["preemptions"] > 0 and engine.flush()
        for i in (1, 5):
            [alone] = engine.generate(requests(case)[i : i + 1])
            assert same(alone, found[i])
            engine.flush()
    atol = 4e-5 if "qwen3_5" in case else 1e-5
    for a, b in zip(found, wanted, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logp, b.logp, atol=atol)
        assert [ids for _, ids in a.masks] == [ids for _, ids in b.masks]
    assert len(found[-1].masks) == len(found[-1].tokens) > 0


@pytest.mark.parametrize(
    "case", [pytest.param("qwen3", marks=pytest.mark.mesh), pytest.param("qwen3_5_text", marks=pytest.mark.wide)]
)
def test_drafts_change_no_bit_over_devices(case):
    with engine_of(case, EngineMesh(tp=2), 0.4, draft=4) as engine:
        check_bits(engine, requests(case), 4)


def compiled_step(slots):
    device = slots.device
    with jax.set_mesh(device.mesh):
        return decode.decode.lower(
            device.weights, device.held, np.zeros_like(slots._state), slots.cache.table_KSX, 5, device.tables,
            device.no_mask_SM, config=slots.config, of_layer=device.of_layer, steps=4,
        ).compile()  # fmt: skip


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("case, split", [("qwen3", EngineMesh(tp=2)), ("qwen3_moe", EngineMesh(ep=2, tp=2))], ids=str)
def test_a_step_sends_two_sums_a_layer_and_no_pages(case, split):
    """And updates its part of the pages in place."""
    config, _ = model(case)
    slots = engine_of(case, split)._slots
    compiled = compiled_step(slots)
    sent = collections.Counter(
        re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text())
    )
    wide = {key: n for key, n in sent.items() if f"{SLOTS},{config.embed}]" in key[0] or f"1,{config.embed}]" in key[0]}
    assert wide == {
        (f"f32[{SLOTS},{config.embed}]", "all-reduce"): 2 * config.layers,
        (f"f32[{SLOTS},1,{config.embed}]", "all-reduce"): 1,  # of embeddings
    }
    # Nothing is gathered but likeliest tokens and sampling masks, for requests that ask for them, and ids of tokens
    # within one device.
    gathered = {key[0] for key in sent if key[1] != "all-reduce"}
    assert gathered <= {f"f32[{SLOTS},{config.vocab}]", f"s32[{SLOTS},{config.vocab}]", f"s32[{SLOTS},1]"}
    held = jax.tree.leaves((slots.device.held, slots.device.tables))
    own = sum(x.addressable_shards[0].data.nbytes for x in held)
    assert compiled.memory_analysis().alias_size_in_bytes == own


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize(
    "case, split",
    [
        ("qwen3", EngineMesh(tp=2)),
        ("qwen3", EngineMesh(tp=4)),
        ("qwen3_moe", EngineMesh(ep=2, tp=2)),
        ("qwen3_5_text", EngineMesh(tp=2)),
    ],
    ids=str,
)
def test_the_arguments_of_a_step_are_what_a_plan_says(case, split):
    """Weights and caches on each device; beside them are the slots' states, pages, tables and masks."""
    slots = engine_of(case, split)._slots
    config, tp = slots.config, split.tp
    job = Job(models.table(config), config.records, mesh.Layout(), 1, 64, 1, 1, 64.0)
    kinds = paging.kinds(config.records, CONTEXT, PAGE, 4, tp)
    held = paging.size_of(kinds, paging.counts(kinds, SLOTS, CONTEXT, PAGE, 4, None), SLOTS)
    beside = slots._state.nbytes + slots.cache.table_KSX.nbytes + np.int32().nbytes + slots.device.no_mask_SM.nbytes
    beside += sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(slots.device.tables))
    found = compiled_step(slots).memory_analysis().argument_size_in_bytes
    assert found - beside == generation.weights_bytes(job, 4, mesh.Layout(**dataclasses.asdict(split))) + held


@pytest.mark.mesh
def test_prompts_are_computed_on_the_mesh(monkeypatch):
    """Else each device would attend to gathered pages."""
    meshes = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **k: meshes.append(mesh.size("tp")) or attend(*a, **k))
    prefill.prefill.clear_cache()
    with engine_of("qwen3", EngineMesh(tp=2)) as engine:
        engine.generate([dataclasses.replace(requests("qwen3")[2], sampling=Sampling(max_new_tokens=0))])
    assert meshes and set(meshes) == {2}


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp 9 needs 9 devices, got 8 of this process; JAX_NUM_CPU_DEVICES=9 makes"):
        engine_of("qwen3", EngineMesh(tp=9))
    with pytest.raises(ValueError, match="tp must divide the query heads of each layer, 4 in this qwen3, got 5; use a"):
        engine_of("qwen3", EngineMesh(tp=5))
    two = models.config_from_hf(tiny.HF | {"vocab_size": 96})  # every weight can be split over four devices
    with pytest.raises(ValueError, match="tp must divide the query heads of each layer, 2 in this qwen3, got 4"):
        Engine(two, tiny.weights(models.table(two), 0.2), mesh=EngineMesh(tp=4))
    for case, experts in (("qwen3", 0), ("qwen3_moe", 8)):
        with pytest.raises(ValueError, match=f"ep must divide the model's experts, {experts} in this {case}, got 3"):
            engine_of(case, EngineMesh(ep=3))


def test_experts_alone_are_split_over_ep():
    slots = engine_of("qwen3_moe", EngineMesh(ep=2))._slots
    for path, x in jax.tree_util.tree_leaves_with_path((slots.device.weights, slots.device.held)):
        parts = 2 if "expert_" in jax.tree_util.keystr(path) else 1
        assert x.addressable_shards[0].data.nbytes * parts == x.nbytes, path
