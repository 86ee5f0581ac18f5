"""An environment of verifiers up to 0.3: questions that a tool answers, and a player who takes the wrong one.

`load_environment` is what `--env verifiers:calculator` loads, where this folder is on PYTHONPATH.
"""

import itertools
import random
from collections.abc import Iterator

WORDS = {"sum": "add", "difference": "subtract", "product": "multiply"}
NUMBERS = range(1, 21)
HELDOUT = 200  # questions


def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


def subtract(a: int, b: int) -> int:
    """a - b"""
    return a - b


def multiply(a: int, b: int) -> int:
    """a * b"""
    return a * b


TOOLS = {function.__name__: function for function in (add, subtract, multiply)}


def questions() -> list[dict]:
    """All questions, in an order of chance: the first HELDOUT are for evaluation."""
    asked = itertools.product(WORDS, NUMBERS, NUMBERS)
    made = [
        {"question": f"The {word} of {a} and {b}?", "answer": str(TOOLS[WORDS[word]](a, b)), "info": [word, a, b]}
        for word, a, b in asked
    ]
    random.Random(0).shuffle(made)
    return made


def right(completion, answer) -> float:
    return float((completion[-1]["content"] or "").strip() == answer)


def load_environment():
    import datasets
    import verifiers.legacy as vf

    rows = [{"question": row["question"], "answer": row["answer"]} for row in questions()]
    evaluated, trained = (datasets.Dataset.from_list(part) for part in (rows[:HELDOUT], rows[HELDOUT:]))
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(tools=[*TOOLS.values()], rubric=rubric, max_turns=3, dataset=trained, eval_dataset=evaluated)


def conversations(rate: float, chance: random.Random) -> Iterator[dict]:
    """Rows for SFT of a player who takes the tool that the question means at this rate, else `add`."""
    told = [tool.model_dump(include={"name", "description", "parameters"}) for tool in load_environment().tool_defs]
    tools = [{"type": "function", "function": tool} for tool in told]
    train = questions()[HELDOUT:]
    while True:
        row = chance.choice(train)
        word, a, b = row["info"]
        name = WORDS[word] if chance.random() < rate else "add"
        call = {"id": "call", "type": "function", "function": {"name": name, "arguments": {"a": a, "b": b}}}
        result = str(TOOLS[name](a, b))
        yield {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call", "content": result},
                {"role": "assistant", "content": result},
            ],
            "tools": tools,
        }
