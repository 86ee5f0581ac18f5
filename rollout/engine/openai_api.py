"""OpenAI's routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, with SGLang's additions to the answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ..chat import fields, openai, template
from ..chat.detokenizer import UNFINISHED
from ..processes.http_limits import off_loop, read_json
from . import request_parsing, sglang_api
from .request import Progress
from .request_parsing import Ask

RENAMED = {  # further fields -> fields of sampling_params
    "n": "n",
    "seed": "sampling_seed",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
# Fields of OpenAI and SGLang that the engine does not implement, with their values that have no effect.
REFUSED = {
    **{name: values for name, values in openai.NEUTRAL.items() if name not in ("top_logprobs", "parallel_tool_calls")},
    **{
        name: request_parsing.SAMPLING_REFUSED[name]
        for name in (
            "repetition_penalty", "regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim", "skip_special_tokens",
            "custom_params", "watermark",
        )
    },
    **dict.fromkeys(
        (
            "lora_path", "session_params", "custom_logit_processor", "return_hidden_states", "return_routed_experts",
            "tools", "chat_template_kwargs", "continue_final_message", "audio",
        ),
        request_parsing.NOTHING,
    ),
    "response_format": ({"type": "text"},),
}  # fmt: skip


class OpenAI:
    """Handlers of the routes under /v1, for the engine of `service`."""

    def __init__(self, service: sglang_api.Service):
        self.service = service

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.models, methods=["GET"]),
        ]

    async def models(self, http: HTTPRequest) -> Response:
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
            return sglang_api.Answer({"object": "list", "data": [card, *named]})
        if found := [one for one in (card, *named) if one["id"] == model]:
            return sglang_api.Answer(found[0])
        message = f"The model '{model}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return sglang_api.Answer({"error": error}, 404)

    async def completions(self, http: HTTPRequest) -> Response:
        body = await read_json(http)
        fields.refuse(body, REFUSED)
        prompts = await off_loop(http, self._prompts, body)
        echo = fields.boolean(body, "echo")
        top = None if body.get("logprobs") is None else fields.integer(body, "logprobs", least=0)
        budget = {"max_new_tokens": openai.COMPLETION_TOKENS, **fields.sampling(body, most=["max_tokens"], stop="stop")}
        ask = self._ask(body, prompts, budget, top, 0 if echo and top is not None else None)

        def choice(i: int, part: Progress, first: bool) -> dict:
            prompt = ask.requests[i].prompt if echo and first else ()
            ids, text = [*prompt, *part.tokens], self._decode(prompt) + (part.decoded or "")
            logps = [*part.input_logp, *part.logp] if prompt else part.logp
            tops = [*part.input_top, *part.top] if prompt else part.top
            row = lambda pairs: pairs if pairs is None else {self._name(id): logp for logp, id in pairs}
            logprobs = {
                "text_offset": [-1] * len(ids),
                "token_logprobs": logps,
                "tokens": [self._name(id) for id in ids],
                "top_logprobs": [row(pairs) for pairs in tops] if top else [],
            }
            return {"text": text, "logprobs": None if top is None else logprobs}

        return await self._answer(http, body, ask, "text_completion", choice)

    async def chat(self, http: HTTPRequest) -> Response:
        body = await read_json(http)
        fields.refuse(body, REFUSED)
        prompt = await off_loop(http, self._prompt, body)
        wanted = fields.boolean(body, "logprobs")
        top = 0 if body.get("top_logprobs") is None else fields.integer(body, "top_logprobs", least=0)
        budget = {"max_new_tokens": None, **fields.sampling(body, most=openai.CHAT_BUDGET, stop="stop")}
        ask = self._ask(body, [prompt], budget, top if wanted else None)

        def choice(i: int, part: Progress, first: bool) -> dict:
            message = ({"role": "assistant"} if first else {}) | {"content": part.decoded or ""}
            tops = part.top or [[]] * len(part.tokens)
            content = [
                self._token(logp, id) | {"top_logprobs": [self._token(*other) for other in others]}
                for logp, id, others in zip(part.logp, part.tokens, tops, strict=True)
            ]
            return {"delta" if ask.stream else "message": message, "logprobs": {"content": content} if wanted else None}

        return await self._answer(http, body, ask, "chat.completion", choice)

    # -- the prompt ------------------------------------------------------------------------------

    def _prompts(self, body: dict) -> list[list[int]]:
        given = body.get("prompt")
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str):
                request_parsing.check_text(text, self.service.tokenizer, self.service.engine.context, "prompt")
        return openai.prompts(body, self.service.tokenizer)

    def _prompt(self, body: dict) -> list[int]:
        messages = openai.messages(body)
        if self.service.tokenizer is None:
            raise fields.Refused("messages", "this server has no tokenizer; send token ids to /generate")
        text = "".join(message["content"] for message in messages)
        request_parsing.check_text(text, self.service.tokenizer, self.service.engine.context, "messages")
        return template.prompt(self.service.tokenizer, {"messages": messages})

    def _ask(
        self, body: dict, prompts: list[list[int]], sampling: dict, top: int | None, inputs: int | None = None
    ) -> Ask:
        openai.include_usage(body)
        given = {theirs: body[name] for name, theirs in RENAMED.items() if body.get(name) is not None} | sampling
        chosen = [request_parsing.sampling(given, self.service.engine.context - len(prompt)) for prompt in prompts]
        request_parsing.check_count(len(prompts), chosen[0][1])
        names = request_parsing.rids(body.get("rid"), len(prompts), len(prompts) == 1, chosen[0][1])
        requests = [
            request
            for prompt, (one, _), rid in zip(prompts, chosen, names, strict=True)
            for request in request_parsing.samples(tuple(prompt), one, rid, inputs, top or 0)
        ]
        request_parsing.check_size(requests, (top is not None,) * len(requests))
        self.service.bridge.check_room(requests)
        return Ask(
            requests=tuple(requests),
            n=chosen[0][1],
            single=len(requests) == 1,
            stream=fields.boolean(body, "stream"),
            logprobs=(top is not None,) * len(requests),
            texts=True,
        )

    # -- the answer ------------------------------------------------------------------------------

    async def _answer(self, http: HTTPRequest, body: dict, ask: Ask, kind: str, choice) -> Response:
        """Answers a request; `choice(index, part, is_first)` makes a choice of the answer, without its finish."""
        start = time.perf_counter()
        frame = {
            "id": ask.requests[0].rid,
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self.service.path,
        }

        def whole(i: int, progress: Progress, part: Progress, first: bool) -> dict:
            finish = progress.finish or {}
            ended = {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}
            if progress.finish and body.get("return_meta_info"):
                ended["meta_info"] = self.service.answer(progress, ask, i, start)["meta_info"]
            return {"index": i} | choice(i, part, first) | ended

        if not ask.stream:
            done = await self.service.bridge.finish(ask.requests, sglang_api.disconnected(http))
            if done is None:
                return Response(status_code=499)
            choices = [whole(i, progress, progress, True) for i, progress in enumerate(done)]
            meta = self.service.answer(done[0], ask, 0, start)["meta_info"]
            metadata = {name: meta[name] for name in ("weight_version", "weight_versions")[: 1 + ask.single]}
            return sglang_api.Answer(frame | {"choices": choices, "usage": _usage(ask, done), "metadata": metadata})

        news = self.service.bridge.stream(ask.requests)

        async def chunks() -> AsyncIterator[dict]:
            frame["object"] = "text_completion" if kind == "text_completion" else f"{kind}.chunk"
            last: dict[int, Progress] = {}
            async for i, progress in news:
                part = _since(progress, last.get(i))
                yield frame | {"choices": [whole(i, progress, part, i not in last)]}
                last[i] = progress
            if openai.include_usage(body):
                yield frame | {"choices": [], "usage": _usage(ask, last.values())}

        return sglang_api.events(chunks())

    def _decode(self, ids) -> str:
        return self.service.tokenizer.decode(ids) if ids and self.service.tokenizer else ""

    def _name(self, id: int) -> str:
        """A token's text; for a part of a character its vocabulary entry, because all such parts decode alike."""
        piece = self.service.piece(id)
        return self.service.tokenizer.convert_ids_to_tokens(id) if UNFINISHED in piece else piece

    def _token(self, logp: float, id: int) -> dict:
        piece = self.service.piece(id)
        whole = UNFINISHED not in piece  # else part of a character, whose bytes are not those of the text
        return {"token": piece, "bytes": list(piece.encode()) if whole else None, "logprob": logp}


def _since(progress: Progress, last: Progress | None) -> Progress:
    """The part of `progress` that is new since `last`."""
    if last is None:
        return progress
    n = len(last.tokens)
    return replace(
        progress,
        tokens=progress.tokens[n:],
        logp=progress.logp[n:],
        top=progress.top[n:],
        decoded=(progress.decoded or "")[len(last.decoded or "") :],
    )


def _usage(ask: Ask, done: Iterable[Progress]) -> dict:
    """Token counts; each prompt counts once."""
    prompts = sum(len(request.prompt) for request in ask.requests[:: ask.n])
    generated = sum(len(progress.tokens) for progress in done)
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}
