"""Memory and time of a training step vs row length, on two layers of M.

    python benchmarks/long_rows.py [--lengths 1024 2048 4096 8192 16384] [--write]

One row per step: one sequence, or many of 512 tokens. Each length runs in a separate process with its programs already
compiled (compiling takes more memory than a step on a short row), which reports the program's temporary memory, and its
peak memory over a few steps, including the loaded program. Also prints the coefficient of determination (R^2) of a
linear fit of memory to length, and whether the optimised program of the longest row has an array with two axes of that
length, or as many entries. --write stores it as case `long_rows` of results.json.
"""

import argparse
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import run
import sizes

LAYERS, PIECE, STEPS = 2, 512, 3
KINDS = ("one", "many")


def measure(kind: str, length: int, steps: int) -> dict:
    """Measures one length in this process; with 0 steps only compiles its programs."""
    from functools import partial

    import jax

    from areax import models
    from areax.core import losses, optim, packing, param, step
    from areax.recipes.shared import common
    from areax.rollout.types import supervised

    common.keep_memory()  # as the recipes do
    hf = {**sizes.config("M"), "num_hidden_layers": LAYERS, "max_position_embeddings": length}
    config = models.config_from_hf(hf)
    table = models.table(config)
    optimizer = optim.make_optimizer(optim.Optimizer(), table)
    objective = losses.SFT()
    update = step.make_step(partial(models.score, config=config, run=models.Run()), objective, optimizer)
    state = step.init(jax.jit(lambda key: param.init(key, table))(jax.random.key(0)), optimizer)
    token, piece = np.random.default_rng(0).integers(0, config.vocab, length), length if kind == "one" else PIECE
    samples = [supervised(x[:1], x[1:], sample=i, rollout=i, group=i) for i, x in enumerate(token.reshape(-1, piece))]
    batch = jax.jit(objective.prepare)(packing.pack(samples, length, rows=1))
    compiled = update.lower(state, batch).compile()
    seconds = []
    for _ in range(1 + steps if steps else 0):
        began = time.perf_counter()
        state, report = compiled(state, batch)
        jax.block_until_ready((state, report))
        seconds.append(time.perf_counter() - began)
    if not steps:
        return {}
    return {
        "kind": kind, "length": length, "temporary_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "seconds": statistics.median(seconds[1:]),
        "square": squares(compiled.as_text(), length), "loss": float(report["loss"].sum),
    }  # fmt: skip


def squares(program: str, length: int) -> list[str]:
    """Shapes in a program's text with two axes of at least the row's length, or at least its square in entries."""
    shapes = {match: [int(n) for n in match.split(",")] for match in set(re.findall(r"\[(\d+(?:,\d+)+)\]", program))}
    large = lambda sizes: sum(n >= length for n in sizes) > 1 or math.prod(sizes) >= length**2
    return sorted(shape for shape, axes in shapes.items() if large(axes))


def straight(x, y) -> float:
    """R^2 of a linear least-squares fit."""
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--one", type=int, help="run this many steps of the first kind and length, in this process")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.kinds[0], given.lengths[0], given.one)))
        return
    with tempfile.TemporaryDirectory() as cache:
        compare(given, {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})


def compare(given, cache: dict[str, str]) -> None:
    details = {}
    print("| rows of | T | temporary MB | peak MB | s per step | us per token |\n|---|---|---|---|---|---|")
    for kind in given.kinds:
        found = []
        for length in given.lengths:
            for steps in (0, STEPS):
                command = [sys.executable, __file__, "--one", str(steps), "--kinds", kind, "--lengths", str(length)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | cache)
            one = json.loads(done.stdout)
            found.append(one)
            print(
                f"| {kind} | {length} | {one['temporary_mb']:.0f} | {one['peak_mb']:.0f} | {one['seconds']:.2f} | "
                f"{1e6 * one['seconds'] / length:.0f} |",
                flush=True,
            )
        column = lambda name, found=found: [one[name] for one in found]
        fits = {name: straight(column("length"), column(name)) for name in ("temporary_mb", "peak_mb")}
        square = found[-1]["square"]  # shorter rows are not longer than the model's width
        print(
            f"\n{kind}: R^2 of temporary memory {fits['temporary_mb']:.4f}, of the peak {fits['peak_mb']:.4f}; "
            f"{'no array' if not square else ', '.join(square)} of [T, T] at T = {given.lengths[-1]}\n"
        )
        names = ("length", "temporary_mb", "peak_mb", "seconds")
        details[kind] = {"r2": fits, "square": square, **{name: column(name) for name in names}}
    if given.write:
        row = {"case": "long_rows", "model": "M", "peer": "plain", "unit": "R^2"}
        row |= {"ours": min(one["r2"]["temporary_mb"] for one in details.values()), "theirs": 1.0}
        run.store([row | {"ratio": row["ours"], "details": details} | run.origin()])


if __name__ == "__main__":
    main()
