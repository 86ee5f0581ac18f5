"""A mixture of experts against loops in float64, whatever the tokens choose."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import triton_ir
from hypothesis import given
from hypothesis import strategies as st
from mixture import E, K

from areax.core.param import LoRAWeight, merged
from areax.models.layers import blockwise, grouped, grouped_triton, mlp, moe

D, W = 12, 20
compute, plan_of = jax.jit(moe.compute), jax.jit(grouped.plan, static_argnums=1)
pieces_of = jax.jit(blockwise.pieces, static_argnums=1)


def choices(kind, rng, A=40):
    """[A, K] different experts a token."""
    if kind == "all choose one":
        return np.tile([[3, 1]], (A, 1))
    usable = [e for e in range(E) if e != 2] if kind == "one gets none" else range(E)
    index_AK = np.stack([rng.permutation(list(usable))[:K] for _ in range(A)])
    return np.where(index_AK == 1, -1, index_AK) if kind == "some are elsewhere" else index_AK


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def clamped(gate, up):
    gate = gate.clamp(max=2.0)
    return (up.clamp(-2.0, 2.0) + 1) * gate * torch.sigmoid(1.3 * gate)


# The hidden layer of experts of each kind, in torch; whether they have a gate, and biases.
KINDS = {
    "silu": (mlp.SILU, lambda gate, up: torch.nn.functional.silu(gate) * up, True, False),
    "gelu with biases": (mlp.Activation("gelu_tanh"), lambda gate, up: gelu(gate) * up, True, True),
    "relu2 without a gate": (mlp.Activation("relu2"), lambda up: torch.relu(up) ** 2, False, False),
    "silu without a gate, with biases": (mlp.SILU, torch.nn.functional.silu, False, True),
    "clamped with biases": (mlp.Activation("clamped", 2.0, 1.3), clamped, True, True),
}


def weights(kind, rng):
    _, _, gated, biased = KINDS[kind]
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    w = {name: draw(E, W, D) for name in ("gate", "up") if name == "up" or gated} | {"down": draw(E, D, W)}
    return w | {f"{name}_bias": draw(E, W) for name in ("gate", "up") if name in w and biased}


def by_torch(kind, cotangent, args, index_AK):
    """The output and the gradients in float64, one token and one expert at a time."""
    x_AD, weight_AK, w = jax.tree.map(lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True), args)
    out = [torch.zeros(D, dtype=torch.float64)] * len(x_AD)
    for (a, k), e in np.ndenumerate(index_AK):
        halves = [w[name][e] @ x_AD[a] + w.get(f"{name}_bias", [0] * E)[e] for name in ("gate", "up") if name in w]
        if e >= 0:
            out[a] = out[a] + weight_AK[a, k] * (w["down"][e] @ KINDS[kind][1](*halves))
    given = (torch.stack(out) * torch.from_numpy(cotangent)).sum()
    leaves, structure = jax.tree.flatten((x_AD, weight_AK, w))
    grads = torch.autograd.grad(given, leaves)
    return torch.stack(out).detach().numpy(), jax.tree.unflatten(structure, [g.numpy() for g in grads])


@cache
def alone(kind):
    """f(x_AD, weight_AK, w, index_AK): the experts on one device."""
    return lambda x_AD, weight_AK, w, index_AK: moe.compute(x_AD, index_AK, weight_AK, w, 0, activation=KINDS[kind][0])


@partial(jax.jit, static_argnums=0)
def with_gradients(fn, cotangent, args, more):
    """fn(*args, more) and its gradients to `args`."""
    out, back = jax.vjp(lambda *args: fn(*args, more), *args)
    return out, back(cotangent)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", ["any", "all choose one", "one gets none", "some are elsewhere"])
def test_values_and_gradients(chosen, kind):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    index_AK = choices(chosen, rng)
    args, cotangent = (draw(40, D), draw(40, K), weights(kind, rng)), draw(40, D)
    got, wanted = with_gradients(alone(kind), cotangent, args, index_AK), by_torch(kind, cotangent, args, index_AK)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))
    if chosen == "one gets none":
        assert not np.any(got[1][2]["up"][2])


@pytest.mark.slow
def test_outputs_of_expert_shards_add_up():
    """What devices with other experts compute sums to the whole."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    index_AK = choices("any", rng)
    x, weight, w = draw(40, D), draw(40, K), weights("silu", rng)
    whole = compute(x, index_AK, weight, w, 0)
    parts = [compute(x, index_AK, weight, {name: m[i : i + 2] for name, m in w.items()}, i) for i in (0, 2, 4)]
    np.testing.assert_allclose(sum(parts), whole, atol=1e-5 * float(np.abs(whole).max()))


@pytest.mark.slow
@given(
    st.lists(st.integers(-1, 5), max_size=200), st.integers(-1, 5), st.sampled_from([1, 30, 203]),
    st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_every_pair_has_a_row_of_its_expert(drawn, rest, length, E):
    """Of few lengths, since each is compiled: those that are drawn and the same expert for the rest."""
    expert = (drawn + [rest] * length)[:length]
    plan = jax.tree.map(np.asarray, plan_of(np.array(expert), E))
    rows, block = plan.row_P, len(plan.pair_R) // len(plan.expert_S)
    here = [p for p, e in enumerate(expert) if 0 <= e < E]
    assert len({int(rows[p]) for p in here}) == len(here)
    for p, e in enumerate(expert):
        if p in here:
            assert plan.pair_R[rows[p]] == p and plan.expert_S[rows[p] // block] == e
            assert rows[p] // block < plan.used
        else:
            assert rows[p] >= len(plan.pair_R)
    assert sum(int(p) < len(expert) for p in plan.pair_R) == len(here)


def blocked(x_RD, w_EFD, plan):
    return grouped.matmul(x_RD, w_EFD, plan)


def megablox(x_RD, w_EFD, plan):
    return grouped.megablox(x_RD, w_EFD, plan.rows_E, interpret=True)


def ragged_dot(x_RD, w_EFD, plan):
    return grouped.ragged_dot(x_RD, w_EFD, plan.rows_E)


@pytest.mark.parametrize("other", [megablox, ragged_dot], ids=["megablox", "ragged_dot"])
@pytest.mark.parametrize("kind", ["any", "all choose one", "one gets none"])
def test_other_kernels_equal_blocked(other, kind):
    """Values and gradients; the kernel for TPUs is interpreted. Some pairs are for experts that are elsewhere."""
    rng = np.random.default_rng(0)
    expert_P = choices(kind, rng).reshape(-1) - 1
    plan = plan_of(expert_P, E - 1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    R = len(plan.pair_R)
    x_RD = np.where((np.asarray(plan.pair_R) < len(expert_P))[:, None], draw(R, D), 0)
    w_EFD, dy_RF = draw(E - 1, W, D), draw(R, W)
    dy_RF = np.where((np.arange(R) < np.sum(plan.rows_E))[:, None], dy_RF, 0)
    got, wanted = (jax.tree.leaves(with_gradients(fn, dy_RF, (x_RD, w_EFD), plan)) for fn in (other, blocked))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def triton(x_RD, w_EFD, plan, interpret=False):
    return grouped_triton.matmul(x_RD, w_EFD, plan.expert_S, plan.used, plan.rows_E, interpret)


@pytest.mark.parametrize(
    "interpret", [pytest.param(True, marks=pytest.mark.kernel), pytest.param(False, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("D, F", [(32, 48), (144, 208)])  # matrices of one tile, and of several
@pytest.mark.parametrize("kind", ["any", "all choose one", "one gets none"])
def test_the_kernel_for_gpus_equals_blocked(kind, D, F, interpret):
    """Values and gradients, interpreted or on a GPU, also in rows behind the last that is used."""
    rng = np.random.default_rng(0)
    expert_P = choices(kind, rng, 300).reshape(-1) - 1
    plan = plan_of(expert_P, E - 1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x_RD = np.where((np.asarray(plan.pair_R) < len(expert_P))[:, None], draw(len(plan.pair_R), D), 0)
    w_EFD, dy_RF = draw(E - 1, F, D), draw(len(plan.pair_R), F)
    kernel = partial(triton, interpret=interpret)
    got, wanted = (jax.tree.leaves(with_gradients(fn, dy_RF, (x_RD, w_EFD), plan)) for fn in (kernel, blocked))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_separate_matmuls_equal_the_fused_blockwise_mixture(kind, monkeypatch):
    """As kernels compute it, with the gradients of all that goes in."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    args = draw(40, D), draw(40, K), weights(kind, rng)
    index_AK, cotangent = choices("some are elsewhere", rng), draw(40, D)
    wanted = with_gradients(alone(kind), cotangent, args, index_AK)
    monkeypatch.setattr(grouped, "choose", lambda kernel, plan, w_EFD: "ragged_dot")
    by_products = lambda *args: alone(kind)(*args)
    for a, b in zip(
        jax.tree.leaves(with_gradients(by_products, cotangent, args, index_AK)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["relu2 without a gate", "clamped with biases"])
def test_adapted_experts_equal_merged_ones(kind):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    w, index_AK, x_AD, weight_AK = weights(kind, rng), choices("any", rng), draw(40, D), draw(40, K)
    pair = lambda w: LoRAWeight(w, draw(E, 3, w.shape[2]), draw(E, w.shape[1], 3), 0.5)
    adapted = {name: x if name.endswith("bias") else pair(x) for name, x in w.items()}
    both = {name: merged(x) if isinstance(x, LoRAWeight) else x for name, x in adapted.items()}
    got, wanted = (jax.jit(alone(kind))(x_AD, weight_AK, each, index_AK) for each in (adapted, both))
    np.testing.assert_allclose(got, wanted, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "fn, platform, words",
    [
        (triton, "cuda", "__gpu$xla.gpu.triton"),
        (lambda x, w, plan: grouped.megablox(x, w, plan.rows_E), "tpu", "tpu_custom_call"),
        (ragged_dot, "tpu", "ragged_dot"),
        (ragged_dot, "cuda", "ragged_dot"),
    ],
)
def test_kernels_are_lowered_for_their_platforms(fn, platform, words, monkeypatch):
    """Forward and backward, for machines that are not at hand."""
    verified = triton_ir.verify(monkeypatch)
    plan = plan_of(np.arange(256) % 4, 4)
    x_RD, w_EFD = jnp.zeros((len(plan.pair_R), 128), jnp.bfloat16), jnp.zeros((4, 256, 128), jnp.bfloat16)
    loss = jax.grad(lambda x, w: jnp.sum(fn(x, w, plan).astype(jnp.float32)), (0, 1))
    text = jax.jit(loss).trace(x_RD, w_EFD).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(words) >= 2  # the gradients of both arguments
    assert len(verified) >= 2 or fn is not triton


@pytest.mark.parametrize("kernel, where", [("triton", "gpu"), ("megablox", "tpu"), ("ragged_dot", "gpu or tpu")])
def test_a_kernel_that_cannot_run_here_is_refused(kernel, where):
    plan = plan_of(np.arange(64) % 4, 4)
    with pytest.raises(ValueError, match=f"expert_kernel: {kernel} runs on {where}, got cpu; use blocked"):
        grouped.matmul(jnp.zeros((len(plan.pair_R), 8)), jnp.zeros((4, 8, 8)), plan, kernel)


def test_tpus_load_no_float16(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    plan, w_EFD = plan_of(np.arange(64) % 4, 4), jnp.zeros((4, 8, 8), jnp.bfloat16)
    assert grouped.choose("auto", plan, w_EFD) == "megablox"
    assert grouped.choose("auto", plan, w_EFD.astype(jnp.float16)) == "blocked"
    with pytest.raises(ValueError, match="megablox needs bfloat16 or float32, got float16; use blocked"):
        grouped.choose("megablox", plan, w_EFD.astype(jnp.float16))


def test_sizes_that_the_kernel_for_gpus_cannot_cut_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    few, many = plan_of(np.arange(64) % 4, 4), plan_of(np.arange(256) % 4, 4)
    words = r"triton needs blocks and matrices in multiples of 16, got 8 rows and \[32, 48\]; use blocked"
    with pytest.raises(ValueError, match=words):
        grouped.choose("triton", few, jnp.zeros((4, 32, 48)))
    with pytest.raises(ValueError, match=r"got 32 rows and \[32, 40\]"):
        grouped.choose("triton", many, jnp.zeros((4, 32, 40)))
    assert grouped.choose("triton", many, jnp.zeros((4, 32, 48))) == "triton"


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("tokens, most", [(256, 1.3), (1024, 1.1), (4096, 1.1)])
def test_work_is_that_of_the_chosen_experts(tokens, most):
    """128 experts, 8 a token: rows computed against rows chosen, in whole blocks and in pieces."""
    rng = np.random.default_rng(0)
    index_AK = np.argsort(rng.random((tokens, 128)), -1)[:, :8]
    plan = plan_of(index_AK.reshape(-1), 128)
    block = len(plan.pair_R) // len(plan.expert_S)
    assert int(plan.used) * block <= 1.5 * index_AK.size
    sizes = blockwise.sizes(block)
    _, _, begin = pieces_of(plan, sizes)
    assert np.dot(sizes, np.diff(begin)) <= most * index_AK.size


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 2600), min_size=4, max_size=4), st.integers(1, 4), st.sampled_from([(8, 90), (256, 9000)])
)  # fmt: skip
def test_every_row_is_in_one_piece_of_its_expert(counts, some, how):
    """Experts of which some get no pair; rows of padding may be in a piece, those of another expert may not."""
    block, P = how
    expert_P = np.repeat(np.arange(4), np.array(counts) * (np.arange(4) < some))[:P]
    plan = jax.tree.map(np.asarray, plan_of(np.pad(expert_P, (0, P - len(expert_P)), constant_values=-1), 4))
    assert len(plan.pair_R) // len(plan.expert_S) == block
    sizes = blockwise.sizes(block)
    expert_T, row_T, begin = map(np.asarray, pieces_of(plan, sizes))
    seen = np.zeros(len(plan.pair_R), int)
    for i, rows in enumerate(sizes):
        for t in range(begin[i], begin[i + 1]):
            piece = slice(row_T[t], row_T[t] + rows)
            assert row_T[t] + rows <= len(seen)
            assert (plan.expert_S[np.arange(len(seen))[piece] // block] == expert_T[t]).all()
            seen[piece] += 1
    assert seen.max(initial=0) <= 1 and (seen[plan.pair_R < P] == 1).all()
