"""Moving averages of the rewards of each seat, the baseline of role-conditioned advantages (RAE, arXiv:2506.24119)."""

import math
from collections.abc import Sequence

from areax.rollout.types import Sample


def compared(groups: Sequence[Sequence[Sample]], averages: dict[int, float], decay: float) -> list[list[Sample]]:
    """The samples, each with the component "moving": the average of its seat before its rollout, from 0 at the start.

    Args:
      averages: of each seat; becomes decay x average + (1 - decay) x reward with each rollout, in the order of the
        groups. Unscorable rollouts change nothing.
    """
    before: dict[int, float] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.rollout not in before:
            before[sample.rollout] = averages.setdefault(sample.seat, 0.0)
            if not math.isnan(sample.reward):
                averages[sample.seat] = decay * averages[sample.seat] + (1 - decay) * sample.reward
    with_average = lambda s: s.replace(components={**s.components, "moving": before[s.rollout]})
    return [[with_average(sample) for sample in group] for group in groups]
