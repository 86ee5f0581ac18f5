"""`areax inspect` and `areax diff`: what folders hold, and in what two of them differ."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_families

from areax import models
from areax.adapters import cli, hf, orbax, peft, safetensors
from areax.adapters.commands import diff, inspect
from areax.adapters.data import images
from areax.models import lora
from areax.recipes.shared import demo_vision


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("inspect") / "model")


def changed(model, path, change):
    """A copy of a model whose tensors `change` alters in place."""
    shutil.copytree(model, path)
    held = {name: np.array(x) for name, x in safetensors.read(model).items()}
    change(held)
    (path / "manifest.json").unlink()
    safetensors.write(path, held, held.values())
    return path


def test_a_checkpoint(model, capsys):
    report = inspect.inspect(model)
    assert json.loads(json.dumps(report)) == report
    assert report["kind"] == "checkpoint" and report["family"] == "qwen3" and report["version"] is None
    stored = safetensors.read(model)
    assert report["parameters"] == sum(x.size for x in stored.values()) and report["dtypes"] == ["float32"]
    assert report["bytes"] == 4 * report["parameters"] and report["files"] == 1 and report["quantised"] == "no"
    assert report["tokenizer"] and report["chat_template"] and report["tied"]
    assert (report["train"], report["lora"], report["serve"], report["tp"]) == ("yes", "yes", "yes", 2)
    assert report["images"] is None
    assert {"name": "model.layers.*.mlp.up_proj.weight", "dtype": "float32", "shape": [48, 32], "count": 2} in report[
        "tensors"
    ]
    assert sum(entry["count"] for entry in report["tensors"]) == len(stored) > 2 * len(report["tensors"]) - 4
    assert {entry["name"] for entry in inspect.inspect(model, tensors=True)["tensors"]} == stored.keys()
    assert cli.main(["inspect", str(model)]) == 0
    assert "  model.layers.*.mlp.up_proj.weight  float32 [48, 32] x 2\n" in capsys.readouterr().out
    assert cli.main(["inspect", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize("family, tp", [("qwen3_moe", 8), ("nemotron_h", 8), ("gemma2", 8)])
def test_how_far_a_model_can_be_split(family, tp, tmp_path):
    """Experts of a layer are listed once; a version of a policy without a tokenizer is not served."""
    config = tiny_families.config(family)
    hf.write_published(tmp_path, 3, config, tiny.weights(models.table(config), 0.2), "bfloat16")
    report = inspect.inspect(tmp_path / "3")
    assert report["version"] == 3 and report["family"] == family and report["dtypes"][0] == "bfloat16"
    assert "a server needs a tokenizer, got none of" in report["serve"] and report["tp"] is None
    assert inspect.largest_tp(config) == tp
    if family == "qwen3_moe":
        [gate] = [entry for entry in report["tensors"] if entry["name"].endswith("experts.*.gate_proj.weight")]
        assert gate["count"] == 8 * (config.layers - len(config.dense_layers))


@pytest.mark.slow
def test_whether_a_model_reads_images(tmp_path):
    model = tmp_path / "model"
    demo_vision.write(model, "a", side=24, seed=0)
    assert inspect.inspect(model)["images"] == "yes"
    (model / images.FILE).unlink()
    report = inspect.inspect(model)
    assert "needs preprocessor_config.json" in report["images"] and report["train"] == report["serve"] == "yes"
    options = json.loads((model / "config.json").read_text())
    options["vision_config"]["hidden_act"] = "relu"
    (model / "config.json").write_text(json.dumps(options))
    assert "hidden_act" in inspect.inspect(model)["images"]


def test_what_areax_cannot_use_is_described_with_the_reason(model, tmp_path):
    lacking = changed(model, tmp_path / "lacking", lambda held: held.pop("model.norm.weight"))
    report = inspect.inspect(lacking)
    assert "missing model.norm.weight" in report["train"] and "serve" not in report and report["family"] == "qwen3"
    options = json.loads((lacking / "config.json").read_text())
    (lacking / "config.json").write_text(json.dumps(options | {"model_type": "mamba"}))
    assert "mamba" in inspect.inspect(lacking)["train"] and inspect.inspect(lacking)["bytes"]
    for odd in (dict(text_config=5), dict(quantization_config=[5])):
        (lacking / "config.json").write_text(json.dumps(options | odd))
        assert inspect.inspect(lacking)["quantised"] == "no"
    with pytest.raises(ValueError, match="must be a checkpoint, adapters or a run"):
        inspect.inspect(tmp_path)


def test_names_do_not_control_the_terminal(model, tmp_path):
    named = changed(model, tmp_path / "named", lambda held: held.update({"a\x1b[2J\nb": np.ones(3, np.float32)}))
    shown = inspect.show(inspect.inspect(named))
    assert r"a\x1b[2J\nb" in shown and "\x1b" not in shown


def test_adapters_and_a_run(model, tmp_path):
    config, spec = hf.read_config(model), lora.Lora(rank=4, targets=("q", "v"))
    drawn = tiny.weights(lora.table(models.table(config), spec), 0.3)
    peft.save(tmp_path / "adapter", config, drawn, spec, base=str(model))
    report = inspect.inspect(tmp_path / "adapter")
    assert (report["kind"], report["rank"], report["targets"]) == ("adapters", 4, ["q_proj", "v_proj"])
    assert report["base"] == str(model) and report["merge"] == "yes" and report["version"] is None
    peft.save(tmp_path / "adapter", config, drawn, spec, base="somewhere/else")
    assert inspect.inspect(tmp_path / "adapter")["merge"] == "its base is not here"
    about = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/manifest.json").unlink()
    for changes, targets in (
        (dict(target_modules=5), ["5"]),
        (dict(target_modules="all-linear"), ["all-linear"]),
        (dict(target_parameters=[1]), ["1", "q_proj", "v_proj"]),
        (dict(target_parameters=5, target_modules={"a": 1}), ["5", "{'a': 1}"]),
    ):
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(about | changes))
        assert inspect.inspect(tmp_path / "adapter")["targets"] == targets
    run = tmp_path / "run"
    with orbax.open_store(run / "state") as store:
        store.save(4, {"w": jnp.ones(3)}, {"recipe": "sft"})
    (run / "config.json").write_text(json.dumps({"model": str(model), "training": {"lora": {"rank": 4}}}))
    report = inspect.inspect(run / "state")
    assert (report["kind"], report["states"], report["trains"]) == ("run", [4], "adapters of rank 4")
    assert report["recipe"] == "sft" and report["bytes"] > 12
    assert report["steps"] == 4 and not report["complete"] and report["exports"] == []


def test_equal_checkpoints(model, tmp_path, capsys):
    again = changed(model, tmp_path / "again", lambda held: None)
    assert cli.main(["diff", str(model), str(again)]) == 0
    assert capsys.readouterr().out == f"equal: yes\ntensors: {len(safetensors.read(model))} in both\n"


def test_differences_are_measured(model, tmp_path, capsys):
    name, other, gone = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    before = {key: np.array(x) for key, x in safetensors.read(model).items()}

    def change(held):
        held[name][1, 2] += 3
        held[name][0, 0] -= 4
        held[other] = held[other].astype(ml_dtypes.bfloat16)
        held["more"] = held.pop(gone)
        held["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan

    path = changed(model, tmp_path / "other", change)
    options = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(options | {"hidden_act": "gelu", "transformers_version": "9"}))
    report = diff.diff(model, path)
    assert json.loads(json.dumps(report, allow_nan=False)) == report and not report["equal"]
    assert report["missing"] == [gone] and report["additional"] == ["more"]
    assert report["config"] == {"hidden_act": ["silu", "gelu"]}
    found = {entry.pop("name"): entry for entry in report["changed"]}
    assert [*found] == ["model.layers.1.mlp.up_proj.weight", name, other]
    x, y = before[name], before[other]
    np.testing.assert_allclose(found[name]["max"], 4, rtol=1e-6)
    np.testing.assert_allclose(found[name]["relative"], 5 / np.linalg.norm(x), rtol=1e-6)
    assert found[name]["share"] == 2 / x.size
    rounded = y.astype(ml_dtypes.bfloat16).astype(np.float64) - y
    np.testing.assert_allclose(found[other]["relative"], np.linalg.norm(rounded) / np.linalg.norm(y), rtol=1e-6)
    assert found[other]["dtypes"] == ["float32", "bfloat16"]
    odd = found["model.layers.1.mlp.up_proj.weight"]
    assert odd["max"] is None and odd["share"] == 1 / y.size
    assert cli.main(["diff", str(model), str(path)]) == 1
    out = capsys.readouterr().out
    assert "config: hidden_act 'silu' -> 'gelu'\n" in out and f"changed: {other}  float32 -> bfloat16, max " in out


def test_pieces_of_a_tensor_add_up(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 7, 5)).astype(np.float32)
    whole = diff.compare(x, y)
    monkeypatch.setattr(diff, "NUMBERS", 4)
    for name, value in diff.compare(x, y).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-12)
    np.testing.assert_allclose(whole["relative"], np.linalg.norm(x - y) / np.linalg.norm(x), rtol=1e-6)
    assert diff.compare(x, y[:3]) == {
        "shapes": [[7, 5], [3, 5]], "max": None, "relative": None, "share": None
    }  # fmt: skip
    nan = np.array([np.nan, -0.0, np.inf])
    assert diff.compare(nan, np.array([-np.nan, 0.0, np.inf])) is None
