"""Each data set scores as in its own process, is the same task for each episode of a group, and survives nonsense."""

import math
import random

import pytest
import reasoning_gym
from fidelity import Policy, exact
from playing import played
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS

from areax.adapters.environments.reasoning_gym import World

NONSENSE = [
    "",
    "no",
    "<answer></answer>",
    "<answer>1/0</answer>",
    "<answer>}{[</answer>",
    "<answer>\u00e9\n\n7 x</answer>",
]
NAMES = sorted(set(DATASETS) - {"composite"})


def test_all_are_here():
    assert len(NAMES) == 105


@pytest.mark.parametrize("name", NAMES)
def test_a_set_scores_as_in_process(name):
    for seed in (0, 7, 2**30):
        own = reasoning_gym.create_dataset(name, seed=seed, size=1)
        world, again = World(name), World(name)
        [system, user] = world.reset({"seed": seed})
        random.seed(seed)
        assert again.reset({"seed": seed}) == [system, user] and system["content"] == SYSTEM_PROMPTS["default"]
        task = own[0]
        if name != "list_functions":  # draws from the process's random numbers: no two tasks are the same there
            assert user["content"] == task["question"]
            right = f"Hm.\n<answer>{task['answer']}</answer>"
            score = own.score_answer(str(task["answer"]).strip(), task)
            assert world.step({"content": right}) == ("", pytest.approx(score), True)
        for text in NONSENSE:
            _, reward, done = world.step({"content": text})
            assert done and math.isfinite(reward) and 0 <= reward <= 1


def test_an_answer_is_trained_on():
    task = reasoning_gym.create_dataset("chain_sum", seed=3, size=1, max_terms=2)[0]
    policy = Policy(f"<answer>{task['answer']}</answer>")
    samples = played("reasoning_gym:chain_sum", policy, {"seed": 3}, own={"max_terms": 2, "system": "direct"})
    assert exact(policy, samples) and samples[0].reward == 1.0
    assert task["question"] in policy.heard[0] and SYSTEM_PROMPTS["direct"] in policy.heard[0]


def test_sets_are_mixed():
    sets = [{"name": "leg_counting", "config": {"max_animals": 3}}, {"name": "chain_sum", "weight": 2}]
    asked = [World("composite", datasets=sets).reset({"seed": seed})[1]["content"] for seed in range(12)]
    assert 0 < sum("legs" in question for question in asked) < 12
    world = World("composite", datasets=sets)
    world.reset({"seed": 1})
    assert world.step({"content": f"<answer>{world._task['answer']}</answer>"}) == ("", 1.0, True)
