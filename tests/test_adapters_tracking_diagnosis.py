"""Steps in which nothing is learnt are said, with what to look at, and are described in docs/metrics.md."""

import math
import re
from pathlib import Path

import pytest

from areax.adapters import cli
from areax.adapters.tracking import diagnosis, metric_catalog

ROOT = Path(__file__).resolve().parents[1]
HEALTHY = {
    "loss": 0.1, "nll": 0.1, "preference": 0.6, "divergence": 0.2, "grad_norm": 1.0, "update_ratio": 1e-3, "skipped": 0,
    "reward_std": 0.4, "groups_that_teach": 3, "effective_fraction": 0.7, "unscorable": 0, "truncated": 0.1,
    "empty": 0.0, "entropy": 0.5, "mismatch_k3_now": 1e-6, "learnt_tokens": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, names",
    [
        ({}, []),
        ({"groups_that_teach": 0, "effective_fraction": 0.0, "grad_norm": 0.0}, ["no_group_teaches"]),
        ({"reward_std": 0.0, "groups_that_teach": 0, "effective_fraction": 0.0, "grad_norm": 0.0}, ["same_reward"]),
        ({"groups_that_teach": 0}, []),  # a critic's advantages differ all the same
        ({"effective_fraction": 0.0, "grad_norm": 0.0}, ["nothing_left"]),
        ({"unusable_fraction": 1.0, "grad_norm": 0.0, "update_ratio": 0.0}, ["unusable"]),
        ({"unusable_teacher": 0.6}, ["unusable_teacher"]),
        ({"unscorable": 0.75}, ["unscorable"]),
        ({"grad_norm": 0.0, "update_ratio": 0.0}, ["no_gradient"]),
        ({"update_ratio": 0.0}, ["no_update"]),
        ({"truncated": 0.75}, ["truncated"]),
        ({"truncated": 0.5}, []),
        ({"truncated": 1.0}, ["never_ends"]),
        ({"truncated": 1.0, "unstopped": 0.25}, ["unstopped"]),
        ({"empty": 0.5}, ["empty"]),
        ({"entropy": 0.001}, ["entropy"]),
        ({"mismatch_k3_now": 0.01}, ["mismatch"]),
        ({"skipped": 1.0, "grad_norm": math.inf, "update_ratio": 0.0}, ["skipped"]),
        ({"critic_skipped": 1.0}, ["critic_skipped"]),
        ({"critic_skipped": 1.0, "loss": math.nan}, ["not_finite", "critic_skipped"]),
        ({"loss": math.nan, "nll": math.nan, "skipped": 1.0, "update_ratio": 0.0}, ["not_finite"]),
        ({"learnt_tokens": 0, "grad_norm": 0.0, "update_ratio": 0.0}, ["no_learnt_tokens"]),
        ({"nll": 0.3}, ["same_nll"]),
        ({"nll": 0.3, "update_ratio": 0.0}, ["no_update"]),
        ({"preference": 0.3, "divergence": 0.3}, ["same_preference", "same_divergence"]),
    ],
)
def test_what_is_wrong_with_a_step_is_said_once(changes, names):
    before = {"nll": 0.3, "preference": 0.3, "divergence": 0.3}
    now = {**HEALTHY, **changes}
    assert [condition.name for condition in diagnosis.of(now, before)] == names
    for name in changes:  # what a recipe does not log is not judged
        left = {key: value for key, value in now.items() if key != name}
        assert len(diagnosis.of(left, before)) <= len(names)


def test_an_alarm_is_said_once_and_again_after_it_was_over():
    """`truncated` holds at odd steps up to 9, and again from step 25 on; `ess` is given five steps."""
    watch = diagnosis.Watch("grpo")
    healthy = {name: value for name, value in HEALTHY.items() if name not in ("nll", "preference", "divergence")}
    raised = {}
    for step in range(30):
        truncated = 0.75 if (step < 10 and step % 2) or step > 24 else 0.0
        now = {**healthy, "truncated": truncated, "ess": 0.4 if step in (0, 1, 2, 3, 5) or step > 20 else 0.9}
        raised |= {(step, alarm.condition.name): alarm for alarm in watch.see(step, now)}
    assert [*raised] == [(1, "truncated"), (25, "truncated"), (25, "ess_below")]
    line = str(raised[1, "truncated"])
    assert line.startswith("grpo step 1: most completions end at the length limit (truncated 0.75; alarm: truncated ")
    assert "alarm: truncated above 0.5): raise --sampling." in line and "\n" not in line
    last = watch.alarms["truncated"]
    assert (last.first, last.last, last.steps, last.raised) == (1, 29, 10, 2)
    rows = [{"step": step, "kind": "grpo", "truncated": 0.75} for step in (1, 2)]
    [alarm] = diagnosis.alarms({"grpo": rows, "eval": rows, "sft": []})
    assert (alarm.kind, alarm.steps) == ("grpo", 2)


def test_every_bound_of_the_catalogue_is_watched_on_both_sides():
    for name, bounds in metric_catalog.ALARMS.items():
        for bound, beyond in zip(bounds, (-1, 1), strict=True):
            if bound is not None:
                watch, now = diagnosis.Watch("grpo"), {name: bound + beyond, "effective_fraction": 0.5}
                assert any(watch.see(step, now) for step in range(diagnosis.CRITIC)), (name, bound)
                assert not diagnosis.of({name: bound, "effective_fraction": 0.5})


def test_the_page_lists_every_condition_with_its_bound():
    """docs/metrics.md, "What to look at": what, rule and advice are those of the code."""
    text = (ROOT / "docs/metrics.md").read_text()
    table = text[text.index("## What to look at") :].split("\n\n")[2]
    rows = [tuple(re.split(r" *(?<!\\)\| *", line.strip("| "))) for line in table.splitlines()[2:]]
    assert rows == [(c.what, c.rule, c.advice) for c in diagnosis.CONDITIONS]


def options_of(recipe, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", recipe, "--help-all"])
    return capsys.readouterr().out


def advised(condition):
    return re.findall(r"--[a-z.-]+[a-z]", condition.advice)


@pytest.mark.parametrize(
    "recipe, own", [("sft", "nll"), ("distill", "divergence"), ("preference", "preference"), ("prm", "nll")]
)
def test_advice_on_a_step_without_rollouts_names_options_of_its_recipe(recipe, own, capsys):
    logged = {"entropy", "grad_norm", "learnt_tokens", "loss", "skipped", "update_ratio", own}
    options = options_of(recipe, capsys)
    possible = [c for c in diagnosis.CONDITIONS if {metric for metric, *_ in c.tests} <= logged]
    assert {"not_finite", f"same_{own}"} <= {c.name for c in possible}
    assert [(c.name, option) for c in possible for option in advised(c) if not re.search(rf"{option}\b", options)] == []


def test_metrics_options_and_conditions_that_are_named_exist(capsys):
    options = options_of("grpo", capsys) + options_of("sft", capsys)
    names = {condition.name for condition in diagnosis.CONDITIONS}
    for condition in diagnosis.CONDITIONS:
        assert {metric for metric, *_ in condition.tests} <= set(metric_catalog.METRICS)
        assert set(condition.unless) <= names
        for option in advised(condition):
            group = option.rpartition(".")[0]
            assert re.search(rf"{option}\b", options) or group == "--objective", option
