"""chips.json: one row per step and device, and whether a row is up to date."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

from chips.steps import Step

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
CODE = ("core", "models", "parallel", "rollout", "adapters", "recipes")
KEYS = {"step", "device", "settings", "code", "versions", "seconds", "date"}  # of every row
PACKAGES = {"areax": ("jax", "jaxlib"), "transformers": ("torch", "transformers")}


def identity(step: Step, device: str) -> dict:
    """The part of a row that must match for it to be up to date."""
    system = step.settings.get("system", "areax")
    own = [BENCHMARKS / "chips" / f"{name}.py" for name in {step.kind, "shapes", "train"}]  # train: ways to measure
    if system == "areax":
        own += [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    if step.kind == "smoke":
        own += (ROOT / "tests").rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(own):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    versions = {name: _version(name) for name in PACKAGES[system]}
    settings = step.settings
    return {
        "step": step.name, "device": device, "settings": settings, "code": digest.hexdigest()[:12], "versions": versions
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def holds(row: dict, identity: dict) -> bool:
    """Whether the row is up to date; one that failed for a missing package no longer is once that is installed."""
    same = all(row.get(name) == value for name, value in identity.items())
    return same and not ("needs" in row and importlib.util.find_spec(row["needs"].partition(".")[0]))


def read(folder: Path) -> list[dict]:
    """The rows of chips.json.

    Raises:
      ValueError: it is damaged.
    """
    path = folder / "chips.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= KEYS for row in rows):
            raise ValueError(f"must be a list of rows with {', '.join(sorted(KEYS))}")
        return rows
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}; restore it, or remove it to begin anew") from None


def place(rows: list[dict], row: dict) -> list[dict]:
    """The rows with this one added, replacing one of the same step and device."""
    number = lambda word: (0, int(word), "") if word.isdigit() else (1, 0, word)
    name = lambda row: (row["device"], [number(word) for word in row["step"].split("/")])
    return sorted([old for old in rows if name(old) != name(row)] + [row], key=name)


def write(folder: Path, rows: list[dict], page: str) -> None:
    """Writes chips.json and CHIPS.md."""
    write_text(folder / "chips.json", json.dumps(rows, indent=1) + "\n")
    write_text(folder / "CHIPS.md", page)


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
