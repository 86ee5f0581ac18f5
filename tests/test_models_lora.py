"""Adapters: a merged model in another form, the same on every mesh, trained over a base that stays as it is."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import tiny_families
import torch

from areax import models
from areax.adapters import orbax, peft
from areax.core import losses, metrics, optim, packing, param, step
from areax.models import lora
from areax.models.layers.linear import linear
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0])
FAMILIES = {
    "qwen3": COMMON | dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen3_moe": COMMON | EXPERTS | dict(model_type="qwen3_moe", norm_topk_prob=True),
    "experts": COMMON | EXPERTS | dict(model_type="qwen3_moe", mlp_only_layers=[]),
    "qwen2_moe": COMMON | EXPERTS | dict(model_type="qwen2_moe", shared_expert_intermediate_size=40),
}
FAMILIES["dora"] = FAMILIES["qwen3"]
LAYOUTS = {
    "fsdp8": mesh.Layout(fsdp=8), "fsdp2 tp4": mesh.Layout(fsdp=2, tp=4), "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2),
    "fsdp2 ep4": mesh.Layout(fsdp=2, ep=4), "cp2 ep2 tp2": mesh.Layout(cp=2, ep=2, tp=2),
}  # fmt: skip
SPEC = lora.Lora(rank=3, alpha=2.0)
SPECS = {"dora": lora.Lora(rank=3, alpha=2.0, dora=True)}  # of the others it is SPEC
LENGTH = 32


@cache
def model(family, spec=None):
    """(config, base, table of the adapters, adapters of which neither factor is zero)."""
    spec = spec or SPECS.get(family, SPEC)
    config = models.config_from_hf(FAMILIES[family])
    base = tiny.weights(models.table(config), 0.25)
    table = lora.table(models.table(config), spec)
    return config, base, table, tiny.weights(table, 0.25, seed=1)


def by_hand(base, adapters, scale):
    """W + scale B A in float64, for each weight that has factors; with magnitudes m, rows of these lengths."""
    wide = lambda x: np.asarray(x, np.float64)

    def whole(w, pairs, name):
        if f"{name}_a" not in pairs:
            return w
        a, b, m = (wide(pairs[key]) if (key := f"{name}_{part}") in pairs else None for part in "abm")
        total = wide(w) + scale * np.einsum("...or,...ri->...oi", b, a)
        return total if m is None else total * m[..., None] / np.linalg.norm(total, axis=-1, keepdims=True)

    stacks = [
        {name: whole(w, pairs, name) for name, w in weights.items()}
        for weights, pairs in zip(base["stacks"], adapters["stacks"], strict=True)
    ]
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {**base, "stacks": stacks})


def tokens():
    return np.random.default_rng(0).integers(0, 64, (2, 17))


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "dora"])
def test_adapters_equal_merged_weights(family):
    """The factors beside a weight act as their product on top of it, in every kind of layer."""
    config, base, _, adapters = model(family)
    spec = SPECS.get(family, SPEC)
    forward = jax.jit(partial(models.forward, token_BT=tokens(), config=config))
    wanted = by_hand(base, adapters, 2 / 3)
    for x, y in zip(*map(jax.tree.leaves, (lora.merge(base, adapters, spec), wanted)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    logits = forward(wanted)
    scale = float(jnp.abs(logits).max())
    np.testing.assert_allclose(forward(lora.join(base, adapters, spec)), logits, atol=1e-5 * scale)
    assert float(jnp.abs(forward(base) - logits).max()) > 0.1 * scale


@pytest.mark.slow
def test_new_adapters_leave_the_model_unchanged():
    config, base, table, _ = model("qwen3")
    adapters = param.init(jax.random.key(0), table)
    a, b = adapters["stacks"][0]["down_a"], adapters["stacks"][0]["down_b"]
    assert a.shape == (2, 3, 48) and b.shape == (2, 32, 3) and not b.any()
    assert float(jnp.abs(a).max()) <= 48**-0.5
    np.testing.assert_allclose(float(jnp.std(a)), (3 * 48) ** -0.5, rtol=0.1)
    forward = partial(models.forward, token_BT=tokens()[:1, :4], config=config)
    with jax.disable_jit():  # else XLA fuses the two programs in ways that round differently
        np.testing.assert_array_equal(forward(lora.join(base, adapters, SPEC)), forward(base))


def test_dora_has_the_gradients_of_the_paper():
    """Equations 5 and 11 of arXiv:2402.09353 in float64, where the length of a row is a constant."""
    rng = np.random.default_rng(0)
    x, w, a, b, m, bias, slope = (rng.normal(size=s) for s in ((3, 7), (5, 7), (2, 7), (5, 2), 5, 5, (3, 5)))
    leaves = [torch.tensor(each, requires_grad=True) for each in (x, a, b, m)]
    v = torch.tensor(w) + 0.5 * leaves[2] @ leaves[1]
    y = leaves[0] @ (leaves[3][:, None] * v / v.norm(dim=1, keepdim=True).detach()).T + torch.tensor(bias)
    (y * torch.tensor(slope)).sum().backward()
    with jax.enable_x64(True):
        layer = lambda x, a, b, m: linear(x, param.LoRAWeight(jnp.asarray(w), a, b, 0.5, m), jnp.asarray(bias))
        got, back = jax.vjp(layer, *map(jnp.asarray, (x, a, b, m)))
        np.testing.assert_allclose(got, y.detach().numpy(), rtol=1e-12)
        for mine, leaf in zip(back(jnp.asarray(slope)), leaves, strict=True):
            np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("base", ["stored", "nf4"])
def test_new_dora_adapters_leave_the_model_unchanged(base):
    """Over weights as they are stored, and over the numbers that their codes stand for."""
    spec = dataclasses.replace(SPECS["dora"], base=base)
    config, params, table, adapters = model("qwen3", spec)
    params = lora.frozen(params, models.table(config), spec)
    zero = lambda leaf, x: jnp.zeros_like(x) if leaf.path.endswith("_b") else x
    start = lora.with_magnitudes(param.tree_map(zero, table, adapters), params, spec)
    plain = jax.tree.map(param.plain, params, is_leaf=param.composite)
    norms = np.linalg.norm(np.asarray(plain["stacks"][0]["down"], np.float64), axis=-1)
    np.testing.assert_allclose(start["stacks"][0]["down_m"], norms, rtol=1e-6)
    for x, y in zip(*map(jax.tree.leaves, (lora.merge(params, start, spec), plain)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    a, b = ([*tree["stacks"][0]] for tree in (start, adapters))
    assert a == b and lora.with_magnitudes(adapters, params, SPEC) == adapters


def test_dora_is_not_for_routed_experts():
    with pytest.raises(ValueError, match="lora.dora: must not be of routed experts, got expert_gate, expert_up, "):
        lora.table(models.table(model("experts")[0]), SPECS["dora"])
    with pytest.raises(ValueError, match="lora: rank must be above 0 if other lora options are set"):
        lora.Lora(dora=True)


def test_scale():
    assert lora.Lora(rank=4, alpha=8).scale == 2
    assert lora.Lora(rank=4, alpha=8, rslora=True).scale == 4


@pytest.mark.slow
def test_a_bf16_base_stays_bf16():
    """Merging adds in fp32 and rounds once."""
    _, base, _, adapters = model("qwen3")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    same = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    merged, wanted = lora.merge(half, adapters, SPEC), by_hand(same, adapters, 2 / 3)
    for x, y in zip(*map(jax.tree.leaves, (merged, wanted)), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=2**-8, atol=1e-6)


def batch(rows, on=None):
    rng = np.random.default_rng(0)
    data = [
        supervised(rng.integers(0, 64, 3), rng.integers(0, 64, int(n)), sample=i, rollout=i, group=i)
        for i, n in enumerate(rng.integers(4, 25, 24))
    ]
    packed = packing.pack(data, LENGTH, rows=rows)
    return packed if on is None else batches.batch(packed, on)


def sgd_step(family, layout, dispatch="gather"):
    """(loss, adapters after a step of rate 1 over a frozen base) on a mesh."""
    config, base, table, adapters = model(family)
    spec = SPECS.get(family, SPEC)
    on, sgd, objective = mesh.make(layout), optax.sgd(1.0), losses.SFT()
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, table, on)
        frozen = jax.device_put(base, rules.of_params(models.table(config), on))
        score = lora.over_base(partial(models.score, config=config, run=models.Run(dispatch=dispatch)), spec)
        update = step.make_step(score, objective, sgd, shardings)
        start = step.init(jax.tree.map(jnp.copy, jax.device_put(adapters, shardings.params)), sgd, shardings)
        after, report = update(start, jax.jit(objective.prepare)(batch(8, on)), frozen)
        merged = lora.merge(frozen, after.params, spec)
        for x, y in zip(*map(jax.tree.leaves, (merged, frozen)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        return metrics.to_dict(report)["loss"], jax.tree.map(np.asarray, after.params)


one_device = cache(lambda family: sgd_step(family, mesh.Layout()))


OFTEN = [
    ("qwen3", "dp2 cp2 tp2", "gather"),
    ("dora", "fsdp2 tp4", "gather"),
    ("qwen3_moe", "fsdp2 ep4", "gather"),
    ("qwen3_moe", "cp2 ep2 tp2", "all_to_all"),
]
MESHES = [
    *((family, name, "gather") for family in ("qwen3", "dora") for name in ("fsdp8", "fsdp2 tp4", "dp2 cp2 tp2")),
    *(("qwen3_moe", name, "gather") for name in LAYOUTS),
    *((family, "cp2 ep2 tp2", "all_to_all") for family in ("qwen3_moe", "qwen2_moe")),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, name, dispatch",
    [pytest.param(*case, marks=pytest.mark.mesh if case in OFTEN else pytest.mark.wide) for case in MESHES],
)
def test_adapters_are_the_same_on_a_mesh(family, name, dispatch):
    loss, params = sgd_step(family, LAYOUTS[name], dispatch)
    wanted, reference = one_device(family)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    start = model(family)[3]
    for a, b, x in zip(*map(jax.tree.leaves, (params, reference, start)), strict=True):
        scale = float(np.abs(b - x).max())
        assert scale > 0 and float(np.abs(a - b).max()) <= 1e-5 * scale + 2e-7


def test_training_updates_only_the_adapters():
    config, base, table, _ = model("qwen3")
    before = jax.tree.map(np.asarray, base)
    adam = optim.make_optimizer(optim.Optimizer(lr=1e-2), table)
    score = lora.over_base(partial(models.score, config=config), SPEC)
    update = step.make_step(score, losses.SFT(), adam)
    current, ready, said = step.init(param.init(jax.random.key(0), table), adam), losses.SFT().prepare(batch(8)), []
    for _ in range(3):
        current, report = update(current, ready, base)
        said.append(metrics.to_dict(report)["loss"])
    assert said[2] < said[1] < said[0]
    for x, y in zip(*map(jax.tree.leaves, (base, before)), strict=True):
        np.testing.assert_array_equal(x, y)
    held = sum(x.size for x in jax.tree.leaves(current.opt_state))
    assert held < 2 * param.count(table) + 10 < param.count(models.table(config))


@pytest.mark.slow
def test_no_gradient_of_the_base_is_computed():
    """The compiled backward pass writes nothing into arrays of the base's shapes, as it writes gradients of layers and
    experts when all weights train."""
    config, base, _, adapters = model("experts")
    ready = jax.tree.map(lambda x: x[0], batch(4))
    plain = partial(models.score, config=config, run=models.Run(remat="none"))

    def written(score, params, *frozen):
        gradient = jax.grad(lambda params, *frozen: jnp.sum(score(params, ready, *frozen).logp_BT))
        text = jax.jit(gradient).lower(params, *frozen).compile().as_text()
        return set(re.findall(r"= f32\[([\d,]+)\]\S* dynamic-update-slice\(", text))

    weights = base["stacks"][0]
    stacked = {",".join(map(str, weights[name].shape)) for name in ("q", "k", "o", "router")}
    experts = {",".join(map(str, weights[name].shape[1:])) for name in ("expert_gate", "expert_down")}
    assert stacked | experts <= written(plain, base)
    assert not (stacked | experts) & written(lora.over_base(plain, SPEC), adapters, base)


@pytest.mark.slow
def test_saved_and_restored(tmp_path):
    """Stacks without adapters among them."""
    spec = lora.Lora(rank=2, targets=("expert_*",))
    _, _, table, adapters = model("qwen3_moe", spec)
    assert not adapters["stacks"][0]
    adam = optim.make_optimizer(optim.Optimizer(), table)
    saved = step.init(adapters, adam)
    with orbax.open_store(tmp_path) as store:
        store.save(1, saved)
    with orbax.open_store(tmp_path) as store:
        got, _ = store.restore(jax.tree.map(jnp.zeros_like, saved))
        other = lora.table(models.table(model("qwen3_moe")[0]), lora.Lora(rank=3, targets=("expert_*",)))
        with pytest.raises(ValueError, match="must match the model and optimiser"):
            store.restore(
                step.init(param.init(jax.random.key(0), other), optim.make_optimizer(optim.Optimizer(), other))
            )
    assert jax.tree.structure(got) == jax.tree.structure(saved)
    for x, y in zip(*map(jax.tree.leaves, (got, saved)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_default_targets_are_those_that_a_family_has():
    """Latent attention has no k and v, and q only without a rank of its own."""
    sizes = dict(
        model_type="deepseek_v3", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2,
    )  # fmt: skip
    of = lambda rank: lora.targets(
        models.table(models.config_from_hf(sizes | {"q_lora_rank": rank})), lora.Lora(rank=1)
    )
    assert set(of(4)) == {"q_down", "q_up", "kv_down", "kv_up", "o", "gate", "up", "down"}
    assert set(of(None)) == {"q", "kv_down", "kv_up", "o", "gate", "up", "down"}


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "gemma4_text"])
def test_default_targets_are_those_that_peft_adapts(family):
    config = tiny_families.config(family)
    names = {*lora.targets(models.table(config), lora.Lora(rank=2))}
    assert {"q", "o"} < names and not {"expert_gate", "expert_up", "expert_down"} & names
    assert ("per_layer_out" in names) == (family == "gemma4_text")
    peft.modules(config, lora.Lora(rank=2))


def test_targets_are_matrices_of_layers():
    whole = models.table(model("qwen2_moe")[0])
    assert lora.targets(whole, lora.Lora(rank=1, targets=("v", "q"))) == ("q", "v")
    default = lora.targets(whole, lora.Lora())
    assert {"q", "down", "expert_up", "shared_gate"} < set(default)
    assert not {"router", "shared_router"} & set(default)
    for bad in ("embed", "norm1", "q_bias", "head", "nothing*"):
        with pytest.raises(ValueError, match=rf"lora.targets: each must name matrices .*, got '{re.escape(bad)}'"):
            lora.table(whole, lora.Lora(rank=1, targets=("q", bad)))
    biased = param.Table(
        {}, (param.Stack((0,), {"expert_up_bias": param.Param("experts expert_ffn", ("b",), None)}),), {}
    )
    with pytest.raises(ValueError, match="each must name matrices"):
        lora.targets(biased, lora.Lora(rank=1, targets=("expert_*",)))
    with pytest.raises(ValueError, match="lora.targets: each must name matrices"):
        lora.table(whole, lora.Lora(rank=1, targets=()))
    with pytest.raises(ValueError, match="lora.rank: must be at least 1 for adapters, got 0"):
        lora.table(whole, lora.Lora())
    with pytest.raises(ValueError, match="lora: rank must be above 0 if other lora options are set"):
        lora.Lora(alpha=8.0)
