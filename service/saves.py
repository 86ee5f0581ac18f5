"""What is saved of an adapter, and its tinker:// path.

OUT/models/MODEL/state/SEQ              the state after a request, from which a killed server goes on
OUT/models/MODEL/weights/NAME           what save_state saves: `adapter`, in PEFT's format, and the optimiser's state
OUT/models/MODEL/sampler_weights/NAME   what save_weights_for_sampler saves: `adapter` alone
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from ..adapters import peft, safetensors
from ..adapters.hf import config_files
from ..adapters.runtime.atomic_dir import replacing
from ..models import lora
from .model import Adapter, Base

WEIGHTS, SAMPLER = "weights", "sampler_weights"
ADAPTER, MOMENTS, HASHES = "adapter", "optimizer.safetensors", "optimizer.json"
SCHEME = "tinker://"


def address(model: str, kind: str, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def folder(out: Path, path: str) -> Path:
    """Where something with a tinker:// path is; the path must be of `address`."""
    model, kind, name = path.removeprefix(SCHEME).split("/")
    return out / "models" / model.replace(":", "-") / kind / name


def state_folder(out: Path, model: str, seq: int) -> Path:
    return folder(out, address(model, "state", str(seq)))


def write(path: Path, base: Base, adapter: Adapter, served: str, moments: bool) -> None:
    """Writes an adapter, with the optimiser's state if `moments`; an older one of the path is replaced.

    Args:
      served: the base's name, for PEFT.
    """
    with replacing(path, lambda _: True) as directory:
        peft.save(directory / ADAPTER, base.config, adapter.state.params, adapter.spec, base=served)
        if moments:
            arrays = {"step": np.asarray(adapter.state.step), **_named(adapter.state.opt_state)}
            entries = {name: safetensors.describe(name, x) for name, x in arrays.items()}
            written = safetensors.write_file(directory / MOMENTS, entries, (np.asarray(x) for x in arrays.values()))
            safetensors.write_bytes(directory / HASHES, json.dumps(written).encode())


def read(path: Path, base: Base, moments: bool) -> Adapter:
    """Reads an adapter; without `moments` the optimiser starts anew.

    Raises:
      ValueError: the files are damaged, or of another model.
    """
    spec, weights = peft.load(path / ADAPTER, base.config)
    adapter = base.adapter(spec, weights)
    if not moments:
        return adapter
    stored, hashes = safetensors.read(path / MOMENTS), config_files.read_json(path / HASHES)
    like = _named(adapter.state.opt_state)
    if stored.keys() != like.keys() | {"step"}:
        raise ValueError(f"{path / MOMENTS}: must hold AdamW's state of this adapter, got other names")
    for name, x in stored.items():
        if hashes.get(name, {}).get("xxh3_128") != safetensors.digest(x):
            raise ValueError(f"{path / MOMENTS}: {name} does not match {HASHES}; copy the folder again")
    _, tree = jax.tree.flatten(adapter.state.opt_state)
    restored = jax.tree.unflatten(tree, [jax.numpy.asarray(stored[name]) for name in like])
    return base.adapter(spec, weights, restored, int(stored["step"]))


def weights(path: Path, base: Base) -> tuple[lora.Lora, dict]:
    """(options, weights) of a saved adapter."""
    return peft.load(path / ADAPTER, base.config)


def drop_states(out: Path, model: str, but: int | None = None) -> None:
    """Removes the states of a model, but for the one after the request `but`."""
    for path in state_folder(out, model, 0).parent.glob("*"):
        if path.name != str(but):
            shutil.rmtree(path, ignore_errors=True)


def sweep(out: Path) -> None:
    """Removes what a killed server had half written."""
    for path in out.glob("models/*/*/.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _named(tree) -> dict:
    """The arrays of a tree by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
