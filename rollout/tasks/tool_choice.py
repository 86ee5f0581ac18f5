"""Errands with two tools: a task on which a tiny model learns in minutes which tool a question wants.

A question is a sum or asks whom somebody works with; the answer is what the right tool says. The teacher of the first
stage takes a tool at random, so that imitation is right half the time; the reward sees the last answer alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np

NAMES = ("ann", "bea", "cem", "dan", "eva", "fay", "gus", "ida", "jon", "kim", "lea", "max")
COLLEAGUES = {name: NAMES[(5 * i + 3) % len(NAMES)] for i, name in enumerate(NAMES)}
NOTHING = "nothing"
ALPHABET = "0123456789+abcdefghijklmnopqrstuvwxyz ?"
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
CALLS = {
    "calculator": ('{"name": "calculator", "arguments": {"expression": "', '"}}'),
    "lookup": ('{"name": "lookup", "arguments": {"name": "', '"}}'),
}
# Each is one token of the task's tokenizer (`adapters.tokenizer.character`).
PIECES = dict.fromkeys(part for pair in CALLS.values() for part in pair)
WORDS = ("system", "user", "assistant", "tool", OPEN, CLOSE, *PIECES)


def calculator(expression: str) -> str:
    """Adds.

    Args:
      expression: two numbers with a plus between them.
    """
    parts = expression.split("+")
    return str(sum(map(int, parts))) if len(parts) == 2 and all(map(str.isdecimal, parts)) else NOTHING


def lookup(name: str) -> str:
    """Says whom somebody works with.

    Args:
      name: of the person.
    """
    return COLLEAGUES.get(name, NOTHING)


TOOLS: dict[str, Callable[..., str]] = {"calculator": calculator, "lookup": lookup}


def rows(count: int, seed: int = 0) -> Iterator[dict]:
    """Rows {"prompt", "answer", "argument", "colleagues"}, about as many sums as names."""
    rng = np.random.default_rng(seed)
    colleagues = [f"{name} {other}" for name, other in COLLEAGUES.items()]
    for _ in range(count):
        if rng.integers(2):
            argument = "{}+{}".format(*rng.integers(0, 50, 2))
            row = dict(prompt=f"what is {argument}?", answer=calculator(argument))
        else:
            argument = str(rng.choice(NAMES))
            row = dict(prompt=f"who is with {argument}?", answer=lookup(argument))
        yield {**row, "argument": argument, "colleagues": colleagues}


def demonstrations(count: int, seed: int = 0) -> Iterator[dict]:
    """Rows {"messages", "completion"}: calls of a tool drawn at random, and answers that repeat what it said."""
    rng = np.random.default_rng([seed, 1])
    for row in rows(count, seed):
        tool = str(rng.choice(list(TOOLS)))
        before, after = CALLS[tool]
        call = f"{OPEN}{before}{row['argument']}{after}{CLOSE}"
        told = TOOLS[tool](row["argument"])
        asked = {"role": "user", "content": row["prompt"]}
        yield {"messages": [asked], "completion": call}
        heard = {"role": "tool", "content": told}
        yield {"messages": [asked, {"role": "assistant", "content": call}, heard], "completion": told}


def reward(text: str, row: dict) -> float:
    """1.0 if `text` is exactly the answer, else 0.0."""
    return float(text.strip() == row["answer"])


def call(name: str, arguments: str) -> str:
    """What a tool says to arguments that are JSON text, as agents call it."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError):
        return NOTHING
