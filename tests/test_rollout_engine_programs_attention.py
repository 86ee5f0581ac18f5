"""The engine's attention over pages against each sequence alone, for steps of decoding and chunks of prompts."""

import itertools
from functools import partial

import attention_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton_ir
from sweeps import thinned

from areax.core import hardware
from areax.models.attention.pattern import Pattern
from areax.rollout.engine.programs import attention, attention_gpu, attention_tpu

N, K, C, X = 6, 2, 16, 12
PATTERNS = {
    "none": {},
    "window": dict(window=7),
    "chunk": dict(chunk=11),
    "softcap": dict(softcap=2.0, scale=0.7),
    "all": dict(chunk=27, window=13, scale=0.9, softcap=3.0),
}
STARTS = {
    1: (0, 5, 16, 37, 63, 188), 16: (0, 16, 32, 64, 128, 176), 4: (0, 16, 32, 64, 128, 176),
    3: (0, 14, 31, 37, 63, 189),
}  # fmt: skip


@partial(jax.jit, static_argnames=("pattern",))
def attend(q_BTNH, pages, table_BX, start_B, active_B, sinks_N, pattern):
    return attention.attend(q_BTNH, pages, table_BX, start_B, active_B, sinks_N, pattern=pattern)


def placed(k_BLKH, v_BLKV, ends, seed):
    """The keys and values of each sequence in pages of a random order; the others are not finite. Tables are 0 where a
    sequence has no page."""
    (B, _, _, H), V, rng = k_BLKH.shape, v_BLKV.shape[-1], np.random.default_rng(seed)
    pages = np.full((B * X + 1, K, H, C), np.nan, np.float32), np.full((B * X + 1, K, C, V), np.nan, np.float32)
    table_BX, order = np.zeros((B, X), np.int32), iter(rng.permutation(B * X) + 1)
    for row, end in enumerate(ends):
        for number in range(-(-end // C)):
            page = table_BX[row, number] = next(order)
            own = slice(number * C, (number + 1) * C)
            pages[0][page], pages[1][page] = k_BLKH[row, own].transpose(1, 2, 0), v_BLKV[row, own].transpose(1, 0, 2)
    return pages, table_BX


# Every fifth: all pairs of two axes' values are among them.
CASES = thinned(itertools.product(PATTERNS, STARTS, [False, True], [(1, 1), (2, 1), (6, 8)]), 5, pytest.mark.wide)


@pytest.mark.sweep
@pytest.mark.parametrize("kind, T, sinks, many", CASES)
def test_queries_see_what_is_before_them_in_their_sequence(kind, T, sinks, many, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: None)
    monkeypatch.setattr(attention, "together", lambda *_: many)
    check(kind, T, sinks, 8, 5)


def check(kind, T, sinks, H, V, atol=2e-6, kept=np.float32):
    """Whatever stands in the rest of a page and in other pages; the same bits in other pages and rows, or alone.

    Args:
      kept: dtype of the pages.
    """
    attend.clear_cache()
    rng, start_B, pattern = np.random.default_rng(0), np.array(STARTS[T], np.int32), Pattern(**PATTERNS[kind])
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    B, L = len(start_B), X * C
    q, k, v, sinks_N = draw(B, T, N, H), draw(B, L, K, H), draw(B, L, K, V), 2 * draw(N) if sinks else None
    k, v = (x.astype(kept).astype(np.float32) for x in (k, v))
    pages, table_BX = placed(k, v, start_B + T, 0)
    pages = tuple(x.astype(kept) for x in pages)
    got = attend(q, pages, table_BX, start_B, np.ones(B, bool), sinks_N, pattern)
    for row, start in enumerate(start_B):
        own = slice(row, row + 1), slice(0, start + T)
        rows = np.zeros((1, start + T, N, H), np.float32), k[own], v[own]
        rows[0][:, start:] = q[row]
        segment_BT, dout = np.ones((1, start + T), int), np.zeros((1, start + T, N, V))
        out = attention_oracle.alone(*rows, segment_BT, dout, sinks_N, **PATTERNS[kind])[0]
        np.testing.assert_allclose(got[row], out[0, start:], atol=atol)
    turned = np.roll(np.arange(B), 2)
    pages, table_BX = placed(k[turned], v[turned], start_B[turned] + T, 1)
    pages = tuple(x.astype(kept) for x in pages)
    first = np.maximum(pattern.first(start_B[turned]), 0) // C
    table_BX = np.where(np.arange(X)[None] < first[:, None], 0, table_BX)  # pages that no query sees are not kept
    active_B = np.arange(B) % 2 == 0
    again = attend(q[turned], pages, table_BX, start_B[turned], active_B, sinks_N, pattern)
    np.testing.assert_array_equal(again, np.where(active_B[:, None, None, None], got[turned], 0))


@pytest.mark.parametrize("T", STARTS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_the_call_of_cpus_gives_the_same(kind, T):
    """Sizes that fill vectors, and that do not; pages in both dtypes."""
    check(kind, T, kind == "all", 64, 40)
    check(kind, T, kind != "all", 8, 5, kept=ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_call_of_cpus_gives_a_query_the_same_bits_at_any_place_among_others(kind):
    offsets(kind, 64, 40)


def unwritten(T, size=16):
    """Positions that no query sees may hold any numbers: those of its pages that have not been written."""
    attend.clear_cache()
    rng, start_B = np.random.default_rng(0), np.array(STARTS[T], np.int32)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    B, L, H = len(start_B), X * C, size
    q, pages, table_BX = draw(B, T, N, H), *placed(draw(B, L, K, H), draw(B, L, K, H), start_B + T, 0)
    rest = table_BX, start_B, np.ones(B, bool), None, Pattern()
    expected = attend(q, pages, *rest)
    for row, end in enumerate(start_B + T):
        page, first = table_BX[row, (end - 1) // C], (end - 1) % C + 1
        pages[0][page, :, :, first:] = pages[1][page, :, first:] = np.nan
    np.testing.assert_array_equal(attend(q, pages, *rest), expected)


@pytest.mark.parametrize("T", [1, 3])
def test_the_call_of_cpus_reads_no_position_that_no_query_sees(T, compiled):
    unwritten(T)


@pytest.mark.parametrize("many", [(1, 1), (6, 8)])
@pytest.mark.parametrize("T", [1, 3])
def test_no_position_that_no_query_sees_counts(T, many, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: None)
    monkeypatch.setattr(attention, "together", lambda *_: many)
    unwritten(T)


@pytest.mark.parametrize("T", [1, 16])
def test_pages_in_eight_bits(T):
    """What is read is what the numbers in pages stand for."""
    check("all", T, True, 8, 5, kept=ml_dtypes.float8_e4m3fn)


@pytest.mark.sweep
@pytest.mark.parametrize("many", [(1, 1), (6, 4)])
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_query_gets_the_same_bits_at_any_place_among_others(kind, many, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: None)
    monkeypatch.setattr(attention, "together", lambda *_: many)
    offsets(kind, 8, 5)


def offsets(kind, H, V):
    """Although a query's page, and the first one of its window, may be other than those of the others."""
    attend.clear_cache()
    rng, pattern, T = np.random.default_rng(0), Pattern(**PATTERNS[kind]), 4
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    B, L = 6, X * C
    q_BLNH, k, v = draw(B, L, N, H), draw(B, L, K, H), draw(B, L, K, V)
    pages, table_BX = placed(k, v, np.full(B, L), 0)
    first_B = 30 * np.arange(B) + 8

    def at(shift):
        start_B = (first_B + shift).astype(np.int32)
        q_BTNH = np.stack([row[start : start + T] for row, start in zip(q_BLNH, start_B, strict=True)])
        return np.asarray(attend(q_BTNH, pages, table_BX, start_B, np.ones(B, bool), None, pattern))

    each = [at(shift) for shift in range(9)]
    for shift, out_BTNV in enumerate(each[:-1]):
        np.testing.assert_array_equal(out_BTNV[:, 1:], each[shift + 1][:, :-1])


@pytest.mark.kernel
@pytest.mark.parametrize("module", [attention_gpu, attention_tpu], ids=["gpu", "tpu"])
@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("kind", PATTERNS)
def test_kernels_give_the_same(kind, T, module, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: partial(module.read, interpret=True))
    check(kind, T, kind == "all", 48, 32)
    if kind == "window":
        check(kind, T, False, 48, 32, kept=ml_dtypes.float8_e4m3fn)
    if kind == "softcap":
        check(kind, T, False, 48, 128)  # values that fill registers of a TPU


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["none", "all"])
def test_few_queries_fit_beside_pages(kind, monkeypatch):
    """Tiles of 16 of 48 queries, by kernels that have hardly memory for them."""
    shared = 4 * C * (48 + 32) + 16 * 4 * (48 + 32 + 48)
    monkeypatch.setattr(hardware, "shared_memory", lambda: shared)
    monkeypatch.setattr(attention_tpu, "MEMORY", 1 << 18)
    sizes = np.zeros((1, K, 48, C), np.float32), np.zeros((1, K, C, 32), np.float32)
    assert attention_gpu.block(48, (48, C, 32), 4, 4) == (16, 2) and attention_tpu.most_queries(*sizes, 4) == 16
    for module in (attention_gpu, attention_tpu):
        monkeypatch.setattr(attention, "kernel", lambda *_, module=module: partial(module.read, interpret=True))
        check(kind, 16, False, 48, 32)


@pytest.mark.kernel
@pytest.mark.parametrize("module", [attention_gpu, attention_tpu], ids=["gpu", "tpu"])
@pytest.mark.parametrize("kind", ["none", "all"])
def test_kernels_give_a_query_the_same_bits_at_any_place_among_others(kind, module, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: partial(module.read, interpret=True))
    offsets(kind, 48, 32)


@pytest.mark.kernel
@pytest.mark.parametrize("module", [attention_gpu, attention_tpu], ids=["gpu", "tpu"])
@pytest.mark.parametrize("T", [1, 3])
def test_kernels_do_not_count_positions_that_no_query_sees(T, module, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda *_: partial(module.read, interpret=True))
    unwritten(T)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("kind, H, V", [("none", 128, 128), ("all", 48, 32), ("window", 80, 96)])
def test_the_kernel_gives_the_same_on_a_gpu(kind, H, V, T):
    with jax.default_matmul_precision("highest"):
        check(kind, T, kind == "all", H, V, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "all"])
def test_the_kernel_gives_a_query_the_same_bits_at_any_place_among_others_on_a_gpu(kind):
    offsets(kind, 128, 128)


def lowered(module, platform, pages, T, pattern, dtype, kept):
    """The lowered program, as text."""
    like = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    B, G, (K, H, C, V) = 16, 3, pages
    keys, values = like(99, K, H, C, dtype=kept), like(99, K, C, V, dtype=kept)
    assert module.supports(keys, values)
    args = like(B, K, G * T, H, dtype=dtype), (keys, values), like(B, 64), like(B, G * T), like(B), like(B)
    run = lambda *args: module.read(*args, pattern=pattern)
    return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["none", "all"])
@pytest.mark.parametrize("T", [1, 16, 128])
@pytest.mark.parametrize("pages", [(8, 128, 128, 128), (2, 80, 128, 96)])
def test_kernels_lower_for_their_platforms(pages, T, kind, dtype, monkeypatch):
    verified, pattern = triton_ir.verify(monkeypatch), Pattern(**PATTERNS[kind])
    for count, kept in enumerate((dtype, "float8_e4m3fn"), 1):
        assert "__gpu$xla.gpu.triton" in lowered(attention_gpu, "cuda", pages, T, pattern, dtype, kept)
        assert len(verified) == count
        assert "tpu_custom_call" in lowered(attention_tpu, "tpu", pages, T, pattern, dtype, kept)


@pytest.mark.kernel
def test_pages_that_a_kernel_cannot_read_are_left_to_xla():
    pages = lambda H, V, C: (np.zeros((1, 1, H, C), np.float32), np.zeros((1, 1, C, V), np.float32))
    assert attention_gpu.supports(*pages(80, 48, 16)) and not attention_gpu.supports(*pages(72, 64, 16))
    assert not attention_gpu.supports(*pages(576, 512, 128))
    assert attention_gpu.supports(*pages(128, 128, 128)) and not attention_gpu.supports(*pages(256, 256, 128))
    assert attention_tpu.supports(*pages(72, 60, 128)) and not attention_tpu.supports(*pages(64, 64, 64))
    assert not attention_tpu.supports(*(x.astype(np.float16) for x in pages(72, 60, 128)))
    large = [np.broadcast_to(x, (1, 64, *x.shape[2:])) for x in pages(128, 128, 128)]
    assert not attention_tpu.supports(*large)


@pytest.mark.kernel
def test_what_fits_depends_on_the_gpu(monkeypatch):
    """Heads of 256 in 16 bits, as of Gemma and Qwen3.5: fewer queries on cards with less shared memory. An A100 does
    not convert float8."""
    pages = lambda dtype, H: (np.zeros((1, 1, H, 128), dtype), np.zeros((1, 1, 128, H), dtype))
    wide, eight = pages(ml_dtypes.bfloat16, 256), pages(ml_dtypes.float8_e4m3fn, 128)
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    for kind, Q, reads in (
        ("NVIDIA H100 80GB HBM3", (64, 1), True), ("NVIDIA B200", (64, 1), True),
        ("NVIDIA A100-SXM4-80GB", (32, 2), False), ("NVIDIA L4", None, True),
    ):  # fmt: skip
        monkeypatch.setattr(hardware, "kind", lambda kind=kind: kind)
        assert attention_gpu.block(1024, (256, 128, 256), 2, 2) == Q
        assert attention_gpu.supports(*wide) == (Q is not None) and attention_gpu.supports(*eight) == reads
