"""`areax convert RUN`: what a run exported, made again from the state that it saved, file by file."""

import filecmp
import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny

from areax import models
from areax.adapters import cli, safetensors
from areax.core import losses
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes import preference, sft
from areax.recipes.shared import run_export
from areax.rollout.tasks import arithmetic

FAST = Optimizer(lr=1e-2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    model = tiny.model(path / "model", dtype="bfloat16")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, **settings}))
    rows = itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 40)
    tiny.rows(path / "rows.jsonl", [{**row, "chosen": row["completion"], "rejected": "0"} for row in rows])
    return path


def config(place, out, kind=sft.Config, **changes):
    base = kind(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(out), steps=2, batch=4, length=32, rows=2,
        optim=FAST, save_every=1,
    )  # fmt: skip
    return replace(base, **changes)


def same(one, other):
    """Whether two folders have the same files, byte by byte."""
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    different = [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
    assert not different, different


@pytest.fixture(scope="module")
def run(place):
    """A run that trained adapters over a base in 4 bits, and has its last two states."""
    sft.main(config(place, place / "run", lora=Lora(rank=2, alpha=3.0, base="nf4"), steps=3))
    return place / "run"


def bad(capsys, *words):
    assert cli.main(["convert", *map(str, words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


@pytest.mark.slow
def test_any_kept_step_is_what_the_run_exported_then(place, tmp_path, capsys):
    """A wrapper with a vision tower, and an average of the weights, at its end and a step before."""
    model = tiny.wrapped(tiny.model(tmp_path / "model"))
    changes = dict(model=str(model), optim=replace(FAST, ema=0.5))
    sft.main(config(place, tmp_path / "run", steps=1, **changes))
    shutil.copytree(tmp_path / "run/model", tmp_path / "first")
    sft.main(config(place, tmp_path / "run", **changes))
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "newest")]) == 0
    assert "step: 2" in capsys.readouterr().out
    assert cli.main(["convert", str(tmp_path / "run/state"), str(tmp_path / "one"), "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    same(tmp_path / "newest", tmp_path / "run/model")
    same(tmp_path / "one", tmp_path / "first")
    one, newest = (safetensors.read(tmp_path / name) for name in ("one", "newest"))
    assert any(not np.array_equal(one[name], newest[name]) for name in one)


@pytest.mark.slow
def test_another_model_in_the_place_of_the_first_is_refused(place, run, tmp_path, capsys):
    """Of the same architecture, or with another setting; a copy of the former is as good."""
    shutil.copytree(run, other := tmp_path / "run")
    model = shutil.copytree(place / "model", tmp_path / "model")
    options = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(options | {"model": str(model)}))
    assert cli.main(["convert", str(other), str(tmp_path / "merged"), "--merge"]) == 0
    same(tmp_path / "merged", run / "model")
    tiny.model(tmp_path / "seed", dtype="bfloat16", seed=1)
    shutil.copy(tmp_path / "seed/model.safetensors", model)
    capsys.readouterr()
    for words in ((), ("--base", model)):
        said = bad(capsys, other, tmp_path / "new", "--merge", *words)
        assert f"{other}: weights of {model} must be as when the run began, with hash " in said
        assert f"; name a copy of the former {place}/model with --base" in said
    (model / "generation_config.json").write_text("{}")
    assert f"generation_config.json of {model} must be" in bad(capsys, other, tmp_path / "new")
    assert cli.main(["convert", str(other), str(tmp_path / "named"), "--merge", "--base", str(place / "model")]) == 0
    same(tmp_path / "named", run / "model")


@pytest.mark.slow
def test_options_of_adapters_must_be_those_that_they_were_trained_with(run, tmp_path, capsys):
    """The run's config.json may have been edited since."""
    shutil.copytree(run, other := tmp_path / "run")
    options = json.loads((other / "config.json").read_text())
    for words, changes in (
        ("lora.alpha must be the run's, 3.0, with which its adapters were trained, got 6.0; put", {"alpha": 6.0}),
        ("lora.rslora must be the run's, false, with", {"rslora": True}),
        ("lora.targets must be the run's, q k v", {"targets": ["q"]}),
        ("lora: --alpha must be a number, got 'x'; put", {"alpha": "x"}),
        ("lora: --targets must be a tuple of texts, got 5; put", {"targets": 5}),
        ("lora must have options of this version of areax, got gamma", {"gamma": 5}),
    ):
        (other / "config.json").write_text(json.dumps(options | {"lora": options["lora"] | changes}))
        assert f"{other}/config.json: {words}" in bad(capsys, other, tmp_path / "new")
    (other / "config.json").write_text(json.dumps(options | {"lora": options["lora"] | {"alpha": 3}}))
    assert cli.main(["convert", str(other), str(tmp_path / "same")]) == 0
    inside = other / "state" / "new"
    assert f"{inside} is inside the run's states" in bad(capsys, other, inside)
    assert not (tmp_path / "new").exists() and not inside.exists()


@pytest.mark.long
def test_adapters_are_written_as_such_or_merged(run, tmp_path):
    for words, name in (([], "adapter"), (["--merge"], "model")):
        assert cli.main(["convert", str(run), str(tmp_path / name), *words]) == 0
        same(tmp_path / name, run / name)
    assert cli.main(["convert", str(run), str(tmp_path / "two"), "--step", "2", "--merge", "--dtype", "float32"]) == 0
    two, three = (safetensors.read(path) for path in (tmp_path / "two", run / "model"))
    assert all(x.dtype == np.float32 for x in two.values())
    assert any(np.abs(x - three[name].astype(np.float32)).max() > 1e-3 for name, x in two.items())


@pytest.mark.slow
def test_what_cannot_be_written_is_said_in_one_line(place, run, tmp_path, capsys):
    assert "there is no state of step 1; kept are those of 2, 3" in bad(capsys, run, tmp_path / "new", "--step", 1)
    assert "adapters are written in float32 in one file, got --dtype bfloat16; merge" in bad(
        capsys, run, tmp_path / "new", "--dtype", "bfloat16"
    )
    assert "--step needs a run's directory" in bad(capsys, place / "model", tmp_path / "new", "--step", 1)
    assert "--extract needs a checkpoint" in bad(capsys, run, tmp_path / "new", "--extract", 4)
    assert "already exists" in bad(capsys, run, run)
    other = tmp_path / "run"
    shutil.copytree(run, other)
    options = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(options | {"model": str(tmp_path / "gone")}))
    assert f"started from, {tmp_path}/gone (" in bad(capsys, other, tmp_path / "new")
    tiny.model(tmp_path / "wide", hidden_size=48)
    said = bad(capsys, other, tmp_path / "new", "--base", tmp_path / "wide")
    assert f"config.json of {tmp_path}/wide must be as when the run began" in said
    assert cli.main(["convert", str(other), str(tmp_path / "named"), "--base", str(place / "model"), "--merge"]) == 0
    same(tmp_path / "named", run / "model")
    for file in (other / "state/3").rglob("*"):
        if file.is_file() and file.name != "hashes.json":
            file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "is damaged; kept are those of 2, 3, so choose another" in bad(capsys, other, tmp_path / "new")
    shutil.rmtree(other / "state")
    (other / "state").mkdir()
    assert "a saved state is needed, got none" in bad(capsys, other, tmp_path / "new")
    assert not (tmp_path / "new").exists() and not [*tmp_path.glob(".*")]


NARROW = dict(state="float8", weights="bfloat16")
RUNS = {
    "random": (sft.Config, dict(init="random")),
    "adapters of random weights": (sft.Config, dict(init="random", lora=Lora(rank=2))),
    "offloaded": (sft.Config, dict(optim=replace(FAST, offload=True), run=models.Run(dtype="bfloat16"))),
    "narrow": (sft.Config, dict(optim=replace(FAST, **NARROW))),
    "on a mesh": (sft.Config, dict(mesh=Layout(fsdp=2, tp=2))),
    "adapters on a mesh": (sft.Config, dict(mesh=Layout(fsdp=2, tp=2), lora=Lora(rank=2))),
    "DoRA adapters": (sft.Config, dict(mesh=Layout(fsdp=2, tp=2), lora=Lora(rank=2, base="nf4", dora=True))),
    "averaged adapters": (preference.Config, dict(lora=Lora(rank=2), optim=replace(FAST, ema=0.5))),
    "reward model": (preference.Config, dict(objective=losses.RewardModel())),
}


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_every_kind(name, place, tmp_path):
    kind, changes = RUNS[name]
    made = config(place, tmp_path / "run", kind, steps=1, **changes)
    (preference if kind is preference.Config else sft).main(made)
    for part in ("model", "adapter") if made.lora.rank else ("model",):
        merge = part == "model" and made.lora.rank > 0
        run_export.convert(tmp_path / "run", tmp_path / part, merge=merge)
        same(tmp_path / part, tmp_path / "run" / part)
    settings = json.loads((tmp_path / "run/model/generation_config.json").read_text())
    assert (settings["temperature"], settings["top_k"]) == (0.6, 20) and settings["eos_token_id"]
