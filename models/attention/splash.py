"""Splash attention, JAX's TPU kernel: packed rows, grouped queries, sliding windows.

Skips blocks of keys that lie entirely outside the causal mask or the window (blocks as in arXiv:2307.08691).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from .chunked import OUTPUT

LANES = 128  # row length must be a multiple of it; heads are zero-padded to one
BLOCKS = 512, 256, 128


def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, *, window: int | None = None, interpret: bool = False):
    """`chunked.causal` without separate keys, for T a multiple of 128.

    Args:
      interpret: runs in interpret mode on any platform, for tests.
    """
    B, T, N, H = q_BTNH.shape
    block = next(size for size in BLOCKS if T % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    attend = kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * N), block_sizes=sizes, residual_checkpoint_name=OUTPUT, interpret=interpret
    )
    heads_first = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, -H % LANES)]).transpose(0, 2, 1, 3)
    row = lambda q, k, v, segment_T: attend(q, k, v, segment_ids=kernel.SegmentIds(segment_T, segment_T))
    out_BNTH = jax.vmap(row)(heads_first(q_BTNH * H**-0.5), heads_first(k_BTKH), heads_first(v_BTKH), segment_BT)
    return out_BNTH.transpose(0, 2, 1, 3)[..., :H]
