"""Questions about shapes: answers are what pictures show, splits share no scene, and the control moves pictures."""

import base64
import dataclasses
import io
import itertools
from collections import Counter, defaultdict

import numpy as np
import PIL.Image
import pytest

from areax.adapters import tokenizer
from areax.recipes.shared import demo_vision
from areax.rollout.tasks import shapes
from areax.rollout.tasks.shapes import Task

SMALL = Task(train=300, dev=40, heldout=60, place_share=0.3)
AREAS = {49: "square", 37: "circle", 25: "triangle"}  # in pixels


@pytest.fixture(scope="module")
def splits():
    return shapes.splits(SMALL)


def pixels(row) -> np.ndarray:
    head, _, body = row["image"].partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(body))))


def seen(row) -> dict[tuple[int, int], tuple[str, str]]:
    """Colour and shape in each cell of a row's picture, by how many pixels there are of which colour."""
    found = {}
    for i, j in itertools.product(range(3), repeat=2):
        cell = pixels(row)[8 * i : 8 * i + 8, 8 * j : 8 * j + 8].reshape(-1, 3)
        for colour, rgb in shapes.COLOURS.items():
            if area := int((cell == rgb).all(-1).sum()):
                assert (i, j) not in found
                found[i, j] = colour, AREAS[area]
    return found


def answered(prompt: str, cells: dict) -> tuple[str, str]:
    """The answer of a question about a picture, and the teacher's other one."""
    words = prompt.rstrip("?").split()
    if words[:2] == ["How", "many"]:
        count = list(cells.values()).count((words[2], words[3].removesuffix("s")))
        return str(count), str(max(count - 1, 0))
    [(i, j)] = [at for at, kind in cells.items() if kind == (words[-2], words[-1])]
    left, right = cells[i, j - 1][1], cells[i, j + 1][1]
    assert left != right
    return (left, right) if words[3] == "left" else (right, left)


def test_answers_are_what_pictures_show(splits):
    rows = [row for part in splits.values() for row in part]
    assert {row["prompt"].split()[0] for row in rows} == {"How", "Which"}
    for row in rows:
        cells = seen(row)
        assert {(i, j): (colour, shape) for i, j, colour, shape in row["scene"]} == cells
        assert (row["answer"], row["mistake"]) == answered(row["prompt"], cells)
        assert shapes.reward(row["answer"], row) == 1.0 and shapes.reward(row["answer"] + "0", row) == 0.0


def test_no_scene_is_in_two_rows(splits):
    rows = [row for part in splits.values() for row in part]
    assert [len(part) for part in splits.values()] == [300, 40, 60]
    assert len({tuple(sorted(row["scene"])) for row in rows}) == len(rows)


def test_rows_depend_only_on_the_seed(splits):
    assert shapes.splits(SMALL) == splits
    assert shapes.splits(dataclasses.replace(SMALL, seed=1)) != splits


def test_no_answer_is_frequent():
    """So that guessing is right in a third of rows at most."""
    found = defaultdict(Counter)
    for row in shapes.splits(Task(train=3000, dev=0, heldout=0, place_share=0.3))["train"]:
        found[row["prompt"].split()[0]][row["answer"]] += 1
    assert all(max(each.values()) < 0.4 * each.total() for each in found.values())
    assert sum(max(each.values()) for each in found.values()) < 1000


def test_the_teacher_errs_where_it_can(splits):
    made = list(itertools.islice(shapes.demonstrations(splits["train"], error_rate=0.7), 2000))
    assert all(row["completion"] in (row["answer"], row["mistake"]) for row in made)
    wrong = [row["completion"] == row["mistake"] for row in made if row["answer"] != row["mistake"]]
    assert abs(np.mean(wrong) - 0.7) < 0.05


def test_the_control_moves_pictures_and_nothing_else(splits):
    rows = splits["train"]
    moved = shapes.shuffled(rows, seed=0)
    without = lambda rows: [{**row, "image": None} for row in rows]
    assert without(moved) == without(rows)
    assert Counter(row["image"] for row in moved) == Counter(row["image"] for row in rows)
    assert np.mean([a["image"] == b["image"] for a, b in zip(rows, moved, strict=True)]) < 0.05


@pytest.mark.slow
def test_its_words_are_enough(splits, tmp_path):
    demo_vision.write(tmp_path, shapes.WORDS, shapes.SIDE, seed=0)
    tokens = tokenizer.load(tmp_path)
    for row in itertools.chain(*splits.values()):
        for text in (row["prompt"], row["answer"]):
            ids = tokens.encode(text, add_special_tokens=False)
            assert tokens.unk_token_id not in ids and tokens.decode(ids) == text
    assert tokens.chat_template and len(ids) == 1


@pytest.mark.parametrize("changes", [dict(place_share=1.5), dict(train=-1)])
def test_bad_tasks_are_refused(changes):
    with pytest.raises(ValueError, match="place_share must lie in 0..1 and rows be at least 0"):
        shapes.splits(Task(**changes))
