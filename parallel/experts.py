"""Experts split over ep: tokens of the ep group are gathered, each device computes its own experts, sums are scattered.

Nothing is dropped, whatever tokens choose. Inside an expert, ffn is split over tp.
"""

import jax
from jax.sharding import PartitionSpec as P

from . import mesh as meshes
from .island import island, rows

MATRICES = P("ep", "tp", None), P("ep", "tp", None), P("ep", None, "tp")  # gate, up, down while they are used


def dispatch(compute, x_BTD, index_BTK, weight_BTK, matrices):
    """The mixture of each token, [B, T, D].

    Args:
      compute: f(x_AD, index_AK, weight_AK, matrices, first) -> [A, D], the part of the experts from number `first` on
        whose matrices (gate_EFD, up_EFD, down_EDF) it is given.
    """

    def local(x_BTD, index_BTK, weight_BTK, *matrices):
        B, T, D = x_BTD.shape
        flat = [x.reshape(B * T, -1) for x in (x_BTD, index_BTK, weight_BTK)]
        if meshes.size(*meshes.AXES) == 1:
            return compute(*flat, matrices, 0).reshape(B, T, D)
        first = len(matrices[0]) * jax.lax.axis_index("ep")
        everyone = [jax.lax.all_gather(x, "ep", axis=0, tiled=True) for x in flat]
        out_AD = jax.lax.psum(compute(*everyone, matrices, first), "tp")
        return jax.lax.psum_scatter(out_AD, "ep", scatter_dimension=0, tiled=True).reshape(B, T, D)

    if meshes.size(*meshes.AXES) == 1:
        return local(x_BTD, index_BTK, weight_BTK, *matrices)
    each = rows("hidden")
    return island(local, (each, each, each, *MATRICES), each)(x_BTD, index_BTK, weight_BTK, *matrices)
