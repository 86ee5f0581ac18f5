"""Episodes play to their ends; equal seeds are equal; spaces that are neither numbers nor texts are refused."""

import asyncio
import sys

import gymnasium
import pytest
from fidelity import Policy, exact
from playing import play, played

from areax.adapters.environments.gymnasium import World
from areax.recipes.shared import environments

LAKE = "gymnasium:FrozenLake-v1"
STILL = {"is_slippery": False}
DOWN_AND_RIGHT = ["1", "Down: 1", "I go right.\n2", "2", "1", "2"]


class Parrot(gymnasium.Env):
    """Rewards a text of letters that is as long as the number that is seen."""

    action_space = gymnasium.spaces.Text(4, charset="ab")
    observation_space = gymnasium.spaces.Discrete(4, start=1)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = int(self.np_random.integers(1, 5))
        return self.wanted, {}

    def step(self, action):
        return self.wanted, float(len(action) == self.wanted), True, False, {}


class Speaker(Parrot):
    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def reset(self, seed=None, options=None):
        return "hello", super().reset(seed)[1]

    def step(self, action):
        return "bye", float(action == -1), False, False, {}


gymnasium.register("Parrot-v0", entry_point=Parrot)
gymnasium.register("Speaker-v0", entry_point=Speaker, max_episode_steps=2)


def test_a_lake_is_crossed():
    policy = Policy(*DOWN_AND_RIGHT)
    samples = played(LAKE, policy, {"seed": 0}, own=STILL | {"system": "0 left, 1 down, 2 right, 3 up"})
    assert exact(policy, samples) and len(policy.said) == 6
    assert [value for sample in samples for _, value in sample.rewards] == [0, 0, 0, 0, 0, 1]
    assert "0 left, 1 down" in policy.heard[0]
    assert "0\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with an action, a number from 0 to 3.<|im" in policy.heard[0]
    assert "4\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG<|im_end|>" in policy.heard[1]


@pytest.mark.parametrize("text", ["", "no", "4", "-1", "1 or 99999999999999999999999", "\u0661\u0662", "1.5e9"])
def test_nonsense_is_told_and_is_no_step(text):
    policy = Policy(text, *DOWN_AND_RIGHT)
    samples = played(LAKE, policy, {"seed": 0}, own=STILL)
    assert exact(policy, samples) and len(policy.said) == 7 and sum(sample.reward for sample in samples) > 0
    assert "error: not an action. Answer with an action, a number from 0 to 3." in policy.heard[1]


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"])
def test_episodes_with_one_seed_are_equal_while_others_run(name):
    async def together(*seeds):
        policies = [Policy(say=lambda prompt, turn: str(turn % 4)) for _ in seeds]
        own = {"is_slippery": True} if name != "Taxi-v4" else {"is_rainy": True}
        made = await asyncio.gather(
            *(play(f"gymnasium:{name}", one, {"seed": seed}, own=own, turns=12)
              for one, seed in zip(policies, seeds, strict=True))
        )  # fmt: skip
        return [(one.heard, [sample.reward for sample in samples]) for one, samples in zip(policies, made, strict=True)]

    [alone] = asyncio.run(together(1))
    many = asyncio.run(together(1, 2, 3, 4, 1, 5, 6, 7, 8, 9))
    assert many[0] == many[4] == alone and any(game != alone for game in many) and len(alone[0]) > 1


def test_texts_are_actions():
    world = World("Parrot-v0")
    [user] = world.reset({"seed": 5})
    wanted = int(user["content"].split()[0])
    assert user["content"] == f"{wanted}\n\nAnswer with an action, a text of 1 to 4 characters."
    for text in ("abc!", "", "aaaaa"):
        assert world.step({"content": text})[1:] == (None, False)
    assert world.step({"content": "a" * wanted})[1:] == (1.0, True)
    world.close()


def test_an_episode_that_is_truncated_ends():
    policy = Policy("-1", "it is 0")
    [sample] = samples = played("gymnasium:Speaker-v0", policy, {"seed": 0})
    assert exact(policy, samples) and [value for _, value in sample.rewards] == [1.0, 0.0]
    assert "hello\n\nAnswer with an action, a number from -1 to 1." in policy.heard[0]


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("MountainCarContinuous-v0", "", "MountainCarContinuous-v0 must have actions of a space Discrete or Text, got"),
        ("CartPole-v1", "", "CartPole-v1 must have observations of a space Discrete or Text, or the"),
        ("Blackjack-v1", "", r"Blackjack-v1 must have observations of .* got Tuple\(Discrete\(32\)"),
        ("Nope-v1", "", "NameNotFound: Environment `Nope` doesn't exist"),
        ("FrozenLake-v1", '{"depth": 3}', ".* unexpected keyword argument 'depth'"),
        ("FrozenLake-v1", '{"render_mode": "human"}', "render_mode is chosen here, got 'human'; leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused_before_a_run(name, options, line):
    with pytest.raises(ValueError, match=rf"^environment gymnasium:{name} cannot begin: its constructor: .*{line}.*$"):
        asyncio.run(environments.check(f"gymnasium:{name}", options, {"seed": 0}, None))


def test_a_module_that_registers_environments_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_lakes.py").write_text(
        "import gymnasium\ngymnasium.register('My-v0', entry_point='gymnasium.envs.toy_text:CliffWalkingEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    [user] = World("my_lakes:My-v0").reset({"seed": 0})
    assert user["content"].startswith("36\no  o  o") and "my_lakes" in sys.modules
