"""Prompts with images on the wire: one token stands for each image, as chat templates write it.

Servers put in as many as the image has features. SGLang takes prompts only so: of tokens that were repeated already it
would decode the text and tokenise it anew.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Image
from . import prefix_routing


@dataclass(frozen=True)
class TokensPrompt:
    """The tokens of a request.

    Attributes:
      tokens: ids, for each image as many as it has features. A tuple of integers, once it is seen to hold nothing else,
        is nothing that garbage collection visits; of lists it visits every entry each time.
      images: in the order of their tokens.
      image_token: the id that stands for a feature; None = of a model that reads text alone.
    """

    tokens: tuple[int, ...]
    images: Sequence[Image] = ()
    image_token: int | None = None

    def __post_init__(self):
        if self.images and self.image_token is None:
            raise ValueError("generate: images need the model's image token, as in connect(..., image_token=151655)")
        if self.images and len(self._starts()) != len(self.images):
            raise ValueError(
                f"generate: tokens need a run of the image token {self.image_token} for each image, got "
                f"{len(self._starts())} for {len(self.images)}"
            )

    def _starts(self) -> list[int]:
        """Where the runs of image tokens begin."""
        is_image = [token == self.image_token for token in self.tokens]
        return [i for i, here in enumerate(is_image) if here and not (i and is_image[i - 1])]

    def short(self) -> tuple[int, ...]:
        """The tokens with one for each image."""
        if not self.images:
            return self.tokens
        starts = {*self._starts()}
        return tuple(t for i, t in enumerate(self.tokens) if t != self.image_token or i in starts)

    def data(self) -> list[str]:
        """The images as data URLs."""
        return [f"data:image;base64,{base64.b64encode(image.data).decode()}" for image in self.images]

    def hashes(self, more: Sequence[int] = ()) -> list[int]:
        """Of its blocks and those of `more` behind it, for routing: equal tokens of other images are another prefix."""
        seen = zip(self._starts(), self.images, strict=True) if self.images else ()
        return prefix_routing.chain([*self.tokens, *more], marks={at: image.hash for at, image in seen})

    def until_image(self, sampled: Sequence[int]) -> int:
        """How many sampled tokens may be continued behind it: with images none from an image token on, which a server
        would take for an image."""
        tokens = list(sampled)
        return tokens.index(self.image_token) if self.images and self.image_token in tokens else len(tokens)
