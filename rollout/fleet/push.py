"""Pushes a published version to all servers of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from .. import events
from ..errors import ServerError
from ..processes.http_answers import Unreached
from ..processes.turns import turn
from ..servers.labels import MANIFEST, manifest_bytes, version_of
from ..servers.server import Server
from ..servers.types import SOUND, Loaded, Probe, Published
from ..weights import load, lora
from .fleet import Fleet, Rerouted

log = logging.getLogger(__name__)

POLL_S = 0.05
Mode = Literal["retract", "abort", "drain", "in_place"]


@dataclass(frozen=True)
class Push:
    """How new weights reach the servers.

    Attributes:
      mode: what happens to running requests, which continue afterwards: `retract` recomputes their caches on the
        server; `abort` does so through the client; `drain` waits for them to finish; `in_place` keeps the old weights'
        caches, which gives the shortest pause, but the tokens that follow are from neither version's distribution.
      parallel_servers: servers updated at a time, while the others generate; 0 = all.
      lora: what a version is when adapters are trained: adapters loaded by name over weights that stay on the servers
        (`adapter`), or the merged model (`merged`); `auto` = adapters if the servers can load them.
      way: servers read files from the published directory (`disk`), or SGLang receives tensors over HTTP (`tensors`;
        whole models only).
      bucket: folder of an object store, such as s3://BUCKET/PREFIX, where each version is uploaded once and all stagers
        fetch it (docs/servers.md); "" = they fetch from this process.
      tolerance: largest mean absolute difference, in nats per token, between a server's and the trainer's
        log-probabilities of a known prompt; a server beyond it does not have the weights. 0 = do not compare.
      canary_every: versions between canaries: comparisons of several prompts while servers generate, also over their
        prefix caches (docs/reliability.md); 0 = none.
    """

    mode: Mode = "retract"
    parallel_servers: int = 0
    lora: Literal["auto", "adapter", "merged"] = "auto"
    way: Literal["disk", "tensors"] = "disk"
    bucket: str = ""
    tolerance: float = 0.2
    canary_every: int = 20

    def __post_init__(self):
        if self.parallel_servers < 0 or not self.tolerance >= 0 or self.canary_every < 0:
            raise ValueError(
                "push: parallel_servers, tolerance and canary_every must be at least 0, got "
                f"{self.parallel_servers}, {self.tolerance} and {self.canary_every}"
            )


@dataclass(frozen=True)
class PushReport:
    """The result of a push; times are those of the slowest server, in seconds.

    Attributes:
      label: the weight label pushed.
      loaded: addresses of the servers that have verified it and generate.
      failed: address -> reason of the servers that did not load it; they get no requests until they have.
      pause_s: paused generation, from the pause call to the answer of the resume call; includes load_s.
      load_s: loading; also for adapters, which pause nothing.
      prove_s: verification after that; answers are held back meanwhile.
      probe_diff: largest mean absolute difference from the trainer's log-probabilities on the probe, in nats per token;
        None without a probe.
      stage_s: bringing the weights to where the server reads them, while it generates.
      stage_bytes: bytes fetched for that by all servers together.
      bytes: of the version's tensors, by its manifest; 0 if none were written.
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


class PushTiming(NamedTuple):
    """The timing of a push on one server."""

    stage_bytes: int
    stage_s: float
    loaded: Loaded


async def push_weights(
    fleet: Fleet,
    directory: str | os.PathLike,
    label: str,
    *,
    mode: Mode = "retract",
    parallel_servers: int = 0,
    arrays: Any = None,
    probe: Probe | None = None,
    canaries: tuple[Probe, ...] = (),
) -> PushReport:
    """Pushes the weights in `directory` as version `label` to every healthy or offloaded server. Adapters are loaded
    over their base, without a pause (weights/lora.py).

    Independently for each server: stage, pause, load, compare the reported label, resume, verify the weights
    (weights/load.py). If a step fails or is cancelled half-way the server becomes `weights_unknown`: its requests move
    to other servers, and it gets none before it has loaded a published version completely. One that cannot be reached
    becomes `suspect`. The version counts as published once one server has it. If none does, all return to the previous
    version, or of a first push to this one, and the push is repeated, `Timeouts.push_attempts` times in all.

    Args:
      directory: a path that the servers see too (same machine or shared file system), unless they have stagers.
      mode, parallel_servers: as in `Push`.
      arrays: the weights in memory, for servers with a `handover`; recovering servers still read the directory.
        With directory "" the arrays are kept until the next push.
      probe: a prompt with the log-probabilities it has under these weights.
      canaries: further ones, for `canary.check`.

    Raises ValueError before anything is paused, ServerError if no server loaded the weights or none is left.
    """
    path = Path(directory).absolute()
    written = str(directory) != "" or arrays is None
    if written and not path.is_dir():
        raise ValueError(f"push: the directory to push must exist, got {path}")
    if version_of(label) < 0:
        raise ValueError(f"push: a label must be '<version>-<8 hex digits>', got {label!r}")
    if mode not in get_args(Mode):
        raise ValueError(f"push: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if parallel_servers < 0:
        raise ValueError(f"push: parallel_servers must be at least 0, got {parallel_servers}")
    now = asyncio.get_running_loop().time
    start = now()
    weights = lora.published(path, label) if written else Published("", label)
    weights = replace(weights, arrays=arrays, probe=probe, canaries=canaries)
    attempts = fleet.timeouts.push_attempts
    for attempt in itertools.count(1):
        if not (written or fleet.not_offloaded.is_set()):  # the last version went with the released memory
            fleet.published = weights
        fleet.not_offloaded.set()
        await _wait_for_servers(fleet)
        async with fleet.publishing:
            servers = [server for server in fleet.servers if server.state in SOUND]
            slots = asyncio.Semaphore(parallel_servers or len(servers))
            results = await asyncio.gather(*(_push_to_one(fleet, server, weights, mode, slots) for server in servers))
            by_url = list(zip((server.url for server in servers), results, strict=True))
            loaded = {url: result for url, result in by_url if not isinstance(result, str)}
            failed = {url: result for url, result in by_url if isinstance(result, str)}
            if loaded:  # with files the arrays are no longer needed
                fleet.published = replace(weights, arrays=None) if weights.directory else weights
            elif fleet.published is None and attempt < attempts:  # no former version for them to return to
                fleet.published = weights
        if loaded:
            break
        fleet.counts["undone"] += 1
        why = f"push: no server took version {label}: {'; '.join(failed.values())}"
        if attempt == attempts:
            raise ServerError(why)
        log.warning("%s; attempt %d of %d", why, attempt, attempts)
    took = list(loaded.values())
    report = PushReport(
        label=label,
        loaded=tuple(loaded),
        failed=failed,
        **{name: max(getattr(one.loaded, name) for one in took) for name in ("pause_s", "load_s", "prove_s")},
        probe_diff=max((x for one in took if (x := one.loaded.probe_diff) is not None), default=None),
        stage_s=max(one.stage_s for one in took),
        stage_bytes=sum(one.stage_bytes for one in took),
        bytes=json.loads(manifest_bytes(path / MANIFEST) or b"{}").get("bytes", 0) if written else 0,
        total_s=now() - start,
    )
    log.info("pushed %s to %d servers, paused %.3f s", report.label, len(loaded), report.pause_s)
    events.emit("push", begun=start, **asdict(report))
    return report


async def _wait_for_servers(fleet: Fleet) -> None:
    """Waits for a server to push to, and for suspects, which soon turn out healthy or not.

    Raises ServerError if none is left, or none came in `fleet.timeout_s`.
    """
    fleet.waiting_push = True
    try:
        async with asyncio.timeout(fleet.timeout_s if math.isfinite(fleet.timeout_s) else None):
            while not {*SOUND} & (now := {server.state for server in fleet.servers}) or "suspect" in now:
                fleet.raise_if_unrecoverable()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        why = "; ".join(server.why for server in fleet.servers) or "there is none"
        raise ServerError(f"push: no server to push to in {fleet.timeout_s:g} s ({why})") from None
    finally:
        fleet.waiting_push = False


async def _push_to_one(
    fleet: Fleet, server: Server, weights: Published, mode: str, slots: asyncio.Semaphore
) -> PushTiming | str:
    """The timing, or why the server did not load the weights."""
    await turn()
    now = asyncio.get_running_loop().time
    begun = now()
    fetched = 0
    try:
        if server.stager:
            fetched = (await fleet.on(server, server.stager.stage(weights))).bytes
    except (ValueError, ServerError) as error:
        why = f"staging version {weights.label} failed: {error}"
        if server.state in SOUND:  # the server is fine, but lacks the version
            fleet.fail(server, "stale", f"{server.url}: {why}")
        return why
    stage_s = now() - begun
    drain = mode == "drain" and server.state == "healthy"  # an offloaded server's requests wait for this very push
    mode = "retract" if mode == "drain" else mode
    async with slots, fleet.drained(server) if drain and not weights.base else contextlib.nullcontext():
        if server.state not in SOUND:  # it was taken out of traffic while the weights were on their way
            return server.why
        base = weights.base
        try:
            loaded = await fleet.on(
                server, lora.load(server, weights, base, mode) if base else load.load(server, weights, mode)
            )
        except asyncio.CancelledError:
            fleet.fail(server, "weights_unknown", f"{server.url}: the push of {weights.label} was interrupted")
            raise
        except Rerouted as error:  # it hung, and is being recovered already
            return str(error)
        except Unreached as error:
            fleet.mark_suspect(server, str(error))
            return str(error)
        except (ValueError, ServerError) as error:
            why = f"the push of {weights.label} failed: {error}"
            fleet.fail(server, "weights_unknown", why)
            return why
        if server.state == "offloaded":
            fleet.set_state(server, "healthy", "")
    if base:
        await lora.unload(server)
    return PushTiming(fetched, stage_s, loaded)
