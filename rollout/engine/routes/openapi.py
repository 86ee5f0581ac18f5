"""`/openapi.json`: the routes of the server and the fields of their bodies, from the tables that it checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ...chat.fields import Table
from . import openai_fields, request_parsing, tokenizer
from .replies import Answer

TABLES: Mapping[str, Table] = {
    **openai_fields.TABLES,
    "/generate": request_parsing.GENERATE,
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), tokenizer.TOKENIZE),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), tokenizer.DETOKENIZE),
}


def with_document(routes: Sequence[Route]) -> list[Route]:
    """The routes, and `/openapi.json`, which describes them all."""

    async def openapi(http: HTTPRequest) -> Response:
        """This document."""
        return Answer(document(every))

    every = [*routes, Route("/openapi.json", openapi, methods=["GET"])]
    return every


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation: dict[str, Any] = {
                "summary": summary(route),
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in route.param_convertors
                ],
                "responses": {"200": {"description": "success"}, "400": {"description": "a request that is refused"}},
            }
            if method != "GET":
                operation["requestBody"] = {
                    "content": {"application/json": {"schema": _schema(TABLES.get(route.path))}}
                }
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "areax serve", "version": __version__}, "paths": paths}


def summary(route: Route) -> str:
    """What a route does: the first line of its handler's docstring."""
    handler = getattr(route.endpoint, "func", route.endpoint)
    return (inspect.getdoc(handler) or "").partition("\n")[0].rstrip(".")


def _schema(table: Table | None) -> dict[str, Any]:
    if table is None:
        return {"type": "object"}
    fields = {
        name: {"description": held if isinstance(held, str) else f"refused: {held.why}"} for name, held in table.items()
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}
