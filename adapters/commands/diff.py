"""`areax diff`: which tensors of two checkpoints, or folders of adapters, differ, and by how much."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...rollout.processes.printable import printable
from .. import hf, peft, safetensors
from ..runtime import hub
from ..tracking import progress

NUMBERS = 1 << 20  # of a tensor that are compared at a time, in float64
WRITTEN = ("_name_or_path", "transformers_version", "torch_dtype")  # what config.json says of its writer, or twice


def diff(one: str | os.PathLike, other: str | os.PathLike) -> dict:
    """Compares tensors by name, in pieces and as numbers, and config.json or adapter_config.json by option.

    Tensors of other dtypes are compared as the numbers that they stand for; NaN equals NaN.

    Args:
      one, other: directories, or models on the hub.

    Returns:
      {"equal", "tensors": how many are in both, "changed": [{"name", "max", "relative", "share", "dtypes", "shapes"}],
      "missing": names only in `one`, "additional": only in `other`, "config": {option: [value, other value]}}; `max` is
      the largest absolute difference, `relative` the norm of the difference over that of `one`'s tensor, `share` the
      part of the entries that differ; None where they are not finite, or shapes differ. Largest `relative` first.
    """
    folders = [_folder(path) for path in (one, other)]
    mine, theirs = (_tensors(path) for path in folders)
    both = [name for name in mine if name in theirs]
    changed = []
    with progress.steps("diff", len(both)) as tick:
        for done, name in enumerate(both, 1):
            if found := compare(mine[name], theirs[name]):
                changed.append({"name": name} | found)
            tick(done)
    changed.sort(key=lambda entry: math.inf if entry["relative"] is None else entry["relative"], reverse=True)
    report = {
        "tensors": len(both),
        "changed": changed,
        "missing": [name for name in mine if name not in theirs],
        "additional": [name for name in theirs if name not in mine],
        "config": _options(*folders),
    }
    return {"equal": not any(report[name] for name in ("changed", "missing", "additional", "config"))} | report


def compare(x: np.ndarray, y: np.ndarray) -> dict | None:
    """How two tensors differ, as an entry of `diff`; None if they have the same shape, dtype and numbers."""
    about = {}
    if x.dtype != y.dtype:
        about["dtypes"] = [x.dtype.name, y.dtype.name]
    if x.shape != y.shape:
        return about | {"shapes": [list(x.shape), list(y.shape)], "max": None, "relative": None, "share": None}
    if not about and all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in _pieces(x, y)):
        return None
    largest, count, square, whole = 0.0, 0, 0.0, 0.0
    for a, b in ((a.astype(np.float64), b.astype(np.float64)) for a, b in _pieces(x, y)):
        whole += float(np.sum(np.square(a)))
        differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if differ.any():
            gap = np.abs(a[differ] - b[differ])
            count, largest = count + gap.size, float(np.maximum(largest, gap.max()))
            square += float(np.sum(np.square(gap)))
    if not count and not about:
        return None
    relative = math.sqrt(square / whole) if whole else math.inf if count else 0.0
    finite = lambda number: number if math.isfinite(number) else None
    return {"max": finite(largest), "relative": finite(relative), "share": count / max(x.size, 1)} | about


def _pieces(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    x, y = x.reshape(-1), y.reshape(-1)
    for at in range(0, x.size, NUMBERS):
        cut = slice(at, at + NUMBERS)
        yield x[cut], y[cut]
        safetensors.forget(x)
        safetensors.forget(y)


def _folder(path: str | os.PathLike) -> Path:
    adapters = (Path(path) / peft.CONFIG).is_file()
    return Path(path) if adapters else Path(hub.folder(path, weights=True))


def _tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.read(path / peft.WEIGHTS if (path / peft.CONFIG).is_file() else path)


def _options(one: Path, other: Path) -> dict[str, list]:
    """{option: [value, other value]} of config.json and adapter_config.json, nested options joined by dots."""
    found: dict[str, list] = {}
    for file in ("config.json", peft.CONFIG):
        there = [_flat(hf.read_json(path / file)) if (path / file).is_file() else {} for path in (one, other)]
        for name in {**there[0], **there[1]}:
            values = [options.get(name) for options in there]
            if values[0] != values[1] and name.rpartition(".")[2] not in WRITTEN:
                found[name] = values
    return found


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def show(report: Mapping[str, Any]) -> str:
    """The report as lines."""
    lines = [f"equal: {'yes' if report['equal'] else 'no'}", f"tensors: {report['tensors']} in both"]
    lines += [f"only in the first: {name}" for name in report["missing"]]
    lines += [f"only in the second: {name}" for name in report["additional"]]
    lines += [f"config: {name} {one!r} -> {other!r}" for name, (one, other) in report["config"].items()]
    for entry in report["changed"]:
        about = [" -> ".join(map(str, entry[name])) for name in ("dtypes", "shapes") if name in entry]
        figures = [f"{name} {entry[name]:.3g}" for name in ("max", "relative", "share") if entry[name] is not None]
        lines.append(f"changed: {entry['name']}  {', '.join([*about, *figures])}")
    return "\n".join(map(printable, lines))
