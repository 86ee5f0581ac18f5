"""SGLang's routes for adapters by name, over the embedded engine: a request names the one that it wants (`lora_path`).

Loading pauses nothing; unloading waits for the requests that use the adapter. Other than with SGLang a name that was
unloaded is unknown: it is not loaded again behind the caller's back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ...adapters import peft
from ..chat import fields
from . import request_parsing, sglang_api


class Adapters:
    """Handlers of these routes, over the same engine as the native ones."""

    def __init__(self, service: sglang_api.Service):
        self.engine = service.engine

    def routes(self) -> list[Route]:
        return [
            Route("/load_lora_adapter", self.load, methods=["POST"]),
            Route("/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, http: HTTPRequest) -> Response:
        """Reads a PEFT directory, checks it whole (with a manifest.json its hashes too), and has it by its name."""
        body = await sglang_api.read(http)
        fields.refuse(body, {"pinned": request_parsing.NOTHING})
        name, path = _text(body, "lora_name"), _text(body, "lora_path")

        def load() -> None:
            peft.verify(path)
            spec, tree = peft.load(path, self.engine.config)
            self.engine.load_adapter(name, spec, tree, path)

        return await self._answer(load)

    async def unload(self, http: HTTPRequest) -> Response:
        name = _text(await sglang_api.read(http), "lora_name")
        return await self._answer(lambda: self.engine.unload_adapter(name))

    async def _answer(self, act: Callable[[], None]) -> Response:
        try:
            await asyncio.to_thread(act)
        except ValueError as error:
            said: dict[str, Any] = {"success": False, "error_message": str(error)}
        else:
            said = {"success": True, "error_message": ""}
        return sglang_api.Answer(said | {"loaded_adapters": self.engine.adapters}, 200 if said["success"] else 400)


def _text(body: dict, name: str) -> str:
    value: Any = body.get(name)
    fields.rule(isinstance(value, str) and value, name, "must be a string that is not empty", value)
    return value
