"""Trains in processes that are killed at given records of the journal, one after the other, until the run is complete.

    python kill_at_records.py JOB

JOB is a JSON file: `module` and `function` that make the grpo.Config, its `arguments`, `deaths` (the number of the
record at which each process dies; the last one lives), `others` (words of command lines: at every `each`th record a
process of the run with the next of them is killed) and `log`, to which is written which episodes were generated, and
which are in the journal. All processes are forks of this one, which has imported what they need.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path

from test_recipes_killed import family

from areax.recipes import grpo
from areax.rollout import client
from areax.rollout.journal import store


def die_at(number, log, others, each):
    """Kills this process at the record `number`: in turns before and after it is in the file."""
    written, keep, count, writing = store.Journal._written, store.Journal.keep, 0, ""
    words = itertools.cycle(others)

    def counted(self, write):
        nonlocal count
        count += 1
        if others and count % each == 0:
            kill_other(next(words), log)
        if count == number and number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done = written(self, write)
        if count == number:
            done.result()
            log.write(writing)
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    async def kept(self, prompt, admitted, row, episode, samples, **more):
        nonlocal writing
        log.write(f"generated {prompt}/{episode}\n")
        writing = said = f"kept {prompt}/{episode}\n"  # until `keep` waits, which it does behind `_written`
        asyncio.get_running_loop().call_soon(unset)
        await keep(self, prompt, admitted, row, episode, samples, **more)
        log.write(said)

    def unset():
        nonlocal writing
        writing = ""

    store.Journal._written, store.Journal.keep = counted, kept


def kill_other(word, log):
    """Kills a process of the run whose command has a word, if there is one by now."""
    for pid in sorted(family(os.getpid()).keys() - {os.getpid()}):
        with contextlib.suppress(OSError):  # it has just ended
            if word in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                os.kill(pid, signal.SIGKILL)
                log.write(f"killed {word}\n")
                return


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    make = getattr(importlib.import_module(job["module"]), job["function"])
    client.TIMEOUTS = dataclasses.replace(client.TIMEOUTS, lost_own_s=1.0, heartbeat_s=0.2, heartbeat_answer_s=2.0)
    for death in [*job["deaths"], 0]:
        if (child := os.fork()) == 0:
            with open(job["log"], "a", buffering=1) as log:
                die_at(death, log, job.get("others", ()), job.get("each", 0))
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
