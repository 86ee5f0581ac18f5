"""Process reward models from files to files: learn, resume exactly, open in transformers, reward steps elsewhere."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import servers
import tiny
import torch
import transformers

from areax import models
from areax.adapters import cli, hf, reward_model, tokenizer
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.core.optim import Optimizer
from areax.parallel.mesh import Layout
from areax.recipes import grpo, prm
from areax.recipes.shared import run_export

GUIDE = (Path(__file__).parents[1] / "docs/preference.md").read_text()


def row(rng):
    """Steps of even digits are right, and of odd ones wrong; one in eight has no label."""
    right = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))]
    steps = ["".join(rng.choice("02468" if good else "13579") for _ in range(rng.randint(1, 3))) for good in right]
    labels: list = [None if rng.random() < 0.125 and i else good for i, good in enumerate(right)]
    return {"prompt": f"{rng.randrange(10)}+", "completions": steps, "labels": labels}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("prm"), random.Random(0)
    tiny.model(path / "model", tie_word_embeddings=False)
    tiny.rows(path / "rows.jsonl", [row(rng) for _ in range(64)])
    tiny.rows(path / "heldout.jsonl", [row(rng) for _ in range(16)])
    return path


def config(place, out, **changes):
    base = prm.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), heldout=str(place / "heldout.jsonl"),
        out=str(place / out), steps=24, batch=16, length=64, rows=8, optim=Optimizer(lr=5e-3),
    )  # fmt: skip
    return replace(base, **changes)


@pytest.fixture(scope="module")
def whole(place):
    return prm.main(config(place, "whole", save_every=12))


@pytest.mark.long
def test_it_learns_which_steps_are_right_and_resumes_exactly(place, whole):
    lines = [line for line in run_dir.read_lines(place / "whole/metrics.jsonl") if "grad_norm" in line]
    assert whole["complete"] and whole["heldout_step_accuracy"] >= 0.95 and whole["heldout_step_nll"] < 0.4
    np.testing.assert_allclose(lines[0]["loss"], lines[0]["step_nll"], rtol=1e-5)
    tiny.cut_off(place / "whole", place / "parts", 12)
    prm.main(config(place, "parts", heldout=""))
    run_export.convert(place / "whole", place / "exported", step=24)
    _, trained = hf.load(place / "whole/model")
    for other in ("parts/model", "exported"):
        for x, y in zip(*map(jax.tree.leaves, (trained, hf.load(place / other)[1])), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_it_opens_in_transformers_and_rewards_the_steps_of_a_text(place, whole):
    """The rewards are the probabilities that AutoModelForTokenClassification gives label 1, on the tokens of TRL."""
    path = place / "whole/model"
    theirs, loading = transformers.AutoModelForTokenClassification.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values()) and theirs.config.num_labels == 2
    tokens, reward = tokenizer.load(path), reward_model.steps(path)
    right, seen = [], []
    for made in map(json.loads, (place / "heldout.jsonl").read_text().splitlines()):
        got = reward("\n\n".join(made["completions"]), {"prompt": made["prompt"]})
        ids = tokenizer.supervised(tokens, {**made, "completion": ""})[0]
        ends = []
        for step in made["completions"]:
            ids += tokens(step, add_special_tokens=False)["input_ids"] + tokens.encode("\n\n", add_special_tokens=False)
            ends.append(len(ids) - 1)
        with torch.no_grad():
            logits = theirs.eval()(torch.tensor([ids]), use_cache=False).logits[0, ends]
        np.testing.assert_allclose([value for _, value in got], logits.softmax(-1)[:, 1], atol=1e-5)
        for (_, value), label in zip(got, made["labels"], strict=True):
            if label is not None:
                right.append((value > 0.5) == label)
                seen.append(-np.log(value if label else 1 - value))
    np.testing.assert_allclose(np.mean(right), whole["heldout_step_accuracy"], rtol=1e-6)
    np.testing.assert_allclose(np.mean(seen), whole["heldout_step_nll"], rtol=1e-4)


@pytest.mark.long
def test_training_goes_on_with_the_head_of_a_checkpoint(place, whole):
    again = prm.main(config(place, "again", model=str(place / "whole/model"), steps=1, optim=Optimizer(lr=1e-5)))
    assert again["heldout_step_accuracy"] >= 0.9
    with pytest.raises(ValueError, match="--model: needs a score head with 3 labels, or none, got one with 2"):
        changes = dict(model=str(place / "whole/model"), objective=losses.ProcessReward(3))
        prm.main(config(place, "other", **changes))


@pytest.mark.long
def test_three_labels_and_new_weights(place, tmp_path):
    made = list(map(row, [random.Random(1)] * 8))
    rows = [{**one, "labels": [1 + (label or 0) for label in one["labels"]]} for one in made]
    data = str(tiny.rows(tmp_path / "rows.jsonl", rows))
    three = dict(objective=losses.ProcessReward(3), init="random", data=data, heldout="", batch=8, steps=2)
    assert prm.main(config(place, "three", **three))["complete"]
    assert hf.read_config(place / "three/model").score_head == models.ScoreHead(3, bias=True)


@pytest.mark.wide
@pytest.mark.mesh
def test_training_is_the_same_on_a_mesh(place):
    one = prm.main(config(place, "one", steps=2))
    on = prm.main(config(place, "on", steps=2, mesh=Layout(fsdp=2, cp=2, tp=2)))
    for name in ("loss", "heldout_step_nll", "heldout_step_accuracy"):
        np.testing.assert_allclose(on[name], one[name], rtol=1e-4)


@pytest.mark.long
def test_steps_are_rewarded_in_a_run_of_rl(place, whole, tmp_path):
    """By worker processes; returns credit each step, and the reward of a sample is the sum of its steps."""
    [shown] = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.S) if "def least" in block]
    assert '"runs/prm/model"' in shown
    (tmp_path / "mine.py").write_text(
        shown.replace('"runs/prm/model"', f"{str(place / 'whole/model')!r}, separator='1'")
    )
    tiny.rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+"} for i in range(10)])
    with servers.embedded(place / "model", slots=8, context=64) as server:
        for name in ("reward", "least"):
            words = {
                "model": place / "model", "data": tmp_path / "rows.jsonl", "reward": f"{tmp_path}/mine.py:{name}",
                "out": tmp_path / name, "servers": server.url, "steps": 2, "groups": 2, "group-size": 4, "length": 64,
                "rows": 2, "eta": 0, "sampling.max-new-tokens": 12, "reward-workers": 1, "reward-timeout-s": 300,
                "samples-every": 1,
            }  # fmt: skip
            algorithm = "reinforceplusplus" if name == "reward" else "grpo"
            assert cli.main(["train", algorithm, *(str(w) for k, v in words.items() for w in (f"--{k}", v))]) == 0
    judge = reward_model.steps(place / "whole/model", separator="1")
    shown = {name: list(run_dir.read_lines(tmp_path / name / "samples.jsonl")) for name in ("reward", "least")}
    several = 0
    for name, total in (("reward", sum), ("least", min)):
        for line in shown[name]:
            [prompt] = re.findall(r"\d\+", line["prompt"])
            steps = [value for _, value in judge(line["text"], {"prompt": prompt})]
            np.testing.assert_allclose(line["reward"], total(steps), rtol=1e-4)
            several += len(steps) > 1
    assert several > 2


GOOD = {"prompt": "1+", "completions": ["2", "3"], "labels": [True, False]}


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(prompt=None), "a row needs either 'prompt' or 'messages', got the fields"),
        (dict(completions=None), "prm: every row needs 'completions', a list of steps, got the fields"),
        (dict(completions=[]), "prm: every row needs 'completions', a list of steps"),
        (dict(completions="23"), "prm: every row needs 'completions', a list of steps"),
        (dict(labels=None), "prm: every row needs 'labels', one for each of 2 steps, got None"),
        (dict(labels=[True]), "prm: every row needs 'labels', one for each of 2 steps, got 1"),
        (dict(labels=[True, 2]), "prm: labels must be true, false, 0 to 1, or null for a step without, got 2"),
        (dict(labels=[True, "+"]), "prm: labels must be true, false, 0 to 1, or null for a step without, got '\\+'"),
        (dict(labels=[True, -100]), "prm: labels must be true, false, 0 to 1, or null for a step without, got -100"),
        (dict(labels=[None, None]), "prm: a row needs a label for one of its steps, got null for all"),
    ],
)
def test_rows_that_cannot_be_used_are_named(place, changes, words):
    bad = {name: x for name, x in {**GOOD, **changes}.items() if x is not None}
    tiny.rows(place / "bad.jsonl", [GOOD, bad])
    with pytest.raises(ValueError, match=words) as error:
        prm.main(config(place, "bad", data=str(place / "bad.jsonl")))
    assert "\n" not in str(error.value)


def test_the_guide_shows_commands_and_rows_that_work(monkeypatch):
    [line] = re.findall(r"```json\n(.*)\n```", GUIDE)
    prm.check(json.loads(line), 2)
    seen = []
    monkeypatch.setattr(prm, "main", seen.append)
    monkeypatch.setattr(grpo, "main", seen.append)
    commands = re.findall(r"^areax (train (?:prm|reinforceplusplus) .*)$", GUIDE, re.M)
    assert all(cli.main(command.split()) == 0 for command in commands)
    assert [type(config) for config in seen] == [prm.Config, grpo.Config] and seen[0].out == "runs/prm"


def test_the_command_has_its_options(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(prm, "main", seen.append)
    required = ["train", "prm", "--model", "m", "--data", "d"]
    assert cli.main([*required, "--separator", "<extra_0>", "--objective.labels", "3"]) == 0
    assert (seen[-1].separator, seen[-1].objective, seen[-1].out) == ("<extra_0>", losses.ProcessReward(3), "runs/prm")
    assert cli.main([*required, "--lora.rank", "4"]) == 2
    assert "--lora.rank must be 0 for a reward model, whose head trains, got 4" in capsys.readouterr().err
    assert cli.main([*required, "--separator", ""]) == 2
    assert "--separator must not be empty" in capsys.readouterr().err
