"""Conditions of a step in which nothing, or the wrong thing, is learnt: what happened, and what to look at.

A condition that holds for as many steps as its patience is an alarm. `Watch` decides it, for the terminal while the run
goes on, and for the summary and the report after it (docs/metrics.md has the table).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from . import metric_catalog, run_dir

STEADY = 5  # steps in a row: patience with what few samples may show by chance
WARM = 10  # steps in a row: patience with what the fast first steps of stale samples show
CRITIC = 20  # steps in a row: patience with a new critic, which predicts nothing yet
RECOVERED = 10  # steps in a row without a condition, after which it is a new alarm

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
      patience: steps in a row that it must hold to be an alarm.
    """

    name: str
    tests: tuple[tuple[str, str, float], ...]
    what: str
    advice: str
    unless: tuple[str, ...] = ()
    patience: int = 1

    @property
    def rule(self) -> str:
        """The tests in words: "`truncated` above 0.5"."""
        tests = ", ".join(
            f"`{name}` {relation}" + (f" {bound:g}" if relation in ("is", "above", "below") else "")
            for name, relation, bound in self.tests
        )
        return tests + (f", {self.patience} steps in a row" if self.patience > 1 else "")

    def holds(self, now: Metrics, before: Metrics) -> bool:
        """Whether it holds in a step with metrics `now`, after one with metrics `before`."""
        return all(
            name in now and RELATIONS[relation](now[name], bound, before.get(name))
            for name, relation, bound in self.tests
        )


def _beyond(name: str) -> Iterator[tuple[str, str, float]]:
    """A metric beyond each of its bounds in `metric_catalog.ALARMS`."""
    for relation, bound in zip(("below", "above"), metric_catalog.ALARMS[name], strict=True):
        if bound is not None:
            yield name, relation, bound


def _unhealthy(name: str) -> tuple[str, str, float]:
    """A metric with one bound, beyond it."""
    [test] = _beyond(name)
    return test


def _out_of_bounds(
    metric: str, what: str, advice: str, unless: tuple[str, ...] = (), patience: int = STEADY
) -> Iterator[Condition]:
    """Conditions for a metric beyond each of its bounds."""
    for name, relation, bound in _beyond(metric):
        yield Condition(f"{metric}_{relation}", ((name, relation, bound),), what, advice, unless, patience)


SMALLER = "lower --optim.lr, --epochs or --minibatches"
APART = "trainer and sampler disagree about tokens"
DISAGREE = "mismatch_k3_now compares tokens of the newest weights alone: if small, lower --eta; else compare dtypes"
STALE = "samples are old or the sampler computes differently: lower --eta, or widen --objective.correction"
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
    *_out_of_bounds(
        "canary_drifts", "a server computes otherwise than the trainer",
        "lines say which, and whether a flush, a push or a restart helped (docs/reliability.md)", (), 1,
    ),
    *_out_of_bounds(
        "unusable_fraction", "tokens are left out: log-probabilities, values or teacher's numbers are not finite",
        "a line says where the first was; check the weights of critic, reference and teacher (areax check)",
        ("unusable",), 1,
    ),
    *_out_of_bounds(
        "unscorable", "some completions have no reward",
        "the reward raised or ran into --reward-timeout-s: call it on a row of --data by hand", ("unscorable",),
    ),
    *_out_of_bounds(
        "aborted", "answers end with a server's error or abort",
        "read server.log, and the lines of kind server in events.jsonl",
    ),
    *_out_of_bounds(
        "repetition", "answers repeat themselves",
        "read samples.jsonl; the reward may favour length; lower --optim.lr or raise --objective.kl.coef",
    ),
    *_out_of_bounds("clip_fraction", "many tokens are clipped and get no gradient", SMALLER),
    *_out_of_bounds("ratio", "the policy leaves the proximal one within a batch", SMALLER, ("clip_fraction_above",)),
    *_out_of_bounds("prob_error", APART, DISAGREE, ("mismatch",)),
    *_out_of_bounds("logp_diff", APART, DISAGREE, ("mismatch", "prob_error_above")),
    *_out_of_bounds("prob_pearson", APART, DISAGREE, ("mismatch", "prob_error_above", "logp_diff_above"), WARM),
    *_out_of_bounds("perplexity_ratio", APART, DISAGREE, ("mismatch", "prob_error_above", "logp_diff_above")),
    *_out_of_bounds("dropped_fraction", "the correction leaves out many tokens", STALE, ("nothing_left",)),
    *_out_of_bounds(
        "dropped_sequences", "the correction leaves out whole answers", STALE,
        ("nothing_left", "dropped_fraction_above"),
    ),
    *_out_of_bounds("bounded_fraction", "many importance weights are bounded", STALE, ("dropped_fraction_above",)),
    *_out_of_bounds(
        "ess", "few samples carry most of the weight", STALE, ("dropped_fraction_above", "bounded_fraction_above")
    ),
    *_out_of_bounds(
        "explained_variance", "the critic predicts worse than a constant",
        "raise --critic.optim.lr or --critic.warmup, or start from a reward model with --critic.model", (), CRITIC,
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


@dataclass(frozen=True)
class Alarm:
    """A condition that held for as long as its patience.

    Attributes:
      kind: of the steps, as in metrics.jsonl.
      shown: the metrics that raised it, in words.
      first, last: steps at which it was raised, and held most recently.
      steps: in how many it held, of the whole run.
      raised: how many times it was.
    """

    condition: Condition
    kind: str
    shown: str
    first: int
    last: int
    steps: int
    raised: int = 1

    def __str__(self) -> str:
        rule = self.condition.rule.replace("`", "")
        return (
            f"{self.kind} step {self.last}: {self.condition.what} ({self.shown}; alarm: {rule}): "
            f"{self.condition.advice}"
        )


class Watch:
    """Watches the steps of a kind.

    Attributes:
      alarms: all so far, by the names of their conditions.
    """

    def __init__(self, kind: str):
        self.alarms: dict[str, Alarm] = {}
        self._kind, self._before = kind, dict[str, float]()
        self._held, self._row, self._free = (collections.Counter[str]() for _ in range(3))
        self._on: set[str] = set()

    def see(self, step: int, now: Metrics) -> list[Alarm]:
        """The alarms that a step with these metrics raises."""
        new, held = [], {condition.name for condition in of(now, self._before)}
        self._before = dict(now)
        for condition in CONDITIONS:
            name = condition.name
            if name not in held:
                self._row[name], self._free[name] = 0, self._free[name] + 1
                if self._free[name] >= RECOVERED:
                    self._on.discard(name)
                continue
            self._held[name], self._row[name], self._free[name] = self._held[name] + 1, self._row[name] + 1, 0
            former = self.alarms.get(name)
            if former:
                self.alarms[name] = replace(former, last=step, steps=self._held[name])
            if name not in self._on and self._row[name] >= condition.patience:
                self._on.add(name)
                shown = ", ".join(f"{metric} {now[metric]:.4g}" for metric, *_ in condition.tests)
                first, raised = (former.first, former.raised + 1) if former else (step, 1)
                self.alarms[name] = Alarm(condition, self._kind, shown, first, step, self._held[name], raised)
                new.append(self.alarms[name])
        return new


def alarms(table: Mapping[str, Sequence[Mapping]]) -> list[Alarm]:
    """The alarms of a run's steps, given {kind: its lines of metrics.jsonl by increasing step}."""
    watches = {kind: Watch(kind) for kind in table if kind != "eval"}
    for kind, watch in watches.items():
        for line in table[kind]:
            watch.see(line["step"], run_dir.numbers(line))
    return [alarm for watch in watches.values() for alarm in watch.alarms.values()]
