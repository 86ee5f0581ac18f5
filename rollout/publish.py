"""Published weights on their way to the servers: where they lie, what they are called, the push.

A published version is a directory with a `manifest.json`; it appears by rename, whole. Its label,
`"{version}-{8 hex digits of the manifest's hash}"`, covers every tensor, for the manifest holds the
tensors' hashes: two runs that both reached version 7 have different labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from . import journal, lora, versions
from .client import Fleet, Moved
from .proof import Probe
from .server import SOUND, Loaded, Published, Server, Unreached
from .versions import version_string as version_string

log = logging.getLogger(__name__)

ATTEMPTS = 3  # at a push that fails everywhere
ROOMS = 6  # more attempts on a full disk, after 1, 2, 4 ... seconds
POLL_S = 0.05
Mode = Literal["retract", "abort", "drain", "in_place"]


@dataclass(frozen=True)
class Push:
    """How versions of the weights get to the servers.

    Attributes:
      mode: what happens to running requests, which go on afterwards: `retract` computes their caches anew, on the
        server, `abort` likewise, through the client; `drain` waits for their end; `in_place` goes on over the cache of
        the old weights: the shortest pause, and tokens of neither version's distribution.
      at_once: servers that get the weights at a time, while the others generate; 0 = all of them.
      lora: with adapters, what a version is: adapters by name, over weights that stay on the servers (`adapter`), or
        the whole model (`merged`); `auto` = the former where the servers can.
      way: servers read files of the published directory (`disk`), or SGLang gets tensors over HTTP (`tensors`), of
        whole models.
      tolerance: most that a server's log-probabilities of a known prompt may differ from the trainer's, in nats a token
        on average; a server beyond that does not have the weights. 0 = not compared.
    """

    mode: Mode = "retract"
    at_once: int = 0
    lora: Literal["auto", "adapter", "merged"] = "auto"
    way: Literal["disk", "tensors"] = "disk"
    tolerance: float = 0.2

    def __post_init__(self):
        if self.at_once < 0 or not self.tolerance >= 0:
            raise ValueError(f"push: at_once and tolerance must be at least 0, got {self.at_once} and {self.tolerance}")


@dataclass(frozen=True)
class PushReport:
    """What a push did; times are those of the slowest server, in seconds.

    Attributes:
      label: the weight label pushed.
      loaded: servers that now report it and generate.
      failed: url -> reason of the servers that did not take it, and get no requests before they have a version.
      pause_s: generation stood still, from the pause call to the answer of continue; holds load_s.
      load_s: of that, to load; of adapters, which nothing is paused for, until they were loaded.
      prove_s: after it, until the server was seen to hold these weights; what it answers is kept back so long.
      probe_diff: largest mean absolute difference of a server's log-probabilities of the probe from the trainer's, in
        nats a token; None without a probe.
      stage_s: to bring the weights to where the server reads them, beside generation.
      stage_bytes: fetched for that, by all servers together.
      bytes: of the version's files; 0 where none were written.
      total_s: the whole push.
    """

    label: str
    loaded: tuple[str, ...]
    failed: Mapping[str, str]
    pause_s: float
    load_s: float
    prove_s: float
    probe_diff: float | None
    stage_s: float
    stage_bytes: int
    bytes: int
    total_s: float


class Taken(NamedTuple):
    """What a push took on one server."""

    stage_bytes: int
    stage_s: float
    loaded: Loaded


async def push(
    fleet: Fleet,
    directory: str | os.PathLike,
    label: str,
    *,
    mode: Mode = "retract",
    at_once: int = 0,
    arrays: Any = None,
    probe: Probe | None = None,
) -> PushReport:
    """Gives every healthy or resting server the weights in `directory`, under the name `label`; a directory of adapters
    is loaded beside its base, and nothing is paused (lora.py).

    Each server by itself: pause, load, see that it reports exactly this label, continue, see that it holds these
    weights (proof.py). A server where any of that fails, or is cancelled half-way, is poisoned: it may be paused, or
    hold new weights under an old name; what it runs moves to others, and it gets no request before it has loaded a
    published version in full. One that cannot be reached is suspect. The version counts as published if one server has
    it; if none has, all go back to the one before, and it is pushed again, ATTEMPTS times in all.

    Args:
      directory: seen by the servers under the same path (same machine, shared file system), unless they have stagers.
      mode: what happens to running requests. `retract` leaves them on the server, `abort` returns them, and the client
        resumes them; both recompute the cache under the new weights. `drain` lets them end first, so that each
        completion is of one version, while the slots of those that have ended stand empty. `in_place` goes on over the
        cache of the old weights: the shortest pause, but the tokens that follow are neither version's, though they
        carry the new one's name; later requests do not find that cache, for its key has the old name.
      at_once: servers that are given the weights at a time, so that the others go on generating; 0 = all of them.
      arrays: the weights themselves, for servers with a `handover`; the directory is for those that come back later.
        With "" for a directory they are kept until the next push.
      probe: what the trainer says of a prompt under these weights; a server that differs too much does not have them.

    Raises ValueError before anything is paused, RuntimeError if no server loaded the weights or none is left.
    """
    path = Path(directory).absolute()
    written = str(directory) != "" or arrays is None
    if written and not path.is_dir():
        raise ValueError(f"push: the directory to push must exist, got {path}")
    if versions.number(label) < 0:
        raise ValueError(f"push: a label must be '<version>-<8 hex digits>', got {label!r}")
    if mode not in get_args(Mode):
        raise ValueError(f"push: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if at_once < 0:
        raise ValueError(f"push: at_once must be at least 0, got {at_once}")
    now = asyncio.get_running_loop().time
    start = now()
    weights = lora.published(path, label) if written else Published("", label)
    weights = replace(weights, arrays=arrays, probe=probe)
    for attempt in itertools.count(1):
        loaded, failed = await _everywhere(fleet, weights, mode, at_once)
        if loaded:
            break
        fleet.counts["undone"] += 1
        why = f"push: no server took version {label}: {'; '.join(failed.values())}"
        if attempt == ATTEMPTS:
            raise RuntimeError(why)
        log.warning("%s; attempt %d of %d", why, attempt, ATTEMPTS)
    took = list(loaded.values())
    report = PushReport(
        label=label,
        loaded=tuple(loaded),
        failed=failed,
        **{name: max(getattr(one.loaded, name) for one in took) for name in ("pause_s", "load_s", "prove_s")},
        probe_diff=max((x for one in took if (x := one.loaded.probe_diff) is not None), default=None),
        stage_s=max(one.stage_s for one in took),
        stage_bytes=sum(one.stage_bytes for one in took),
        bytes=sum(file.stat().st_size for file in path.iterdir()) if written else 0,
        total_s=now() - start,
    )
    log.info("pushed %s to %d servers, paused %.3f s", report.label, len(loaded), report.pause_s)
    journal.note("push", begun=start, **asdict(report))
    return report


async def _everywhere(
    fleet: Fleet, weights: Published, mode: str, at_once: int
) -> tuple[dict[str, Taken], dict[str, str]]:
    """What the push took on each server that took the weights, and why the others did not."""
    fleet.awake.set()
    await _ready(fleet)
    async with fleet.publishing:
        servers = [server for server in fleet.servers if server.state in SOUND]
        turn = asyncio.Semaphore(at_once or len(servers))
        ends = await asyncio.gather(*(_push(fleet, server, weights, mode, turn) for server in servers))
        ended = [(server.url, end) for server, end in zip(servers, ends, strict=True)]
        loaded = {url: end for url, end in ended if not isinstance(end, str)}
        if loaded:  # arrays would stay in memory for nobody where there are files
            fleet.published = replace(weights, arrays=None) if weights.directory else weights
        return loaded, {url: why for url, why in ended if isinstance(why, str)}


async def _ready(fleet: Fleet) -> None:
    """Waits for a server to push to, and for suspects: they soon are healthy or known not to be."""
    while not {*SOUND} & (now := {server.state for server in fleet.servers}) or "suspect" in now:
        fleet.hope()
        await asyncio.sleep(POLL_S)


async def _push(fleet: Fleet, server: Server, weights: Published, mode: str, turn: asyncio.Semaphore) -> Taken | str:
    """What it took, or why the server did not take the weights."""
    now = asyncio.get_running_loop().time
    begun = now()
    try:
        staged = await fleet.on(server, server.stage(weights))
    except (ValueError, RuntimeError) as error:
        why = f"the version {weights.label} did not get there: {error}"
        if server.state in SOUND:  # it lacks the version and nothing else
            fleet.fail(server, "stale", f"{server.url}: {why}")
        return why
    stage_s = now() - begun
    drain = mode == "drain" and server.state == "healthy"  # what a resting one holds waits for this very push
    async with turn, fleet.drained(server) if drain and not weights.base else contextlib.nullcontext():
        loaded = await _load(fleet, server, weights, "retract" if mode == "drain" else mode)
    if isinstance(loaded, str):
        return loaded
    if weights.base:
        await lora.unload(server)
    return Taken(staged.bytes, stage_s, loaded)


async def _load(fleet: Fleet, server: Server, weights: Published, mode: str) -> Loaded | str:
    if server.state not in SOUND:  # it fell out of traffic while the weights were on their way
        return server.why
    try:
        took = await fleet.on(server, lora.load(server, weights, mode))
        if server.state == "resting":
            fleet.turn(server, "healthy", "")
        return took
    except asyncio.CancelledError:
        fleet.fail(server, "poisoned", f"{server.url}: the push of {weights.label} was interrupted")
        raise
    except Moved as error:  # it hung, and is tended already
        return str(error)
    except Unreached as error:
        fleet.miss(server, str(error))
        return str(error)
    except (ValueError, RuntimeError) as error:
        why = f"the push of {weights.label} failed: {error}"
        fleet.fail(server, "poisoned", why)
        return why


async def written(write: Callable[[], Path], root: Path, in_use: Callable[[], Collection[str]]) -> Path:
    """The directory that `write`, in a thread, has written; on a full disk older versions go, and it is tried again.

    Args:
      in_use: labels of versions under `root` that must stay.

    Raises OSError where there is no room after a minute.
    """
    attempt = 0
    while True:
        try:
            return await asyncio.to_thread(write)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or attempt == ROOMS:
                raise
            log.warning("%s: no room for a version (%s); older ones go, and it is tried again", root, error.strerror)
        await asyncio.to_thread(prune, root, 1, in_use())
        await asyncio.sleep(2.0**attempt)
        attempt += 1


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
