"""Multi-head latent attention over a cache of latent vectors, without making keys and values of them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .linear import MultiLoRAWeight, Transposed


@dataclass(frozen=True)
class Latent:
    """What decoding caches of a token in place of the keys and values of all heads (DeepSeek-V2, arXiv:2405.04434).

    The products that make keys and values of latent vectors are absorbed: keys' into queries, values' into outputs. So
    attention has one head of keys and values, which all queries share, and equals the ordinary one up to rounding.

    Attributes:
      kept_BT1L: the latent vector of each token, then the part of its key that turns.
      up: the weight that makes the rest of keys, and values, from latent vectors, [heads x (rest + V), rank].
      heads, rest, rank: number of heads, and sizes of that rest of a key, and of a latent vector.
    """

    kept_BT1L: Any
    up: Any
    heads: int
    rest: int
    rank: int

    @property
    def cached(self):
        """Keys and values to cache, [B, T, 1, L] and [B, T, 1, rank]."""
        return self.kept_BT1L, self.kept_BT1L[..., : self.rank]

    def queries(self, q_BTNH):
        """Queries for the cached keys, [B, T, N, L]."""
        still_BTNS, turned_BTNP = jnp.split(q_BTNH, [self.rest], -1)
        keys = slice(0, self.rest)
        return jnp.concatenate([_back(still_BTNS, self.up, self.heads, keys), turned_BTNP], -1)

    def outputs(self, mixed_BTNR):
        """Outputs of the heads, given their sums over cached values, [B, T, N, V]."""
        return _through(mixed_BTNR, self.up, self.heads, slice(self.rest, None))


def _back(x_BTNS, w, heads: int, rows: slice):
    """x of each head times these rows of its part of the weight, [B, T, N, rank]."""
    if isinstance(w, MultiLoRAWeight):
        a_BOR, b_BNSO = _adapter(w, heads, rows, x_BTNS.dtype)
        change_BTNR = jnp.einsum("BTNO,BOR->BTNR", jnp.einsum("BTNS,BNSO->BTNO", x_BTNS, b_BNSO), a_BOR)
        return _adapted(_back(x_BTNS, w.weight, heads, rows), change_BTNR, w.index)
    return jnp.einsum("BTNS,RNS->BTNR", x_BTNS, _matrix(w, heads, rows, x_BTNS.dtype))


def _through(x_BTNR, w, heads: int, rows: slice):
    """These rows of each head's part of the weight times its x, [B, T, N, rows]."""
    if isinstance(w, MultiLoRAWeight):
        a_BOR, b_BNSO = _adapter(w, heads, rows, x_BTNR.dtype)
        change_BTNS = jnp.einsum("BTNO,BNSO->BTNS", jnp.einsum("BTNR,BOR->BTNO", x_BTNR, a_BOR), b_BNSO)
        return _adapted(_through(x_BTNR, w.weight, heads, rows), change_BTNS, w.index)
    return jnp.einsum("BTNR,RNS->BTNS", x_BTNR, _matrix(w, heads, rows, x_BTNR.dtype))


def _matrix(w, heads: int, rows: slice, dtype):
    w_RI = w.weight if isinstance(w, Transposed) else w.T
    return w_RI.reshape(w_RI.shape[0], heads, -1)[:, :, rows].astype(dtype)


def _adapter(w: MultiLoRAWeight, heads: int, rows: slice, dtype):
    b_BIO = w.b[w.index]
    b_BNSO = b_BIO.reshape(len(b_BIO), heads, -1, b_BIO.shape[-1])[:, :, rows]
    return w.a[w.index].astype(dtype), b_BNSO.astype(dtype)


def _adapted(plain, change, index_B):
    return jnp.where((index_B > 0)[:, None, None, None], plain + change, plain)
