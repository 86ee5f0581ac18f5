"""Layers with experts: shared experts and replayed choices, against float64 loops from the definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixture import CONFIG, PARAMS, SCORE, SCORES, E, K, L, mix, mlp

from areax import models
from areax.core import losses, packing
from areax.models.attention import chunked
from areax.models.layers import moe, rope
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


@pytest.mark.parametrize("shared", ["", "plain", "gated"])
@pytest.mark.parametrize("norm", [True, False])
def test_a_layer(shared, norm):
    rng = np.random.default_rng(0)
    x_BTD, w = rng.normal(size=(2, 5, D)).astype(np.float32), weights(rng, shared=shared)
    wanted = by_loops(x_BTD, w, norm=norm)
    np.testing.assert_allclose(ours(x_BTD, w, None, norm), wanted, atol=1e-5 * np.abs(wanted).max())


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
    x = models.transformer.family(CONFIG).embed(params, token_T[None], "float32")
    cos, sin = rope.tables(index_BT, CONFIG.rope, CONFIG.head_dim)
    attend = lambda q, k, v: chunked.causal(q, k, v, jnp.ones((1, T), jnp.int32), index_BT)
    for stack in params["stacks"]:
        w = jax.tree.map(lambda a: a[0], stack)
        x, report = models.transformer.family(CONFIG).block(x, w, cos, sin, attend, CONFIG)
        seen += [report["experts"][0]] if report else []
    return jnp.stack(seen, 1)


@jax.jit
def loss_and_gradient(params, batch):
    def total(params):
        return losses.SFT().loss(SCORE(params, batch), batch)[0]

    return jax.value_and_grad(total)(params)


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
