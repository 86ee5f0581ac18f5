"""Attention on a mesh: rows, heads and positions are sharded, and each device computes its own queries.

Methods of context parallelism over cp: "gather" all-gathers keys and values of the row. "ulysses" (arXiv:2309.14509)
exchanges positions for heads, attends over whole rows, and exchanges back. "ring" (arXiv:2310.01889) passes keys and
values around, so that no device holds a whole row; it needs positions in the order given by `arrange`.
"""

import math
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp

from . import mesh as meshes
from . import ring as rings
from .rules import RULES, constrain, spec
from .shard_map import island, rows

Method = Literal["gather", "ulysses", "ring"]


def arrange(method: Method, length: int):
    """(into, back): functions that permute rows [B, T, ...] to the order that the method needs, and back."""
    if method != "ring" or meshes.size("cp") == 1:
        return (lambda x_BT: x_BT,) * 2
    order = rings.order(length, meshes.size("cp"))
    put = lambda index: lambda x_BT: constrain(x_BT[:, index], "batch seq")
    return put(order), put(order.argsort())


def whole_rows(method: Method, length: int):
    """(into, back) for layers that read a row from its start: from positions [B, T, C, ...] sharded over cp to whole
    rows in their own order with C sharded over tp and cp, and back. By all-to-all (arXiv:2309.14509).

    Raises:
      ValueError: C cannot be split over tp x cp, when called.
    """
    if meshes.size("cp") == 1:
        return (lambda x: x,) * 2
    order = rings.order(length, meshes.size("cp")) if method == "ring" else None

    def into(x):
        x = constrain(x, "batch row channels" if x.ndim > 2 else "batch row")
        return x if order is None else x[:, order.argsort()]

    def back(x):
        x = x if order is None else x[:, order]
        return constrain(x, "batch seq query_heads")

    return into, back


def attention(
    causal, ring, q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N=None, *, method: Method = "gather", pattern=None
):
    """Runs `causal` in a shard_map over the ambient mesh, or `ring` if that is the method and cp > 1.

    kv heads are repeated until they are divisible by the devices that share them.

    Args:
      causal: f(q, k, v, segment, index, sinks, key_segment_BS=None, key_index_BS=None) -> out_BTNV; the sinks, or None,
        are those of the heads it gets.
      ring: the same for positions sharded over cp, in the order of `arrange`.
      pattern: that of `causal` and `ring`; "gather" fetches only the keys within its `span`. None = no limit.

    Raises:
      ValueError: query heads are not divisible by tp, or with "ulysses" by tp x cp.
    """
    if meshes.one_device():
        return causal(q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N)
    cp = meshes.size("cp")
    N, K, sharing = q_BTNH.shape[2], k_BTKH.shape[2], meshes.size("tp") * (cp if method == "ulysses" else 1)
    if N % sharing:
        raise ValueError(
            f"attention: {N} query heads cannot be split over {sharing} devices "
            f"({'tp x cp' if method == 'ulysses' else 'tp'}); use a divisor"
        )
    copies = math.lcm(K, sharing) // K
    if copies > 1:
        k_BTKH, v_BTKV = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKV))
    span = None if pattern is None or pattern.bidirectional else pattern.span
    full_row = lambda x: jax.lax.all_gather(x, "cp", axis=1, tiled=True)

    def reach(x):
        """The part of the row within the span: the device's positions and those of devices before it, else all."""
        before = cp if span is None else -(-(span - 1) // x.shape[1])
        if before >= cp - 1:
            return full_row(x)
        # Positions that wrap around to the first devices come later in the row and are masked by causality.
        ahead = lambda by: [(i, (i + by) % cp) for i in range(cp)]
        return jnp.concatenate([*(jax.lax.ppermute(x, "cp", ahead(by)) for by in range(before, 0, -1)), x], 1)

    def gather(q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N):
        return causal(
            q_BTNH, reach(k_BTKH), reach(v_BTKV), segment_BT, index_BT, sinks_N,
            key_segment_BS=reach(segment_BT), key_index_BS=reach(index_BT),
        )  # fmt: skip

    def ulysses(q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N):
        swap = lambda x, split, concat: jax.lax.all_to_all(x, "cp", split, concat, tiled=True)
        q, k, v = (swap(x, 2, 1) for x in (q_BTNH, k_BTKH, v_BTKV))
        return swap(causal(q, k, v, full_row(segment_BT), full_row(index_BT), sinks_N), 1, 2)

    local = {"gather": gather, "ulysses": ulysses, "ring": ring}[method] if cp > 1 else causal
    heads, each = spec(("batch", "seq", "query_heads")), rows()
    # "ulysses" splits the heads of each tp device over cp.
    sinks = spec(("query_heads",), replace(RULES, query_heads=("tp", "cp")) if method == "ulysses" else RULES)
    return island(local, (heads, heads, heads, each, each, sinks), heads)(
        q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N
    )


def tree_attention(tree, q_BTNH, k_BTKH, v_BTKV, until_BT, position_BT, sinks_N=None, *, method: Method = "gather"):
    """Runs `tree` in a shard_map over the ambient mesh, as `attention` does.

    "gather" fetches all keys even if the pattern has a window: other branches stand between a token and the one before
    it in its sample.

    Args:
      tree: f(q, k, v, place_BT, position_BT, until_BS, position_BS, sinks) -> out_BTNV, as `models.attention.tree`.
      method: as in `attention`, but not "ring" over cp (`token_layout.of` refuses it).

    Raises:
      ValueError: as `attention`.
    """

    def attend(q_BTNH, k_BSKH, v_BSKV, until_BT, position_BT, sinks_N, key_segment_BS=None, key_index_BS=None):
        """Gets until and position in the place of segments and indices."""
        place_BT = jnp.broadcast_to(jnp.arange(until_BT.shape[1], dtype=jnp.int32), until_BT.shape)
        if key_segment_BS is None:
            return tree(q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BT, position_BT, sinks_N)
        place_BT += jax.lax.axis_index("cp") * until_BT.shape[1]
        return tree(q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, key_segment_BS, key_index_BS, sinks_N)

    return attention(attend, None, q_BTNH, k_BTKH, v_BTKV, until_BT, position_BT, sinks_N, method=method)
