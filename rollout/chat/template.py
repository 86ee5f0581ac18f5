"""A tokenizer's chat template: rows and conversations to prompts, and whether one continues another.

A sampled turn is never retokenised: later text is appended to its tokens. That is correct if the template renders the
longer conversation as an extension of the shorter one; if it rewrites earlier turns (drops reasoning, or has another
system prompt or other tools), the longer conversation starts a new sequence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os.path
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..types import Image
from . import conversation, images
from .conversation import Conversation

Message = Mapping[str, Any]
GENERATION = re.compile(r"{%([-+]?)\s*(?:end)?generation\s*([-+]?)%}")  # of transformers, unknown to Jinja
# What rendering raises beside Jinja's own errors.
FAILURES = TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
NO_LIMIT, UNSAID = 2**24, 2**16  # a tokenizer that knows no context says more; what it is taken for
PER_TOKEN, BESIDES = 64, 2**16  # characters of a token at most, on average, and of a short context besides
CALLED = "areax_called"  # a tool's name, for calls that stand for others
PROPERTIES = {"areax": {"type": "string", "description": "areax"}}
ASKED = {"role": "user", "content": "?"}
TOOLS = [  # that stand for others
    {
        "type": "function",
        "function": {
            "name": "areax", "description": "areax", "parameters": {"type": "object", "properties": PROPERTIES}
        },
    }
]  # fmt: skip
SIGN = "\ufdd0generated\ufdd1"  # stands for such a tag in a text; no text has these characters


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

    The row's `conversation.prompt` is rendered with the chat template and a generation prompt; without a template a
    "prompt" is plain text to continue.

    Args:
      processor: of a model that reads images; None = a row with images is refused.

    Raises:
      ValueError: the row has no unique prompt, the template refuses it or does not show its tools, the tokenizer has no
        token for some of it, or an image cannot be read or has no place in it.
    """
    [made] = prompted_together(tokenizer, [row], processor)
    if isinstance(made, ValueError):
        raise made
    return made


def prompted_together(
    tokenizer: Any, rows: Sequence[Mapping[str, Any]], processor: images.Processor | None = None
) -> list[Prompt | ValueError]:
    """What `prompted` returns or raises for each row; the texts of all are tokenised at once, which takes all cores."""
    asked = [conversation.tried(_asked, tokenizer, row, processor) for row in rows]
    given = iter(encoded_together(tokenizer, [one.text for one in asked if isinstance(one, _Asked)]))
    return [
        conversation.tried(_answerable, tokenizer, one, next(given), processor) if isinstance(one, _Asked) else one
        for one in asked
    ]


class _Asked(NamedTuple):
    """A prompt before its text is tokenised."""

    talk: Conversation
    images: tuple[Image, ...]
    text: str


def _asked(tokenizer: Any, row: Mapping[str, Any], processor: images.Processor | None) -> _Asked | Prompt:
    talk = conversation.prompt(row)
    talk = readable(tokenizer, talk._replace(messages=images.read(talk.messages, processor)))
    seen = images.of(talk.messages)
    if not tokenizer.chat_template and isinstance(row.get("prompt"), str) and not seen:
        ids = known(tokenizer, tokenizer.encode(row["prompt"]), row["prompt"])
        return Prompt(ids, (), tokenizer.decode(ids))
    text = render(tokenizer, talk.messages, talk.tools, talk.variables, ask=True)
    conversation.unicode(text)
    return _Asked(talk, seen, text)


def _answerable(tokenizer: Any, asked: _Asked, ids: list[int], processor: images.Processor | None) -> Prompt:
    talk, seen, text = asked
    ids = known(tokenizer, ids, *talk.texts(text))
    return Prompt(processor.expanded(ids, seen) if processor else ids, seen, text)


def check_length(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for texts far longer than the model's context holds, before tokens are made of them: these need
    a thousand times the memory."""
    context = getattr(tokenizer, "model_max_length", 0)
    context = context if 0 < context < NO_LIMIT else UNSAID
    most = PER_TOKEN * context + BESIDES
    length = sum(_length(message.get("content")) for message in messages)
    if length > most:
        raise ValueError(f"messages must fit a context of {context} tokens, at most {most} characters, got {length}")


def _length(content: Any) -> int:
    """The characters of a message's texts."""
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, Sequence):
        return 0
    return sum(len(part["text"]) for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def readable(tokenizer: Any, talk: Conversation) -> Conversation:
    """A row's conversation; the assistant's messages without the end of turn that some texts have already, since the
    template adds one.

    Raises:
      ValueError: the template does not read one of the variables, or does not show the tools or the calls.
    """
    check_variables(tokenizer, talk.variables)
    check_length(tokenizer, talk.messages)
    check_calls(tokenizer, talk.messages, talk.tools)
    talk = talk._replace(messages=ended(tokenizer, talk.messages))
    written = lambda tools: render(tokenizer, talk.messages, tools, talk.variables, ask=False)
    if talk.tools and not shows(written, written(talk.tools)):
        raise ValueError("tools: this model's chat template does not show them to the model; leave them out")
    return talk


def shows(written: Callable[[Sequence], str], text: str) -> bool:
    """Whether `text`, which is `written(tools)`, shows the tools: without any the template writes another, or refuses
    the messages."""
    try:
        return text != written(())
    except ValueError:  # it needs tools
        return True


def ended(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages; the assistant's without the end of turn that some texts have already."""
    if not any(message["role"] == "assistant" for message in messages):
        return list(messages)
    longest = sorted({closing(tokenizer).strip(), tokenizer.eos_token or ""} - {""}, key=len, reverse=True)
    return [_ended(one, longest) if one["role"] == "assistant" else one for one in messages]


def _ended(message: dict[str, Any], ends: Collection[str]) -> dict[str, Any]:
    text = message.get("content")
    whole = text.rstrip() if isinstance(text, str) else ""
    while end := next((end for end in ends if whole.endswith(end)), ""):
        text = whole.removesuffix(end)
        whole = text.rstrip()
    return {**message, "content": text} if "content" in message else message


def check_calls(tokenizer: Any, messages: Sequence[Message], tools: Sequence) -> None:
    """Raises ValueError if messages have calls, and the template leaves them out; a tokenizer may have one for
    conversations with tools, and one for those without."""
    if any(message.get("tool_calls") for message in messages) and not _shows_calls(
        tokenizer, str(tokenizer.chat_template or ""), bool(tools)
    ):
        raise ValueError(
            "tool_calls: this model's chat template does not show them to the model; write them into the contents"
        )


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
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template is not valid: {' '.join(str(error).split())}") from None
    return frozenset(meta.find_undeclared_variables(parsed)) - {"raise_exception", "strftime_now"}


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence, options: Mapping, *, ask: bool) -> str:
    """Renders a conversation as text.

    Args:
      messages, tools: in OpenAI's format; a text may also be a list of parts of text, arguments of calls an object,
        and reasoning has any of the names of `conversation.REASONING`.
      options: further variables of the template, such as `enable_thinking`.
      ask: add the generation prompt.

    Raises:
      ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("messages: the tokenizer has no chat template; send a prompt of tokens, or take a chat model")
    return _rendered(tokenizer, identified(tokenizer, messages), tools, options, ask=ask)


def marked(tokenizer: Any, messages: Sequence[Message], tools: Sequence, options: Mapping) -> tuple[str, list] | None:
    """(text as of `render` without a generation prompt, spans [(start, end), ...] in characters of what the template
    says that the assistant generates, in its {% generation %} blocks); None = it has no such blocks."""
    chosen = tokenizer.get_chat_template(tools=list(tools) or None)
    if not GENERATION.search(chosen):
        return None
    signed = GENERATION.sub(_signed, chosen)
    messages = identified(tokenizer, messages)
    pieces = _rendered(tokenizer, messages, tools, options, ask=False, chat_template=signed).split(SIGN)
    starts = [0, *itertools.accumulate(map(len, pieces))]
    spans: list[tuple[int, int]] = []
    for a, b in zip(starts[1:-1:2], starts[2::2], strict=True):
        if spans and spans[-1][1] == a:
            spans[-1] = spans[-1][0], b
        else:
            spans.append((a, b))
    return "".join(pieces), spans


def _signed(tag: re.Match[str]) -> str:
    """A tag of Jinja that writes SIGN, with the control of white space that `tag` has."""
    return f"{{%{tag[1]} if true %}}{{{{ {SIGN!r} }}}}{{% endif {tag[2]}%}}"


def _rendered(tokenizer: Any, messages: Sequence[Message], tools: Sequence, options: Mapping, *, ask: bool, **more):
    from jinja2 import TemplateError

    called = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    texts = takes_texts(tokenizer)
    written, problem = None, None
    for loaded in (True, False) if called else (True,):  # templates want arguments as an object, or as text
        try:
            found = tokenizer.apply_chat_template(
                [_plain(message, loaded, texts) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=ask,
                **{**options, **more},
            )
        except (TemplateError, *FAILURES) as error:
            # Not only Jinja's: for example, a field may have a type that the template does not expect.
            problem = problem or error
            continue
        quoted = (repr(_loaded(function["arguments"])) for function in called if loaded)
        if all(function["name"] in found for function in called) and not any(
            text in found for text in quoted if "'" in text
        ):
            return found
        written = found if written is None else written
    if written is not None:  # a template without tools
        return written
    raise ValueError(f"messages: the chat template refuses them ({' '.join(str(problem).split())})") from problem


def identified(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, the ids of their calls as the template needs them: `functions.NAME:NUMBER` where it writes ids in
    place of names (Kimi K2), nine letters and digits where it refuses others (Mistral). Ids of this form stay."""
    called = any(message.get("tool_calls") for message in messages)
    form = _form_of_ids(tokenizer, str(tokenizer.chat_template)) if called else ""
    if not form:
        return messages
    made, now, count = [], {}, 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            id, name = call.get("id"), call["function"]["name"]
            fits = rf"(functions\.)?{re.escape(name)}:\d+" if form == "named" else r"[a-zA-Z0-9]{9}"
            if not re.fullmatch(fits, str(id)):
                now[id] = f"functions.{name}:{count}" if form == "named" else f"{count:09}"
            calls.append({**call, "id": now.get(id, id)})
            count += 1
        answered = message.get("tool_call_id")
        made.append(
            {**message, **({"tool_calls": calls} if calls else {})}
            | ({"tool_call_id": now[answered]} if answered in now else {})
        )
    return made


@functools.lru_cache(maxsize=32)  # once per template
def _form_of_ids(tokenizer: Any, chat_template: str) -> str:
    long, short = "call_0123456789abcdef0", "call00000"
    texts = {}
    for id in (long, short):
        with contextlib.suppress(ValueError):
            texts[id] = _rendered(tokenizer, _calling(id), TOOLS, {}, ask=False)
    if long in texts:
        return "named" if CALLED not in texts[long] and long in texts[long] else ""
    return "short" if CALLED in texts.get(short, "") else ""


def takes_texts(tokenizer: Any) -> bool:
    """Whether the template writes contents that are texts; some, of models that read images, write only parts."""
    return _takes_texts(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=32)  # once per template
def _takes_texts(tokenizer: Any, chat_template: str) -> bool:
    from jinja2 import TemplateError

    for content in ("areax", [{"type": "text", "text": "areax"}]):
        try:
            if "areax" in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False):
                return isinstance(content, str)
        except (TemplateError, *FAILURES):
            continue
    return True


def _plain(message: Message, loaded: bool, texts: bool) -> dict[str, Any]:
    """A message as templates expect it: without None; arguments are objects if `loaded`, else text; reasoning under all
    of its names; a content that is text alone joined if the template takes `texts`, else a part."""
    plain = conversation.plain(conversation.filled(message))
    plain["content"] = plain.get("content") or ""
    if not texts and isinstance(plain["content"], str):
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    plain.pop("weight", None)
    if reasoning := conversation.reasoning(plain):
        plain |= dict.fromkeys(conversation.REASONING, reasoning)
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _given(call["function"]["arguments"], loaded)}}
            for call in calls
        ]
    return plain


def _given(arguments: Any, loaded: bool) -> Any:
    if loaded or isinstance(arguments, str):
        return _loaded(arguments) if loaded else arguments
    return json.dumps(arguments, ensure_ascii=False)


def _loaded(arguments: Any) -> Any:
    try:
        loaded = json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
    return loaded if isinstance(loaded, dict) else arguments


def closing(tokenizer: Any) -> str:
    """The text that the template adds after an assistant message, such as "<|im_end|>\n"."""
    return _closing(tokenizer, str(tokenizer.chat_template or ""))


@functools.lru_cache(maxsize=32)  # once per template, not per turn
def _closing(tokenizer: Any, chat_template: str) -> str:
    if not chat_template:
        return ""
    content = "areax"
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    try:
        text = render(tokenizer, chat, (), {}, ask=False)
    except ValueError:  # it needs tools
        text = render(tokenizer, chat, TOOLS, {}, ask=False)
    return text.rpartition(content)[2]


def opening(tokenizer: Any) -> str:
    """The text that the template writes between the prompt and the content of an answer with reasoning; "" = it does
    not write such an answer."""
    said = {"role": "assistant", "content": "areax", "reasoning_content": "xaera"}
    try:
        before, text = (
            render(tokenizer, messages, (), {}, ask=ask) for messages, ask in (([ASKED], True), ([ASKED, said], False))
        )
    except ValueError:
        return ""
    return text[len(os.path.commonprefix([before, text])) :].rpartition("areax")[0]


def call_end(tokenizer: Any) -> str:
    """The special token with which the template ends a turn of calls, such as <|call|>; "" = it ends none, or each
    call with the same."""
    return _call_end(tokenizer, str(tokenizer.chat_template or ""))


@functools.lru_cache(maxsize=32)  # once per template, not per turn
def _call_end(tokenizer: Any, chat_template: str) -> str:
    texts = _called(tokenizer)
    if not texts:
        return ""
    end = texts[0].rpartition("areax")[2].rstrip()
    found = next((token for token in special_tokens(tokenizer).values() if token and end.endswith(token)), "")
    return found if found and len({text.count(found) for text in texts}) == 1 else ""


@functools.lru_cache(maxsize=32)  # once per template, not per row
def _shows_calls(tokenizer: Any, chat_template: str, tools: bool) -> bool:
    texts = _called(tokenizer, TOOLS if tools else ())
    return not texts or any(CALLED in text for text in texts)


def _called(tokenizer: Any, tools: Sequence = TOOLS) -> list[str]:
    """Conversations that end with a call of CALLED, and with two; without those that the template refuses."""
    texts = []
    for ids in (("call00000",), ("call00000", "call00001")):
        with contextlib.suppress(ValueError):  # it has no calls, or not two
            texts.append(render(tokenizer, _calling(*ids), tools, {}, ask=False))
    return texts


def _calling(*ids: str) -> list[Message]:
    """A conversation that ends with a call of CALLED for each id."""
    function = {"name": CALLED, "arguments": {"areax": "areax"}}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]


@functools.lru_cache(maxsize=32)  # once per tokenizer, not per row
def special_tokens(tokenizer: Any) -> dict[int, str]:
    """{id: text} of the special tokens, in the order of ids: marks of turns, calls, reasoning and ends."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {id: token.content for id, token in added.items() if token.special}
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    return dict(sorted({**dict(named), **found}.items()))


def after(tokenizer: Any, last: int, closing: str) -> str:
    """The part of `closing` after the stop token `last`: either its own, or another one such as <|eom_id|>."""
    special = special_tokens(tokenizer)
    if last not in special:  # the turn was cut off, or a stop string ended it
        return closing
    stop = tokenizer.decode([last])
    ends = [stop] if stop in closing else [tokenizer.decode([id]) for id in encode(tokenizer, closing) if id in special]
    return closing.partition(ends[0])[2] if ends else closing


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
    conversation.unicode(text)
    return known(tokenizer, tokenizer.encode(text, add_special_tokens=False), text)


def encoded_together(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, as `tokenizer.encode` gives them without special tokens of its own; all cores take part."""
    options = dict(add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    each = [*dict.fromkeys(texts)]
    found = dict(zip(each, tokenizer(each, **options)["input_ids"], strict=True)) if each else {}
    return [found[text] for text in texts]


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
