"""Attention on a mesh: rows, heads and positions are split, and each device attends for its own queries.

Over cp, keys and values of the whole row are gathered; their gradients are summed and scattered back.
"""

import math

import jax
import jax.numpy as jnp

from . import mesh as meshes
from .rules import spec
from .vocab import island, rows


def attention(fn, q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT):
    """`fn(q, k, v, segment, index, key_segment_BS=None, key_index_BS=None)` as an island of the ambient mesh.

    Where kv heads do not divide by tp they are repeated until they do.

    Raises:
      ValueError: query heads that do not divide by tp.
    """
    if meshes.size(*meshes.AXES) == 1:
        return fn(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT)
    K, tp, cp = k_BTKH.shape[2], meshes.size("tp"), meshes.size("cp")
    heads = spec(("batch", "seq", "query_heads"), where="attention", shape=q_BTNH.shape)
    copies = math.lcm(K, tp) // K
    if copies > 1:
        k_BTKH, v_BTKH = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))

    def local(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT):
        if cp == 1:
            return fn(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT)
        whole = lambda x: jax.lax.all_gather(x, "cp", axis=1, tiled=True)
        return fn(
            q_BTNH, whole(k_BTKH), whole(v_BTKH), segment_BT, index_BT,
            key_segment_BS=whole(segment_BT), key_index_BS=whole(index_BT),
        )  # fmt: skip

    each = rows("")
    return island(local, (heads, heads, heads, each, each), heads)(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT)
