"""SFT from files to files: learns, resumes exactly, survives Ctrl-C, says what is wrong."""

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax
import jobs
import numpy as np
import pytest
import tiny

from areax.adapters import hf, state, tracker
from areax.core.balance import Balance
from areax.core.optim import AdamW
from areax.parallel.mesh import Layout
from areax.recipes import sft
from areax.rollout import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft")
    tiny.model(path / "model")
    train = arithmetic.splits()["train"]
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(train), 200)))
    return path


def config(place, out, **changes):
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(place / out), steps=6, batch=8, length=64,
        rows=4, optim=AdamW(lr=1e-2),
    )  # fmt: skip
    return replace(base, **changes)


def test_resumed_equals_uninterrupted(place):
    whole = sft.main(config(place, "whole", heldout=str(place / "rows.jsonl")))
    assert whole["complete"] and whole["heldout_nll"] > 0
    losses = [line["loss"] for line in tracker.read_lines(place / "whole/metrics.jsonl") if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    first = sft.main(config(place, "parts", steps=3))
    assert first["steps"] == 3
    sft.main(config(place, "parts"))
    a, b = hf.load(place / "whole/model")[1], hf.load(place / "parts/model")[1]
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)
    steps = [line["step"] for line in tracker.read_lines(place / "parts/metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.mesh
def test_a_mesh_changes_nothing_and_a_run_may_go_on_upon_another(place):
    """One option: the numbers stay, and a state saved on one mesh is taken up on the next."""
    one = sft.main(config(place, "one", steps=4))
    sft.main(config(place, "mesh", steps=2, mesh=Layout(fsdp=2, cp=2, tp=2)))
    on = sft.main(config(place, "mesh", steps=4, mesh=Layout(dp=4, tp=2)))
    np.testing.assert_allclose(on["loss"], one["loss"], rtol=1e-4)
    with pytest.raises(ValueError, match=r"--rows must be a multiple of dp x fsdp x ep = 8, got 4"):
        sft.main(config(place, "bad", mesh=Layout(fsdp=8)))
    with pytest.raises(ValueError, match="mesh: dp 2 needs 2 devices, got 8"):
        sft.main(config(place, "bad", mesh=Layout(dp=2)))


def test_experts_can_be_balanced(place):
    """The terms are in the loss and in the log; held-out rows are measured without them."""
    tiny.model(
        place / "mixture", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    mixture = config(place, "balanced", model=str(place / "mixture"), steps=2, heldout=str(place / "rows.jsonl"))
    sft.main(replace(mixture, balance=Balance(load=0.5, z=0.1)))
    told = next(line for line in tracker.read_lines(place / "balanced/metrics.jsonl") if "loss" in line)
    total = told["nll"] + 0.5 * told["balance_load"] + 0.1 * told["balance_z"]
    np.testing.assert_allclose(told["loss"], total, rtol=1e-4)
    assert told["balance_load"] > 0 and told["expert_load"] >= 1


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(place):
    out = place / "stopped"
    command = [
        sys.executable, "-m", "areax", "train", "sft", "--model", str(place / "model"), "--out", str(out),
        "--data", str(place / "rows.jsonl"), "--steps", "100000", "--batch", "8", "--length", "64", "--rows", "4",
        "--save-every", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ})
    metrics = out / "metrics.jsonl"
    jobs.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    hf.load(out / "model")
    with state.open_store(out / "state") as store:
        stopped = store.latest
    assert stopped >= 3
    done = sft.main(config(place, "stopped", steps=stopped + 1))
    assert done["steps"] == stopped + 1 and done["complete"]


def test_bad_input_is_one_line(place):
    tiny.rows(place / "no.jsonl", [{"prompt": "1+1"}])
    with pytest.raises(ValueError, match="completion"):
        sft.main(config(place, "bad", data=str(place / "no.jsonl")))
    with pytest.raises(ValueError, match="must fit in a row of 8 tokens"):
        sft.main(config(place, "bad", length=8))
    (place / "file").write_text("")
    with pytest.raises(ValueError, match="--out must be a directory"):
        sft.main(config(place, "file"))
