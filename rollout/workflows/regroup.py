"""Rewards that compare the episodes of a group: judges of pairs, ranks, diversity.

A workflow or an agent may have a function `regroup(episodes)`, as an attribute or a method. It gets the samples of each
episode of a group once all have ended, and returns a reward for each, as rewards are: a number, a dict of named
components, or None = unscorable; or None for all, which leaves them as they are. In an evaluation with one completion
for each row, groups have one episode. Episodes of several players have a reward for each, and no `regroup`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import ServerError
from ..rewards import Score, whole
from ..rewards.signatures import Regroup
from ..types import Sample, Workflow
from . import tools
from .failures import Failures, line


def attached(workflow: Workflow, own: Callable[..., Any] | None, name: str, seconds: float) -> Workflow:
    """The workflow, with a `regroup` that calls `own`, if it has one.

    A group for which `own` raises, takes longer, or returns something else is unscorable and logged;
    `failures.MOST` in a row end the run. A plain function runs in a thread.
    """
    if own is None:
        return workflow
    failures = Failures(f"regroup of {name}")

    async def regroup(episodes: list[list[Sample]]) -> list[Score] | None:
        try:
            if any(sample.seat for samples in episodes for sample in samples):
                raise ValueError("must be of episodes with one player: it gives an episode one reward")
            async with asyncio.timeout(seconds):
                made = await tools.called(own, [list(samples) for samples in episodes])
            scores = None if made is None else [whole(reward) for reward in made]
            if scores is not None and len(scores) != len(episodes):
                raise ValueError(f"must return a reward for each of {len(episodes)} episodes, got {len(scores)}")
            failures.clear()
            return scores
        except ServerError:
            raise
        except Exception as error:  # a stranger's code may raise anything
            failures.add(line(error), episodes[0][0].info.get("row", {}), error)
            return [whole(None) for _ in episodes]

    setattr(workflow, "regroup", regroup)  # noqa: B010 (functions have no such attribute)
    return workflow


def of(workflow: Workflow) -> Regroup | None:
    """The `regroup` of a workflow that `resolve.bind` made. Wrappers of the workflow do not have it."""
    return getattr(workflow, "regroup", None)
