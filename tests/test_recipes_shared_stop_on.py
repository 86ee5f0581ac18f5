"""`--stop-on` ends a run in order, refuses what could never hold, and a run that it ended goes on."""

import itertools
import json
import math
import re

import pytest
import tiny

from areax.adapters import cli, hf, tokenizer
from areax.adapters.tracking import diagnosis, run_dir
from areax.recipes import distill, grpo, preference, prm, sft
from areax.recipes.shared.rl_options import Evaluation
from areax.recipes.shared.stop_on import StopOn
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("stop on")
    tiny.model(path / "model")
    train = arithmetic.splits()["train"]
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(train), 40)))
    return path


def ended(rules, values, start=0, steps=100):
    """(the step at which a run ends, why, whether that is trouble); None if it does not."""
    stop = StopOn(rules, start=start, steps=steps)
    for step, numbers in enumerate(values, start + 1):
        stop.see(step, numbers)
        if stop.summary:
            return step, stop.summary["stopped_on"], stop.summary["trouble"]
    return None


def test_rules():
    kl = [{"kl": x} for x in (0.1, 0.6, 0.4, 0.5, 0.7, 0.9)]
    assert ended(["kl>0.5"], kl) == (2, "kl>0.5: kl was 0.6 at step 2", False)
    assert ended(["kl >= 0.5@2"], kl)[0] == 5 and ended(["kl>0.9"], kl) is None
    assert ended(["kl<0.1"], kl) is None and ended(["kl<=1e-1", "kl>0.5"], kl)[0] == 1
    seldom = [{"accuracy": 0.9}, {}, {"loss": 1.0}, {"accuracy": 0.9}]
    assert ended(["accuracy>=0.9@2"], seldom)[0] == 4  # lines without it do not count
    assert ended(["kl>0.5"], [{"kl": math.nan}]) == (1, "kl>0.5: kl was nan at step 1", True)
    assert ended(["kl>0.5"], [{"kl": math.inf}])[2] is False
    assert ended(["kl>0.5"], kl, steps=2) is None  # the last step ends the run anyway


def test_an_alarm():
    stop, watch = StopOn(["alarm"], steps=9), diagnosis.Watch("grpo")
    for step, skipped in enumerate((0, 0, 1), 1):
        now = {"skipped": float(skipped)}
        stop.see(step, now, watch.see(step, now))
    why = "alarm: the update was skipped: its gradient is not finite at step 3"
    assert stop.summary == {"stopped_on": why, "trouble": True}


@pytest.mark.parametrize(
    "recipe, rule, said",
    [
        (sft, "kl", "--stop-on must be alarm, or METRIC>VALUE, .* got 'kl'; without quotes the shell"),
        (sft, "alarm>0", "--stop-on must be alarm, or METRIC>VALUE, .* got 'alarm>0'; without quotes"),
        (sft, "nll<x", "--stop-on nll<x: got 'x' for a number"),
        (sft, "nll<nan", "--stop-on nll<nan: got 'nan' for a number"),
        (sft, "nll<1@0", "--stop-on nll<1@0: TIMES must be at least 1, got 0"),
        (sft, "nl<1", "--stop-on nl<1: this run logs no metric nl; the nearest are nll"),
        (sft, "heldout_nll<1", "this run logs no metric heldout_nll; it needs --heldout"),
        (sft, "preference_accuracy>0.9", "this run logs no metric preference_accuracy"),
        (preference, "step_accuracy>0.9", "no metric step_accuracy; the nearest are preference_accuracy"),
        (prm, "nll<1", "no metric nll; the nearest are step_nll"),
        (distill, "kl>1", "this run logs no metric kl;"),
        (grpo, "rewrad>1", "no metric rewrad; the nearest are reward"),
        (grpo, "kl>1", "this run logs no metric kl; it needs --objective.kl.coef above 0"),
        (grpo, "accuracy>0.9", "no metric accuracy; it needs --heldout"),
        (grpo, "critic_loss>1", "no metric critic_loss; it needs a critic"),
        (grpo, "margin>1", "no metric margin"),
        (grpo, "time_nothing>0", "no metric time_nothing; the nearest are time_"),
        (grpo, "a/b>0", "this run logs no metric a/b;"),
        (grpo, "pass@4>0.5", "this run logs no metric pass@4;"),
    ],
)  # fmt: skip
def test_what_can_never_hold_is_refused(recipe, rule, said):
    given = {"reward": "x"} if recipe is grpo else {}
    with pytest.raises(ValueError, match=said) as error:
        recipe.Config("model", "data", **given, stop_on=("alarm", rule))
    assert "\n" not in str(error.value)


def test_metrics_of_sources_and_held_out_sets():
    data, held = "easy=a.jsonl:2,hard=b.jsonl", Evaluation(heldout=("m=c.jsonl", "n=d.jsonl"), heldout_samples=4)
    rules = "hard/solved_any>0.9", "m/accuracy>=0.5@2", "n/pass@4>=0.9@2", "time_rollout>60", "reward_any>0"
    grpo.Config("model", data, reward="x", evaluation=held, stop_on=rules)
    for wrong in ("hard/solved>0", "o/accuracy>0", "m/pass@3>0"):
        with pytest.raises(ValueError, match=f"this run logs no metric {wrong[:-2]};"):
            grpo.Config("model", data, reward="x", evaluation=held, stop_on=(wrong,))


def test_a_component_of_rewards_that_does_not_come_is_named_once(capsys):
    stop = StopOn(["reward_form>2", "reward_from>2", "accuracy>2"], start=3, steps=100)
    for step in range(4, 20):
        stop.see(step, {"reward_form": 1.0})
        stop.see(step, {"accuracy": 1.0})
    said = "--stop-on reward_from>2: no step so far has reward_from, a component that rewards name\n"
    assert capsys.readouterr().err == said and not stop.summary


def command(place, out, *options):
    words = ["train", "sft", "--model", str(place / "model"), "--data", str(place / "rows.jsonl"), "--out", str(out)]
    return [*words, "--steps", "6", "--batch", "8", "--rows", "4", "--length", "64", *options]


@pytest.mark.slow
def test_a_run_ends_in_order_and_goes_on(place, tmp_path, capsys):
    """Two steps with a loss above 0, the state of the second, the export, exit code 0; again, and two more."""
    for done in (2, 4):
        assert cli.main(command(place, tmp_path, "--stop-on", "nll>0@2", "loss<-1")) == 0
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["steps"] == done and summary["complete"] is False and not summary["trouble"]
        assert re.fullmatch(rf"nll>0@2: nll was [\d.]+ at step {done}", summary["stopped_on"])
        assert f"stopped after {done} steps, --stop-on nll>0@2: nll was" in capsys.readouterr().err
        lines = [x for x in run_dir.read_lines(tmp_path / "metrics.jsonl") if x["kind"] == "sft"]
        assert [line["step"] for line in lines] == [*range(1, done + 1)] and (tmp_path / "model/config.json").exists()
        assert (tmp_path / "state" / str(done)).is_dir()
    assert cli.main(command(place, tmp_path)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and summary["steps"] == 6 and "stopped_on" not in summary
    logged = tuple(f"{name}>1" for name in lines[0] if name not in run_dir.OURS)
    assert len(logged) > 10 and sft.Config("model", "data", stop_on=logged)  # each can be named


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_it_with_another_exit_code(place, tmp_path, capsys):
    """Logits overflow: each step is skipped."""
    settings, params = hf.load(place / "model")
    params["norm"] = params["norm"] + 3e38
    hf.save(tmp_path / "large", settings, params, tokenizer=tokenizer.load(place / "model"))
    more = ("--model", str(tmp_path / "large"), "--stop-on", "nll<0@5")
    assert cli.main(command(place, tmp_path / "out", *more)) == 3
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["trouble"] and summary["stopped_on"] == "nll<0@5: nll was nan at step 1"
    assert [(alarm["name"], alarm["first"]) for alarm in summary["alarms"]][0] == ("not_finite", 1)
    said = [line for line in capsys.readouterr().err.splitlines() if "not finite first: " in line]
    first = "sft step 1: not finite first: the model's log-probability, nan, of token "
    assert len(said) == 1 and said[0].startswith(first) and " of row 0, which begins '<|im_start|>user " in said[0]
