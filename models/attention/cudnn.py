"""cuDNN's flash attention for GPUs, for rows that hold one sequence each.

JAX's public function does not support packed rows: a segment mask would become an array [B, 1, T, T].
"""

import jax


def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, *, window: int | None = None):
    """`chunked.causal` without separate keys, each row being one sequence; segment_BT is ignored."""
    size = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=size, implementation="cudnn"
    )
