"""lm-eval, unmodified, over the gateway, `areax serve` and transformers with one model: same scores, same answers."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import lm_program
import numpy as np
import pytest
import servers
import tiny

from areax.adapters import tokenizer
from areax.rollout import client
from areax.rollout.chat.session import Session
from areax.rollout.gateway import server

GUIDE = Path(__file__).parents[1] / "docs" / "command-line.md"
PROGRAM = Path(__file__).parent / "lm_program.py"


async def evaluated(kind, model, folder, address="", key=""):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), kind, str(model), address, str(folder), env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-3000:]
    return json.loads(out.decode().rstrip().rpartition("\n")[2])


@pytest.mark.long
def test_lm_eval_scores_equal_those_of_transformers(tmp_path):
    model = tiny.model(tmp_path / "model", max_position_embeddings=128)
    tokens = tokenizer.load(model)
    rng = np.random.default_rng(0)
    number = lambda: "".join(map(str, rng.integers(0, 9, rng.integers(2, 5))))
    prompts = [f"{number()}+{number()}" for _ in range(24)]

    async def main():
        with servers.embedded(model, slots=8, context=128) as remote:
            async with client.connect([remote.url]) as fleet, server.serve(tokens, read=fleet.read) as gateway:
                rows = []
                # Stops at "+": lm-eval's own stops also match the names of special tokens, such as <|extra_9|>.
                for i, prompt in enumerate(prompts):  # of half the rows the answer is what the model says
                    own = await Session(fleet.generate, tokens).complete(
                        tokens.encode(prompt), temperature=0.0, max_new_tokens=6, stop=("+",)
                    )
                    answer = own.text if i % 2 else number()
                    rows.append(dict(prompt=prompt, answer=answer, choices=[number() for _ in range(3)], label=i % 3))
                tiny.rows(tmp_path / "rows.jsonl", rows)
                key = gateway.open(Session(fleet.generate, tokens))
                here = await evaluated("api", model, tmp_path, f"{gateway.url}/v1", key)
                direct = await evaluated("api", model, tmp_path, f"{remote.url}/v1", "none")
        return here, direct, await evaluated("hf", model, tmp_path)

    *served, there = asyncio.run(main())
    logp = lambda found: np.array([[float(x[0]) for x in row] for row in found["plain"]["choose"]["said"]])
    for here in served:
        for how in ("plain", "chat"):
            assert here[how]["continue"]["said"] == there[how]["continue"]["said"]
        np.testing.assert_allclose(logp(here), logp(there), atol=1e-3)
        for how, task in (("plain", "continue"), ("plain", "choose"), ("chat", "continue")):
            assert here[how][task]["score"] == there[how][task]["score"]
    assert 0.5 <= there["plain"]["continue"]["score"] < 1 and 0 < there["plain"]["choose"]["score"] < 1


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize(("model", "task"), [("local-chat-completions", "continue"), ("local-completions", "choose")])
def test_the_commands_of_the_guide_evaluate_a_server(tmp_path, model, task):
    path = tiny.model(tmp_path / "model", max_position_embeddings=128)
    row = {"prompt": "1+1", "answer": "2", "choices": ["1", "2", "3"], "label": 1}
    tiny.rows(tmp_path / "rows.jsonl", [row] * 4)
    text = lm_program.TASK.format(name=task, folder=tmp_path) + lm_program.TASKS[task]
    (tmp_path / f"{task}.yaml").write_text(text)
    commands = re.findall(r"^lm_eval (?:.*\\\n)*.*$", GUIDE.read_text(), re.M)
    [command] = [c.replace("\\\n", " ") for c in commands if f"--model {model} " in c]

    async def main(url):
        given = re.sub(r"--tasks \S+", f"--tasks {task}", command.replace("http://127.0.0.1:30000", url))
        given = given.replace("tokenizer=PATH", f"tokenizer={path},max_length=64")
        words = shlex.split(f"{given} --include_path {tmp_path} --output_path {tmp_path}/out")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": ""}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, env=environment, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]

    with servers.embedded(path, slots=8, context=128) as remote:
        asyncio.run(main(remote.url))
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["n-samples"][task]["effective"] == 4
