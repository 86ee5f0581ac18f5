"""Python, areax, the packages that it requires, and its extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator

from .finding import Finding, broken, note, ok

LEAST_PYTHON = (3, 11)
EXTRAS = {  # what needs them; `cuda` and `tpu` are in devices.py
    "torch": "areax check --against torch",
    "gguf": "GGUF files",
    "grammar": "structured output of areax serve",
    "tensorboard": "--track.tensorboard",
    "trackio": "--track.trackio",
    "mlflow": "--track.mlflow",
    "swanlab": "--track.swanlab",
    "wandb": "--track.wandb",
    "ray": "areax launch --on ray",
    "aviary": "--env aviary:...",
    "gymnasium": "--env gymnasium:...",
    "reasoning-gym": "--env reasoning_gym:...",
    "textarena": "--env textarena:...",
    "sglang": "SGLang servers, in an environment of their own",
}


def python() -> Iterator[Finding]:
    """The interpreter, and the copy of areax that it imports."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        yield broken(f"python {version}: areax needs 3.11 or newer; make an environment with one")
    else:
        yield ok(f"python {version}, {sys.executable}")
    from .... import __version__

    yield ok(f"areax {__version__}, {os.path.dirname(sys.modules[__name__.partition('.')[0]].__file__ or '')}")


def required() -> Iterator[Finding]:
    """The packages that areax cannot do without."""
    wanted = requirements("")
    if not wanted:
        yield note(
            "areax is not installed but imported from its folder: its packages are not checked; pip install -e ."
        )
        return
    missing = [finding for name, least in wanted if (finding := _lacking(name, least))]
    yield from missing
    if not missing:
        yield ok(f"{len(wanted)} required packages: jax {version('jax')}, jaxlib {version('jaxlib')}, numpy "
                 f"{version('numpy')}, transformers {version('transformers')}, ...")  # fmt: skip


def extras() -> Iterator[Finding]:
    """Optional packages, with what needs them."""
    for extra, user in EXTRAS.items():
        for name, least in requirements(extra):
            if version(name) is None:
                yield note(f"{name} is not installed, for {user}: pip install 'areax[{extra}]'")
            else:
                yield _lacking(name, least) or ok(f"{name} {version(name)}, for {user}")


def servers() -> Iterator[Finding]:
    """The programs of vLLM's servers; SGLang's are an extra."""
    if found := shutil.which("vllm"):
        yield ok(f"{found}, for areax launch --server.kind vllm")
    else:
        yield note(
            "vllm is not in PATH, for areax launch --server.kind vllm: pip install vllm in an environment of its own, "
            "whose bin/ goes into PATH"
        )


def requirements(extra: str) -> list[tuple[str, str]]:
    """(package, least version) of areax's requirements, or of one of its extras; none if areax is not installed."""
    try:
        lines = importlib.metadata.requires("areax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        wanted, _, marker = line.partition(";")
        own = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        parts = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?", wanted)
        if parts and (own[1] if own else "") == extra:
            found.append((parts[1], parts[2] or "0"))
    return found


def version(name: str) -> str | None:
    """The installed version of a package; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def older(one: str, other: str) -> bool:
    """Whether a version is older than another, by their leading numbers."""
    numbers = lambda text: [int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", text)[0])]  # type: ignore[index]
    return numbers(one) < numbers(other)


def _lacking(name: str, least: str) -> Finding | None:
    got = version(name)
    if got is not None and not older(got, least):
        return None
    return broken(f"{name} {least} or newer is needed, got {got or 'none'}; pip install '{name}>={least}'")
