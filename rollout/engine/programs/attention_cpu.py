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


def read(q_BKRH, pages, table_BX, at_BR, first_B, count_B, *, pattern: Pattern):
    """The softmax of R queries of each sequence over `count` pages from its `first`, as `attention_gpu.read`.

    What a query gets depends neither on how many others there are nor on the size of pages.
    """
    (B, K, R, _), V = q_BKRH.shape, pages[1].shape[3]
    made = [jax.ShapeDtypeStruct((B, K, R, size), jnp.float32) for size in (1, 1, V)]
    which = table_BX, at_BR, pattern.first(at_BR), first_B, count_B
    softcap = jnp.float32(pattern.softcap or 0)
    return jax.ffi.ffi_call("areax_paged", made)(q_BKRH.astype(jnp.float32), *pages, *which, softcap)
