"""Expert parallelism over ep, without dropping tokens.

Dispatch methods: "gather" all-gathers the tokens of the ep group, computes the local experts' contributions, and
reduce-scatters them. "all_to_all" sends each token once per chosen expert, and the result back. Within an expert, ffn
is sharded over tp. On `mesh.generating`, which does not split rows, each device computes its experts' contributions to
all tokens, and one sum over all devices completes them.

Buffers have room for `capacity` (token, expert) pairs. If a device's experts get more, it computes them in rounds.
"""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core import param
from . import mesh as meshes
from . import rounds
from .exchange import before, exchange
from .shard_map import island, rows

Method = Literal["gather", "all_to_all"]
BLOCKS = 8, 256  # minimum and maximum rows per block
SLACK = 2  # see `capacity`
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


def capacity(P: int, parts: int) -> int:
    """Pairs that a device computes in a round, if P (token, expert) pairs are divided among `parts` devices: twice the
    even share.

    A device holds several experts, whose loads partly average out: with loads that a balancing loss or bias keeps near
    each other no device gets twice the mean, so one round is the rule. Beyond it, a round costs time in proportion to
    its pairs, but no memory.
    """
    return min(P, SLACK * -(-P // parts))


def blocks(P: int, E: int, parts: int = 1) -> tuple[int, int]:
    """(number of blocks, rows per block) with room for a round's (token, expert) pairs of E experts, for any routing.

    A block has half the rows that an expert gets on average, so padding costs about a quarter.

    Args:
      P: pairs, including those left out here.
      parts: number of devices among which the pairs are divided, with E experts each.
    """
    rows, room = min(max(BLOCKS[0], 1 << (P // (2 * E * parts)).bit_length() >> 1), BLOCKS[1]), capacity(P, parts)
    return -(-room // rows) + min(E, room), rows


def dispatch(compute, x_BTD, index_BTK, weight_BTK, w, method: Method = "gather"):
    """Computes each token's mixture of experts, [B, T, D], on the ambient mesh.

    Args:
      compute: f(x_AD, index_AK, weight_AK, w, first, parts) -> [A, D], the contribution of the experts
        [first, first + E) whose weights are given, one of `parts` equal parts; other indices contribute nothing. At
        most capacity(A * K, parts) are of these experts.
      w: {"up": w_EFD, "down": w_EDF}, and those of `WEIGHTS` that the experts have.
    """

    def flat(mix, x_BTD, index_BTK, weight_BTK, w):
        B, T, D = x_BTD.shape
        tokens = (x.reshape(B * T, -1) for x in (x_BTD, index_BTK, weight_BTK))
        return mix(*tokens, w).reshape(B, T, D)

    if meshes.one_device():
        return flat(partial(compute, first=0, parts=1), x_BTD, index_BTK, weight_BTK, w)
    if meshes.EXPERTS in jax.sharding.get_abstract_mesh().shape:
        axis, over, dispatched = meshes.EXPERTS, [meshes.EXPERTS, "tp"], whole
    else:
        axis, over, dispatched = "ep", ["tp"], {"gather": gather, "all_to_all": all_to_all}[method]
    local = partial(flat, lambda *tokens: jax.lax.psum(dispatched(compute, *tokens), tuple(over)))
    each, specs = rows(), {name: _spec(x, P(axis, *WEIGHTS[name][1:])) for name, x in w.items()}
    return island(local, (each, each, each, specs), each)(x_BTD, index_BTK, weight_BTK, w)


def _spec(w, spec: P):
    """The spec of a weight while in use, also of its LoRA factors."""
    if not isinstance(w, param.LoRAWeight):
        return spec
    a, b = param.factors(tuple(spec))
    return dataclasses.replace(w, weight=spec, a=P(*a), b=P(*b))


def whole(compute, x_AD, index_AK, weight_AK, w):
    """This device's part of the mixture of tokens that all devices have, [A, D], before the sum over EXPERTS and tp.

    There are no rounds: a token's would depend on other tokens, and so would the order of its sum.
    """
    return compute(x_AD, index_AK, weight_AK, w, w["up"].shape[0] * jax.lax.axis_index(meshes.EXPERTS), 1)


def gather(compute, x_AD, index_AK, weight_AK, w):
    """The mixture of this device's tokens, [A, D], before the sum over tp."""
    x_AD, index_AK, weight_AK = (jax.lax.all_gather(x, "ep", axis=0, tiled=True) for x in (x_AD, index_AK, weight_AK))
    devices, E = jax.lax.axis_size("ep"), w["up"].shape[0]
    first = E * jax.lax.axis_index("ep")
    here_P = ((index_AK >= first) & (index_AK < first + E)).reshape(-1)
    room = capacity(index_AK.size, devices)

    def part(r, inputs, fixed):
        (x_AD, weight_AK, w), (index_AK, round_AK, first) = inputs, fixed
        return compute(x_AD, jnp.where(round_AK == r, index_AK, -1), weight_AK, w, first, devices)

    fixed = index_AK, ((jnp.cumsum(here_P) - here_P) // room).reshape(index_AK.shape), first
    out_AD = _rounds(part, jnp.sum(here_P), index_AK.size, devices, (x_AD, weight_AK, w), fixed)
    return jax.lax.psum_scatter(out_AD, "ep", scatter_dimension=0, tiled=True)


def all_to_all(compute, x_AD, index_AK, weight_AK, w):
    """The same result as `gather`. (Token, expert) pairs are sorted by expert, and thus by device."""
    devices, E = jax.lax.axis_size("ep"), w["up"].shape[0]
    A, K = index_AK.shape
    expert_P = index_AK.reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    count_NNE = jax.lax.all_gather(jnp.bincount(expert_P, length=devices * E), "ep").reshape(devices, devices, E)
    C = capacity(devices * A * K, devices)

    def part(r, inputs, fixed):
        (x_AD, weight_AK, w), (order_P, count_NNE) = inputs, fixed
        # A device receives rows sorted by sender, then by expert; in this round those from r * C on.
        count_NN = jnp.sum(count_NNE, -1)
        place_NN = before(count_NN, 0) - r * C
        skip_NN = jnp.clip(-place_NN, 0, count_NN)
        send_NN = jnp.clip(C - place_NN, 0, count_NN) - skip_NN
        here_NN, there_NN = before(count_NN, 1) + skip_NN, place_NN + skip_NN
        received_CD = exchange(x_AD[order_P // K], send_NN, here_NN, there_NN, C, "ep")
        end_NE = jnp.cumsum(count_NNE[:, jax.lax.axis_index("ep")].reshape(-1))
        piece_C = jnp.searchsorted(end_NE, r * C + jnp.arange(C), side="right")
        expert_C = jnp.where(piece_C < len(end_NE), piece_C % E, E)
        ones_C1 = jnp.ones((C, 1), x_AD.dtype)
        result_CD = compute(received_CD, expert_C[:, None], ones_C1, w, 0, min(devices, SLACK))
        out_PD = exchange(result_CD, send_NN.T, there_NN.T, here_NN.T, A * K, "ep")[jnp.argsort(order_P)]
        wide = jnp.promote_types(x_AD.dtype, jnp.float32)
        out_AD = jnp.einsum("AKD,AK->AD", out_PD.reshape(A, K, -1), weight_AK, preferred_element_type=wide)
        return out_AD.astype(x_AD.dtype)

    # The most of any device, so that all take part in as many exchanges.
    most = jax.lax.pmax(jnp.max(jnp.sum(count_NNE, (0, 2))), meshes.AXES)
    return _rounds(part, most, devices * A * K, devices, (x_AD, weight_AK, w), (order_P, count_NNE))


def _rounds(part, pairs, P: int, devices: int, inputs, fixed):
    """The sum of `part` over as many rounds as it takes to compute `pairs` of the group's P pairs."""
    room = capacity(P, devices)
    return part(0, inputs, fixed) if room == P else rounds.total(part, -(-pairs // room), inputs, fixed)
