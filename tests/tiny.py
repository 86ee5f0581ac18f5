"""Small real inputs that several tests share: a model directory with a tokenizer, and rows to train on."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from areax import models
from areax.adapters import hf, safetensors, tokenizer
from areax.core import param

HF = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


def model(path: Path, seed: int = 0, **changes) -> Path:
    """Writes a random Qwen3 with a character tokenizer for sums to `path`."""
    tokens = tokenizer.character("0123456789+")
    source = {**HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, **changes}
    config = models.config_from_hf(source)
    return hf.save(path, config, weights(models.table(config), source["initializer_range"], seed), tokenizer=tokens)


def wrapped(path: Path, tower: dict | None = None) -> Path:
    """Makes an InternVL of a checkpoint of `model`, with a vision tower of these tensors."""
    inner = json.loads((path / "config.json").read_text())
    architectures = ["InternVLForConditionalGeneration"]
    outer = {"model_type": "internvl", "architectures": architectures, "tie_word_embeddings": True, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": inner, "vision_config": {"depth": 3}}))
    (path / "processor_config.json").write_text('{"processor_class": "any"}')
    held = {f"language_model.{name}": np.array(x) for name, x in safetensors.read(path).items()}
    held |= tower or {"vision_tower.cls": np.arange(6, dtype=np.int32), "multi_modal_projector.x": np.ones((2, 3))}
    (path / "manifest.json").unlink()
    safetensors.write(path, held, held.values())
    return path


def weights(table: param.Table, std: float, seed: int = 0) -> dict:
    """Normally distributed weights, around 1 in norms and scalars; `param.init` would take seconds to compile."""
    rng = np.random.default_rng(seed)
    one = lambda leaf: "norm" in leaf.path or leaf.param.axes == "one"
    draw = lambda leaf: jnp.asarray(std * rng.normal(size=leaf.shape) + one(leaf), jnp.float32)
    return param.tree_map(draw, table)


def cut_off(run: Path, out: Path, step: int) -> None:
    """Copies a finished run as it would be if it had been killed while it made the step after the saved `step`."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "model")
    (out / "summary.json").unlink()
    later = [path for path in (out / "state").iterdir() if path.name.isdigit() and int(path.name) > step]
    assert later and (out / "state" / str(step)).is_dir()
    for path in later:
        shutil.rmtree(path)


def rows(path: Path, rows: list[dict]) -> Path:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
