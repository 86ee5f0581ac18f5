"""Attention patterns: which keys a query attends to, and how scores are made from products."""

import math
from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Pattern:
    """The attention pattern of a layer, hashable. Indices count from the start of the token's own sequence.

    Attributes:
      window: sliding window: a token attends to itself and the window - 1 tokens before it; None = no limit
        (arXiv:2004.05150).
      chunk: chunked attention: a token attends only to tokens with the same floor(index / chunk); None = no limit
        (Llama 4).
      scale: factor of the products of queries and keys; None = key size ** -0.5.
      softcap: scores are softcap x tanh(score / softcap) before the mask; None = off (arXiv:2408.00118).
      bidirectional: a token also attends to the tokens after it, with a window to window - 1 of them; for images.

    Raises:
      ValueError: a size is not a whole number of at least 1, or a factor not a finite number above 0; or chunks are
        bidirectional.
    """

    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    bidirectional: bool = False

    def __post_init__(self):
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"attention: {name} must be a whole number of at least 1, or None, got {value!r}")
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value) or value <= 0):
                raise ValueError(f"attention: {name} must be a finite number above 0, or None, got {value!r}")
        if self.bidirectional and self.chunk is not None:
            raise ValueError(f"attention: bidirectional needs no chunk, got {self.chunk}; give each chunk a segment")

    @property
    def span(self) -> int | None:
        """Maximum number of keys of a query, which are its own token and those just before it, if bidirectional also as
        many after it; None = no limit."""
        return min((size for size in (self.window, self.chunk) if size is not None), default=None)

    def first(self, index):
        """Smallest index that a query at `index` attends to, without limits 0; never decreases as the index grows."""
        first = jnp.zeros_like(index)
        if self.chunk is not None:
            first = index - index % self.chunk
        if self.window is not None:
            first = jnp.maximum(first, index - (self.window - 1))
        return first

    def sees(self, index, key_index):
        """Whether a query at `index` attends to a key of its sequence at `key_index`."""
        if not self.bidirectional:
            seen = index >= key_index
        elif self.window is None:
            seen = True
        else:
            seen = key_index < index + self.window
        return seen if self.span is None else seen & (key_index >= self.first(index))

    def factor(self, key_dim: int) -> float:
        """The factor of the products for keys of this size."""
        return key_dim**-0.5 if self.scale is None else self.scale


PLAIN = Pattern()  # every token of the sequence up to the query's own
