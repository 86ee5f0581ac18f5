"""The memory of the engine's sequences: pages of C positions, and states of recurrent layers.

Layers of one kind (`models.paging`) share page numbers: `keys [page, kv_head, key_dim, C]` and
`values [page, kv_head, C, value_dim]` of each layer with keys and values of its own. A recurrent layer has {name: state
[slot, ...]} of running sequences, and {name: state [row, ...]} of kept prefixes, in fp32; a step replaces the first:
unlike keys and values they cannot be cut back to a prompt. What is in page 0 never counts, but is finite, and row 0 has
the state before any token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ....core import hardware
from ....models import paging
from ....models.layer import Layer, Recurrent
from ....models.layers import native
from ....models.paging import Kind
from ....parallel import mesh
from . import attention_cpu, pool_cpu


def empty(
    records: Sequence[Layer], kinds: Sequence[Kind], counts: Sequence[int], slots: int, C: int, dtype
) -> list[Any]:
    """Memory of layers with these records, for so many pages of each kind."""
    make = functools.partial(_made, records, kinds, counts, slots, C, dtype)
    if mesh.one_device():
        return make()
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract(*make.args)))()


def abstract(*of) -> list[Any]:
    """`empty` as shapes, dtypes and shardings on the ambient mesh."""
    split = lambda x: NamedSharding(jax.sharding.get_mesh(), P() if mesh.one_device() else sharding(x))
    on = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split(x))
    return jax.tree.map(on, jax.eval_shape(functools.partial(_made, *of)))


def _made(records, kinds, counts, slots: int, C: int, dtype) -> list[Any]:

    def one(i, layer, kind):
        if isinstance(layer, Recurrent):
            zeros = lambda n: {name: jnp.zeros((n, *shape), jnp.float32) for name, shape in layer.state}
            return (zeros(slots), zeros(counts[kind] + 1)) if layer.state else ()
        if layer.source is not None:
            return ()  # pages of another layer
        K, H, V = layer.cached
        K, n = paging.heads(K, mesh.size("tp")), counts[kind] + 1
        pages = jax.ShapeDtypeStruct((n, K, H, C), dtype), jax.ShapeDtypeStruct((n, K, C, V), dtype)
        if in_c() and attention_cpu.supports(*pages):
            return tuple(map(pool_cpu.untouched, pages))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in pages)

    of_layer = paging.of_layers(kinds, records)
    return [one(i, layer, of_layer[i]) for i, layer in enumerate(records)]


def in_c() -> bool:
    """Whether calls in C write pages: on one CPU, where XLA would copy all to change some."""
    return mesh.one_device() and native.ready()


def sharding(x) -> P:
    """How an array of the pool is split over tp: by heads or channels, if the devices divide them."""
    return P() if x.shape[1] % mesh.size("tp") else P(None, "tp")


def pinned(held):
    """The pool, to be returned by a program as it was given."""
    if mesh.one_device():
        return held
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding(x)), held)


def replicated(tree):
    """A tree of results, whole on each device, so that a process can read them."""
    if mesh.one_device():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)


def stored(x, dtype):
    """Casts keys or values to the dtype of the pages, clipped to the range of float8, which overflows to NaN."""
    if jnp.dtype(dtype).itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -most, most)
    return x.astype(dtype)


def write_chunks(pages, k_RTKH, v_RTKV, page_R):
    """Writes chunks of T tokens to the start of their pages."""
    if in_c():
        place_RT = jnp.broadcast_to(jnp.arange(k_RTKH.shape[1]), k_RTKH.shape[:2])
        return write_tokens(pages, k_RTKH, v_RTKV, jnp.broadcast_to(page_R[:, None], place_RT.shape), place_RT)
    keys_PKHC, values_PKCV = pages
    T, copies = k_RTKH.shape[1], keys_PKHC.shape[1] // k_RTKH.shape[2]
    k_RTKH, v_RTKV = (stored(jnp.repeat(x, copies, axis=2), keys_PKHC.dtype) for x in (k_RTKH, v_RTKV))
    keys_PKHC = keys_PKHC.at[page_R, :, :, :T].set(k_RTKH.transpose(0, 2, 3, 1))
    return keys_PKHC, values_PKCV.at[page_R, :, :T].set(v_RTKV.transpose(0, 2, 1, 3))


def write_tokens(pages, k_SQKH, v_SQKV, page_SQ, place_SQ):
    """Writes Q tokens of each slot, each to a place in its page."""
    keys_PKHC, values_PKCV = pages
    if in_c():
        flat = lambda x_SQ: x_SQ.reshape(-1, *x_SQ.shape[2:])
        k_AKH, v_AKV = (stored(flat(x), keys_PKHC.dtype) for x in (k_SQKH, v_SQKV))
        return pool_cpu.written(pages, k_AKH, v_AKV, flat(page_SQ), flat(place_SQ))
    copies = keys_PKHC.shape[1] // k_SQKH.shape[2]
    k_SQKH, v_SQKV = (stored(jnp.repeat(x, copies, axis=2), keys_PKHC.dtype) for x in (k_SQKH, v_SQKV))
    if hardware.platform() == "tpu":
        return _in_whole_pages(pages, k_SQKH, v_SQKV, page_SQ, place_SQ)
    return keys_PKHC.at[page_SQ, :, :, place_SQ].set(k_SQKH), values_PKCV.at[page_SQ, :, place_SQ].set(v_SQKV)


def _in_whole_pages(pages, k_SQKH, v_SQKV, page_SQ, place_SQ):
    """`write_tokens` that reads and writes whole pages, one token of each slot after another: XLA for TPUs would copy
    all pages in every step, to a layout in which the parts of one that a token has stand together, and back."""
    keys_PKHC, values_PKCV = pages
    at_SQC = place_SQ[..., None] == jnp.arange(keys_PKHC.shape[3])[None, None]
    for q in range(page_SQ.shape[1]):
        page_S, at_SC = page_SQ[:, q], at_SQC[:, q]
        k_SKH1, v_SK1V = k_SQKH[:, q, :, :, None], v_SQKV[:, q, :, None]
        keys_PKHC = keys_PKHC.at[page_S].set(jnp.where(at_SC[:, None, None], k_SKH1, keys_PKHC[page_S]))
        values_PKCV = values_PKCV.at[page_S].set(jnp.where(at_SC[:, None, :, None], v_SK1V, values_PKCV[page_S]))
    return keys_PKHC, values_PKCV


@functools.partial(jax.jit, static_argnames=("states",), donate_argnames=("pool",))
def wipe(pool, used, *, states: frozenset[int]):
    """Zeroes values of the first pages, as many as used[layer], and all states (of layers `states`). Keys may stay:
    scores of masked positions are replaced, but a non-finite value would survive a weight of 0."""

    def clean(values_PKCV, count):
        zero_1KCV = jnp.zeros_like(values_PKCV[:1])
        put = lambda page, values_PKCV: jax.lax.dynamic_update_slice(values_PKCV, zero_1KCV, (page, 0, 0, 0))
        return jax.lax.fori_loop(0, count, put, values_PKCV)

    def layer(i, held):
        if i in states:
            return jax.tree.map(jnp.zeros_like, held)
        return (held[0], clean(held[1], used[i])) if held else held

    return pinned([layer(i, held) for i, held in enumerate(pool)])


def _with_pages(x_P, whole_N, page_N):
    return pool_cpu.with_pages(x_P, whole_N, page_N) if in_c() else x_P.at[page_N].set(whole_N)


def _copied(x_P, from_N, to_N):
    return pool_cpu.copied(x_P, from_N, to_N) if in_c() else x_P.at[to_N].set(x_P[from_N])


@functools.partial(jax.jit, static_argnames=("of_layer", "states"), donate_argnames=("pool",))
def copy(pool, page_K2N, keep_2N, restore_2N, *, of_layer: tuple[int, ...], states: frozenset[int]):
    """Copies pages page_K2N[kind] = (from, to); then states of slots to rows, and of rows to slots.

    Targets beyond the last slot or row are ignored, to fill up.
    """

    def layer(i, held):
        if i in states:
            now, kept = held
            kept = {name: kept[name].at[keep_2N[1]].set(now[name][keep_2N[0]], mode="drop") for name in kept}
            put = lambda name: now[name].at[restore_2N[1]].set(kept[name][restore_2N[0]], mode="drop")
            return {name: put(name) for name in now}, kept
        source_N, target_N = page_K2N[of_layer[i]] if held else (None, None)
        return tuple(_copied(x, source_N, target_N) for x in held)

    return pinned([layer(i, held) for i, held in enumerate(pool)])


@functools.partial(jax.jit, static_argnames=("of_layer", "states"))
def read(pool, page_KN, slot, *, of_layer: tuple[int, ...], states: frozenset[int]):
    """The pages of a sequence, and the states of its slot, to keep them elsewhere."""

    def layer(i, held):
        if i in states:
            return {name: x[slot] for name, x in held[0].items()}
        return tuple(x[page_KN[of_layer[i]]] for x in held)

    return [layer(i, held) for i, held in enumerate(pool)]


@functools.partial(jax.jit, static_argnames=("of_layer", "states"), donate_argnames=("pool",))
def restore(pool, saved, page_KN, slot, *, of_layer: tuple[int, ...], states: frozenset[int]):
    """Puts what `read` returned to other pages, and to a slot."""

    def layer(i, held, saved):
        if i in states:
            return {name: x.at[slot].set(saved[name]) for name, x in held[0].items()}, held[1]
        return tuple(_with_pages(x, own, page_KN[of_layer[i]]) for x, own in zip(held, saved, strict=True))

    return pinned([layer(i, *both) for i, both in enumerate(zip(pool, saved, strict=True))])
