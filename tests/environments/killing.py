"""Kills a run and starts it again, beside one that nobody disturbs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import tiny
from gateways import TOKENS

from areax.adapters import tokenizer

STEPS, KILLED = 6, 3


def model(folder):
    """Writes a model without weights."""
    folder.mkdir()
    config = tiny.HF | {"vocab_size": len(TOKENS), "max_position_embeddings": 4096, "eos_token_id": TOKENS.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(TOKENS, folder)


def started(place, env, options, out):
    command = [
        sys.executable, "-m", "areax", "train", "grpo", "--model", place / "model", "--env", env, "--env-options",
        json.dumps(options), "--out", out, "--steps", STEPS, "--groups", 1, "--group-size", 2, "--eta", 0, "--rows", 1,
        "--length", 4096, "--save-every", 1, "--samples-every", 1, "--sampling.max-new-tokens", 4, "--serve.slots", 2,
        "--init", "random",
    ]  # fmt: skip
    here = str(Path(__file__).parent)  # which has environments that are modules
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    with open(place / "log", "ab") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=own)


def played(out):
    """[what the policy saw and said] of each step, the last time that it was made."""
    steps = {}
    for line in map(json.loads, (out / "samples.jsonl").read_text().splitlines()):
        steps.setdefault(line["step"], []).append((line["prompt"], line["text"]))
    return {step: sorted(told[-len(told) // max(1, again(out, step)) :]) for step, told in steps.items()}


def again(out, step):
    """How often a step was made."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return sum(line["step"] == step and "reward" in line for line in lines)


def plays_each_task_once(env, options, place, name):
    """Whether the samples of a run that was killed, and went on, are those of a run that was not, and different in each
    step: seeds of sampling are those of the tasks' numbers."""
    whole, broken = place / f"{name}-whole", place / f"{name}-broken"
    assert started(place, env, options, whole).wait(300) == 0, (place / "log").read_text()[-3000:]
    process = started(place, env, options, broken)
    metrics = broken / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= KILLED):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert started(place, env, options, broken).wait(300) == 0, (place / "log").read_text()[-3000:]
    told = played(whole)
    return (
        played(broken) == told and told.keys() == {*range(1, STEPS + 1)} and len({*map(tuple, told.values())}) == STEPS
    )
