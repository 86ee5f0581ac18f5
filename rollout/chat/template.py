"""A tokenizer's chat template: rows and conversations to prompts, and whether one continues another.

A sampled turn is never retokenised: later text is appended to its tokens. That is correct if the template renders the
longer conversation as an extension of the shorter one; if it rewrites earlier turns (drops reasoning, or has another
system prompt or other tools), the longer conversation starts a new sequence.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import object_path
from ..types import Image
from . import images

Message = Mapping[str, Any]
GENERATION = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")  # of transformers, unknown to Jinja


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """Token ids of the prompt of a row without images, as `prompted`."""
    return prompted(tokenizer, row).tokens


class Prompt(NamedTuple):
    """A row's prompt.

    Attributes:
      tokens: ids, for an image as many as it has features.
      images: in the order of their tokens.
      text: what they say, each image one token.
    """

    tokens: list[int]
    images: tuple[Image, ...]
    text: str


def prompted(tokenizer: Any, row: Mapping[str, Any], processor: images.Processor | None = None) -> Prompt:
    """A row's prompt, the same wherever the row is used.

    The row's `conversation` is rendered with the chat template and a generation prompt; without a template a "prompt"
    is plain text to continue.

    Args:
      processor: of a model that reads images; None = a row with images is refused.

    Raises:
      ValueError: the row has no unique prompt, the template refuses it, the tokenizer has no token for some of it, or
        an image cannot be read or has no place in it.
    """
    messages = conversation(row)
    check(messages)
    messages = images.read(messages, processor)
    seen = images.of(messages)
    if not tokenizer.chat_template and row.get("prompt") is not None and not seen:
        ids = known(tokenizer, tokenizer.encode(row["prompt"]), row["prompt"])
        return Prompt(ids, (), tokenizer.decode(ids))
    text = render(tokenizer, messages, (), {}, ask=True)
    ids = known(tokenizer, tokenizer.encode(text, add_special_tokens=False), *texts(messages))
    return Prompt(processor.expanded(ids, seen) if processor else ids, seen, text)


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Raises ValueError unless each name is one of `variables_of`, and each value a scalar."""
    for name, value in variables.items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{name!r:.80} must be a scalar, got {value!r:.80}")
        if name not in (read := variables_of(tokenizer)):
            known = ", ".join(sorted(read)) or "no variables"
            raise ValueError(f"{name!r:.80} is not a variable to set: this model's chat template reads {known}")


def variables_of(tokenizer: Any) -> frozenset[str]:
    """The variables that a caller may give to the chat template, or to any of them if there are several: those that it
    reads, except special tokens, the conversation and other arguments of `apply_chat_template`."""
    templates = tokenizer.chat_template or ""
    texts = templates.values() if isinstance(templates, Mapping) else [templates]
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    return frozenset().union(*map(_read, texts)) - arguments - {"messages"} - tokenizer.special_tokens_map.keys()


@functools.lru_cache(32)
def _read(chat_template: str) -> frozenset[str]:
    """The names that a chat template reads and neither it nor transformers defines."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION.sub("", chat_template))
    except TemplateError as error:
        raise ValueError(f"the chat template is not valid: {' '.join(str(error).split())}") from None
    return frozenset(meta.find_undeclared_variables(parsed)) - {"raise_exception", "strftime_now"}


def conversation(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A new list of the row's messages, or with its prompt as a user message; images as `images.placed`.

    Raises:
      ValueError: the row has neither, or both; the prompt is no text, or the messages are no list; images and their
        placeholders differ in number.
    """
    given = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(given) != 1 or row[given[0]] == []:
        raise ValueError(
            f"a row needs either 'prompt' or 'messages', got the fields {sorted(row)}; {object_path.row(row)}"
        )
    [name] = given
    value = row[name]
    if name == "prompt" and isinstance(value, str):
        return images.placed([{"role": "user", "content": value}], images.given(row))
    if name == "messages" and isinstance(value, list):
        return images.placed(value, images.given(row))
    raise ValueError(f"{name!r} must be {'a text' if name == 'prompt' else 'a list of messages'}, got {value!r:.80}")


def check(messages: Sequence[Message]) -> None:
    """Raises ValueError unless each message has a role, and content or tool calls, of the types that OpenAI's API has
    and in Unicode."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"a message needs a role and a content, got {str(message)[:80]}")
        if not (isinstance(message.get("content"), str | list) or calls):
            raise ValueError(f"a message needs a role and a content, a text, got {str(message)[:80]}")
        if calls and not (isinstance(calls, list) and all(map(_called, calls))):
            raise ValueError(f"tool_calls must be a list of function calls with name and arguments, got {calls!r:.80}")
    unicode(*texts(messages))


def _called(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function


def unicode(*texts: str) -> None:
    """Raises ValueError if a text has half of a surrogate pair, which no tokenizer takes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"texts must be Unicode, got the lone surrogate {text[error.start]!r} in {text[:80]!r}"
            ) from None


def texts(messages: Sequence[Message]) -> list[str]:
    """The texts of messages that a chat template renders, for `known`."""
    given = [message.get(field) for message in messages for field in ("role", "content")]
    return [str(x) if not isinstance(x, list) else images.words(x) for x in given if x]


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence, options: Mapping, *, ask: bool) -> str:
    """Renders a conversation as text.

    Args:
      messages, tools: in OpenAI's format.
      options: further variables of the template, such as `enable_thinking`.
      ask: add the generation prompt.

    Raises:
      ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError("messages: the tokenizer has no chat template; send a prompt of tokens, or take a chat model")
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    text, problem = None, None
    for loaded in (True, False) if called else (True,):  # templates want arguments as an object, or as text
        try:
            written = tokenizer.apply_chat_template(
                [_plain(message, loaded) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=ask,
                **options,
            )
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # Not only Jinja's: for example, a field may have a type that the template does not expect.
            problem = problem or error
            continue
        if all(name in written for name in called):
            return written
        text = written if text is None else text
    if text is not None:  # a template without tools
        return text
    raise ValueError(f"messages: the chat template refuses them ({' '.join(str(problem).split())})") from problem


def _plain(message: Message, loaded: bool) -> dict[str, Any]:
    """A message as templates expect it: without None; arguments are objects if `loaded`, else text."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = plain.get("content") or ""
    if calls := plain.get("tool_calls"):
        given = lambda function: _loaded(function["arguments"]) if loaded else function["arguments"]
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": given(call["function"])}} for call in calls
        ]
    return plain


def _loaded(arguments: Any) -> Any:
    try:
        loaded = json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
    return loaded if isinstance(loaded, dict) else arguments


def closing(tokenizer: Any) -> str:
    """The text that the template adds after an assistant message, such as "<|im_end|>\n"."""
    return _closing(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=32)  # once per template, not per turn
def _closing(tokenizer: Any, chat_template: str) -> str:
    content = "areax"
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    return render(tokenizer, chat, (), {}, ask=False).rpartition(content)[2]


def after(tokenizer: Any, last: int, closing: str) -> str:
    """The part of `closing` after the stop token `last`: either its own, or another one such as <|eom_id|>."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    if last not in special:  # the turn was cut off, or a stop string ended it
        return closing
    stop = tokenizer.decode([last])
    ends = [stop] if stop in closing else [tokenizer.decode([id]) for id in encode(tokenizer, closing) if id in special]
    return closing.partition(ends[0])[2] if ends else closing


def opens(tokenizer: Any) -> bool:
    """Whether the generation prompt already opens the reasoning, so that an answer's text begins inside it."""
    return render(tokenizer, [{"role": "user", "content": "areax"}], (), {}, ask=True).rstrip().endswith("<think>")


def continuation(before: str, spoken: str, now: str, *, texts: Sequence[str], closing: str) -> str | None:
    """The text that `now` adds to `spoken`, both as rendered by the template; None if it rewrote the answer.

    Args:
      before: the prompt of the answer.
      spoken: the prompt with the answer, turn closed.
      now: the next prompt.
      texts: reasoning and content of the answer; a template that leaves them out has rewritten it.
    """
    extends = spoken.startswith(before) and now.startswith(spoken) and bool(closing) and spoken.endswith(closing)
    if extends and all(part.strip() in spoken[len(before) :] for part in texts):
        return now[len(spoken) :]
    return None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encodes a text that already contains its special tokens.

    Raises:
      ValueError: the tokenizer has no token for some of it.
    """
    unicode(text)
    return known(tokenizer, tokenizer.encode(text, add_special_tokens=False), text)


def known(tokenizer: Any, ids: list[int], *texts: str) -> list[int]:
    """Returns `ids`, the encoded texts; raises ValueError if they contain the unknown token, which loses text."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return ids
    is_unknown = lambda text: unknown in tokenizer.encode(text, add_special_tokens=False)
    for text in filter(is_unknown, texts):
        lost = "".join(dict.fromkeys(filter(is_unknown, text)))
        raise ValueError(
            f"the tokenizer has no token for {lost or tokenizer.unk_token!r} in {text[:80]!r}; add it to its alphabet"
        )
    return ids
