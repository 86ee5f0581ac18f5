"""`--stop-on "METRIC>VALUE@TIMES"`: ends a run in order once a metric, or an alarm, asks for it."""

import collections
import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areax.adapters.tracking import metric_catalog, progress
from areax.core import losses
from areax.core.mtp import MTP
from areax.recipes.shared import evaluation
from areax.rollout import loop

ALARM = "alarm"  # in place of a comparison
LATE = 5  # steps after which a metric that none of them had is named
RELATIONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
FORM = re.compile(r"\s*([^\s<>=]+)\s*([<>]=?)\s*([^\s@<>=]+)\s*(?:@\s*([0-9]+)\s*)?")

DRAFTS = "mtp_loss", "mtp_accuracy"
BALANCE = {"expert_load", "expert_idle", "balance_load", "balance_z"}
UPDATE = {"loss", "grad_norm", "update_ratio", "skipped", "filled", "trie_ratio", *BALANCE}
PAIRS = {"preference_accuracy", "reward_chosen", "reward_rejected", "left_out"}
TEXTS = {*PAIRS, "logp_chosen", "logp_rejected", "entropy"}
OWN: dict[type, set[str]] = {  # metrics of an objective on given rows
    losses.SFT: {"nll", "entropy"},
    losses.Distill: {"nll", "entropy", "divergence", "unusable_fraction"},
    losses.Preference: {*TEXTS, "preference", "nll", "margin"},
    losses.KTO: {*TEXTS, "kl_baseline"},
    losses.BCO: {*TEXTS, "reward_shift"},
    losses.RewardModel: {*PAIRS, "margin", "score"},
    losses.ProcessReward: {"step_nll", "step_accuracy"},
}
NOT_IN_RL = set().union(*OWN.values()) - {"entropy", "divergence", "unusable_fraction"} | {
    "accuracy_sampled", "equal", "learning_rate", "learnt_tokens", "rows", "scored_rows", "seconds", "step",
    "server_version", *(x for x in metric_catalog.METRICS if x.startswith(("own_", "other_", "fleet_"))),
    *(x for x in metric_catalog.METRICS if x.endswith("_cosine")),
}  # fmt: skip
TIMES = {f"time_{part.removesuffix('_s')}" for part in (*loop.PARTS, "step_s")}
NAMES = re.compile(r"(?:^|,)([A-Za-z0-9_.-]+)=")  # of sources of rows, or environments
CRITIC = {name for name in metric_catalog.METRICS if name.startswith(("critic_", "value"))}
NEEDS: tuple[tuple[Collection[str], str, Callable[[Any], Any]], ...] = (  # metrics of RL with some options alone
    (("kl", "kl_k1", "kl_k3"), "--objective.kl.coef above 0", lambda c: c.training.objective.kl.coef),
    (("kl_coef",), "--objective.kl.target", lambda c: c.training.objective.kl.target),
    (("divergence", "unusable_teacher"), "--distill-coef above 0", lambda c: c.training.distill_coef),
    (DRAFTS, "--mtp.coef above 0", lambda c: c.training.mtp.coef),
    (("max_logp_diff", "mismatch_k3_now"), "--objective.correction.proximal recompute",
     lambda c: c.training.objective.needs_scores),
    (("dual_clip_fraction",), "--objective.dual-clip", lambda c: c.training.objective.dual_clip),
    ({*CRITIC, "return", "explained_variance"}, "a critic, as areax train ppo has",
     lambda c: c.training.objective.needs_values),
    (("rest_s",), "--colocated", lambda c: c.serving.colocated),
    (("accuracy",), "--heldout", lambda c: c.evaluation.heldout),
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A comparison that ends a run once it holds for `times` lines in a row that have the metric."""

    text: str
    metric: str
    relation: str = ""
    value: float = math.nan
    times: int = 1

    @classmethod
    def parsed(cls, text: str) -> "Rule":
        """Raises ValueError if it is neither `alarm` nor METRIC, >, >=, < or <=, VALUE, and perhaps @TIMES."""
        if text == ALARM:
            return cls(text, ALARM)
        found = FORM.fullmatch(text)
        if found is None or found[1] == ALARM:
            raise ValueError(
                f'--stop-on must be {ALARM}, or METRIC>VALUE, with >, >=, < or <= and perhaps @TIMES, as in "kl>0.5" '
                f'or "reward>=0.95@5", got {text!r}; without quotes the shell takes > and < for itself'
            )
        metric, relation, number, times = found.groups()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or times and not int(times):
            wrong = f"TIMES must be at least 1, got {times}" if math.isfinite(value) else f"got {number!r} for a number"
            raise ValueError(f"--stop-on {text}: {wrong}")
        return cls(text, metric, relation, value, int(times or 1))


@dataclass
class StopOn:
    """Watches a run's metrics, and asks it to end in order once a rule holds.

    What a former process of the run counted does not count: a run that ended this way goes on with the same command.

    Attributes:
      rules: of `--stop-on`.
      ask: asks the run to end, `ending.Stop.ask`.
      start, steps: of the run. Steps in between are watched: the last one ends it anyway, and an evaluation of the
        first state belongs to what was before.
      summary: which rule ended the run and why, for summary.json; {} if none has.
    """

    rules: Sequence[str] = ()
    ask: Callable[[], Any] = lambda: None
    start: int = 0
    steps: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    _row: collections.Counter = field(default_factory=collections.Counter)
    _seen: set[str] = field(default_factory=set)  # metrics that came, or were said not to

    def see(self, step: int, values: Mapping[str, float], alarms: Sequence = ()) -> None:
        """Takes the numbers of a line of metrics, and its alarms."""
        rules = [*map(Rule.parsed, self.rules)]
        self._seen.update(values)
        for rule in rules if step == self.start + LATE else ():
            if _is_component(rule.metric) and rule.metric not in self._seen:
                progress.say(f"--stop-on {rule.text}: no step so far has {rule.metric}, a component that rewards name")
                self._seen.add(rule.metric)
        for rule in rules if self.start < step < self.steps and not self.summary else ():
            if rule.metric == ALARM and alarms:
                return self._end(rule, f"{alarms[0].condition.what} at step {step}", trouble=True)
            if rule.metric not in values:
                continue
            value = values[rule.metric]
            self._row[rule] = self._row[rule] + 1 if RELATIONS[rule.relation](value, rule.value) else 0
            if value != value or self._row[rule] >= rule.times:
                return self._end(rule, f"{rule.metric} was {value:.6g} at step {step}", trouble=value != value)

    def _end(self, rule: Rule, why: str, trouble: bool) -> None:
        self.summary = {"stopped_on": f"{rule.text}: {why}", "trouble": trouble}
        self.ask()


def _is_component(name: str) -> bool:
    """Whether a metric may be a component of rewards, whose names the reward alone knows."""
    return name.startswith("reward_") and name not in metric_catalog.METRICS


def rl_conflicts(config: Any) -> Iterator[str]:
    """Why `--stop-on` of a `grpo.Config` names metrics that its run does not log, one sentence each."""
    lacks = {name: needs for names, needs, has in NEEDS if not has(config) for name in names}
    held = config.evaluation.heldout
    sources, sets = NAMES.findall(f"{config.data},{config.env}"), [*evaluation.named(held)] if held else []
    own = {f"{name}/{what}" for name in sources for what in metric_catalog.OF_SOURCE}
    of_set = evaluation.summary((), config.evaluation.heldout_samples)
    own |= {f"{name}/{what}" if name else what for name in sets for what in of_set if name or what.startswith("pass@")}
    known = {*metric_catalog.METRICS} - NOT_IN_RL - {*lacks} | TIMES | own
    yield from _unknown(config.stop_on, known, _is_component, lacks)


def offline_conflicts(config: Any) -> Iterator[str]:
    """The same for the options of a recipe on given rows."""
    own = OWN.get(type(getattr(config, "objective", losses.SFT())), set()) | UPDATE
    own |= {*DRAFTS} if getattr(config, "mtp", MTP()).coef else set()
    known, held = own | {"learnt_tokens"}, {f"heldout_{name}" for name in own - UPDATE | {"loss"}}
    lacks = {} if config.heldout else dict.fromkeys(held, "--heldout")
    yield from _unknown(config.stop_on, known | held - {*lacks}, lambda name: name.endswith("/share"), lacks)


def _unknown(
    rules: Sequence[str], known: Collection[str], family: Callable[[str], Any], lacks: Mapping[str, str]
) -> Iterator[str]:
    for rule in map(Rule.parsed, rules):
        name = rule.metric
        base = name.removesuffix("_max")
        if name == ALARM or {name, base} & {*known} or family(name):
            continue
        near = difflib.get_close_matches(name, known, 3, 0.4)
        why = f"it needs {lacks[base]}" if base in lacks else f"the nearest are {', '.join(near)}" if near else ""
        yield f"--stop-on {rule.text}: this run logs no metric {name}; {why or 'docs/metrics.md has the names'}"
