"""What a command says on stderr: steps with the time left, phases, how long each took."""

import io
import itertools
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from areax.adapters.runtime import compile_time
from areax.adapters.tracking import progress


def test_steps_without_a_terminal_prints_lines_including_the_last():
    out = io.StringIO()
    with progress.steps("grpo", 4, every=3600, console=Console(file=out, width=40)) as tick:
        for step in range(1, 5):
            tick(step, tokens=100, reward=step / 4, loss=None)
        assert out.getvalue().count("\n") == 2, "the last step has its line before what follows the steps"
    first, last = out.getvalue().splitlines()
    assert first.startswith("grpo 1/4  reward 0.25  ") and "tokens/s" in first and first.endswith(" left")
    assert last.startswith("grpo 4/4  reward 1  ") and "left" not in last and "loss" not in last


def test_steps_on_a_terminal_is_a_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with progress.steps("sft", 8, start=2, console=console) as tick:
        tick(8, tokens=5, loss=jnp.float32(0.125))
    assert "8/8" in out.getvalue() and "loss 0.125" in out.getvalue()


@pytest.mark.parametrize("seconds, said", [(0.4, "0:00"), (61, "1:01"), (3725.2, "1:02:05")])
def test_time_left_reads_like_a_clock(seconds, said):
    assert progress._clock(seconds) == said


def test_the_time_left_leaves_compilation_out():
    """A clock that stood still for the 600 seconds of the first step: the other three take a second each."""
    out, seconds = io.StringIO(), iter([0.0, 1.0, 2.0])
    with progress.steps("sft", 5, every=0, console=Console(file=out, width=80), now=lambda: next(seconds)) as tick:
        tick(1)
        tick(2)
    assert out.getvalue().split() == "sft 1/5 0:04 left sft 2/5 0:03 left".split()


def compiled(seconds):
    """Measures a program that this thread has compiled, as JAX does when it ends."""
    jax.monitoring.record_event_duration_secs(compile_time.PHASES[1], seconds)


def test_the_clock_leaves_out_what_a_step_compiles():
    compile_time.measure()
    real, began, before = time.monotonic(), compile_time.clock(), compile_time.seconds()
    with compile_time.left_out():
        jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x * time.monotonic())(jnp.ones((8, 8))))
    own = compile_time.seconds() - before
    assert own > 0 and compile_time.clock() - began <= time.monotonic() - real - own + 1e-3
    assert compile_time.seconds() == before + own


def test_a_rate_is_not_absurd_when_other_threads_compile_too():
    """An engine beside the trainer compiles for longer than has passed, and so do measurements within others."""
    compile_time.measure()
    out, before = io.StringIO(), compile_time.seconds()
    with progress.steps("grpo", 2, console=Console(file=out, width=80), now=compile_time.clock) as tick:
        time.sleep(0.05)  # the wait for a batch
        with compile_time.left_out():
            other = threading.Thread(target=compiled, args=(1e3,))
            other.start()
            other.join()
            assert compile_time.seconds() == before
            for seconds in (1.0, 20.0, 400.0):  # each around the one before
                compiled(seconds)
        assert compile_time.seconds() - before <= 400 + 1e-6
        before = compile_time.clock()
        tick(1, tokens=1)
        assert compile_time.clock() >= before
    assert int(re.search(r"([\d,]+) tokens/s", out.getvalue())[1].replace(",", "")) <= 20


def test_a_phase_is_said_when_it_begins_and_a_long_one_also_when_it_ends(monkeypatch, capsys):
    with progress.phase("loading model, 1.2 GB"):
        assert capsys.readouterr() == ("", "loading model, 1.2 GB ...\n")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SHORT_S", 0.0)
    with progress.phase("loading model, 1.2 GB"), progress.phase("nothing", quiet=True):
        pass
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("...") and last == "loading model, 1.2 GB: 0.0 s"


def test_a_long_phase_says_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    began, done, threads = threading.Event(), itertools.count(2), threading.active_count()

    def more():
        began.set()
        return f", {next(done)} of 9"

    with progress.phase("waiting", more=more):
        assert began.wait(10)
    assert threading.active_count() == threads
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "waiting ..." and second == "waiting ... 0:00, 2 of 9"
    with pytest.raises(ValueError, match="broken"), progress.phase("loading"):
        raise ValueError("broken")
    assert capsys.readouterr().err == "loading ...\n"


def test_a_long_phase_says_how_many_rows_are_done(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_S", 0.05)
    with progress.counting("evaluating 1319 rows") as count, progress.counting("nothing", quiet=True):
        count()
        count(1200)
        while (said := capsys.readouterr().err).count("\n") < 1 or "done" not in said:
            assert threading.active_count()
    assert said.splitlines()[-1] == "evaluating 1319 rows ... 0:00, 1,201 rows done"


def test_the_first_step_counts_only_until_there_is_another():
    out, seconds = io.StringIO(), iter([0.0, 100.0, 101.0])
    with progress.steps("grpo", 5, every=0, console=Console(file=out, width=80), now=lambda: next(seconds)) as tick:
        tick(1)
        tick(2)
    assert out.getvalue().split() == "grpo 1/5 6:40 left grpo 2/5 0:03 left".split()


def test_a_run_of_two_steps_has_the_rate_of_both():
    """Steps are told one late, and the last one at once after the one before."""
    out, seconds = io.StringIO(), iter([0.0, 10.0, 10.001])
    with progress.steps("sft", 2, every=0, console=Console(file=out, width=80), now=lambda: next(seconds)) as tick:
        tick(1, tokens=100)
        tick(2, tokens=100)
    assert out.getvalue().splitlines()[-1].split() == "sft 2/2 20 tokens/s".split()


PROGRAM = """
import sys, time
from areax.adapters.tracking import progress
with progress.phase("loading"), progress.steps("sft", 3, every=0) as tick:
    sys.stdin.readline()
    for step in 1, 2, 3:
        progress.say("a line")
        tick(step)
print("done")
"""


def test_a_run_goes_on_when_nobody_reads_what_it_says():
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline() == "loading ...\n"
        process.stderr.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read() == "done\n"
