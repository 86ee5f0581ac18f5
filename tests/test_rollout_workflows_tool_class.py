"""Classes written for TRL's `environment_factory`, played as they are."""

import asyncio
import json
import math

import pytest
from fidelity import SAMPLING, Policy, exact
from gateways import TOKENS

from areax.rollout.workflows import environments


class Counter:
    """As in TRL's documentation: public methods are tools, `reset` takes the row."""

    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, goal: int = 3, **row) -> str | None:
        self.count, self.goal = self.start, goal
        return f" Reach {goal}."

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
          step: what to add.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        self.count += step
        return self.count

    async def look(self) -> int:
        """Returns the counter."""
        return self.count

    def _secret(self):
        raise AssertionError("not a tool")

    def get_reward(self) -> float:
        return float(self.count == self.goal)


class Bare:
    def reset(self, **row):
        return None

    def wait(self) -> str:
        return "done"


def judge(environments, prompts, completions, goal, **_):
    [[prompt]], [said] = prompts, completions
    assert prompt["content"] == "Wait." and goal == [7] and len(environments) == 1
    return [len([message for message in said if message["role"] == "tool"]) / 2]


def unsure(**_):
    return [None]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(policy, make, row, turns=16, **options):
    how = {
        "tokenizer": TOKENS,
        "sampling": SAMPLING,
        "world": "areax.rollout.workflows.tool_class:World",
        "turns": turns,
    }
    return asyncio.run(environments.play(policy, row, **how, options={"make": f"{__file__}:{make}", **options}))


def test_methods_are_tools_and_the_class_has_the_reward():
    policy = Policy(call("increment", step=-1), call("increment", step=2) + call("look"), call("no"), "It is 3.")
    samples = play(policy, "Counter", {"prompt": "Count.", "goal": 3}, start=1)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0}
    assert "user\nCount. Reach 3.<|im_end|>" in policy.heard[0] and '"name": "increment"' in policy.heard[0]
    assert "_secret" not in policy.heard[0] and "get_reward" not in policy.heard[0]
    assert "error: increment: ValueError: step must not be negative" in policy.heard[1]
    assert policy.heard[2].count("tool\n3<|im_end|>") == 2 and "error: there is no tool 'no'" in policy.heard[3]


def test_an_episode_without_a_prompt_or_an_end_is_scored_too():
    """TRL's environments may own their tasks; its limit of calls ends an episode, which is scored as it is then."""
    policy = Policy(call("increment", step=1))
    samples = play(policy, "Counter", {"seed": 5, "goal": 2}, turns=2)
    assert {sample.reward for sample in samples} == {1.0} and "user\n Reach 2." in policy.heard[0]


def test_a_reward_function_of_trl_scores_it():
    row = {"messages": [{"role": "user", "content": "Wait."}], "goal": 7}
    samples = play(Policy(call("wait"), "ok"), "Bare", row, reward=f"{__file__}:judge")
    assert {sample.reward for sample in samples} == {0.5}
    samples = play(Policy("ok"), "Bare", row, reward=f"{__file__}:unsure")
    assert all(math.isnan(sample.reward) for sample in samples)
    with pytest.raises(RuntimeError, match="Bare must have get_reward.., got none; or name a function as reward in"):
        play(Policy("ok"), "Bare", row)
