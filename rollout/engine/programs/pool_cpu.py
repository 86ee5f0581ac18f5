"""Pages on CPUs, in C (`models.layers.native`): memory that is taken as it is written, and writing in place."""

import jax
import jax.numpy as jnp


def untouched(like: jax.ShapeDtypeStruct):
    """Pages that take memory as they are written, and hold any numbers until then, but for page 0: it is never written,
    attention reads it for masked positions, and it is zeros."""
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


def copied(x_P, from_N, to_N):
    """Copies pages `from` of keys or values to `to`, in place. No target may be the source of another pair; pairs of
    equal numbers do nothing."""
    call = jax.ffi.ffi_call("areax_copy_pages", jax.ShapeDtypeStruct(x_P.shape, x_P.dtype), input_output_aliases={0: 0})
    return call(x_P, from_N.astype(jnp.int32), to_N.astype(jnp.int32))
