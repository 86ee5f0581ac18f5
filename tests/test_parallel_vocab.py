"""Embedding and head on a mesh: numbers and gradients of one device, and what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from areax.parallel import mesh, rules, vocab

B, T, V, D = 8, 6, 32, 16
LAYOUTS = mesh.Layout(fsdp=2, ep=2, tp=2), mesh.Layout(dp=2, cp=2, fsdp=2), mesh.Layout(fsdp=8)


def loss(tables, token_BT, dtype, needed_only=False, masked=False):
    """A sum that reads the embedding of every token, and every entry of the head, but no prediction at the first
    position of a row."""
    x_BTD = vocab.take(tables["embed"], token_BT, dtype)
    ones_BT = jnp.ones(token_BT.shape, jnp.float32)
    needed_BT = jnp.broadcast_to(jnp.arange(T)[None] > 0, token_BT.shape) if needed_only else None
    target_BT = token_BT[:, ::-1]
    kept_BTK = jnp.stack([target_BT, (target_BT + 3) % V, (target_BT * 5 + 1) % V], -1) if masked else None
    logp_BT, entropy_BT, _, _ = vocab.score(
        x_BTD, tables["head"], target_BT, temperature_BT=ones_BT, kept_BTK=kept_BTK, needed_BT=needed_BT, chunk=2
    )
    return jnp.sum(logp_BT * jnp.arange(T, dtype=jnp.float32)[None]) + jnp.sum(entropy_BT[:, 1:])


def given():
    rng = np.random.default_rng(0)
    tables = {name: rng.standard_normal((V, D)).astype(np.float32) for name in ("embed", "head")}
    return tables, rng.integers(0, V, (B, T)).astype(np.int32)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype, near, masked", [
    ("float32", 1e-5, False), ("bfloat16", 2e-2, False), ("float32", 1e-5, True),
])  # fmt: skip
def test_numbers_and_gradients_are_those_of_one_device(layout, dtype, near, masked):
    """Gradients are summed in fp32 in either dtype; matmuls in bf16 round."""
    tables, token_BT = given()
    step = jax.jit(jax.value_and_grad(loss), static_argnums=(2, 3, 4))
    wanted, gradient = step(tables, token_BT, dtype, False, masked)
    on = mesh.make(layout)
    with jax.set_mesh(on):
        where = NamedSharding(on, rules.spec(vocab.STORED))
        rows = NamedSharding(on, rules.spec(("batch", "seq")))
        got, parts = step(jax.device_put(tables, where), jax.device_put(token_BT, rows), dtype, True, masked)
    np.testing.assert_allclose(got, wanted, rtol=near)
    for name, x in gradient.items():
        assert parts[name].dtype == jnp.float32
        np.testing.assert_allclose(parts[name], x, atol=near * np.abs(x).max(), err_msg=name)


def test_an_embedding_is_not_gathered_and_a_head_in_the_dtype_of_the_computation():
    tables, token_BT = given()
    on = mesh.make(mesh.Layout(fsdp=8))
    with jax.set_mesh(on):
        placed = jax.device_put(tables, NamedSharding(on, rules.spec(vocab.STORED)))
        text = jax.jit(jax.grad(loss), static_argnums=2).lower(placed, token_BT, "bfloat16").as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    results = sorted(line.rpartition("-> ")[2] for line in gathers)
    assert results == sorted([f"tensor<{B}x{T}xi32>", f"tensor<{D}x{V}xbf16>"])


@pytest.mark.slow
def test_chunks_that_nobody_needs_are_left_out_over_tp_too():
    """Every device computes as many as the one that needs the most, since its chunks hold collectives."""
    tables, token_BT = given()
    needed_BT = np.zeros((B, T), bool)
    needed_BT[0], needed_BT[5, 0] = True, True  # of 4 rows on a device, 6 tokens of one and 1 of the other
    on, seen = mesh.make(mesh.Layout(dp=2, tp=2)), []

    def count(logits_CV, target_C, _):
        jax.debug.callback(lambda t: seen.append(len(t)), target_C)
        return logits_CV.max(-1)

    def loss(tables, token_BT, needed_BT):
        x_BTD, ones_BT = vocab.take(tables["embed"], token_BT, "float32"), jnp.ones(token_BT.shape, jnp.float32)
        logp_BT, entropy_BT, _, most_BT = vocab.score(
            x_BTD, tables["head"], token_BT[:, ::-1], temperature_BT=ones_BT, needed_BT=needed_BT, chunk=3,
            per_chunk=count,
        )  # fmt: skip
        return jnp.sum(jnp.where(needed_BT, 2 * logp_BT - entropy_BT + most_BT, 0))

    step = jax.jit(jax.value_and_grad(loss))
    wanted, gradient = step(tables, token_BT, needed_BT)
    seen.clear()
    with jax.set_mesh(on):
        where, rows = (NamedSharding(on, rules.spec(axes)) for axes in (vocab.STORED, ("batch", "seq")))
        got, parts = step(jax.device_put(tables, where), *jax.device_put((token_BT, needed_BT), rows))
    jax.effects_barrier()
    assert len(seen) == 4 * 2 * 2  # 2 of 8 chunks on each of four devices, forward and again backward
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for name, x in gradient.items():
        np.testing.assert_allclose(parts[name], x, atol=1e-5 * np.abs(x).max(), err_msg=name)
