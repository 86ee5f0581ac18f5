"""Demonstrations of several turns: the ids of a conversation, and which of them the assistant says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from ...rollout.chat import template
from .. import tokenizer as tokenizers

Learn = Literal["last", "all"]
BLOCK = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


def demonstration(tokenizer: Any, row: dict, learn: Learn = "last") -> tuple[list[int], list[bool]]:
    """`(ids, mask)` of a row with "messages" or a "prompt", and perhaps a "completion" behind; mask: what to learn.

    Args:
      learn: "last" = what the assistant says last, as `tokenizer.supervised`; "all" = each of its turns, as
        `conversation`.
    """
    if learn == "last":
        prompt, completion = tokenizers.supervised(tokenizer, row)
        return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)
    messages = list(row.get("messages") or ())
    if not messages and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if row.get("completion") is not None:
        messages.append({"role": "assistant", "content": row["completion"]})
    if not any(message.get("role") == "assistant" for message in messages):
        raise ValueError(
            f"a demonstration needs a completion or messages of the assistant, got the fields {sorted(row)}"
        )
    return conversation(tokenizer, messages)


def conversation(tokenizer: Any, messages: Sequence[dict]) -> tuple[list[int], list[bool]]:
    """`(ids, mask)` of a conversation up to the end of the assistant's last turn; mask: all that the assistant says.

    What it says, the end of its turn included, is what the chat template's {% generation %} blocks hold. Of a template
    without any, it is what the conversation up to such a message has beyond its prompt; an assistant that speaks first
    answers nothing, and is not learnt. No token spans a prompt and an answer, as none does when answers are generated.

    Raises:
      ValueError: the template refuses the messages, shows earlier turns otherwise than it did when they were the last,
        or does not end a turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "chat: the tokenizer has no chat template, from which all turns could be learnt; learn the last"
        )
    template.check(messages)
    marked = BLOCK.search(tokenizer.get_chat_template())
    text, spans = (_blocks if marked else _answers)(tokenizer, list(messages))
    if not spans:
        raise ValueError(
            "chat: the assistant says nothing that the chat template shows as its own, in this conversation"
        )
    ids, mask = _encoded(tokenizer, text, spans)
    return template.known(tokenizer, ids, *template.texts(messages)), mask


def _blocks(tokenizer, messages):
    """(text, spans in characters) by the template's own marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # apply_chat_template would give a mask of tokens, and learn tokens that span the prompt and the answer.
    chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
    [text], [spans] = tokenizers.rendered(
        render_jinja_template, conversations=[chat], chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True, **tokenizer.special_tokens_map,
    )  # fmt: skip
    return text, spans


def _answers(tokenizer, messages):
    """(text, spans in characters) by rendering the conversation up to each answer, and with it."""
    show = lambda part, **more: tokenizers.rendered(tokenizer.apply_chat_template, part, tokenize=False, **more)
    text, spans = show(messages), []
    end = tokenizer.convert_ids_to_tokens(tokenizers.end_of_turn(tokenizer))
    for i, message in enumerate(messages):
        if i == 0 or message["role"] != "assistant":
            continue
        before, after = show(messages[:i], add_generation_prompt=True), show(messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"chat: the chat template shows message {i} otherwise once more follow, so that no sequence holds all "
                "turns as they are generated; learn the last, or mark them by {% generation %} in the template"
            )
        at = after.rfind(end, len(before))
        if at < 0:
            raise ValueError(f"chat: the chat template must end the assistant's turn with {end!r}; learn the last")
        spans.append((len(before), at + len(end)))
    return text, spans


def _encoded(tokenizer, text, spans):
    """(ids, mask) of the text up to its last span, cut where a span begins or ends."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    cuts = [0, *(at for span in spans for at in span)]
    pieces = [encode(text[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    if sum(pieces, []) != encode(text[: cuts[-1]]):  # a token spans a cut, or a piece alone would begin as a text does
        ids: list[int] = []
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            longer = encode(text[:b])
            pieces[i] = longer[len(ids) :] if longer[: len(ids)] == ids else encode(text[a:b])
            ids += pieces[i]
    return sum(pieces, []), [bool(i % 2) for i, piece in enumerate(pieces) for _ in piece]
