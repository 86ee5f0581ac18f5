"""Multi-turn demonstrations: token ids of a conversation, with a loss mask of the assistant's turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from ...rollout import types
from ...rollout.chat import images, template
from .. import tokenizer as tokenizers

Learn = Literal["last", "all"]
BLOCK = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


def demonstration(tokenizer: Any, row: dict, learn: Learn = "last") -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of a row without images, as `sample`."""
    made = sample(tokenizer, row, learn)
    return made.tokens.tolist(), made.mask.tolist()


def sample(tokenizer: Any, row: dict, learn: Learn = "last", processor: images.Processor | None = None) -> types.Sample:
    """The sample of a row with "messages" or a "prompt", optionally followed by a "completion".

    Args:
      learn: "last" = the assistant's last turn, as in `tokenizer.supervised`; "all" = all its turns, as in
        `conversation` (TRL's assistant_only_loss).
      processor: as in `template.prompted`.
    """
    if learn == "last":
        prompt, completion = tokenizers.demonstrated(tokenizer, row, processor)
        return types.supervised(prompt.tokens, completion, images=prompt.images)
    named = "messages" if row.get("messages") else "prompt"  # of a row that has both, the messages count
    other = "prompt" if named == "messages" else "messages"
    messages = template.conversation({**row, other: None}) if row.get(named) is not None else []
    if row.get("completion") is not None:
        messages.append({"role": "assistant", "content": row["completion"]})
    template.check(messages)
    if not any(message.get("role") == "assistant" for message in messages):
        raise ValueError(f"a demonstration needs a completion or assistant messages, got the fields {sorted(row)}")
    messages = images.read(messages, processor)
    ids, mask = conversation(tokenizer, messages)
    if processor is None:
        return types.demonstration(ids, mask)
    images.refuse([id for id, wanted in zip(ids, mask, strict=True) if wanted], processor)
    seen = images.of(messages)
    tokens = processor.expanded(ids, seen)
    kept = (wanted for id, wanted in zip(ids, mask, strict=True) if id != processor.token)
    return types.demonstration(tokens, [id != processor.token and next(kept) for id in tokens], images=seen)


def conversation(tokenizer: Any, messages: Sequence[dict]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation up to the end of the assistant's last turn, and a mask of the assistant's tokens.

    The assistant's tokens, end of turn included, are those in the chat template's {% generation %} blocks. Without such
    blocks, they are what rendering the conversation up to the assistant's message adds to its prompt; an assistant
    message at the start is no answer and is not learnt. As in generation, no token spans a prompt and an answer.

    Raises:
      ValueError: the template rejects the messages, renders earlier turns differently once others follow, or does not
        end a turn.
    """
    if not tokenizer.chat_template:
        raise ValueError('chat: learning all turns needs a chat template, the tokenizer has none; use learn "last"')
    template.check(messages)
    marked = BLOCK.search(tokenizer.get_chat_template())
    text, spans = (_blocks if marked else _answers)(tokenizer, list(messages))
    if not spans:
        raise ValueError(
            "chat: the chat template marks no assistant tokens in this conversation; add an assistant message"
        )
    ids, mask = _encoded(tokenizer, text, spans)
    return template.known(tokenizer, ids, *template.texts(messages)), mask


def _blocks(tokenizer, messages):
    """(text, spans in characters) from the template's generation blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # apply_chat_template would return a token mask, which includes tokens that span prompt and answer.
    chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
    [text], [spans] = tokenizers.rendered(
        render_jinja_template, conversations=[chat], chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True, **{**tokenizer.special_tokens_map, **tokenizers.bound(tokenizer)},
    )  # fmt: skip
    return text, spans


def _answers(tokenizer, messages):
    """(text, spans in characters) by rendering the conversation up to each answer, without and with it."""
    show = lambda part, **more: tokenizers.rendered(tokenizer.apply_chat_template, part, tokenize=False, **more)
    text, spans = show(messages), []
    end = tokenizer.convert_ids_to_tokens(tokenizers.end_of_turn(tokenizer))
    for i, message in enumerate(messages):
        if i == 0 or message["role"] != "assistant":
            continue
        before, after = show(messages[:i], add_generation_prompt=True), show(messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"chat: the chat template renders message {i} differently once others follow, so no sequence has all "
                'turns as generated; use learn "last", or a template with {% generation %} blocks'
            )
        at = after.rfind(end, len(before))
        if at < 0:
            raise ValueError(f'chat: the chat template must end the assistant\'s turn with {end!r}; use learn "last"')
        spans.append((len(before), at + len(end)))
    return text, spans


def _encoded(tokenizer, text, spans):
    """(ids, mask) of the text up to its last span, tokenised separately on both sides of every span boundary."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    cuts = [0, *(at for span in spans for at in span)]
    pieces = [encode(text[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    if sum(pieces, []) != encode(text[: cuts[-1]]):  # a token spans a cut, or start-of-text changes a piece
        ids: list[int] = []
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            longer = encode(text[:b])
            pieces[i] = longer[len(ids) :] if longer[: len(ids)] == ids else encode(text[a:b])
            ids += pieces[i]
    return sum(pieces, []), [bool(i % 2) for i, piece in enumerate(pieces) for _ in piece]
