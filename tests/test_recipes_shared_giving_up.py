"""A run that would learn nothing for ever ends, and says why; one that is fine does not."""

import dataclasses
import math

import pytest

from areax.core import losses
from areax.recipes.shared.giving_up import LOST, GivingUp, models
from areax.recipes.shared.rl_options import CriticOptions, Training
from areax.rollout.types import Completion, sampled

PPO = Training(objective=losses.PPO(), critic=CriticOptions("value-model"))


def groups(*rewards):
    made = [sampled([1, 2], Completion([3], [-1.0], [0], "stop"), temperature=1.0, reward=x) for x in rewards]
    return [[dataclasses.replace(sample, rollout=i)] for i, sample in enumerate(made)]


def test_batches_without_a_reward():
    none, some = groups(*[math.nan] * 32), groups(*[math.nan] * 31, 0.0)
    steps = GivingUp()
    for batch in (none, some, none, some, none):
        steps.check_rewards(batch)
    words = "no completion of the last 2 batches, 64 in all, has a reward: .* plays the last batch again"
    with pytest.raises(ValueError, match=words):
        steps.check_rewards(none)
    with pytest.raises(ValueError, match="the last 3 batches"):  # the same command again
        GivingUp.restored({"other": 1, **steps.kept}).check_rewards(none)


def test_a_few_rows_may_be_unscorable():
    steps = GivingUp()
    for _ in range(15):
        steps.check_rewards(groups(*[math.nan] * 4))
    with pytest.raises(ValueError, match="the last 16 batches, 64 in all"):
        steps.check_rewards(groups(*[math.nan] * 4))


def test_a_short_run_without_any_reward_is_not_complete():
    steps = GivingUp()
    steps.check_rewards(groups(math.nan))
    steps.check_end(2)
    with pytest.raises(ValueError, match="no completion of the run's 1 steps had a reward"):
        steps.check_end(1)
    GivingUp().check_end(0)  # nothing was left to do


@pytest.mark.parametrize("name", ["unusable_fraction", "unusable_teacher"])
def test_a_step_whose_numbers_are_not_finite_names_the_models(name):
    steps = GivingUp()
    steps.see({name: 0.9, "skipped": 0.0})
    steps.check_numbers(models(PPO))
    steps.see({name: 1.0})
    with pytest.raises(
        ValueError, match="the last steps learnt nothing: .*weights of --critic.model value-model, --model"
    ):
        steps.check_numbers(models(PPO))
    again = GivingUp.restored({"giving_up": {**steps.kept["giving_up"], "later": 1}})
    again.check_numbers("x")  # options may be others now
    again.see({"skipped": 1.0})
    with pytest.raises(ValueError, match="learnt nothing"):
        again.check_numbers("x")


def test_updates_that_are_all_skipped():
    steps = GivingUp()
    for skipped in [1.0] * (LOST - 1) + [0.0] + [1.0] * (LOST - 1):
        steps.see({"skipped": skipped})
        steps.check_numbers("x")
    steps.see({"skipped": 1.0})
    with pytest.raises(ValueError, match="learnt nothing"):
        steps.check_numbers("x")


def test_a_short_run_whose_updates_are_all_skipped():
    steps = GivingUp()
    for _ in range(3):
        steps.see({"skipped": 1.0})
    steps.check_numbers("x")
    steps.check_numbers("x", 4)  # one was not
    with pytest.raises(ValueError, match="learnt nothing"):
        steps.check_numbers("x", 3)
