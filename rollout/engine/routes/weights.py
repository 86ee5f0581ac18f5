"""SGLang's routes for weights and the memory that they and the caches take.

A refused update changes nothing: a checkpoint with a missing, unexpected or misshapen tensor, or an update during an
in-place pause after which requests would continue with the cache of the old weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ....adapters import hf
from ...chat import fields
from ...processes.http_limits import read_json
from ...servers import labels
from ..checkpoint import readable, state_of, together
from ..engine import RELEASABLE
from .replies import Answer
from .service import Service


@dataclasses.dataclass(frozen=True)
class Staged:
    """Weights prepared for an update.

    Attributes:
      files: the `state_of` of the folder `path` when they were read.
    """

    path: str
    files: frozenset
    weights: Any
    checksums: dict[str, str]


class Weights:
    """Handlers of these routes, for the engine of `service`."""

    def __init__(self, service: Service):
        self.service, self.engine = service, service.engine
        self._updating = asyncio.Lock()
        self._staged: Staged | None = None

    def routes(self) -> list[Route]:
        post, either = ["POST"], ["GET", "POST"]
        return [
            Route("/release_memory_occupation", self.release_memory_occupation, methods=post),
            Route("/resume_memory_occupation", self.resume_memory_occupation, methods=post),
            Route("/stage_weights_from_disk", self.stage_weights_from_disk, methods=post),
            Route("/update_weights_from_disk", self.update_weights_from_disk, methods=post),
            Route("/update_weight_version", self.update_weight_version, methods=post),
            Route("/weights_checker", self.weights_checker, methods=either),
        ]

    # -- memory ----------------------------------------------------------------------------------

    async def release_memory_occupation(self, http: HTTPRequest) -> Response:
        """Releases the memory of caches, weights, or both."""
        named = tags(await read_json(http))
        if "weights" in named:
            self._staged = None
        await asyncio.to_thread(self.engine.release, named)
        return Answer(None)

    async def resume_memory_occupation(self, http: HTTPRequest) -> Response:
        """Allocates released memory.

        Unlike SGLang, whose weights then have arbitrary content, this server generates only once weights are loaded;
        and it is not an error if nothing was released.
        """
        await asyncio.to_thread(self.engine.reclaim, tags(await read_json(http)))
        return Answer(None)

    # -- weights ---------------------------------------------------------------------------------

    async def update_weights_from_disk(self, http: HTTPRequest) -> Response:
        """Loads a checkpoint folder of the same model, once all of it is read and checked."""
        body = await read_json(http)
        async with self._updating:
            try:
                version = await self._update(body)
            except ValueError as error:
                return Answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return Answer({"success": True, "message": message, "num_paused_requests": 0})

    async def stage_weights_from_disk(self, http: HTTPRequest) -> Response:
        """Reads a checkpoint folder of the same model while requests continue.

        An update from this folder then only swaps the weights, which shortens the pause.
        """
        body = await read_json(http)
        async with self._updating:
            try:
                await self._stage(body)
            except ValueError as error:
                return Answer({"success": False, "message": str(error)}, 400)
        return Answer({"success": True, "message": "Staged model weights."})

    async def _stage(self, body: dict) -> Staged:
        path = fields.name(body, "model_path")
        fields.refuse(body, {"load_format": ("auto", "safetensors")})
        files = await asyncio.to_thread(state_of, path)
        if self._staged is None or (self._staged.path, self._staged.files) != (path, files):
            self._staged = None  # never three versions in memory
            self._staged = Staged(path, files, *await asyncio.to_thread(self.service.read, path))
        return self._staged

    async def _update(self, body: dict) -> str:
        flush = fields.boolean({"flush_cache": True, **body}, "flush_cache")
        version = None if body.get("weight_version") is None else fields.name(body, "weight_version")
        staged = await self._stage(body)
        # Tokens must not get the old weights' label.
        version = version or f"unnamed-{together(staged.checksums)[:8]}"
        if fields.boolean(body, "abort_all_requests"):
            self.engine.abort_all()
        await asyncio.to_thread(self.engine.swap, staged.weights, version, flush=flush)  # waits for running requests
        self._staged = None
        self.service.path, self.service.checksums = staged.path, staged.checksums
        return version

    async def update_weight_version(self, http: HTTPRequest) -> Response:
        """Renames the weights in use; a trainer's label must be theirs."""
        body = await read_json(http)
        version = fields.name(body, "new_version")
        held = labels.version_of(version) < 0 or await asyncio.to_thread(self._may_have, version)
        fields.rule(held, "new_version", "a trainer's label must be that of the content served", version)
        if fields.boolean({"abort_all_requests": True, **body}, "abort_all_requests"):
            self.engine.abort_all()
        await asyncio.to_thread(self.engine.set_version, version)
        message = f"Weight version updated to {version}"
        return Answer({"success": True, "message": message, "new_version": version})

    def _may_have(self, label: str) -> bool:
        """Whether a trainer's label is that of the weights in use: theirs already, or the hash of their manifest."""
        if label == self.engine.version:
            return True
        with readable(self.service.path):
            manifest = hf.read_manifest(Path(self.service.path), self.service.checksums)
            if manifest is None:
                return False
            own = {name: entry["xxh3_128"] for name, entry in manifest["tensors"].items()}
        numbered = hf.json_bytes(manifest | {"version": labels.version_of(label)})
        return own == self.service.checksums and label == labels.label_of(numbered)

    async def weights_checker(self, http: HTTPRequest) -> Response:
        """The xxh3-128 hash of each loaded tensor, as in a published manifest.json."""
        action = (await read_json(http)).get("action", "checksum") if await http.body() else "checksum"
        if action != "checksum":
            message = f"action: must be checksum, got {fields.shown(action)}"
            return Answer({"success": False, "message": message}, 400)
        if not self.engine.loaded:
            return Answer({"success": False, "message": "weights: released, and none loaded since"}, 400)
        total = together(self.service.checksums)
        ranks = [{"checksums": self.service.checksums, "per_gpu_checksum": total}]
        return Answer({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": total})


def tags(body: dict) -> Sequence[str]:
    """The kinds of memory that a request names; all of them if it names none."""
    named = body.get("tags") or RELEASABLE
    right = isinstance(named, list | tuple) and all(tag in RELEASABLE for tag in named)
    fields.rule(right, "tags", f"must be a list of {', '.join(RELEASABLE)}", named)
    return named
