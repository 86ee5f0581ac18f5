"""GRPO on rows with images, from files to files: the engine and the trainer agree about every token."""

import json

import jobs
import numpy as np
import pytest
import tiny
import vlm

from areax.adapters import cli, safetensors
from areax.adapters.tracking import run_dir
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import grpo
from areax.recipes.shared import rl_options
from areax.rollout.servers.local import Serve
from areax.rollout.types import Sampling


def score(text, row):
    """Rewards short answers, and any digit."""
    return float(any(c.isdigit() for c in text)) - 0.01 * len(text)


REWARD = f"{__file__}:score"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, made = tmp_path_factory.mktemp("grpo"), []
    vlm.folder(path / "model", "qwen3_vl")
    for i in range(6):
        for j in range(i % 3):
            (path / f"{i}{j}.png").write_bytes(vlm.png(5 + 3 * j + i, 6 + i % 4, i))
        made.append({"images": [f"{i}{j}.png" for j in range(i % 3)], "prompt": f"what is {i}?"})
    tiny.rows(path / "rows.jsonl", made)
    return path


def config(place, out, serve, steps=2, eta=0, **training):
    return grpo.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), reward=REWARD, out=str(out), steps=steps,
        rollout=rl_options.Rollout(groups=3, group_size=2, eta=eta, sampling=Sampling(max_new_tokens=8)),
        training=rl_options.Training(length=64, rows=2, optim=Optimizer(lr=1e-2), **training),
        serving=rl_options.Serving(serve=serve),
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "how, inside, more",
    [
        ("frozen", True, {}),
        pytest.param("frozen", False, {"lora": Lora(rank=2)}, marks=pytest.mark.mesh),
        pytest.param("trained", False, {"vision": "trained"}, marks=pytest.mark.mesh),
        pytest.param("trained", True, {"vision": "trained"}, marks=pytest.mark.mesh),
    ],
)
def test_sampler_and_trainer_agree_on_images_over_steps(place, tmp_path, how, inside, more):
    """At every step the weights have been pushed, with the tower if it trains; a replay computes the same bits."""
    out = tmp_path / "out"
    summary = grpo.main(config(place, out, Serve(inside=inside, slots=8, context=64), steps=3, **more))
    assert summary["complete"] and summary["steps"] == 3
    lines = [x for x in run_dir.read_lines(out / "metrics.jsonl") if x["kind"] == "grpo"]
    assert [x["max_logp_diff"] < 1e-4 for x in lines] == [True] * 3, [x["max_logp_diff"] for x in lines]
    assert all(x["update_ratio"] > 0 for x in lines) and sum(x["images"] for x in lines) > 0
    before, after = safetensors.read(place / "model"), safetensors.read(out / "model")
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert before.keys() == after.keys() and any("visual" in name for name in moved) == (how == "trained")
    assert json.loads((out / "config.json").read_text())["training"]["vision"] == how
    assert cli.main(["replay", str(out)]) == 0  # from its journal, images included, bit for bit


@pytest.mark.wide
@pytest.mark.mesh
def test_two_processes_train_as_one(place, tmp_path):
    """Images travel with the groups of process 0, and each process makes the patches."""
    asked = config(place, tmp_path / "alone", Serve(slots=8, context=64))
    grpo.main(asked)
    words = {
        "model": place / "model", "data": place / "rows.jsonl", "reward": REWARD, "out": tmp_path / "both", "steps": 2,
        "groups": 3, "group-size": 2, "eta": 0, "sampling.max-new-tokens": 8, "length": 64, "rows": 2, "optim.lr": 1e-2,
        "optim.warmup": 0, "mesh.fsdp": 2, "serve.slots": 8, "serve.context": 64,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in words.items()]
    jobs.run(["-m", "areax", "train", "grpo", *flags], 2, tmp_path / "logs")
    one, both = (
        [x for x in run_dir.read_lines(tmp_path / name / "metrics.jsonl") if x["kind"] == "grpo"]
        for name in ("alone", "both")
    )
    for a, b in zip(one, both, strict=True):
        assert b["max_logp_diff"] < 1e-4 and b["images"] == a["images"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
