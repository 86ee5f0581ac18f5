"""The online softmax of `attention` over pages on CPUs, in C (`models.layers.native`): pages are read in place, and
those that no query of a sequence sees cost nothing."""

import jax
import jax.numpy as jnp

from ....models.attention.pattern import Pattern
from ....models.layers import native

KEPT = jnp.float32, jnp.bfloat16


def supports(keys_PKHC, values_PKCV) -> bool:
    """Whether it reads such pages, and there is a compiler for it."""
    return keys_PKHC.dtype in KEPT and keys_PKHC.shape[3] % 16 == 0 and native.ready()


def untouched(like: jax.ShapeDtypeStruct):
    """Pages with any numbers, which take memory as they are written: `read` sees no position that was not."""
    return jax.ffi.ffi_call("areax_untouched", like, has_side_effect=True)()


def written(pages, k_AJH, v_AJV, page_A, place_A):
    """The pages with some tokens, each at its place in a page, in place; heads are repeated if pages have more."""
    made, aliases = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages), {0: 0, 1: 1}
    call = jax.ffi.ffi_call("areax_put", made, input_output_aliases=aliases)
    return tuple(call(*pages, k_AJH, v_AJV, page_A.astype(jnp.int32), place_A.astype(jnp.int32)))


def with_pages(x_P, whole_N, page_N):
    """The array of keys or values with some whole pages, in place."""
    call = jax.ffi.ffi_call("areax_put_pages", jax.ShapeDtypeStruct(x_P.shape, x_P.dtype), input_output_aliases={0: 0})
    return call(x_P, whole_N, page_N.astype(jnp.int32))


def read(q_BKRH, pages, table_BX, at_BR, first_B, count_B, *, pattern: Pattern):
    """The softmax of R queries of each sequence over `count` pages from its `first`, as `attention_gpu.read`.

    What a query gets depends neither on how many others there are nor on the size of pages.
    """
    (B, K, R, _), V = q_BKRH.shape, pages[1].shape[3]
    made = [jax.ShapeDtypeStruct((B, K, R, size), jnp.float32) for size in (1, 1, V)]
    which = table_BX, at_BR, pattern.first(at_BR), first_B, count_B
    softcap = jnp.float32(pattern.softcap or 0)
    return jax.ffi.ffi_call("areax_paged", made)(q_BKRH.astype(jnp.float32), *pages, *which, softcap)
