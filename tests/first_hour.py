"""Replays the first hour of three users, from the pages alone, in a fresh clone and an empty environment.

    python tests/first_hour.py GSM8K [--keep FOLDER]

GSM8K is a folder with train.jsonl and test.jsonl. One user runs scripts (SFT, GRPO and evaluation of a model made from
a config), one does research (an own loss, an own workflow), one converts and serves (OpenAI's client, lm-eval). Blocks
of code are taken from the pages. Prints each command with its exit code, seconds, lines of output, and the lines that
name an error or a warning; exits with 1 if a command failed. Installs packages, so it needs an index.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAID = re.compile(r"\b(error|traceback|warning|exception)\b", re.IGNORECASE)
LIMITS = "--length 512 --steps 3"
LOSS = '''"""GRPO with a surrogate of my own."""

import jax.numpy as jnp

from areax.core import losses
from areax.recipes import grpo
from areax.recipes.shared.rl_options import Prompts, Rollout, Serving, Training
from areax.rollout.servers.local import Serve
from areax.rollout.types import Sampling


def soft(spec, now):
    """tanh(r - 1) A"""
    return jnp.tanh(now.ratio_BT - 1) * now.adv_BT, None


if __name__ == "__main__":
    config = grpo.Config(
        model="runs/sft/model", data="gsm8k/train.jsonl", reward="areax.rollout.tasks.gsm8k:reward", out="runs/soft",
        steps=2, prompts=Prompts(max_prompt=400), training=Training(length=512, objective=losses.GRPO(surrogate=soft)),
        rollout=Rollout(groups=4, group_size=4, sampling=Sampling(max_new_tokens=16)),
        serving=Serving(serve=Serve(context=512)),
    )
    print(grpo.main(config)["checkpoint"])
'''
CLIENT = """import openai

client = openai.OpenAI(base_url="http://127.0.0.1:PORT/v1", api_key="none")
question = [{"role": "user", "content": "What is 3 + 4?"}]
for part in client.chat.completions.create(model="any", messages=question, max_tokens=8, stream=True):
    print(part.choices[0].delta.content or "", end="")
print(client.chat.completions.create(model="any", messages=question, max_tokens=8, logprobs=True, n=2).choices[1])
"""
TASK = """task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: gsm8k/few.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer.split('#### ')[-1]}}"
generation_kwargs: {until: ["Question:"], do_sample: false, max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def blocks(page: str, language: str = "") -> list[str]:
    """The blocks of code of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.S | re.M)
    return [text for named, text in found if named == language]


def commands(port: int) -> list[tuple[str, str]]:
    """(user, command of the shell); what it needs in files is written by `files`."""
    gsm8k = "--reward areax.rollout.tasks.gsm8k:reward --max-prompt 400"
    sampling = "--groups 4 --group-size 4 --sampling.max-new-tokens 16 --serve.context 512"
    tiny = next(block for block in blocks("command-line.md") if "tiny/config.json" in block).split("areax train")[0]
    game = "--data games.jsonl --workflow guess.py:guess --reward areax.rollout.rewards:none"
    lm_eval = (
        "--model local-chat-completions --apply_chat_template --tasks sums --include_path tasks --model_args "
        f"model=areax,base_url=http://127.0.0.1:{port}/v1/chat/completions,num_concurrent=4"
    )
    return [
        ("all", "python3 -m venv .venv && pip install -q -c constraints.txt -e . openai 'lm_eval[api]'"),
        ("scripts", tiny),
        ("scripts", f"areax train sft --model tiny --init random --data gsm8k/train.jsonl --batch 16 {LIMITS} "
         "--too-long drop --out runs/sft"),
        ("scripts", f"areax train grpo --model runs/sft/model --data gsm8k/train.jsonl {gsm8k} {sampling} {LIMITS} "
         "--heldout gsm8k/few.jsonl --out runs/grpo"),
        ("scripts", f"areax eval --model runs/grpo/model --data gsm8k/few.jsonl {gsm8k} --samples 2 "
         "--sampling.temperature 1 --sampling.max-new-tokens 16 --serve.context 512 --out evals/gsm8k"),
        ("research", "python soft.py"),
        ("research", f"areax train grpo --model runs/sft/model {game} {sampling} {LIMITS} --out runs/guess"),
        ("serves", "areax convert runs/grpo/model served --dtype bfloat16"),
        ("serves", f"areax serve served --port {port} --context 1024"),
        ("serves", "python client.py"),
        ("serves", f"lm_eval {lm_eval}"),
    ]  # fmt: skip


def files(folder: Path, gsm8k: Path, port: int) -> None:
    """Writes the users' own files."""
    (folder / "gsm8k").mkdir()
    for name in ("train", "test"):
        (folder / "gsm8k" / f"{name}.jsonl").write_bytes((gsm8k / f"{name}.jsonl").read_bytes())
    few = (gsm8k / "test.jsonl").read_text().splitlines(keepends=True)[:16]
    (folder / "gsm8k" / "few.jsonl").write_text("".join(few))
    (folder / "soft.py").write_text(LOSS)
    (folder / "guess.py").write_text(blocks("add-a-workflow.md", "python")[0])
    (folder / "games.jsonl").write_text(blocks("add-a-workflow.md", "json")[0])
    (folder / "client.py").write_text(CLIENT.replace("PORT", str(port)))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(TASK)


def play(command: str, folder: Path, environment: dict[str, str], port: int) -> tuple[int, str, subprocess.Popen]:
    """Runs a command to its end, a server until it answers; returns its exit code, its output and its process."""
    log = folder / ".output"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while "areax serve" in command and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return 0, log.read_text(), process
            time.sleep(0.5)
        return process.wait(), log.read_text(), process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--keep", type=Path, help="a new folder to work in, which stays")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="first-hour-"))
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    port = free_port()
    files(folder, given.gsm8k, port)
    home = folder / ".home"
    home.mkdir()
    environment = {
        "PATH": f"{folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none",
    }  # fmt: skip
    for name in (
        "PIP_INDEX_URL",
        "PIP_CONFIG_FILE",
        "PIP_CERT",
        "HTTPS_PROXY",
        "SSL_CERT_FILE",
    ):  # how this machine installs
        if name in os.environ:
            environment[name] = os.environ[name]
    began, failed, total, named, running = time.monotonic(), 0, 0, 0, []
    played = commands(port)
    try:
        for number, (user, command) in enumerate(played, 1):
            start = time.monotonic()
            code, output, process = play(command, folder, environment, port)
            if process.poll() is None:
                running.append(process)
            lines = [line for line in re.split(r"[\r\n]", output) if line.strip()]
            said = [line for line in lines if SAID.search(line)]
            total, named, failed = total + len(lines), named + len(said), failed + (code != 0)
            shown = " ".join(command.split())
            print(
                f"{number:2} {user:8} rc {code}, {time.monotonic() - start:4.0f} s, {len(lines):3} lines: {shown[:150]}"
            )
            for line in said[:9] if code == 0 else lines[-15:]:
                print(f"     | {line[:200]}")
            sys.stdout.flush()
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    print(
        f"{len(played)} commands, {total} lines of output, {failed} failed, "
        f"{named} lines that name an error or a warning, {(time.monotonic() - began) / 60:.1f} minutes"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
