"""Expert parallelism over ep, without dropping tokens.

Dispatch methods: "gather" all-gathers the tokens of the ep group, computes the local experts' contributions, and
reduce-scatters them. "all_to_all" sends each token once per chosen expert, and the result back. Within an expert, ffn
is sharded over tp.
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
BLOCKS = 8, 256  # minimum and maximum rows per block
# Specs of the experts' weights, gathered for use. The bias of "down" is added behind the sum over tp, in `moe.mlp`.
WEIGHTS = {
    "gate": P("ep", "tp", None), "up": P("ep", "tp", None), "down": P("ep", None, "tp"),
    "gate_bias": P("ep", "tp"), "up_bias": P("ep", "tp"),
}  # fmt: skip


def per_token(choose, score_BTE):
    """choose(score_BTE) -> [B, T, ...], of each token by itself.

    Each device sorts its own tokens' scores; XLA's partitioner would gather all of them first.
    """
    if meshes.one_device():
        return choose(score_BTE)
    return island(choose, rows(), rows())(score_BTE)


def blocks(P: int, E: int, parts: int = 1) -> tuple[int, int]:
    """(number of blocks, rows per block) with room for P (token, expert) pairs of E experts, for any routing.

    A block has half the rows that an expert gets on average, so padding costs about a quarter.

    Args:
      parts: number of devices among which the pairs' experts are divided, E each, including pairs left out here.
    """
    rows = min(max(BLOCKS[0], 1 << (P // (2 * E * parts)).bit_length() >> 1), BLOCKS[1])
    return -(-P // rows) + min(E, P), rows


def dispatch(compute, x_BTD, index_BTK, weight_BTK, w, method: Method = "gather"):
    """Computes each token's mixture of experts, [B, T, D], on the ambient mesh.

    Args:
      compute: f(x_AD, index_AK, weight_AK, w, first, parts) -> [A, D], the contribution of the experts
        [first, first + E) whose weights are given, one of `parts` equal parts; other indices contribute nothing.
      w: {"up": w_EFD, "down": w_EDF}, and those of `WEIGHTS` that the experts have.
    """

    def flat(mix, x_BTD, index_BTK, weight_BTK, w):
        B, T, D = x_BTD.shape
        tokens = (x.reshape(B * T, -1) for x in (x_BTD, index_BTK, weight_BTK))
        return mix(*tokens, w).reshape(B, T, D)

    if meshes.one_device():
        return flat(partial(compute, first=0, parts=1), x_BTD, index_BTK, weight_BTK, w)
    dispatched = {"gather": gather, "all_to_all": all_to_all}[method]
    local = partial(flat, lambda *tokens: jax.lax.psum(dispatched(compute, *tokens), "tp"))
    each, specs = rows(), {name: _spec(x, WEIGHTS[name]) for name, x in w.items()}
    return island(local, (each, each, each, specs), each)(x_BTD, index_BTK, weight_BTK, w)


def _spec(w, spec: P):
    """The spec of a weight while in use, also of its LoRA factors."""
    if not isinstance(w, param.LoRAWeight):
        return spec
    a, b = param.factors(tuple(spec))
    return dataclasses.replace(w, weight=spec, a=P(*a), b=P(*b))


def gather(compute, x_AD, index_AK, weight_AK, w):
    """The mixture of this device's tokens, [A, D], before the sum over tp."""
    gathered = [jax.lax.all_gather(x, "ep", axis=0, tiled=True) for x in (x_AD, index_AK, weight_AK)]
    first = w["up"].shape[0] * jax.lax.axis_index("ep")
    out_AD = compute(*gathered, w, first, jax.lax.axis_size("ep"))
    return jax.lax.psum_scatter(out_AD, "ep", scatter_dimension=0, tiled=True)


def all_to_all(compute, x_AD, index_AK, weight_AK, w):
    """The same result as `gather`. (Token, expert) pairs are sorted by expert, and thus by device; buffers have room
    for all pairs of the group going to one device, so none is dropped."""
    devices, E = jax.lax.axis_size("ep"), w["up"].shape[0]
    A, K = index_AK.shape
    expert_P = index_AK.reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    count_NNE = jax.lax.all_gather(jnp.bincount(expert_P, length=devices * E), "ep").reshape(devices, devices, E)
    count_NN = jnp.sum(count_NNE, -1)  # pairs from device to device
    received_RD = exchange(x_AD[order_P // K], count_NN, devices * A * K, "ep")
    # Received rows are sorted by sender, then by expert.
    end_NE = jnp.cumsum(count_NNE[:, jax.lax.axis_index("ep")].reshape(-1))
    piece_R = jnp.searchsorted(end_NE, jnp.arange(len(received_RD)), side="right")
    expert_R = jnp.where(piece_R < len(end_NE), piece_R % E, E)
    ones_R = jnp.ones((len(received_RD), 1), x_AD.dtype)
    result_RD = compute(received_RD, expert_R[:, None], ones_R, w, 0, devices)
    out_PD = exchange(result_RD, count_NN.T, A * K, "ep")[jnp.argsort(order_P)]
    wide = jnp.promote_types(x_AD.dtype, jnp.float32)
    out_AD = jnp.einsum("AKD,AK->AD", out_PD.reshape(A, K, -1), weight_AK, preferred_element_type=wide)
    return out_AD.astype(x_AD.dtype)
