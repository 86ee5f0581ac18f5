"""Images in training: whether a run loads a model's vision tower, and the arrays of packed batches for it."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from areax.adapters.data import images
from areax.adapters.data.images import Processor
from areax.core.batch import Batch
from areax.core.packing import bucket
from areax.models import vision as towers
from areax.models.vision import Media, Tower
from areax.recipes.shared.rows import Prepared
from areax.rollout.chat import images as chat_images
from areax.rollout.types import Image, Sample

Vision = Literal["auto", "frozen", "trained"]
SAID = {
    "auto": "without its vision tower, as no row has images", "frozen": "its vision tower frozen",
    "trained": "its vision tower trained",
}  # fmt: skip
UNREAD = (
    "the model has no vision tower that areax implements, or rows have none; if a workflow makes images, load the "
    "tower with --vision frozen"
)
Images = Sequence[tuple[Image, ...]]  # of each sample


@dataclass(frozen=True)
class Reader:
    """What turns images into arrays for a tower.

    Attributes:
      dtype: of the computation.
      parts: devices over which rows are split (cp).
    """

    processor: Processor
    tower: Tower
    dtype: str = "float32"
    parts: int = 1


class NotingImages:
    """A check of rows that also notes whether any of them has images."""

    def __init__(self, check: Prepared):
        self._check, self.ahead, self.images = check, check.ahead, False

    def __call__(self, row: dict) -> str | None:
        self.images = self.images or chat_images.of_row(row)
        return self._check(row)


def decided(wanted: Vision, seen: bool) -> Vision:
    """`--vision`, "auto" replaced by "frozen" if the run's rows have images."""
    return "frozen" if wanted == "auto" and seen else wanted


def said(config, vision: Vision) -> str:
    """What a run says of a model's tower when it loads the model; nothing of one that areax does not implement."""
    return SAID[vision] if towers.available(config) else ""


def reader(model: str, settings, dtype: str | None, mesh) -> Reader | None:
    """The Reader of a model that was loaded with its tower; None without one.

    Raises:
      ValueError: the model has no image processor, or one for other patches than its tower's.
    """
    if settings.vision is None:
        return None
    processor = images.load(model)
    processor.check(settings.vision)
    return Reader(processor, settings.vision, dtype or "float32", mesh.shape["cp"])


def of(samples: Iterable[Sample]) -> Images:
    """The images of each sample."""
    return [sample.images for sample in samples]


def attach(reading: Reader | None, batches: Sequence[Batch], seen: Sequence[Images]) -> list[Batch]:
    """Packed batches [M, B, T] of a step with the images of their samples, in rows of equally many patches.

    An image is processed once, however many samples have it. Patches of a row are few sizes, and never more than its
    tokens stand for.

    Args:
      seen: images of the samples of each batch.

    Raises:
      ValueError: there are images and no tower; or as `vision.attach`.
    """
    distinct = {image.hash: image for own in seen for sample in own for image in sample}
    if reading is None:
        if distinct:
            raise ValueError(f"images: this run reads none, because {UNREAD}")
        return [*batches]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = dict(zip(distinct, pool.map(reading.processor.media, distinct.values()), strict=True))
    media = [[[made[image.hash] for image in sample] for sample in own] for own in seen]
    unit, parts = reading.tower.unit, reading.parts
    most = max(itertools.starmap(most_patches, zip(batches, media, strict=True))) // unit
    longest = max(batch.token_BT.shape[-1] for batch in batches)
    patches = unit * min(parts * bucket(max(1, -(-most // parts))), longest)
    return [
        towers.attach(batch, own, reading.tower, patches, reading.dtype)
        for batch, own in zip(batches, media, strict=True)
    ]


def image_check(reading: Reader | None) -> Callable[[np.ndarray, tuple[Image, ...]], None]:
    """A check of a sample's images and of the tokens that are not sampled, before anything is trained on: it raises
    ValueError for images that this run does not read, or others than the tokens stand for."""
    counts: dict[str, int] = {}  # features by hash: the samples of a group have the same images

    def count(image: Image) -> int:
        assert reading
        if image.hash not in counts:
            counts[image.hash] = math.prod(reading.processor.media(image).grid) // reading.tower.unit
        return counts[image.hash]

    def check(tokens: np.ndarray, images: tuple[Image, ...]) -> None:
        if reading is None:
            if images:
                raise ValueError(f"images must be none, because {UNREAD}, got {len(images)}")
            return
        stand, features = int(towers.standing(tokens, reading.tower).sum()), sum(map(count, images))
        if stand != features:
            raise ValueError(
                f"images must have a token for each of their features, got {stand} tokens for {features} of "
                f"{len(images)} images"
            )

    return check


def most_patches(batch: Batch, media: Sequence[Sequence[Media]]) -> int:
    """The patches of the row that has most."""
    counts = np.array([sum(math.prod(one.grid) for one in own) for own in media])
    sample_BJ = np.asarray(batch.sample_BJ)
    return int(np.where(sample_BJ >= 0, counts[np.maximum(sample_BJ, 0)], 0).sum(-1).max())


def without_image_tokens(samples: Sequence[Sample], reading: Reader | None) -> tuple[list[Sample], int]:
    """(samples that learn no token that stands for an image but was sampled by a policy, the number of these tokens).

    Servers decode such a token as text, or not at all; a chat template would make an image of it.
    """
    if reading is None:
        return [*samples], 0
    made, count = [], 0
    for sample in samples:
        stray = towers.standing(sample.tokens, reading.tower) & (sample.version >= 0)
        count += int(stray.sum())
        made.append(dataclasses.replace(sample, mask=sample.mask & ~stray) if stray.any() else sample)
    return made, count
