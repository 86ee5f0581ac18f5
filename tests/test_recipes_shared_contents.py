"""A run does not go on with something else under the same name."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny

from areax.adapters import orbax, tokenizer
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import grpo, sft
from areax.recipes.shared import contents

REWARD = "def reward(text, row):\n    return 1.0\n"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder of a run's model, teacher, critic and reward, with the state that it has saved."""
    path = tmp_path_factory.mktemp("contents")
    for name in ("model", "teacher", "critic"):
        tiny.model(path / name)
    (path / "own.py").write_text(REWARD)
    config = started(path)
    (path / "run").mkdir()
    run_dir.write_config(path / "run", config)
    known = contents.of(config, tokenizer.load(path / "model"))
    with orbax.open_store(path / "run/state") as store:
        store.save(1, {"x": np.zeros(1)}, {"rollout": {"contents": known}})
        store.wait()
    return path


def started(path, **changes):
    config = grpo.Config(model=f"{path}/model", data="rows", reward=f"{path}/own.py:reward", out=f"{path}/run")
    critic = replace(config.training.critic, model=f"{path}/critic")
    own = {
        "lora": Lora(rank=2),
        "objective": losses.PPO(),
        "teacher": f"{path}/teacher",
        "distill_coef": 0.1,
        **changes,
    }
    return replaced(config, critic=critic, **own)


def copied(begun, tmp_path):
    """A copy of the folder, and of its run one that was started there."""
    path = shutil.copytree(begun, tmp_path / "copy")
    run_dir.write_config(path / "run", started(path))
    return path


def checked(path, frozen=True, **changes):
    config = started(path, **changes)
    tokens = tokenizer.load(path / "model")
    contents.check(config, contents.of(config, tokens), frozen)


def weights(folder):
    """Other weights in place: one bit of the last value."""
    file = next(folder.glob("*.safetensors"))
    file.write_bytes((data := file.read_bytes())[:-1] + bytes([data[-1] ^ 1]))


def vocabulary(folder):
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    made["model"]["vocab"] = dict(zip(made["model"]["vocab"], reversed(made["model"]["vocab"].values()), strict=True))
    file.write_text(json.dumps(made))


def template(folder):
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if file.is_file() and "im_start" in file.read_text():
            file.write_text(file.read_text().replace("im_start", "im_strat"))


def reward(folder):
    (folder / "own.py").write_text(REWARD.replace("1.0", "2.0"))


@pytest.mark.parametrize(
    "change, where, words",
    [
        (weights, "model", "--model .*/model: weights must be as when the run began"),
        (weights, "teacher", "--teacher .*/teacher: weights must be"),
        (weights, "critic", "--critic.model .*/critic: weights must be"),
        (vocabulary, "model", "--model .*/model: tokenizer must be"),
        (template, "model", "--model .*/model: chat template must be"),
        (reward, ".", "--reward .*own.py:reward: code must be"),
    ],
)
def test_what_is_replaced_in_place_is_refused_by_name(begun, tmp_path, change, where, words):
    path = copied(begun, tmp_path)
    checked(path)
    change(path / where)
    with pytest.raises(ValueError, match=rf"^{words}.*; give the former, or name another --out than \S+$"):
        checked(path)


def test_another_option_goes_on_unless_the_state_is_of_no_use_without_the_former(begun, tmp_path):
    path = copied(begun, tmp_path)
    other = shutil.copytree(path / "model", path / "other")
    (path / "other.py").write_text(REWARD.replace("1.0", "2.0"))
    checked(path, reward=f"{path}/other.py:reward", model=str(other))  # the same weights at another place
    weights(other)
    checked(path, frozen=False, model=str(other))
    with pytest.raises(ValueError, match=f"^--model {other}: weights must be as when the run began"):
        checked(path, model=str(other))


@pytest.mark.parametrize("lora", [Lora(rank=2, alpha=32.0), Lora(rank=2, rslora=True), Lora(rank=2, base="int8")])
def test_adapters_go_on_with_what_they_were_trained_with(begun, lora):
    with pytest.raises(ValueError, match=r"^--lora.(alpha|rslora|base): must be the run's, (16.0|False|stored), "):
        checked(begun, lora=lora)


def test_weights_that_are_gone_are_not_asked_for(begun, tmp_path):
    path = copied(begun, tmp_path)
    for name in ("model", "teacher"):
        for file in (path / name).glob("*.safetensors"):
            file.unlink()
    checked(path)


@pytest.mark.slow
def test_a_run_over_a_replaced_base_stops_before_it_trains(tmp_path):
    model = tiny.model(tmp_path / "model")
    rows = [{"prompt": "1+1", "completion": "2"}] * 8
    tiny.rows(tmp_path / "rows.jsonl", rows)
    config = sft.Config(
        model=str(model), data=f"{tmp_path}/rows.jsonl", out=f"{tmp_path}/out", steps=1, batch=4, length=64, rows=4,
        optim=Optimizer(lr=1e-2), lora=Lora(rank=2),
    )  # fmt: skip
    sft.main(config)
    tiny.model(model, seed=1)
    with pytest.raises(ValueError, match="--model .*: weights must be as when the run began"):
        sft.main(replace(config, steps=2))
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 1
