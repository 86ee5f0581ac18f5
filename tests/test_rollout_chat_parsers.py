"""Parsers of generated text: all styles of calls, malformed calls stay content, and chunking does not matter."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.chat import parsers
from areax.rollout.chat.parsers import Answer, Parser, Text, ToolCall, parse

BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"


def hermes(content, calls):
    blocks = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    return "\n".join([content, *blocks] if content else blocks)


def llama(content, calls):
    blocks = ";".join(f'{{"name": {json.dumps(n)}, "parameters": {json.dumps(a)}}}' for n, a in calls)
    return f"{content}<|python_tag|>{blocks}" if content and calls else content + blocks


def deepseek_v3(content, calls):
    blocks = [f"{BEGIN}function{SEP}{n}\n```json\n{json.dumps(a)}\n```{END}" for n, a in calls]
    return content + ("<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v31(content, calls):
    blocks = [f"{BEGIN}{n}{SEP}{json.dumps(a)}{END}" for n, a in calls]
    return content + ("<｜tool▁calls▁begin｜>" + "".join(blocks) + "<｜tool▁calls▁end｜>" if calls else "")


def coder(content, calls):
    shown = lambda value: value if isinstance(value, str) else json.dumps(value)
    blocks = [
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{shown(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


RENDERED = [
    ("qwen", hermes),
    ("hermes", hermes),
    ("llama", llama),
    ("deepseek", deepseek_v3),
    ("deepseek", deepseek_v31),
]
PIECES = [  # pieces of random texts: complete and broken markers, good and bad calls, and text around them
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">", "{", "}", '"', "\n", "  ",
    "a", "é😀", "<|python_tag|>", "<|python", ";", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, SEP, END,
    "<｜", '{"name": "f", "arguments": {"x": [1, null]}}', '{"name": "f", "parameters": {}}', "f", "function",
    "\n```json\n{}\n```", '{"name": "f", "arguments": 3}', '{"name": "f", "arguments": {"x": NaN}}', '"\\ud800"',
]  # fmt: skip
CHANNELS = [  # complete and broken headers, and ends of messages
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>", "<|return|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>", " to=functions.f", "<|message|>",
    "<|channel|>commentary json<|message|>", "<|channel>thought\n", "<channel|>", "<|", "{}",
    '{"x": [1, null]}', "<|channel|>", "analysis", "to=5",
]  # fmt: skip
THINKING = [style for style in parsers.STYLES if not parsers.STYLES[style].apart]
plain = st.text(st.characters(blacklist_characters="<｜{", blacklist_categories=["Cs"]), max_size=20).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(plain, values)), max_size=3)


def names(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def joined(pieces):
    """The pieces in order, with adjacent ones of the same kind merged."""
    for kind, group in itertools.groupby(pieces, lambda piece: getattr(piece, "kind", "")):
        same = list(group)
        yield from [Text(kind, "".join(piece.text for piece in same))] if kind else same


@pytest.mark.sweep
@pytest.mark.parametrize("style, render", RENDERED)
@given(content=plain, calls=calls, reasoning=plain, opened=st.booleans())
def test_reasoning_content_and_calls_round_trip_in_every_style(style, render, content, calls, reasoning, opened):
    thought = ("" if opened else "<think>\n") + f"{reasoning}\n</think>\n\n" if reasoning or opened else ""
    answer = parse(thought + render(content, calls), style, opened=opened)
    assert (answer.reasoning, answer.content, names(answer)) == (reasoning, content, calls)
    assert len({call.id for call in answer.tool_calls}) == len(calls)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "style, soups", [(style, PIECES if style in THINKING else CHANNELS + PIECES[::3]) for style in parsers.STYLES]
)
@given(
    data=st.data(),
    cuts=st.sets(st.integers(0, 300)),
    tools=st.booleans(),
    reasoning=st.booleans(),
    opened=st.booleans(),
)
def test_chunking_does_not_matter(style, soups, data, cuts, tools, reasoning, opened):
    soup = data.draw(st.lists(st.sampled_from(soups), max_size=14).map("".join))
    options = {"tools": tools, "reasoning": reasoning, "opened": opened, "nonce": "n"}
    parser = Parser(style, **options)
    edges = sorted({0, len(soup), *(cut for cut in cuts if cut < len(soup))})
    pieces = [piece for a, b in itertools.pairwise(edges) for piece in parser.push(soup[a:b])]
    pieces += parser.finish()
    whole = Parser(style, **options)
    assert list(joined(pieces)) == list(joined(whole.push(soup) + whole.finish()))
    assert parsers.collect(pieces) == parse(soup, style, **options)
    if not tools and not reasoning and style in THINKING:
        assert parsers.collect(pieces) == Answer(soup)


@pytest.mark.parametrize("style", THINKING)
def test_text_is_released_as_soon_as_its_kind_is_certain(style):
    parser = Parser(style)
    assert parser.push("<thi") == []
    assert parser.push("nk>hm") == [Text("reasoning", "hm")]
    assert parser.push(" m</thin") == [Text("reasoning", " m")]
    assert parser.push("k>\n\nHel") == [Text("content", "Hel")]
    if parsers.STYLES[style].open.startswith("<"):
        assert parser.push("lo <") == [Text("content", "lo")]  # whitespace and < may belong to a call
        assert parser.push("b> ") == [Text("content", " <b>")]
    else:
        assert parser.push("lo <b> ") == [Text("content", "lo <b>")]
    assert parser.finish() == [Text("content", " ")]


@pytest.mark.parametrize(
    "style, text",
    [
        ("qwen", "<tool_call>{}</tool_call>"),
        ("qwen", '<tool_call>{"name": "f"}</tool_call>'),
        ("qwen", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"x": Infinity}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("qwen", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
        ("qwen", '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {}}'),  # truncated
        ("qwen", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("llama", '{"answer": 42}'),
        ("llama", '{"name": "f", "parameters": {}} {"name": "f", "parameters": {}}'),
        ("llama", '{"name": "f", "parameters": {}'),
        ("llama", "<|python_tag|>print(1)"),
        ("llama", '<|python_tag|>brave_search.call(query="x")'),
        ("llama", "<|python_tag|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}f{SEP}{{}}<｜tool▁calls▁end｜>"),
        ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}f{{}}{END}<｜tool▁calls▁end｜>"),
        ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}f{SEP}{{}}{END}{BEGIN}f{SEP}{{{END}<｜tool▁calls▁end｜>"),
        ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}f{SEP}{{}}{END}"),
    ],
)
def test_a_malformed_call_stays_content(style, text):
    for around in ("", "So: "):
        assert parse(around + text, style) == Answer(around + text)


def test_calls_between_text():
    call = '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>'
    answer = parse(f"One.\n{call}\n{call}\nTwo.\n{call}\n", "hermes", nonce="7")
    assert answer.content == "One.\nTwo."
    assert answer.tool_calls == tuple(ToolCall(f"call_7{i}", "f", "{}") for i in range(3))
    assert parse(f"<tool_call>oh{call}", "qwen").content == f"<tool_call>oh{call}"  # closed by the first end
    assert names(parse(f"<tool_call>oh</tool_call>{call}", "qwen")) == [("f", {})]


def test_reasoning_is_not_parsed_for_tools():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(f"<think>{call}</think>", "qwen") == Answer("", call)
    assert parse(call, "qwen", opened=True) == Answer("", call)  # truncated while reasoning
    assert parse(f"<think>{call}", "qwen", reasoning=False, tools=False).content == f"<think>{call}"
    assert parse("a <think>b</think>", "qwen") == Answer("a <think>b</think>")  # only at the start


def test_a_style_must_be_known():
    with pytest.raises(ValueError, match="style: must be one of qwen, .*, plain, got 'gpt'"):
        Parser("gpt")


TYPES = {
    "text": {"type": "string"}, "maybe": {"type": ["string", "null"]}, "count": {"type": "integer"},
    "share": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "sure": {"type": "boolean"},
    "list": {"type": "array"}, "map": {"type": "object"}, "mode": {"enum": ["1", "2"]}, "size": {"enum": [1, 2]},
    "named": {"$ref": "#/$defs/count"}, "both": {"allOf": [{"$ref": "#/$defs/count"}, {"minimum": 0}]},
    "one": {"const": 1}, "either": {"oneOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "word": {"const": "1"},
}  # fmt: skip
PARAMETERS = {
    "$ref": "#/$defs/f",
    "$defs": {"f": {"type": "object", "properties": TYPES}, "count": {"type": "integer"}},
}
TYPED = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "3", "maybe": "x", "count": 3, "share": 0.5, "sure": True, "list": [1, "a"], "map": {"a": None}},
        {"text": "a\nb <b>\n", "maybe": None, "share": None, "mode": "1", "size": 2, "unknown": "7"},
        {"named": 3, "both": 4, "one": 1, "either": None, "word": "1"},
        {
            "text": "null",
            "count": "three",
            "list": "5",
            "sure": "0",
            "either": "x",
            "size": "1.5",
        },  # what is not of its type stays text, for the tool to refuse
        {},
    ],
)
def test_values_of_qwen3_coder_have_the_types_of_the_schema(arguments):
    text = coder("Now.", [("f", arguments), ("f", {})])
    answer = parse(text, "qwen3_coder", tools=TYPED)
    assert names(answer) == [("f", arguments), ("f", {})] and answer.content == "Now."
    parser = Parser("qwen3_coder", tools=TYPED)
    pieces = [piece for letter in text for piece in parser.push(letter)] + parser.finish()
    assert names(parsers.collect(pieces)) == names(answer)


@pytest.mark.parametrize(
    "inner",
    ["<function=f>", "<function=>\n</function>", "<function=f>\nx\n</function>", '{"name": "f", "arguments": {}}',
     "<function=f>\n<parameter=a>\n1\n</function>"],
)  # fmt: skip
def test_malformed_calls_of_qwen3_coder_stay_content(inner):
    text = f"<tool_call>\n{inner}\n</tool_call>"
    assert parse(text, "qwen3_coder") == Answer(text)


def test_values_of_qwen3_coder_in_one_line():
    text = (
        "<tool_call><function=f><parameter=count>3</parameter><parameter=sure>False</parameter></function></tool_call>"
    )
    assert names(parse(text, "qwen3_coder", tools=TYPED)) == [("f", {"count": 3, "sure": False})]


# -- calls that are cut, and a single one -----------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"b": {"type": "number"}}}}}
    for name in ("add", "look")
]
GIVEN = [("add", {"a": "x; y", "b": 2.5}), ("look", {"a": "</p>"})]
WRITTEN = [*RENDERED, ("qwen3_coder", coder)]


@pytest.mark.parametrize("style, render", WRITTEN)
@pytest.mark.parametrize("content", ["", "So."])
def test_a_cut_call_is_the_beginning_of_a_call(style, render, content):
    text = render(content, GIVEN)
    for end in range(len(text)):
        answer = parse(text[:end], style, tools=TOOLS, cut=True)
        begun = [word for word in ("<to", "</t", "<|p", "<｜t", "{", "add", "look") if word in answer.content]
        assert not begun and answer.content.rstrip("<｜|t\n") in content, (text[:end], answer)
        for call, (name, arguments) in zip(answer.tool_calls, GIVEN, strict=False):
            whole = json.dumps(arguments)
            assert call.name == name and (whole.startswith(call.arguments) if call.cut else call.arguments == whole)
        assert all(not call.cut for call in answer.tool_calls[:-1])
        assert [piece for piece in answer.pieces if isinstance(piece, ToolCall)] == [*answer.tool_calls]
    assert len(answer.tool_calls) == 2  # all but a character


@pytest.mark.parametrize("style", parsers.STYLES)
@pytest.mark.parametrize("text", ["a < b", "a <t", "<table", '{"title": "x', "[1, {", "<tool_call>s are fine"])
def test_what_is_cut_and_no_call_stays_content(style, text):
    assert parse(text, style, tools=TOOLS, cut=True) == Answer(text)


@pytest.mark.parametrize("text", ["<thi", "  <think", "<think>", "<think>\n"])
def test_a_cut_marker_of_reasoning_is_no_content(text):
    assert parse(text, "qwen", cut=True) == Answer("")
    assert parse("<think>Hm.</thin", "qwen", cut=True) == Answer("", reasoning="Hm.")


@pytest.mark.parametrize("style, render", WRITTEN)
@pytest.mark.parametrize("content", ["", "So."])
def test_one_call_ends_the_text_as_soon_as_it_is_complete(style, render, content):
    text = render(content, GIVEN) + (" More." if style != "llama" else "")
    parser, pieces, read = Parser(style, tools=TOOLS, one_call=True), [], ""
    for character in text:
        pieces += parser.push(character)
        read += "" if any(isinstance(piece, ToolCall) for piece in pieces) else character
    answer = parsers.collect(pieces + parser.finish())
    assert (answer.content, names(answer)) == (content, GIVEN[:1])
    assert render(content, GIVEN[:1]).startswith(read) and "look" not in read
    assert answer == parse(text, style, tools=TOOLS, one_call=True) or answer.tool_calls[0].name == "add"


def test_one_call_may_be_none_or_malformed():
    for text in ("Hello.", "<tool_call>\n{}\n</tool_call> and more"):
        assert parse(text, "qwen", one_call=True) == parse(text, "qwen") == Answer(text)
