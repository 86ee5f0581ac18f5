"""`--profile` writes a trace of the steps that it names, readable by Perfetto, and says how to open it."""

import errno
import gzip
import itertools
import json
import os
import re
import signal

import jax
import pytest
import servers
import tiny

from areax.adapters import cli
from areax.adapters.tracking import run_dir
from areax.recipes.shared import profiling
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiling")
    tiny.model(path / "model")
    train = arithmetic.splits()["train"]
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(train), 64)))
    return path


def words(place, recipe, out, **options):
    sizes = {"rows": 4, "length": 64} | ({"batch": 8} if recipe == "sft" else {})
    named = {"model": place / "model", "data": place / "rows.jsonl", "out": out, **sizes, **options}
    return ["train", recipe, *(str(word) for name, value in named.items() for word in (f"--{name}", value))]


def marked(out, kind, said, of):
    """Numbers of the steps that are marked in a trace, once the line about it was checked."""
    [(what, path, folder)] = re.findall(rf"^{kind} trace of (.*): open (\S+) in ui.perfetto.dev, or run: xprof (\S+)$",
                                        said, re.M)  # fmt: skip
    assert what == of and folder == str(out / "profile")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    # computations of XLA are in it, not only this program's marks
    assert any("thunk" in str(event.get("args", "")) or "hlo_op" in event.get("args", {}) for event in events)
    return sorted({int(event["args"]["step_num"]) for event in events if event.get("name") == kind})


@pytest.mark.slow
def test_the_named_steps_are_traced(place, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(words(place, "sft", out, steps=5, profile="2:3")) == 0
    assert marked(out, "sft", capsys.readouterr().err, "steps 2 to 3") == [2, 3]
    assert len(list(out.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1  # what XProf reads
    assert json.loads((out / "config.json").read_text())["profile"] == "2:3"
    # it goes on after the steps that are named
    assert cli.main(words(place, "sft", out, steps=6, profile="5")) == 0
    assert "sft starts after step 5: --profile 5 traces nothing\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_stopped_writes_what_it_has(place, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    log = run_dir.Run.log

    def log_and_stop(run, kind, step, **values):
        """Few steps, since each one lengthens the trace, which takes seconds to write."""
        log(run, kind, step, **values)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_dir.Run, "log", log_and_stop)
    assert cli.main(words(place, "sft", out, steps=100000, profile="2:100000")) == 130
    last = json.loads((out / "summary.json").read_text())["steps"]
    assert marked(out, "sft", capsys.readouterr().err, f"steps 2 to {last}") == list(range(2, last + 1))


def traced(out, between=lambda: None):
    """Steps 1 to 3, of which 1 and 2 are to be traced."""
    done = []
    with profiling.steps("sft", "1:2", str(out), 3) as step:
        for number in range(1, 4):
            with step(number) as results:
                done.append(results(number))
                between()
    assert done == [1, 2, 3]


@pytest.mark.slow
def test_a_run_goes_on_without_a_trace(tmp_path, monkeypatch, capsys):
    """Its folder is a file; the disk is full when it is written, in or after the last step. One line each."""
    (tmp_path / "profile").write_text("")
    traced(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(f"sft goes on without a trace in {tmp_path}/profile: ") and said.count("\n") == 1
    stop = jax.profiler.stop_trace

    def full():
        stop()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    traced(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt), profiling.steps("sft", "1:2", str(tmp_path / "third"), 3) as step:
        with step(1):
            pass
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert said.count("No space left on device\n") == said.count("\n") == 2


@pytest.mark.long
def test_reinforcement_learning_is_traced(place, tmp_path, capsys):
    out = tmp_path / "run"
    options = {
        "reward": "areax.rollout.tasks.arithmetic:reward", "steps": 2, "groups": 2, "group-size": 2, "profile": 2,
        "sampling.max-new-tokens": 4,
    }  # fmt: skip
    with servers.embedded(place / "model", slots=8, context=64) as remote:
        assert cli.main([*words(place, "grpo", out, **options), "--servers", remote.url]) == 0
    assert marked(out, "grpo", capsys.readouterr().err, "step 2") == [2]


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["sft", "grpo"])
@pytest.mark.parametrize(
    "given, told",
    [
        ("five", "--profile must be a step or FIRST:LAST, such as 5:8, got 'five'"),
        ("9" * 5000, "--profile must be a step or FIRST:LAST, such as 5:8, got '999999999999...9999999999999'"),
        ("2:", "--profile must be a step or FIRST:LAST, such as 5:8, got '2:'"),
        ("0:2", "--profile must name steps from 1 to --steps 5, in order, got 0:2"),
        ("3:2", "--profile must name steps from 1 to --steps 5, in order, got 3:2"),
        ("3:6", "--profile must name steps from 1 to --steps 5, in order, got 3:6"),
    ],
)
def test_steps_that_the_run_lacks_are_refused(recipe, given, told, place, tmp_path, capsys):
    more = {"reward": "areax.rollout.tasks.arithmetic:reward"} if recipe == "grpo" else {}
    assert cli.main(words(place, recipe, tmp_path / "run", steps=5, profile=given, **more)) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "run").exists()
