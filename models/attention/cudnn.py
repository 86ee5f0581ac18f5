"""cuDNN's flash attention for GPUs, of rows that hold one sequence each.

JAX's public function knows no packed rows: a mask of segments would become an array [B, 1, T, T].
"""

import jax


def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, *, window: int | None = None):
    """`attention.causal` where keys are the queries' own and each row is one sequence; segment_BT is not looked at."""
    size = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=size, implementation="cudnn"
    )
