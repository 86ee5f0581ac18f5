"""Attention sinks: one learnt logit a head that takes part in the softmax but has no value (arXiv:2508.10925)."""

import jax
import jax.numpy as jnp

from ...core.shapes import shaped


@shaped
def add(out_BTNV, lse_BTN, sinks_N):
    """The output of attention with sinks, from that without them and the log-sum-exp of its scores.

    The sink adds exp(sink) to a softmax's sum exp(lse), so weights, and thus the output, are multiplied by
    sigmoid(lse - sink). Computed in fp32 or wider.
    """
    if sinks_N is None:
        return out_BTNV
    share_BTN = jax.nn.sigmoid(lse_BTN - sinks_N.astype(lse_BTN.dtype)[None, None])
    wide = jnp.promote_types(out_BTNV.dtype, lse_BTN.dtype)
    return (out_BTNV.astype(wide) * share_BTN[..., None]).astype(out_BTNV.dtype)
