"""Cost of faulty rewards: calls to a pool of which 1 % crash their worker, 1 % hang and 1 % raise, and all leak memory.

    python benchmarks/rewards.py [--calls 10000] [--workers 2] [--timeout 0.2] [--json]

Reports how calls ended, the maximum number of worker processes, memory over time, and the longest stall of the event
loop. Each fault occurs on fixed rows, on every attempt.
"""

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
import time
from pathlib import Path

CONCURRENT = 256  # calls in flight
LEAK = 100_000  # bytes per call
MAX_GROWTH = 4 << 20  # bytes by which a worker may grow
KEPT = []


def reward(text, row):
    """The row's number, except for rows with a fault."""
    KEPT.append(b"x" * LEAK)
    match row["number"] % 100:
        case 17:
            os._exit(1)
        case 43:
            while True:
                pass
        case 71:
            raise ArithmeticError("this row is bad")
    return row["number"]


def right(number: int, value: float) -> bool:
    return math.isnan(value) if number % 100 in (17, 43, 71) else value == number


def memory(process: int | str) -> float:
    """Resident memory of a process in MB; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def workers() -> list[int]:
    """Live child processes."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if memory(child):  # zombies hold none
                found.append(child)
    return found


async def watch(longest: list[float], processes: list[int]) -> None:
    """Records the longest delay of a 1 ms timer, in seconds, and every 50 turns the largest number of processes."""
    for turn in itertools.count():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest[0] = max(longest[0], time.perf_counter() - before - 0.001)
        if turn % 50 == 0:
            processes[0] = max(processes[0], len(workers()))


async def measure(calls: int, size: int, timeout_s: float, show) -> dict:
    from areax.rollout import rewards

    values: dict[int, float] = {}
    track: list[tuple[int, float, float, int]] = []  # calls answered, MB here, MB of the largest worker, workers
    numbers = iter(range(calls))
    longest, processes = [0.0], [0]

    async def caller(reward):
        for number in numbers:
            values[number] = (await reward("", {"id": number, "number": number})).value
            if len(values) % (calls // 10) == 0:
                here = workers()
                track.append((len(values), memory("self"), max(map(memory, here), default=0.0), len(here)))
                show(*track[-1])

    name = f"{os.path.abspath(__file__)}:reward"
    options = dict(workers=size, timeout_s=timeout_s, retries=0, max_growth=MAX_GROWTH)
    async with rewards.pool(name, **options) as reward:
        watcher = asyncio.create_task(watch(longest, processes))
        start = time.perf_counter()
        await asyncio.gather(*(caller(reward) for _ in range(CONCURRENT)))
        seconds = time.perf_counter() - start
        watcher.cancel()
    return {
        "answered": len(values),
        "right": sum(right(number, value) for number, value in values.items()),
        "counts": reward.counts,
        "workers": size,
        "processes": processes[0],
        "parent_growth_mb": round(track[-1][1] - track[0][1], 1),
        "worker_growth_mb": round(max(mb for _, _, mb, _ in track) - track[0][2], 1),
        "longest_stall_ms": round(1000 * longest[0], 1),
        "calls_per_s": round(calls / seconds, 1),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=0.2, help="timeout of a call in seconds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # one per failure
    line = "{:>7} calls   parent {:6.1f} MB   largest worker {:6.1f} MB   {} workers".format
    show = (lambda *_: None) if given.json else (lambda *row: print(line(*row), flush=True))
    found = asyncio.run(measure(given.calls, given.workers, given.timeout, show))
    print(json.dumps(found) if given.json else "\n".join(f"{name:>18} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
