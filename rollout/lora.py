"""Versions that are adapters: they are loaded beside a base that stays on the servers, each under its label as a name.

Nothing is paused for that. A request names the newest adapter that its server has (`lora_path`) and ends under it; the
newest two stay loaded, and those that requests of ours still use. Servers report of a token the weights under the
adapter (SGLang 0.5.23 does), so a token counts as sampled by a version if the server answered a request that names it
and says that the weights under it are the base that this version belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from . import proof, versions
from .server import REACH_S, Loaded, Part, Published, Server

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"  # what PEFT calls it
KEEP = 2  # adapters on a server, besides those in use
LOAD_S = 600.0


def published(directory: Path, label: str) -> Published:
    """The version in `directory`; of adapters with the base that they name, whose files must be those that they were
    made for.

    Raises:
      ValueError: adapters without a manifest, or whose base is not there or has another label.
    """
    if not (directory / CONFIG).is_file():
        return Published(str(directory), label)
    try:
        base = str(json.loads((directory / CONFIG).read_bytes())["base_model_name_or_path"])
        wanted = str(json.loads((directory / "manifest.json").read_bytes())["base"])
        found = versions.version_string(Path(base) / "manifest.json")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory}: adapters to push need a manifest and a published base (peft.write_published), got {error!r}"
        ) from error
    if found != wanted:
        raise ValueError(f"{directory}: these adapters belong to the base {wanted}, but {base} is {found}")
    return Published(str(directory), label, Published(base, wanted))


async def load(server: Server, weights: Published, mode: str) -> Loaded:
    """As `Server.load_weights`. Of adapters the base comes first, in full, where the server has another; then they are
    loaded by name, the server must list the name with this directory, and prove that it is these adapters.

    Raises as `Server.load_weights`.
    """
    if weights.base is None:  # what an adapter has begun must not go on over other weights
        took = await server.load_weights(weights, "abort" if server.adapters else mode)
        server.base, server.adapters = "", []
        return took
    below = Loaded(0.0, 0.0, 0.0, None)
    held = server.base == weights.base.label and not server.released
    if not held or await server.weight_label(reach_s=REACH_S) != server.base:
        mode = "abort" if server.adapters else mode
        server.adapters = []
        below = await server.load_weights(weights.base, mode)
        server.base = weights.base.label
    directory, label = (await server.stage(weights)).directory, weights.label
    now = asyncio.get_running_loop().time
    begun = now()
    if label not in await loaded(server):
        body = {"lora_name": label, "lora_path": directory}
        answer = await server.call("POST", "/load_lora_adapter", body, timeout_s=LOAD_S, reach_s=REACH_S)
        if answer.get("success") is not True:
            raise RuntimeError(f"{server.url}/load_lora_adapter: {answer.get('error_message') or answer}")
        if (where := (await loaded(server)).get(label)) != directory:
            raise RuntimeError(f"{server.url}: lists {where!r} for adapter {label}, which was loaded from {directory}")
    there = now()
    difference = await proof.ask(server, weights.probe, label) if weights.probe else None
    if label not in server.adapters:
        server.adapters.append(label)
    server.labels.append(label)
    server.admitted = len(server.labels) - 1
    server.cached.clear()  # what another adapter computed is of no use to it
    return Loaded(below.pause_s, below.load_s + there - begun, below.prove_s + now() - there, difference)


async def loaded(server: Server) -> dict[str, str]:
    """Directories of the adapters that the server lists, by name."""
    answer = await server.call("GET", "/v1/models", timeout_s=60.0, reach_s=REACH_S)
    try:
        return {card["id"]: card["root"] for card in answer["data"] if card.get("parent")}
    except (KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{server.url}/v1/models: not a list of models ({error!r})") from error


async def unload(server: Server) -> None:
    """Unloads what no request uses any more, the newest apart; what cannot be unloaded now is when the next comes."""
    keep = {*server.adapters[-KEEP:], *(name for name, users in server.using.items() if users)}
    server.adapters = [name for name in server.adapters if name in keep]  # first: no request begins with another one
    try:
        for name in await loaded(server):
            if versions.number(name) >= 0 and name not in keep:
                await server.call("POST", "/unload_lora_adapter", {"lora_name": name}, timeout_s=60.0)
    except (ValueError, RuntimeError) as error:
        log.warning("an adapter stays loaded for now: %s", error)


def choose(server: Server, begun: str) -> str:
    """The adapter of a request: the one that `begun` it if the server has that, else the newest; "" without any."""
    return begun if begun in server.adapters else server.adapters[-1] if server.adapters else ""


@contextlib.contextmanager
def using(server: Server, name: str) -> Iterator[dict[str, str]]:
    """What the body of a request says to use the adapter `name`, which stays loaded meanwhile; nothing for ""."""
    if not name:
        yield {}
        return
    server.using[name] += 1
    try:
        yield {"lora_path": name}
    finally:
        server.using[name] -= 1


def stamped(server: Server, name: str, part: Part) -> Part:
    """The answer to a request that named an adapter, with its name as the label of tokens whose weights are the base;
    where the server says itself which adapter it used, that."""
    if not name:
        return part
    said = part.info.get("lora_path") or name
    return dataclasses.replace(part, labels=[said if label == server.base else label for label in part.labels])


async def refusal(urls: Iterable[str], rank: int, modules: Collection[str]) -> str:
    """Why adapters of this rank, of these modules by their names in checkpoints, cannot be loaded on all servers at
    `urls`; "" if they can.

    Raises RuntimeError if a server does not answer.
    """
    async with aiohttp.ClientSession() as http:
        for url in urls:
            info = await Server(url.rstrip("/"), http).server_info(timeout_s=30.0)
            if why := _refusal(info, rank, modules):
                return f"{url} {why}"
    return ""


def _refusal(info: Mapping[str, Any], rank: int, modules: Collection[str]) -> str:
    if info.get("enable_lora") is not True:
        return "serves no adapters (SGLang: --enable-lora)"
    most, room, targets = (info.get(k) for k in ("max_lora_rank", "max_loaded_loras", "lora_target_modules"))
    if most is not None and most < rank:
        return f"takes adapters of rank {most} at most, not {rank} (SGLang: --max-lora-rank)"
    missing = sorted(set(modules) - set(targets or ()))
    if "all" not in (targets or ()) and missing:
        return f"takes no adapters of {', '.join(missing)} (SGLang: --lora-target-modules)"
    if room is not None and room <= KEEP:
        return f"keeps {room} adapters at most, and a push needs {KEEP + 1} (SGLang: --max-loaded-loras)"
    if info.get("dp_size", 1) != 1:
        return "is several replicas in one, which SGLang loads no adapters on (--dp-size); start a server for each"
    return ""
