"""The gateway: one address for all agents; the API key selects the session. `async with serve(tokenizer) as gateway`.
With the admin key the header X-Session-ID does, so that one client can serve many sessions.

Routes: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` (and its `count_tokens`) and
`/v1/models` with a session's key; `/health` without a key; those of `online` with the admin key or the session's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..chat import fields, images, parsers
from ..chat.api import abilities, chat, completions, messages, responses
from ..chat.api.ask import DOCUMENTS, Ask, check_calls, render, seen
from ..chat.api.logprobs import Reading
from ..chat.fields import Refused
from ..chat.first_call import FirstCall
from ..chat.parsers import STYLES, Parser, Piece, Text
from ..chat.session import Session
from ..chat.trajectory import Interaction
from ..errors import ServerError
from ..processes import http_limits, http_process
from ..servers.types import Part
from ..types import Completion
from . import errors, work
from .body import read_body
from .online import End, Online, Start
from .sessions import Entry, Limits, Sessions

APIS: dict[str, Any] = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
Read = Callable[..., Awaitable[tuple[str, Part]]]
GRACE_S = 1  # for responses in progress at shutdown


@contextlib.asynccontextmanager
async def serve(
    tokenizer: Any,
    processor: images.Processor | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    admin_key: str = "",
    style: str = "",
    reasoning: bool = True,
    model: str = "areax",
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    read: Read | None = None,
    on_start: Start | None = None,
    on_end: End | None = None,
) -> AsyncIterator[Gateway]:
    """Serves sessions in the running event loop while the block runs.

    Args:
      tokenizer: the Hugging Face tokenizer of the served model, with a chat template.
      processor: of a model that reads images; None = messages with images are refused.
      port: 0 = any free port.
      admin_key: allows starting sessions over HTTP, and whatever each session's key allows; "" = disabled.
      style: the format of answers, one of `formats.NAMES`; "" = that of the model's chat template.
      reasoning: separate text between <think> and </think> from the content.
      model: the name in `/v1/models`; requests may use any.
      read: `Fleet.read`, for log-probabilities of prompts; None = they are refused.
      on_start: makes the session for the JSON object of a `POST /sessions`; ValueError refuses it, RuntimeError asks
        the client to try again later.
      on_end: called with a session started over HTTP once it has ended, by request or by expiry.

    Raises:
      ValueError: the address is not available, or is reachable from other machines without an admin_key.
    """
    style = parsers.style_for(tokenizer, style)
    if not admin_key and not http_process.loopback(host):
        raise ValueError(f"serve: a host that other machines can reach needs an admin_key, got {host!r} and none")
    sessions = Sessions(limits, admin_key)
    online = Online(sessions, limits, on_start, on_end)
    gateway = Gateway(tokenizer, processor, sessions, limits, style, reasoning, model, read)
    app = http_limits.app([*gateway.routes(), *online.routes()], limits.http, errors.failed)
    options: dict[str, Any] = dict(lifespan="off", log_config=None, log_level=None, timeout_graceful_shutdown=GRACE_S)
    with contextlib.closing(http_process.bind(host, port)) as sock:
        async with http_process.running(http_process.server(app, limits.http, **options), sock):
            gateway.url = http_process.address((host, sock.getsockname()[1]))
            online.base_url = f"{gateway.url}/v1"
            expiry = asyncio.create_task(online.expire())
            try:
                yield gateway
            finally:
                expiry.cancel()
                await sessions.close_all()


class Gateway:
    """A running gateway; made by `serve`.

    Attributes:
      url: its address, without a path.
    """

    def __init__(
        self, tokenizer: Any, processor: images.Processor | None, sessions: Sessions, limits: Limits, style: str,
        reasoning: bool, model: str, read: Read | None,
    ):  # fmt: skip
        self.url = ""
        self._tokenizer, self._processor, self._sessions, self._limits = tokenizer, processor, sessions, limits
        self._style, self._reasoning, self._model, self._read = style, reasoning, model, read

    def open(self, session: Session) -> str:
        """Opens `session` and returns a new key, with which agents use it until it is closed.

        Raises:
          ValueError: the session is open already.
          RuntimeError: too many sessions are open.
        """
        return self._sessions.open(session, online=False)

    async def close(self, key: str) -> None:
        """Closes the session with this key and cancels its generations; the key becomes invalid."""
        if entry := self._sessions.find(key):
            await self._sessions.close(entry)

    def routes(self) -> list[Route]:
        post = lambda path, handle: Route(path, handle, methods=["POST"])
        return [
            *(post(path, functools.partial(self._chat, api)) for path, api in APIS.items()),
            post("/v1/completions", self._completions),
            post("/v1/messages/count_tokens", self._count_tokens),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
        ]

    async def _chat(self, api: Any, http: Request) -> ASGIApp:
        """Handles a request to one of the APIS."""
        entry = self._sessions.of(http)
        more = {"stored": entry.stored} if api is responses else {}
        parse = functools.partial(api.read, **more)
        can = abilities.of(self._tokenizer, self._processor)
        ask = await http_limits.off_loop(http, parse, await self._body(http), can)
        _refuse_seed(ask.body)
        ask = await http_limits.off_loop(http, seen, ask, self._processor)
        text = await http_limits.off_loop(http, render, self._tokenizer, ask, True, self._processor)
        check_calls(ask, self._style)
        if "json_schema" in ask.sampling and (self._style == parsers.UNKNOWN or STYLES[self._style].channels):
            rule = "cannot be forced here in this model's format of answers; ask for it in the conversation"
            raise Refused(DOCUMENTS[http.url.path], f"{rule}, got {self._style}")

        opened = parsers.opened(text, self._style)
        read: list[int] = []  # tokens of the prompt, once for each answer

        async def generate(on_piece: Callable[[Piece], None]) -> Interaction:
            new = functools.partial(
                Parser, self._style, tools=ask.tools, reasoning=self._reasoning, opened=opened,
                one_call=ask.one_call, nonce=secrets.token_hex(8),
            )  # fmt: skip
            ends = None
            if ask.one_call and ask.tools:
                decode = parsers.decoder(self._tokenizer, self._style)
                ends = FirstCall(decode, new(), ask.sampling.get("stop", ())).end
            asked = functools.partial(
                entry.session.ask, ask.messages, tools=ask.tools, template=ask.template,
                parse=lambda text, cut: parsers.parsed(new(), text, cut), ends=ends, **ask.sampling,
            )  # fmt: skip
            if not ask.stream:
                return await asked()
            parser = new()

            def on_text(text: str) -> None:
                for piece in parser.push(text):
                    on_piece(piece)

            done = await asked(on_prompt=read.append, on_text=on_text)
            for piece in parser.finish(cut=done.completion.finish == "length"):
                on_piece(piece)
            return done

        return await self._answered(http, entry, ask, [generate] * ask.n, api, {}, read)

    async def _completions(self, http: Request) -> ASGIApp:
        entry = self._sessions.of(http)
        body, vocabulary = await self._body(http), len(self._tokenizer)
        read = functools.partial(completions.read, vocabulary=vocabulary)
        ask = await http_limits.off_loop(http, read, body, self._tokenizer)
        _refuse_seed(body)
        if ask.stream and (body.get("echo") or body.get("logprobs") is not None):
            raise Refused("stream", "cannot be had with echo or logprobs; leave it out")
        if not body.get("echo") and not ask.sampling["max_new_tokens"]:
            raise Refused("max_tokens", "must be at least 1 without echo, got 0")
        if completions.reads(ask) and self._read is None:
            raise Refused("logprobs", "with echo, or above 0, cannot be honoured by this server; leave it out")
        readings: dict[Interaction, Reading] = {}

        async def generate(prompt: Sequence[int], on_piece: Callable[[Piece], None]) -> Interaction:
            if ask.sampling["max_new_tokens"]:
                more: dict[str, Any] = {"on_text": lambda text: on_piece(Text("content", text))} if ask.stream else {}
                done = await entry.session.complete(prompt, **ask.sampling, **more)
            else:  # nothing is sampled, so the session is not involved
                nothing = Completion([], [], [], "length")
                done = Interaction(prompt=tuple(prompt), temperature=1.0, completion=nothing)
            if completions.reads(ask):
                rows = await self._reading(done.tokens, body["logprobs"])
                readings[done] = rows if body.get("echo") else rows[len(prompt) :]
            return done

        jobs = [functools.partial(generate, prompt) for prompt in ask.prompts for _ in range(ask.n)]
        return await self._answered(http, entry, ask, jobs, completions, readings)

    async def _answered(
        self, http: Request, entry: Entry, ask: Ask, jobs: Sequence[work.Job], api: Any,
        readings: Mapping[Interaction, Reading], read: Sequence[int] = (),
    ) -> ASGIApp:  # fmt: skip
        most = self._limits.generations
        if ask.stream:
            ids = [f"{entry.session.id}-{secrets.token_hex(8)}" for _ in jobs]
            return work.streamed(http, entry, jobs, most, ids, api.Stream(ask, ids, self._tokenizer), read)
        async with work.running(http, entry, jobs, most) as running:
            done = await running.done()
            return JSONResponse(work.named(api.answer(ask, done, self._tokenizer, readings), [x.id for x in done]))

    async def _reading(self, tokens: Sequence[int], top: int) -> Reading:
        """A second pass of the server over a text: log-probabilities at temperature 1, under its current weights."""
        assert self._read is not None
        url, part = await self._read(tokens, top_k=top)
        tops = part.input_top or [()] * len(part.inputs)
        if [row[1] for row in part.inputs] != [*tokens] or len(tops) != len(tokens):
            raise ServerError(
                f"{url}/generate: must return log-probabilities of the {len(tokens)} tokens that it reads, got those "
                "of others"
            )
        return [
            (token, logp, {other: p for p, other, *_ in others or () if p is not None})
            for (logp, token, *_), others in zip(part.inputs, tops, strict=True)
        ]

    async def _count_tokens(self, http: Request) -> Response:
        self._sessions.of(http)
        body = await self._body(http)
        count = functools.partial(messages.count, processor=self._processor)
        return JSONResponse(await http_limits.off_loop(http, count, body, self._tokenizer))

    async def _body(self, http: Request) -> dict[str, Any]:
        return fields.with_model(await read_body(http, self._limits.http), self._model)

    async def _models(self, http: Request) -> Response:
        if not self._sessions.admin(http):
            self._sessions.of(http)
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "areax"}
        return JSONResponse({"object": "list", "data": [card]})


def _refuse_seed(body: Mapping[str, Any]) -> None:
    """Refuses a seed unless the temperature is 0, where it has no effect."""
    if body.get("seed") is not None and body.get("temperature") != 0:
        raise Refused("seed", "cannot be honoured by this server; leave it out, or ask for temperature 0")


async def _health(http: Request) -> Response:
    return JSONResponse({"status": "ok"})
