"""`--rows auto`: the rows of a microbatch by the plan, on the devices that are there, and fewer if these say so."""

import io
import itertools
import json
import math
from contextlib import redirect_stdout
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from areax.adapters import cli, hf
from areax.core import losses
from areax.core.optim import Optimizer
from areax.models import Run
from areax.parallel.mesh import Layout
from areax.parallel.planner.chips import CHIPS
from areax.recipes import sft
from areax.recipes.shared import common, microbatch, trainer
from areax.recipes.shared.rl_options import Training
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Completion, sampled

GB = 10**9
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: None)
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("microbatch")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 60)))
    (path / "large").mkdir()
    (path / "large/config.json").write_text(json.dumps(QWEN3))
    return path


def holding(device, gigabytes):
    return SimpleNamespace(**vars(device) | {"memory_stats": lambda: {"bytes_limit": gigabytes * GB}})


def test_a_device_is_known_by_its_kind_and_its_memory():
    assert microbatch.here(jax.local_devices()[0]) is None
    assert microbatch.here(H100) == CHIPS["h100"]
    assert microbatch.here(holding(H100, 47)).memory == pytest.approx(50 * GB)
    unknown = holding(SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 9090"), 47)
    assert microbatch.here(unknown).memory == pytest.approx(50 * GB)
    kinds = {"NVIDIA A100-SXM4-80GB": "a100", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
             "TPU v6 lite": "v6e", "TPU v4": "v4", "AMD Instinct MI300X": "mi300", "NVIDIA B300": "b300"}  # fmt: skip
    for kind, name in kinds.items():
        assert microbatch.here(SimpleNamespace(**vars(H100) | {"device_kind": kind})) == CHIPS[name]


@pytest.mark.parametrize(
    ("length", "layout", "wanted"),
    [
        (128, Layout(), 8), (1024, Layout(), 2), (700, Layout(), 2), (4096, Layout(), 2), (512, Layout(), 4),
        (256, Layout(dp=2, fsdp=3), 12), (1024, Layout(fsdp=16), 16),
    ],
)  # fmt: skip
def test_a_cpu_gets_rows_of_2048_positions_or_what_its_mesh_divides(place, length, layout, wanted):
    config = sft.Config(model=str(place / "model"), data="", length=length, mesh=layout)
    assert config.rows == "auto" and microbatch.rows(config) == wanted
    assert microbatch.rows(sft.Config(model="", data="", rows=5)) == 5


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("gigabytes", "batch", "layout"), [(24, 64, Layout()), (20, 512, Layout(fsdp=8))])
def test_the_fewest_rows_that_are_as_fast_as_any_that_fit(place, monkeypatch, gigabytes, batch, layout):
    """By the plans of every number of rows, at the command line."""
    monkeypatch.setattr(microbatch.jax, "local_devices", lambda: [holding(H100, gigabytes)])
    config = sft.Config(
        model=str(place / "large"), data="", length=2048, batch=batch, mesh=layout, run=Run(dtype="bfloat16")
    )
    chosen, unit = microbatch.rows(config), layout.fsdp
    monkeypatch.setitem(CHIPS, "h100", microbatch.here(holding(H100, gigabytes)))

    def planned(rows):
        with redirect_stdout(io.StringIO()) as out:
            cli.main([
                "plan", "sft", "--model", config.model, "--length", "2048", "--batch", str(batch), "--json",
                "--mesh.fsdp", str(unit), "--rows", str(rows),
            ])  # fmt: skip
        return json.loads(out.getvalue())

    plans = {rows: planned(rows) for rows in (unit << n for n in range(int(math.log2(batch // unit)) + 1))}
    seconds = {rows: plan["figures"]["step_s"]["value"] for rows, plan in plans.items() if plan["fits"]}
    near = [rows for rows, each in seconds.items() if 0.95 * each <= min(seconds.values())]
    assert chosen == min(near) and (gigabytes > 24 or len(seconds) < len(plans))
    assert planned("auto")["rows"] == chosen


@pytest.mark.slow
def test_what_the_compiled_step_needs_decides_before_the_first_step(place, monkeypatch, capsys):
    """Eight rows do not fit, by XLA's own numbers; four do, and train as `--rows 4`."""
    needed = []
    real = microbatch.room

    def room(own, batch):
        monkeypatch.setattr(microbatch, "_memory_stats", lambda: [{"bytes_limit": GB, "bytes_in_use": 0}])
        found = real(own, batch)
        needed.append(found.needed)
        return microbatch.Room(found.needed, needed[0] - 1)

    monkeypatch.setattr(microbatch, "room", room)
    options = dict(
        model=str(place / "model"), data=str(place / "rows.jsonl"), steps=2, batch=60, length=32,
        optim=Optimizer(lr=1e-2),
    )  # fmt: skip
    auto = sft.main(sft.Config(**options, out=str(place / "auto")))
    said = [line for line in capsys.readouterr().err.splitlines() if "--rows auto" in line]
    assert len(said) == 1 and "8 rows of 32 tokens needs" in said[0] and said[0].endswith("going on with 4")
    assert len(needed) == 2 and needed[1] < 0.7 * needed[0]
    monkeypatch.setattr(microbatch, "room", real)
    four = sft.main(sft.Config(**options, rows=4, out=str(place / "four")))
    assert auto["loss"] == four["loss"]
    for a, b in zip(*(jax.tree.leaves(hf.load(place / out / "model")[1]) for out in ("auto", "four")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_a_step_that_does_not_fit_with_any_rows_is_one_line(place, monkeypatch):
    monkeypatch.setattr(microbatch, "_memory_stats", lambda: [{"bytes_limit": GB, "bytes_in_use": GB}])
    options = dict(model=str(place / "model"), data=str(place / "rows.jsonl"), steps=1, batch=8, length=32)
    with pytest.raises(ValueError, match=r"--rows auto: a step of 1 rows of 32 tokens needs .* GB, 0\.00 GB are left"):
        sft.main(sft.Config(**options, out=str(place / "none")))


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("trie", ["off", "auto"])
def test_reinforcement_learning_goes_on_with_fewer_rows(place, monkeypatch, trie):
    """The same metrics and weights as with these rows from the start."""
    groups = [
        [sampled([1, 2, 3 + g], Completion([4 + i % 5, 5, 6], [-1.0] * 3, [0] * 3, "stop"), temperature=1.0,
                 reward=float(i % 2), group=g, prompt=g, sample=i, rollout=4 * g + i) for i in range(4)]
        for g in range(12)
    ]  # fmt: skip
    options = dict(length=12, objective=losses.GRPO(), optim=Optimizer(lr=1e-2), trie=trie)
    build = lambda rows, given: trainer.build(
        Training(**options, rows=given), rows=rows, model=str(place / "model"), steps=2
    )
    rooms = iter([microbatch.Room(2, 1), microbatch.Room(1, 2)])
    monkeypatch.setattr(microbatch, "room", lambda own, batch: next(rooms))
    auto, four = build(8, "auto"), build(4, 4)
    reports = [trainer.train_on_batch(each, groups) for each in (auto, four, auto, four)]
    assert auto.limit.rows == 4 and auto.version == four.version == 2
    for a, b in (reports[:2], reports[2:]):
        assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] > 0
        assert trie == "off" or a["trie_ratio"] == b["trie_ratio"] < 1
    for a, b in zip(*(jax.tree.leaves(each.policy.state.params) for each in (auto, four)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_runs_take_the_memory_of_their_gpus_unless_told_otherwise(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    environ = common.os.environ
    common.take_devices()
    assert environ.pop("XLA_CLIENT_MEM_FRACTION") == common.SHARE
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    common.take_devices()
    assert "XLA_CLIENT_MEM_FRACTION" not in environ
