"""Published weights on their way to the servers: where they lie, what they are called, the push.

A published version is a directory with a `manifest.json`; it appears by rename, whole. Its label,
`"{version}-{8 hex digits of the manifest's hash}"`, covers every tensor, for the manifest holds the
tensors' hashes: two runs that both reached version 7 have different labels.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from . import versions
from .client import Fleet
from .server import Server

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushReport:
    """What a push did; times are those of the slowest server, in seconds.

    Attributes:
      label: the weight label pushed.
      loaded: servers that now report it and generate.
      failed: url -> reason of the servers that are unusable since.
      pause_s: generation stood still, from the pause call to the answer of continue; holds load_s.
      load_s: `/update_weights_from_disk` alone.
      total_s: the whole push.
    """

    label: str
    loaded: tuple[str, ...]
    failed: Mapping[str, str]
    pause_s: float
    load_s: float
    total_s: float


def version_string(manifest_path: str | os.PathLike) -> str:
    """The weight label of the published version whose manifest this is."""
    data = Path(manifest_path).read_bytes()
    try:
        version = json.loads(data)["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest_path}: a manifest needs a version ({error!r})") from error
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError(f"{manifest_path}: version must be a number from 0 on, got {version!r}")
    return f"{version}-{xxhash.xxh3_128_hexdigest(data)[:8]}"


async def push(
    fleet: Fleet,
    directory: str | os.PathLike,
    label: str,
    *,
    mode: Literal["retract", "abort"] = "retract",
) -> PushReport:
    """Gives every usable server the weights in `directory`, under the name `label`.

    Each server by itself: pause, load, see that it reports exactly this label, continue. A server
    where any of that fails is retired with the reason: it may be paused, or hold new weights under
    an old name, and no request goes there again. Cancelled half-way, the same.

    Args:
      directory: as the servers see it, too (same machine or shared file system).
      mode: what the pause does to running requests. Both recompute the cache under the new weights;
        `retract` leaves them on the server, `abort` returns them, and the client resumes them.

    Raises ValueError before anything is paused, RuntimeError if no server loaded the weights.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise ValueError(f"push: the directory to push must exist, got {path}")
    if versions.number(label) < 0:
        raise ValueError(f"push: a label must be '<version>-<8 hex digits>', got {label!r}")
    if mode not in ("retract", "abort"):  # in_place would go on with keys and values of old weights
        raise ValueError(f"push: mode must be 'retract' or 'abort', got {mode!r}")
    start = time.perf_counter()
    servers = fleet.usable
    times = await asyncio.gather(*(_push(fleet, server, str(path), label, mode) for server in servers))
    loaded = [(server, t) for server, t in zip(servers, times, strict=True) if not server.reason]
    failed = {server.url: server.reason for server in servers if server.reason}
    if not loaded:
        raise RuntimeError(f"push: no server is left: {'; '.join(failed.values())}")
    report = PushReport(
        label=label,
        loaded=tuple(server.url for server, _ in loaded),
        failed=failed,
        pause_s=max(pause_s for _, (pause_s, _) in loaded),
        load_s=max(load_s for _, (_, load_s) in loaded),
        total_s=time.perf_counter() - start,
    )
    log.info("pushed %s to %d servers, paused %.3f s", report.label, len(loaded), report.pause_s)
    return report


async def _push(fleet: Fleet, server: Server, path: str, label: str, mode: str) -> tuple[float, float]:
    try:
        if server.away:
            await asyncio.wait({server.away})
        if server.reason:
            return 0.0, 0.0
        paused = time.perf_counter()
        await server.pause(mode)
        server.labels.append(label)  # what is sampled from here on may carry it
        loading = time.perf_counter()
        await server.update_weights_from_disk(path, label)
        load_s = time.perf_counter() - loading
        reported = await server.weight_label()
        if reported != label:
            raise RuntimeError(f"{server.url}: reports weights {reported!r} instead of {label!r}")
        server.admitted = len(server.labels) - 1
        await server.resume()
        return time.perf_counter() - paused, load_s
    except asyncio.CancelledError:
        fleet.retire(server, f"{server.url}: the push of {label} was interrupted")
        raise
    except (ValueError, RuntimeError) as error:
        fleet.retire(server, f"the push of {label} failed: {error}")
        return 0.0, 0.0


def choose_root(size: int = 0) -> Path:
    """A folder for versions that servers on this machine read: in memory if there is room on it.

    Args:
      size: bytes of one version. Three must fit: two are kept while the next is written.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK):
        if shutil.disk_usage(memory).free >= 3 * size:
            return memory
    return Path(tempfile.gettempdir())


def prune(root: str | os.PathLike, keep: int = 2, in_use: Collection[str] = ()) -> list[Path]:
    """Removes published versions under `root`, except the newest `keep` and those labelled `in_use`.

    Only directories with a manifest are looked at. Each disappears by rename before its files go,
    so that nobody reads half of it. Returns what was removed, oldest first.
    """
    if keep < 1:
        raise ValueError(f"prune: keep must be at least 1, got {keep}")
    root = Path(root)
    for rest in root.glob(".*.removing"):  # of a run that ended in between
        shutil.rmtree(rest)
    found = [
        (version_string(path / "manifest.json"), path)
        for path in root.iterdir()
        if not path.name.startswith(".") and (path / "manifest.json").is_file()
    ]
    found.sort(key=lambda pair: versions.number(pair[0]))
    removed = [path for label, path in found[:-keep] if label not in in_use]
    for path in removed:
        shutil.rmtree(path.rename(root / f".{path.name}.removing"))
    return removed
