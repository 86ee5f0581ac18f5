"""SGLang's routes that tokenize: `/tokenize` and `/detokenize`, also under /v1; conversations as in vLLM's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from ...chat import fields, images
from ...chat.api import abilities, chat, openai
from ...chat.api.ask import Ask, render, seen
from ...chat.fields import Refusal, Refused, Table, rule
from ...processes.http_limits import off_loop, read_json
from . import request_parsing
from .replies import Answer
from .service import Service

TOKENIZE: Table = fields.table(
    [
        "prompt", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_special_tokens",
        "add_generation_prompt", "reasoning_effort",
    ],
    ["model"],
    {
        "continue_final_message": Refusal("an answer is a new message", (False,)),
        "return_token_strs": Refusal("ask /detokenize for each", (False,)),
    },
)  # fmt: skip
DETOKENIZE: Table = fields.table(["tokens", "skip_special_tokens"], ["model"])


class Tokenizer:
    """Handlers of these routes, for the tokenizer of `service`."""

    def __init__(self, service: Service):
        self.service = service

    def routes(self) -> list[Route]:
        post = lambda path, handle: Route(path, handle, methods=["POST"])
        return [
            *(post(f"{start}/tokenize", self.tokenize) for start in ("", "/v1")),
            *(post(f"{start}/detokenize", self.detokenize) for start in ("", "/v1")),
        ]

    async def tokenize(self, http: HTTPRequest) -> Response:
        """The token ids of a text, of several, or of a conversation."""
        tokens = await off_loop(http, self._tokenized, await read_json(http))
        count = [len(one) for one in tokens] if tokens and isinstance(tokens[0], list) else len(tokens)
        return Answer({"tokens": tokens, "count": count, "max_model_len": self.service.engine.context})

    async def detokenize(self, http: HTTPRequest) -> Response:
        """The text of token ids, or of several lists of them."""
        return Answer({"text": await off_loop(http, self._text, await read_json(http))})

    def _tokenized(self, body: dict[str, Any]) -> list:
        fields.known(body, TOKENIZE)
        tokenizer, context = self._loaded(), self.service.engine.context
        special = fields.boolean({"add_special_tokens": True, **body}, "add_special_tokens")
        if (body.get("prompt") is None) == (body.get("messages") is None):
            raise Refused("prompt", "give either a prompt or messages")
        if body.get("messages") is not None:
            return self._conversation(body, tokenizer)
        prompt = body["prompt"]
        texts = [prompt] if isinstance(prompt, str) else prompt
        right = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        rule(right and len(texts) <= fields.MOST_PROMPTS, "prompt", "must be a text or a list of them", prompt)
        for text in texts:
            request_parsing.check_text(text, tokenizer, context, "prompt")
        ids = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        return ids[0] if isinstance(prompt, str) else ids

    def _conversation(self, body: dict[str, Any], tokenizer: Any) -> list[int]:
        processor = self.service.processor
        can = abilities.of(tokenizer, processor)
        can.check_images(body, "messages")
        messages = openai.messages(body)
        text = "".join(images.words(message.get("content")) for message in messages)
        request_parsing.check_text(text, tokenizer, self.service.engine.context, "messages")
        asked = Ask(
            body=body,
            messages=messages,
            tools=chat.chosen(body.get("tool_choice"), chat.tools(body), forces=True),
            template=chat.variables(body, can),
        )
        ask = seen(asked, processor)
        ends = fields.boolean({"add_generation_prompt": True, **body}, "add_generation_prompt")
        ids = tokenizer.encode(render(tokenizer, ask, ends, processor), add_special_tokens=False)
        return processor.expanded(ids, images.of(ask.messages)) if processor else ids

    def _text(self, body: dict[str, Any]) -> str | list[str]:
        fields.known(body, DETOKENIZE)
        tokenizer = self._loaded()
        tokens: Any = body.get("tokens")
        skip = fields.boolean({"skip_special_tokens": True, **body}, "skip_special_tokens")
        rule(isinstance(tokens, list), "tokens", "must be a list of token ids, or of such lists", tokens)
        several = bool(tokens) and isinstance(tokens[0], list)
        lists = tokens if several else [tokens]
        vocabulary = len(tokenizer)
        right = lambda ids: isinstance(ids, list) and all(type(id) is int and 0 <= id < vocabulary for id in ids)
        rule(all(map(right, lists)), "tokens", f"must be numbers from 0 to {vocabulary - 1}", tokens)
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        return texts if several else texts[0]

    def _loaded(self) -> Any:
        if self.service.tokenizer is None:
            raise Refused("tokenizer", "this server has none; serve a model folder with a tokenizer")
        return self.service.tokenizer
