"""What a command says on stderr: steps with the time left, phases, how long each took."""

import io
import subprocess
import sys
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


def test_the_clock_stands_still_while_a_program_is_compiled():
    compile_time.measure()
    real, began = time.monotonic(), compile_time.clock()
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x * time.monotonic())(jnp.ones((8, 8))))
    compiled = compile_time.seconds()
    assert compiled > 0 and compile_time.clock() - began < time.monotonic() - real
    assert compile_time.seconds() == compiled


def test_a_phase_is_said_when_it_begins_and_a_long_one_also_when_it_ends(monkeypatch, capsys):
    with progress.phase("loading model, 1.2 GB"):
        assert capsys.readouterr() == ("", "loading model, 1.2 GB ...\n")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SHORT_S", 0.0)
    with progress.phase("loading model, 1.2 GB"), progress.phase("nothing", quiet=True):
        pass
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("...") and last == "loading model, 1.2 GB: 0.0 s"


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
