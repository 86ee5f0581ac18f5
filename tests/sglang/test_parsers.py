"""Calls, reasoning and text as SGLang's own parsers read them and as ours do, on the same answers of every family."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tool_calls
from tool_calls import BROKEN, TOOLS, WRITERS

from areax.rollout.chat.parsers import parse

PYTHON = os.environ.get("AREAX_SGLANG_PYTHON")

SCRIPT = Path(__file__).parents[1] / "sglang_cpu" / "parse.py"
PARSERS = {  # SGLang's --tool-call-parser and --reasoning-parser; it has none for Olmo 3 and Seed-OSS
    "gpt_oss": ("gpt-oss", "gpt-oss"),
    "glm45": ("glm45", "glm45"),
    "glm47": ("glm47", "glm45"),
    "deepseek_v31": ("deepseekv31", "deepseek-v3"),
    "deepseek_v32": ("deepseekv32", "deepseek-v3"),
    "deepseek_v4": ("deepseekv4", "deepseek-v4"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "minimax_m2": ("minimax-m2", "minimax"),
    "mistral_v7": ("mistral", "qwen3"),
    "mistral_v11": ("mistral", "qwen3"),
    "mistral_v13": ("mistral", "mistral"),
    "gemma4": ("gemma4", "gemma4"),
    "nemotron3": ("qwen3_coder", "nemotron_3"),
    "lfm2": ("lfm2", "qwen3"),
    "pythonic": ("pythonic", "qwen3"),
    "llama": ("llama3", "qwen3"),
    "qwen": ("qwen25", "qwen3"),
}
UNREAD = {  # answers in which SGLang finds no call
    "gpt_oss": lambda case: case.text.startswith("<|channel|>commentary"),  # no message before the call
    "mistral_v11": lambda case: True,  # [CALL_ID]
    "pythonic": lambda case: case.reasoning,
    "llama": lambda case: case.reasoning,  # of neither it finds calls behind a line break
}


def words(value):
    """Null and true as texts, as SGLang has some."""
    if isinstance(value, dict | list):
        return {key: words(value[key]) for key in value} if isinstance(value, dict) else [words(x) for x in value]
    alike = value is True or value is None or (isinstance(value, str) and value.lower() in ("none", "true"))
    return str(value).lower().replace("none", "null") if alike else value


def stripped(value):
    return {key: each.strip() if isinstance(each, str) else each for key, each in value.items()}


def without_notes(value):
    return {key: words(each) for key, each in stripped(value).items() if key != "note"}


ALIKE = {  # what SGLang does not tell apart
    "glm45": words,  # null is "None", and the text true "True", where a text is allowed
    "gemma4": words,  # null is "null"
    "minimax_m2": without_notes,  # any text is null where null is allowed; line breaks around texts are dropped
    "nemotron3": words,  # the text null is null, or "None"
    "deepseek_v32": stripped,  # texts lose white space around them
    "deepseek_v4": stripped,
}


@pytest.fixture(scope="module")
def answers():
    """For each way to write calls, the answers and what SGLang reads of them."""
    cases = {way: tool_calls.cases(way) for way in PARSERS}
    asked = [
        [calls, thoughts if way == "gpt_oss" or case.text.startswith(begun) else "", case.text, False]
        for way, (calls, thoughts) in PARSERS.items()
        for begun in [tool_calls.THINK.get(way, ("<think>",))[0]]
        for case in cases[way]
    ]
    request = json.dumps({"tools": TOOLS, "answers": asked})
    ran = subprocess.run([PYTHON, SCRIPT], input=request, capture_output=True, text=True, check=True)
    read = iter(json.loads(ran.stdout.splitlines()[-1]))
    return {way: [(case, next(read)) for case in cases[way]] for way in PARSERS}


@pytest.mark.parametrize("way", PARSERS)
def test_well_formed_answers_are_read_as_by_sglang(way, answers):
    alike, unread, compared = ALIKE.get(way, lambda value: value), UNREAD.get(way, lambda case: False), 0
    for case, theirs in answers[way]:
        if case.kind in BROKEN or (case.calls and unread(case)):
            continue
        if way == "pythonic" and case.calls and not (theirs and theirs[2]):  # its pattern misses many, or takes long
            continue
        answer = parse(case.text, WRITERS[way][0], tools=TOOLS)
        reasoning, content, found = theirs
        ours = [(call.name, alike(json.loads(call.arguments))) for call in answer.tool_calls]
        same = [(name, alike(json.loads(arguments))) for name, arguments in found]
        assert ours == same or (way == "pythonic" and all(call in ours for call in same)), case
        assert answer.reasoning.strip() == reasoning.strip(), case
        if way != "llama":  # where JSON at the beginning of a text, which is no call, is dropped
            assert answer.content.split()[: len(content.split())] == content.split(), case  # and ends before calls
        compared += 1
    assert compared > (30 if way in UNREAD else 150)


@pytest.mark.parametrize("way", PARSERS)
def test_calls_of_broken_answers_are_calls_of_sglangs(way, answers):
    """What SGLang reads of a malformed call may be no JSON, or other arguments; our calls have the names of its."""
    for case, theirs in answers[way]:
        if case.kind in BROKEN and theirs and theirs[2] and not UNREAD.get(way, lambda case: False)(case):
            found = parse(case.text, WRITERS[way][0], tools=TOOLS).tool_calls
            assert {call.name for call in found} <= {name for name, _ in theirs[2]}, case
