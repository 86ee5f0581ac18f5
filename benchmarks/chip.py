"""Benchmarks areax on this machine's GPU or TPU, the most valuable steps first. Call it again to complete the table.

Kernel tests, training steps beside transformers and `areax plan`, updates on samples that share their prompt,
decoding, a whole GRPO run with the embedded engine, and the longest row that fits. Each step runs in a process of its
own under a time limit and becomes one row of chips.json and CHIPS.md, written as soon as it ends. A step that fails
(out of memory, a crash, a timeout) becomes a row that says so, and the next step runs. A call starts only steps whose
limit fits in what is left of its budget.

A step is skipped if its row exists with the same settings, device, code and versions of jax (or torch and
transformers); code is a hash of the package and of the files that measure the step. Steps without a row run first, then
those whose older row failed, then those whose older row holds a result.
"""

import argparse
import fnmatch
import signal
import sys
import time
from pathlib import Path

from chips import process
from chips.steps import FULL, TINY, steps
from chips.work import work

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="steps and their time limits in seconds:\n" + "\n".join(
            f"  {step.limit_s:4} {step.name}" for step in steps(FULL, "gpu", peer=True)
        ),
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=540, metavar="S", help="seconds for this call (default 540)")
    parser.add_argument(
        "--redo", nargs="+", default=[], metavar="STEP",
        help="run these steps first, even if their rows exist: names or patterns such as 'train/*'",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for the results (default benchmarks; runs/chip with --tiny)")
    parser.add_argument(
        "--tiny", action="store_true",
        help="run every kind of step on tiny models, also on a CPU, to check that it works; plans are for an H100",
    )  # fmt: skip
    parser.add_argument("--one", help=argparse.SUPPRESS)  # runs one step in this process
    given = parser.parse_args(arguments)
    if given.one:
        process.one(given.one)
        return
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # like Ctrl-C, ends the step
    try:
        device = process.device()
        if device.platform == "cpu" and not given.tiny:
            sys.exit(f"chip.py: found {device.kind}, no accelerator; nothing to run (--tiny runs tiny models here)")
        todo = steps(TINY if given.tiny else FULL, "tpu" if device.platform == "tpu" else "gpu", process.peer(device))
        if unknown := [name for name in given.redo if not fnmatch.filter([step.name for step in todo], name)]:
            sys.exit(f"chip.py: --redo must name steps, got {', '.join(unknown)}; --help lists them")
        out = given.out or (HERE.parent / "runs" / "chip" if given.tiny else HERE)
        out.mkdir(parents=True, exist_ok=True)
        chip = "h100" if given.tiny else device.chip
        work(todo, device, out, until=began + given.budget, redo=given.redo, chip=chip)
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"chip.py: {error}")
    except KeyboardInterrupt:
        print("chip.py: interrupted; finished rows are kept", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
