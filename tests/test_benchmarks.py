"""The logic of the benchmark suite: alternating sides, result rows, the check against committed ratios; no timings."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from areax import models
from areax.core import param

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def row(case="train", model="S", peer="tunix", ratio=2.0, agreement=1.0):
    side = {"seconds": 1.0, "seconds_min": 0.9, "seconds_max": 1.1, "cpu_seconds": 1.5, "peak_mb": 100.0}
    return {
        "case": case, "model": model, "peer": peer, "ours": ratio, "theirs": 1.0, "unit": "tokens/s", "ratio": ratio,
        "ratio_interval": (0.95 * ratio, 1.05 * ratio),
        "cpu_ratio": ratio, "others": 0.0, "agreement": agreement, "ours_details": side, "theirs_details": side,
        "versions": {"jax": "0.10.2"}, "date": "2026-01-01", "machine": "a machine",
    }  # fmt: skip


def test_sides_alternate_in_separate_processes(benchmark_modules, tmp_path, monkeypatch):
    code = """
import os, pathlib
UNIT, PEERS = "things/s", {None: ("plain",)}
def work(model): return 6, None
def side(name):
    def once():
        with open(pathlib.Path(__file__).with_name("turns"), "a") as file: file.write(f"{name} {os.getpid()}\\n")
        return 40
    return once
def ours(folder, model): return side("ours")
def plain(folder, model): return side("plain")
"""
    (tmp_path / "turns_case.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = benchmark_modules("run").measure("turns_case", None, str(tmp_path), 3, ("plain",))
    turns = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
    # Two warm-up repetitions; short work runs ten times in a row.
    assert [name for name, _ in turns] == ["ours", "plain"] * 2 + (["ours"] * 10 + ["plain"] * 10) * 3
    assert len({pid for _, pid in turns}) == 2
    assert (found["case"], found["model"], found["peer"], found["agreement"]) == ("turns_case", None, "plain", 1.0)
    assert found["ours"] == 6 / found["ours_details"]["seconds"]
    assert found["ratio"] == pytest.approx(found["theirs_details"]["seconds"] / found["ours_details"]["seconds"])
    [alone] = benchmark_modules("run").measure("turns_case", None, str(tmp_path), 1, ())
    assert "theirs" not in alone and alone["ours"] > 0


def test_a_side_that_fails_ends_the_run(benchmark_modules, tmp_path, monkeypatch):
    (tmp_path / "failing_case.py").write_text('UNIT, PEERS = "x", {}\ndef work(model): return 1, None\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="failing_case .* ours ended with code 1"):
        benchmark_modules("run").measure("failing_case", None, str(tmp_path), 1, ())


def test_a_row_replaces_that_of_the_same_case_model_and_peer(benchmark_modules, tmp_path, monkeypatch):
    run = benchmark_modules("run")
    monkeypatch.setattr(run, "HERE", tmp_path)
    begin, end = run.TABLE
    (tmp_path / "RESULTS.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    beside = {"case": "async", "model": None, "peer": "sync", "ours": 1, "theirs": 1, "unit": "steps/s", "ratio": 1.0}
    old = [row("generate"), beside, row(), row(peer="transformers")]
    (tmp_path / "results.json").write_text(json.dumps(old))
    run.store([row("train", "M"), row(ratio=3.0)])
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(*run.name(r), r["ratio"]) for r in rows] == [
        ("train", "M", "tunix", 2.0),
        ("train", "S", "tunix", 3.0),
        ("train", "S", "transformers", 2.0),
        ("generate", "S", "tunix", 2.0),
        ("async", None, "sync", 1.0),
    ]
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith(f"before\n{begin}\nMeasured 2026-01-01 on a machine; jax 0.10.2: train M, train S")
    assert page.endswith(f"{end}\nafter\n") and "| train | S | tunix | 3.00 tokens/s | 1.00 | **3.00** |" in page
    assert "async" not in page and "old" not in page


def test_regressions_are_found(benchmark_modules, capsys):
    run = benchmark_modules("run")
    before = [row(ratio=2.0), row(peer="transformers", ratio=2.0), row("generate", ratio=2.0)]
    rows = [row(ratio=1.63), row(peer="transformers", ratio=1.6), row("generate", agreement=0.5), row("grpo")]
    assert list(run.fallen(rows, before).values()) == [
        "train S vs transformers: ratio 1.60, 20% below the committed 2.00",
        "generate S vs tunix: both sides must compute the same to 0.99, got 0.5000",
    ]
    assert "grpo S vs tunix: ratio 2.00, no committed one" in capsys.readouterr().out


def test_the_interval_covers_the_median_with_the_stated_probability(benchmark_modules):
    interval = benchmark_modules("run").interval
    assert interval([3, 1, 2]) == (1, 3) and interval(range(7)) == (0, 6) and interval(range(15)) == (3, 11)
    drawn = np.random.default_rng(0).exponential(size=(2000, 15))
    inside = np.mean([low <= np.log(2) <= high for low, high in map(interval, drawn)])
    assert 0.95 < inside < 0.98  # 0.965 by the binomial distribution


@pytest.mark.parametrize("second, code", [(1.9, 0), (1.5, 1)])
def test_regressions_are_measured_again(benchmark_modules, monkeypatch, capsys, second, code):
    run = benchmark_modules("run")
    monkeypatch.setattr(run, "committed", lambda: [row(), row("generate")])
    asked = []

    def measured(pairs):
        asked.append(list(pairs))
        return [
            row(case, model, ratio=[1.0, second][len(asked) - 1] if case == "train" else 2.0) for case, model in pairs
        ]

    monkeypatch.setattr(run, "measured", measured)
    assert run.check([("generate", "S"), ("train", "S")]) == code
    assert asked == [[("generate", "S"), ("train", "S")], [("train", "S")]]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("train S vs tunix: ratio 1.50" if code else "no ratio fell")


def test_committed_rows_are_of_known_cases(benchmark_modules):
    run = benchmark_modules("run")
    rows = json.loads((BENCHMARKS / "results.json").read_text())
    assert len({run.name(r) for r in rows}) == len(rows)
    assert {r["case"] for r in rows} <= {
        *run.CASES,
        "async",
        "delta",
        "pause",
        "long_rows",
        "borders",
        "quantised",
        "learning",
        "learning_real",
        "real_weights",
        "recurrent",
    }


@pytest.mark.parametrize(
    "given, says",
    [
        (["tarin"], "a case must be one of train, "),
        (["train/L"], "a case must be one of train/M, train/S, train/MoE, train/R, got train/L"),
        (["*/L*"], "a case must be one of train, "),
        (["--quick", "--check"], "--check: not allowed with argument --quick"),
        (["--qiuck"], "unrecognized arguments: --qiuck"),
    ],
)
def test_a_wrong_command_line_is_an_error(benchmark_modules, given, says, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark_modules("run").main(given)
    assert says in f"{ended.value} {capsys.readouterr().err}"


def test_a_case_includes_all_of_its_models(benchmark_modules):
    pairs_of = benchmark_modules("run").pairs_of
    assert pairs_of(["train/S", "push"]) == [("train", "S"), ("push", None)]
    assert pairs_of(["train"]) == [("train", "M"), ("train", "S"), ("train", "MoE"), ("train", "R")]


def test_a_real_model_is_measured_where_it_is_selected(benchmark_modules):
    pairs_of = benchmark_modules("run").pairs_of
    real = pairs_of(["*/R*"])
    assert {("sft_32", "R"), ("generate_1", "R-int8")} < set(real) and all(model[0] == "R" for _, model in real)
    assert pairs_of(["generate_1", "*_1/R"]) == [("generate_1", model) for model in ("R", "R-bf16", "R-int8")]
    assert not set(real) & set(pairs_of([])) and ("train", "S") in pairs_of([])


def test_a_side_counts_the_processes_that_it_started(benchmark_modules):
    side = benchmark_modules("side")
    before, others = side.cpu(), side.started()  # those of earlier tests
    program = "x = b'x' * 50_000_000; sum(range(20_000_000)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert {*side.started()} - {*others} == {child.pid}
        running = side.cpu() - before
        assert running > 0.1
        assert side.resident([child.pid]) > 45 > side.resident([]) == 0
    assert {*side.started()} <= {*others} and side.cpu() - before >= running  # of those that ended, too


def test_every_case_has_a_side_for_each_peer(benchmark_modules):
    run, sizes, side = benchmark_modules("run"), benchmark_modules("sizes"), benchmark_modules("side")
    for case in run.CASES:
        module = benchmark_modules(case)
        for model, peers in module.PEERS.items():
            assert model in run.REPETITIONS and (model or module.SOURCE) in sizes.HF
            assert all(callable(getattr(module, name)) and name in side.PACKAGES for name in ("ours", *peers))
            units, flops = module.work(model)
            assert units > 0 and (flops is None or flops >= 0)


def test_both_environments_have_the_same_versions():
    pins = lambda path: dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s#]+)", path.read_text(), re.M))
    ours, theirs = pins(ROOT / "constraints.txt"), pins(BENCHMARKS / "requirements.txt")
    assert {name: version for name, version in theirs.items() if name in ours} == {
        name: ours[name] for name in ("flax", "jax", "numpy", "optax", "orbax-checkpoint")
    }


@pytest.mark.parametrize("name, millions", [("S", 0.85), ("M", 29.4), ("MoE", 13.65), ("R", 134.5)])
def test_models_have_the_stated_sizes(benchmark_modules, name, millions):
    sizes = benchmark_modules("sizes")
    table = models.table(models.config_from_hf(sizes.config(name)))
    leaves, _ = jax.tree_util.tree_flatten_with_path(param.abstract(table, "float32"))
    weights = {jax.tree_util.keystr(path): x.size for path, x in leaves}
    assert sum(weights.values()) / 1e6 == pytest.approx(millions, abs=0.05)
    share = lambda key: 0 if "norm" in key else 2 / 16 if "expert" in key else 1  # of the weights that a token uses
    assert sizes.matmul_weights(name) == sum(share(key) * size for key, size in weights.items())


def test_lengths_are_lognormal(benchmark_modules):
    sizes = benchmark_modules("sizes")
    many = np.array(sizes.lognormal(200_000, mean=180, sigma=0.8, longest=10**6, seed=1))
    assert many.mean() == pytest.approx(180, rel=0.01) and np.log(many).std() == pytest.approx(0.8, rel=0.01)
    cut = sizes.lognormal(1000, mean=180, sigma=0.8, longest=1024, seed=1)
    assert (
        max(cut) == 1024 and min(cut) >= 2 and cut == sizes.lognormal(1000, mean=180, sigma=0.8, longest=1024, seed=1)
    )
    lengths = np.array(benchmark_modules("varlen").LENGTHS)
    assert len(lengths) == 64 and (lengths.sum(), lengths.max()) == (11598, 727)
    padded = lambda x: 8 * x.reshape(8, 8).max(1).sum() / x.sum()
    assert (round(padded(lengths), 2), round(padded(np.sort(lengths)), 2)) == (2.48, 1.24)
    answers = np.array(benchmark_modules("continuous").LENGTHS)
    assert round(16 * answers.reshape(8, 16).max(1).sum() / answers.sum(), 2) == 3.01


def test_a_paced_loop_takes_one_step_per_call(benchmark_modules):
    peers, log = benchmark_modules("peers"), []

    def loop(pause):
        result = None
        for step in range(100):
            pause(result)
            log.append(step)
            result = step * 10

    once = peers.paced(loop)
    assert log == []
    assert [once(), once()] == [0, 10] and log == [0, 1]
    once.close()
    assert log == [0, 1]


def test_an_exception_in_a_paced_loop_is_raised(benchmark_modules):
    def loop(pause):
        pause()
        raise KeyError("broken")

    once = benchmark_modules("peers").paced(loop)
    with pytest.raises(KeyError, match="broken"):
        once()


def test_token_ids_round_trip_through_text(benchmark_modules):
    peers = benchmark_modules("peers")
    ids = [7, 0, 511]
    assert peers.Numbers(512).encode(peers.text(ids)) == ids
    tokens = peers.number_tokenizer(512)
    assert tokens.encode(peers.text(ids)) == ids and tokens.decode(ids, skip_special_tokens=True) == peers.text(ids)
    assert tokens.eos_token_id == peers.Numbers(512).eos_id() == 512
    assert tokens.pad_token_id == peers.Numbers(512).pad_id() == 513


@pytest.mark.wide
def test_ten_million_rows_need_no_memory_and_a_killed_run_goes_on_at_its_row(benchmark_modules, tmp_path):
    """Of which the rows alone would be 4 GB as dicts."""
    *runs, end = benchmark_modules("many_rows").main(tmp_path, 10_000_000)
    assert [run["code"] for run in runs] == [0, -signal.SIGKILL, 0] and runs[1]["steps"] < runs[2]["steps"] == 100
    assert all(run["end"]["peak"] < 1.0 for run in runs) and end["equal"]


@pytest.mark.wide
def test_reinforcement_learning_on_ten_million_rows_goes_on_at_its_prompt(benchmark_modules, tmp_path):
    """Of one file, and of a mixture of two."""
    lines = benchmark_modules("many_rows").main(tmp_path, 10_000_000, rl=True)
    for part in (lines[:5], lines[5:]):
        assert [run["code"] for run in part[:3]] == [0, -signal.SIGKILL, 0] and part[1]["steps"] < part[2][
            "steps"
        ] == 30
        assert all(run["end"]["peak"] < 1.5 for run in part[:3])
        assert all(order["each_once"] and order["no_others"] for order in part[3:])
        assert part[3]["taken_again"] == 0 < part[4]["taken_again"]
