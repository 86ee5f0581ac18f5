"""Choosing between two tools: a task on which a tiny model learns in minutes which tool a question needs.

A question is a sum or asks for somebody's colleague; the answer is the output of the right tool. The teacher of the
first stage picks a tool at random, so imitation is right half the time; the reward depends only on the last answer.
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
    """Yields rows {"prompt", "answer", "argument", "colleagues"}, about half of them sums."""
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
    """Yields rows {"messages", "completion"}: calls of a random tool, and answers that repeat its output."""
    rng = np.random.default_rng([seed, 1])
    for row in rows(count, seed):
        tool = str(rng.choice(list(TOOLS)))
        before, after = CALLS[tool]
        call = f"{OPEN}{before}{row['argument']}{after}{CLOSE}"
        output = TOOLS[tool](row["argument"])
        question = {"role": "user", "content": row["prompt"]}
        yield {"messages": [question], "completion": call}
        result = {"role": "tool", "content": output}
        yield {"messages": [question, {"role": "assistant", "content": call}, result], "completion": output}


def reward(text: str, row: dict) -> float:
    """1.0 if `text` is exactly the answer, else 0.0."""
    return float(text.strip() == row["answer"])


def call(name: str, arguments: str) -> str:
    """Calls a tool with arguments as JSON text, as agents do; returns its output."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError):
        return NOTHING
