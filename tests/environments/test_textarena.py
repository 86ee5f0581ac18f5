"""Games play to their ends; equal seeds are equal games, whatever runs beside them."""

import asyncio
import random
import re

import pytest
from fidelity import Policy, exact
from playing import play, played

from areax.adapters.environments.textarena import World

GUESS = "textarena:GuessTheNumber-v0"
GAMES = {
    GUESS: ["[6]", "[11]", "[3]"], "textarena:2048-v0": ["[Up]", "[Left]", "[Down]", "[Right]"],
    "textarena:Blackjack-v0": ["[Hit]", "[Stand]"], "textarena:Bandit-v0": ["[red]", "[blue]"],
    "textarena:FrozenLake-v0-random": ["[right]", "[left]"],
}  # fmt: skip


def search(prompt, turn):
    """Binary search by the hints."""
    low, high = 1, 20
    for line in prompt.splitlines():
        if line.startswith("[Player] ["):
            said = int(line.partition("] [")[2].strip("]"))
        if "target number is higher" in line:
            low = said + 1
        if "target number is lower" in line:
            high = said - 1
    return f"[{(low + high) // 2}]"


def test_a_game_is_trained_on_turn_by_turn():
    policy = Policy(say=search)
    samples = played(GUESS, policy, {"seed": 4})
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) > 1
    assert samples[0].components == {"invalid_move": 0.0}
    assert policy.heard[-1].count("You are playing Guess The Number") == 1  # the history is not told twice


@pytest.mark.parametrize("wrapped", ["-train", "-raw"])
def test_games_with_other_wrappers_or_none_play(wrapped):
    policy = Policy("[3]", "[3]", "[3]")
    samples = played(GUESS + wrapped, policy, {"seed": 4})
    assert exact(policy, samples) and "You have to guess the number" in policy.heard[0]
    assert "The target number is" in policy.heard[1]


def test_an_invalid_move_ends_a_game_with_its_reward():
    policy = Policy("no", "neither")
    [sample] = samples = played(GUESS, policy, {"seed": 4})
    assert exact(policy, samples) and sample.components == {"invalid_move": 1.0}


def test_a_game_that_does_not_end_is_ended():
    policy = Policy(say=lambda prompt, turn: f"[{1 + turn % 20}]")
    samples = played("textarena:GuessTheNumber-v0-hardcore", policy, {"seed": 6}, turns=3)
    assert len(policy.said) == 3 and {sample.reward for sample in samples} == {0.0}


@pytest.mark.parametrize("env", GAMES)
def test_games_with_one_seed_are_equal_while_others_run(env):
    """Two of the seed 1 among eight others, and one alone; they draw at each turn."""

    async def together(*seeds):
        policies = [Policy(say=lambda prompt, turn: GAMES[env][turn % len(GAMES[env])]) for _ in seeds]
        made = await asyncio.gather(
            *(play(env, own, {"seed": seed}, turns=6) for own, seed in zip(policies, seeds, strict=True))
        )
        return [(own.heard, [sample.reward for sample in samples]) for own, samples in zip(policies, made, strict=True)]

    [alone] = asyncio.run(together(1))
    many = asyncio.run(together(1, 2, 3, 4, 1, 5, 6, 7, 8, 9))
    assert many[0] == many[4] == alone and any(game != alone for game in many) and len(alone[0]) > 1


def test_the_random_numbers_of_the_process_stay_as_they_are():
    random.seed(3)
    alone = [random.random() for _ in range(3)]
    random.seed(3)
    world, drawn = World("GuessTheNumber-v0"), [random.random()]
    world.reset({"seed": 1})
    drawn.append(random.random())
    world.step({"content": "[3]"})
    assert [*drawn, random.random()] == alone


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "TicTacToe-v0", "Chopsticks-v0"])
def test_games_of_several_players_are_refused_for_one(name):
    with pytest.raises(ValueError, match=f"^{name} must be playable with players = 1 .* received 1.*--env-options"):
        World(name).reset({"seed": 0})


def legal(prompt, turn):
    """The second move that the game names last."""
    moves = re.findall(r"\[(\w+)\]'", prompt.rpartition("available actions are:")[2].partition("\n")[0])
    return f"[{moves[-1]}]" if moves else f"[{turn}]"


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "TicTacToe-v0"])
def test_the_policy_plays_against_itself_with_a_reward_for_each_seat(name):
    policy = Policy(say=legal)
    samples = played(f"textarena:{name}", policy, {"seed": 3}, own={"players": 2})
    assert exact(policy, samples)
    rewards = {seat: {s.reward for s in samples if s.seat == seat} for seat in (0, 1)}
    assert all(map(len, rewards.values())) and sorted(sum(map(list, rewards.values()), [])) == [-1.0, 1.0]


def test_a_player_does_not_see_the_other_ones_cards():
    policy = Policy(say=legal)
    played("textarena:KuhnPoker-v0", policy, {"seed": 3}, own={"players": 2, "max_rounds": 1})
    first, second = (next(heard for heard in policy.heard if f"You are Player {i}" in heard) for i in (0, 1))
    cards = [re.findall(r"Your card is: '(.)'", heard) for heard in (first, second)]
    assert len({*cards[0]}) == len({*cards[1]}) == 1 and cards[0][0] != cards[1][0]
