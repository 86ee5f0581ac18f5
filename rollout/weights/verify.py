"""Verifies a server's weights independently: checksums and a probe prompt.

A server may report a version and hold something else: SGLang answers "success" to tensors whose names it does not know,
and to a checkpoint that lacks some. Until a version is verified, the server's answers are held back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ..errors import ServerError
from ..servers.labels import MANIFEST, manifest_bytes
from ..servers.server import Server
from ..servers.types import Part, Probe, Published

MOVED = 0.02  # nats per token, beyond what rounding weights and logits to bf16 may hide
# The dtypes of /server_info as files name them. SGLang's "auto" keeps bf16, and rounds fp32.
STORED = {"auto": "BF16", "bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}


def compare_checksums(server: Server, weights: Published, ranks: list[dict[str, str]]) -> None:
    """Compares the server's checksums with the manifest's if they cover the same tensors, else with those of the first
    verified server of the same layout, and with its own of the version before: what changed in the manifest must have
    changed there.

    Args:
      ranks: what `SGLang.checksums` returned.

    Raises ServerError if they differ.
    """
    entries = _entries(weights.directory)
    wanted = {name: entry["xxh3_128"] for name, entry in entries.items()}
    if kept := _kept(server, entries, ranks):
        raise ServerError(
            f"{server.url}: reports {weights.label}, but {len(kept)} tensors are those of the version that it had "
            f"before, first {kept[0]}: it answered a push with success and did not load them; read its log"
        )
    if ranks[0].keys() == wanted.keys():
        differ = [name for name in wanted if ranks[0][name] != wanted[name]]
        source = "the manifest"
    else:
        layout = json.dumps([server.layout, [sorted(names) for names in ranks]])
        first = weights.checksums.setdefault(layout, ranks)
        differ = [
            name for ours, theirs in zip(ranks, first, strict=True) for name in ours if ours[name] != theirs[name]
        ]
        source = "those first reported for this version"
    if differ:
        raise ServerError(
            f"{server.url}: reports {weights.label}, but {len(differ)} tensors differ from {source}, first {differ[0]}"
        )
    if entries:
        server.proved = entries, ranks


def _kept(server: Server, entries: dict[str, dict], ranks: list[dict[str, str]]) -> list[str]:
    """The tensors that changed since the version before, by the manifests, and did not on the server.

    Only those count that the server holds under the name and in the dtype of the files: to round, or to join them with
    others, may undo a change. Of a tensor that is split over ranks at least one part must have changed.
    """
    before, ranks_before = server.proved
    dtype, quantization, *_ = json.loads(server.layout or "[null, null]")
    if quantization or len(ranks) != len(ranks_before):
        return []
    stored = lambda name: entries[name].get("dtype", "") == STORED.get(str(dtype))
    changed = [name for name in entries if name in before and entries[name] != before[name] and stored(name)]
    held = lambda of_ranks, name: [rank.get(name) for rank in of_ranks]
    return [name for name in changed if any(held(ranks, name)) and held(ranks, name) == held(ranks_before, name)]


def _entries(directory: str) -> dict[str, dict]:
    content = manifest_bytes(Path(directory) / MANIFEST) if directory else None
    return {} if content is None else json.loads(content).get("tensors", {})


def probe_difference(server: Server, known: Probe, part: Part) -> float:
    """The mean absolute difference between the server's and the trainer's log-probabilities of a known prompt.

    They must also have moved since the version before: one small step is within any tolerance.

    Args:
      part: what `SGLang.read` returned for that prompt.

    Raises ServerError if it exceeds the tolerance, or the server's have not moved as the trainer's have.
    """
    theirs = of_prompt(server, part, len(known.tokens))
    difference = apart(theirs, known.logp)
    if not difference <= known.tolerance:
        raise ServerError(
            f"{server.url}: log-probabilities of the probe must be within {known.tolerance:g} nats per token of the "
            f"trainer's, got {difference:.3g}: its weights are not those it reports, or it computes differently"
        )
    server.read = known.tokens, theirs
    if server.probed and server.probed[0].tokens == known.tokens:
        before, theirs_before = server.probed
        moved, there = apart(known.logp, before.logp), apart(theirs, theirs_before)
        if moved > MOVED and there < moved / 10:
            raise ServerError(
                f"{server.url}: log-probabilities of the probe must move from version to version as the trainer's do, "
                f"by {moved:.3g} nats per token, got {there:.3g}: it answered a push with success and did not load it; "
                "read its log"
            )
        if moved <= MOVED:  # small steps add up
            return difference
    server.probed = known, theirs
    return difference


async def replaced(server: Server, *, timeout_s: float) -> str:
    """Why a server's weights are others than those that were verified, although their label is the same: it computes
    other log-probabilities of the probe; "" = they are not, or there was no probe.

    Raises as `SGLang.read`.
    """
    label, read = server.label, server.read
    if read is None or not server.weights_verified.is_set():
        return ""
    tokens, before = read
    adapter = server.adapters[-1] if server.adapters else ""
    part = await server.api.read(tokens, adapter=adapter, timeout_s=timeout_s)
    now = of_prompt(server, part, len(tokens))
    if server.read is not read or server.label != label or (moved := apart(now, before)) <= 2 * MOVED:
        return ""
    return f"log-probabilities of the probe have moved by {moved:.3g} nats per token, but its label is still {label!r}"


def of_prompt(server: Server, part: Part, tokens: int) -> list[float]:
    """The log-probabilities of each token of a prompt but the first; raises ServerError if there are not all."""
    theirs = [row[0] for row in part.inputs][1:]
    if len(theirs) != tokens - 1 or not all(isinstance(x, int | float) and math.isfinite(x) for x in theirs):
        raise ServerError(f"{server.url}: returns no log-probabilities for the probe of {tokens} tokens")
    return theirs


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
