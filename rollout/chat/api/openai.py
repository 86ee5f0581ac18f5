"""What the bodies of OpenAI's `/v1/completions` and `/v1/chat/completions` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import fields
from ..fields import Refusal, Refused, rule
from . import image_parts

PASSED = (  # fields that cannot change an answer
    "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "cache_salt", "session_id", "priority",
)  # fmt: skip
REFUSED: fields.Table = {
    "frequency_penalty": Refusal("penalties are not implemented by this server", (0,)),
    "presence_penalty": Refusal("penalties are not implemented by this server", (0,)),
    "logit_bias": Refusal("biases are not implemented by this server", ({},)),
    "repetition_penalty": Refusal("penalties are not implemented by this server", (1,)),
    "ignore_eos": Refusal("the model's end tokens end every answer", (False,)),
    "skip_special_tokens": Refusal("special tokens are never part of the text", (True,)),
    "prompt_logprobs": Refusal("ask /v1/completions for them, with echo and logprobs", (0,)),
}
COMPLETION_TOKENS = 16  # default max_tokens of a completion
CHAT_BUDGET = ("max_completion_tokens", "max_tokens")  # in order of precedence
STREAM_OPTIONS = fields.table(["include_usage"], ["include_obfuscation"])
MESSAGE = fields.table(
    ["role", "content", "name"],
    ["annotations", "id"],
    {
        name: Refusal(but=values)
        for name, values in (("refusal", ("",)), ("function_call", ()), ("audio", ()), ("tool_calls", ([],)))
    },
)
FIELDS_OF = {"assistant": ["tool_calls", "reasoning_content", "reasoning"], "tool": ["tool_call_id"]}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def include_usage(body: Mapping[str, Any]) -> bool:
    """Whether a streamed answer ends with token counts."""
    options = fields.mapping(body, "stream_options")
    fields.known(options, STREAM_OPTIONS)
    return fields.boolean(options, "include_usage")


def prompts(body: Mapping[str, Any], tokenizer: Any, vocabulary: int | None = None) -> list[list[int]]:
    """Token ids of each prompt of a completion; the field is a text or a list of ids, or a list of either.

    Args:
      vocabulary: number of token ids; None = checked by the caller.
    """
    given: Any = body.get("prompt")
    if isinstance(given, str):
        return [encode(tokenizer, given, "prompt")]
    rule(isinstance(given, list) and given != [], "prompt", "must be text, token ids, or a list of either", given)
    several = isinstance(given[0], list | str)
    rule(not several or len(given) <= fields.MOST_PROMPTS, "prompt", f"at most {fields.MOST_PROMPTS}", len(given))
    if all(isinstance(one, str) for one in given):
        return [encode(tokenizer, one, "prompt") for one in given]
    lists = given if isinstance(given[0], list) else [given]
    short = all(not isinstance(one, list) or len(one) <= fields.LONGEST_PROMPT for one in lists)
    rule(short, "prompt", f"must have at most {fields.LONGEST_PROMPT} tokens", given)
    in_range = lambda id: type(id) is int and 0 <= id and (vocabulary is None or id < vocabulary)
    right = lambda prompt: isinstance(prompt, list) and prompt != [] and all(map(in_range, prompt))
    most = "on" if vocabulary is None else f"to {vocabulary - 1}"
    rule(all(map(right, lists)), "prompt", f"token ids must be numbers from 0 {most}", given)
    return lists


def encode(tokenizer: Any, text: str, name: str) -> list[int]:
    """Encodes the field `name`, a text to continue, with the special tokens that the tokenizer adds."""
    if tokenizer is None:
        raise Refused(name, "this server has no tokenizer; send token ids, or serve a model folder with a tokenizer")
    rule(len(text) <= fields.LONGEST_TEXT, name, f"must have at most {fields.LONGEST_TEXT} characters", len(text))
    ids = tokenizer.encode(text)
    lost = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids
    rule(not lost, name, "must have characters that the tokenizer has tokens for", text)
    rule(ids, name, "must have at least one token", text)
    return ids


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation in the form that chat templates expect."""
    found = [_message(one) for one in fields.objects(body.get("messages"), "messages")]
    rule(found, "messages", "must not be empty", found)
    return found


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    role = str(given.get("role"))
    rule(role in ROLES, "messages", f"a role must be one of {', '.join(ROLES)}", role)
    fields.known(given, {**MESSAGE, **fields.table(FIELDS_OF.get(role, []))})
    right = given.get("content") is not None or role in ("assistant", "tool")
    rule(right, "messages", f"a message of the {role} needs a content", given)
    read = image_parts.content if role in ("user", "tool") else fields.text
    message: dict[str, Any] = {
        "role": ROLES[role],
        "content": read(given.get("content"), "messages", ("text", "refusal")),
    }
    if given.get("name") is not None:
        rule(isinstance(given["name"], str), "messages", "a name must be text", given["name"])
        message["name"] = given["name"]
    if role == "tool":
        rule(isinstance(given.get("tool_call_id"), str), "messages", "a result needs a tool_call_id", given)
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant":
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            rule(isinstance(reasoning, str), "messages", "reasoning must be text", reasoning)
            message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_call(one) for one in fields.objects(calls, "messages")]
    return message


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    rule((given.get("type") or "function") == "function", "messages", "a call must be of a function", given.get("type"))
    function = fields.mapping(given, "function")
    return fields.call(given.get("id"), function.get("name"), function.get("arguments"), "messages")
