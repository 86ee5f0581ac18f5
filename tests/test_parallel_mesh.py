"""A mesh changes where numbers are, not what they are: loss, metrics and gradients equal those of one device."""

import dataclasses
import re
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import tiny_families

from areax import models
from areax.core import balance, losses, metrics, packing, param, step
from areax.models.attention import chunked
from areax.models.attention.pattern import Pattern
from areax.parallel import batches as place
from areax.parallel import context, experts, mesh, ring, rules
from areax.rollout.types import Sample

FAMILIES = {name: tiny_families.hf(name) for name in tiny_families.FAMILIES}
FAMILIES["qwen3 window"] = tiny_families.hf("qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1)
LAYOUTS = {
    "dp8": mesh.Layout(dp=8), "fsdp8": mesh.Layout(fsdp=8), "fsdp2 tp4": mesh.Layout(fsdp=2, tp=4),
    "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2), "dp2 cp2 tp2 ring": mesh.Layout(dp=2, cp=2, tp=2),
    "cp8 gather": mesh.Layout(cp=8), "cp8 ulysses": mesh.Layout(cp=8), "cp8 ring": mesh.Layout(cp=8),
    "fsdp2 ep4": mesh.Layout(fsdp=2, ep=4), "ep8": mesh.Layout(ep=8), "cp2 ep2 tp2": mesh.Layout(cp=2, ep=2, tp=2),
}  # fmt: skip
SENT = {f"{name} all_to_all": LAYOUTS[name] for name in ("fsdp2 ep4", "ep8", "cp2 ep2 tp2")}  # of experts alone
OBJECTIVES = {
    "sft": losses.SFT(), "grpo": losses.GRPO(entropy={"coef": 0.01}, advantage={"std": "none"}),
    "balanced": balance.wrap(losses.SFT(), balance.Balance(load=0.1, z=0.01)),
    "sequences": losses.GSPO(
        correction={"level": "geometric", "action": "truncate"}, denominator="rollout", advantage={"std": "none"}
    ),
}  # fmt: skip
ROWS, LENGTH = 8, 48


def samples():
    """Sequences of unequal lengths, several a row, that cross the borders of cp; groups of 4 with rewards."""
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(rng.integers(5, 40, 32)):
        mask = np.arange(n) >= 3
        sampled = lambda x, otherwise=0, mask=mask: np.where(mask, x, otherwise)
        out.append(
            Sample(
                tokens=rng.integers(0, 64, n).astype(np.int32), mask=mask,
                logp=sampled(-rng.random(n) * 4).astype(np.float32),
                version=sampled(0, -1).astype(np.int32), turn=sampled(0, -1).astype(np.int32),
                rewards=((int(n) - 1, float(rng.random())),), group=i // 4, prompt=i // 4, sample=i, rollout=i,
            )
        )  # fmt: skip
    return out


@cache
def model(family):
    config = models.config_from_hf(FAMILIES[family])
    table = models.table(config)
    hf = FAMILIES[family]
    if "linear_attention" in hf.get("layer_types", ()):  # drawn at random, weights of delta nets multiply rounding
        return config, table, jax.jit(lambda key: param.init(key, table))(jax.random.key(1))

    def own(leaf, x):
        """Decays and time steps of Mamba as in a new model, for the same reason."""
        new = leaf.path.endswith(("decay_log", "dt_offset"))
        return leaf.param.init(jax.random.key(0), leaf.shape, x.dtype) if new else x

    return config, table, param.tree_map(own, table, tiny.weights(table, hf["initializer_range"], seed=1))


def run(name):
    """How attention crosses cp and tokens reach experts in a layout."""
    word = lambda method: next((word for word in name.split() if word in get_args(method)), "gather")
    return models.Run(cp=word(context.Method), dispatch=word(experts.Method))


def sgd_steps(family, objective, name, count):
    """(metrics of each step, parameters after it): SGD of rate 1 makes the change of the weights the gradient."""
    config, table, params = model(family)
    sgd = optax.sgd(1.0 if count == 1 else 0.1)
    on = mesh.make((LAYOUTS | SENT).get(name, mesh.Layout()))
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, table, on)
        score = partial(models.score, config=config, run=run(name))
        batch = place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on)
        scores = step.make_scores(score) if objective.needs_scores else lambda *_: None
        update = step.make_step(score, objective, sgd, shardings)
        state = step.init(jax.tree.map(jnp.copy, jax.device_put(params, shardings.params)), sgd, shardings)
        out = []
        for _ in range(count):
            ready = jax.jit(objective.prepare)(batch, scores(state.params, batch))
            state, report = update(state, ready)
            out.append((metrics.to_dict(report), jax.tree.map(np.asarray, state.params)))
    return out


@cache
def one_device(family, objective, count):
    return sgd_steps(family, OBJECTIVES[objective], "one", count)


def compare(got, wanted, start, steps=1):
    """Metrics, and the change of every weight, within 1e-5 of the largest change of its leaf."""
    (report, params), (expected, reference) = got, wanted
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        if np.isscalar(value):
            # atol: some are differences of log-probabilities of size 4 to 8, each of them rounded to 5e-7
            np.testing.assert_allclose(report[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert report[name]["counts"] == value["counts"], name
    for (path, a), b, x in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(reference), jax.tree.leaves(start), strict=True
    ):
        scale = float(np.abs(b - x).max())
        assert (scale > 0) != (path[-1].key == "router_bias"), jax.tree_util.keystr(path)
        # a weight of size 1 is rounded to 6e-8 whenever a step's change is added to it; biases of decays have size 7
        rounding = 2e-7 * max(1.0, float(np.abs(b).max()))
        assert float(np.abs(a - b).max()) <= 1e-5 * scale + steps * rounding, jax.tree_util.keystr(path)


# Which layouts a family meets under `mesh`: those that split what it has and others lack. `wide` has the rest.
OFTEN = {
    "qwen3": [x for x in LAYOUTS if x not in ("dp8", "fsdp2 ep4", "ep8")],  # without experts ep is like fsdp
    "qwen3 window": ["cp8 gather"],  # where positions are not split a window is a mask like others
    "qwen3_moe": ["fsdp2 tp4", "ep8", "cp2 ep2 tp2", "fsdp2 ep4 all_to_all", "cp2 ep2 tp2 all_to_all"],
    "qwen2": ["fsdp8"],  # biases
    "llama": ["fsdp2 tp4"],
    "seed_oss": ["fsdp2 tp4"],
    "qwen2_moe": ["cp2 ep2 tp2 all_to_all"],  # an expert for all tokens
    "glm4_moe": ["cp2 ep2 tp2 all_to_all"],
    "mixtral": ["fsdp2 ep4"],
    "deepseek_v2": ["fsdp2 tp4"],  # latent vectors, with heads of other sizes
    "deepseek_v3": ["dp2 cp2 tp2 ring", "cp8 ulysses"],
    "llama4_text": ["dp2 cp2 tp2 ring"],  # chunks, temperatures that grow with positions
    "gpt_oss": ["cp8 ulysses", "cp2 ep2 tp2 all_to_all"],  # sinks are split as heads, biases of experts as experts
    "minimax_m2": ["fsdp2 tp4"],  # norms over heads of all devices
    "olmo2": ["dp2 cp2 tp2"],
    "olmo3": ["cp8 ring"],
    "qwen3_5_text": ["dp2 cp2 tp2 ring"],  # delta nets are split by heads over tp and cp, not by position
    "qwen3_5_moe_text": ["fsdp2 ep4"],
    "qwen3_next": ["cp2 ep2 tp2"],  # parts of a tensor, by key head, are split over tp
    "nemotron_h": ["cp2 ep2 tp2 all_to_all"],  # and layers that are only experts or an MLP
    "gemma2": ["dp2 cp2 tp2 ring"],  # soft caps in attention and in the split vocabulary
    "gemma3_text": ["cp8 gather"],
    "gemma4_text": ["dp2 cp2 tp2 ring", "cp2 ep2 tp2"],  # keys of other layers, an input for each, experts beside MLPs
    "mistral": ["cp8 gather"],
    "ministral3": ["dp2 cp2 tp2 ring"],
    "smollm3": ["cp8 ulysses"],
    "granite": ["dp2 cp2 tp2 ring"],
    "phi3": ["fsdp2 tp4", "dp2 cp2 tp2 ring"],  # several weights in one tensor; rope by a sequence's length
    "glm4": ["fsdp2 tp4"],
}  # fmt: skip
# Of every family, under `wide`: each axis of a mesh.
ALWAYS = ["fsdp2 tp4", "dp2 cp2 tp2 ring"]
WITH_EXPERTS = ["cp2 ep2 tp2 all_to_all"]
ALL = {"qwen3": LAYOUTS, "qwen3_moe": LAYOUTS | SENT, "qwen3 window": [x for x in LAYOUTS if LAYOUTS[x].cp > 1]}
SCORED = {"qwen3": ("sft", "grpo"), "qwen3_moe": ("balanced", "grpo"), "olmo2": ("grpo",), "gemma2": ("grpo",)}
BALANCED = ("deepseek_v3", "glm4_moe", "nemotron_h")  # SFT and more


def cases():
    """Family, layout, objective. Of two objectives a layout has one under `mesh`, in turn, and the other under `wide`.

    One layout with three axes is in the everyday suite.
    """
    for family, hf in FAMILIES.items():
        mixture = getattr(models.config_from_hf(hf), "top_k", 0)
        layouts = ALL.get(family, [*ALWAYS, *WITH_EXPERTS * bool(mixture)])
        objectives = SCORED.get(family, ("balanced" if family in BALANCED else "sft",))
        often = OFTEN.get(family, ())
        for i, layout in enumerate(dict.fromkeys([*often, *layouts])):
            for k, objective in enumerate(objectives):
                case = family, layout, objective
                turn = layout in often and k == i % len(objectives)
                mark = [pytest.mark.mesh if turn else pytest.mark.wide]
                yield pytest.param(*case, marks=[] if case == ("qwen3", "dp2 cp2 tp2 ring", "grpo") else mark)


def test_every_family_meets_a_mesh_in_make_test_mesh():
    assert set(FAMILIES) - set(OFTEN) == {"kimi_k2"}  # another name of deepseek_v3


@pytest.mark.sweep
@pytest.mark.parametrize("family, layout, objective", list(cases()))
def test_a_step_equals_one_device(family, layout, objective):
    [got] = sgd_steps(family, OBJECTIVES[objective], layout, 1)
    [wanted] = one_device(family, objective, 1)
    compare(got, wanted, model(family)[2])


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("layout", ["cp8 gather", "dp2 cp2 tp2 ring"])
def test_sequence_statistics_are_summed_over_devices(layout):
    [got] = sgd_steps("qwen3", OBJECTIVES["sequences"], layout, 1)
    [wanted] = one_device("qwen3", "sequences", 1)
    compare(got, wanted, model("qwen3")[2])


@pytest.mark.sweep
@pytest.mark.parametrize("family, layout", [
    pytest.param("qwen3", "dp2 cp2 tp2 ring", marks=pytest.mark.mesh),
    pytest.param("qwen3_moe", "fsdp2 tp4", marks=pytest.mark.mesh),
    *(pytest.param(family, "dp2 cp2 tp2 ring", marks=pytest.mark.wide)
      for family in ("deepseek_v3", "gemma4_text", "nemotron_h")),
])  # fmt: skip
def test_three_steps_equal_one_device(family, layout):
    got, wanted = sgd_steps(family, losses.SFT(), layout, 3), one_device(family, "sft", 3)
    for steps, (a, b) in enumerate(zip(got, wanted, strict=True), 1):
        compare(a, b, model(family)[2], steps)


@pytest.mark.mesh
def test_replayed_experts_stay_with_their_tokens():
    """Where positions are split in zig-zag order and experts over devices, records still belong to their tokens."""
    config, table, params = model("qwen3_moe")
    rng = np.random.default_rng(3)
    draw = lambda n: np.argsort(rng.random((n, config.layers, 8)), -1)[..., : config.top_k].astype(np.int32)
    data = [s.replace(arrays={"routed_experts": ("input", draw(len(s.tokens)))}) for s in samples()]
    batch, out = packing.pack(data, LENGTH, rows=ROWS), []
    for name in ("one", "cp2 ep2 tp2 all_to_all"):
        on = mesh.make((LAYOUTS | SENT).get(name, mesh.Layout()))
        how = dataclasses.replace(run(name), cp="ring")
        with jax.set_mesh(on):
            scores = step.make_scores(partial(models.score, config=config, run=how))
            there = jax.device_put(params, rules.of_params(table, on))
            out.append(jax.tree.map(np.asarray, scores(there, place.batch(batch, on))))
    # as in `compare`: some are of size 9; records that are one token off differ by 6
    np.testing.assert_allclose(out[1].logp_BT, out[0].logp_BT, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[1].aux["load"], out[0].aux["load"])


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("how", get_args(context.Method))
def test_the_compiled_step_communicates_what_its_method_states(how):
    """Keys and values are gathered, traded or passed on; nothing of the size of a row's hidden states is gathered."""
    config, table, params = model("llama")
    on = mesh.make(mesh.Layout(cp=8))
    with jax.set_mesh(on):
        shardings = rules.of_state(optax.sgd(1.0), table, on)
        score = partial(models.score, config=config, run=models.Run(cp=how))
        update = step.make_step(score, losses.SFT(), optax.sgd(1.0), shardings)
        state = step.init(jax.device_put(params, shardings.params), optax.sgd(1.0), shardings)
        batch = jax.jit(losses.SFT().prepare)(place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on))
        text = update.lower(state, batch).compile().as_text()
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    gathered = {tuple(n for n in map(int, shape.split(",")) if n > 1) for shape in gathers}
    keys = {(ROWS, LENGTH, config.kv_heads, config.head_dim)} if how == "gather" else set()
    assert {shape for shape in gathered if np.prod(shape) >= ROWS * LENGTH * config.head_dim} == keys
    own = {"gather": "all-gather", "ulysses": "all-to-all", "ring": "collective-permute"}
    assert all((f" {call}(" in text) == (how == its) for its, call in own.items() if its != "gather")


@pytest.mark.parametrize("window, calls", [(None, "all-gather"), (7, "collective-permute"), (44, "all-gather")])
def test_gather_fetches_only_keys_within_the_window(window, calls):
    """Six positions a device: a window of 7 reaches one device, one of 44 all of them."""
    pattern = Pattern(window=window)
    causal = partial(chunked.causal, pattern=pattern)
    attend = partial(context.attention, causal, None, method="gather", pattern=pattern)
    x, place = jax.ShapeDtypeStruct((1, LENGTH, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    with jax.set_mesh(mesh.make(mesh.Layout(cp=8))):
        text = jax.jit(attend).lower(x, x, x, place, place).compile().as_text()
    assert {call for call in ("all-gather", "collective-permute") if f" {call}(" in text} == {calls}


def test_zig_zag_balances_the_work_of_devices():
    order = ring.order(32, 4)
    np.testing.assert_array_equal(np.sort(order), np.arange(32))
    assert {int(piece.sum()) for piece in order.reshape(4, -1)} == {sum(range(32)) // 4}
    with pytest.raises(ValueError, match="must be a multiple of 2 x cp = 8, got 36"):
        ring.order(36, 4)
