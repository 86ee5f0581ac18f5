"""Attention of consecutive queries of each sequence over its pages."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ....core import hardware
from ....models.attention import sinks
from ....models.attention.pattern import PLAIN, Pattern
from ....parallel import mesh
from ....parallel.shard_map import island
from . import pool

KERNELS = {"cpu": ".attention_cpu", "gpu": ".attention_gpu", "tpu": ".attention_tpu"}  # imported where they run
SPLIT = P(None, "tp")  # pages over devices, by heads
PAGES = 8  # pages of each sequence that accelerators read at a time
FEW = 8  # pages that are copied one by one, which is faster on a CPU
CACHE = 1 << 18  # bytes of keys that a CPU reads at a time: as many as stay in a core's cache


def attend(q_BTNH, pages, table_BX, start_B, active_B, sinks_N=None, *, pattern: Pattern = PLAIN):
    """Attention of queries at positions start, start + 1, ... of each sequence to keys up to their own, as far as the
    pattern allows, by online softmax over pages in order. Heads may be split over tp.

    What a sequence gets has the same bits in any row, with any other sequences and any pages: pages are summed in order
    of position, and pages beyond its own add exact zeros; so do those that other queries of the sequence see.

    Args:
      pages: keys_PKHC, values_PKCV.
      table_BX: the page of each C positions of a sequence; what no query sees may be 0. Outputs of queries
        beyond its last position are undefined.
      active_B: False = the row is not used, and its output is 0.

    Returns:
      out_BTNV, in q's dtype.
    """
    local = partial(_attend, pattern=pattern)
    if mesh.one_device():
        return local(q_BTNH, pages, table_BX, start_B, active_B, sinks_N)
    heads = P(None, None, "tp")
    specs = heads, (SPLIT, SPLIT), P(), P(), P(), P("tp")
    return island(local, specs, heads)(q_BTNH, pages, table_BX, start_B, active_B, sinks_N)


def append(held, i, layer, table_SX, position_S, active_S, q_SQNH, k_SQKH=None, v_SQKV=None, sinks_N=None, latent=None):
    """Puts keys and values of Q consecutive tokens of each slot, the first at `position`, to the pages of layer i in
    `held`, and returns `attend`.

    Those of tokens that are not accepted are overwritten by the next step, and seen by no query before.
    """
    if latent:
        q_SQNH, (k_SQKH, v_SQKV) = latent.queries(q_SQNH), latent.cached
    if layer.source is None:
        C, position_SQ = held[i][1].shape[2], position_S[:, None] + jnp.arange(q_SQNH.shape[1])[None]
        # Page 0 takes what is not to be kept: idle slots, and drafts beyond the last token of a sequence.
        page_SQ = jnp.take_along_axis(table_SX, position_SQ // C, 1, mode="fill", fill_value=0)
        page_SQ = jnp.where(active_S[:, None], page_SQ, 0)
        held[i] = pool.write_tokens(held[i], k_SQKH, v_SQKV, page_SQ, position_SQ % C)
    pages = held[i if layer.source is None else layer.source]
    out_SQNV = attend(q_SQNH, pages, table_SX, position_S, active_S, sinks_N, pattern=layer.pattern)
    return latent.outputs(out_SQNV) if latent else out_SQNV


def _attend(q_BTNH, pages, table_BX, start_B, active_B, sinks_N, *, pattern: Pattern):
    (B, T, N, H), (_, K, C, _) = q_BTNH.shape, pages[1].shape
    G = N // K
    q_BKGTH = (q_BTNH * pattern.factor(H)).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
    first_B = jnp.maximum(pattern.first(start_B), 0) // C
    last_B = jnp.minimum((start_B + (T - 1)) // C, table_BX.shape[1] - 1)
    pages_of = lambda begin_B: jnp.where(active_B, last_B + 1 - begin_B, 0)
    if read_by_kernel := kernel(*pages):
        at_BR = jnp.tile(start_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None], (1, G))
        q_BKRH = q_BKGTH.reshape(B, K, G * T, H)
        made = read_by_kernel(q_BKRH, pages, table_BX, at_BR, first_B, pages_of(first_B), pattern=pattern)
        most_BKGT1, sum_BKGT1, out_BKGTV = (x_BKR.reshape(B, K, G, T, -1) for x_BKR in made)
    else:
        R, M = together(B, table_BX.shape[1], pages[0][0].nbytes)
        begin_B = first_B if T == 1 else first_B // M * M  # so that no query changes which pages others read together
        where = start_B, begin_B, first_B, last_B, pages_of(begin_B)
        most_BKGT1, sum_BKGT1, out_BKGTV = read(q_BKGTH, pages, table_BX, where, R, M, pattern)
    real_B1111 = active_B[:, None, None, None, None]
    sum_BKGT1, out_BKGTV = jnp.where(real_B1111, sum_BKGT1, 1), jnp.where(real_B1111, out_BKGTV, 0)
    by_query = lambda x_BKGT: jnp.moveaxis(x_BKGT, 3, 1).reshape(B, T, N, -1)
    out_BTNV, lse_BTN1 = by_query(out_BKGTV / sum_BKGT1), by_query(most_BKGT1 + jnp.log(sum_BKGT1))
    return sinks.add(out_BTNV, lse_BTN1[..., 0], sinks_N).astype(q_BTNH.dtype)


def kernel(keys_PKHC, values_PKCV):
    """The platform's kernel for such pages; None = `read`."""
    platform = hardware.platform()
    if platform not in KERNELS:
        return None
    module = importlib.import_module(KERNELS[platform], __package__)
    return module.read if module.supports(keys_PKHC, values_PKCV) else None


def together(B: int, X: int, size: int) -> tuple[int, int]:
    """How many sequences, and pages of each, are read at a time, of B with X pages of so many bytes."""
    if hardware.platform() != "cpu":
        return B, min(PAGES, X)
    return next(R for R in range(B, 0, -1) if B % R == 0 and (R == 1 or R <= FEW and R * size <= CACHE)), 1


def read(q_BKGTH, pages, table_BX, where, R: int, M: int, pattern: Pattern):
    """The online softmax over pages of each sequence, R sequences and M pages at a time; `where` = (position of the
    first query; number of the page to begin at, of the first one that is seen, of the last one; how many to read)."""
    start_B, begin_B, first_B, last_B, count_B = where
    keys_PKHC, values_PKCV = pages
    (_, K, C, V), N = values_PKCV.shape, len(table_BX) // R
    order_B = jnp.argsort(-count_B) if N > 1 else jnp.arange(R)  # those that are read together are equally long
    q_BKGTH, table_BX, start_B, begin_B, first_B, last_B = (
        x[order_B] for x in (q_BKGTH, table_BX, start_B, begin_B, first_B, last_B)
    )
    steps_N = -(-jnp.max(count_B[order_B].reshape(N, R), 1) // M)
    end_N = jnp.cumsum(steps_N)

    def add(i, carry):
        block = jnp.sum(end_N <= i)
        rows = lambda x_B: jax.lax.dynamic_slice_in_dim(x_B, block * R, R)
        step = i - (end_N[block] - steps_N[block])
        number_RM = rows(begin_B)[:, None] + step * M + jnp.arange(M)[None]
        seen_RM = jnp.clip(number_RM, rows(first_B)[:, None], rows(last_B)[:, None])  # other pages are masked
        page_RM = jnp.take_along_axis(rows(table_BX), seen_RM, 1)
        keys_RKHL = jnp.moveaxis(_some(keys_PKHC, page_RM).astype(q_BKGTH.dtype), 1, 3).reshape(R, K, -1, M * C)
        values_RKLV = jnp.moveaxis(_some(values_PKCV, page_RM).astype(q_BKGTH.dtype), 1, 2).reshape(R, K, M * C, V)
        begin_R = number_RM[:, 0] * C
        new = _add(tuple(map(rows, carry)), rows(q_BKGTH), keys_RKHL, values_RKLV, rows(start_B), begin_R, pattern)
        put = lambda x_B, x_R: jax.lax.dynamic_update_slice_in_dim(x_B, x_R, block * R, 0)
        return tuple(map(put, carry, new))

    made = jax.lax.fori_loop(0, end_N[-1], add, _zero(q_BKGTH, values_PKCV))
    return tuple(x_B[jnp.argsort(order_B)] for x_B in made) if N > 1 else made


def _some(x_P, page_RM):
    """The pages, [R, M, ...]."""
    if page_RM.size > FEW:
        return x_P[page_RM]
    each = [jax.lax.dynamic_slice_in_dim(x_P, page, 1) for page in page_RM.flatten()]
    return jnp.concatenate(each).reshape(*page_RM.shape, *x_P.shape[1:])


def _zero(q_BKGTH, values_PKCV):
    zero_BKGT1 = jnp.zeros((*q_BKGTH.shape[:4], 1), jnp.float32)
    return zero_BKGT1 - 1e30, zero_BKGT1, jnp.zeros((*q_BKGTH.shape[:4], values_PKCV.shape[-1]), jnp.float32)


def _add(carry, q_BKGTH, keys_BKHL, values_BKLV, start_B, begin_B, pattern: Pattern):
    """One step of the online softmax: adds keys and values at positions begin, begin + 1, ..."""
    most_BKGT1, sum_BKGT1, out_BKGTV = carry
    at_BT1 = (start_B[:, None] + jnp.arange(q_BKGTH.shape[3])[None])[..., None]
    key_B1L = (begin_B[:, None] + jnp.arange(keys_BKHL.shape[-1])[None])[:, None]
    sees_BTL = key_B1L <= at_BT1
    if pattern.span is not None:
        sees_BTL &= key_B1L >= pattern.first(at_BT1)
    score_BKGTL = jnp.einsum("BKGTH,BKHL->BKGTL", q_BKGTH, keys_BKHL, preferred_element_type=jnp.float32)
    if pattern.softcap is not None:
        score_BKGTL = pattern.softcap * jnp.tanh(score_BKGTL / pattern.softcap)
    score_BKGTL = jnp.where(sees_BTL[:, None, None], score_BKGTL, -1e30)
    new_BKGT1 = jnp.maximum(most_BKGT1, jnp.max(score_BKGTL, -1, keepdims=True))
    keep_BKGT1 = jnp.exp(most_BKGT1 - new_BKGT1)
    prob_BKGTL = jnp.exp(score_BKGTL - new_BKGT1)
    # Memory that was not written yet holds any numbers, and one that is not finite survives a weight of 0.
    values_BKLV = jnp.where(jnp.any(sees_BTL, 1)[:, None, :, None], values_BKLV, 0)
    part_BKGTV = jnp.einsum(
        "BKGTL,BKLV->BKGTV", prob_BKGTL.astype(values_BKLV.dtype), values_BKLV, preferred_element_type=jnp.float32
    )
    sum_BKGT1 = sum_BKGT1 * keep_BKGT1 + jnp.sum(prob_BKGTL, -1, keepdims=True)
    return new_BKGT1, sum_BKGT1, out_BKGTV * keep_BKGT1 + part_BKGTV
