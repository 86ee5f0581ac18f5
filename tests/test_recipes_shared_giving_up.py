"""A run that would learn nothing for ever ends, and says why."""

import dataclasses
import math

import numpy as np
import pytest

from areax.core import losses
from areax.recipes.shared.giving_up import GivingUp
from areax.recipes.shared.rl_options import CriticOptions, Training
from areax.rollout.types import Completion, sampled

PPO = Training(objective=losses.PPO(), critic=CriticOptions("value-model"))


def groups(*rewards):
    made = [sampled([1, 2], Completion([3], [-1.0], [0], "stop"), temperature=1.0, reward=x) for x in rewards]
    return [[dataclasses.replace(sample, rollout=i)] for i, sample in enumerate(made)]


def test_two_batches_without_a_reward():
    none, some = groups(math.nan, math.nan), groups(math.nan, 0.0)
    steps = GivingUp()
    for batch in (none, some, none, some, none):
        steps.check(batch, PPO)
    with pytest.raises(ValueError, match="no completion of the last 2 batches has a reward: .* plays the last batch"):
        steps.check(none, PPO)


def test_a_step_whose_numbers_are_not_finite_names_the_models():
    steps = GivingUp(unusable=np.float32(0.9))
    steps.check(groups(1.0), PPO)
    steps.unusable = np.float32(1.0)
    with pytest.raises(
        ValueError, match="the last step learnt nothing: .*weights of --critic.model value-model, --model"
    ):
        steps.check(groups(1.0), PPO)
