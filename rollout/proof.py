"""Whether a server holds the weights that it was given, beyond its word: by checksums, and by a prompt that is known.

A server may report a version and hold something else: SGLang answers "success" to tensors whose names it does not know,
and to a checkpoint that lacks some. Until a version is proved no answer of the server is believed (`Server.proved`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Published, Server


PROBE_S = 60.0


@dataclass(frozen=True)
class Probe:
    """What the trainer says of a prompt under the weights of one version.

    Attributes:
      tokens: the prompt.
      logp: log-probability of each token but the first, at temperature 1, in nats.
      tolerance: most mean absolute difference of the server's, in nats a token. Another dtype alone makes 0.01 to 0.05.
    """

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    tolerance: float = 0.2

    def __post_init__(self):
        if len(self.tokens) < 2 or len(self.logp) != len(self.tokens) - 1:
            raise ValueError(
                f"Probe: needs two tokens or more, and a log-probability of each but the first, got {len(self.tokens)} "
                f"and {len(self.logp)}"
            )


async def prove(server: Server, weights: Published) -> float | None:
    """Compares what `server` holds with `weights`; returns the probe's mean absolute difference, if there is a probe.

    Raises RuntimeError where it holds something else, or gave no answer.
    """
    difference = await ask(server, weights.probe) if weights.probe else None
    await _checksums(server, weights)
    return difference


async def _checksums(server: Server, weights: Published) -> None:
    """The server's checksums against the manifest's where they are of the same tensors, else against those of the
    first server with this layout that proved to have the version. A server without a checker is believed."""
    if not server.checker:
        return
    try:
        answer = await server.weights_checker()
    except ValueError:  # it knows no such route
        server.checker = False
        return
    ranks = answer.get("ranks")
    if not ranks:
        server.checker = False
        return
    sums = [rank["checksums"] for rank in ranks]
    wanted = _manifest(weights.directory)
    if sums[0].keys() == wanted.keys():
        differ = [name for name in wanted if sums[0][name] != wanted[name]]
        source = "the manifest"
    else:
        layout = json.dumps([server.layout, [sorted(names) for names in sums]])
        first = weights.seen.setdefault(layout, sums)
        differ = [name for ours, theirs in zip(sums, first, strict=True) for name in ours if ours[name] != theirs[name]]
        source = "another server that has this version"
    if differ:
        raise RuntimeError(
            f"{server.url}: reports {weights.label}, but {len(differ)} tensors are not those of {source}: {differ[0]}"
        )


def _manifest(directory: str) -> dict[str, str]:
    path = Path(directory) / "manifest.json"
    manifest = json.loads(path.read_bytes()) if directory and path.exists() else {}
    return {name: entry["xxh3_128"] for name, entry in manifest.get("tensors", {}).items()}


async def ask(server: Server, probe: Probe, adapter: str = "") -> float:
    """The mean absolute difference of the server's log-probabilities of a known prompt from the trainer's.

    Raises RuntimeError where it is beyond the tolerance, or the server gave no answer.
    """
    body: dict[str, Any] = {
        "input_ids": list(probe.tokens),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({"lora_path": adapter} if adapter else {}),
    }
    answer = await server.call("POST", "/generate", body, timeout_s=PROBE_S)
    theirs = [row[0] for row in answer.get("meta_info", {}).get("input_token_logprobs") or ()][1:]
    if len(theirs) != len(probe.logp) or not all(isinstance(x, int | float) and math.isfinite(x) for x in theirs):
        raise RuntimeError(f"{server.url}: gives no log-probabilities of a known prompt of {len(probe.tokens)} tokens")
    difference = sum(abs(a - b) for a, b in zip(theirs, probe.logp, strict=True)) / len(theirs)
    if not difference <= probe.tolerance:
        raise RuntimeError(
            f"{server.url}: its log-probabilities of a known prompt differ from the trainer's by {difference:.3g} nats "
            f"a token, allowed are {probe.tolerance:g}: it holds other weights than it reports, or computes otherwise"
        )
    return difference
