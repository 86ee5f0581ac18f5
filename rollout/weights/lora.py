"""Pushes LoRA adapters: each version is loaded under its label as a name, over base weights that stay on the servers.

Loading does not pause generation. A request names the newest adapter of its server (`lora_path`) and keeps it to the
end; the newest two stay loaded, and those that our requests still use. For each token servers report the label of the
base weights (SGLang 0.5.23 does), so a token counts as sampled by a version if the server answered a request for that
adapter and reports the base that the version belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import aiohttp

from ..errors import ServerError
from ..processes import keys
from ..servers import kinds
from ..servers.answers import ADAPTERS
from ..servers.labels import MANIFEST, manifest_bytes, read_label, version_of
from ..servers.server import Server
from ..servers.types import Loaded, Part, Published
from . import load as full_load
from . import verify

log = logging.getLogger(__name__)

ASKED_S = 30.0  # for a server to say what it is
CONFIG = "adapter_config.json"  # PEFT's name


def published(directory: Path, label: str) -> Published:
    """The version in `directory`; of adapters with the base that they name, whose files must be those that they were
    made for.

    Raises:
      ValueError: a manifest that is no file; adapters without one, or whose base is not there or has another label.
    """
    manifest = manifest_bytes(directory / MANIFEST)
    if not (directory / CONFIG).is_file():
        return Published(str(directory), label)
    try:
        base = str(json.loads((directory / CONFIG).read_bytes())["base_model_name_or_path"])
        wanted = str(json.loads(manifest or b"{}")["base"])
        found = read_label(Path(base) / MANIFEST)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory}: adapters to push need a manifest and a published base (peft.write_published), got "
            f"{type(error).__name__}: {error!s:.200}"
        ) from error
    if found != wanted:
        raise ValueError(f"{directory}: these adapters belong to the base {wanted}, but {base} is {found}")
    return Published(str(directory), label, Published(base, wanted))


async def load(server: Server, weights: Published, base: Published, mode: str) -> Loaded:
    """Loads an adapter over `base`: first the base (`load.load`) if the server has another one, then the adapter by
    name, after which the server must list it with this directory and pass the probe.

    Raises as `load.load`.
    """
    below = Loaded(0.0, 0.0, 0.0, None)
    if server.base != base.label or server.released or not await _has_base(server):
        below = await full_load.load(server, base, mode)
        server.base = base.label
    directory = (await server.stager.stage(weights)).directory if server.stager else weights.directory
    label = weights.label
    now = asyncio.get_running_loop().time
    begun = now()
    server.folders.pop(label, None)
    if not server.adapters:  # those of other runs may be of another rank, beside which servers load none
        await unload(server)
    if (there := (await server.api.adapters()).get(label)) != directory:
        if there is not None:  # loaded by another run, or by this one before it was killed, from files that may be gone
            await server.api.unload_adapter(label)
        await server.api.load_adapter(label, directory)
        if (where := (await server.api.adapters()).get(label)) != directory:
            raise ServerError(f"{server.url}: lists {where!r} for adapter {label}, which was loaded from {directory}")
    loaded = now()
    difference = None
    if weights.probe:
        answer = await server.api.read(weights.probe.tokens, adapter=label, timeout_s=full_load.PROBE_S)
        try:
            difference = verify.probe_difference(server, weights.probe, answer)
        except ServerError:
            with contextlib.suppress(ServerError, ValueError):
                await server.api.unload_adapter(label)  # else the next attempt would find it loaded
            raise
    if label not in server.adapters:
        server.adapters.append(label)
    server.folders[label] = directory
    server.labels.append(label)
    server.admitted = len(server.labels) - 1
    server.cached.clear()  # prefixes computed with another adapter are of no use to this one
    return Loaded(below.pause_s, below.load_s + loaded - begun, below.prove_s + now() - loaded, difference)


async def _has_base(server: Server) -> bool:
    """Whether the server still has the base that it was given."""
    now = await server.api.reported_weights(reach_s=server.api.reach_s)
    return now.label == server.base and not server.replaced(now)


async def replaced(server: Server, *, timeout_s: float) -> str:
    """Why an adapter that requests name is another than the one loaded under its name; "" if none is. One that is
    missing is found by the next request.

    Raises ServerError, ValueError if the server does not list its adapters.
    """
    known = {name: server.folders[name] for name in server.adapters if name in server.folders}
    listed = await server.api.adapters(timeout_s=timeout_s) if known else {}
    for name, folder in known.items():
        where = listed.get(name, folder)
        if where != folder and server.folders.get(name) == folder:  # else it was loaded again meanwhile
            return f"has another adapter under the name {name!r}, loaded from {where!r}, not {folder!r}"
    return ""


async def unload(server: Server) -> None:
    """Unloads adapters that no request uses, except the newest; one that fails to unload is retried next time."""
    keep = {*server.adapters[-ADAPTERS:], *(name for name, users in server.using.items() if users)}
    server.adapters = [name for name in server.adapters if name in keep]  # first: no new request may choose the others
    server.folders = {name: folder for name, folder in server.folders.items() if name in keep}
    try:
        for name in await server.api.adapters():
            if version_of(name) >= 0 and name not in keep:
                await server.api.unload_adapter(name)
    except (ValueError, ServerError) as error:
        log.warning("an adapter stays loaded for now: %s", error)


def choose(server: Server, begun: str) -> str:
    """The adapter for a request: the one that `begun` it if the server has it, else the newest; "" without any."""
    return begun if begun in server.adapters else server.adapters[-1] if server.adapters else ""


@contextlib.contextmanager
def using(server: Server, name: str) -> Iterator[None]:
    """Keeps the adapter `name` loaded while a request uses it."""
    if not name:
        yield
        return
    server.using[name] += 1
    try:
        yield
    finally:
        server.using[name] -= 1


def stamped(server: Server, name: str, part: Part) -> Part:
    """Relabels tokens that the server attributes to the base weights with the adapter that it says it used, or the one
    that the request named if it says nothing; a server that says it used none keeps the base's label."""
    if not name:
        return part
    used = part.adapter or (server.base if "lora_path" in part.info else name)
    return dataclasses.replace(part, labels=[used if label == server.base else label for label in part.labels])


async def refusal(urls: Iterable[str], rank: int, modules: Collection[str]) -> str:
    """Why some server at `urls` cannot load adapters of this rank on these modules (names as in checkpoints); "" if
    all can.

    Raises ServerError if a server does not answer.
    """
    async with aiohttp.ClientSession() as http:
        for url in urls:
            server = await kinds.found(url.rstrip("/"), http, ready_s=ASKED_S, key_variable=keys.SERVER)
            if why := await server.adapter_refusal(rank, modules):
                return f"{url} {why}"
    return ""
