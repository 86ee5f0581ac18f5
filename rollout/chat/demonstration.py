"""Which tokens of a demonstration are learnt: those that the chat template writes for the assistant's turns.

The tokens are those of the template's own rendering of the whole conversation. What is learnt is marked by the template
with {% generation %} blocks, else it is what a turn adds to the prompt that generates it.
"""

from __future__ import annotations

import functools
import itertools
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from . import conversation, images, template
from .conversation import Conversation, Message

Learn = Literal["last", "all"]
Span = tuple[int, int]  # of characters
STAND_IN = "areax", "xaera"  # for what a turn says


class Demonstration(NamedTuple):
    """The tokens of a row's demonstration.

    Attributes:
      ids: up to the end of the last turn that is learnt; of an image one.
      mask: of those that are learnt.
      images: in the order of their tokens.
      lost: a part of the last message that the template leaves out; "" = it is whole.
    """

    ids: list[int]
    mask: list[bool]
    images: tuple[images.Image, ...] = ()
    lost: str = ""

    def whole(self) -> Demonstration:
        """Itself; raises ValueError if a part of it is lost."""
        if self.lost:
            raise ValueError(
                f"chat: the chat template leaves out {self.lost[:80]!r} of the last message, which would not be "
                "learnt; write it as the template has it, or take another template"
            )
        return self


def encoded(
    tokenizer: Any, row: Mapping[str, Any], learn: Learn, end: int, processor: images.Processor | None = None
) -> Demonstration:
    """The tokens of a row's demonstration.

    Args:
      learn: "last" = the assistant's last turn, which is the row's "completion" or the last of its "messages"; "all" =
        all its turns but those with "weight" 0.
      end: the token that ends a turn, added if the template writes none, or if there is no template.
      processor: as in `template.prompted`.

    Raises:
      ValueError: the row has no such turn, the template refuses the messages, or renders earlier turns differently
        once others follow.
    """
    [made] = encoded_together(tokenizer, [row], learn, end, processor)
    if isinstance(made, ValueError):
        raise made
    return made


def encoded_together(
    tokenizer: Any, rows: Sequence[Mapping[str, Any]], learn: Learn, end: int,
    processor: images.Processor | None = None,
) -> list[Demonstration | ValueError]:  # fmt: skip
    """What `encoded` returns or raises for each row; the texts of all are tokenised at once, which takes all cores."""
    written = [conversation.tried(_written, tokenizer, row, learn, end, processor) for row in rows]
    pieces = [one.pieces for one in written if isinstance(one, _Written)]
    ids = iter(template.encoded_together(tokenizer, [*itertools.chain(*pieces)]))
    made: list[Demonstration | ValueError] = []
    for one in written:
        if isinstance(one, _Written):
            given = [*itertools.islice(ids, len(one.pieces))]
            made.append(conversation.tried(_demonstration, tokenizer, one, given, end))
        else:
            made.append(one)
    return made


class _Written(NamedTuple):
    """A demonstration before its text is tokenised.

    Attributes:
      spans: of the text that are learnt.
      ended: whether the text ends with a token that ends a turn.
      images, lost: as of `Demonstration`.
    """

    talk: Conversation
    text: str
    spans: list[Span]
    ended: bool
    images: tuple[images.Image, ...]
    lost: str

    @property
    def cuts(self) -> list[int]:
        return [0, *(at for span in self.spans for at in span)]

    @property
    def pieces(self) -> list[str]:
        """The text between two cuts each, and that up to the last one."""
        return [*(self.text[a:b] for a, b in itertools.pairwise(self.cuts)), self.text[: self.cuts[-1]]]


def _written(
    tokenizer: Any, row: Mapping[str, Any], learn: Learn, end: int, processor: images.Processor | None
) -> _Written | Demonstration:
    talk = (conversation.demonstration if learn == "last" else conversation.dialogue)(row)
    talk = template.readable(tokenizer, talk._replace(messages=images.read(talk.messages, processor)))
    if not tokenizer.chat_template:
        return _untemplated(tokenizer, row, talk, learn, end)
    if not (wanted := _wanted(talk.messages, learn)):
        raise ValueError("a demonstration needs an assistant's message to learn, got weight 0 for each of them")
    text = template.render(tokenizer, talk.messages, talk.tools, talk.variables, ask=False)
    conversation.unicode(text)
    spans, ended = _spans(tokenizer, talk, text, wanted, tokenizer.convert_ids_to_tokens(end))
    lost = _lost(tokenizer, talk, text, spans[-1]) if wanted[-1] == len(talk.messages) - 1 else ""
    return _Written(talk, text, spans, ended, images.of(talk.messages[: wanted[-1] + 1]), lost)


def _demonstration(tokenizer: Any, made: _Written, given: list[list[int]], end: int) -> Demonstration:
    """The demonstration of which `given` are the ids of the pieces."""
    ids, mask = _tokens(tokenizer, made, given)
    if not made.ended:
        ids, mask = [*ids, end], [*mask, True]
    ids = template.known(tokenizer, ids, *made.talk.texts(made.text))
    return Demonstration(ids, mask, made.images, made.lost)


def _wanted(messages: Sequence[Message], learn: Learn) -> list[int]:
    """The turns to learn."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [i for i in (turns if learn == "all" else turns[-1:]) if conversation.learnt(messages[i])]


def _untemplated(tokenizer: Any, row: Mapping[str, Any], talk: Conversation, learn: Learn, end: int) -> Demonstration:
    """A prompt as plain text, its completion, and the token that ends it."""
    if learn == "all":
        raise ValueError('chat: learning all turns needs a chat template, the tokenizer has none; use learn "last"')
    *before, answer = talk.messages
    if row.get("messages") or conversation.reasoning(answer) or answer.get("tool_calls"):
        template.render(tokenizer, talk.messages, (), {}, ask=False)  # raises
    prompt = template.prompted(tokenizer, row).tokens
    ids = [*template.encode(tokenizer, answer["content"]), end]
    return Demonstration([*prompt, *ids], [False] * len(prompt) + [True] * len(ids))


def _spans(tokenizer: Any, talk: Conversation, text: str, wanted: Sequence[int], end: str) -> tuple[list[Span], bool]:
    """(what is learnt of the text, whether it ends with a token that ends a turn)."""
    if blocks := template.marked(tokenizer, talk.messages, talk.tools, talk.variables):
        ended = ((a, b + len(end) * text.startswith(end, b)) for a, b in _marked(tokenizer, talk, *blocks, wanted))
        found = [(a, b) for a, b in ended if a < b]
        if not found:
            raise ValueError(
                "chat: the chat template marks no assistant tokens in this conversation; add an assistant message"
            )
        return found, text[slice(*found[-1])].rstrip().endswith(_special(tokenizer))
    found, ends = [], True
    for i in wanted:
        if i == 0:  # no answer
            continue
        start, after = _added(tokenizer, talk, i, text)
        stop = _stop(tokenizer, after, start, end) if start else None
        if not (start and text.startswith(after[:stop])):
            if i == len(talk.messages) - 1:
                raise ValueError(
                    "chat: the chat template renders what is before the last message differently with it, so it "
                    "follows no prompt; take another template"
                )
            raise ValueError(
                f"chat: the chat template renders message {i} differently once others follow, so no sequence has all "
                'turns as generated; use learn "last", or a template with {% generation %} blocks'
            )
        if stop is None and i < wanted[-1]:
            raise ValueError(f'chat: the chat template must end the assistant\'s turn with {end!r}; use learn "last"')
        found.append((start, len(after) if stop is None else stop))
        ends = stop is not None
    if not found:
        raise ValueError("chat: an assistant message at the start is no answer, got no other; add what it answers")
    return found, ends


def _marked(tokenizer: Any, talk: Conversation, text: str, spans: list[Span], wanted: Sequence[int]) -> list[Span]:
    """The spans that belong to wanted turns: those that change if the turns say something else."""
    if list(wanted) == [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]:
        return spans
    said, chosen = [text[a:b] for a, b in spans], set()
    for i in wanted:
        messages = [*talk.messages[:i], _stand_in(talk.messages[i]), *talk.messages[i + 1 :]]
        changed = template.marked(tokenizer, messages, talk.tools, talk.variables)
        assert changed is not None
        others = [changed[0][a:b] for a, b in changed[1]]
        first = _equal(said, others)
        behind = min(_equal(said[::-1], others[::-1]), len(said) - first)
        chosen |= {*range(first, len(said) - behind)}
    return [spans[i] for i in sorted(chosen)]


def _equal(a: Sequence[str], b: Sequence[str]) -> int:
    """How many both have in common at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _stand_in(message: Message) -> dict[str, Any]:
    """A message of the same form that says something else."""
    made = dict(message)
    for name in ("content", *conversation.REASONING):
        if made.get(name) or (name == "content" and not made.get("tool_calls")):
            made[name] = STAND_IN[made.get(name) == STAND_IN[0]]
    renamed = lambda call: {**call, "function": {**call["function"], "name": STAND_IN[0] + call["function"]["name"]}}
    return made | ({"tool_calls": list(map(renamed, made["tool_calls"]))} if made.get("tool_calls") else {})


def _added(tokenizer: Any, talk: Conversation, i: int, text: str) -> tuple[int, str]:
    """(where turn i begins, the text up to the end of the turn); 0 = the template renders what is before differently
    with it."""
    show = lambda messages, ask: template.render(tokenizer, messages, talk.tools, talk.variables, ask=ask)
    before, last = show(talk.messages[:i], True), i == len(talk.messages) - 1
    after = text if last else show(talk.messages[: i + 1], False)
    if after.startswith(before):
        return len(before), after
    # The generation prompt opens what this turn does not have, such as reasoning, or closes what it has.
    history, said = show(talk.messages[:i], False), {"role": "assistant", "content": STAND_IN[0]}
    for other in (said, {**said, "reasoning_content": STAND_IN[0]}):
        head = os.path.commonprefix([before, show([*talk.messages[:i], other], False)])
        if after.startswith(head) and head.startswith(history):
            return len(head), after
    return 0, after


def _stop(tokenizer: Any, text: str, start: int, end: str) -> int | None:
    """Where a turn from `start` on ends, behind its special tokens; None = it has none."""
    at, whole, special = text.rfind(end, start), text.rstrip(), _special(tokenizer)
    if at < 0:
        return len(whole) if len(whole) > start and whole.endswith(special) else None
    stop = at + len(end)
    while following := next((token for token in special if text.startswith(token, stop)), None):
        stop += len(following)
    return stop


@functools.lru_cache(maxsize=32)
def _special(tokenizer: Any) -> tuple[str, ...]:
    """The texts of special tokens, the longest first."""
    return tuple(sorted({*template.special_tokens(tokenizer).values()} - {""}, key=lambda text: (-len(text), text)))


def _lost(tokenizer: Any, talk: Conversation, text: str, span: Span) -> str:
    """The first part of the last turn that is not in the text, of which `span` is learnt; "" = all are."""
    *before, answer = talk.messages
    content = images.words(answer.get("content"))
    parts = [conversation.reasoning(answer), *re.split(r"</?think>", content)]
    parts += [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    written = _unspaced(text[slice(*span)])
    if all(_unspaced(part) in written for part in parts):
        return ""
    prompt = template.render(tokenizer, before, talk.tools, talk.variables, ask=True)
    written = _unspaced(text[len(os.path.commonprefix([prompt, text])) :])
    return next((part.strip() for part in parts if _unspaced(part) not in written), "")


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _tokens(tokenizer: Any, made: _Written, given: list[list[int]]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of the text up to its last span, tokenised separately on both sides of every span boundary, as in
    generation: no token spans a prompt and an answer."""
    *pieces, whole = given
    if [*itertools.chain(*pieces)] != whole:  # a token spans a cut, or start-of-text changes a piece
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for i, end in enumerate(made.cuts[1:]):
            longer = encode(made.text[:end])
            pieces[i] = longer[len(ids) :] if longer[: len(ids)] == ids else pieces[i]
            ids += pieces[i]
    return [*itertools.chain(*pieces)], [bool(i % 2) for i, piece in enumerate(pieces) for _ in piece]
