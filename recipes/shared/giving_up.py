"""Ends a run that would go on without learning, because its rewards or its other models fail."""

from collections.abc import Sequence
from dataclasses import dataclass

from areax.recipes.shared.rl_options import Training
from areax.rollout.scheduling import episodes
from areax.rollout.types import Sample

UNSCORED = 2  # batches in a row without any reward


@dataclass
class GivingUp:
    """What the steps so far came to.

    Attributes:
      unscored: batches in a row without any reward.
      unusable: the last step's fraction of sampled tokens with numbers that are not finite.
    """

    unscored: int = 0
    unusable: float = 0.0

    def check(self, groups: Sequence[Sequence[Sample]], options: Training) -> None:
        """Raises ValueError before a batch is trained on if it is the second without rewards, or if the one before had
        no finite numbers."""
        if self.unusable == 1:
            models = {
                f"--critic.model {options.critic.model}".strip(): options.objective.needs_values,
                f"--teacher {options.teacher}": bool(options.teacher),
                "the reference": options.objective.needs_reference,
                "--model": True,
            }
            named = ", ".join(name for name, used in models.items() if used)
            raise ValueError(
                "the last step learnt nothing: no sampled token has log-probabilities and values that are finite; "
                f"check the weights of {named} (areax check)"
            )
        outcomes = [episodes.outcome(sample) for group in groups for sample in group]
        self.unscored = self.unscored + 1 if all(x != x for x in outcomes) else 0
        if self.unscored == UNSCORED:
            raise ValueError(
                f"no completion of the last {UNSCORED} batches has a reward: the reward, or the environment, fails or "
                "answers null; mend it and start the same command again, which plays the last batch again"
            )
