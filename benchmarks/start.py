"""Start-up time: imports, help, and recipes up to their first optimiser step.

    python benchmarks/start.py [--runs 5] [case ...]

Every start is a new process with a warm page cache. A recipe's first start, on model S, compiles into an empty
compilation cache; later ones find everything there and must add nothing. grpo starts its own server, generates 4 x 8
completions of 64 tokens and trains on them; `inside` runs that server in its own process. The time is from the start of
the process until the first step's line is in metrics.jsonl; the run then ends.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sizes

PLAIN = {"client": ("-c", "import areax.rollout.client"), "help": ("-m", "areax", "--help")}
OPTIONS = {
    "sft": ("sft", "--batch", "32", "--length", "256", "--rows", "4"),
    "grpo": ("grpo", "--reward", "areax.rollout.tasks.arithmetic:reward", "--groups", "4", "--group-size", "8",
             "--length", "128", "--rows", "8", "--sampling.max-new-tokens", "64", "--serve.slots", "32",
             "--serve.context", "256"),
}  # fmt: skip
OPTIONS["inside"] = (*OPTIONS["grpo"], "--serve.inside")


def write(folder: Path) -> None:
    """Writes model S with a tokenizer, and data."""
    import itertools
    import json

    import jax

    from areax import models
    from areax.adapters import hf, tokenizer
    from areax.core import param
    from areax.rollout.tasks import arithmetic

    config = models.config_from_hf(sizes.config("S"))
    tokens = tokenizer.character("0123456789+")
    hf.save(folder / "S", config, param.init(jax.random.key(0), models.table(config)), tokenizer=tokens)
    train = arithmetic.splits()["train"]
    for name, rows in {"sft": itertools.islice(arithmetic.demonstrations(train), 1000), "grpo": train}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plain(arguments) -> tuple[float, float]:
    """(seconds, CPU-seconds) of a process."""
    wall, cpu = time.perf_counter(), spent()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - wall, spent() - cpu


def recipe(name: str, folder: Path, out: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds to the first step, seconds of the run, CPU-seconds of the run and its servers)."""
    data = folder / ("sft.jsonl" if name == "sft" else "grpo.jsonl")
    command = [sys.executable, "-m", "areax", "train", *OPTIONS[name], "--steps", "1"]
    command += ["--model", folder / "S", "--data", data, "--out", out]
    first, metrics = 0.0, out / "metrics.jsonl"
    began, cpu = time.perf_counter(), spent()
    with open(f"{out}.log", "w") as log:
        here = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
        run = subprocess.Popen(command, stdout=log, stderr=log, env=here)
        while run.poll() is None:
            time.sleep(0.01)
            if not first and metrics.is_file() and metrics.stat().st_size:
                first = time.perf_counter() - began
    if run.returncode or not first:
        sys.exit(Path(f"{out}.log").read_text())
    return first, time.perf_counter() - began, spent() - cpu


def spent() -> float:
    """CPU-seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*PLAIN, *OPTIONS, []], help="cases to measure; default: all")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    cases = given.cases or [*PLAIN, *OPTIONS]
    show = lambda times: f"min {min(times):.2f} s, median {statistics.median(times):.2f} s"
    for case in [case for case in PLAIN if case in cases]:
        plain(PLAIN[case])
        times = [plain(PLAIN[case]) for _ in range(3 * given.runs)]
        print(f"{case}: {show([wall for wall, _ in times])}; {min(cpu for _, cpu in times):.2f} CPU-s", flush=True)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        if set(OPTIONS) & set(cases):
            write(folder)
        for case in [case for case in OPTIONS if case in cases]:
            cache = folder / f"cache-{case}"
            entries = lambda cache=cache: len(list(cache.glob("*-cache")))
            cold = recipe(case, folder, folder / f"{case}-cold", cache)
            held = entries()
            warm = [recipe(case, folder, folder / f"{case}-{i}", cache) for i in range(given.runs)]
            print(
                f"{case}: first optimiser step after {show([one[0] for one in warm])} ({cold[0]:.2f} with an empty "
                f"cache); the run {min(one[1] for one in warm):.2f} s, {min(one[2] for one in warm):.2f} CPU-s; "
                f"{held} programs in the cache, {entries() - held} more after {given.runs} further runs",
                flush=True,
            )


if __name__ == "__main__":
    main()
