"""Drafts by multi-token prediction: they are what the layer predicts, are accepted where it is right, and change no bit
of a sample."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models_mtp import Reference, model, write
from test_rollout_engine_pages import CONTEXT, PAGE, requests, same, unused
from test_rollout_engine_programs_drafts import NONE, WIDTH, changed, counts

from areax.adapters import hf, safetensors, tokenizer
from areax.core import param
from areax.models import mtp, paging
from areax.parallel.planner import generation
from areax.rollout.engine import budget
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.options import Options
from areax.rollout.engine.programs import decode
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.engine.slots import mesh_of
from areax.rollout.servers.engine_mesh import ONE_DEVICE, EngineMesh


def engine_of(case, share=None, predicts=True, draft=WIDTH, mesh=ONE_DEVICE, vocab=96, kept="auto"):
    """An engine whose caches, of keys and values in the dtype `kept`, have this share of what its slots may need."""
    config, params, w = model(case, vocab)
    memory = 0.0
    if share is not None:
        kinds = paging.kinds(
            mtp.records(config, predicts), CONTEXT, PAGE, paging.kv_dtype("float32", kept).itemsize, mesh.tp
        )
        sizes = paging.counts(kinds, 4, CONTEXT, PAGE, 4 * draft, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(sizes, kinds, strict=True)], 4)
        memory = (fixed + share * (paging.size_of(kinds, sizes, 4) - fixed)) / 1e9
    sizes = {"slots": 4, "context": CONTEXT, "page": PAGE, "memory": memory, "steps": 4, "draft": draft, "mesh": mesh}
    return Engine(config, {**params, "mtp": w} if predicts else params, **sizes, kv_cache_dtype=kept)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", ["qwen3_next", *(pytest.param(case, marks=pytest.mark.mesh) for case in ("deepseek_v3", "glm4_moe"))]
)
def test_drafts_are_what_the_layer_predicts(case, tmp_path):
    """By transformers, computed anew for each: behind prompts of several chunks, and answers of several steps."""
    vocab = 89
    config, params, w = model(case, vocab)
    reference = Reference(tmp_path, config, write(tmp_path, config, params, w))
    rng = np.random.default_rng(3)
    with engine_of(case, vocab=vocab) as engine:
        for slot, (length, new) in enumerate([(40, 1), (1, 9), (17, 26), (2, 1)]):
            prompt = tuple(rng.integers(8, vocab, length).tolist())
            [done] = engine.generate([Request("one", prompt, Sampling(0.0, max_new_tokens=new, ignore_eos=True))])
            made = np.asarray(engine.device.known)[slot].tolist()
            assert made == reference.drafts([*prompt, *done.tokens], WIDTH - 1)


def exact(case, vocab=96):
    """Weights with which the next token depends on the last one alone, and the layer predicts just that."""
    config, params, w = model(case, vocab)
    out = ("o", "delta_o", "down", "expert_down", "shared_down")
    stop = lambda stack: {name: x * 0 if name in out else x for name, x in stack.items()}
    params = {**params, "stacks": [stop(stack) for stack in params["stacks"]]}
    own = stop(w["stacks"][0])
    own["mtp_project"] = jnp.eye(config.embed, 2 * config.embed)[None]
    own |= {"mtp_embed_norm": jnp.ones_like(own["mtp_norm"]) - config.norm_offset, "mtp_norm": params["norm"][None]}
    return config, params, {"stacks": [own]}


@pytest.mark.slow
def test_nearly_all_drafts_of_a_layer_that_is_right_are_accepted():
    """At temperature 1, too: drafts are drawn with the noise of what is sampled."""
    config, params, w = exact("glm4_moe")
    with Engine(config, {**params, "mtp": w}, slots=4, context=CONTEXT, draft=WIDTH, steps=4) as engine:
        for temperature, more in ((0.0, {}), (1.0, {}), (0.8, {"top_k": 20, "top_p": 0.9})):
            before = counts(engine)
            sampling = Sampling(temperature, max_new_tokens=80, ignore_eos=True, seed=5, **more)
            engine.generate([Request("one", (9, 4, 31), sampling)])
            drafted, accepted, dispatches = counts(engine) - before
            assert drafted <= 63 and accepted >= 56 and dispatches <= 6  # of a token, then 20 of four at most


def check_bits(case, **options):
    asked = requests(case)[:6]
    with engine_of(case, 0.4, **options) as engine:
        wanted = [engine.generate([changed(one, logit_bias=NONE)])[0] for one in asked if engine.flush()]
        assert list(counts(engine)[:2]) == [0, 0]
        for i in (1, 4):
            engine.flush()
            assert same(engine.generate(asked[i : i + 1])[0], wanted[i])
            assert same(engine.generate(asked[i : i + 1])[0], wanted[i])  # with a cached prompt
        for order in (slice(None), slice(None, None, -1)):
            assert all(map(same, engine.generate(asked[order]), wanted[order]))
        drafted, accepted, _ = counts(engine)
        assert 20 < accepted < drafted - 20
        assert engine.stats()["preemptions"] > 0 and unused(engine)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", ["glm4_moe", *(pytest.param(case, marks=pytest.mark.mesh) for case in ("deepseek_v3", "qwen3_next"))]
)
def test_drafts_change_no_bit(case):
    """None, and some that are accepted; alone, in company, with lost memory, behind cached prompts."""
    check_bits(case)


@pytest.mark.wide
@pytest.mark.mesh
def test_samples_are_those_of_drafts_from_texts():
    asked = requests("qwen3_next")[:6]
    with engine_of("qwen3_next") as one, engine_of("qwen3_next", predicts=False) as other:
        assert (one.draft_from, other.draft_from) == ("mtp", "text")
        assert all(map(same, one.generate(asked), other.generate(asked)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case, split",
    [
        pytest.param("glm4_moe", EngineMesh(tp=2), marks=pytest.mark.mesh),
        pytest.param("qwen3_next", EngineMesh(tp=2), marks=pytest.mark.mesh),
        pytest.param("deepseek_v3", EngineMesh(ep=3), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_drafts_change_no_bit_over_devices(case, split):
    check_bits(case, mesh=split)


@pytest.mark.wide
@pytest.mark.mesh
def test_keys_and_values_in_eight_bits():
    check_bits("glm4_moe", kept="float8")


@pytest.mark.mesh
def test_pages_are_updated_in_place_and_are_what_a_plan_says():
    config, params, w = model("qwen3_next", 96)
    engine = Engine(config, {**params, "mtp": w}, slots=4, context=4 * CONTEXT, page=PAGE, draft=WIDTH)
    device, slots = engine.device, engine._slots
    compiled = decode.decode.lower(
        device.weights, device.held, slots._state, slots.cache.table_KSX, 5, device.tables, device.no_mask_SM,
        device.known, config=slots.config, of_layer=device.of_layer, steps=8, width=WIDTH,
    ).compile()  # fmt: skip
    size = sum(x.nbytes for x in jax.tree.leaves(device.held))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size
    kinds = paging.kinds(mtp.records(config, True), 4 * CONTEXT, PAGE, 4)
    assert size == paging.size_of(kinds, paging.counts(kinds, 4, 4 * CONTEXT, PAGE, 8 * WIDTH, None), 4)
    own = sum(x.nbytes for x in jax.tree.leaves(device.weights["mtp"]))
    assert own == sum(generation.stored(leaf, 4) for leaf in param.leaf_list(mtp.table(config)))


def test_the_memory_for_caches_is_what_weights_with_the_layer_leave(monkeypatch):
    """Of two versions, and of caches with the layer's keys and values."""
    config, params, w = model("glm4_moe", 96)
    weights = 2 * sum(x.nbytes for x in jax.tree.leaves((params, w)))
    kinds = paging.kinds(mtp.records(config, True), CONTEXT, PAGE, 4)
    counts = paging.counts(kinds, 4, CONTEXT, PAGE, 4 * WIDTH, None)
    pages = 0.6 * paging.size_of(kinds, counts, 4)
    monkeypatch.setattr(budget.memory, "of_devices", lambda _: weights + pages / budget.USABLE)
    options, on = Options(slots=4, context=CONTEXT, draft=WIDTH, page=PAGE, steps=4), mesh_of()
    _, found = budget.pages(config, np.float32, options, on, True)
    assert found == paging.counts(kinds, 4, CONTEXT, PAGE, 4 * WIDTH, round(pages))
    less, found = budget.pages(config, np.float32, options, on)  # nothing for the layer
    assert found == paging.counts(less, 4, CONTEXT, PAGE, 4 * WIDTH, None)


@pytest.mark.mesh
def test_new_weights_come_without_the_layer_or_with_it():
    """It stays as it is without, also while weights are released."""
    config, params, w = model("glm4_moe", 96)
    other = jax.tree.map(lambda x: x * 1.25, w)
    held = lambda engine: np.asarray(engine.device.weights["mtp"]["mtp_norm"])
    [asked] = requests("glm4_moe")[:1]
    with engine_of("glm4_moe") as engine:
        [wanted] = engine.generate([asked])
        first = held(engine)
        engine.load(params, "again")
        assert np.array_equal(held(engine), first)
        engine.load({**params, "mtp": other}, "other")
        assert np.array_equal(held(engine), 1.25 * first)
        engine.release()
        engine.reclaim()
        engine.load(params, "back")
        assert np.array_equal(held(engine), 1.25 * first)
        assert same(engine.generate([asked])[0], wanted)
        with pytest.raises(ValueError, match="mtp.stacks.0.mtp_norm must be"):
            cut = {**w["stacks"][0], "mtp_norm": w["stacks"][0]["mtp_norm"][:, :5]}
            engine.stage({**params, "mtp": {"stacks": [cut]}})


@pytest.mark.mesh
def test_a_checkpoint_is_served_with_its_layer(tmp_path, capsys, monkeypatch):
    """By `areax serve`; exports have the layer's tensors as they were."""
    import servers

    tokens = tokenizer.character("0123456789+")
    config = dataclasses.replace(model("glm4_moe", len(tokens))[0], eos=(tokens.eos_token_id,))
    _, params, w = exact("glm4_moe", len(tokens))
    held = write(tmp_path, config, params, w, tokens)
    own = [name for name in held if name.startswith("model.layers.2.")]
    with servers.embedded(tmp_path, context=128, slots=2, draft=WIDTH) as remote:
        assert "drafts by multi-token prediction" in remote.line
        assert "drafts_from_mtp" in remote.ok("/metrics")
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True},
        }
        made = remote.ok("/generate", body)
        [state] = remote.ok("/server_info")["internal_states"]
        assert len(made["output_ids"]) == 60 and state["accepted"] >= 40
        hf.save(tmp_path / "out", *hf.load(tmp_path))
        written = safetensors.read(tmp_path / "out")
        assert len(own) > 20 and all(np.array_equal(written[name], held[name]) for name in own)
        remote.ok("/update_weights_from_disk", {"model_path": str(tmp_path / "out"), "weight_version": "B"})
        assert len(remote.ok("/generate", body)["output_ids"]) == 60
