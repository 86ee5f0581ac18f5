"""A tokenizer's chat template: rows and conversations to prompts, and whether one continues another.

A turn that was sampled is never tokenised again: what follows it is appended to its tokens. That is right where the
template writes the longer conversation as the shorter one and more; where it rewrites what was said (reasoning that is
left out later, another system prompt, other tools), the longer conversation begins anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import object_path

Message = Mapping[str, Any]


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """The ids that a completion of `row` follows, the same wherever a row is used.

    They are the row's `conversation` by the chat template, up to where the assistant is to speak; without a template a
    "prompt" is plain text, to be continued.

    Raises:
      ValueError: the row has no clear prompt, the template refuses it, or the tokenizer has no token for some of it.
    """
    messages = conversation(row)
    if not tokenizer.chat_template and row.get("prompt") is not None:
        return known(tokenizer, tokenizer.encode(row["prompt"]), row["prompt"])
    check(messages)
    ids = tokenizer.encode(render(tokenizer, messages, (), {}, ask=True), add_special_tokens=False)
    return known(tokenizer, ids, *texts(messages))


def conversation(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's messages, or its prompt as what a user says; a list of its own.

    Raises:
      ValueError: the row has neither, or both.
    """
    given = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(given) != 1 or row[given[0]] == []:
        raise ValueError(
            f"a row needs either 'prompt' or 'messages', got the fields {sorted(row)}; {object_path.row(row)}"
        )
    return list(row["messages"]) if given == ["messages"] else [{"role": "user", "content": row["prompt"]}]


def check(messages: Sequence[Message]) -> None:
    """Raises ValueError unless each message has a role and a content, or calls of tools."""
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & message.keys():
            raise ValueError(f"a message needs a role and a content, got {str(message)[:80]}")


def texts(messages: Sequence[Message]) -> list[str]:
    """What a chat template shows of the messages, for `known`."""
    return [str(message[field]) for message in messages for field in ("role", "content") if message.get(field)]


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence, options: Mapping, *, ask: bool) -> str:
    """The text of a conversation.

    Args:
      messages, tools: in the form of OpenAI's chat API.
      options: further variables of the template, such as `enable_thinking`.
      ask: it ends where the assistant is to speak.

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
        except (TemplateError, TypeError) as error:  # TypeError: a field is not what the template takes for granted
            problem = problem or error
            continue
        if all(name in written for name in called):
            return written
        text = written if text is None else text
    if text is not None:  # a template without tools
        return text
    raise ValueError(f"messages: the chat template refuses them ({' '.join(str(problem).split())})") from problem


def _plain(message: Message, loaded: bool) -> dict[str, Any]:
    """A message as templates read it: no field is None, arguments are objects or, unless `loaded`, text."""
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
    """What the template writes after the assistant's words, such as "<|im_end|>\n"."""
    return _closing(tokenizer, tokenizer.chat_template)


@functools.lru_cache(maxsize=32)  # once a template, not once a turn
def _closing(tokenizer: Any, chat_template: str) -> str:
    said = "areax"
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    return tokenizer.apply_chat_template(chat, tokenize=False).rpartition(said)[2]


def after(tokenizer: Any, last: int, closing: str) -> str:
    """What `closing` has after a special token that ended the turn: its own, or another such as <|eom_id|>."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    if last not in special:  # the turn was cut off, or a stop string ended it
        return closing
    own = tokenizer.decode([last])
    ends = [own] if own in closing else [tokenizer.decode([id]) for id in encode(tokenizer, closing) if id in special]
    return closing.partition(ends[0])[2] if ends else closing


def opens(tokenizer: Any) -> bool:
    """Whether the template itself begins the assistant's reasoning, which the text of an answer then goes on with."""
    return render(tokenizer, [{"role": "user", "content": "areax"}], (), {}, ask=True).rstrip().endswith("<think>")


def continuation(before: str, spoken: str, now: str, *, said: Sequence[str], closing: str) -> str | None:
    """What `now` has after the assistant's turn in `spoken`, both as the template writes them; None if it rewrote that.

    Args:
      before: the text that the assistant was asked with.
      spoken: the text with its answer, turn closed.
      now: the text to ask with.
      said: reasoning and content of the answer; a template that leaves them out has rewritten it.
    """
    goes_on = spoken.startswith(before) and now.startswith(spoken) and bool(closing) and spoken.endswith(closing)
    if goes_on and all(part.strip() in spoken[len(before) :] for part in said):
        return now[len(spoken) :]
    return None


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that already has its special tokens.

    Raises:
      ValueError: the tokenizer has no token for some of it.
    """
    return known(tokenizer, tokenizer.encode(text, add_special_tokens=False), text)


def known(tokenizer: Any, ids: list[int], *texts: str) -> list[int]:
    """`ids` of the texts, unless some of these have become the unknown token, which decodes to something else."""
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
