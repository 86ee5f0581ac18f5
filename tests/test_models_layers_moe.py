"""Layers with experts: against transformers' own, and with replayed choices against float64 loops."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from mixture import CONFIG, PARAMS, SCORE, SCORES, E, K, L, mix, mlp

from areax import models
from areax.core import losses, packing
from areax.models.attention import chunked
from areax.models.layer import mixers
from areax.models.layers import mlp as mlps
from areax.models.layers import moe
from areax.rollout.types import supervised

D, F = 12, 20


def weights(rng, *, shared):
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    w = {"router": draw(E, D), "expert_gate": draw(E, F, D), "expert_up": draw(E, F, D), "expert_down": draw(E, D, F)}
    if shared:
        w |= {"shared_gate": draw(9, D), "shared_up": draw(9, D), "shared_down": draw(D, 9)}
    return w | ({"shared_router": draw(1, D)} if shared == "gated" else {})


def by_loops(x_BTD, w, index_BTK=None, norm=True):
    """float64, one token and one expert at a time."""
    w = {name: x.astype(np.float64) for name, x in w.items()}
    matrices = [w[f"expert_{name}"] for name in ("gate", "up", "down")]
    out = np.zeros(x_BTD.shape)
    for at in np.ndindex(*x_BTD.shape[:2]):
        x = x_BTD[at].astype(np.float64)
        power = np.exp(w["router"] @ x - (w["router"] @ x).max())
        prob = power / power.sum()
        chosen = np.argsort(-prob)[:K] if index_BTK is None or index_BTK[at][0] < 0 else index_BTK[at]
        scale = prob[chosen].sum() if norm else 1.0
        out[at] = mix(x, chosen, prob[chosen] / scale, *matrices)
        if "shared_gate" in w:
            own = mlp(x, w["shared_gate"], w["shared_up"], w["shared_down"])
            out[at] += own / (1 + np.exp(-(w["shared_router"] @ x))) if "shared_router" in w else own
    return out


@partial(jax.jit, static_argnames="norm")
def ours(x_BTD, w, chosen_BTK, norm=True):
    routing = moe.Routing(chosen_BTK=chosen_BTK)
    return moe.mlp(x_BTD, w, moe.Router(K, normalise=norm), routing=routing)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("shared", ["", "plain", "gated"])
@pytest.mark.parametrize("norm", [True, False])
def test_a_layer(shared, norm):
    rng = np.random.default_rng(0)
    x_BTD, w = rng.normal(size=(2, 5, D)).astype(np.float32), weights(rng, shared=shared)
    wanted = by_loops(x_BTD, w, norm=norm)
    np.testing.assert_allclose(ours(x_BTD, w, None, norm), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_replayed_choices():
    """Experts as given, weights of the current router; a negative number leaves the choice to the token."""
    rng = np.random.default_rng(0)
    x_BTD, w = rng.normal(size=(2, 5, D)).astype(np.float32), weights(rng, shared="")
    index_BTK = np.stack([rng.permutation(E)[:K] for _ in range(10)]).reshape(2, 5, K).astype(np.int32)
    index_BTK[0, 3] = -1
    wanted = by_loops(x_BTD, w, index_BTK)
    np.testing.assert_allclose(ours(x_BTD, w, index_BTK), wanted, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(wanted - by_loops(x_BTD, w)).max() > 0.1 * np.abs(wanted).max()
    # The gradient reaches the router through the weights: central differences of the loop.
    cotangent = rng.normal(size=x_BTD.shape)
    total = lambda r: jnp.sum(ours(x_BTD, w | {"router": r}, index_BTK) * cotangent.astype(np.float32))
    got = np.asarray(jax.jit(jax.grad(total))(w["router"]))
    for at in ((0, 0), (3, 5), (5, 11)):
        step_ = np.zeros((E, D))
        step_[at] = 1e-5
        up, down = (
            np.sum(by_loops(x_BTD, {k: v.astype(np.float64) for k, v in w.items()} | {"router": w["router"] + s},
                            index_BTK) * cotangent) for s in (step_, -step_)
        )  # fmt: skip
        np.testing.assert_allclose(got[at], (up - down) / 2e-5, rtol=1e-4, atol=1e-4 * np.abs(got).max())
    assert np.isnan(ours(x_BTD, w, np.full_like(index_BTK, E))).all()  # experts that there are not


V3 = partial(moe.Router, 3, "sigmoid", normalise=True, eps=1e-20, scale=2.5, fp32=True)
GROUPS, SHARED = dict(n_group=3, topk_group=2), dict(n_shared_experts=2, routed_scaling_factor=2.5)
# transformers' layer, its options, ours, the activation
LAYERS: dict[str, tuple] = {
    "mixtral": ("MixtralSparseMoeBlock", {}, moe.Router(3, normalise=True), mlps.SILU),
    "deepseek_v2": ("DeepseekV2Moe", SHARED, moe.Router(3, scale=2.5, fp32=True), mlps.SILU),
    "deepseek_v2 groups": (
        "DeepseekV2Moe", SHARED | GROUPS | {"topk_method": "group_limited_greedy"},
        moe.Router(3, groups=3, kept_groups=2, group_score="max", scale=2.5, fp32=True), mlps.SILU,
    ),
    "deepseek_v3": ("DeepseekV3MoE", SHARED | GROUPS, V3(groups=3, kept_groups=2), mlps.SILU),
    "deepseek_v3 not normalised": (
        "DeepseekV3MoE", SHARED | GROUPS | {"norm_topk_prob": False}, V3(groups=3, kept_groups=2, normalise=False),
        mlps.SILU,
    ),
    "glm4_moe": ("Glm4MoeMoE", SHARED | {"n_group": 1, "topk_group": 1}, V3(), mlps.SILU),
    "minimax_m2": ("MiniMaxM2SparseMoeBlock", {}, moe.Router(3, "sigmoid", normalise=True), mlps.SILU),
    "gpt_oss": (
        "GptOssMLP", {"swiglu_limit": 2.0, "swiglu_alpha": 1.3}, moe.Router(3, normalise=True),
        mlps.Activation("clamped", 2.0, 1.3),
    ),
    "llama4_text": ("Llama4TextMoe", {}, moe.Router(3, "sigmoid", scaled_input=True), mlps.SILU),
    "nemotron_h": (
        "NemotronHMoE", SHARED | GROUPS | {"moe_shared_expert_intermediate_size": 28}, V3(groups=3, kept_groups=2),
        mlps.Activation("relu2"),
    ),
    "nemotron_h latent": (
        "NemotronHMoE", SHARED | {"moe_shared_expert_intermediate_size": 28, "moe_latent_size": 7}, V3(),
        mlps.Activation("relu2"),
    ),
}  # fmt: skip


def layer_of_transformers(name, dtype=torch.float32):
    """With all weights and buffers away from where they start."""
    sizes = dict(hidden_size=D, num_attention_heads=2, num_experts_per_tok=3, num_local_experts=12, n_routed_experts=12)
    widths = dict(intermediate_size=F, moe_intermediate_size=F)
    kind, options, _, _ = LAYERS[name]
    config = transformers.AutoConfig.for_model(name.split()[0], **sizes, **widths, **options)
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    layer, generator = getattr(modeling, kind)(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in (*layer.parameters(), *layer.buffers()):
            x.copy_(0.5 * torch.randn(x.shape, generator=generator))
    return layer.to(dtype)


OURS = {
    "gate.weight": "router", "router.weight": "router", "router.bias": "router_logit_bias",
    "fc1_latent_proj.weight": "latent_down", "fc2_latent_proj.weight": "latent_up",
}  # fmt: skip


def translated(name, named):
    """Weights or gradients of transformers' layer by our names."""
    out, turned = {}, name in ("gpt_oss", "llama4_text")
    for key, x in named.items():
        x = x.detach().numpy()
        head, _, last = key.removesuffix(".weight").rpartition(".")
        x = x.swapaxes(1, 2) if head == "experts" and turned and x.ndim == 3 else x
        if last.startswith("gate_up_proj"):
            halves = (x[:, ::2], x[:, 1::2]) if name == "gpt_oss" else np.split(x, 2, 1)
            out |= {f"expert_{half}{last[12:]}": x for half, x in zip(("gate", "up"), halves, strict=True)}
        elif head.endswith(("experts", "expert")):
            out[f"{'shared' if 'shared' in head else 'expert'}_{last.replace('_proj', '')}"] = x
        else:
            out[OURS.get(key, "router_bias")] = x
    return out


@partial(jax.jit, static_argnames=("router", "activation"))
def with_gradients(x_BTD, w, chosen_BTK, cotangent_BTD, router, activation):
    def total(x_BTD, w):
        out_BTD, report = moe.mlp(x_BTD, w, router, activation, routing=moe.Routing(chosen_BTK=chosen_BTK))
        return jnp.sum(out_BTD * cotangent_BTD), (out_BTD, report)

    grads, (out_BTD, report) = jax.grad(total, (0, 1), has_aux=True)(x_BTD, w)
    return out_BTD, *grads, report


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_transformers(name):
    """Values, gradients and statistics; and the same again with the experts that were chosen replayed."""
    layer, (_, _, router, activation) = layer_of_transformers(name), LAYERS[name]
    rng = np.random.default_rng(0)
    x_BTD, cotangent_BTD = rng.normal(size=(2, 2, 25, D)).astype(np.float32)
    theirs = torch.tensor(x_BTD, requires_grad=True)
    out = layer(theirs)
    out = (out[0] if isinstance(out, tuple) else out).reshape(theirs.shape)
    (out * torch.from_numpy(cotangent_BTD)).sum().backward()
    w = translated(name, layer.state_dict())
    wanted = {"out": out.detach().numpy(), "x": theirs.grad.numpy()}
    wanted |= translated(name, {key: x.grad for key, x in layer.named_parameters()})
    chosen_BTK = np.full((2, 25, 3), -1, np.int32)
    for _ in range(2):
        got, dx_BTD, dw, report = with_gradients(x_BTD, w, chosen_BTK, cotangent_BTD, router, activation)
        for key, x in wanted.items():
            ours = {"out": got, "x": dx_BTD, **dw}[key]
            np.testing.assert_allclose(ours, x, atol=1e-5 * np.abs(x).max(), err_msg=key)
        assert dw.keys() - wanted.keys() <= {"router_bias"} and not np.any(dw.get("router_bias", 0))
        chosen_BTK = np.asarray(report["experts"])[..., ::-1]
    np.testing.assert_array_equal(report["load"], np.bincount(chosen_BTK.reshape(-1), minlength=12))
    np.testing.assert_allclose(np.sum(report["prob"]), 50, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2"])
def test_routers_in_bfloat16(name):
    """What is rounded: DeepSeek computes the logits in fp32, MiniMax rounds them as it does any product."""
    layer, router = layer_of_transformers(name, torch.bfloat16), LAYERS[name][2]
    x_BTD = np.random.default_rng(0).normal(size=(1, 40, D)).astype(np.float32)
    bias = [layer.e_score_correction_bias] if name == "minimax_m2" else []
    with torch.no_grad():
        wanted = layer.gate(torch.tensor(x_BTD, dtype=torch.bfloat16), *bias)[0]
    w = {"router": jnp.asarray(layer.gate.weight.float().detach().numpy(), jnp.bfloat16)}
    logits_BTE, score_BTE = jax.jit(partial(moe.scores, router=router))(jnp.asarray(x_BTD, jnp.bfloat16), w)
    assert logits_BTE.dtype == score_BTE.dtype == jnp.float32
    rounded = jnp.array_equal(logits_BTE, logits_BTE.astype(jnp.bfloat16).astype(jnp.float32))
    assert rounded == (wanted.dtype == torch.bfloat16) == (not router.fp32)
    np.testing.assert_allclose(logits_BTE[0], wanted.float(), atol=1e-6 if router.fp32 else 2**-6)


def test_impossible_groups_are_refused():
    with pytest.raises(ValueError, match="kept_groups must be 1 to 3, the groups, got 4"):
        moe.Router(2, groups=3, kept_groups=4)


def samples(choose=None):
    rng = np.random.default_rng(0)
    draw = lambda k: rng.integers(0, 61, k)
    out = [supervised(draw(3), draw(k), sample=i, rollout=i, group=i) for i, k in enumerate((9, 4, 7, 9, 2, 8))]
    return out if choose is None else [s.replace(arrays={"routed_experts": ("input", choose(s))}) for s in out]


@jax.jit
def chosen_alone(params, token_T):
    """What each layer with experts chose for one sequence on its own, [T, L, K]."""
    T = len(token_T)
    index_BT, seen = jnp.arange(T)[None], []
    x = models.transformer.family(CONFIG).embed(params, token_T[None], CONFIG, "float32")
    mixer = mixers(CONFIG.records, index_BT)
    attend = lambda q, k, v: chunked.causal(q, k, v, jnp.ones((1, T), jnp.int32), index_BT)
    for stack in params["stacks"]:
        w = jax.tree.map(lambda a: a[0], stack)
        x, report = models.transformer.family(CONFIG).block(x, w, mixer(CONFIG.records[0], attend), CONFIG)
        seen += [report["experts"][0]] if report else []
    return jnp.stack(seen, 1)


@jax.jit
def loss_and_gradient(params, batch):
    def total(params):
        return losses.SFT().loss(SCORE(params, batch), batch)[0]

    return jax.value_and_grad(total)(params)


@pytest.mark.long
def test_replaying_the_routers_own_choice_changes_nothing():
    """In packed rows, where each sequence's choices were recorded alone; padding chooses for itself."""
    padded = lambda s: np.pad(s.tokens, (0, 12 - len(s.tokens)))  # behind, where nothing looks
    own = samples(lambda s: np.asarray(chosen_alone(PARAMS, padded(s)))[: len(s.tokens)])
    free = samples(lambda s: np.full((len(s.tokens), L, K), -1, np.int32))
    ready = lambda data: jax.tree.map(lambda x: x[0], losses.SFT().prepare(packing.pack(data, 24, rows=4)))
    plain, g_plain = loss_and_gradient(PARAMS, ready(free))
    again, g_again = loss_and_gradient(PARAMS, ready(own))
    np.testing.assert_allclose(again, plain, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(g_again), jax.tree.leaves(g_plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()))


@pytest.mark.slow
def test_replayed_experts_replace_the_routers_choice():
    """Each token's experts are those of its own record, also behind other sequences of the row."""
    rng = np.random.default_rng(5)
    other = samples(lambda s: np.stack([rng.permutation(E)[:K] for _ in range(len(s.tokens) * 2)]).reshape(-1, 2, K))
    batch = packing.pack(other, 24, rows=4)
    scores = SCORES(PARAMS, batch)
    load_LE = np.asarray(scores.aux["load"]).sum(0)
    for layer in range(2):
        every = np.concatenate([s.arrays["routed_experts"][1][:, layer].reshape(-1) for s in other])
        np.testing.assert_array_equal(load_LE[layer], np.bincount(every, minlength=E))
    # alone, and recorded of all layers, as servers do it: the one without experts is passed over
    none = lambda x: np.insert(x, 1, -1, axis=1)
    every = [s.replace(arrays={"routed_experts": ("input", none(s.arrays["routed_experts"][1]))}) for s in other]
    for s, got in zip(every, packing.unpack(scores.logp_BT, batch, other), strict=True):
        one = packing.pack([s], 24, rows=1)
        wanted = packing.unpack(SCORES(PARAMS, one).logp_BT, one, [s])[0]
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    bad = samples(lambda s: np.zeros((len(s.tokens), 5, K), np.int32))
    with pytest.raises(ValueError, match=r"2 layers with experts, 2 experts per token\], got \[5, 2\]"):
        SCORES(PARAMS, packing.pack(bad, 24, rows=2))
