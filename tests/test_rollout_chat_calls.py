"""Calls of every family: what its models write is read back, whole, streamed, cut and broken; templates are oracles."""

import json
import os.path
import random
from pathlib import Path

import pytest
import tool_calls
import trl
from tool_calls import BROKEN, LAST, TOOLS, WRITERS

from areax.adapters import tokenizer
from areax.rollout.chat import calls, conversation, parsers, template
from areax.rollout.chat.parsers import Parser, ToolCall, parse

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
GIVEN = [("find", {"query": "it's }", "limit": 2}), ("add", {"a": 1, "b": 2.5}), ("now", {})]


def named(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize("way", WRITERS)
def test_what_the_family_writes_is_read_whole_and_streamed(way):
    style, rng = WRITERS[way][0], random.Random(0)
    for case in tool_calls.cases(way, 80):
        answer = parse(case.text, style, tools=TOOLS, nonce="n")
        parser = Parser(style, tools=TOOLS, nonce="n")
        pieces = [piece for part in tool_calls.streamed(case.text, rng) for piece in parser.push(part)]
        assert parsers.collect(pieces + parser.finish()) == answer, case
        if case.kind not in BROKEN:
            assert named(answer) == case.calls, case
            assert (answer.reasoning, answer.content) == (case.reasoning, case.content), case
        for name, arguments in named(answer):
            assert name and isinstance(arguments, dict), case


@pytest.mark.parametrize("way", WRITERS)
def test_a_cut_answer_is_the_beginning_of_its_calls(way):
    style, write = WRITERS[way]
    given = GIVEN[:1] if way == "gpt_oss" else GIVEN
    for before in ("", "So.\n") if way not in tool_calls.ALONE and way != "gpt_oss" else ("",):
        text = before + write(given)
        for end in range(len(text)):
            answer = parse(text[:end], style, tools=TOOLS, cut=True)
            assert len(answer.content.removeprefix(before.strip()).strip()) < 3, (text[:end], answer)
            for call, (name, arguments) in zip(answer.tool_calls, given, strict=False):
                whole = json.dumps(arguments, sort_keys=way == "gemma4")
                assert call.name == name, text[:end]
                assert whole.startswith(call.arguments) if call.cut else call.arguments == whole, (text[:end], call)
            assert all(not call.cut for call in answer.tool_calls[:-1])
        assert named(parse(text, style, tools=TOOLS, cut=True)) == given


@pytest.mark.parametrize("way", sorted({*WRITERS} - {"gpt_oss"}))
def test_one_call_ends_an_answer_as_soon_as_it_is_complete(way):
    style, write = WRITERS[way]
    parser, pieces, read = Parser(style, tools=TOOLS, one_call=True), [], ""
    for character in write(GIVEN) + ("" if way in LAST else " More."):
        pieces += parser.push(character)
        read += "" if pieces else character
    assert named(parsers.collect(pieces + parser.finish())) == GIVEN[:1] and "add" not in read
    assert named(parse(write(GIVEN), style, tools=TOOLS, one_call=True)) == GIVEN[:1]


@pytest.mark.parametrize(
    "style, text",
    [
        ("glm4_moe", "<tool_call></tool_call>"),
        ("glm4_moe", "<tool_call>find it\n</tool_call>"),
        ("glm4_moe", "<tool_call>find\n<arg_key>query</arg_key>\n</tool_call>"),
        ("glm4_moe", '<tool_call>{"name": "find", "arguments": {}}</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{1}"
         "<|tool_call_end|><|tool_calls_section_end|>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">\n</minimax:tool_call>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">\noh\n</invoke>\n</minimax:tool_call>'),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜function_calls>'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]now"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{} and more"),
        ("gemma4", "<|tool_call>call:now{a}<tool_call|>"),
        ("gemma4", "<|tool_call>now{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{a:1 2}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[now(]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=x)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=" + "[" * 100_000 + "<|tool_call_end|>"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[add(a=1)"),
        ("olmo3", "<function_calls>add(a=1) oh</function_calls>"),
    ],
)  # fmt: skip
def test_a_malformed_call_stays_content(style, text):
    for around in ("", "So: ") if style != "pythonic" else ("",):
        answer = parse(around + text, style, tools=TOOLS)
        assert (answer.content, answer.tool_calls) == (around + text, ())


@pytest.mark.parametrize(
    "style, text",
    [
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'),
        ("lfm2", "<|tool_call_start|>[add(a=%s)]<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ],
)  # fmt: skip
def test_a_number_beyond_the_range_of_floats_is_the_nearest_float(style, text):
    """Forced calls are JSON by a grammar, which has no bound."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}]
    for number, value in (("306e56037518206758529", 1.7976931348623157e308), ("-1E+999", -1.7976931348623157e308)):
        [call] = parse(text % number, style, tools=tools).tool_calls
        assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    "style, before, fill, behind",
    [
        ("glm4_moe", "<tool_call>find\n<arg_key>", " ", "x</tool_call>"),
        ("gemma4", "<|tool_call>", " ", "x<tool_call|>"),
        ("pythonic", "[find(query='", ")", ""),
        ("lfm2", "<|tool_call_start|>[find(query='", "\\\\", ""),
        ("kimi_k2", tool_calls.kimi(GIVEN[:1])[:-60], "<", ""),
        ("gpt_oss", "", "<|start|>", ""),
        ("gpt_oss", "<|channel|>final<|message|>", "<|channel|>", ""),
    ],
)
def test_long_answers_that_are_no_calls(style, before, fill, behind):
    """In time that grows with the square of the length, each would take minutes."""
    assert parse(before + fill * (300_000 // len(fill)) + behind, style, tools=TOOLS).tool_calls == ()


@pytest.mark.parametrize(
    "style, text",
    [
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>oh"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>{"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>oh"),
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>oh"),
        ("gpt_oss", "<|channel|>commentary to=functions.<|message|>{"),
        ("qwen", '<tool_call>{"name": "", "arguments": {'),
    ],
)  # fmt: skip
def test_a_cut_call_has_a_name_and_begins_an_object(style, text):
    answer = parse(text, style, cut=True)
    assert answer.tool_calls == () and answer.content.endswith(text[-1])


def test_an_id_that_no_text_can_have_makes_no_call():
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "\\ud800"}]'
    assert parse(text, "mistral", tools=TOOLS) == parsers.Answer(text)


@pytest.mark.parametrize("way", ["glm45", "kimi_k2"])
def test_a_call_may_end_the_reasoning_of_families_that_mark_it_with_a_token(way):
    style, write = WRITERS[way]
    answer = parse(f"<think>Hm.\n{write(GIVEN)}", style, tools=TOOLS)
    assert (answer.reasoning, answer.content, named(answer)) == ("Hm.", "", GIVEN)
    assert parse(f"<think>Hm.\n{write(GIVEN)}", style, tools=()).reasoning == f"Hm.\n{write(GIVEN)}"


def test_ids_are_those_that_the_model_wrote():
    ids = lambda style, text: [call.id for call in parse(text, style, tools=TOOLS, nonce="n").tool_calls]
    assert ids("kimi_k2", tool_calls.kimi(GIVEN)) == ["functions.find:0", "functions.add:1", "functions.now:2"]
    assert ids("mistral", tool_calls.mistral_v7(GIVEN[:2])) == ["000000000", "000000001"]
    assert ids("mistral", tool_calls.mistral_v11(GIVEN[:1])) == ["000000000"]
    assert ids("mistral", tool_calls.mistral_v13(GIVEN[:1])) == ["call_n0"]
    twice = tool_calls.kimi(GIVEN).replace("functions.add:1", "functions.find:0")
    assert ids("kimi_k2", twice) == ["functions.find:0", "call_n1", "functions.now:2"]


@pytest.mark.parametrize(
    "text, value",
    [
        ("'it\\'s'", "it's"),
        ('"\\u00e9\\ud83d\\ude00\\x41\\101"', "é😀AA"), ("'a\nb'", "a\nb"), ("'\\d\\\\'", "\\d\\"),
        ("[1, -2.5e3, +.5, None, null, True, false, ('x', )]", [1, -2500.0, 0.5, None, None, True, False, ["x"]]),
        ("{b c: {d  e : []}}", {"b c": {"d  e": []}}),
        ('{\'a\': 1, "b": {c: <|"|>it\'s "c"<|"|>}, <|"|>d<|"|>: []}', {"a": 1, "b": {"c": 'it\'s "c"'}, "d": []}),
    ],
)  # fmt: skip
def test_values_are_read_as_python_json_and_gemma_write_them(text, value):
    assert calls.literals.value(text, 0) == (value, len(text))
    for end in range(len(text)):
        with pytest.raises(calls.literals.Unfinished):
            calls.literals.value(text[:end], 0)


@pytest.mark.parametrize("text", ["x", "[1 2]", "{[]: 2}", "{'a' 1}", "'\\ud83d'", "<|a", "1.2.3,", "NaN,"])
def test_what_is_no_value_is_refused(text):
    with pytest.raises(ValueError):
        calls.literals.value(text + " ", 0)


# -- templates --------------------------------------------------------------------------------------

REAL = {  # of TRL's copies: style, what is said with calls, what ends a turn
    "glm4moe": "glm4_moe", "gemma4": "gemma4", "gemma4_v2": "gemma4", "gemma4_v3": "gemma4", "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4", "lfm2_v2": "lfm2", "lfm2_2_5": "lfm2", "lfm2_2_5_v2": "lfm2", "lfm2_2_5_vl": "lfm2",
    "nemotron_3_nano": "qwen3_coder", "nemotron_3_super": "qwen3_coder", "nemotron_3_ultra": "qwen3_coder",
    "nemotron_3_5_lightning": "qwen3_coder", "qwen3_6": "qwen3_coder", "deepseekv3": "deepseek", "gptoss": "gpt_oss",
    "llama3_1": "llama", "qwen3": "qwen",
}  # fmt: skip
ASSISTANT = "{% if m.role == 'assistant' %}{{ m.content }}"
TURNS = (
    "{% for m in messages %}"
    + ASSISTANT
    + "%s{{ eos_token }}{% else %}<u>{{ m.role }}{{ m.tool_call_id }}{{ m.content }}{% endif %}{% endfor %}"
)
CALLS = "{% if m.tool_calls %}%s{% for c in m.tool_calls %}%s{% endfor %}%s{% endif %}"
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}%s{% endfor %}"
WRITTEN = {  # as the families' templates write calls
    "kimi_k2": (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>", "<|tool_calls_section_end|>",
    ),
    "mistral": (
        "", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}", "",
    ),
}  # fmt: skip


def tokens(chat_template, special=()):
    made = tokenizer.byte_level()
    made.add_special_tokens({"additional_special_tokens": sorted(special)})
    made.chat_template = chat_template
    return made


def spoken(made, messages, style):
    """What the template writes for the last message, as a parser reads the sampled tokens."""
    prompt = template.render(made, messages[:-1], TOOLS, {}, ask=True)
    whole = template.render(made, messages, TOOLS, {}, ask=False)
    at = len(os.path.commonprefix([prompt, whole]))
    within = whole.rfind("<", 0, at)
    at = within if within >= 0 and ">" not in whole[within:at] else at  # not behind a part of a marker
    return parsers.decoder(made, style)(made.encode(whole[at:], add_special_tokens=False))


@pytest.mark.parametrize("name", REAL)
def test_calls_are_read_back_from_the_familys_template(name):
    style, rng = REAL[name], random.Random(1)
    made = tokens((TEMPLATES / f"{name}.jinja").read_text(), parsers.STYLES[style].markers)
    assert parsers.style_for(made) == style
    for _ in range(12):
        given = [tool_calls.one(rng) for _ in range(1 if name in ("gptoss", "llama3_1") else 2)]
        if name.startswith("lfm2"):  # which do not escape what they quote
            given = [(n, {k: v for k, v in a.items() if k in ("limit", "exact", "ratio")}) for n, a in given]
        given = [(n, conversation.filled(a)) for n, a in given]  # as templates get them
        called = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(given)
        ]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": called}]
        text = spoken(made, messages, style)
        text = text[text.index("</think>") + 8 :] if "</think>" in text else text
        for end in (made.eos_token, "<|im_end|>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "<|eot_id|>"):
            text = text.strip().removesuffix(end or "")
        answer = parse(text, style, tools=TOOLS)
        assert (named(answer), answer.content) == (given, ""), text


@pytest.mark.parametrize("style", WRITTEN)
@pytest.mark.parametrize("ids", [("call_0123456789abcdef0", "call_0123456789abcdef1"), ("x", "y")])
def test_calls_get_ids_that_the_template_takes(style, ids):
    before, one, after = WRITTEN[style]
    made = tokens(TURNS.replace("%s", CALLS.replace("%s", before, 1).replace("%s", one, 1).replace("%s", after, 1)))
    called = [
        {"id": id, "type": "function", "function": {"name": n, "arguments": a}}
        for id, (n, a) in zip(ids, GIVEN[1:], strict=True)
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": called},
        *({"role": "tool", "tool_call_id": id, "content": "3"} for id in ids),
    ]
    text = template.render(made, messages, TOOLS, {}, ask=False)
    own = ["functions.add:0", "functions.now:1"] if style == "kimi_k2" else ["000000000", "000000001"]
    said, _, results = text.removeprefix("<u>user?").partition("<u>tool")
    answer = parse(said.removesuffix(made.eos_token), style, tools=TOOLS)
    assert named(answer) == GIVEN[1:] and results == f"{own[0]}3<u>tool{own[1]}3"
    again = [{**call, "id": id} for call, id in zip(called, own, strict=True)]
    kept = template.identified(made, [*messages[:1], {**messages[1], "tool_calls": again}])
    assert [call["id"] for call in kept[1]["tool_calls"]] == own
    template.check_calls(made, messages, TOOLS)


def test_a_call_is_a_tool_call_with_the_rest():
    assert parse(tool_calls.glm("")(GIVEN[2:]), "glm4_moe", nonce="n").tool_calls == (ToolCall("call_n0", "now", "{}"),)
