"""`make chip`: pending steps, rows, the page; under `slow` every step on tiny models."""

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from areax import models
from areax.adapters.commands import plan
from areax.recipes import sft

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMAND = [sys.executable, str(BENCHMARKS / "chip.py")]


def row(step="decode/tiny/4", device="a GPU", **more):
    settings = {"shape": "tiny", "dtype": "bfloat16", "slots": 4, "prompt": 8, "new": 16}
    own = {"step": step, "device": device, "settings": settings, "code": "0123456789ab", "versions": {"jax": "0.11.2"}}
    return own | {"seconds": 1.0, "date": "2026-01-01"} | more


def test_steps_can_be_done(benchmark_modules):
    """Unique names, settings that `measure` accepts, known models, limits that fit in one call."""
    module, shapes = benchmark_modules("chips.steps"), benchmark_modules("chips.shapes")
    for sizes in (module.FULL, module.TINY):
        todo = module.steps(sizes, "gpu", peer=True)
        names = [step.name for step in todo]
        assert len(set(names)) == len(names) and todo[0].kind == "smoke"
        for step in todo:
            inspect.signature(benchmark_modules(f"chips.{step.kind}").measure).bind(
                **step.settings, chip=None, keep=None
            )
            if "shape" in step.settings:
                models.config_from_hf(shapes.hf(step.settings["shape"], 8))
            assert step.limit_s + 3 * benchmark_modules("chips.work").END_S < 540
            assert step.after == "" or names.index(step.after) < names.index(step.name)
        alone = module.steps(sizes, "gpu", peer=False)
        assert alone == [step for step in todo if step.settings.get("system") != "transformers"]


@pytest.mark.parametrize("shape, remat", [("tiny", "dots"), ("tiny-moe", "full")])
def test_the_plan_is_that_of_areax_plan(benchmark_modules, tmp_path, shape, remat):
    """As `areax plan sft` computes it."""
    (tmp_path / "config.json").write_text(json.dumps(benchmark_modules("chips.shapes").hf(shape, 64)))
    run = models.Run(dtype="bfloat16", remat=remat)
    config = sft.Config(str(tmp_path), "", length=64, rows=1, batch=4, run=run)
    wanted = plan.plan(config, plan.Options(chip="h200", sample_tokens=16))["figures"]
    got = benchmark_modules("chips.train").planned("h200", shape, 64, 4, remat, "bfloat16")
    for name in ("mfu", "peak_bytes", "model_flops", "step_s"):
        assert got[name] == wanted[name]["value"], name


def test_what_is_left_and_in_which_order(benchmark_modules):
    Step, pending = benchmark_modules("chips.steps").Step, benchmark_modules("chips.work").pending
    todo = [Step(name, "decode", {}, 1) for name in ("new", "old", "there", "broken", "lost", "again")]
    wanted = {step.name: {"step": step.name, "code": "2"} for step in todo}
    mine = {
        "old": {"step": "old", "code": "1"},
        "there": {"step": "there", "code": "2"},
        "broken": {"step": "broken", "code": "2", "failed": "out of memory"},
        "lost": {"step": "lost", "code": "1", "failed": "out of memory"},
        "again": {"step": "again", "code": "2"},
    }
    left = [step.name for step in pending(todo, mine, wanted, ["aga*"])]
    assert left == ["again", "new", "lost", "old"]


def test_a_row_is_of_its_settings_code_and_packages(benchmark_modules):
    rows, Step = benchmark_modules("chips.rows"), benchmark_modules("chips.steps").Step
    own = rows.identity(Step("decode/tiny/4", "decode", {"slots": 4}, 60), "a GPU")
    assert rows.holds(own | {"result": {}}, own) and rows.holds(own | {"failed": "out of memory"}, own)
    for name in own:
        assert not rows.holds(own | {name: "other"}, own)
    assert rows.holds(own | {"failed": "", "needs": "no_such_package.part"}, own)
    assert not rows.holds(own | {"failed": "", "needs": "json.decoder"}, own)
    kinds = ("decode", {}), ("train", {"system": "areax"}), ("train", {"system": "transformers"}), ("smoke", {})
    assert len({rows.identity(Step("x", kind, settings, 1), "a GPU")["code"] for kind, settings in kinds}) == 4


def test_a_checkout_need_not_be_installed():
    """A device's name in `areax plan` is found where no folder of the path has the package."""
    code = """if True:
        import pathlib, sys
        sys.path[:] = [sys.argv[1], *(one for one in sys.path if not pathlib.Path(one, "areax").exists())]
        from chips import process
        print(process.Device("gpu", "NVIDIA H100 80GB HBM3").chip, process.Device("gpu", "another").chip)"""
    done = subprocess.run([sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("h100 None\n", "")


def test_causes_are_one_line(benchmark_modules):
    cause = benchmark_modules("chips.process").cause
    for huge in (lambda: jnp.zeros(1 << 50), lambda: np.zeros(1 << 58)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            huge()
        assert cause(raised.value) == "out of memory"
    assert cause(ValueError("one\n  two")) == "ValueError: one two"


def test_a_row_takes_the_place_of_its_step_and_device(benchmark_modules):
    place = benchmark_modules("chips.rows").place
    found = []
    for n, (step, device) in enumerate([("d/16", "b"), ("d/128", "a"), ("d/16", "a"), ("d/128", "a"), ("smoke", "a")]):
        found = place(found, row(step, device, n=n))
    assert [one["n"] for one in found] == [2, 3, 4, 0]


def test_a_file_is_written_whole_or_not_at_all(benchmark_modules, tmp_path, monkeypatch):
    rows = benchmark_modules("chips.rows")
    rows.write(tmp_path, [row()], "page")
    before = (tmp_path / "chips.json").read_text()
    assert rows.read(tmp_path) == [row()] and rows.read(tmp_path / "nowhere") == []

    def broken(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space left"):
        rows.write(tmp_path, [], "other page")
    assert (tmp_path / "chips.json").read_text() == before and (tmp_path / "CHIPS.md").read_text() == "page"
    for damaged in (before[:-9].encode(), b"", b"\xff", b"null", b"{}", b"[1]", b'[{"step": "smoke"}]'):
        (tmp_path / "chips.json").write_bytes(damaged)
        with pytest.raises(ValueError, match="chips.json: damaged: .*; restore it"):
            rows.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run([*COMMAND, "--tiny", "--out", str(tmp_path / "file")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("chip.py: ") and done.stderr.count("\n") == 1


def test_the_page_shows_figures_failures_and_nothing_that_was_not_measured(benchmark_modules):
    page = benchmark_modules("chips.page")
    assert "|" not in page.page([])
    result = {"tokens_per_s": 12345.6, "token_s": 0.0047, "engine_bytes": 2e9, "peak_bytes": None, "first_s": 20.0}
    smoke = {"passed": 3, "failed": 1, "skipped": 2, "failures": [{"test": "tests/x.py::y", "says": "too far"}]}
    text = page.page([
        row(result=result), row("decode/tiny/8", failed="out of memory"),
        row("smoke", settings={"mark": "gpu"}, result=smoke, failed="not finished after 9 s"),
    ])  # fmt: skip
    assert "| a GPU | tiny | bfloat16 | 4 | 8 | 16 | 12,346 | 4.70 | 2.0 |  | 20.0 |  | 2026-01-01 | 01234567 |" in text
    assert "| a GPU | tiny | bfloat16 | 4 | 8 | 16 |  |  |  |  |  | out of memory | 2026-01-01 | 01234567 |" in text
    assert "| a GPU | gpu | 4 | 3 | 1 | 2 | not finished after 9 s | 2026-01-01 | 01234567 |" in text
    assert "- a GPU: `tests/x.py::y`: too far\n" in text and "Training" not in text
    assert page.line(row(failed="out of memory")) == "out of memory"


def test_rows_in_the_tree_are_of_accelerators(benchmark_modules):
    found = benchmark_modules("chips.rows").read(BENCHMARKS)
    assert all(one["device"] != "cpu" and "tiny" not in one["step"] for one in found)


def run(*words, **environ):
    return subprocess.run([*COMMAND, *words], env=os.environ | environ, capture_output=True, text=True)


@pytest.mark.slow
def test_without_an_accelerator_nothing_runs(tmp_path):
    done = run("--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "out").exists()
    assert done.stderr == (
        "chip.py: found cpu, no accelerator; nothing to run (--tiny runs tiny models here)\n"
    )  # fmt: skip
    done = run("--tiny", "--out", str(tmp_path / "out"), "--redo", "train/*", "dekode/*")
    assert (done.returncode, done.stderr) == (1, "chip.py: --redo must name steps, got dekode/*; --help lists them\n")


def ended_at(step, number, out, scratch):
    """Signals a call once a step has begun in a process of its own; returns its exit code when all of its processes are
    gone."""
    scratch.mkdir(exist_ok=True)
    words = [*COMMAND, "--tiny", "--budget", "3000", "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)}) as call:
        assert any(f"] {step}, at most" in line for line in call.stdout)
        while not mentioned(str(scratch)):
            time.sleep(0.01)
        call.send_signal(number)
    deadline = time.monotonic() + 60
    while mentioned(str(scratch)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return call.returncode


def mentioned(words):
    """Pids of processes whose command line contains these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] * (words.encode() in path.read_bytes())
        except OSError:  # it is gone
            pass
    return found


@pytest.mark.long
def test_calls_complete_the_table(tmp_path):
    """The first call is interrupted and the second killed within a step; the third completes, the fourth skips all."""
    out = tmp_path / "out"
    assert ended_at("smoke", signal.SIGINT, out, tmp_path / "scratch") == 130
    assert not (out / "chips.json").exists() and not list((tmp_path / "scratch").iterdir())
    assert ended_at("decode/tiny/4", signal.SIGKILL, out, tmp_path / "scratch") == -signal.SIGKILL
    first = json.loads((out / "chips.json").read_text())
    shared = [f"trie/tiny/{layout}" for layout in ("rows", "trie")]
    assert [one["step"] for one in first] == ["smoke", *(f"train/{case}" for case in TRAINED), *shared]

    done = run("--tiny", "--budget", "3000", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cpu: 6 of 10 steps are done\n[7/10] decode/tiny/4, at most 240 s\n    ")
    assert done.stdout.endswith(f"10 of 10 steps are done, in {out}\n")
    rows = {one["step"]: one for one in json.loads((out / "chips.json").read_text())}
    assert not any("failed" in one for one in rows.values()) and all(one["device"] == "cpu" for one in rows.values())
    assert all(rows[one["step"]] == one for one in first)
    smoke = rows.pop("smoke")["result"]
    assert (smoke["passed"], smoke["failed"], smoke["failures"]) == (0, 0, []) and smoke["skipped"] >= 10
    for name in (*(f"train/{case}" for case in TRAINED), "row/tiny/128"):
        result = rows.pop(name)["result"]
        assert math.isclose(result["loss"], math.log(512), rel_tol=0.05) and result["mfu"] > 0
        assert ("planned_peak_bytes" in result) == ("transformers" not in name)
    plain, trie = (rows.pop(name)["result"] for name in shared)
    assert (plain["trie_ratio"], trie["trie_ratio"]) == (1, 0.4)
    assert math.isclose(plain["grad_norm"], trie["grad_norm"], rel_tol=1e-4) and trie["grad_norm"] > 0
    assert rows.pop("decode/tiny/4")["result"]["engine_bytes"] > 0
    grpo, offload = rows.pop("grpo/tiny/small")["result"], rows.pop("offload/tiny")["result"]
    assert grpo["steps"] == 4 and grpo["max_logp_diff"] < 0.01 and 0 < grpo["update_share"] < 1 and rows == {}
    assert math.isclose(offload["loss"], math.log(512), rel_tol=0.05)
    assert all(one["planned_step_s"] > 0 and one["planned_peak_bytes"] > 0 for one in (grpo, offload))
    text = (out / "CHIPS.md").read_text()
    assert text.count("\n## ") == 7 and "| cpu | gpu | 0 | 0 | 0 |" in text

    before = [(out / name).read_bytes() for name in ("chips.json", "CHIPS.md")]
    done = run("--tiny", "--out", str(out))
    assert done.stdout == f"cpu: 10 of 10 steps are done\n10 of 10 steps are done, in {out}\n"
    assert before == [(out / name).read_bytes() for name in ("chips.json", "CHIPS.md")]


TRAINED = "tiny/64/areax/dots", "tiny/64/transformers/full", "tiny-moe/64/areax/dots"


def kill_second(words):
    """Kills the second process that appears with these words on its command line."""
    seen = []
    while len(seen) < 2:
        seen += [pid for pid in mentioned(words) if pid not in seen]
        time.sleep(0.01)
    os.kill(int(seen[1]), signal.SIGKILL)


@pytest.mark.long
def test_steps_that_fail_are_rows_and_the_next_are_done(benchmark_modules, tmp_path, capfd, monkeypatch):
    work, process, module = (
        benchmark_modules("chips.work").work,
        benchmark_modules("chips.process"),
        benchmark_modules("chips.steps"),
    )
    whole = next(step for step in module.steps(module.TINY, "gpu", peer=False) if step.kind == "decode")
    small, Step = whole.settings, module.Step
    todo = [
        Step("decode/raises", "decode", small | {"shape": "no such shape"}, 240),
        Step("decode/longer", "decode", small, 240, after="decode/raises"),
        Step("decode/killed", "decode", small, 240),
        Step("smoke", "smoke", {"mark": "gpu"}, 1),
        Step("decode/large", "decode", small, 10_000),
        Step("decode/whole", "decode", small, 240),
    ]
    device = process.Device("cpu", "cpu")
    killer = threading.Thread(target=kill_second, args=(str(tmp_path / "scratch"),))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    killer.start()
    work(todo, device, tmp_path, until=time.monotonic() + 3000)
    killer.join()
    rows = {one["step"]: one for one in json.loads((tmp_path / "chips.json").read_text())}
    assert {name: one.get("failed") for name, one in rows.items()} == {
        "decode/raises": "KeyError: 'no such shape'",
        "decode/killed": "ended by SIGKILL",
        "smoke": "not finished after 1 s",
        "decode/whole": None,
    }
    shown = capfd.readouterr().out
    assert "    | KeyError: 'no such shape'\n" in shown and "4 of 6 steps are done" in shown
    assert "1 skipped: a shorter row failed\n1 left for the next call" in shown
    work(todo, device, tmp_path, until=time.monotonic() + 3000, redo=["smoke"])
    again = capfd.readouterr().out
    assert "cpu: 3 of 6 steps are done" in again and again.count("at most") == 1 and "[4/6] smoke" in again
