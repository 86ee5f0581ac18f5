"""Runs one side of a case in a separate process, one repetition per line of input.

    python side.py CASE MODEL SIDE FOLDER

SIDE is a function of the case's module: `ours`, or a peer. Between repetitions the process blocks on input, leaving the
machine to the others. It writes JSON lines: one when it is ready, one per repetition, and at the end of its input its
peak memory.
"""

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time

PACKAGES = {
    "ours": ("areax", "jax"), "transformers": ("transformers", "torch"), "trl": ("trl", "transformers", "torch"),
    "tunix": ("google-tunix", "jax"), "rows": ("areax", "jax"), "plain": (),
}  # fmt: skip


def versions(side: str) -> dict[str, str]:
    """Versions of a side's packages in this process."""
    return {name: importlib.metadata.version(name) for name in PACKAGES[side]}


def limit(side: str) -> float:
    """GFLOP/s of the side's library in a product of two 2048 x 2048 matrices: best of 5."""
    n = 2048
    if "jax" in PACKAGES[side]:
        import jax
        import jax.numpy as jnp

        x, product = jnp.ones((n, n)), jax.jit(jnp.matmul)
        multiply = lambda: product(x, x).block_until_ready()
    else:
        import torch

        x = torch.ones(n, n)
        multiply = lambda: x @ x
    times = []
    for _ in range(6):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return 2e-9 * n**3 / min(times[1:])


def busy() -> float:
    """CPU-seconds used by the whole machine so far."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def repetition(once, times: int = 1) -> dict:
    """Wall and CPU seconds per call over `times` calls back to back, cores used by other programs meanwhile, and the
    last result; only one call if there is work before or after it."""
    before, after = (getattr(once, name, None) for name in ("before", "after"))
    times = 1 if before or after else times
    if before:
        before()
    wall, cpu, all_ = time.perf_counter(), time.process_time(), busy()
    for _ in range(times):
        result = once()
    wall, cpu, all_ = time.perf_counter() - wall, time.process_time() - cpu, busy() - all_
    if after:
        after()
    return {"wall": wall / times, "cpu": cpu / times, "others": max(0.0, (all_ - cpu) / wall), "result": result}


def main(case: str, model: str, side: str, folder: str) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps output of libraries separate from the results
    module = importlib.import_module(case)
    if "torch" in PACKAGES[side]:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(0)
    once = getattr(module, side)(folder, model)
    _, flops = module.work(model or None)
    probe = lambda: limit(side) if flops and side != "plain" else None
    print(json.dumps({"limit": probe(), "versions": versions(side)}), file=out)
    try:
        for times in sys.stdin:
            print(json.dumps(repetition(once, int(times))), file=out)
    finally:
        getattr(once, "close", lambda: None)()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_mb": peak, "limit": probe()}), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
