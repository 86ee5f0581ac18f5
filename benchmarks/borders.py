"""Loading, saving and converting checkpoints, 1 GB of fp32, vs plain reads and writes of the same bytes.

    python benchmarks/borders.py [--runs 7] [--in DIR] [--write]

`load` is `hf.load` to arrays on the default device, vs reading the file into memory; `save` is `hf.save`, hashed and
synced, vs a synced write; `convert` is `areax convert` to the same dtype, vs a read and a synced write. Reads start
with a cold page cache. All take turns in one process, and the memory they need is touched before: on a virtual machine
that returns free memory to its host, getting it back takes longer than the work. `--in` chooses the disk. --write
stores it as case `borders` of results.json.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import files
import run
import sizes

SOURCE = "1GB"
FILE = "model.safetensors"


def sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drops a synced file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(once, source: Path, out: Path) -> tuple[float, float]:
    """(seconds, CPU-seconds) of one call; removes what it wrote to `out`."""
    files.touch_memory(2 * source.stat().st_size)
    forget(source)
    wall, cpu = time.perf_counter(), time.process_time()
    result = once()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    del result
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    return wall, cpu


def measure(root: Path, runs: int) -> dict[str, dict[str, list]]:
    """Seconds and CPU-seconds of both sides of each case."""
    from areax.adapters import hf
    from areax.adapters.commands import convert
    from areax.recipes.shared import common

    common.keep_memory()  # as the recipes do
    folder, out = root / SOURCE, root / "out"
    sizes.main(SOURCE, str(folder))
    config, params = hf.load(folder)
    memory = bytearray((folder / FILE).stat().st_size)
    read, write = lambda: files.read(folder / FILE, memory), lambda: (files.write(out, memory), sync(out))
    sides = {
        "load": (lambda: hf.load(folder), read),
        "save": (lambda: hf.save(out, config, params), write),
        "convert": (lambda: convert.convert(folder, out), lambda: (read(), write())),
    }
    done: dict = {name: {"ours": [], "plain": []} for name in sides}
    for i in range(1 + runs):
        for name, (ours, plain) in sides.items():
            for side, once in (("ours", ours), ("plain", plain)):
                took = timed(once, folder / FILE, out)
                if i:
                    done[name][side].append(took)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--in", dest="root", type=Path, help="directory for the files; default: the system's for temporary files"
    )
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.root) as root:
        done = measure(Path(root), given.runs)
    middle = lambda took, of: statistics.median(one[of] for one in took)
    print("| | areax, s (min to max) | plain | plain / areax | CPU-s, areax | plain |\n|---|---|---|---|---|---|")
    details = {}
    for name, sides in done.items():
        one = details[name] = {
            side: {
                "seconds": middle(took, 0), "seconds_min": min(took)[0], "seconds_max": max(took)[0],
                "cpu_seconds": middle(took, 1),
            }
            for side, took in sides.items()
        }  # fmt: skip
        ours, plain = one["ours"], one["plain"]
        print(
            f"| {name} | {run.spread(ours)} | {run.spread(plain)} | {plain['seconds'] / ours['seconds']:.2f} | "
            f"{ours['cpu_seconds']:.2f} | {plain['cpu_seconds']:.2f} |"
        )
    if given.write:
        ours, theirs = (sum(one[side]["seconds"] for one in details.values()) for side in ("ours", "plain"))
        row = {"case": "borders", "model": SOURCE, "peer": "plain", "unit": "rounds/s"}
        row |= {"ours": 1 / ours, "theirs": 1 / theirs, "ratio": theirs / ours, "details": details}
        run.store([row | run.origin()])


if __name__ == "__main__":
    main()
