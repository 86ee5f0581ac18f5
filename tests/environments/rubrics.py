"""Environments as verifiers up to 0.3 has them; `kind` says which."""

import asyncio
import sys
import time

import datasets
import verifiers.legacy as vf

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def lookup(name: str) -> str:
    """Looks a name up.

    Args:
        name: what to look up.
    """
    raise KeyError(name)


def hang(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "done"


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def length(completion):
    return float(len(completion[-1]["content"]))


def longest(completions) -> list[float]:
    """1 for the longest of a group, 0 for the others."""
    sizes = [len(completion[-1]["content"]) if completion else -1 for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def broken(completion):
    raise RuntimeError("the judge is away")


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        return [{"role": "user", "content": f"No, not {messages[-1]['content']}."}]

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "7"


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state):
        raise RuntimeError("no such machine")


class Exits(vf.SingleTurnEnv):
    async def setup_state(self, state):
        sys.exit(3)


class Slow(vf.SingleTurnEnv):
    async def setup_state(self, state):
        await asyncio.sleep(60)


def load_environment(kind="single", **more):
    rows = datasets.Dataset.from_list(ROWS)
    given = {"dataset": rows, "eval_dataset": rows.select([4, 5]), "system_prompt": "Answer with a number."} | more
    if kind == "tools":
        return vf.ToolEnv(tools=[add, lookup, hang], rubric=vf.Rubric(funcs=[right]), max_turns=6, **given)
    if kind in ("turns", "contest"):
        return Guess(rubric=vf.Rubric(funcs=[longest if kind == "contest" else right]), max_turns=4, **given)
    made = {"single": vf.SingleTurnEnv, "broken": Broken, "exits": Exits, "slow": Slow}
    funcs = {"group": ([longest, right], [1.0, 0.5]), "judge": ([broken], [1.0])}.get(
        kind, ([right, length], [1.0, 0.0])
    )
    return made.get(kind, vf.SingleTurnEnv)(rubric=vf.Rubric(funcs=funcs[0], weights=funcs[1]), **given)
