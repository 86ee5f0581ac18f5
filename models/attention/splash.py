"""Splash attention, JAX's TPU kernel: packed rows, grouped queries, sliding windows, softcaps, sinks.

Skips blocks of keys that lie entirely outside the causal mask or the window (blocks as in arXiv:2307.08691).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from .chunked import OUTPUT
from .pattern import PLAIN, Pattern

LANES = 128  # row length must be a multiple of it; heads are zero-padded to one
BLOCKS = 512, 256, 128


def causal(
    q_BTNH, k_BSKH, v_BSKV, segment_BT, sinks_N=None, *, index_BT=None, key_segment_BS=None, key_index_BS=None,
    pattern: Pattern = PLAIN, interpret: bool = False,
):  # fmt: skip
    """`chunked.causal` without chunks, for T a multiple of 128.

    Args:
      index_BT: only read with separate keys. These are equal parts, one of them the queries' own tokens, those before
        it in the order of the row, and if the pattern is bidirectional, those after it too.
      interpret: runs in interpret mode on any platform, for tests.
    """
    (_, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    block = next(size for size in BLOCKS if T % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = _mask(T, S, pattern)
    attend = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * N), block_sizes=sizes, attn_logits_soft_cap=pattern.softcap, head_shards=1,
        q_seq_shards=mask.shape[0] // T, residual_checkpoint_name=OUTPUT, interpret=interpret,
    )  # fmt: skip
    if key_index_BS is None:
        key_segment_BS = segment_BT
    else:
        part = _own_part((segment_BT, index_BT), (key_segment_BS, key_index_BS))
        if mask.shape[0] > T:
            attend = _of_part(attend, part, S // T)
        if not pattern.bidirectional:
            key_segment_BS = _without_wrapped((segment_BT, index_BT), (key_segment_BS, key_index_BS), part)
    if sinks_N is not None:
        sinks_N = sinks_N.astype(q_BTNH.dtype)  # the kernel's gradient has this dtype whatever theirs
    heads_first = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % LANES)]).transpose(0, 2, 1, 3)
    row = lambda q, k, v, here_T, there_S: attend(q, k, v, kernel.SegmentIds(here_T, there_S), sinks_N)
    q_BNTH = heads_first(q_BTNH * pattern.factor(H))
    out_BNTV = jax.vmap(row)(q_BNTH, heads_first(k_BSKH), heads_first(v_BSKV), segment_BT, key_segment_BS)
    return out_BNTV.transpose(0, 2, 1, 3)[..., : v_BSKV.shape[3]]


def _mask(T: int, S: int, pattern: Pattern):
    """Which keys the tokens of a row see, and if they see all, those of a part of it: the kernel cannot cut such a mask
    into parts."""
    if pattern.window is not None:
        before = pattern.window - 1
        return masks.LocalMask((S, S), (before, before if pattern.bidirectional else 0), 0)
    return masks.FullMask((T, S)) if pattern.bidirectional else masks.CausalMask((S, S))


def _own_part(here, there):
    """Which of the equal parts of the keys are the queries' tokens: i32[], the same for all rows."""
    (B, T), parts = here[0].shape, there[0].shape[1] // here[0].shape[1]
    same = [x_BS.reshape(B, parts, T) == x_BT[:, None] for x_BT, x_BS in zip(here, there, strict=True)]
    return jnp.argmax(jnp.all(same[0] & same[1], (0, 2)))


def _of_part(attend, part, parts: int):
    """The kernel for one of the equal parts of its queries: a slice of what it knows of its mask."""

    def cut(x, axis):
        size = x.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(x, part * size, size, axis)

    def of(info):
        grids = {name: cut(x, 1) for name in ("data_next", "mask_next", "block_mask")
                 if (x := getattr(info, name)) is not None}  # fmt: skip
        return info._replace(q_sequence=cut(info.q_sequence, 0), **grids)

    infos = attend.fwd_mask_info, attend.dq_mask_info, attend.dkv_mask_info
    return kernel.SplashAttentionKernel(*map(of, infos), **attend.kwargs)


def _without_wrapped(here, there, part):
    """The keys' segments, -1 for keys before the queries' own that come later in the row: "gather" fetches them from
    the last devices for a window on the first ones."""
    (segment_BT, index_BT), (segment_BS, index_BS) = here, there
    own = jnp.arange(segment_BS.shape[1]) >= part * segment_BT.shape[1]
    before_BS = (segment_BS == segment_BT[:, :1]) & (index_BS < index_BT[:, :1])
    return jnp.where(own[None] | before_BS, segment_BS, -1)
