"""Vocabulary-parallel embedding and head: rows are sharded over tp, columns over fsdp and ep; logits are gathered only
for `per_chunk`."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core import logprobs
from ..core.shapes import shaped
from . import mesh as meshes
from .rules import spec
from .shard_map import island, rows

TABLE = P("tp", None)  # a frozen model's head matrix while in use
STORED = "vocab", "embed"  # axes of embedding and head matrices, as devices hold them
COLUMNS = "fsdp", "ep"  # mesh axes that split their columns, and the rows of a batch


def take(table_VD, token_BT, dtype):
    """Embedding lookup, [B, T, D] in `dtype`.

    A device looks up the tokens of all that share its columns (fsdp, ep) in the part of the table that it holds, and
    they trade what they found: the table is never gathered, nor its gradient. Rows are summed over tp.
    """
    if meshes.one_device():
        return jnp.take(table_VD, token_BT, axis=0).astype(dtype)

    def local(table_VD, token_BT):
        V = table_VD.shape[0]
        token_BT = jax.lax.all_gather(token_BT, COLUMNS, axis=0, tiled=True)
        row_BT = token_BT - V * jax.lax.axis_index("tp")
        here_BT = (row_BT >= 0) & (row_BT < V)
        x_BTD = jnp.take(table_VD, jnp.clip(row_BT, 0, V - 1), axis=0).astype(dtype)
        x_BTD = jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0), "tp")
        return jax.lax.all_to_all(x_BTD, COLUMNS, 0, 2, tiled=True)

    return island(local, (spec(STORED), rows()), rows())(table_VD, token_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part_VD, dtype):
    """(the whole matrix in `dtype`; a stand-in for it, for gradients alone: its numbers are never read), both
    transposed.

    Only the first is sent, so a head that is computed in bf16 is not gathered in fp32; gradients are summed in the
    matrix's own dtype. Parts are joined and scattered along their first axis: along another a device would transpose
    the whole.
    """
    whole_DV = jax.lax.all_gather(part_VD.T.astype(dtype), COLUMNS, axis=0, tiled=True)
    return whole_DV, jnp.zeros(whole_DV.shape, part_VD.dtype)


def _scatter(dtype, _, given):
    return (jax.lax.psum_scatter(given[1], COLUMNS, scatter_dimension=0, tiled=True).T,)


_gathered.defvjp(lambda part_VD, dtype: (_gathered(part_VD, dtype), None), _scatter)


@shaped
def score(
    hidden_BTD, head_VD, target_BT, *, temperature_BT, kept_BTK=None, needed_BT=None, chunk=None, per_chunk=None,
    beside=None, others=(), logits=(),
):  # fmt: skip
    """`core.logprobs.from_hidden` for rows of tokens: (logp, entropy, logsumexp), each f32[B, T], and extras.

    Args:
      kept_BTK: ids of the tokens that the sampler kept, as in `from_hidden`; None = all.
      needed_BT: bool, the tokens whose results are read, as in `from_hidden`; None = all.
      per_chunk: gets full rows of logits, one chunk at a time.
      beside: pytree of [B, T, ...], passed to `per_chunk` in slices.
      others: pairs (hidden_BTE, head_VE).
      logits: as in `from_hidden`.
    """

    def local(
        hidden_BTD, head_VD, target_BT, temperature_BT, kept_BTK, needed_BT, beside, others, axis=None, turned=None
    ):  # fmt: skip
        B, T, _ = hidden_BTD.shape
        flat = lambda x: x.reshape(B * T, *x.shape[2:])
        out = logprobs.from_hidden(
            flat(hidden_BTD), head_VD, flat(target_BT), temperature=flat(temperature_BT),
            kept_AK=None if kept_BTK is None else flat(kept_BTK),
            needed_A=None if needed_BT is None else flat(needed_BT), chunk=chunk, per_chunk=per_chunk,
            beside=jax.tree.map(flat, beside),
            others=[(flat(hidden_BTE), head_VE) for hidden_BTE, head_VE in others], logits=logits, axis=axis,
            turned=turned, together=jax.sharding.get_abstract_mesh().axis_names,
        )  # fmt: skip
        return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), out)

    if meshes.one_device():
        return local(hidden_BTD, head_VD, target_BT, temperature_BT, kept_BTK, needed_BT, beside, others)

    def split(hidden_BTD, head_VD, *given):
        one = functools.partial(local, axis="tp" if meshes.size("tp") > 1 else None)
        if meshes.size(*COLUMNS) == 1:
            return one(hidden_BTD, head_VD, *given)
        return one(hidden_BTD, None, *given, turned=_gathered(head_VD, hidden_BTD.dtype))

    each = rows()
    specs = each, spec(STORED), each, each, each, each, each, ((each, TABLE),) * len(others)
    given = target_BT, temperature_BT, kept_BTK, needed_BT, beside, others
    return island(split, specs, each)(hidden_BTD, head_VD, *given)
