"""Pages that calls in C write, against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import hardware
from areax.models.layers import native
from areax.rollout.engine.programs import pool, pool_cpu

PAGES, K, H, C, V = 9, 4, 16, 32, 24  # of a page, with heads twice those of the model


def drawn(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.fixture(params=[jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def pages(request, compiled):
    return drawn(0, (PAGES, K, H, C), request.param), drawn(1, (PAGES, K, C, V), request.param)


def both(f, *args):
    """What f makes with calls in C, which are there, and without; arguments are given away."""
    assert pool.in_c()
    made = jax.jit(lambda *args: f(*args), donate_argnums=0)(jax.tree.map(jnp.copy, args[0]), *args[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "ready", lambda: False)
        return made, jax.jit(lambda *args: f(*args))(*args)


def same(made, expected):
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_tokens_are_written_to_their_places(pages):
    k, v = drawn(2, (5, 3, K // 2, H), jnp.float32), drawn(3, (5, 3, K // 2, V), jnp.float32)
    page, place = jnp.array([[1, 1, 2], [3, 3, 3], [7, 8, 8], [5, 5, 5], [6, 6, 6]]), jnp.arange(15).reshape(5, 3) * 2
    same(*both(lambda pages: pool.write_tokens(pages, k, v, page, place), pages))


def test_tpus_write_the_same_tokens_in_whole_pages(pages, monkeypatch):
    k, v = drawn(2, (5, 3, K // 2, H), jnp.float32), drawn(3, (5, 3, K // 2, V), jnp.float32)
    page, place = jnp.array([[1, 1, 2], [3, 3, 3], [7, 8, 8], [5, 5, 5], [6, 0, 0]]), jnp.arange(15).reshape(5, 3) * 2
    monkeypatch.setattr(native, "ready", lambda: False)
    write = lambda pages: pool.write_tokens(pages, k, v, page, place)
    expected = jax.jit(lambda pages: write(pages))(pages)
    monkeypatch.setattr(hardware, "platform", lambda: "tpu")
    lowered = jax.jit(lambda pages: write(pages)).lower(pages)
    same(lowered.compile()(pages), expected)
    assert f"tensor<5x{K}x{H}x{C}x" in lowered.as_text()  # pages, of which XLA keeps the layout


def test_chunks_are_written_to_the_start_of_pages(pages):
    k, v = drawn(2, (3, 17, K // 2, H), jnp.bfloat16), drawn(3, (3, 17, K // 2, V), jnp.bfloat16)
    same(*both(lambda pages: pool.write_chunks(pages, k, v, jnp.array([4, 8, 2])), pages))


def test_a_page_that_is_still_needed_is_not_changed(pages):
    k, v = drawn(2, (1, 1, K, H), jnp.float32), drawn(3, (1, 1, K, V), jnp.float32)
    before = jax.tree.map(np.asarray, pages)
    write = lambda pages: pool.write_tokens(pages, k, v, jnp.array([[3]]), jnp.array([[0]]))
    made = jax.jit(lambda pages: (*write(pages), *pages))(pages)
    same(made[2:], before)
    same(made[:2], write(pages))
    same(pages, before)


def test_page_0_is_zeros_whatever_memory_holds_and_takes_no_token(compiled):
    """Masked positions read it, such as those of drafts behind a sequence's last page: NaN times 0 would be NaN."""
    like = jax.ShapeDtypeStruct((PAGES, K, H, C), jnp.float32)
    for _ in range(20):
        jnp.full(like.shape, jnp.nan).block_until_ready().delete()
        keys = jax.jit(lambda: pool_cpu.untouched(like))()
        np.testing.assert_array_equal(keys[0], 0)
    token = jnp.full((1, 1, K // 2, H), 3.0)
    made = pool.write_tokens((keys, jnp.zeros((PAGES, K, C, H))), token, token, jnp.array([[0]]), jnp.array([[5]]))
    assert not jnp.any(made[0][0]) and not jnp.any(made[1])


def test_pages_are_copied_and_restored(pages):
    options = {"of_layer": (0,), "states": frozenset()}
    pairs, none = jnp.array([[[1, 4, 0], [2, 5, 0]]]), jnp.zeros((2, 1), jnp.int32)
    same(*(made[0] for made in both(lambda held: pool.copy.__wrapped__(held, pairs, none, none, **options), [pages])))
    saved, to = pool.read([pages], jnp.array([[1, 4]]), 0, **options), jnp.array([[7, 3]])
    restore = lambda held: pool.restore.__wrapped__(held, saved, to, 0, **options)
    same(*(made[0] for made in both(restore, [pages])))
