"""Verifies a server's weights independently: checksums and a probe prompt.

A server may report a version and hold something else: SGLang answers "success" to tensors whose names it does not know,
and to a checkpoint that lacks some. Until a version is verified, the server's answers are held back.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..errors import ServerError
from ..servers.labels import MANIFEST
from ..servers.server import Server
from ..servers.types import Part, Probe, Published


def compare_checksums(server: Server, weights: Published, ranks: list[dict[str, str]]) -> None:
    """Compares the server's checksums with the manifest's if they cover the same tensors, else with those of the first
    verified server of the same layout. A server that reports none passes.

    Args:
      ranks: what `SGLang.checksums` returned.

    Raises ServerError if they differ.
    """
    if not ranks:
        server.has_checksums = False
        return
    wanted = _manifest(weights.directory)
    if ranks[0].keys() == wanted.keys():
        differ = [name for name in wanted if ranks[0][name] != wanted[name]]
        source = "the manifest"
    else:
        layout = json.dumps([server.layout, [sorted(names) for names in ranks]])
        first = weights.checksums.setdefault(layout, ranks)
        differ = [
            name for ours, theirs in zip(ranks, first, strict=True) for name in ours if ours[name] != theirs[name]
        ]
        source = "another server with this version"
    if differ:
        raise ServerError(
            f"{server.url}: reports {weights.label}, but {len(differ)} tensors differ from {source}, first {differ[0]}"
        )


def _manifest(directory: str) -> dict[str, str]:
    path = Path(directory) / MANIFEST
    manifest = json.loads(path.read_bytes()) if directory and path.exists() else {}
    return {name: entry["xxh3_128"] for name, entry in manifest.get("tensors", {}).items()}


def probe_difference(server: Server, known: Probe, part: Part) -> float:
    """The mean absolute difference between the server's and the trainer's log-probabilities of a known prompt.

    Args:
      part: what `SGLang.read` returned for that prompt.

    Raises ServerError if it exceeds the tolerance.
    """
    theirs = [row[0] for row in part.inputs][1:]
    if len(theirs) != len(known.logp) or not all(isinstance(x, int | float) and math.isfinite(x) for x in theirs):
        raise ServerError(f"{server.url}: returns no log-probabilities for the probe of {len(known.tokens)} tokens")
    difference = sum(abs(a - b) for a, b in zip(theirs, known.logp, strict=True)) / len(theirs)
    if not difference <= known.tolerance:
        raise ServerError(
            f"{server.url}: log-probabilities of the probe must be within {known.tolerance:g} nats per token of the "
            f"trainer's, got {difference:.3g}: its weights are not those it reports, or it computes differently"
        )
    return difference
