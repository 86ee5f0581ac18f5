"""`areax check` reports what is wrong with a checkpoint, `areax convert` writes a converted copy."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
import tiny_families

from areax import models
from areax.adapters import cli, hf, safetensors, tokenizer
from areax.adapters.commands import check, convert
from areax.adapters.hf import reading


@pytest.fixture
def saved(tmp_path):
    config = models.config_from_hf(
        dict(
            model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, head_dim=8, initializer_range=0.4, tie_word_embeddings=True,
        )
    )  # fmt: skip
    params = tiny.weights(models.table(config), 0.4)
    return hf.save(tmp_path / "model", config, params, tokenizer=tokenizer.character("abc", multiple=64))


def test_a_good_checkpoint(saved):
    report = check.check(saved, "torch", gradients=True)
    assert json.loads(json.dumps(report)) == report
    assert report["ok"] and report["family"] == "llama" and report["manifest"] == "verified"
    assert report["bytes"] == 4 * report["parameters"] and report["dtypes"] == ["float32"]
    assert report["logit_std"] > 1 and report["max_logit_diff"] < 1e-4 and report["max_gradient_diff"] < 1e-4


NO_ROPE = dict(attention_bias=True, no_rope_layers=[1, 0], pad_token_id=0, bos_token_id=1)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("family", "options"), [("mixtral", {}), ("gemma2", {}), ("smollm3", NO_ROPE)])
def test_gradients_that_are_not_in_torch_as_in_the_files(family, options, tmp_path):
    """Other names than the checkpoint's, a padding token whose embedding has none, keys' biases without positions."""
    config = tiny_families.config(family, **options)
    hf.save(tmp_path, config, tiny.weights(models.table(config), 0.3))
    report = check.check(tmp_path, "torch", gradients=True)
    assert report["ok"] and report["max_gradient_diff"] < 1e-4
    assert report["worst_gradient"] in safetensors.read(tmp_path)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family, bias", [("qwen2", True), ("gemma2", False)])
def test_the_scores_of_a_classifier(family, bias, tmp_path, capsys):
    config = tiny_families.config(family, pad_token_id=0)
    config = dataclasses.replace(config, score_head=models.ScoreHead(3, bias=bias), output_head=config.tied)
    params = tiny.weights(models.table(config), 0.3)
    hf.save(tmp_path, config, params)
    report = check.check(tmp_path, "torch", gradients=True)
    assert report["ok"] and 0 < report["max_logit_diff"] < 1e-4 and 0 < report["max_gradient_diff"] < 1e-4
    assert report["logit_std"] > 0.5
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "labels: LABEL_0, LABEL_1, LABEL_2\n" in capsys.readouterr().out


def test_tensors_with_non_finite_values_are_named(saved):
    tensors = {name: np.array(x) for name, x in safetensors.read(saved).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    safetensors.write(saved, tensors, tensors.values())
    (saved / "manifest.json").unlink()
    report = check.check(saved)
    assert not report["ok"] and report["nonfinite"] == ["model.layers.1.mlp.up_proj.weight"]
    assert report["manifest"] == "none"


@pytest.mark.slow
def test_a_model_with_different_outputs_fails_the_check(saved, monkeypatch):
    """A config.json that we misread and transformers does not: here, with another RoPE base."""
    honest = hf.read_config

    def misread(path):
        return models.config_from_hf(json.loads(honest(path).source) | {"rope_parameters": {"rope_theta": 3.0}})

    monkeypatch.setattr(hf, "read_config", misread)
    monkeypatch.setattr(reading, "read_config", misread)
    report = check.check(saved, "torch", gradients=True)
    assert not report["ok"] and report["max_logit_diff"] > 1e-2 and report["max_gradient_diff"] > 1e-2


def test_bad_input_is_refused(saved):
    with pytest.raises(ValueError, match="against must be 'torch' or left out, got 'flax'"):
        check.check(saved, "flax")
    with pytest.raises(ValueError, match="say which, --against torch"):
        check.check(saved, gradients=True)
    with pytest.raises(ValueError, match="nowhere"):
        check.check(saved / "nowhere")
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="does not match manifest.json"):
        check.check(saved)


def test_convert(saved, tmp_path):
    report = convert.convert(saved, tmp_path / "half", "bfloat16")
    assert report["dtypes"] == ["bfloat16"] and report["family"] == "llama"
    assert report["bytes"] == sum(x.nbytes for x in safetensors.read(tmp_path / "half").values())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert tokenizer.load(tmp_path / "half").encode("abc") == tokenizer.load(saved).encode("abc")
    for name, x in safetensors.read(saved).items():
        assert np.array_equal(safetensors.read(tmp_path / "half")[name], x.astype("bfloat16"))
    convert.convert(tmp_path / "half", tmp_path / "again")
    same = {p.name: p.read_bytes() for p in (tmp_path / "half").iterdir()}
    assert same == {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}


def test_convert_overwrites_nothing(saved, tmp_path):
    for destination in (saved, saved / "config.json", tmp_path):
        with pytest.raises(ValueError, match="already exists"):
            convert.convert(saved, destination)
    with pytest.raises(ValueError, match="float8"):
        convert.convert(saved, tmp_path / "new", "float8")
    assert not (tmp_path / "new").exists()
