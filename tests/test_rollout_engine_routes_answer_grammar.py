"""Grammars of answers: what they allow is what the parser of the family reads, with arguments that fit the schemas."""

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from areax.adapters import tokenizer
from areax.rollout.chat import parsers
from areax.rollout.chat.fields import Refused
from areax.rollout.engine.grammar import Grammars
from areax.rollout.engine.request import Grammar
from areax.rollout.engine.routes import answer_grammar

ADD = {
    "type": "object",
    "properties": {"a": {"type": "number", "minimum": 0, "maximum": 9}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FIND = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "enum": ["here", "there"]},
        "what": {"type": "string"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "odd": {"type": ["boolean", "null"]},
        "colour": {"$ref": "#/$defs/colour"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
        "count": {"allOf": [{"$ref": "#/$defs/count"}]},
        "three": {"const": 3},
    },
    "$defs": {
        "tag": {"enum": ["x", 1]},
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["where", "what"],
    "additionalProperties": False,
}
SCHEMAS = {"add": {"$ref": "#/$defs/add", "$defs": {"add": ADD}}, "find it": FIND}
DOCUMENT = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}


def tools(*names):
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMAS.get(name)}} for name in names]


def grammar(document=None, names=(), forced=(), tokens=(), **more):
    options = {"one_call": False, "style": "qwen", "chat_template": "", "reasoning": "", **more}
    held = document and Grammar("json_schema", json.dumps(document), "response_format")
    return answer_grammar.of(held, tools(*names), forced, tokens=dict(tokens), **options)


def spoken(held, seed, tokens=None, ends=0.3, style=""):
    """A random text of a grammar, token by token, which likes to end, and to end parameters that are plain text."""
    tokens = tokens or BYTES
    grammars = GRAMMARS if tokens is BYTES else Grammars(tokens, len(tokens))
    matcher, rng, made, planned = grammars.start(held), random.Random(seed), [], []
    said = parsers.decoder(tokens, style)
    likely = {id for text in '"}<\n' for id in tokens.encode(text, add_special_tokens=False)}
    while True:
        ids = np.flatnonzero(np.unpackbits(matcher.mask_M.view(np.uint8), bitorder="little")).tolist()
        assert ids and not matcher.problem, (matcher.problem, said(made))
        assert len(made) < 4000
        if not planned and rng.random() < 0.1:
            end = (
                "</parameter>"
                if style != "gpt_oss"
                else ""
                if "final" in said(made) or "to=" in said(made)
                else "<|end|>"
            )
            planned = tokens.encode(end, add_special_tokens=False)
        closing = [id for id in ids if id in likely or id == tokens.eos_token_id]
        token = rng.choice(closing if closing and rng.random() < ends else ids)
        planned = planned if planned and planned[0] in ids else []
        token = planned.pop(0) if planned else token
        if token == tokens.eos_token_id:
            return said(made)
        made.append(token)
        matcher.take(token)


def marked(words, markers):
    """A tokenizer, in which `words` are text or tokens, and the ids of these."""
    tokens = tokenizer.byte_level()
    if markers != "text":
        special = markers == "special tokens"
        tokens.add_tokens([AddedToken(word, normalized=False, special=special) for word in sorted({*words} - {""})])
    return tokens, {token.content: id for id, token in tokens.added_tokens_decoder.items() if token.content in words}


BYTES = tokenizer.byte_level()
GRAMMARS = Grammars(BYTES, len(BYTES))
CALLING = answer_grammar.FORCED
TEMPLATES = [("deepseek", "```json"), *((style, "") for style in CALLING)]


@pytest.mark.sweep
@pytest.mark.parametrize("style, template", TEMPLATES)
@pytest.mark.parametrize("markers", ["text", "tokens", "special tokens"])
def test_forced_calls_are_read_by_the_parser(style, template, markers):
    names = ("add", "find it" if style not in ("qwen3_coder", "seed_oss", "gpt_oss", "kimi_k2") else "find")
    SCHEMAS["find"] = FIND
    tokens, ids = marked(parsers.STYLES[style].markers, markers)
    count, single = set(), set()
    for one_call in (False, True):
        held = grammar(
            names=(*names, "other"), forced=names, style=style, chat_template=template, one_call=one_call,
            tokens=ids,
        )  # fmt: skip
        for seed in range(12):
            text = spoken(held, seed, tokens, style=style)
            answer = parsers.parse(text, style, tools=tools(*names), nonce="n")
            assert answer.content == "" and answer.tool_calls, text
            (single if one_call else count).add(len(answer.tool_calls))
            for call in answer.tool_calls:
                assert call.name in names
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert (max(count) > 1 or style == "gpt_oss") and single == {1}


def test_a_tool_without_parameters_takes_any_object():
    held = grammar(names=("other",), forced=("other",))
    answer = parsers.parse(spoken(held, 0, ends=0.9), "qwen")
    assert isinstance(json.loads(answer.tool_calls[0].arguments), dict)


@pytest.mark.parametrize("style", ["qwen", "gemma4", "magistral"])
@pytest.mark.parametrize("markers", ["text", "tokens", "special tokens"])
def test_reasoning_comes_before_a_document(markers, style):
    think, thought = parsers.STYLES[style].think
    tokens, ids = marked(parsers.STYLES[style].markers & {parsers.token(think), thought}, markers)
    for reasoning in ("may", "open", ""):
        held, begun = grammar(DOCUMENT, reasoning=reasoning, tokens=ids, style=style), set()
        matcher = Grammars(tokens, len(tokens)).start(held)
        allowed = lambda m: set(np.flatnonzero(np.unpackbits(m.mask_M.view(np.uint8), bitorder="little")).tolist())
        start = {tokens.decode([id]) for id in allowed(matcher)}
        opening = parsers.token(think) if ids else think[0]
        begun = {"may": {"{", opening}, "": {"{"}}.get(reasoning, start)
        assert start == begun and (reasoning != "open" or len(allowed(matcher)) > 150)
        text = {"may": think, "open": "", "": ""}[reasoning] + (f"a<b\n{thought}\n\n" if reasoning else "")
        text += '{"x": true}'
        for token in tokens.encode(text, add_special_tokens=False):
            assert token in allowed(matcher), (reasoning, text)
            matcher.take(token)
        assert allowed(matcher) == {tokens.eos_token_id}
        answer = parsers.parse(text, style, opened=reasoning == "open")
        assert json.loads(answer.content) == {"x": True} and answer.reasoning == ("a<b" if reasoning else "")


@pytest.mark.parametrize("markers", ["text", "tokens", "special tokens"])
def test_a_document_in_channels_is_in_the_final_one(markers):
    tokens, ids = marked(parsers.STYLES["gpt_oss"].markers, markers)
    held = grammar(DOCUMENT, style="gpt_oss", tokens=ids)
    texts = [spoken(held, seed, tokens, ends=0.9, style="gpt_oss") for seed in range(6)]
    for text in texts:
        answer = parsers.parse(text, "gpt_oss", tools=False)
        assert text.count("<|channel|>final<|message|>") == 1 and "x" in json.loads(answer.content)
    assert len({"<|channel|>analysis<|message|>" in text for text in texts}) == 2
    mixed = grammar(DOCUMENT, names=("add",), style="gpt_oss", tokens=ids)
    answers = [parsers.parse(spoken(mixed, seed, tokens, style="gpt_oss"), "gpt_oss") for seed in range(12)]
    assert len({bool(answer.tool_calls) for answer in answers}) == 2


def test_nothing_is_forced_in_an_unknown_format():
    with pytest.raises(Refused, match="the format of this model's answers is not known; name it with --style, plain"):
        grammar(DOCUMENT, style="unknown")
    assert grammar(style="unknown") is None


@pytest.mark.parametrize("style", sorted({*parsers.NAMES} - {*answer_grammar.FORCED, "plain"}))
def test_calls_of_other_formats_are_not_forced(style):
    with pytest.raises(Refused, match=f"tools: calls can be forced in the formats qwen, .*, got '{style}'"):
        grammar(names=("add",), forced=("add",), style=style)
    assert grammar(names=("add",), style=style) is None and grammar(DOCUMENT, style=style)


def test_a_document_or_calls():
    held = grammar(DOCUMENT, names=("add",))
    answers = [parsers.parse(spoken(held, seed), "qwen") for seed in range(20)]
    called = [answer for answer in answers if answer.tool_calls]
    assert 0 < len(called) < 20
    assert all(answer.content == "" if answer.tool_calls else "x" in json.loads(answer.content) for answer in answers)
    forced = grammar(DOCUMENT, names=("add",), forced=("add",))
    assert all(parsers.parse(spoken(forced, seed), "qwen").tool_calls for seed in range(9))
    assert grammar(names=("add",)) is None and grammar() is None and grammar(DOCUMENT).kind == "json_schema"


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"type": "string", "pattern": "a"}, "plain text"),
        ({"$ref": "#/$defs/gone"}, "need a type"),
        ({"$ref": "#/$defs/short"}, "plain text"),
        ({"anyOf": [{"allOf": [{"$ref": "#/$defs/short"}]}, {"type": "null"}]}, "plain text"),
        ({"type": "string", "maxLength": 3}, "plain text"),
    ],
)
def test_what_the_format_of_qwen3_coder_cannot_say_is_refused(schema, words):
    SCHEMAS["odd"] = {
        "type": "object",
        "properties": {"p": schema},
        "$defs": {"short": {"type": "string", "maxLength": 3}},
    }
    with pytest.raises(Refused, match=words):
        grammar(names=("odd",), forced=("odd",), style="qwen3_coder")
    SCHEMAS["odd"] = {"oneOf": [{"properties": {"p": {"type": "string"}}}, {"type": "object", "required": ["p"]}]}
    with pytest.raises(Refused, match="must be one object"):
        grammar(names=("odd",), forced=("odd",), style="qwen3_coder")
