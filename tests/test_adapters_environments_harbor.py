"""Tasks in Harbor's format, played by a scripted policy with a shell."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from fidelity import SAMPLING, Policy, exact
from gateways import TOKENS

from areax.adapters.environments import harbor
from areax.recipes.shared import environments as expanded
from areax.rollout.sandbox import isolation
from areax.rollout.workflows import environments

ROOT = Path(__file__).resolve().parents[1]
isolated = pytest.mark.skipif(not isolation().files, reason="needs namespaces")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    subprocess.run([sys.executable, ROOT / "benchmarks/failing_programs.py", folder, "3"], check=True)
    return folder


def call(command):
    arguments = command if isinstance(command, dict) else {"command": command}
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': arguments})}\n</tool_call>"


def play(policy, row, **options):
    how = dict(tokenizer=TOKENS, sampling=SAMPLING, world="areax.adapters.environments.harbor:World", **options)
    return asyncio.run(environments.play(policy, row, **how))


@isolated
def test_a_policy_with_a_shell_repairs_a_program(tasks):
    first, second, _ = harbor.World.rows("train", str(tasks))
    [program] = Path(first["task"], "environment").iterdir()
    solution = Path(first["task"], "solution/solve.sh").read_text()
    policy = Policy(call("pwd; ls; cat *.py"), call("false"), call({"cmd": 1}), call(solution), "Done.")
    samples = play(policy, first, options={"name": str(tasks)})
    assert exact(policy, samples) and sum(sample.reward for sample in samples) == 1.0
    assert Path(first["task"], "instruction.md").read_text() in policy.heard[0]
    assert f"/app\n{program.name}\n{program.read_text()}" in policy.heard[1]
    assert "[exit code 1]" in policy.heard[2] and 'must be {"command": text}' in policy.heard[3]
    assert "[no output]" in policy.heard[4]
    wrong = play(Policy("It is fine."), second, options={"name": str(tasks)})
    assert [sample.reward for sample in wrong] == [0.0]


@isolated
def test_tests_are_those_of_the_task(tasks):
    """Not what the policy has put in their place, and its machine's end is its own doing."""
    [row, *_] = harbor.World.rows("train", str(tasks))
    cheat = "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt > /logs/verifier/reward.json"
    plant = "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    hidden = "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/.profile; chmod 0 /tests/."
    full = "for i in $(seq 5000); do : > /tmp/$i; done"
    for commands in (
        [cheat, plant],
        ["kill -9 -1"],
        [hidden],
        [full],
        ["rm -rf /tmp/places/tests; : > /tmp/places/tests"],
        ["\ud800"],
    ):
        samples = play(Policy(*map(call, commands), "Done."), row, options={"name": str(tasks)})
        assert sum(sample.reward for sample in samples) == 0.0


@isolated
def test_rewards_are_read_as_harbor_reads_them(tmp_path, tasks, caplog):
    source = Path(harbor.World.rows("train", str(tasks))[0]["task"])
    for name, script, wanted in (
        (
            "json",
            'echo \'{"reward": 0.25, "style": 3}\' > $L/reward.json; echo 1 > $L/reward.txt',
            (0.25, {"style": 3.0}),
        ),
        ("only", "echo '{\"correctness\": 0.5}' > $L/reward.json", (0.5, {})),
        ("text", "echo ' 0.75 ' > $L/reward.txt; exit 9", (0.75, {})),
        ("error", "echo '{\"error\": 503}' > $L/reward.json", None),
        ("true", "echo '{\"reward\": true}' > $L/reward.json", None),
        ("none", "true", None),
        ("nan", "echo nan > $L/reward.txt", None),
        ("words", "echo good > $L/reward.txt", None),
        ("late", "sleep 60", None),
    ):
        own = tmp_path / name
        subprocess.run(["cp", "-r", source, own], check=True)
        (own / "tests/test.sh").write_text(f"#!/bin/bash\nL=/logs/verifier\n{script}\n")
        settings = (own / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 1.0")
        (own / "task.toml").write_text(settings)
        caplog.clear()
        [row] = harbor.World.rows("train", str(own))
        [sample] = play(Policy("x"), row, options={"name": str(own)})
        assert (sample.reward, sample.components) == (wanted or (0.0, {})), name
        lines = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(lines) == (wanted is None) and not any("Traceback" in line for line in lines)


@isolated
def test_a_task_is_its_content(tmp_path, tasks):
    """Of which a run's rows have a hash, so that a changed task is refused at resume, too."""
    own = tmp_path / "own"
    subprocess.run(["cp", "-r", harbor.World.rows("train", str(tasks))[0]["task"], own], check=True)
    [row] = harbor.World.rows("train", str(own))
    (own / "tests/test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(environments.ServerError, match="own was changed since the run began"):
        play(Policy("x"), row, options={"name": str(own)})
    assert harbor.World.rows("train", str(own)) != [row]


def test_what_a_task_asks_for_and_cannot_have_is_refused(tmp_path, tasks):
    source = Path(harbor.World.rows("train", str(tasks))[0]["task"])
    plain = (source / "task.toml").read_text()
    for change, why in (
        ("[environment]\ngpus = 1", r"\[environment\] gpus is not supported here"),
        ("multi_step_reward_strategy = 'final'\n[environment]", "multi_step_reward_strategy is not supported"),
        ("[environment]\nos = 'windows'", "os must be linux, got windows"),
        ("[environment]\nenv = {KEY = '${KEY}'}", r"\[environment\] env KEY takes a variable of the host"),
        ("[environment", "must be a task, with task.toml and instruction.md"),
    ):
        own = tmp_path / str(abs(hash(change)))
        subprocess.run(["cp", "-r", source, own], check=True)
        (own / "task.toml").write_text(plain.replace("[environment]", change))
        with pytest.raises(ValueError, match=f"harbor: .*{why}"):
            harbor.World.rows("train", str(own))
    own = tmp_path / "both"
    subprocess.run(["cp", "-r", source, own], check=True)
    (own / "environment/Dockerfile").write_text("FROM python:3.12-slim")
    with pytest.raises(ValueError, match="must have either environment/Dockerfile or docker_image"):
        harbor.World.rows("train", str(own))
    (own / "tests/test.sh").unlink()
    with pytest.raises(ValueError, match="must have tests/test.sh"):
        harbor.task.cache_clear()
        harbor.World.rows("train", str(own))
    for split, options, why in (
        ("eval", {}, 'rows for eval need "heldout"'),
        ("train", {"name": str(tmp_path / "nowhere")}, "must be a folder of tasks"),
    ):
        with pytest.raises(ValueError, match=why):
            harbor.World.rows(split, **{"name": str(tasks), **options})


def test_the_kind_is_an_option_of_env(tasks):
    options = json.dumps({"heldout": str(tasks), "turns": 4})
    rows = expanded.rows(f"harbor:{tasks}", options, "eval")
    assert [Path(row["task"]).name for row in rows] == ["000000", "000001", "000002"]
    with pytest.raises(ValueError, match="provider must be local, docker, e2b, daytona, modal"):
        harbor.World(str(tasks), provider="cloud")
