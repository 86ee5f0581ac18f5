"""Trains in processes that are killed at given records of the journal, one after the other, until the run is complete.

    python kill_at_records.py JOB

JOB is a JSON file: `module` and `function` that make the grpo.Config, its `arguments`, `deaths` (the number of the
record at which each process dies; the last one lives), `others` (words of command lines: at every `each`th record a
process of the run with the next of them is killed), `patched` ({"module:NAME": value}) and `log`, to which is written
which episodes were generated, which are in the journal, what a killed process left there of calls that go on (place and
tokens), and what was taken of them. All processes are forks of this one, which has imported what they need.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from pathlib import Path

from test_recipes_killed import family

from areax.recipes import grpo
from areax.rollout import client
from areax.rollout.journal import calls, store


def die_at(number, log, others, each):
    """Kills this process at the record `number`: in turns before and after it is in the file."""
    written, keep, record = store.Journal._written, store.Journal.keep, store.Journal._record
    count, writing = 0, ""
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

    def ended(self, prompt, admitted, row, episode, samples, seconds, **more):
        log.write(f"generated {prompt}/{episode}\n")
        keep(self, prompt, admitted, row, episode, samples, math.inf, **more)  # each as soon as it has ended

    def recorded(self, keys):
        nonlocal writing
        names = [f"{prompt}/{episode}" for prompt, episode in keys if episode != store.BEGUN]
        writing = said = "".join(f"kept {name}\n" for name in names)
        done = record(self, keys)
        writing = ""
        done.add_done_callback(lambda _: log.write(said))
        return done

    begun, found = calls.Calls.__init__, calls.Calls.begun

    def placed(self, journal, prompt, admitted, known, grows, episode):
        begun(self, journal, prompt, admitted, known, grows, episode)
        self.place = f"{prompt}/{episode}"

    def told(self, number, request):
        made = found(self, number, request)
        if made:
            log.write(f"recalled {self.place}/{number} {len(made.tokens)} {made.finish}\n")
        return made

    store.Journal._written, store.Journal.keep, store.Journal._record = counted, ended, recorded
    calls.Calls.__init__, calls.Calls.begun = placed, told


def left(folder):
    """The calls that a killed process left in its journal: place, tokens, finish."""
    with tempfile.TemporaryDirectory() as copy:
        for path in Path(folder).glob(f"{store.FILE}*"):
            shutil.copy(path, copy)
        with contextlib.closing(sqlite3.connect(Path(copy, store.FILE))) as db:
            begun = store._begun(db, copy)
    for prompt, one in begun.items():
        for (episode, number), call in one.calls.items():
            if episode not in one.episodes:
                yield f"{prompt}/{episode}/{number} {len(call.made.tokens)} {call.made.finish}"


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
    for name, value in job.get("patched", {}).items():
        module, _, name = name.partition(":")
        setattr(importlib.import_module(module), name, value)
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
        with open(job["log"], "a") as log:
            log.writelines(f"left {one}\n" for one in left(make(*job["arguments"]).out))
    raise AssertionError("the run is not complete")


if __name__ == "__main__":
    main()
