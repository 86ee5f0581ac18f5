"""Trains in processes that are killed at given records of the journal, one after the other, until the run is complete.

    python kill_at_records.py JOB

JOB is a JSON file: `module` and `function` that make the grpo.Config, its `arguments`, `deaths` (the number of the
record at which each process dies; the last one lives) and `log`, to which is written which episodes were generated, and
which are in the journal. All processes are forks of this one, which has imported what they need.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

from areax.recipes import grpo
from areax.rollout.journal import store


def die_at(number, log):
    """Kills this process at the record `number`: in turns before and after it is in the file."""
    written, keep, count = store.Journal._written, store.Journal.keep, 0

    def counted(self, write):
        nonlocal count
        count += 1
        if count == number and number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done = written(self, write)
        if count == number:
            done.result()
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    async def kept(self, prompt, admitted, row, episode, samples, **more):
        log.write(f"generated {prompt}/{episode}\n")
        await keep(self, prompt, admitted, row, episode, samples, **more)
        log.write(f"kept {prompt}/{episode}\n")

    store.Journal._written, store.Journal.keep = counted, kept


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    make = getattr(importlib.import_module(job["module"]), job["function"])
    for death in [*job["deaths"], 0]:
        if (child := os.fork()) == 0:
            with open(job["log"], "a", buffering=1) as log:
                die_at(death, log)
                log.write(f"process {os.getpid()}\n")
                grpo.main(make(*job["arguments"]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            assert status == 0, status
            return
    raise AssertionError("the run is not complete")


if __name__ == "__main__":
    main()
