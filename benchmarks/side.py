"""Runs one side of a case in a separate process, one repetition per line of input.

    python side.py CASE MODEL SIDE FOLDER

SIDE is a function of the case's module: `ours`, or a peer. Between repetitions the process blocks on input, leaving the
machine to the others. It writes JSON lines: one when it is ready, one per repetition, and at the end of its input its
peak memory. Seconds and memory are those of the process and all that it started, such as a server.
"""

import importlib
import importlib.metadata
import json
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path

PACKAGES = {
    "ours": ("areax", "jax"), "transformers": ("transformers", "torch"), "trl": ("trl", "transformers", "torch"),
    "tunix": ("google-tunix", "jax"), "rows": ("areax", "jax"), "plain": (), "llama_cpp": ("llama_cpp_python",),
    "peft": ("peft", "transformers", "torch"), "xla": ("jax",), "torch": ("torch",), "one_core": (),
}  # fmt: skip


def versions(side: str) -> dict[str, str]:
    """Versions of a side's packages in this process."""
    return {name: importlib.metadata.version(name) for name in PACKAGES[side]}


def limit(side: str) -> float | None:
    """GFLOP/s of the side's library in a product of two 2048 x 2048 matrices, best of 5; None if it has none."""
    n = 2048
    if not {"jax", "torch"} & set(PACKAGES[side]):
        return None
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


def started() -> list[int]:
    """The processes that this one started, and those that they did."""
    found = [os.getpid()]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, _read(task).split())
    return found[1:]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return ""


def cpu() -> float:
    """CPU-seconds that this process, and those that it started, have used."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for pid in started():
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def resident(pids: list[int]) -> float:
    """Memory of these processes in MB: the sum of their proportional shares (PSS)."""
    found = (re.search(r"^Pss: +([0-9]+) kB", _read(Path(f"/proc/{pid}/smaps_rollup")), re.M) for pid in pids)
    return sum(int(size[1]) for size in found if size) / 1024


class Memory(threading.Thread):
    """The most memory in MB that this process has used, together with those that it started, looked at each second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.together = 0.0
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(1)
            if others := started():
                self.together = max(self.together, resident([os.getpid(), *others]))

    def peak(self) -> float:
        return max(self.together, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def repetition(once, times: int = 1) -> dict:
    """Wall and CPU seconds per call over `times` calls back to back, cores used by other programs meanwhile, and the
    last result; only one call if there is work before or after it."""
    before, after = (getattr(once, name, None) for name in ("before", "after"))
    times = 1 if before or after else times
    if before:
        before()
    own, all_, wall = cpu(), busy(), time.perf_counter()
    for _ in range(times):
        result = once()
    wall, own, all_ = time.perf_counter() - wall, cpu() - own, busy() - all_
    if after:
        after()
    return {"wall": wall / times, "cpu": own / times, "others": max(0.0, (all_ - own) / wall), "result": result}


def main(case: str, model: str, side: str, folder: str) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps output of libraries separate from the results
    module, memory = importlib.import_module(case), Memory()
    if "torch" in PACKAGES[side]:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(0)
    once = getattr(module, side)(folder, model)
    _, flops = module.work(model or None)
    probe = lambda: limit(side) if flops else None
    print(json.dumps({"limit": probe(), "versions": versions(side)}), file=out)
    try:
        for times in sys.stdin:
            print(json.dumps(repetition(once, int(times))), file=out)
    finally:
        getattr(once, "close", lambda: None)()
    print(json.dumps({"peak_mb": memory.peak(), "limit": probe()}), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
