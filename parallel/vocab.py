"""Vocabulary-parallel embedding and head: rows are sharded over tp, logits gathered only for `per_chunk`."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core import logprobs
from ..core.shapes import shaped
from . import mesh as meshes
from .shard_map import island, rows

TABLE = P("tp", None)  # embedding or head matrix while in use


def take(table_VD, token_BT):
    """Embedding lookup, [B, T, D]: each device looks up the tokens in its shard, summed over tp."""
    if meshes.one_device():
        return jnp.take(table_VD, token_BT, axis=0)

    def local(table_VD, token_BT):
        V = table_VD.shape[0]
        row_BT = token_BT - V * jax.lax.axis_index("tp")
        here_BT = (row_BT >= 0) & (row_BT < V)
        x_BTD = jnp.take(table_VD, jnp.clip(row_BT, 0, V - 1), axis=0)
        return jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0), "tp")

    return island(local, (TABLE, rows()), rows())(table_VD, token_BT)


@shaped
def score(
    hidden_BTD, head_VD, target_BT, *, temperature_BT, chunk=None, per_chunk=None, beside=None, others=(), logits=()
):
    """`core.logprobs.from_hidden` for rows of tokens: (logp, entropy, logsumexp), each f32[B, T], and extras.

    Args:
      per_chunk: gets full rows of logits, one chunk at a time.
      beside: pytree of [B, T, ...], passed to `per_chunk` in slices.
      others: pairs (hidden_BTE, head_VE).
      logits: as in `from_hidden`.
    """

    def local(hidden_BTD, head_VD, target_BT, temperature_BT, beside, others, axis=None):
        B, T, _ = hidden_BTD.shape
        flat = lambda x: x.reshape(B * T, *x.shape[2:])
        out = logprobs.from_hidden(
            flat(hidden_BTD), head_VD, flat(target_BT), temperature=flat(temperature_BT), chunk=chunk,
            per_chunk=per_chunk, beside=jax.tree.map(flat, beside),
            others=[(flat(hidden_BTE), head_VE) for hidden_BTE, head_VE in others], logits=logits, axis=axis,
        )  # fmt: skip
        return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), out)

    if meshes.one_device():
        return local(hidden_BTD, head_VD, target_BT, temperature_BT, beside, others)
    split = functools.partial(local, axis="tp" if meshes.size("tp") > 1 else None)
    each = rows()
    specs = each, TABLE, each, each, each, ((each, TABLE),) * len(others)
    return island(split, specs, each)(hidden_BTD, head_VD, target_BT, temperature_BT, beside, others)
