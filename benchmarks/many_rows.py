"""Training on ten million rows: memory and time, and that a killed run goes on at its row.

    python benchmarks/many_rows.py FOLDER [ROWS]          # SFT
    python benchmarks/many_rows.py FOLDER [ROWS] --rl     # RL: one file, then a mixture of two

Writes the rows (about 0.5 GB), a tiny model and the runs to FOLDER, and a line of JSON for each part. Two runs train on
the same rows; one is killed after its first checkpoint and started again. In SFT their losses must be equal. In RL,
with groups in flight at the kill, both must train on the same prompts, each once, and score no others.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

from areax.rollout.scheduling.curriculum import Prompts
from areax.rollout.scheduling.mixture import Mixture

STEPS, SAVE = {False: 100, True: 30}, {False: 20, True: 10}  # whether in RL: steps, and between checkpoints
GROUPS, SIZE = 8, 2  # of a batch in RL
REWARD = """
def score(text, row):
    with open({file!r}, "a") as seen:
        seen.write(f"{{row['id']}}\\n")
    return float(text[:1] in "01234")
"""


class Ids(Sequence):
    """The rows of a file, for what `write` makes of them, without the file."""

    def __init__(self, count: int, first: int):
        self._count, self._first = count, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        return {"id": self._first + index}


def write(file: Path, count: int, first: int = 0) -> None:
    """Sums with different operands; a line of about 50 bytes."""
    if file.is_file():
        return
    with file.open("w") as lines:
        for i in range(first, first + count):
            a, b = i % 9973, i % 9967
            lines.write(f'{{"prompt": "{a}+{b}", "completion": "{a + b}", "id": {i}}}\n')


def start(folder: Path, data: str, out: str, rl: bool) -> subprocess.Popen:
    words = ["--model", folder / "model", "--data", data, "--out", folder / out, "--steps", STEPS[rl], "--length", 64]
    words += ["--rows", 16, "--save-every", SAVE[rl]]
    if rl:
        (folder / f"{out}.py").write_text(REWARD.format(file=str(folder / f"{out}.ids")))
        words += ["--reward", f"{folder}/{out}.py:score", "--groups", GROUPS, "--group-size", SIZE, "--eta", 1]
        words += ["--sampling.max-new-tokens", 8, "--max-concurrent", 2 * GROUPS, "--serve.inside"]
    else:
        words += ["--batch", 64]
    with (folder / f"{out}.log").open("a") as log:
        recipe = "grpo" if rl else "sft"
        return subprocess.Popen([sys.executable, "-m", "areax", "train", recipe, *map(str, words)], stderr=log)


def memory(process: subprocess.Popen) -> dict[str, float]:
    """GB that the process has of its own, and with mapped files, now and at most so far."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    size = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines if line.endswith("kB")}
    return {"own": round(size["RssAnon"], 2), "rss": round(size["VmRSS"], 2), "peak": round(size["VmHWM"], 2)}


def lines_of(file: Path) -> list[dict]:
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run / "metrics.jsonl")]


def train(folder: Path, data: str, out: str, kill_at: int | None, rl: bool) -> dict:
    """Runs to the end, or kills the process after a step; returns seconds and memory after the first step and last."""
    before, began = len(losses(folder / out)), time.monotonic()
    process, first, last = start(folder, data, out, rl), {}, {}
    while process.poll() is None:
        time.sleep(0.05)
        done = len(losses(folder / out))
        try:
            last = memory(process)
        except (FileNotFoundError, ProcessLookupError, KeyError):  # it has just ended
            break
        if done > before and not first:
            first = {"seconds": round(time.monotonic() - began, 1), **last}
        if kill_at and done >= kill_at:
            os.kill(process.pid, signal.SIGKILL)
    return {"run": out, "first_step": first, "end": last, "code": process.wait(), "steps": len(losses(folder / out))}


def prompts(folder: Path, out: str, order: Prompts | Mixture) -> dict:
    """Whether a run trained on the first prompts of the order, each once, and scored no others; how many twice."""
    batches = {line["version"]: line["prompts"] for line in lines_of(folder / out / "events.jsonl")
               if line["kind"] == "batch"}  # fmt: skip
    trained = collections.Counter(prompt for own in batches.values() for prompt in own)
    scored = collections.Counter(map(int, (folder / f"{out}.ids").read_text().split()))
    ids = {order[i]["id"] for i in range(STEPS[True] * GROUPS)}
    return {
        "run": out,
        "each_once": trained == collections.Counter(range(STEPS[True] * GROUPS)),
        "no_others": scored.keys() == ids and min(scored.values()) >= SIZE,
        "taken_again": sum(count > SIZE for count in scored.values()),
    }


def main(folder: Path, count: int, rl: bool = False) -> list[dict]:
    """Returns the lines that it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").is_dir():
        tiny.model(folder / "model")
    one, two = folder / f"{count}.jsonl", folder / f"{count}-more.jsonl"
    write(one, count)
    every, more = Prompts(Ids(count, 0), 0), Prompts(Ids(count // 4, count), 1)
    runs: dict[str, tuple[str, Prompts | Mixture]] = {"": (str(one), every)}
    if rl:
        write(two, count // 4, count)
        mixture = Mixture({"one": every, "two": more}, {"one": Fraction(7), "two": Fraction(3)}, 0)
        runs |= {"mixed-": (f"one={one}:0.7,two={two}:0.3", mixture)}
    lines: list[dict] = []

    def say(line: dict) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    for name, (data, order) in runs.items():
        whole, killed = f"{name}rl-whole" if rl else "whole", f"{name}rl-killed" if rl else "killed"
        for out, kill_at in ((whole, None), (killed, SAVE[rl] + 5), (killed, None)):
            say({"rows": count, **train(folder, data, out, kill_at, rl)})
        if rl:
            say(prompts(folder, whole, order))
            say(prompts(folder, killed, order))
        else:
            say({"equal": losses(folder / killed) == losses(folder / whole), "steps": STEPS[rl]})
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--rl", action="store_true")
    given = parser.parse_args()
    main(given.folder, given.rows, given.rl)
