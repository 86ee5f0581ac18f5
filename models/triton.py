"""The Triton attention kernel for GPUs that comes with JAX: packed rows; keys and values are repeated for queries."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu import attention as kernel

from .attention import OUTPUT

BLOCKS = kernel.BlockSizes.get_default()


def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, *, interpret: bool = False):
    """`attention.causal` where keys are the queries' own, T a multiple of 128, without windows.

    Args:
      interpret: compute step by step on any platform, for tests.
    """
    return _causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, interpret):
    return _forward(q_BTNH, k_BTKH, v_BTKH, segment_BT, interpret)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH, segment_BT, interpret):
    k_BTNH, v_BTNH = _repeat(k_BTKH, v_BTKH, q_BTNH)
    how = dict(sm_scale=q_BTNH.shape[-1] ** -0.5, causal=True, block_sizes=BLOCKS, interpret=interpret)
    made = kernel.mha(q_BTNH, k_BTNH, v_BTNH, segment_BT, return_residuals=True, **how)
    out_BTNH, lse_BNT = (checkpoint_name(x, OUTPUT) for x in made)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segment_BT, out_BTNH, lse_BNT)


def _backward(interpret, kept, dout_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, out_BTNH, lse_BNT = kept
    inputs = q_BTNH, *_repeat(k_BTKH, v_BTKH, q_BTNH), segment_BT
    # Not a public name; but under the kernel's own rule remat would compute the log-sum-exp, which has no name, again.
    dq_BTNH, *dkv, _ = kernel._mha_backward(
        q_BTNH.shape[-1] ** -0.5, True, BLOCKS, "triton", None, 2, None, interpret, False, False,
        (*inputs, out_BTNH, lse_BNT), dout_BTNH,
    )  # fmt: skip
    return dq_BTNH, *(_sum(dx_BTNH, k_BTKH) for dx_BTNH in dkv), None


_causal.defvjp(_forward, _backward)


def _repeat(k_BTKH, v_BTKH, q_BTNH):
    """One copy for each query head."""
    copies = q_BTNH.shape[2] // k_BTKH.shape[2]
    return (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))


def _sum(dx_BTNH, like_BTKH):
    """Over the copies of each head, in fp32 or wider."""
    B, T, K, H = like_BTKH.shape
    wide = jnp.promote_types(dx_BTNH.dtype, jnp.float32)
    return dx_BTNH.reshape(B, T, K, -1, H).sum(3, dtype=wide).astype(like_BTKH.dtype)
