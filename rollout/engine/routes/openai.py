"""OpenAI's and Anthropic's routes, by the same code as the gateway's, with SGLang's additions to OpenAI's answers."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...chat import fields, images, parsers, template
from ...chat.api import abilities, chat, completions, messages, responses
from ...chat.api import ask as asks
from ...chat.api.ask import Event, encoded
from ...chat.api.stored import Stored
from ...chat.fields import Refused, rule
from ...chat.first_call import FirstCall
from ...chat.parsers import STYLES, Parser, Text, style_for
from ...processes.http_limits import off_loop, read_json
from ..pictures import Placement
from ..request import Grammar, Progress, too_long
from . import answer_grammar, request_parsing
from .image_data import placed
from .openai_fields import TABLES
from .replies import Answer, disconnected, failure
from .request_parsing import Ask
from .samples import Sample
from .service import Service

RENAMED = {  # further fields -> fields of sampling_params
    "seed": "sampling_seed",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    **{
        name: name
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "regex", "ebnf")
    },
}
THEIRS = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}  # names in errors
BUDGETS = "max_completion_tokens", "max_tokens", "max_output_tokens"
PROMPTS = {
    "/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input",
    "/v1/messages": "messages",
}  # fmt: skip
CONVERSATIONS: dict[str, Any] = {
    "/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages
}  # fmt: skip
ABORTED = 503, "the server ended the request before it was complete; send it again"


class OpenAI:
    """Handlers of the routes under /v1, for the engine of `service`.

    Args:
      style: the format of answers, one of `formats.NAMES`; "" = that of the model's chat template.
      reasoning: separate text between <think> and </think> from the content.
    """

    def __init__(self, service: Service, style: str = "", reasoning: bool = True):
        self.service, self._reasoning = service, reasoning
        self._style = style_for(service.tokenizer, style, service.engine.config.family)
        self._decode = parsers.decoder(service.tokenizer, self._style)
        self._markers = parsers.special_markers(service.tokenizer, self._style)
        self._chat_template = str(getattr(service.tokenizer, "chat_template", None) or "")
        self._stored = Stored()
        added = getattr(service.tokenizer, "added_tokens_decoder", {}).items()
        self._tokens = {token.content: id for id, token in added if token.content in STYLES[self._style].markers}

    def routes(self) -> list[Route]:
        post = lambda path, handle: Route(path, handle, methods=["POST"])
        return [
            post("/v1/completions", self.completions),
            *(post(path, functools.partial(self.conversation, path)) for path in CONVERSATIONS),
            post("/v1/messages/count_tokens", self.count_tokens),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.models, methods=["GET"]),
        ]

    async def models(self, http: HTTPRequest) -> Response:
        """The served model and the loaded adapters."""
        path, model = self.service.path, http.path_params.get("model")
        card = {
            "id": path,
            "object": "model",
            "created": int(self.service.started),
            "owned_by": "areax",
            "root": path,
            "parent": None,
            "max_model_len": self.service.engine.context,
        }
        below = card | {"parent": path, "max_model_len": None}
        named = [below | {"id": name, "root": at} for name, at in self.service.engine.adapters.items()]
        if model is None:
            return Answer({"object": "list", "data": [card, *named]})
        if found := [one for one in (card, *named) if one["id"] == model]:
            return Answer(found[0])
        message = f"The model '{model}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return Answer({"error": error}, 404)

    async def completions(self, http: HTTPRequest) -> Response:
        """Continues prompts of text or token ids."""
        ask = await off_loop(http, self._read_completions, await self._body(http))
        top, echo = ask.body.get("logprobs"), ask.body.get("echo")
        asked = await self._requests(http.url.path, ask, ask.prompts, top, 0 if echo and top is not None else None)
        tokenizer = self.service.tokenizer
        decode = (lambda ids: tokenizer.decode(ids, skip_special_tokens=True)) if tokenizer else lambda ids: ""
        samples = [Sample(request, decode) for request in asked.requests]
        return await self._answer(http, completions, ask, asked, samples)

    async def conversation(self, path: str, http: HTTPRequest) -> Response:
        """Answers a conversation."""
        ask, prompt, reasoning, seen = await off_loop(http, self._read_conversation, path, await self._body(http))
        body = ask.body
        top = (
            fields.integer(body, "top_logprobs", least=0, most=completions.TOP)
            if body.get("top_logprobs") is not None
            else 0
        )
        rule(not top or body.get("logprobs"), "top_logprobs", "needs logprobs", top)
        whole = functools.partial(self._whole, ask, reasoning)
        asked = await self._requests(
            path, ask, [prompt], top if body.get("logprobs") else None, grammar=whole, seen=seen
        )
        parser = functools.partial(
            Parser, self._style, tools=ask.tools, reasoning=self._reasoning, opened=reasoning == "open",
            one_call=ask.one_call, forced=bool(ask.forced),
        )  # fmt: skip
        ends = ask.one_call and ask.tools and not ask.forced
        first = lambda stops: FirstCall(self._decode, parser(), stops) if ends else None
        samples = [
            Sample(request, self._decode, parser(), self._markers, first(request.sampling.stop))
            for request in asked.requests
        ]
        return await self._answer(http, CONVERSATIONS[path], ask, asked, samples, one_call=bool(ends))

    async def count_tokens(self, http: HTTPRequest) -> Response:
        """The number of tokens of a conversation, in Anthropic's format."""
        body = await self._body(http)
        count = functools.partial(messages.count, forces=True, processor=self.service.processor)
        counted = await off_loop(http, count, body, self._tokenizer(), TABLES[http.url.path])
        return Answer(counted)

    # -- the prompt ------------------------------------------------------------------------------

    async def _body(self, http: HTTPRequest) -> dict[str, Any]:
        return fields.with_model(await read_json(http), self.service.path)

    def _tokenizer(self) -> Any:
        if self.service.tokenizer is None:
            raise Refused("messages", "this server has no tokenizer; send token ids to /generate")
        return self.service.tokenizer

    def _read_completions(self, body: dict) -> asks.Ask:
        given = body.get("prompt")
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str):
                request_parsing.check_text(text, self.service.tokenizer, self.service.engine.context, "prompt")
        ask = completions.read(body, self.service.tokenizer, TABLES["/v1/completions"], fields.MOST_PROMPTS)
        document = fields.schema(body.get("response_format"), "response_format")
        return dataclasses.replace(ask, sampling={**ask.sampling, **document})

    def _read_conversation(self, path: str, body: dict) -> tuple[asks.Ask, list[int], str, Placement | None]:
        """The request with its images read, its prompt, whether the answer has reasoning, as for `answer_grammar.of`,
        and its images with their patches."""
        more: dict[str, Any] = {
            "/v1/chat/completions": {"most": fields.MOST_PROMPTS},
            "/v1/responses": {"stored": self._stored},
        }
        tokenizer, processor = self._tokenizer(), self.service.processor
        can = abilities.of(tokenizer, processor)
        ask = CONVERSATIONS[path].read(body, can, TABLES[path], forces=True, **more.get(path, {}))
        ask = asks.seen(ask, processor)
        text = "".join(images.words(message.get("content")) for message in ask.messages)
        request_parsing.check_text(text, tokenizer, self.service.engine.context, "messages")
        prompt = asks.render(tokenizer, ask, processor=processor)
        asks.check_calls(ask, self._style)
        think, thought = STYLES[self._style].think
        thinks = think.rstrip() in self._chat_template and not prompt[-100:].rstrip().endswith(thought)
        reasoning = "open" if parsers.opened(prompt, self._style) else "may" if thinks else ""
        tokens, seen = template.encode(tokenizer, prompt), images.of(ask.messages)
        tokens = processor.expanded(tokens, seen) if processor else tokens
        engine = self.service.engine
        return ask, tokens, reasoning, placed(engine.pictures, tokens, seen, engine.context)

    def _whole(self, ask: asks.Ask, reasoning: str, document: Grammar | None) -> Grammar | None:
        """The grammar of a whole answer, from that of its document."""
        return answer_grammar.of(
            document, ask.tools, ask.forced, one_call=ask.one_call, style=self._style,
            chat_template=self._chat_template, tokens=self._tokens, reasoning=reasoning if self._reasoning else "",
        )  # fmt: skip

    async def _requests(
        self,
        path: str,
        ask: asks.Ask,
        prompts: Sequence[Sequence[int]],
        top: int | None,
        inputs: int | None = None,
        grammar: Callable[[Grammar | None], Grammar | None] = lambda document: document,
        seen: Placement | None = None,
    ) -> Ask:
        """The engine's requests, whose grammars are compiled.

        Args:
          top: likeliest tokens to report; None = no log-probabilities at all.
          inputs: as `Request.input_logprobs_from`.
          grammar: of the whole answer, from that which the request names.
          seen: the conversation's images.
        """
        body, context = ask.body, self.service.engine.context
        adapter = fields.name(body, "lora_path") if body.get("lora_path") is not None else ""
        if not adapter and body["model"] in self.service.engine.adapters:
            adapter = body["model"]
        given = {theirs: body[name] for name, theirs in RENAMED.items() if body.get(name) is not None}
        given |= {"max_new_tokens": None, **({"json_schema": body["json_schema"]} if body.get("json_schema") else {})}
        given |= ask.sampling
        named = {**THEIRS, "json_schema": asks.DOCUMENTS[path]} if "json_schema" in ask.sampling else THEIRS
        try:
            chosen = [request_parsing.sampling(given, context - len(prompt))[0] for prompt in prompts]
            await self.service.compile(chosen)
            chosen = [dataclasses.replace(one, grammar=grammar(one.grammar)) for one in chosen]
            await self.service.compile(chosen)
        except Refused as refused:
            raise Refused(named.get(refused.name, refused.name), refused.rule) from None
        names = request_parsing.rids(body.get("rid"), len(prompts), len(prompts) == 1, ask.n)
        requests = [
            request
            for prompt, one, rid in zip(prompts, chosen, names, strict=True)
            for request in request_parsing.samples(
                tuple(prompt), one, rid, inputs, top or 0, adapter=adapter, images=images.of(ask.messages)
            )
        ]
        for n, most in {(len(request.prompt), request.sampling.max_new_tokens) for request in requests}:
            if n + most > context:
                field = next((name for name in BUDGETS if body.get(name) is not None and n <= context), PROMPTS[path])
                raise Refused(field, too_long(n, most, context))
        request_parsing.check_size(requests, (top is not None,) * len(requests))
        self.service.bridge.check_room(requests)
        return Ask(
            requests=tuple(requests),
            n=ask.n,
            single=len(requests) == 1,
            stream=ask.stream,
            logprobs=(top is not None,) * len(requests),
            texts=True,
            images=[seen],
        )

    # -- the answer ------------------------------------------------------------------------------

    async def _answer(
        self, http: HTTPRequest, api: Any, ask: asks.Ask, asked: Ask, samples: list[Sample], one_call: bool = False
    ) -> Response:
        start = time.perf_counter()
        named = {sample.request.rid: sample for sample in samples}
        ended = (lambda progress: named[progress.rid].ended(progress)) if one_call else None
        if ask.stream:
            news = self.service.bridge.stream(asked.requests, ended)  # refuses before the first byte
            events = self._events(api, ask, asked, samples, news, start)
            return StreamingResponse(events, media_type="text/event-stream")
        done = await self.service.bridge.finish(asked.requests, disconnected(http), ended)
        if done is None:
            return Response(status_code=499)
        if failed := failure(done):
            raise HTTPException(*failed)
        interactions = [sample.done(progress) for sample, progress in zip(samples, done, strict=True)]
        if _lost(api, interactions):
            raise HTTPException(*ABORTED)
        pairs = zip(interactions, samples, done, strict=True)
        readings = {x: sample.reading(progress) for x, sample, progress in pairs} if asked.logprobs[0] else {}
        answer = api.answer(ask, interactions, self.service.tokenizer, readings)
        if "choices" in answer:
            for i, choice in enumerate(answer["choices"]):
                choice |= self._ended(done[i], ask, asked, i, start)
            meta = self.service.answer(done[0], asked, 0, start)["meta_info"]
            answer["metadata"] = {"weight_version": meta["weight_version"]}
            if asked.single:  # clients expect texts
                answer["metadata"]["weight_versions"] = json.dumps(meta["weight_versions"])
        return Answer(answer)

    async def _events(
        self, api: Any, ask: asks.Ask, asked: Ask, samples: list[Sample],
        news: AsyncIterator[tuple[int, Progress]], start: float,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        """The events of a streamed answer: at least one for each token."""
        stream = api.Stream(ask, [request.rid for request in asked.requests], self.service.tokenizer)
        begun: set[int] = set()
        done: dict[int, Any] = {}
        async for i, progress in news:
            made: list[Event] = [] if begun else list(stream.begin(progress.prompt_tokens))
            if i not in begun and ask.body.get("echo"):
                shown = completions.echoed(ask, asked.requests[i].prompt, self.service.tokenizer)
                made += stream.pieces(i, [Text("content", shown)], samples[i].inputs(progress))
            begun.add(i)
            if failed := failure([progress]):
                yield b"".join(map(encoded, (*made, *stream.failed(*failed))))
                return
            for pieces, reading in samples[i].news(progress):
                made += stream.pieces(i, pieces, reading if asked.logprobs[i] else ())
            if progress.finish:
                done[i] = samples[i].done(progress)
                if _lost(api, [done[i]]):
                    made += stream.failed(*ABORTED)
                    yield b"".join(map(encoded, made))
                    return
                for name, data in stream.finish(i, done[i]):
                    if "choices" in data:
                        data["choices"][0] |= self._ended(progress, ask, asked, i, start)
                    made.append((name, data))
            yield b"".join(map(encoded, made))
        yield b"".join(map(encoded, stream.end([done[i] for i in range(len(samples))])))

    def _ended(self, progress: Progress, ask: asks.Ask, asked: Ask, i: int, start: float) -> dict[str, Any]:
        """SGLang's additions to a choice that has ended."""
        more: dict[str, Any] = {"matched_stop": (progress.finish or {}).get("matched")}
        if ask.body.get("return_meta_info"):
            more["meta_info"] = self.service.answer(progress, asked, i, start)["meta_info"]
        return more


def _lost(api: Any, interactions: Iterable[Any]) -> bool:
    """Whether a request was aborted, in an API that has no word for it."""
    return api in (messages, responses) and any(x.completion.finish == "abort" for x in interactions)
