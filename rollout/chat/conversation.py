"""Rows to conversations: the messages, the tools and the template's variables that a row's prompt is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .. import object_path
from . import images

Message = Mapping[str, Any]
T = TypeVar("T")

FIELDS = "prompt", "messages", "tools", "chat_template_kwargs", *images.FIELDS  # of rows, which change a prompt
UNREAD = {  # what to do with fields that others read into prompts
    "functions": "give them as 'tools'",
    "documents": "write them into a message",
    "system": 'make it the first of \'messages\', {"role": "system", "content": ...}',
    "history": "make its turns 'messages'",
    **dict.fromkeys(("videos", "video", "audios", "audio"), "no recipe reads it; leave the row out"),
}
ROLES = {"developer": "system"}  # what templates call it
DEEPEST = 100  # levels of objects and lists in each other
LEARNT = "loss", "loss_scale", "loss_mask", "train", "training", "train_detail"  # others' names of "weight"
REASONING = "reasoning_content", "reasoning", "thinking"  # of messages: names of one thing


class Conversation(NamedTuple):
    """What a chat template renders.

    Attributes:
      messages, tools: in OpenAI's format.
      variables: further variables of the template, such as `enable_thinking`.
    """

    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()
    variables: Mapping[str, Any] = {}

    def texts(self, rendered: str) -> list[str]:
        """The texts of which `rendered` was made."""
        return texts(self.messages) + [text for text in strings(self.tools) if text in rendered]


def prompt_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that its prompt is made of, and those for which it is refused."""
    given = {name: row.get(name) for name in (*FIELDS, *UNREAD)}
    return {
        name: value for name, value in given.items() if not (value is None or isinstance(value, list) and not value)
    }


def read_by_teacher(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its "teacher_prompt", a text as "prompt" or "messages", in place of these.

    Raises:
      ValueError: it is neither a text nor messages.
    """
    given = row["teacher_prompt"]
    if not given or not isinstance(given, str | list):
        raise ValueError(
            f"a row's 'teacher_prompt' must be a text or a list of messages, got {given!r:.80}; {object_path.row(row)}"
        )
    return {**row, "prompt": None, "messages": None, "prompt" if isinstance(given, str) else "messages": given}


def prompt(row: Mapping[str, Any]) -> Conversation:
    """The conversation that a row asks to continue: its "messages", or its "prompt" as the user's message, with "tools"
    and "chat_template_kwargs"; images as `images.placed`, without None at any depth, which Parquet adds.

    Raises:
      ValueError: the row has neither, or both; a field has another type, or is one of `UNREAD`; the assistant has the
        last word; images and their placeholders differ in number.
    """
    made = _read(row)
    if made.messages[-1]["role"] == "assistant":
        raise ValueError(
            "a prompt must end with a message of the user or a tool, got one of the assistant, which no template "
            f"continues; leave it out, or add what is said to it; {object_path.row(row)}"
        )
    return made


def demonstration(row: Mapping[str, Any]) -> Conversation:
    """The conversation of a row whose last message is the assistant's: its "completion", a text, a message or a list of
    one, behind its prompt, or the last of its "messages". Of a row with "messages" and "prompt" the messages count.

    Raises:
      ValueError: as `prompt`, or there is no such message.
    """
    given, said = {**row, "prompt": None} if row.get("messages") else row, row.get("completion")
    if said is not None:
        made = prompt(given)
        return made._replace(messages=[*made.messages, _answer(said)])
    if given.get("messages"):
        made = _read(given)
        if len(made.messages) > 1 and made.messages[-1]["role"] == "assistant":
            return made
        raise ValueError(
            f"'messages' must end with the assistant's answer to a prompt, got {len(made.messages)}, the last with "
            f"role {made.messages[-1]['role']!r}; add the answer, or leave out what follows it"
        )
    raise ValueError(f"a demonstration needs a completion, got the fields {sorted(row)}")


def dialogue(row: Mapping[str, Any]) -> Conversation:
    """As `demonstration`, but messages of others may follow the assistant's last one."""
    if row.get("completion") is not None or not row.get("messages"):
        return demonstration(row)
    made = _read({**row, "prompt": None})
    if not any(message["role"] == "assistant" for message in made.messages):
        roles = sorted({message["role"] for message in made.messages})
        raise ValueError(f"'messages' must have an answer of the assistant, got the roles {roles}; add the answer")
    return made


def _read(row: Mapping[str, Any]) -> Conversation:
    shallow("a row", prompt_fields(row))
    for name, instead in UNREAD.items():
        if not images.empty(row.get(name)):
            raise ValueError(f"a row's {name!r} is not read, got {str(row[name])[:80]!r}; {instead}")
    named = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if len(named) != 1 or row[named[0]] == []:
        raise ValueError(
            f"a row needs either 'prompt' or 'messages', got the fields {sorted(row)}; {object_path.row(row)}"
        )
    value = row[named[0]]
    if not isinstance(value, list if named == ["messages"] else str):
        wanted = "a list of messages" if named == ["messages"] else "a text"
        raise ValueError(f"{named[0]!r} must be {wanted}, got {value!r:.80}")
    messages = filled(value) if isinstance(value, list) else [{"role": "user", "content": value}]
    messages = images.placed(messages, images.given(row))
    check(messages)
    messages = list(map(spoken, messages))
    return Conversation(messages, _tools(row.get("tools")), variables(row))


def _tools(given: Any) -> tuple[Any, ...]:
    """A row's tools, a list or its JSON, as TRL and LLaMA-Factory have it."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError(f"a row's 'tools' must be a list of tools or its JSON, got {given!r:.80}") from None
    given = given or []
    if not (isinstance(given, list) and all(isinstance(tool, Mapping) for tool in given)):
        raise ValueError(f"a row's 'tools' must be a list of tools or its JSON, got {given!r:.80}")
    json_text("a row's 'tools'", given)
    return tuple(filled(given))


def variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's "chat_template_kwargs"."""
    given = row.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"a row's 'chat_template_kwargs' must be an object, got {given!r:.80}")
    return filled(given)


def _answer(said: Any) -> dict[str, Any]:
    """The assistant's message of a completion."""
    [said] = said if isinstance(said, list) and len(said) == 1 else [said]
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    if not (isinstance(message, Mapping) and message.get("role") == "assistant"):
        raise ValueError(
            f"a completion must be a text, or one message of the assistant, got {str(said)[:80]}; write other turns "
            "into 'messages'"
        )
    shallow("a completion", message)
    check([message := plain(filled(message))])
    return message


def shallow(what: str, value: Any) -> None:
    """Raises ValueError for a value with more than DEEPEST levels: templates and JSON are written by recursion."""
    level = [value]
    for _ in range(DEEPEST):
        inner = (x.values() if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list | tuple))
        level = [each for values in inner for each in values]
        if not level:
            return
    raise ValueError(f"{what} must be nested at most {DEEPEST} levels deep, got more; flatten it")


def filled(value: Any) -> Any:
    """A value without the entries of its objects that are None, at any depth."""
    if isinstance(value, Mapping):
        return {name: filled(each) for name, each in value.items() if each is not None}
    return [filled(each) for each in value] if isinstance(value, list) else value


def plain(message: Message) -> dict[str, Any]:
    """A message with parts of text joined, unless it has images; raises ValueError for what would be lost."""
    message, content = dict(message), message.get("content")
    if message.get("function_call"):
        raise ValueError(f"a message's 'function_call' is not read, got {str(message)[:80]}; give it in tool_calls")
    if not isinstance(content, str | list | None):
        raise ValueError(f"a message needs a role and a content, a text, got {str(message)[:80]}")
    if isinstance(content, list) and not images.within([message]):
        message["content"] = images.text(content)
    return message


def spoken(message: Message) -> dict[str, Any]:
    """A message as `plain`, its role as templates call it."""
    role = message.get("role")
    if not (isinstance(role, str) and role):
        raise ValueError(f"a message needs a role and a content, got {str(message)[:80]}")
    return {**plain(message), "role": ROLES.get(role, role)}


def reasoning(message: Message) -> str:
    """The reasoning of a message, by any of its names; "" = none."""
    return next((message[name] for name in REASONING if message.get(name)), "")


def learnt(message: Message) -> bool:
    """Whether a message may be learnt: OpenAI's "weight", 0 or 1, is not 0."""
    return message.get("weight") != 0


def check(messages: Sequence[Message]) -> None:
    """Raises ValueError unless each message has a role, and content or tool calls, of the types that OpenAI's API has
    and in Unicode, and nothing that would be lost."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"a message needs a role and a content, got {str(message)[:80]}")
        for name in LEARNT:
            if message.get(name) is not None:
                raise ValueError(
                    f"a message's {name!r} is not read, got {str(message)[:80]}; give it as 'weight', 0 or 1"
                )
        plain(message)  # refuses a function_call, and parts that are neither text nor images
        if not (isinstance(message.get("content"), str | list) or calls):
            raise ValueError(f"a message needs a role and a content, a text, got {str(message)[:80]}")
        if calls and not (isinstance(calls, list) and all(map(_called, calls))):
            raise ValueError(
                "tool_calls must be a list of calls {'function': {'name', 'arguments'}}, the arguments an object or "
                f"its JSON, got {calls!r:.120}"
            )
        for name in REASONING:
            if not isinstance(message.get(name) or "", str):
                raise ValueError(f"a message's reasoning must be a text, got {message[name]!r:.80}")
        if len({message[name] for name in REASONING if message.get(name)}) > 1:
            raise ValueError(
                f"a message has its reasoning in one of {', '.join(REASONING)}, or the same in several, got different "
                f"ones in {str(message)[:80]}; write them into one"
            )
        json_text("a message", {name: value for name, value in message.items() if name != "content"})
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"a message's weight must be 0 or 1, got {message['weight']!r:.80}; repeat rows instead")
    unicode(*texts(messages))


def _called(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        return False
    arguments = function.get("arguments")
    try:
        loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
        return isinstance(loaded, Mapping) and bool(json_text("arguments", loaded))
    except (ValueError, RecursionError):
        return False


def json_text(what: str, value: Any) -> str:
    """The JSON of a value; raises ValueError for what has none, such as a date, for which templates write "<date>"."""
    shallow(what, value)
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} must be JSON ({error}), got {value!r:.80}; write dates as texts, and what is missing as null"
        ) from None


def texts(messages: Sequence[Message]) -> list[str]:
    """The texts of messages that a chat template renders."""
    given = [message.get(field) for message in messages for field in ("role", "content", *REASONING)]
    called = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return [images.words(x) for x in given if x] + strings([[one["name"], one["arguments"]] for one in called])


def strings(value: Any) -> list[str]:
    """The texts in a value of JSON, and the names in its objects."""
    if isinstance(value, str):
        return [value]
    inner = (
        [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    )
    return [text for each in inner for text in strings(each)]


def unicode(*texts: str) -> None:
    """Raises ValueError if a text has half of a surrogate pair, which no tokenizer takes."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"texts must be Unicode, got the lone surrogate {text[error.start]!r} in {text[:80]!r}"
            ) from None


def tried(function: Callable[..., T], *arguments: Any) -> T | ValueError:
    """What the function returns, or the ValueError that it raises: of many rows, each has its own."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error
