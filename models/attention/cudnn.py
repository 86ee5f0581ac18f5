"""cuDNN's flash attention for GPUs, for rows that hold one sequence each.

JAX's public function does not support packed rows: a segment mask would become an array [B, 1, T, T].
"""

import jax

from .pattern import PLAIN, Pattern


def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, *, pattern: Pattern = PLAIN):
    """`chunked.causal` without separate keys, chunks, softcaps and sinks; each row is one sequence, segment_BT is
    ignored."""
    size = None if pattern.window is None else (pattern.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=size, scale=pattern.scale, implementation="cudnn"
    )
