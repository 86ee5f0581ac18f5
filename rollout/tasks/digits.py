"""Sums and differences of two digits, asked for in a conversation with three examples: a task for a small chat model.

Like reasoning-gym's `chain_sum` with two terms of one digit. Without examples a model of 135 million parameters
explains instead of answering; with them it answers with a number, mostly a wrong one.
"""

from __future__ import annotations

import functools

import numpy as np

from ..rewards.match import exact as reward
from . import arithmetic

__all__ = ["Task", "reward", "splits"]

Task = functools.partial(arithmetic.Task, low=0, high=9, heldout_share=0.3, dev_share=0.1)
EXAMPLES = "3 + 5", "9 - 2", "8 + 6"


def splits(task: arithmetic.Task) -> dict[str, list[dict]]:
    """Makes `{"train", "dev", "heldout"}` of rows `{"messages", "answer"}`, whose last message is such as "7 - 4 =".

    A pair of operands is in one split, in both orders, and none of the examples' in any. The default has about 120, 20
    and 60 rows.
    """
    rng = np.random.default_rng(task.seed)
    shown = [sorted(_operands(example)) for example in EXAMPLES]
    return {name: _rows([x for x in part if x not in shown], rng) for name, part in arithmetic.pairs(task, rng).items()}


def _rows(pairs, rng):
    problems = [f"{x} {sign} {y}" for a, b in pairs for x, y in dict.fromkeys([(a, b), (b, a)]) for sign in "+-"]
    said = [message for example in EXAMPLES for message in (_asked(example), _answered(example))]
    order = rng.permutation(len(problems))
    return [{"messages": [*said, _asked(problems[i])], "answer": _solved(problems[i])} for i in order]


def _asked(problem: str) -> dict:
    return {"role": "user", "content": f"{problem} ="}


def _answered(problem: str) -> dict:
    return {"role": "assistant", "content": _solved(problem)}


def _operands(problem: str) -> list[int]:
    return [int(problem[0]), int(problem[-1])]


def _solved(problem: str) -> str:
    a, b = _operands(problem)
    return str(a + b if "+" in problem else a - b)
