"""A parsed request, and its prompt as text; common to all APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import images, parsers, template
from ..fields import LONGEST_TEXT, Refused, rule

MOST_IMAGES = 256  # of a request
DOCUMENTS = {  # the field with the JSON schema of an answer
    "/v1/completions": "response_format", "/v1/chat/completions": "response_format", "/v1/responses": "text",
    "/v1/messages": "output_config",
}  # fmt: skip
Event = tuple[str, Any]  # name of a server-sent event, or "", and its data


@dataclass(frozen=True)
class Ask:
    """A parsed request: a conversation if it has messages, else prompts to continue.

    Attributes:
      body: the request's body.
      n: answers per prompt.
      prompts: token ids, if there are no messages.
      forced: names of the tools of which the answer must call one; none = the model decides.
      one_call: a forced answer is a single call.
      template: variables of the chat template.
      sampling: arguments of `Fleet.generate`.
      keep: keeps the response of `/v1/responses` for later requests; None = it is not kept.
    """

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    forced: Sequence[str] = ()
    one_call: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    prompts: Sequence[Sequence[int]] = ()
    keep: Callable[[Mapping[str, Any]], None] | None = None


def seen(ask: Ask, processor: images.Processor | None) -> Ask:
    """The request with its images read.

    Args:
      processor: of a model that reads images; None = messages with images are refused.

    Raises:
      Refused: an image cannot be read, or there are too many.
    """
    where, count = "input" if "input" in ask.body else "messages", sum(1 for _ in images.found(ask.messages))
    rule(count <= MOST_IMAGES, where, f"must have at most {MOST_IMAGES} images", count)
    try:
        return replace(ask, messages=images.read(ask.messages, processor))
    except ValueError as error:
        raise Refused(where, str(error)) from None


def render(tokenizer: Any, ask: Ask, ends: bool = True, processor: images.Processor | None = None) -> str:
    """The conversation as a prompt, which `ends` with the beginning of an answer; `processor` as in `seen`. Raises
    Refused, and ValueError as `template.render` and `template.check_calls`."""
    ask = seen(ask, processor)
    try:
        template.check_variables(tokenizer, ask.body.get("chat_template_kwargs") or {})
    except ValueError as error:
        raise Refused("chat_template_kwargs", str(error)) from None
    template.check_calls(tokenizer, ask.messages, ask.tools)
    messages = template.ended(tokenizer, list(map(dict, ask.messages)))
    written = lambda tools: template.render(tokenizer, messages, tools, ask.template, ask=ends)
    text = written(ask.tools)
    if ask.tools and not template.shows(written, text):
        raise Refused("tools", "this model's chat template does not show them to the model; leave them out")
    rule(len(text) <= LONGEST_TEXT, "messages", f"must have at most {LONGEST_TEXT} characters", len(text))
    return text


def check_calls(ask: Ask, style: str) -> None:
    """Raises Refused for tools where calls of this style cannot be read."""
    known = (
        "the format of this model's calls is not known; name one with --style, or --agent.style of a run: "
        f"{', '.join(parsers.NAMES)}"
    )
    rule(style != parsers.UNKNOWN or not ask.tools, "tools", known, style)
    unread = "calls are not read in the format of this model; leave them out"
    rule(parsers.STYLES[style].calls or not ask.tools, "tools", unread, style)


def encoded(event: Event) -> bytes:
    """A server-sent event."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
