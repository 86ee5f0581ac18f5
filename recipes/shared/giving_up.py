"""Ends a run that would go on without learning, because its rewards or its models fail."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from areax.recipes.shared.rl_options import Training
from areax.rollout.scheduling import episodes
from areax.rollout.types import Sample

UNSCORED = 2  # batches in a row without any reward
FEWEST = 64  # completions in them: of few rows all may be unscorable
LOST = 8  # steps in a row without an update
UNUSABLE = "unusable_fraction", "unusable_teacher"  # metrics


@dataclass
class GivingUp:
    """What the last steps came to; kept with the state, for a run that is started again must not count anew.

    Attributes:
      batches, completions: in a row without a reward.
      lost: steps in a row that made no update because numbers are not finite; LOST at once if a step can use none of
        its tokens (UNUSABLE).
    """

    batches: int = 0
    completions: int = 0
    lost: int = 0

    @classmethod
    def restored(cls, cursor: Mapping[str, Any] | None) -> "GivingUp":
        """As the state of a run says, whose next step is tried in any case: options may be others now."""
        kept = (cursor or {}).get("giving_up", {})
        made = cls(**{name: kept[name] for name in ("batches", "completions", "lost") if name in kept})
        made.lost = min(made.lost, LOST - 1)
        return made

    @property
    def kept(self) -> dict[str, dict[str, int]]:
        """What `restored` reads."""
        return {"giving_up": asdict(self)}

    def see(self, report: Mapping[str, Any]) -> None:
        """Takes a step's metrics."""
        if any(report.get(name) == 1 for name in UNUSABLE):
            self.lost = LOST
        else:
            self.lost = self.lost + 1 if report.get("skipped") == 1 else 0

    def check_numbers(self, models: str, steps: int = LOST) -> None:
        """Raises ValueError, which names `models`, if steps are lost: so many, or at the end all `steps` of a run."""
        if steps and self.lost >= min(LOST, steps):
            raise ValueError(
                f"the last steps learnt nothing: losses, values or a teacher's numbers are not finite; check {models} "
                "(areax check), lower the learning rate (--optim.lr, --critic.optim.lr) and start the same command "
                "again, or take another --out"
            )

    def check_rewards(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Raises ValueError before a batch is trained on if there is no reward in it, nor in those before."""
        outcomes = [episodes.outcome(sample) for group in groups for sample in group]
        lost = all(x != x for x in outcomes)
        self.batches = self.batches + 1 if lost else 0
        self.completions = self.completions + len(outcomes) if lost else 0
        if self.batches >= UNSCORED and self.completions >= FEWEST:
            raise ValueError(
                f"no completion of the last {self.batches} batches, {self.completions} in all, has a reward: the "
                "reward, or the environment, fails or answers null; mend it and start the same command again, which "
                "plays the last batch again"
            )

    def check_end(self, steps: int) -> None:
        """Raises ValueError at the end of a run of `steps` steps if none of them had a reward."""
        if steps and self.batches >= steps:
            raise ValueError(
                f"no completion of the run's {steps} steps had a reward: the reward, or the environment, fails or "
                "answers null; mend it and take another --out"
            )


def models(options: Training) -> str:
    """The models whose numbers a step of RL is made of, by their options."""
    named = {
        f"--critic.model {options.critic.model}".strip(): options.objective.needs_values,
        f"--teacher {options.teacher}": bool(options.teacher),
        "the reference": options.objective.needs_reference,
        "--model": True,
    }
    return "the weights of " + ", ".join(name for name, used in named.items() if used)
