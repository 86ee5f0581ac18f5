"""What SIGTERM leaves of a run: metrics, state, summary and report that agree, and all that is missing is done next."""

import json
import signal
import subprocess
import sys
import time

import jobs
import numpy as np
import pytest
import tiny

from areax.adapters import hf, orbax
from areax.adapters.tracking import run_dir
from areax.rollout.tasks import arithmetic

STEPS = 4
# Of the held-out row, the first reward creates the file "seen", later ones wait.
HOLDING = """
import pathlib, time
SEEN = pathlib.Path(__file__).with_name("seen")
def score(text, row):
    if "hold" in row:
        if SEEN.exists():
            time.sleep(600)
        SEEN.touch()
    return float(len(text))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("stopped")
    tiny.model(path / "model")
    rows = [
        {**row, "completion": row["answer"], "chosen": row["answer"], "rejected": "0"}
        for row in arithmetic.splits()["train"][:40]
    ]
    tiny.rows(path / "rows.jsonl", rows)
    tiny.rows(path / "heldout.jsonl", rows[:4])
    tiny.rows(path / "hold.jsonl", [{"prompt": "1+1", "hold": True}])
    (path / "rewards.py").write_text(HOLDING)
    return path


def command(place, recipe, out, *options):
    words = [sys.executable, "-m", "areax", "train", recipe, "--model", str(place / "model"), "--out", str(out)]
    words += ["--data", str(place / "rows.jsonl"), "--length", "32", "--rows", "4", "--steps", str(STEPS)]
    words += ["--save-every", "2", "--optim.warmup", "1"]
    if recipe == "grpo":
        words += ["--reward", f"{place}/rewards.py:score", "--groups", "2", "--group-size", "4"]
        words += ["--sampling.max-new-tokens", "4", "--serve.inside", "--serve.slots", "8", "--serve.context", "64"]
    else:
        words += ["--batch", "8"]
    if recipe == "distill":
        words += ["--teacher", str(place / "model")]
    if "--heldout" not in options:
        words += ["--heldout", str(place / "heldout.jsonl")]
    return [*words, *options]


def started(place, *words):
    with open(place / "log", "ab") as log:
        return subprocess.Popen(command(place, *words), stdout=log, stderr=log)


def steps_of(out, kind):
    if not (out / "metrics.jsonl").exists():
        return []
    return [x["step"] for x in run_dir.read_lines(out / "metrics.jsonl") if x["kind"] == kind and "loss" in x]


def agreeing(out, kind, code):
    """Checks that all files of a run that ended with this exit code say the same; returns whether it is complete."""
    steps = steps_of(out, kind)
    states = orbax.versions(out / "state") if (out / "state").exists() else []
    assert steps == list(range(1, len(steps) + 1)) and max(states, default=0) == len(steps)
    if not (out / "summary.json").exists():  # stopped before the first step
        assert code in (130, -signal.SIGTERM)
        return False
    summary = json.loads((out / "summary.json").read_text())
    said = f"{len(steps)} step{'s' * (len(steps) > 1)} of {kind}" in (out / "report.html").read_text()
    assert summary["steps"] == len(steps) and said == bool(steps)  # without a step there is nothing to show
    if summary["complete"]:
        assert code in (0, -signal.SIGTERM) and len(steps) == STEPS
        held = [x for x in run_dir.read_lines(out / "metrics.jsonl") if x["step"] == STEPS]
        assert any(name == "accuracy" or name.startswith("heldout_") for x in held for name in x)
        if kind == "grpo":
            assert [label.split("-")[0] for label in summary["server_version"]] == [str(STEPS)]
        hf.load(out / "model")
    else:
        assert code == 130
    return summary["complete"]


INSTANTS = [
    *(pytest.param("grpo", n, marks=pytest.mark.long if n in (5, 12) else pytest.mark.wide) for n in range(20)),
    *(pytest.param(recipe, n, marks=pytest.mark.wide) for recipe in ("sft", "dpo", "distill") for n in range(4)),
]


@pytest.mark.sweep
@pytest.mark.parametrize("recipe, n", INSTANTS)
def test_files_agree_whenever_a_run_is_stopped(place, recipe, n):
    """From the first import to the exit; every fifth time within the last step or after it."""
    out, kind = place / f"{recipe}-{n}", {"dpo": "preference"}.get(recipe, recipe)
    rng = np.random.default_rng(n)
    after = STEPS - n % 2 if n % 5 < 2 else int(rng.integers(0, STEPS))
    process = started(place, recipe, out)
    jobs.until(lambda: process.poll() is not None or len(steps_of(out, kind)) >= after)
    time.sleep(float(rng.uniform(0, 0.5 if after else 8)))
    process.send_signal(signal.SIGTERM)
    complete = agreeing(out, kind, process.wait(120))
    if not complete:
        assert agreeing(out, kind, started(place, recipe, out).wait(120))


@pytest.mark.long
def test_a_run_stopped_in_its_last_evaluation_is_not_complete_until_it_has_evaluated(place):
    out = place / "held"
    process = started(place, "grpo", out, "--heldout", str(place / "hold.jsonl"))
    jobs.until(lambda: process.poll() is not None or steps_of(out, "grpo")[-1:] == [STEPS])
    process.send_signal(signal.SIGTERM)
    assert not agreeing(out, "grpo", process.wait(120))
    accuracies = lambda: json.loads((out / "summary.json").read_text())["accuracies"]
    assert list(accuracies()) == ["0"]
    (place / "seen").unlink()
    assert agreeing(out, "grpo", started(place, "grpo", out, "--heldout", str(place / "hold.jsonl")).wait(120))
    assert list(accuracies()) == ["0", str(STEPS)]


@pytest.mark.long
def test_a_demo_whose_first_stage_is_stopped_goes_no_further(tmp_path):
    words = [sys.executable, "-m", "areax", "demo", "--out", str(tmp_path), "--sft-steps", "100000"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    jobs.until(lambda: process.poll() is not None or steps_of(tmp_path / "sft", "sft"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130 and not (tmp_path / "grpo").exists()


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_run_whose_last_state_does_not_fit_on_the_disk_has_no_summary(place, tmp_path, recipe):
    """Its checkpoint does fit; a summary would call the run complete."""
    tiny.model(tmp_path / "model", vocab_size=4000, dtype="bfloat16")  # its embeddings alone are larger in float32
    out, most = tmp_path / "run", (tmp_path / "model" / "model.safetensors").stat().st_size + 5000
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); "
        "from areax.adapters import cli; sys.exit(cli.main())"
    )
    words = command(place, recipe, out, "--save-every", "0", "--steps", "1", "--optim.warmup", "0")
    words += ["--model", str(tmp_path / "model"), "--optim.lr", "0.1", "--optim.weight-decay", "0.5"]  # fills mantissas
    done = subprocess.run([sys.executable, "-c", limited, *words[3:]], capture_output=True, text=True)
    assert done.returncode == 2 and f"{out}/state: version 1 could not be written: File too large" in done.stderr
    assert (out / "model" / "model.safetensors").exists() and not (out / "summary.json").exists()
