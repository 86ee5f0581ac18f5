"""Attention on a mesh: rows, heads and positions are split, and each device attends for its own queries.

Three ways to split positions over cp. "gather" brings keys and values of the whole row to every device. "ulysses"
(arXiv:2309.14509) trades positions for heads, attends over whole rows, and trades back. "ring" (arXiv:2310.01889)
passes keys and values round, so that no device ever holds a whole row; it needs positions in an order of its own, which
`arrange` gives.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from . import mesh as meshes
from . import ring as rings
from .rules import constrain, spec
from .shard_map import island, rows

Method = Literal["gather", "ulysses", "ring"]


def arrange(method: Method, length: int):
    """(into, back): functions from rows [B, T, ...] in natural order to the order that the method needs, and back."""
    if method != "ring" or meshes.size("cp") == 1:
        return (lambda x_BT: x_BT,) * 2
    order = rings.order(length, meshes.size("cp"))
    put = lambda index: lambda x_BT: constrain(x_BT[:, index], "batch seq")
    return put(order), put(order.argsort())


def attention(causal, ring, q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT, *, method: Method = "gather", window=None):
    """`causal` as an island of the ambient mesh, or `ring` where that is the method and cp > 1.

    Where kv heads do not divide by the devices that share them they are repeated until they do.

    Args:
      causal: f(q, k, v, segment, index, key_segment_BS=None, key_index_BS=None) -> out_BTNH.
      ring: the same for positions split over cp, in the order of `arrange`.
      window: most tokens that one sees, as `causal` and `ring` know it: "gather" then brings only what it may reach.

    Raises:
      ValueError: query heads that do not divide by tp, or with "ulysses" by tp x cp.
    """
    if meshes.alone():
        return causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT)
    cp = meshes.size("cp")
    N, K, sharing = q_BTNH.shape[2], k_BTKH.shape[2], meshes.size("tp") * (cp if method == "ulysses" else 1)
    if N % sharing:
        raise ValueError(
            f"attention: {N} query heads cannot be split over {sharing} devices "
            f"({'tp x cp' if method == 'ulysses' else 'tp'}); choose a divisor"
        )
    copies = math.lcm(K, sharing) // K
    if copies > 1:
        k_BTKH, v_BTKH = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))
    whole = lambda x: jax.lax.all_gather(x, "cp", axis=1, tiled=True)

    def reach(x):
        """What the window reaches of the row: one's own positions and those of devices before, else the whole."""
        before = cp if window is None else -(-(window - 1) // x.shape[1])
        if before >= cp - 1:
            return whole(x)
        # What wraps round to the first devices comes later in its sequence, and is masked like any later key.
        ahead = lambda by: [(i, (i + by) % cp) for i in range(cp)]
        return jnp.concatenate([*(jax.lax.ppermute(x, "cp", ahead(by)) for by in range(before, 0, -1)), x], 1)

    def gather(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT):
        return causal(
            q_BTNH, reach(k_BTKH), reach(v_BTKH), segment_BT, index_BT,
            key_segment_BS=reach(segment_BT), key_index_BS=reach(index_BT),
        )  # fmt: skip

    def ulysses(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT):
        trade = lambda x, give, take: jax.lax.all_to_all(x, "cp", give, take, tiled=True)
        q, k, v = (trade(x, 2, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
        return trade(causal(q, k, v, whole(segment_BT), whole(index_BT)), 1, 2)

    local = {"gather": gather, "ulysses": ulysses, "ring": ring}[method] if cp > 1 else causal
    heads, each = spec(("batch", "seq", "query_heads")), rows()
    return island(local, (heads, heads, heads, each, each), heads)(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT)
