"""Experts split over ep, each device computing its own. Nothing is dropped, whatever tokens choose.

Two ways for tokens to reach them. "gather": every device of the ep group gets all tokens of the group, computes its
experts' part, and the parts are summed where the tokens came from. "all_to_all": a token travels once for each expert
that it chose, and its result back. Inside an expert, ffn is split over tp.
"""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core import param
from . import mesh as meshes
from .exchange import exchange
from .shard_map import island, rows

Method = Literal["gather", "all_to_all"]
BLOCKS = 8, 256  # fewest and most rows of a block
MATRICES = P("ep", "tp", None), P("ep", "tp", None), P("ep", None, "tp")  # gate, up, down while they are used


def top(score_BTE, k: int):
    """Numbers of the k experts with the highest scores, [B, T, k].

    Each device sorts the scores of its own tokens; the partitioner would gather those of all tokens first.
    """
    best = lambda score_BTE: jax.lax.top_k(score_BTE, k)[1]
    if meshes.alone():
        return best(score_BTE)
    return island(best, rows(), rows())(score_BTE)


def blocks(P: int, E: int, parts: int = 1) -> tuple[int, int]:
    """(blocks, rows of a block) with room for P pairs of a token and one of E experts, whichever they choose.

    A block is half of what an expert gets on average, so that padding costs about a quarter.

    Args:
      parts: how many times E experts the pairs are for, those that are left out included.
    """
    rows = min(max(BLOCKS[0], 1 << (P // (2 * E * parts)).bit_length() >> 1), BLOCKS[1])
    return -(-P // rows) + min(E, P), rows


def dispatch(compute, x_BTD, index_BTK, weight_BTK, matrices, method: Method = "gather"):
    """The mixture of each token, [B, T, D].

    Args:
      compute: f(x_AD, index_AK, weight_AK, matrices, first, parts) -> [A, D], the part of the experts from number
        `first` on whose matrices (gate_EFD, up_EFD, down_EDF) it is given, one of `parts` equal parts; other numbers
        give nothing.
    """

    def flat(mix, x_BTD, index_BTK, weight_BTK, *matrices):
        B, T, D = x_BTD.shape
        tokens = (x.reshape(B * T, -1) for x in (x_BTD, index_BTK, weight_BTK))
        return mix(*tokens, matrices).reshape(B, T, D)

    if meshes.alone():
        return flat(partial(compute, first=0, parts=1), x_BTD, index_BTK, weight_BTK, *matrices)
    travel = {"gather": gather, "all_to_all": all_to_all}[method]
    local = partial(flat, lambda *tokens: jax.lax.psum(travel(compute, *tokens), "tp"))
    each = rows()
    specs = map(_spec, matrices, MATRICES)
    return island(local, (each, each, each, *specs), each)(x_BTD, index_BTK, weight_BTK, *matrices)


def _spec(w, spec: P):
    """Where a matrix lies while it is used, and the factors beside it."""
    if not isinstance(w, param.LoRAWeight):
        return spec
    a, b = param.factors(tuple(spec))
    return dataclasses.replace(w, weight=spec, a=P(*a), b=P(*b))


def gather(compute, x_AD, index_AK, weight_AK, matrices):
    """The mixture of this device's tokens, [A, D], but for the sum over tp."""
    everyone = [jax.lax.all_gather(x, "ep", axis=0, tiled=True) for x in (x_AD, index_AK, weight_AK)]
    first = matrices[0].shape[0] * jax.lax.axis_index("ep")
    out_AD = compute(*everyone, matrices, first, jax.lax.axis_size("ep"))
    return jax.lax.psum_scatter(out_AD, "ep", scatter_dimension=0, tiled=True)


def all_to_all(compute, x_AD, index_AK, weight_AK, matrices):
    """The same. Pairs of a token and an expert are sorted by expert, and so by device; buffers have room for the case
    that all pairs of the group go to one device, so that none is ever dropped."""
    devices, own = jax.lax.axis_size("ep"), matrices[0].shape[0]
    A, K = index_AK.shape
    expert_P = index_AK.reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    count_NNE = jax.lax.all_gather(jnp.bincount(expert_P, length=devices * own), "ep").reshape(devices, devices, own)
    count_NN = jnp.sum(count_NNE, -1)  # pairs from device to device
    there_RD = exchange(x_AD[order_P // K], count_NN, devices * A * K, "ep")
    # What came stands by sender, and of each sender by expert.
    end_NE = jnp.cumsum(count_NNE[:, jax.lax.axis_index("ep")].reshape(-1))
    piece_R = jnp.searchsorted(end_NE, jnp.arange(len(there_RD)), side="right")
    expert_R = jnp.where(piece_R < len(end_NE), piece_R % own, own)
    ones_R = jnp.ones((len(there_RD), 1), x_AD.dtype)
    there_RD = compute(there_RD, expert_R[:, None], ones_R, matrices, 0, devices)
    out_PD = exchange(there_RD, count_NN.T, A * K, "ep")[jnp.argsort(order_P)]
    wide = jnp.promote_types(x_AD.dtype, jnp.float32)
    out_AD = jnp.einsum("AKD,AK->AD", out_PD.reshape(A, K, -1), weight_AK, preferred_element_type=wide)
    return out_AD.astype(x_AD.dtype)
