"""SGLang's routes to load and unload LoRA adapters by name; generation requests select one with `lora_path`.

Loading does not pause generation; unloading waits for the requests that use the adapter. Unlike in SGLang, an unloaded
name is unknown afterwards: it is not reloaded implicitly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ....adapters import peft
from ...chat import fields
from ...processes.http_limits import read_json
from ..checkpoint import CONFIG_BYTES, check_file_size, readable
from . import request_parsing
from .replies import Answer
from .service import Service


class Adapters:
    """Handlers of these routes, for the engine of `service`."""

    def __init__(self, service: Service):
        self.engine = service.engine
        self._unloading = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/load_lora_adapter", self.load, methods=["POST"]),
            Route("/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, http: HTTPRequest) -> Response:
        """Loads a PEFT directory under a name, once all of it is checked, hashes of its manifest included."""
        body = await read_json(http)
        fields.refuse(body, {"pinned": request_parsing.NOTHING})
        name, path = fields.name(body, "lora_name"), fields.name(body, "lora_path")

        def load() -> None:
            with readable(path):
                if (config := Path(path) / peft.CONFIG).is_file():
                    check_file_size(config, CONFIG_BYTES)
                spec, tree = peft.load(path, self.engine.config)
            self.engine.load_adapter(name, spec, tree, path)

        return await self._answer(load)

    async def unload(self, http: HTTPRequest) -> Response:
        """Unloads an adapter, once no request uses it."""
        name = fields.name(await read_json(http), "lora_name")
        async with self._unloading:  # it may wait for requests: at most one thread does
            return await self._answer(lambda: self.engine.unload_adapter(name))

    async def _answer(self, act: Callable[[], None]) -> Response:
        try:
            await asyncio.to_thread(act)
        except ValueError as error:
            result: dict[str, Any] = {"success": False, "error_message": str(error)}
        else:
            result = {"success": True, "error_message": ""}
        return Answer(result | {"loaded_adapters": self.engine.adapters}, 200 if result["success"] else 400)
