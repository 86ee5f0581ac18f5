"""`areax inspect`: what a checkpoint, an adapter folder or a run folder holds, and what areax can do with it, from
headers and JSON files alone."""

from __future__ import annotations

import collections
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from ... import models
from ...core import param
from ...models import lora
from ...models.layers import score_head
from ...parallel import mesh, rules
from ...rollout.processes.printable import printable, shown
from ...rollout.servers.engine_mesh import EngineMesh
from .. import gguf, hf, orbax, peft, safetensors, tokenizer
from ..data import images
from ..runtime import hub
from ..tracking import run_dir

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in a tensor's name
RANK = 8  # of adapters asked for, whether PEFT's format has them


def inspect(path: str | os.PathLike, tensors: bool = False) -> dict:
    """Describes a checkpoint, a published version, a folder of adapters, or a run, without reading weights.

    Args:
      path: a directory, a model on the hub, or a GGUF file, whose tensors are those that areax makes of them.
      tensors: lists every tensor by name; else those of all layers and experts that are alike once.

    Returns:
      {"kind": "checkpoint" | "adapters" | "run", "path", ...}, all JSON types. Of tensors: {"bytes", "dtypes", "files",
      "tensors": [{"name", "dtype", "shape", "count"}]}. Of a checkpoint also {"family", "parameters", "layers",
      "context", "labels" of a score head, "tied", "quantised", "version", "tokenizer", "chat_template", "train",
      "lora", "images" of a model with a vision tower, "serve", "tp"}: the last five are "yes", the largest number of
      devices, or the reason why not in one line.

    Raises:
      ValueError: there is nothing of these, or its files are incomplete or damaged.
    """
    if run := run_dir.folder(path):
        return _run(run)
    if (Path(path) / peft.CONFIG).is_file():
        return _adapters(Path(path), tensors)
    report = _checkpoint(Path(hub.folder(path, weights=True)), tensors)
    if hub.is_gguf(path):
        report |= {"path": os.fspath(path), "quantised": ", ".join(gguf.quantised(gguf.opened(path)[2])) or "no"}
    return report


def _checkpoint(path: Path, listed: bool) -> dict:
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: must be a checkpoint, adapters or a run, got no config.json; name another")
    stored, options = safetensors.read(path), hf.read_json(path / "config.json")
    manifest = hf.read_manifest(path, stored) or {}
    report: dict[str, Any] = {"kind": "checkpoint", "path": os.fspath(path)}
    try:
        config, params = hf.mapped_tensors(hf.read_config(path), stored, str(path), None)
        able = _abilities(path, config)
        report |= {
            "family": config.family, "parameters": param.count(models.table(config)), "layers": config.layers,
            "context": config.context, "labels": _labels(config), "tied": config.tied,
            "other_parts": len(config.rest.names) if config.rest else 0,
        }  # fmt: skip
    except ValueError as error:
        report["family"], able = options.get("model_type"), {"train": _line(error)}
    written = (one.get("quantization_config") for one in (options, options.get("text_config")) if isinstance(one, dict))
    quantised = next((one.get("quant_method", "no") for one in written if isinstance(one, dict)), "no")
    report |= {"version": manifest.get("version"), "quantised": quantised}
    return report | _described(path, stored, listed) | _texts(path) | able


def _abilities(path: Path, config) -> dict[str, Any]:
    """Whether areax can train, adapt and serve a model, and read images with it, or why not."""
    served = _answer(lambda: _check_served(path, config))
    return {
        "train": "yes",
        "lora": _answer(lambda: peft.modules(config, lora.Lora(RANK))),
        "images": _answer(lambda: _check_images(path, config))
        if "vision_config" in json.loads(config.source)
        else None,
        "serve": served,
        "tp": largest_tp(config) if served == "yes" else None,
    }


def _labels(config) -> list[str] | None:
    """The labels of a score head."""
    head = config.score_head
    return score_head.label_names(json.loads(config.source), head.labels) if head else None


def _answer(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except ValueError as error:
        return _line(error)
    return "yes"


def _check_images(path: Path, config) -> None:
    models.with_vision(config)
    images.load(path)


def _check_served(path: Path, config) -> None:
    if config.score_head:
        raise ValueError("a reward model gives scores, not tokens")
    if not any((path / name).is_file() for name in tokenizer.FILES):
        raise ValueError(f"{path}: a server needs a tokenizer, got none of {', '.join(tokenizer.FILES)}")


def largest_tp(config) -> int:
    """The most devices over which `areax serve --mesh.tp` splits a model: they divide its heads, widths and
    vocabulary."""
    heads = math.gcd(*(layer.heads for layer in config.records if hasattr(layer, "heads")))
    leaves = param.leaf_list(models.table(config))

    def fits(tp: int) -> bool:
        on = AbstractMesh(tuple(tp if axis == "tp" else 1 for axis in mesh.AXES), mesh.AXES)
        try:
            EngineMesh(tp=tp).check(config)
            for leaf in leaves:
                rules.spec(leaf.axes, rules.GENERATING, shape=leaf.shape, mesh=on)
        except ValueError:
            return False
        return True

    return max(tp for tp in range(1, max(heads, 1) + 1) if heads % tp == 0 and fits(tp))


def _adapters(path: Path, listed: bool) -> dict:
    options = hf.read_json(path / peft.CONFIG)
    stored = safetensors.read(path / peft.WEIGHTS)
    manifest = hf.read_manifest(path, stored) or {}
    base = options.get("base_model_name_or_path")
    report = {
        "kind": "adapters", "path": os.fspath(path), "peft_type": options.get("peft_type"), "rank": options.get("r"),
        "alpha": options.get("lora_alpha"), "rslora": bool(options.get("use_rslora")),
        "targets": sorted([*_names(options.get("target_modules")), *_names(options.get("target_parameters"))]),
        "base": base, "version": manifest.get("version"), "parameters": sum(x.size for x in stored.values()),
    }  # fmt: skip
    return report | {"merge": _answer(lambda: _check_merged(path, base))} | _described(path, stored, listed)


def _check_merged(path: Path, base: Any) -> None:
    peft.read_options(path)
    if not isinstance(base, str) or not os.path.isfile(os.path.join(base, "config.json")):
        raise ValueError("its base is not here")
    peft.load(path, hf.read_config(base))


def _names(value: Any) -> list[str]:
    """The names in an option of PEFT, which may be one, or of another kind."""
    names = value if isinstance(value, list) else [value] if value else []
    return [one if isinstance(one, str) else shown(one) for one in names]


def _run(run: Path) -> dict:
    options = hf.read_json(run / run_dir.CONFIG)
    summary = hf.read_json(run / run_dir.SUMMARY) if (run / run_dir.SUMMARY).is_file() else {}
    adapters = run_dir.option(options, "lora")
    rank = adapters.get("rank") if isinstance(adapters, dict) else 0
    states = orbax.versions(run / run_dir.STATE)
    newest = orbax.newest(run / run_dir.STATE)
    return {
        "kind": "run", "path": os.fspath(run), "recipe": run_dir.recipe(newest and newest[1]),
        "model": options.get("model"),
        "trains": f"adapters of rank {rank}" if rank else "all weights",
        "steps": summary.get("steps", states[-1] if states else 0), "complete": bool(summary.get("complete")),
        "states": states, "bytes": sum(file.stat().st_size for file in run.rglob("*") if file.is_file()),
        "exports": [name for name in ("model", "adapter") if (run / name).is_dir()],
    }  # fmt: skip


def _described(path: Path, stored: Mapping[str, Any], listed: bool) -> dict:
    found: dict[tuple, int] = collections.Counter()
    for name, x in stored.items():
        found[name if listed else NUMBER.sub("*", name), x.dtype.name, tuple(x.shape)] += 1
    return {
        "bytes": sum(x.nbytes for x in stored.values()),
        "dtypes": sorted({x.dtype.name for x in stored.values()}),
        "files": len(list(path.glob("*.safetensors"))),
        "tensors": [
            {"name": name, "dtype": dtype, "shape": list(shape), "count": count}
            for (name, dtype, shape), count in found.items()
        ],
    }


def _texts(path: Path) -> dict:
    """Whether a tokenizer and a chat template are there."""
    config = hf.read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    files = ("chat_template.jinja", "chat_template.json")
    return {
        "tokenizer": any((path / name).is_file() for name in tokenizer.FILES),
        "chat_template": bool(config.get("chat_template")) or any((path / name).is_file() for name in files),
    }


def show(report: Mapping[str, Any]) -> str:
    """The report as lines."""
    lines = []
    for name, value in report.items():
        if name != "tensors" and value is not None:
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            text = {True: "yes", False: "no"}.get(text, text) if isinstance(text, bool) else text
            lines.append(f"{name}: {text:,}" if isinstance(text, int) else f"{name}: {text}")
    tensors: Iterable[Mapping] = report.get("tensors", ())
    return "\n".join(map(printable, [*lines, *(f"  {_row(entry)}" for entry in tensors)]))


def _row(entry: Mapping[str, Any]) -> str:
    times = f" x {entry['count']}" if entry["count"] > 1 else ""
    return f"{entry['name']}  {entry['dtype']} {entry['shape']}{times}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
