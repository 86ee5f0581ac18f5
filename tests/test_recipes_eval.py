"""Evaluation: pass@k against brute force, named held-out sets, answers and page of `areax eval`."""

import itertools
import json
import re
import threading

import numpy as np
import pytest
import servers
import tiny
from hypothesis import given
from hypothesis import strategies as st
from jax._src import xla_bridge

from areax.adapters import cli
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import metric_catalog, run_dir
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.recipes.shared import evaluation
from areax.rollout.types import Completion, Sampling, sampled

# The first digit that the model says decides, so that sampled completions differ in their rewards.
REWARD = "def reward(text, row): return None if text[:1] == '+' else float(text[:1] in '01234') if text else 0.0"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval")
    tiny.model(path / "model")
    (path / "reward.py").write_text(REWARD)
    tiny.rows(path / "sums.jsonl", [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(6)])
    tiny.rows(path / "more.jsonl", [{"prompt": f"{i}+1<b>"[:3], "answer": str(i + 1)} for i in range(4)])
    with servers.embedded(path / "model", slots=8, context=64) as remote:
        (path / "url").write_text(remote.url)
        yield path


def words(place, *more):
    url = (place / "url").read_text()
    given = f"eval --model {place}/model --data {place}/sums.jsonl --reward {place}/reward.py:reward --servers {url}"
    return [*given.split(), "--sampling.max-new-tokens", "3", *map(str, more)]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    wanted = np.mean([max(chosen) for chosen in itertools.combinations(rewards, k)])
    assert evaluation.pass_at(rewards, k) == pytest.approx(wanted)


@pytest.mark.parametrize(("n", "c", "k"), [(10, 3, 1), (10, 3, 4), (10, 3, 8), (5, 0, 2), (5, 5, 5), (2000, 7, 1000)])
def test_pass_at_k_of_right_and_wrong_answers_is_that_of_chen_et_al(n, c, k):
    """Their numerically stable product, arXiv:2107.03374, figure 3."""
    wanted = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert evaluation.pass_at([1.0] * c + [0.0] * (n - c), k) == pytest.approx(wanted)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_completions(k):
    with pytest.raises(ValueError, match=f"pass_at: k must be from 1 to the 3 completions, got {k}"):
        evaluation.pass_at([0.0, 1.0, 1.0], k)


def sample(reward, rollout):
    done = Completion([5, 6], [-1.0, -1.0], [0, 0], "stop" if reward == 1 else "length")
    return sampled([1], done, temperature=1.0, reward=reward).replace(rollout=rollout)


def test_a_summary_averages_over_rows_and_leaves_out_what_cannot_be_scored():
    nan = float("nan")
    groups = [[1.0, 0.0, nan, 0.0], [1.0, 1.0, 1.0, 1.0], [nan] * 4, [0.0, 0.0, 0.0, 0.0]]
    ids = itertools.count()
    got = evaluation.summary([[sample(x, next(ids)) for x in group] for group in groups], 4)
    assert got["accuracy"] == pytest.approx((1 / 3 + 1 + 0) / 3) and (got["rows"], got["samples"]) == (4, 16)
    assert got["unscorable"] == 5 and got["truncated"] == 11 / 16 and got["length"] == 2
    assert got["stderr"] == pytest.approx(np.std([1 / 3, 1, 0], ddof=1) / 3**0.5)
    assert got["pass@2"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert got["pass@4"] == pytest.approx((1 + 0) / 2)  # the first row has only three
    assert [name for name in got if "@" in name] == ["pass@2", "pass@4"]
    empty = evaluation.summary([[]], 6)
    assert empty["accuracy"] is None and [name for name in empty if "@" in name] == ["pass@2", "pass@4", "pass@6"]
    assert not any("@" in name for name in evaluation.summary([[sample(1.0, 0)]], 1))


def test_the_names_of_held_out_sets():
    assert evaluation.named(("math=a.jsonl", "code=owner/name:main")) == {"math": "a.jsonl", "code": "owner/name:main"}
    assert evaluation.named(("a.jsonl",)) == evaluation.named("a.jsonl") == {"": "a.jsonl"}
    assert evaluation.named(()) == evaluation.named(("",)) == {}  # as earlier runs wrote it
    assert evaluation.named(("dir/x=1/a.jsonl",)) == {"": "dir/x=1/a.jsonl"}
    with pytest.raises(ValueError, match="each of several sets needs a name, as in math=b.jsonl, got b.jsonl"):
        evaluation.named(("math=a.jsonl", "b.jsonl"))
    with pytest.raises(ValueError, match="sets must have different names, got math twice"):
        evaluation.named(("math=a.jsonl", "math=b.jsonl"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--heldout a=x b", "--heldout: each of several sets needs a name, as in math=b, got b"),
        ("--heldout-samples 4", "--heldout-samples 4 needs --heldout, rows to evaluate on, got none"),
        ("--heldout a --heldout-samples 0", "--heldout-samples must be at least 1, got 0"),
    ],
)
def test_options_of_evaluations_are_checked(capsys, more, message):
    assert cli.main(["train", "grpo", "--model", "m", "--data", "d", "--reward", "r", *more.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_run_measures_several_sets_by_name(place):
    config = replaced(
        grpo.Config(str(place / "model"), str(place / "sums.jsonl"), f"{place}/reward.py:reward"),
        out=str(place / "run"), servers=((place / "url").read_text(),), steps=1, groups=2, group_size=2, length=32,
        rows=2, sampling=Sampling(max_new_tokens=3), optim=Optimizer(lr=1e-3), heldout_samples=4,
        heldout=(f"sums={place}/sums.jsonl", f"more={place}/more.jsonl"),
    )  # fmt: skip
    done = grpo.main(config)
    lines = [x for x in run_dir.read_lines(place / "run/metrics.jsonl") if x["kind"] == "eval"]
    assert [x["step"] for x in lines] == [0, 1] and done["heldout_rows"] == 10
    for line in lines:
        assert (line["sums/rows"], line["more/rows"], line["rows"]) == (6, 4, 10)
        assert line["accuracy"] == pytest.approx((line["sums/accuracy"] + line["more/accuracy"]) / 2)
        assert line["sums/accuracy"] < line["sums/pass@2"] < line["sums/pass@4"] <= 1  # sampled, not greedy
    assert done["accuracy"] == lines[-1]["accuracy"] == done["accuracies"]["1"]
    assert done["evaluation"]["more/pass@4"] == lines[-1]["more/pass@4"]
    assert metric_catalog.meaning("more/pass@4").startswith("of the held-out set more: share of held-out problems that")
    saved = json.loads((place / "run" / run_dir.CONFIG).read_text())
    assert saved["evaluation"]["heldout"] == list(config.evaluation.heldout)


def test_an_evaluation_writes_its_answers_and_a_page(capsys, place):
    more = ["--samples", 4, "--sampling.temperature", 1, "--seed", 3, "--json"]
    assert cli.main(words(place, "--out", place / "out", *more)) == 0
    said = json.loads(capsys.readouterr().out)
    assert json.loads((place / "out/results.json").read_text()) == said
    lines = [json.loads(line) for line in (place / "out/answers.jsonl").read_text().splitlines()]
    assert [x["row"]["prompt"] for x in lines] == [f"{i}+{i}" for i in range(6)]
    assert all(x["prompt"].startswith("<|im_start|>user\n") for x in lines)
    for x in lines:
        assert len(x["answers"]) == len(x["rewards"]) == len(x["finish"]) == len(x["lengths"]) == 4
        for text, reward in zip(x["answers"], x["rewards"], strict=True):
            assert reward == (0.0 if not text else None if text[0] == "+" else float(text[0] in "01234"))
    rewards = [[x for x in line["rewards"] if x is not None] for line in lines]
    assert said["accuracy"] == pytest.approx(np.mean([np.mean(x) for x in rewards if x]))
    assert said["pass@2"] == pytest.approx(np.mean([evaluation.pass_at(x, 2) for x in rewards if len(x) > 1]))
    assert said["unscorable"] == sum(x is None for line in lines for x in line["rewards"])
    page = (place / "out/report.html").read_text()
    assert page.count("<details>") == 6 + 24 and "pass@4" in page and "6 of 6 rows" in page
    assert "&lt;|im_start|&gt;user" in page and "<|im_start|>" not in page
    assert not re.search(r"\bnan\b", page, re.I)


def test_without_json_the_numbers_are_lines(capsys, place):
    assert cli.main(words(place)) == 0
    out, said = capsys.readouterr()
    assert "evaluating 6 rows ...\n" in said
    assert re.match(r"accuracy: \S+\nstderr: \S+\nrows: 6\nscored_rows: 6\nsamples: 6\n", out) and "pass@" not in out
    assert not (place / "answers.jsonl").exists()


def test_an_evaluation_leaves_the_devices_to_its_servers(place, monkeypatch):
    """JAX would take memory of their GPUs when it is first asked for a device, or which process this is."""
    get, main, asked = xla_bridge.get_backend, threading.current_thread(), []

    def seen(*args):
        if threading.current_thread() is main:
            asked.append(args)
        return get(*args)

    monkeypatch.setattr(xla_bridge, "get_backend", seen)
    assert cli.main(words(place)) == 0 and not asked


@pytest.mark.slow
def test_a_place_that_cannot_be_written_to_is_said_before_anything_is_evaluated(capsys, place):
    assert cli.main(words(place, "--out", place / "sums.jsonl", "--servers", "http://127.0.0.1:9")) == 2
    assert "--out must be a directory, got" in capsys.readouterr().err
