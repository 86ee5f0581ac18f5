"""A run does not go on with something else under the same name."""

import contextlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tokenizers
import transformers

from areax.adapters import orbax, tokenizer
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.models.lora import Lora
from areax.recipes import grpo
from areax.recipes.shared import contents

REWARD = "import grading.digits\ndef row(record):\n    return record\ndef reward(text, row):\n    return 1.0\n"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder of a run's model, teacher, critic and code, with the state that it has saved."""
    path = tmp_path_factory.mktemp("contents")
    for name in ("model", "teacher", "critic"):
        tiny.model(path / name)
    (path / "own.py").write_text(REWARD)
    (path / "grading").mkdir()
    (path / "grading/__init__.py").write_text("")
    (path / "grading/digits.py").write_text("from . import numbers\n")
    (path / "grading/numbers.py").write_text("ONE = 1.0\n")
    (path / "run").mkdir()
    with contextlib.chdir(path):
        config = started()
        run_dir.write_config(path / "run", config)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(path)
            known = contents.of(config, tokenizer.load("model"))
    saved(path, known)
    return path


def saved(path, known):
    shutil.rmtree(path / "run/state", ignore_errors=True)
    with orbax.open_store(path / "run/state") as store:
        store.save(1, {"x": np.zeros(1)}, {"rollout": {"contents": known}})
        store.wait()


def started(**changes):
    config = grpo.Config(model="model", data="rows", reward="own.py:reward", out="run")
    critic = replace(config.training.critic, model=changes.pop("critic", "critic"))
    own = {
        "row": "own.py:row",
        "lora": Lora(rank=2),
        "objective": losses.PPO(),
        "teacher": "teacher",
        "distill_coef": 0.1,
        **changes,
    }
    return replaced(config, critic=critic, **own)


@pytest.fixture
def copied(begun, tmp_path, monkeypatch):
    """A copy of the folder, in which the test runs."""
    path = shutil.copytree(begun, tmp_path / "copy")
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(path)
    return path


def checked(frozen=True, **changes):
    config = started(**changes)
    contents.check(config, contents.of(config, tokenizer.load("model")), frozen)


def weights(folder):
    """Other weights in place: one bit of the last value, with the times that the file had."""
    file = next(folder.glob("*.safetensors"))
    data, times = file.read_bytes(), file.stat()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def settings(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 20000.0}))


def ends(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')


def pixels(folder):
    (folder / "preprocessor_config.json").write_text("{}")


def vocabulary(folder):
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    made["model"]["vocab"] = dict(zip(made["model"]["vocab"], reversed(made["model"]["vocab"].values()), strict=True))
    file.write_text(json.dumps(made))


def special(folder):
    """The token that ends a text is another one of the vocabulary."""
    file = folder / "tokenizer_config.json"
    made = json.loads(file.read_text())
    file.write_text(json.dumps({**made, "eos_token": "0"}))


def begins(folder):
    """Another token begins a text, which templates may name."""
    file = folder / "tokenizer_config.json"
    made = json.loads(file.read_text())
    file.write_text(json.dumps({**made, "bos_token": "1"}))


def spaces(folder):
    """An added token takes spaces along."""
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    made["added_tokens"][-1]["rstrip"] = True
    file.write_text(json.dumps(made))


def template(folder):
    """One more blank."""
    files = [file for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json") if file.is_file()]
    [file] = [file for file in files if "im_start" in file.read_text()]
    file.write_text(file.read_text().replace("im_start|>", "im_start|> ", 1))


def reward(folder):
    (folder / "own.py").write_text(REWARD.replace("1.0", "2.0"))


def imported(folder):
    """What a module imports that the reward imports."""
    (folder / "grading/numbers.py").write_text("ONE = 2.0\n")


def unimported(folder):
    """What the reward imports is gone."""
    shutil.rmtree(folder / "grading")


@pytest.mark.parametrize(
    "change, where, words",
    [
        (weights, "model", "--model model: weights must be as when the run began"),
        (settings, "model", "--model model: config.json must be"),
        (ends, "model", "--model model: generation_config.json must be"),
        (pixels, "model", "--model model: preprocessor_config.json must be"),
        (weights, "teacher", "--teacher teacher: weights must be"),
        (settings, "teacher", "--teacher teacher: config.json must be"),
        (weights, "critic", "--critic.model critic: weights must be"),
        (vocabulary, "model", "--model model: tokenizer must be"),
        (special, "model", "--model model: tokenizer's rules must be"),
        (begins, "model", "--model model: (tokenizer's rules|special tokens) must be"),
        (spaces, "model", "--model model: special tokens must be"),
        (template, "model", "--model model: chat template must be"),
        (reward, ".", "--reward own.py:reward: code must be"),
        (imported, ".", "--reward own.py:reward: what its code imports must be"),
        (unimported, ".", "--reward own.py:reward: what its code imports must be"),
    ],
)
def test_what_is_replaced_in_place_is_refused_by_name(copied, change, where, words):
    checked()
    change(copied / where)
    copy = (
        ""
        if where == "critic" or where == "model" and change not in (ends, pixels)
        else "to go on with this one, name a copy of it by .*, "
    )
    with pytest.raises(
        ValueError, match=rf"^{words}.*, got \w+; give the former, {copy}or name another --out than run$"
    ):
        checked()


@pytest.mark.parametrize(
    "change, what, used",
    [(weights, "weights", True), (ends, "generation_config.json", False), (template, "chat template", False)],
)
def test_what_a_state_is_exported_with_is_that_of_its_run(copied, change, what, used):
    """Weights count if they are used; a copy is as good."""
    known = contents.of(started(), tokenizer.load("model"))
    other = Path(shutil.copytree("model", "other"))
    check = lambda: contents.check_start(known, other, tokenizer.load(other), weights=used, where="run")
    check()
    if not used:
        weights(other)
        check()
    change(other)
    said = f"^run: {what} of other must be as when the run began.*; name a copy of the former model with --base$"
    with pytest.raises(ValueError, match=said):
        check()


def test_another_option_goes_on_unless_the_state_is_of_no_use_without_the_former(copied):
    other = shutil.copytree("model", "other")
    Path("other.py").write_text(REWARD.replace("1.0", "2.0"))
    checked(reward="other.py:reward", model="other")  # the same weights at another place
    weights(Path(other))
    checked(frozen=False, model="other")
    with pytest.raises(ValueError, match="^--model other: weights must be as when the run began"):
        checked(model="other")


def test_another_critic_is_refused_for_the_state_has_one(copied):
    shutil.copytree("critic", "other")
    checked(critic="other")  # the same, moved
    weights(Path("other"))
    with pytest.raises(ValueError, match="^--critic.model: must be the run's, critic, .* and goes on, got other; give"):
        checked(critic="other")


def test_a_run_that_was_killed_before_it_saved_goes_on_with_the_changed_option(copied):
    """Its config.json is newer than its state."""
    Path("other.py").write_text(REWARD.replace("1.0", "2.0"))
    run_dir.write_config(Path("run"), started(reward="other.py:reward"))
    checked(reward="other.py:reward")
    checked()


def test_a_state_of_a_former_version_has_fewer_hashes(copied):
    names = "model", "teacher", "critic.model", "reward", "tokenizer", "chat template"
    known = contents.of(started(), tokenizer.load("model"))
    saved(copied, {name: known[name] for name in names})
    imported(copied)
    ends(copied / "model")
    checked()
    reward(copied)
    with pytest.raises(ValueError, match="^--reward own.py:reward: code must be"):
        checked()
    shutil.copy("own.py", "other.py")
    checked(reward="other.py:reward")


def test_new_weights_depend_on_the_config_alone(copied):
    known = contents.of(started(init="random"), tokenizer.load("model"))
    assert "model: config.json" in known and "model" not in known
    weights(copied / "model")
    assert known == contents.of(started(init="random"), tokenizer.load("model"))


def test_a_tokenizer_that_merges_in_another_order(copied):
    def made(*merges):
        vocabulary = {text: i for i, text in enumerate(["q", "z", "x", "qz", "zx"])}
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=list(merges)))
        return contents.of(started(), transformers.PreTrainedTokenizerFast(tokenizer_object=inner))

    one, other = made(("q", "z"), ("z", "x")), made(("z", "x"), ("q", "z"))
    assert [name for name in one if one[name] != other[name]] == ["tokenizer's rules"]


def test_a_command_is_the_first_text_that_it_names(copied):
    """Those behind it may be what it writes; other words may be no names of files."""
    (copied / "agent.py").write_text("pass")
    of = lambda command: contents.of(started(workflow=f"exec:{command}"), tokenizer.load("model")).get("workflow")
    command = f"{sys.executable} agent.py --log agent.log"
    first = of(command)
    (copied / "agent.log").write_text("begun")
    assert of(command) == first
    (copied / "agent.py").write_text("pass  # now")
    assert of(command) != first
    assert of("agent") is of(f"{sys.executable} -c '{'x = 1;' * 100}'") is None


@pytest.mark.parametrize(
    "options",
    [
        {"workflow_options": json.dumps({"tools": ["grading/digits.py:f"], "turns": 3})},
        {"env": "inspect_ai:grading/digits.py:task"},
        {"env": "verifiers:grading.digits"},
        {"env": "a=tinker_cookbook:grading/digits.py:Builder:2,b=own.py:World"},
        {"env": "own.py:World", "env_options": json.dumps({"reward": "grading/digits.py:f"})},
    ],
)
def test_code_that_is_named_behind_a_kind_or_in_options_is_part_of_a_run(copied, options):
    given = {
        "reward": "areax.rollout.rewards:none",
        "row": "",
        "teacher": "",
        "distill_coef": 0.0,
        "data": "",
        **options,
    }
    known = contents.of(started(**given), tokenizer.load("model"))
    saved(copied, known)
    contents.check(started(**given), known, False)
    (copied / "grading/digits.py").write_text("from . import numbers\nOTHER = 1\n")
    with pytest.raises(ValueError, match="must be as when the run began"):
        contents.check(started(**given), contents.of(started(**given), tokenizer.load("model")), False)


@pytest.mark.parametrize("lora", [Lora(rank=2, alpha=32.0), Lora(rank=2, rslora=True), Lora(rank=2, base="int8")])
def test_adapters_go_on_with_what_they_were_trained_with(copied, lora):
    with pytest.raises(ValueError, match=r"^--lora.(alpha|rslora|base): must be the run's, (16.0|false|stored), "):
        checked(lora=lora)


def test_weights_that_are_gone_are_not_asked_for(copied):
    for name in ("model", "teacher"):
        for file in (copied / name).glob("*.safetensors"):
            file.unlink()
    checked()
