"""Conditions of a step in which nothing, or the wrong thing, is learnt: what happened, and what to look at.

The terminal says each at its first and its tenth step, the report lists all (docs/metrics.md has the table).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import metric_catalog

SAID_AT = 1, 10  # how many times a condition held when the terminal says so

Metrics = Mapping[str, float]
# relation -> f(value, bound, the step before's value or None)
RELATIONS: dict[str, Callable[[float, float, float | None], bool]] = {
    "is": lambda x, bound, before: x == bound,
    "above": lambda x, bound, before: x > bound,
    "below": lambda x, bound, before: x < bound,
    "not finite": lambda x, bound, before: not math.isfinite(x),
    "as in the step before": lambda x, bound, before: x == before,
    "logged": lambda x, bound, before: True,
}


@dataclass(frozen=True)
class Condition:
    """A condition over a step's metrics.

    Attributes:
      tests: (metric, relation of `RELATIONS`, bound): all must hold, and so be logged.
      what: what happened.
      advice: what to look at.
      unless: names of conditions that explain this one, which is then left out.
    """

    name: str
    tests: tuple[tuple[str, str, float], ...]
    what: str
    advice: str
    unless: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The tests in words: "`truncated` above 0.5"."""
        return ", ".join(
            f"`{name}` {relation}" + (f" {bound:g}" if relation in ("is", "above", "below") else "")
            for name, relation, bound in self.tests
        )

    def holds(self, now: Metrics, before: Metrics) -> bool:
        """Whether it holds in a step with metrics `now`, after one with metrics `before`."""
        return all(
            name in now and RELATIONS[relation](now[name], bound, before.get(name))
            for name, relation, bound in self.tests
        )


def _unhealthy(name: str) -> tuple[str, str, float]:
    """A metric with one bound in `metric_catalog.ALARMS`, beyond it."""
    below, above = metric_catalog.ALARMS[name]
    return (name, "above", above or 0.0) if below is None else (name, "below", below)


NOTHING = "same_reward", "no_group_teaches", "unusable", "nothing_left", "no_learnt_tokens"  # they leave no gradient
CONDITIONS = (
    Condition(
        "not_finite", (("loss", "not finite", 0),), "the loss is not finite",
        "lower --optim.lr, set --optim.clip, check the weights (areax check) and the rows of this step",
    ),
    Condition(
        "skipped", (_unhealthy("skipped"),), "the update was skipped: its gradient is not finite",
        "lower --optim.lr, set --optim.clip, use --run.dtype float32 or bfloat16", ("not_finite",),
    ),
    Condition(
        "critic_skipped", (_unhealthy("critic_skipped"),),
        "the critic's update was skipped: its gradient is not finite",
        "check --critic.model (areax check), lower --critic.optim.lr",
    ),
    Condition(
        "unscorable", (("unscorable", "above", 0.5),), "most completions have no reward",
        "the reward raised or ran into --reward-timeout-s: call it on a row of --data by hand",
    ),
    Condition(
        "same_reward", (("reward_std", "below", 1e-9),), "every completion got the same reward",
        "read samples.jsonl; test the reward on a right and a wrong answer; if it is right, take easier or harder rows",
    ),
    Condition(
        "no_group_teaches", (("groups_that_teach", "is", 0), ("effective_fraction", "is", 0)),
        "no group teaches: within each one all completions got the same reward",
        "take rows that are sometimes solved, a larger --group-size, a higher --sampling.temperature, or "
        "--objective.shaping.dynamic-sampling", ("same_reward",),
    ),
    *(
        Condition(
            name, ((metric, "above", 0.5),), f"most tokens are left out: {words} not finite",
            "check the weights of critic, reference and teacher (areax check), and what served teachers answer",
        )
        for name, metric, words in (
            ("unusable", "unusable_fraction", "their log-probabilities, values or teacher's numbers are"),
            ("unusable_teacher", "unusable_teacher", "their teacher's numbers are"),
        )
    ),
    Condition(
        "nothing_left", (("effective_fraction", "is", 0),), "no sample teaches: masks and bounds leave no token",
        "dropped_fraction counts tokens that bounds leave out: lower --eta, widen --objective.correction; "
        "unusable_fraction those whose numbers are not finite: check the weights of critic, reference and teacher",
        ("same_reward", "no_group_teaches", "unusable"),
    ),
    Condition(
        "no_learnt_tokens", (("learnt_tokens", "is", 0),), "no token is learnt: every loss mask is empty",
        "check that rows have a completion or an assistant's turn, which the chat template shows, and --length",
    ),
    Condition(
        "no_gradient", (("grad_norm", "is", 0),), "the gradient is zero",
        "look at advantages, masks and clip_fraction: all tokens may be clipped or masked", NOTHING,
    ),
    Condition(
        "no_update", (("update_ratio", "is", 0),), "the weights did not change",
        "look at --optim.lr and its schedule: the learning rate may be 0",
        ("not_finite", "skipped", "no_gradient", *NOTHING),
    ),
    *(
        Condition(
            f"same_{name}", ((name, "as in the step before", 0),), f"{words} is exactly that of the step before",
            "look at --optim.lr, and whether --data has more than one batch of different rows",
            ("no_update", "no_gradient", "skipped", "not_finite", "no_learnt_tokens"),
        )
        for name, words in (("nll", "the loss"), ("preference", "the loss"), ("divergence", "the divergence"))
    ),
    Condition(
        "unstopped", (_unhealthy("unstopped"),), "completions go on past the token that ends a turn",
        "servers do not stop there: their model's generation_config.json should name it in eos_token_id; or the "
        "workflow asks for ignore_eos",
    ),
    Condition(
        "never_ends", (("truncated", "is", 1),), "no completion ended before the length limit",
        "the model writes no token that ends a turn: a base model learns the chat template's from areax train sft; "
        "else raise --sampling.max-new-tokens or --length, and read samples.jsonl (of areax eval: answers.jsonl)",
        ("unstopped",),
    ),
    Condition(
        "truncated", (_unhealthy("truncated"),), "most completions end at the length limit",
        "raise --sampling.max-new-tokens or --length, or see in samples.jsonl whether the model ever ends its answers",
        ("unstopped", "never_ends"),
    ),
    Condition(
        "empty", (_unhealthy("empty"),), "some completions are empty: no token but the end",
        "check the chat template and stop tokens; read samples.jsonl; the reward may favour silence",
    ),
    Condition(
        "entropy", (_unhealthy("entropy"), ("effective_fraction", "logged", 0)),  # in RL: other rows may be certain
        "the entropy has collapsed: the policy always gives the same answer",
        "lower --optim.lr, raise --objective.clip-high or --sampling.temperature, or set --objective.entropy.floor",
    ),
    Condition(
        "unfilled", (_unhealthy("filled"),), "much of what is computed is padding",
        "more samples fill rows better: raise --batch (--groups in RL), or take fewer devices along dp, fsdp and ep",
    ),
    Condition(
        "mismatch", (_unhealthy("mismatch_k3_now"),), "trainer and server disagree about tokens of the same weights",
        "compare their dtypes and temperatures; a server may not hold the weights that it says (docs/servers.md)",
    ),
)  # fmt: skip


def of(now: Metrics, before: Metrics = {}) -> list[Condition]:  # noqa: B006 - not changed
    """The conditions that hold in a step with metrics `now`, without those that others explain.

    Args:
      now, before: numbers of this step and of the one before, by name.
    """
    held = [condition for condition in CONDITIONS if condition.holds(now, before)]
    names = {condition.name for condition in held}
    return [condition for condition in held if not names & set(condition.unless)]


class Watch:
    """Watches a run's steps; `see` returns what to say on the terminal."""

    def __init__(self) -> None:
        self._count: collections.Counter[str] = collections.Counter()
        self._before: Metrics = {}

    def see(self, kind: str, step: int, now: Metrics) -> list[str]:
        """The lines to print after a step."""
        lines = []
        for condition in of(now, self._before):
            self._count[condition.name] += 1
            if self._count[condition.name] in SAID_AT:
                shown = ", ".join(f"{name} {now[name]:.4g}" for name, *_ in condition.tests)
                times = self._count[condition.name]
                again = "" if times == 1 else f", for the {times}th time; the report counts the rest"
                lines.append(f"{kind} step {step}: {condition.what} ({shown}){again}: {condition.advice}")
        self._before = now
        return lines
