"""Images and videos as a processor of the model gives them (numpy)."""

import math
from typing import Any, NamedTuple

import numpy as np

from .tower import Tower


class Media(NamedTuple):
    """An image or a video.

    Attributes:
      patches: [N, F], as a Hugging Face processor of the model gives them: frame by frame, the merge x merge patches of
        a feature side by side.
      grid: its frames (pairs of them, where a patch has 2), and rows and columns of patches.
      seconds: of video from one frame of the grid to the next; Qwen2.5-VL's positions depend on it.
    """

    patches: Any
    grid: tuple[int, int, int]
    seconds: float = 1.0


def check(one: Media, tower: Tower) -> int:
    """The number of its patches.

    Raises:
      ValueError: the grid cannot be merged into features, or its patches are others.
    """
    grid, shape = tuple(map(int, one.grid)), np.shape(one.patches)
    if len(grid) != 3 or min(grid) < 1 or grid[1] % tower.merge or grid[2] % tower.merge:
        raise ValueError(
            f"images: a grid must be frames, rows and columns, the last two multiples of {tower.merge}, got {grid}"
        )
    if shape != (math.prod(grid), tower.pixels):
        raise ValueError(
            f"images: a grid of {grid} has {math.prod(grid)} patches of {tower.pixels} numbers, got {shape}"
        )
    return shape[0]
