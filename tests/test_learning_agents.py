"""Agents that were not written for training learn from the command line: `make test-agents`.

The task is `rollout/tasks/tool_choice.py`: imitation takes the right one of two tools half the time, and twenty steps
of GRPO with an agent in between lead past that.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from areax import models
from areax.adapters import tokenizer
from areax.adapters.tracking import run_dir
from areax.core.optim import Optimizer
from areax.recipes import demo, sft
from areax.rollout.tasks import tool_choice

pytestmark = pytest.mark.agents
AGENTS = Path(__file__).parents[1] / "docs" / "agents"
NAMES = {
    "OpenAI SDK": f"{AGENTS}/openai_agent.py:Agent",
    "Anthropic SDK": f"{AGENTS}/anthropic_agent.py:run",
    "OpenAI Agents SDK": f"{AGENTS}/agents_sdk_agent.py:run",
    "a program": f"exec:{sys.executable} {AGENTS}/black_box.py",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows, and the model after imitation."""
    path = tmp_path_factory.mktemp("errands")
    tiny.rows(path / "demonstrations.jsonl", list(tool_choice.demonstrations(20000)))
    tiny.rows(path / "train.jsonl", list(tool_choice.rows(4000, seed=1)))
    tokens = tokenizer.character(tool_choice.ALPHABET, words=tool_choice.WORDS)
    tokenizer.save(tokens, path)
    changes = dict(vocab_size=len(tokens), eos_token_id=tokens.eos_token_id, max_position_embeddings=128)
    run_dir.write_json(path / "config.json", models.config_to_hf(models.config_from_hf({**demo.MODEL, **changes})))
    config = sft.Config(
        model=str(path), data=str(path / "demonstrations.jsonl"), out=str(path / "sft"), init="random", steps=200,
        batch=128, length=128, rows=28, optim=Optimizer(lr=3e-3, schedule="cosine", warmup=20, floor=0.1),
    )  # fmt: skip
    assert sft.main(config)["complete"]
    return path


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_learns(place, name):
    out = place / name.replace(" ", "-")
    command = [
        sys.executable, "-m", "areax", "train", "grpo", "--workflow", NAMES[name], "--out", str(out),
        "--model", str(place / "sft/model"), "--data", str(place / "train.jsonl"),
        "--reward", "areax.rollout.tasks.tool_choice:reward",
        "--serve.slots", "64", "--serve.context", "128", "--sampling.max-new-tokens", "24",
        "--steps", "20", "--groups", "8", "--group-size", "8", "--max-concurrent", "16", "--length", "128",
        "--rows", "8",
        "--objective.advantage.std", "none", "--optim.lr", "7e-4", "--optim.b2", "0.99", "--optim.warmup", "2",
        "--optim.schedule", "cosine", "--optim.floor", "0.1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [x for x in run_dir.read_lines(out / run_dir.METRICS) if x["kind"] == "grpo"]
    summary = json.loads((out / run_dir.SUMMARY).read_text())
    rewards = [x["reward"] for x in lines]
    print(name, [round(x, 2) for x in rewards])
    assert max(x["unscorable"] for x in lines) == 0 and summary["max_logp_diff"] < 1e-4
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.15
