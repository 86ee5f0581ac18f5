"""A mixture of experts against loops in float64, whatever the tokens choose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.models import grouped, moe

D, F, E, K = 12, 20, 6, 2


def choices(kind, rng, A=40):
    """[A, K] different experts a token."""
    if kind == "all choose one":
        return np.tile([[3, 1]], (A, 1))
    usable = [e for e in range(E) if e != 2] if kind == "one gets none" else range(E)
    return np.stack([rng.permutation(list(usable))[:K] for _ in range(A)])


def by_loops(x_AD, index_AK, weight_AK, gate_EFD, up_EFD, down_EDF):
    """float64, one token and one expert at a time."""
    wide = lambda x: np.asarray(x, np.float64)
    x_AD, weight_AK, gate_EFD, up_EFD, down_EDF = map(wide, (x_AD, weight_AK, gate_EFD, up_EFD, down_EDF))
    out = np.zeros(x_AD.shape)
    for a, x in enumerate(x_AD):
        for e, weight in zip(np.asarray(index_AK[a]), weight_AK[a], strict=True):
            gate, up = gate_EFD[e] @ x, up_EFD[e] @ x
            out[a] += weight * (down_EDF[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def dense(x_AD, index_AK, weight_AK, matrices):
    """The same by computing every expert for every token, to be differentiated."""
    gate, up = (jnp.einsum("AD,EFD->AEF", x_AD, m) for m in matrices[:2])
    out_AED = jnp.einsum("AEF,EDF->AED", jax.nn.silu(gate) * up, matrices[2])
    weight_AE = jnp.sum(jax.nn.one_hot(index_AK, E) * weight_AK[..., None], 1)
    return jnp.einsum("AED,AE->AD", out_AED, weight_AE)


@pytest.mark.parametrize("kind", ["any", "all choose one", "one gets none"])
def test_values_and_gradients(kind):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    index_AK = jnp.asarray(choices(kind, rng), jnp.int32)
    x, weight, matrices = draw(40, D), draw(40, K), (draw(E, F, D), draw(E, F, D), draw(E, D, F))
    got = moe.compute(x, index_AK, weight, matrices, 0)
    wanted = by_loops(x, index_AK, weight, *matrices)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    cotangent = draw(40, D)
    grads = [
        jax.jit(jax.grad(lambda x, w, m, fn=fn: jnp.sum(fn(x, index_AK, w, m) * cotangent), (0, 1, 2)))(
            x, weight, matrices
        )
        for fn in (lambda *args: moe.compute(*args, 0), dense)
    ]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))
    if kind == "one gets none":
        assert not np.any(grads[0][2][0][2])


def test_parts_of_the_experts_add_up():
    """What devices with other experts compute sums to the whole."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    index_AK = jnp.asarray(choices("any", rng), jnp.int32)
    x, weight, matrices = draw(40, D), draw(40, K), (draw(E, F, D), draw(E, F, D), draw(E, D, F))
    whole = moe.compute(x, index_AK, weight, matrices, 0)
    parts = [moe.compute(x, index_AK, weight, [m[i : i + 2] for m in matrices], i) for i in (0, 2, 4)]
    np.testing.assert_allclose(sum(parts), whole, atol=1e-5 * float(np.abs(whole).max()))


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=200), st.integers(1, 5))
def test_every_pair_has_a_row_of_its_expert(expert, E):
    plan = grouped.plan(jnp.array(expert), E)
    rows, block = np.asarray(plan.row_P), len(plan.pair_R) // len(plan.expert_S)
    here = [p for p, e in enumerate(expert) if 0 <= e < E]
    assert len({int(rows[p]) for p in here}) == len(here)
    for p, e in enumerate(expert):
        if p in here:
            assert plan.pair_R[rows[p]] == p and plan.expert_S[rows[p] // block] == e
            assert rows[p] // block < plan.used
        else:
            assert rows[p] >= len(plan.pair_R)
    assert sum(int(p) < len(expert) for p in plan.pair_R) == len(here)


@pytest.mark.parametrize(
    "other", [partial(grouped.megablox, interpret=True), grouped.ragged_dot], ids=["megablox", "ragged_dot"]
)
@pytest.mark.parametrize("kind", ["any", "all choose one", "one gets none"])
def test_other_kernels_equal_blocked(other, kind):
    """Values and gradients; the kernel for TPUs is interpreted. Some pairs are for experts that are elsewhere."""
    rng = np.random.default_rng(0)
    expert_P = choices(kind, rng).reshape(-1) - 1
    plan = grouped.plan(jnp.asarray(expert_P), E - 1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    R = len(plan.pair_R)
    x_RD = jnp.where((plan.pair_R < len(expert_P))[:, None], draw(R, D), 0)
    w_EFD, dy_RF = draw(E - 1, F, D), draw(R, F)
    dy_RF = jnp.where((jnp.arange(R) < jnp.sum(plan.rows_E))[:, None], dy_RF, 0)
    run = lambda fn: jax.jit(lambda x, w: (lambda y, back: (y, *back(dy_RF)))(*jax.vjp(fn, x, w)))(x_RD, w_EFD)
    wanted = run(lambda x, w: grouped.matmul(x, w, plan))
    got = run(lambda x, w: other(x, w, plan.rows_E))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.parametrize(
    "fn, platform, words",
    [
        (grouped.megablox, "tpu", "tpu_custom_call"),
        (grouped.ragged_dot, "tpu", "ragged_dot"),
        (grouped.ragged_dot, "cuda", "ragged_dot"),
    ],
)
def test_kernels_are_lowered_for_their_platforms(fn, platform, words):
    """Forward and backward, for machines that are not at hand."""
    plan = grouped.plan(jnp.arange(64) % 4, 4)
    x_RD, w_EFD = jnp.zeros((len(plan.pair_R), 128), jnp.bfloat16), jnp.zeros((4, 256, 128), jnp.bfloat16)
    loss = jax.grad(lambda x, w: jnp.sum(fn(x, w, plan.rows_E).astype(jnp.float32)), (0, 1))
    text = jax.jit(loss).trace(x_RD, w_EFD).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(words) >= 2  # the gradients of both arguments


@pytest.mark.parametrize("kernel, where", [("megablox", "tpu"), ("ragged_dot", "gpu or tpu")])
def test_a_kernel_that_cannot_run_here_is_refused(kernel, where):
    plan = grouped.plan(jnp.arange(64) % 4, 4)
    with pytest.raises(ValueError, match=f"expert_kernel: {kernel} runs on {where}, got cpu; take blocked"):
        grouped.matmul(jnp.zeros((len(plan.pair_R), 8)), jnp.zeros((4, 8, 8)), plan, kernel)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_work_is_that_of_the_chosen_experts(tokens):
    """128 experts, 8 a token: rows computed against rows chosen."""
    rng = np.random.default_rng(0)
    index_AK = np.argsort(rng.random((tokens, 128)), -1)[:, :8]
    plan = grouped.plan(jnp.asarray(index_AK.reshape(-1)), 128)
    block = len(plan.pair_R) // len(plan.expert_S)
    assert int(plan.used) * block <= 1.5 * index_AK.size
