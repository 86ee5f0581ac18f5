"""Images of prompts, on the host: their patches, and where in a prompt the features stand that are made of them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models import vision
from ...models.vision import Media, Tower
from ..types import Image

LOCKS = 16
KEPT = 1 << 30  # bytes of patches in host memory; those of further images are made again when it is their turn


class Picture:
    """An image as the vision tower reads it.

    Attributes:
      hash: of its bytes.
      count: how many features it has; so many tokens stand for it.
      grid: as in `vision.Media`.
    """

    def __init__(self, image: Image, processor: Any, tower: Tower):
        self._image, self._processor, self._tower = image, processor, tower
        self._patches: dict[str, np.ndarray] | None = self._made()
        self.hash = image.hash

    def _made(self) -> dict[str, np.ndarray]:
        media, tower = self._processor.media(self._image), self._tower
        self.grid, self.count = media.grid, len(media.patches) // tower.unit
        row = np.full((1, self.count), tower.image)
        made = vision.arrange(row, np.ones_like(row), [[media]], tower)
        order = np.zeros(made["patch"].shape[1] // tower.unit, np.int32)
        order[: self.count] = made["feature"][0]
        return {**{name: x for name, x in made.items() if name not in vision.PER_TOKEN}, "order": order}

    @property
    def kept(self) -> int:
        """Bytes of its patches, if they are in memory."""
        return sum(x.nbytes for x in (self._patches or {}).values())

    def take(self) -> dict[str, np.ndarray]:
        """The arrays of `vision.arrange` for a row of this image, and `order`, i32[U], which of U features is that of
        each token. They are not kept any longer."""
        patches, self._patches = self._patches, None
        return patches or self._made()

    def drop(self) -> None:
        """Makes patches again when they are taken."""
        self._patches = None


class Pictures:
    """Makes pictures of images with a model's image processor; those in use are shared. For any thread."""

    def __init__(self, processor: Any, tower: Tower):
        """
        Args:
          processor: `media(image) -> vision.Media` and `count(image)`, the number of its features, as
            `adapters.data.images.Processor`.
        """
        self._processor, self._tower = processor, tower
        self._known: weakref.WeakValueDictionary[str, Picture] = weakref.WeakValueDictionary()
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    def picture(self, image: Image) -> Picture:
        """The picture of an image.

        Raises:
          ValueError: the processor refuses it.
        """
        with self._locks[int(image.hash[:8], 16) % LOCKS]:  # samples of a group come at the same time
            if (known := self._known.get(image.hash)) is None:
                known = Picture(image, self._processor, self._tower)
                if known.kept + sum(one.kept for ref in self._known.valuerefs() if (one := ref())) > KEPT:
                    known.drop()
                self._known[image.hash] = known
            return known

    def count(self, image: Image) -> int:
        """How many features an image has, before it is computed."""
        known = self._known.get(image.hash)
        return known.count if known else self._processor.count(image)

    def expanded(self, tokens: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
        """Tokens with the image token as often as each image has features, where they have it once for each image, as
        chat templates write it; others as they are. Behind those of the images there may be more, which were sampled.
        """
        runs = _runs(tokens, self._tower.image)
        starts = [at for start, end in runs for at in range(start, end)]
        apart = len(runs) >= len(images) and all(end - start == 1 for start, end in runs[: len(images)])
        if not images or not (apart or len(starts) == len(images)):
            return tuple(tokens)
        counts = dict(zip(starts, map(self.count, images), strict=False))
        return tuple(each for i, one in enumerate(tokens) for each in [one] * counts.get(i, 1))

    def placed(self, tokens: Sequence[int], images: Sequence[Image]) -> Placement:
        """Where the images of a prompt stand in it.

        A run of image tokens that does not fit the next images is text: the model has sampled it earlier.

        Args:
          tokens: with an image's token as often as it has features.

        Raises:
          ValueError: the tokens are not those of the images, or the last one stands for a feature.
        """
        counts = [*map(self.count, images)]
        token = self._tower.image
        runs, starts = _runs(tokens, token), list[int]()
        for begin, end in runs:
            at, several = begin, list[int]()
            for count in counts[len(starts) :]:
                if at + count > end:
                    break
                several.append(at)
                at += count
            if at == end:
                starts += several
        if len(starts) < len(counts):
            found = ", ".join(str(end - begin) for begin, end in runs) or "none"
            number, needed = len(starts) + 1, counts[len(starts)]
            raise ValueError(
                f"images: the prompt must have the image token, id {token}, once for each image, or as often as the "
                f"image has features: image {number} of {len(counts)} has {needed}, got runs of {found:.80}"
            )
        if starts[-1] + counts[-1] == len(tokens):
            raise ValueError(f"images: a prompt must not end with an image, got token {token} as its last one")
        return Placement([*map(self.picture, images)], starts, tokens, self._tower)


class Placement:
    """The images of a prompt, and the places of their features.

    Attributes:
      shift: what rope's position of a token behind the prompt is above its index.
    """

    def __init__(self, pictures: Sequence[Picture], starts: Sequence[int], tokens: Sequence[int], tower: Tower):
        self._each = list(zip(starts, pictures, strict=True))
        stands = np.full(len(tokens), -1)
        for start, picture in self._each:
            stands[start : start + picture.count] = tower.image
        grids = [Media(None, picture.grid) for picture in pictures]
        self._position_N3, self.shift = vision.positions(stands, grids, tower)

    @property
    def marks(self) -> dict[int, str]:
        """The hash of each image by the index of its first token."""
        return {at: one.hash for at, one in self._each}

    def positions(self, start: int, end: int) -> np.ndarray:
        """Of tokens [start, end), also behind the prompt, in time, height and width, i32[end - start, 3]."""
        n = len(self._position_N3)
        behind_N = np.arange(max(start, n), max(end, n), dtype=np.int32) + self.shift
        return np.concatenate([self._position_N3[start:end], np.repeat(behind_N[:, None], 3, 1)])

    def within(self, start: int, end: int) -> list[tuple[int, Picture]]:
        """(where it begins, picture) of those with features among tokens [start, end)."""
        return [(at, one) for at, one in self._each if at < end and at + one.count > start]

    def begun(self, end: int) -> bool:
        """Whether there are features, and so rope's positions other than indices, before `end`."""
        return self._each[0][0] < end

    def key(self, start: int, end: int) -> bytes:
        """Identifies the features among tokens [start, end)."""
        found = "".join(f"{one.hash}{at - start}," for at, one in self.within(start, end))
        return hashlib.blake2b(found.encode(), digest_size=16).digest() if found else b""


def _runs(tokens: Sequence[int], token: int) -> list[tuple[int, int]]:
    """[start, end) of each run of a token."""
    is_N = np.asarray(tokens) == token
    edges = np.flatnonzero(np.diff(is_N, prepend=False, append=False))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
