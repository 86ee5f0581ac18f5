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


def causal(q_BTNH, k_BTKH, v_BTKV, segment_BT, sinks_N=None, *, pattern: Pattern = PLAIN, interpret: bool = False):
    """`chunked.causal` without separate keys and chunks, for T a multiple of 128.

    Args:
      interpret: runs in interpret mode on any platform, for tests.
    """
    B, T, N, H = q_BTNH.shape
    block = next(size for size in BLOCKS if T % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    window = pattern.window
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    attend = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * N), block_sizes=sizes, attn_logits_soft_cap=pattern.softcap,
        residual_checkpoint_name=OUTPUT, interpret=interpret,
    )  # fmt: skip
    if sinks_N is not None:
        sinks_N = sinks_N.astype(q_BTNH.dtype)  # the kernel's gradient has this dtype whatever theirs
    heads_first = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % LANES)]).transpose(0, 2, 1, 3)
    row = lambda q, k, v, segment_T: attend(q, k, v, kernel.SegmentIds(segment_T, segment_T), sinks_N)
    q_BNTH = heads_first(q_BTNH * pattern.factor(H))
    out_BNTV = jax.vmap(row)(q_BNTH, heads_first(k_BTKH), heads_first(v_BTKV), segment_BT)
    return out_BNTV.transpose(0, 2, 1, 3)[..., : v_BTKV.shape[3]]
