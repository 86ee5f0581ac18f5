"""A run that is killed goes on at its task: none is played twice, none is left out, and each is the same."""

import contextlib
import json
import subprocess
import sys
import time

import pytest
import serving
import tiny
from gateways import TOKENS
from test_nemo_gym import COUNT
from test_nemo_gym import served as nemo

from areax.adapters import tokenizer

STEPS, KILLED = 6, 3
KINDS = {  # kind: (what `--env` names, or how it is served, options)
    "reasoning_gym": ("reasoning_gym:chain_sum", {}),
    "textarena": ("textarena:GuessTheNumber-v0", {"turns": 2}),
    "players": ("textarena:KuhnPoker-v0", {"players": 2, "turns": 2}),
    "gymnasium": ("gymnasium:FrozenLake-v1", {"turns": 2}),
    "aviary": ("aviary:dummy", {"turns": 2}),
    "openenv": (lambda: serving.served("server.py", "text", last=("64",)), {"turns": 2}),
    "nemo_gym": (lambda: nemo("example_session_state_mgmt"), {"turns": 2, "data": str(COUNT)}),
}


@contextlib.contextmanager
def named(env):
    """What `--env` is, while its server runs."""
    if isinstance(env, str):
        yield env
        return
    with env() as address:
        yield address if address.startswith("nemo_gym:") else f"openenv:{address}"


def started(place, env, options, out):
    command = [
        sys.executable, "-m", "areax", "train", "grpo", "--model", place / "model", "--env", env, "--env-options",
        json.dumps(options), "--out", out, "--steps", STEPS, "--groups", 1, "--group-size", 2, "--eta", 0, "--rows", 1,
        "--length", 4096, "--save-every", 1, "--samples-every", 1, "--sampling.max-new-tokens", 4, "--serve.slots", 2,
        "--init", "random",
    ]  # fmt: skip
    with open(place / "log", "ab") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log)


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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    (path / "model").mkdir()
    config = tiny.HF | {"vocab_size": len(TOKENS), "max_position_embeddings": 4096, "eos_token_id": TOKENS.eos_token_id}
    (path / "model" / "config.json").write_text(json.dumps(config))
    tokenizer.save(TOKENS, path / "model")
    return path


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "openenv" else pytest.mark.long) for kind in KINDS]
)
def test_a_killed_run_plays_each_task_once(kind, place):
    env, options = KINDS[kind]
    whole, broken = place / f"{kind}-whole", place / f"{kind}-broken"
    with named(env) as env:
        assert started(place, env, options, whole).wait(300) == 0, (place / "log").read_text()[-3000:]
        process = started(place, env, options, broken)
        metrics = broken / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= KILLED):
            time.sleep(0.05)
        process.kill()
        process.wait()
        assert started(place, env, options, broken).wait(300) == 0, (place / "log").read_text()[-3000:]
    assert played(broken) == played(whole) and played(whole).keys() == {*range(1, STEPS + 1)}
    assert len({*map(tuple, played(whole).values())}) == STEPS  # seeds of sampling are those of the tasks' numbers
