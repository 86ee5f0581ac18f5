"""Memory and time of SFT on ten million rows: start, steps, SIGKILL, resume, compared with a run that was not killed.

    python benchmarks/many_rows.py FOLDER [ROWS]

Writes the rows (about 0.5 GB), a tiny model and the runs to FOLDER, and a line of JSON for each part. Two runs train on
the same rows; one is killed after its first checkpoint and started again. Their losses must be equal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

STEPS, SAVE = 100, 20


def write(file: Path, count: int) -> None:
    """Sums with different operands; a line of about 50 bytes."""
    with file.open("w") as lines:
        for i in range(count):
            a, b = i % 9973, i % 9967
            lines.write(f'{{"prompt": "{a}+{b}", "completion": "{a + b}", "id": {i}}}\n')


def start(folder: Path, data: str, out: str) -> subprocess.Popen:
    words = ["--model", folder / "model", "--data", data, "--out", folder / out, "--steps", STEPS, "--batch", 64]
    words += ["--length", 64, "--rows", 16, "--save-every", SAVE]
    with (folder / f"{out}.log").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "areax", "train", "sft", *map(str, words)], stderr=log)


def memory(process: subprocess.Popen) -> dict[str, float]:
    """GB that the process has of its own, and with mapped files, now and at most so far."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    size = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines if line.endswith("kB")}
    return {"own": round(size["RssAnon"], 2), "rss": round(size["VmRSS"], 2), "peak": round(size["VmHWM"], 2)}


def losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def train(folder: Path, data: str, out: str, kill_at: int | None = None) -> dict:
    """Runs to the end, or kills the process after a step; returns seconds and memory after the first step and last."""
    before, began = len(losses(folder / out)), time.monotonic()
    process, first, last = start(folder, data, out), {}, {}
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


def main(folder: Path, count: int) -> list[dict]:
    """Returns the lines that it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").is_dir():
        tiny.model(folder / "model")
    data = folder / f"{count}.jsonl"
    if not data.is_file():
        write(data, count)
    lines: list[dict] = []
    for out, kill_at in (("whole", None), ("killed", SAVE + 5), ("killed", None)):
        lines.append({"rows": count, **train(folder, str(data), out, kill_at)})
        print(json.dumps(lines[-1]), flush=True)
    lines.append({"equal": losses(folder / "killed") == losses(folder / "whole"), "steps": STEPS})
    print(json.dumps(lines[-1]))
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000_000)
