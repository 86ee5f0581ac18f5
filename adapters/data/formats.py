"""Converts records of common data set formats to rows: functions for `--row areax.adapters.data.formats:chat` etc.

A row has "prompt" (the user's message) or "messages", plus "completion" for demonstrations, "answer" for rewards, or
"chosen" and "rejected" for preferences. Other fields of the record are kept. Records of another format raise a
ValueError that names the fields found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ...rollout.chat import conversation

PAIRS = (
    ("question", "answer"), ("problem", "solution"), ("problem", "answer"), ("prompt", "completion"),
    ("query", "response"),
)  # fmt: skip
ASKED_WITH = "context", "passage", "choices", "options"  # fields that belong to a question
ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
TURN = re.compile(r"\n\n(Human|Assistant):")  # turn markers in HH-RLHF's transcripts


def auto(record: dict) -> dict:
    """A row in the format that the record's fields identify; raises ValueError if none or several match."""
    fields = {name for name, value in record.items() if value is not None}
    found = [name for name in SIGNS if _signed(name, fields)]
    if len(found) != 1:
        known = f"{' and '.join(found)} are possible" if found else f"known are {', '.join(SIGNS)}"
        raise _refusal(
            "auto", f"the fields of one format ({known}; name one as --row areax.adapters.data.formats:...)", record
        )
    return FORMATS[found[0]](record)


def recognised(record: dict) -> str | None:
    """The function for `--row` that reads a record, told by its fields; "" if it is a row, None if it is of no format.

    GSM8K and MATH are told by the ends of their answers, and read with the instruction that their rewards expect.
    """
    fields = {name for name, value in record.items() if value is not None}
    lists = {name for name in fields if isinstance(record[name], list)}
    if "prompt" in lists or (lists >= {"chosen", "rejected"} and not fields & {"prompt", "messages"}):
        return f"{__name__}:{'preference' if 'chosen' in fields else 'conversational'}"
    if fields & {"prompt", "messages"}:
        return ""
    if "rejected" in fields and TURN.match(str(record.get("chosen"))):
        return f"{__name__}:hh_rlhf"
    if "question" in fields and "####" in str(record.get("answer")):
        return "areax.rollout.tasks.gsm8k:row"
    if "problem" in fields and "\\boxed" in str(record.get("solution")):
        return "areax.rollout.tasks.competition_math:row"
    found = [name for name in ("prompt_answer", "instruction", "sharegpt") if _signed(name, fields)]
    return f"{__name__}:{found[0]}" if len(found) == 1 else None


def chat(record: dict) -> dict:
    """A row from {"messages": [{"role", "content"}, ...]}, validated."""
    return {**record, "messages": _messages(record, "messages", "chat")}


def prompt_answer(record: dict) -> dict:
    """A row from question/answer, problem/solution, problem/answer, prompt/completion or query/response.

    The second is used as both "completion" and "answer", unless the record has these fields. All fields are kept. A
    record with a context or choices is refused: they would not be in the prompt.
    """
    if asked := [name for name in ASKED_WITH if record.get(name) not in (None, "", [])]:
        raise ValueError(
            f"prompt_answer: {asked[0]!r} would not be in the prompt, got {str(record[asked[0]])[:80]!r}; write it "
            "into the prompt with a --row of your own"
        )
    found = [pair for pair in PAIRS if all(isinstance(record.get(name), str) for name in pair)]
    if len({question for question, _ in found}) != 1:
        pairs = ", ".join("/".join(pair) for pair in PAIRS)
        raise _refusal("prompt_answer", f"the texts of exactly one of {pairs}", record)
    question, answer = found[0]
    reply = record[answer]
    return {"completion": reply, "answer": reply, **record, "prompt": record[question]}


def conversational(record: dict) -> dict:
    """A row from conversations of TRL and verl: "prompt" as a list of messages, "completion", if any, as a list of
    one, whose text becomes the "completion", or all of it if it has more.

    The "ground_truth" of verl's "reward_model" is also the "answer", unless the record has one.
    """
    row = {**_without(record, "prompt"), "messages": _messages(record, "prompt", "conversational")}
    if isinstance(record.get("completion"), list):
        reply = _messages(record, "completion", "conversational")
        if [message["role"] for message in reply] != ["assistant"]:
            raise _refusal("conversational", "one assistant message as its 'completion'", record)
        row["completion"] = _said(reply[0])
    judged = record.get("reward_model")
    if isinstance(judged, dict) and judged.get("ground_truth") is not None:
        row.setdefault("answer", judged["ground_truth"])
    return row


def instruction(record: dict) -> dict:
    """A row from Alpaca's "instruction", "input" (which may be empty or missing) and "output", with LLaMA-Factory's
    "system" and "history", pairs of a question and its answer, if any."""
    parts = [record.get("instruction"), record.get("input") or "", record.get("output")]
    if not all(isinstance(part, str) for part in parts):
        raise _refusal("instruction", "strings 'instruction' and 'output', optionally 'input'", record)
    prompt = "\n\n".join(str(part) for part in parts[:2] if str(part).strip())
    system, history = record.get("system"), record.get("history") or []
    if not (all(isinstance(turn, list | tuple) and list(map(type, turn)) == [str, str] for turn in history)):
        raise _refusal("instruction", "'history' as a list of pairs of texts", record)
    row = {**_without(record, "instruction", "input", "output", "system", "history"), "completion": parts[2]}
    if not (system or history):
        return {**row, "prompt": prompt}
    messages = [{"role": "system", "content": system}] if system else []
    said = [text for turn in history for text in turn] + [prompt]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return {**row, "messages": messages}


def sharegpt(record: dict) -> dict:
    """A row from {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, optional "system"."""
    turns, system = record.get("conversations"), record.get("system")
    valid = lambda turn: isinstance(turn, dict) and turn.get("from") in ROLES and isinstance(turn.get("value"), str)
    if not (isinstance(turns, list) and turns and all(map(valid, turns))):
        odd = [t for t in turns if not valid(t)] if isinstance(turns, list) else []
        wanted = f"'conversations' with strings 'value' and 'from' one of {', '.join(ROLES)}"
        raise _refusal("sharegpt", wanted + (f" (found {str(odd[0])[:60]})" if odd else ""), record)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {**_without(turn, "from", "value"), "role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns
    ]
    return {**_without(record, "conversations", "system"), "messages": messages}


def preference(record: dict) -> dict:
    """A row from "chosen" and "rejected": completions of "prompt", or lists of messages.

    For lists, the messages that both start with are appended to the prompt, unless they repeat it; the rest of each
    must be a single assistant message, whose text becomes "chosen" or "rejected", or all of it if it has more.
    """
    prompt, sides = record.get("prompt"), [record.get("chosen"), record.get("rejected")]
    given = _messages(record, "prompt", "preference") if isinstance(prompt, list) and prompt else []
    if all(isinstance(side, str) for side in sides):
        if isinstance(prompt, str):
            return _without(record, "messages")
        messages = given or _messages(record, "messages", "preference (HH-RLHF's transcripts: hh_rlhf)")
        return {**_without(record, "prompt"), "messages": messages}
    given = given or ([{"role": "user", "content": prompt}] if prompt else [])
    made = _pair(_messages(record, "chosen", "preference"), _messages(record, "rejected", "preference"), given)
    if made is None:
        raise _refusal("preference", "'chosen' and 'rejected' that differ only in the assistant's last message", record)
    return {**_without(record, "prompt"), **made}


def hh_rlhf(record: dict) -> dict | None:
    """A row from HH-RLHF (arXiv:2204.05862), whose "chosen" and "rejected" are transcripts "\\n\\nHuman: ...".

    The turns that both start with become its messages. Returns None, which drops the record, for the few transcripts
    that are equal or diverge before the last turn.
    """
    sides = [record.get(name) for name in ("chosen", "rejected")]
    parts = [TURN.split(side) if isinstance(side, str) else [] for side in sides]
    if not all(len(part) > 1 and not part[0].strip() for part in parts):
        raise _refusal("hh_rlhf", "'chosen' and 'rejected' as strings that start with '\\n\\nHuman:'", record)
    role = {"Human": "user", "Assistant": "assistant"}
    chosen, rejected = (
        [{"role": role[who], "content": text.strip()} for who, text in zip(part[1::2], part[2::2], strict=True)]
        for part in parts
    )
    made = _pair(chosen, rejected, [])
    return made and {**record, **made}


FORMATS: dict[str, Callable[[dict], dict]] = {
    f.__name__: f for f in (chat, prompt_answer, instruction, sharegpt, preference)
}
SIGNS: dict[str, Sequence[Sequence[str]]] = {  # any of these sets of fields identifies a format
    "chat": [["messages"]],
    "prompt_answer": PAIRS,
    "instruction": [["instruction", "output"]],
    "sharegpt": [["conversations"]],
    "preference": [["chosen", "rejected"]],
}


def _signed(name: str, fields: set[str]) -> bool:
    return any(fields.issuperset(names) for names in SIGNS[name])


def _pair(chosen: list[dict], rejected: list[dict], given: list[dict]) -> dict | None:
    """{"messages", "chosen", "rejected"}; None unless each has exactly one assistant message after their prefix."""
    count = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(chosen))
    shared, last = chosen[:count], [chosen[count:], rejected[count:]]
    messages = shared if all(message in shared for message in given) else given + shared
    if not messages or any([m["role"] for m in side] != ["assistant"] for side in last):
        return None
    return {
        "messages": messages,
        "chosen": _said(last[0][0]),
        "rejected": _said(last[1][0]),
    }


def _said(message: dict) -> str | dict:
    """A message's text, or the message if it has more: calls, reasoning."""
    plain = conversation.plain(message)
    return plain["content"] if plain.keys() == {"role", "content"} and isinstance(plain["content"], str) else plain


def _messages(record: dict, name: str, who: str) -> list[dict]:
    """The messages in a field, without the None entries that Parquet files contain; contents are texts or parts, or
    missing beside calls."""
    messages = record.get(name)
    known = lambda m: (
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and (isinstance(m.get("content"), str | list) or bool(m.get("tool_calls")))
    )
    if not (isinstance(messages, list) and messages and all(map(known, messages))):
        raise _refusal(who, f"{name!r} as a list of messages with strings 'role' and 'content'", record)
    return conversation.filled(messages)


def _without(record: dict, *names: str) -> dict:
    return {name: value for name, value in record.items() if name not in names}


def _refusal(who: str, wanted: str, record: dict) -> ValueError:
    return ValueError(f"{who}: a record needs {wanted}, got the fields {sorted(record)}")
