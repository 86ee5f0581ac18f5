"""Addition with a teacher that forgets to carry: a task that a tiny model learns in minutes.

Imitation is limited by the teacher; the reward, which does not depend on it, allows the policy to surpass it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Task:
    """The range of sums, and how they are split.

    Attributes:
      low, high: the smallest and the largest operand.
      carry_share: share of rows, in every split, whose sum carries out of the units column.
      heldout_share, dev_share: shares of all unordered pairs of operands; the rest is for training.
      seed: seed of the split.
    """

    low: int = 10
    high: int = 99
    carry_share: float = 0.75
    heldout_share: float = 0.2
    dev_share: float = 0.06
    seed: int = 0


def splits(task: Task = Task()) -> dict[str, list[dict]]:
    """Makes `{"train", "dev", "heldout"}` of rows `{"prompt": "25+16", "answer": "41", "operands", "carry"}`.

    Unordered pairs of operands are split before rows are made, so no pair is in two splits in either order. In each
    split, rows of the overrepresented kind are dropped at random until `carry_share` holds. The default has about
    3,650, 285 and 930 rows, depending on the seed.
    """
    if not 0 <= task.carry_share <= 1:
        raise ValueError(f"arithmetic: carry_share must lie in 0..1, got {task.carry_share}")
    rng = np.random.default_rng(task.seed)
    return {name: _rows(part, task.carry_share, rng) for name, part in pairs(task, rng).items()}


def pairs(task: Task, rng: np.random.Generator) -> dict[str, list[list[int]]]:
    """Splits the unordered pairs of operands at random into those of `{"train", "dev", "heldout"}`."""
    low, high = task.low, task.high
    if not 0 <= low <= high:
        raise ValueError(f"arithmetic: operands need 0 <= low <= high, got {low} and {high}")
    if min(task.heldout_share, task.dev_share) < 0 or task.heldout_share + task.dev_share >= 1:
        raise ValueError(
            "arithmetic: heldout_share and dev_share must be at least 0 and leave something to train on, "
            f"got {task.heldout_share} and {task.dev_share}"
        )
    every = rng.permutation([(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]).tolist()
    first = round(task.heldout_share * len(every))
    second = first + round(task.dev_share * len(every))
    return {"train": every[second:], "dev": every[first:second], "heldout": every[:first]}


def _rows(pairs, share, rng):
    """Both orders of every pair, thinned to the share of carries and shuffled."""
    rows = [_row(*operands) for a, b in pairs for operands in dict.fromkeys([(a, b), (b, a)])]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    carries, others = ([row for row in rows if row["carry"] is kind] for kind in (True, False))
    total = min(
        len(carries) / share if share else np.inf,
        len(others) / (1 - share) if share < 1 else np.inf,
    )
    kept = carries[: round(total * share)] + others[: round(total * (1 - share))]
    if pairs and not kept:
        raise ValueError(
            f"arithmetic: {len(pairs)} pairs of operands have no sums for a carry_share of {share}; "
            "widen low..high or the split, or change carry_share"
        )
    return [kept[i] for i in rng.permutation(len(kept))]


def _row(a, b):
    carry = a % 10 + b % 10 >= 10
    return {"prompt": f"{a}+{b}", "answer": str(a + b), "operands": [a, b], "carry": carry}


def forgetful(row: dict) -> str:
    """The sum without the carry out of the units column: 25+16 gives "31"."""
    return str(sum(row["operands"]) - 10 * row["carry"])


def demonstration(
    rows: Sequence[dict], index: int, *, error_rate: float, seed: int, mistaken: Callable[[dict], str] = forgetful
) -> dict:
    """Demonstration number `index`: a row drawn from `rows` with a `completion` by the teacher.

    The teacher is `mistaken` with probability `error_rate`, independently each time. The result depends only on (rows,
    error_rate, seed, index), so a run can resume from an integer.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16).digest()
    row = rows[int.from_bytes(digest[:8], "big") % len(rows)]
    errs = int.from_bytes(digest[8:], "big") < error_rate * 2**64
    return {**row, "completion": mistaken(row) if errs else row["answer"]}


def demonstrations(
    rows: Sequence[dict], *, error_rate: float = 0.7, seed: int = 0, start: int = 0,
    mistaken: Callable[[dict], str] = forgetful,
) -> Iterator[dict]:  # fmt: skip
    """Yields demonstrations number `start`, `start + 1`, ... endlessly."""
    if not rows:
        raise ValueError("arithmetic: demonstrations need at least one row, got none")
    if not 0 <= error_rate <= 1:
        raise ValueError(f"arithmetic: error_rate must lie in 0..1, got {error_rate}")
    index = start
    while True:
        yield demonstration(rows, index, error_rate=error_rate, seed=seed, mistaken=mistaken)
        index += 1


def reward(text: str, row: dict) -> float:
    """1.0 if `text` is exactly the sum, else 0.0."""
    return float(text == row["answer"])


def shuffled(rows: Sequence[dict], seed: int) -> list[dict]:
    """Permutes the answers of rows at random, never onto an equal answer.

    A control: rewards that are independent of the prompt must teach nothing about it.
    """
    answers = [row["answer"] for row in rows]
    if rows and 2 * max(Counter(answers).values()) > len(rows):
        raise ValueError(
            "arithmetic: answers can be shuffled only if none belongs to more than half of the rows, "
            f"got {Counter(answers).most_common(1)[0]} in {len(rows)} rows"
        )
    rng = np.random.default_rng(seed)
    source = rng.permutation(len(rows))  # row i takes the answer of row source[i]
    while clashes := [i for i, j in enumerate(source) if answers[i] == answers[j]]:
        for i in clashes:  # swap with rows drawn at random until both sides differ
            k = int(rng.integers(len(rows)))
            if answers[i] != answers[source[k]] and answers[k] != answers[source[i]]:
                source[[i, k]] = source[[k, i]]
    return [{**row, "answer": answers[j]} for row, j in zip(rows, source, strict=True)]
