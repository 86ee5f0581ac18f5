"""Counting and finding coloured shapes in small pictures: a task that a tiny vision-language model learns in minutes.

The teacher errs: it overlooks one of the shapes to count, and confuses left and right. As in `arithmetic`, imitation is
limited by the teacher, and the reward allows the policy to surpass it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arithmetic

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SHAPES = "circle", "square", "triangle"
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
COUNT, PLACE = "How many {} {}s?", "Which shape is {} of the {} {}?"
# Tokens of a tokenizer that is enough for questions and answers.
WORDS = "How many ", "Which shape is ", "left", "right", " of the ", *COLOURS, " ", *SHAPES, "s?", "?", *"0123456789"
GRID, CELL, SIZE = 3, 8, 7  # cells along a side; pixels along the side of a cell, and of a shape in it
SIDE = GRID * CELL  # pixels of a picture
MOST = 3  # shapes to count

Scene = list[tuple[int, int, str, str]]  # row, column, colour and shape of each


@dataclass(frozen=True)
class Task:
    """The set of pictures and questions.

    Attributes:
      train, dev, heldout: rows per split.
      place_share: share of questions about what is left or right of a shape, which take longer to learn; the others are
        about numbers.
      seed: seed of pictures, questions and their split.
    """

    train: int = 8192
    dev: int = 500
    heldout: int = 1000
    place_share: float = 0.0
    seed: int = 0


def splits(task: Task = Task()) -> dict[str, list[dict]]:
    """Makes `{"train", "dev", "heldout"}` of rows `{"prompt", "image", "answer", "mistake", "scene"}`.

    The image is a PNG of 24 x 24 pixels as a data URL; `mistake` is the teacher's other answer; `scene` has the row,
    column, colour and shape of each. No answer is much more frequent than others. A scene is in only one row.
    """
    if not 0 <= task.place_share <= 1 or min(task.train, task.dev, task.heldout) < 0:
        raise ValueError(
            "shapes: place_share must lie in 0..1 and rows be at least 0, "
            f"got {task.place_share} and {task.train}, {task.dev}, {task.heldout}"
        )
    rng = np.random.default_rng(task.seed)
    found: dict[tuple, dict] = {}
    while len(found) < task.train + task.dev + task.heldout:
        scene, asked = _place(rng) if rng.random() < task.place_share else _count(rng)
        found.setdefault(tuple(sorted(scene)), {**asked, "image": _url(draw(scene, rng)), "scene": scene})
    rows, cut = list(found.values()), (task.train, task.train + task.dev)
    return {"train": rows[: cut[0]], "dev": rows[cut[0] : cut[1]], "heldout": rows[cut[1] :]}


def _count(rng) -> tuple[Scene, dict]:
    """A scene with 0 to 3 shapes of a kind and 1 to 4 others, and the question how many."""
    kind, *others = [KINDS[i] for i in rng.permutation(len(KINDS))]
    count, rest = int(rng.integers(MOST + 1)), int(rng.integers(1, 5))
    kinds = [kind] * count + [others[i] for i in rng.integers(len(others), size=rest)]
    cells = rng.permutation(GRID**2)[: len(kinds)]
    scene = [(*divmod(int(cell), GRID), *each) for cell, each in zip(cells, kinds, strict=True)]
    return scene, {"prompt": COUNT.format(*kind), "answer": str(count), "mistake": str(max(count - 1, 0))}


def _place(rng) -> tuple[Scene, dict]:
    """A scene with three shapes in a row and up to 3 others, and the question which is beside the middle one."""
    kind, *others = [KINDS[i] for i in rng.permutation(len(KINDS))]
    left = others[0]
    right = next(each for each in others if each[1] != left[1])
    line, rest = int(rng.integers(GRID)), int(rng.integers(4))
    beside = [(line, column, *each) for column, each in enumerate((left, kind, right))]
    free = [divmod(int(cell), GRID) for cell in rng.permutation(GRID**2)]
    free = [at for at in free if at[0] != line][:rest]
    scene = beside + [(*at, *others[i]) for at, i in zip(free, rng.integers(len(others), size=rest), strict=True)]
    side, answer, mistake = ("left", left, right) if rng.integers(2) else ("right", right, left)
    return scene, {"prompt": PLACE.format(side, *kind), "answer": answer[1], "mistake": mistake[1]}


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """The picture, u8[24, 24, 3]: each shape is somewhere in its cell, on white."""
    picture = np.full((SIDE, SIDE, 3), 255, np.uint8)
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    forms = {
        "circle": x**2 + y**2 <= (SIZE / 2) ** 2,
        "square": np.ones((SIZE, SIZE), bool),
        "triangle": 2 * np.abs(x) <= y + SIZE // 2,
    }
    for row, column, colour, shape in scene:
        top, left = (CELL * at + int(rng.integers(CELL - SIZE + 1)) for at in (row, column))
        picture[top : top + SIZE, left : left + SIZE][forms[shape]] = COLOURS[colour]
    return picture


def _url(picture: np.ndarray) -> str:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(picture).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def demonstrations(rows: Sequence[dict], *, error_rate: float = 0.7, seed: int = 0, start: int = 0) -> Iterator[dict]:
    """Yields `arithmetic.demonstrations` by a teacher that makes the row's mistake with probability `error_rate`."""
    return arithmetic.demonstrations(rows, error_rate=error_rate, seed=seed, start=start, mistaken=_mistake)


def _mistake(row: dict) -> str:
    return row["mistake"]


def reward(text: str, row: dict[str, Any]) -> float:
    """1.0 if `text` is exactly the answer, else 0.0."""
    return float(text == row["answer"])


def shuffled(rows: Sequence[dict], seed: int) -> list[dict]:
    """Permutes the pictures of rows at random.

    A control: of pictures that have nothing to do with the questions, only how frequent answers are can be learnt.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    return [{**row, "image": rows[i]["image"]} for row, i in zip(rows, order, strict=True)]
