"""Tools: schemas from type hints, calls with any text a model may write, the calculator compared with Python."""

import asyncio
import contextlib
import functools
import json
import math
import threading
import time
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.errors import ServerError
from areax.rollout.sandbox import Result
from areax.rollout.workflows import tools
from areax.rollout.workflows.tools import Tool, calculator, hinted, schema, tool


def call(arguments, *functions, name=None, **options):
    made = [one if isinstance(one, Tool) else tool(one) for one in functions]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return asyncio.run(tools.call(made, made[0].name if name is None else name, text, **options))


def lookup(
    word: str, language: Literal["en", "de"] = "en", most: int | None = None, *, tags: list[dict[str, float]] = ()
):
    """Looks a word up.

    In a dictionary.

    Args:
      word: what to look up,
        on two lines.
      most: of the meanings.

    Returns:
      The meanings.
    """
    return {"word": word, "language": language, "most": most, "tags": list(tags)}


def test_a_schema_is_derived_from_hints_and_docstring():
    assert schema(tool(lookup)) == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a word up.\nIn a dictionary.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "what to look up, on two lines."},
                    "language": {"enum": ["en", "de"]},
                    "most": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "of the meanings."},
                    "tags": {
                        "type": "array",
                        "items": {"type": "object", "additionalProperties": {"type": "number"}},
                    },
                },
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }


def test_type_hints_may_be_missing():
    def untyped(a, b=1): ...

    made = tool(untyped)
    assert made.description == "" and made.parameters["properties"] == {"a": {}, "b": {}}
    assert made.parameters["required"] == ["a"]


HINTS = st.recursive(
    st.sampled_from(
        [
            (str, st.text()),
            (int, st.integers()),
            (float, st.floats(allow_nan=False, allow_infinity=False) | st.integers()),
            (bool, st.booleans()),
            (type(None), st.none()),
            (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
            (Any, st.none() | st.text() | st.lists(st.integers())),
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda one: (list[one[0]], st.lists(one[1], max_size=3))),
        inner.map(lambda one: (dict[str, one[0]], st.dictionaries(st.text(), one[1], max_size=3))),
        inner.map(lambda one: (one[0] | str, st.text() | one[1])),
    ),
    max_leaves=4,
)


@given(st.data())
def test_values_of_the_hinted_type_are_valid_and_passed_unchanged(data):
    hint, values = data.draw(HINTS)
    value = data.draw(values)

    def echo(value):
        return json.dumps([value])

    echo.__annotations__["value"] = hint
    assert json.loads(call({"value": value}, echo)) == [value]


@given(st.sampled_from([str, int, float, bool, None, Literal["a"], list[int], dict[str, int]]), st.data())
def test_values_of_other_types_are_invalid(hint, data):
    kinds = {
        "string": st.text(),
        "integer": st.integers(),
        "number": st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()),
        "boolean": st.booleans(),
        "null": st.none(),
        "array": st.lists(st.text(), min_size=1),
        "object": st.dictionaries(st.text(), st.text(), min_size=1),
    }
    own = {"integer", "number"} if hint is float else {hinted(hint).get("type", "string")}
    wrong = data.draw(st.sampled_from(sorted(kinds.keys() - own)).flatmap(kinds.get))
    assert not jsonschema.Draft202012Validator(hinted(hint)).is_valid(wrong)


def test_functions_without_a_json_schema_are_refused():
    def several(*words: str): ...
    def named(**words: str): ...
    def placed(word: str, /): ...
    def odd(word: set[str]): ...
    def keyed(word: dict[int, str]): ...

    for function, message in [(several, "words"), (named, "words"), (placed, "word"), (odd, "set"), (keyed, "int")]:
        with pytest.raises(ValueError, match=message):
            tool(function)
    with pytest.raises(ValueError, match="letters"):
        tool(lambda word: word)
    with pytest.raises(ValueError, match="not a JSON schema"):
        Tool("a", "", {"type": "object", "properties": []}, print)
    with pytest.raises(ValueError, match='"object"'):
        Tool("a", "", {"type": "string"}, print)
    with pytest.raises(ValueError, match='must have the type "object"'):
        Tool("a", "", {"anyOf": [{"type": "object"}, {"type": "null"}]}, print)
    Tool("a", "", {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"type": "object"}]}}}, print)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("{", "arguments of lookup: Expecting"),
        ("[1]", "arguments of lookup: $: [1] is not of type 'object'"),
        ("{}", "arguments of lookup: $: 'word' is a required property"),
        ({"word": 1}, "arguments of lookup: $.word: 1 is not of type 'string'"),
        ({"word": "a", "most": "3"}, "arguments of lookup: $.most: '3' is not"),
        ({"word": "a", "language": "fr"}, "arguments of lookup: $.language: 'fr' is not one of ['en', 'de']"),
        ({"word": "a", "words": "b"}, "arguments of lookup: $: Additional properties"),
        ('{"word": NaN}', "arguments of lookup: NaN is not JSON"),
        ("[" * 100_000, "arguments of lookup: nested too deeply"),
        ('{"word": ' + "9" * 10_000 + "}", "arguments of lookup: "),
    ],
)
def test_a_bad_call_is_answered_with_an_error_text(arguments, message):
    answer = call(arguments, lookup)
    assert answer.startswith("error: " + message) and len(answer) < 400


def test_an_unknown_tool_is_answered_with_an_error_text():
    assert call({}, lookup, name="look") == "error: there is no tool 'look'; there are: lookup"
    assert asyncio.run(tools.call([], "look", "")) == "error: there is no tool 'look'; there are: none"
    with pytest.raises(ValueError, match="names must differ"):
        call({}, lookup, lookup)


@given(st.text())
def test_any_text_as_arguments_gets_an_answer(text):
    assert call(text, lookup).startswith("error: ")


class Thing:
    def __init__(self, name):
        self.__name__ = name

    async def __call__(self, word: str):
        await asyncio.sleep(0)
        return word

    def method(self, word: str):
        return word


async def later(word: str):
    await asyncio.sleep(0)
    return word


def test_all_kinds_of_functions_are_called():
    prefixed = functools.partial(later)
    prefixed.__name__ = "prefixed"
    for function in (later, Thing("thing"), Thing("thing").method, prefixed, lambda word: word):
        made = Tool("a", "", {"type": "object"}, function)
        assert call({"word": "é"}, made) == "é"
        if getattr(function, "__name__", "") != "<lambda>":
            assert call({"word": "é"}, function) == "é"


def test_results_are_returned_as_text_or_json():
    def give(kind: str):
        return {"text": "a\nb", "none": None, "list": [1, "é"], "number": 0.5, "odd": {"a": 1 + 2j}}[kind]

    answers = {kind: call({"kind": kind}, give) for kind in ("text", "none", "list", "number", "odd")}
    assert answers == {"text": "a\nb", "none": "null", "list": '[1, "é"]', "number": "0.5", "odd": '{"a": "(1+2j)"}'}

    def nothing():
        return "called"

    assert call("", nothing) == call(" ", nothing) == call("{}", nothing) == "called"


@pytest.mark.parametrize(
    "error", [KeyError("a"), NotImplementedError("b"), RecursionError(), OSError(2, "c"), TimeoutError()]
)
def test_an_exception_in_a_tool_is_answered_with_an_error_text(error):
    def sync():
        raise error

    async def coroutine():
        raise error

    for function in (sync, coroutine):
        assert call("", function).startswith(f"error: {function.__name__}: {type(error).__name__}")


def test_stop_iteration_in_a_tool_is_answered_with_an_error_text():
    def first():
        return next(iter(()))

    assert call("", first) == "error: first: ValueError: StopIteration"


def test_server_errors_are_raised():
    def unreachable():
        raise ServerError("the sandbox is gone")

    with pytest.raises(RuntimeError, match="gone"):
        call("", unreachable)


def test_a_tool_that_times_out_blocks_nothing():
    go = threading.Event()

    def hang():
        go.wait()

    async def sleep():
        await asyncio.sleep(60)

    started = time.monotonic()
    try:
        for function in (hang, sleep):
            name = function.__name__
            assert call("", function, timeout_s=0.05) == f"error: {name} took longer than 0.05 s"
        assert time.monotonic() - started < 30  # asyncio.run waits for the threads of its pool
    finally:
        go.set()


def test_cancelling_a_call_cancels_the_tool():
    async def cancelled():
        running, ended = asyncio.Event(), asyncio.Event()

        async def wait():
            running.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        task = asyncio.create_task(tools.call([tool(wait)], "wait", ""))
        await running.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task.cancelled() and ended.is_set()

    assert asyncio.run(cancelled())


def test_the_python_tool():
    python = tools.python_tool(timeout_s=5, output_bytes=1000)
    assert schema(python)["function"]["parameters"]["required"] == ["code"]
    assert "earlier calls are gone" in python.description
    assert call({"code": "x = 6 * 7\nprint(x)"}, python) == "42"
    assert call({"code": "print(x)"}, python).endswith(
        "NameError: name 'x' is not defined\nerror: the program ended with code 1"
    )
    assert call({"code": ""}, python) == "(the program printed nothing)"
    assert call({"code": "while True: print(1)"}, python).endswith("ended by its limit on: output")
    with pytest.raises(ValueError, match="timeout_s"):
        tools.python_tool(timeout_s=-1)


def test_the_python_tool_may_use_another_sandbox():
    class Box:
        async def run_python(self, code, *, stdin="", **limits):
            return Result(f"{code} {limits}", "", 0)

    assert call({"code": "a"}, tools.python_tool(Box(), cpu_s=1)) == "a {'cpu_s': 1}"


EXPRESSIONS = st.recursive(
    st.integers(0, 10**6).map(str) | st.floats(0, 1e6).map(repr),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+ - * / // % **".split()), inner).map(" ".join),
        st.tuples(st.sampled_from("+-"), inner).map("".join),
        inner.map("({})".format),
    ),
    max_leaves=8,
).filter(lambda text: text.count("**") < 2 and len(text) < 1000)


@given(EXPRESSIONS)
def test_the_calculator_agrees_with_python(text):
    try:
        value = calculator(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            eval(text)
    except OverflowError:
        with pytest.raises(OverflowError):
            eval(text)
    except ValueError as error:
        assert "bits" in str(error) or "**" in text  # the result is complex
    else:
        assert (value, type(value)) == (eval(text), type(eval(text)))


@given(st.text("0123456789.eE_+-*/%() \n"))
def test_the_calculator_answers_or_raises_expected_errors(text):
    with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
        assert math.isfinite(calculator(text)) or calculator(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "()", "1 +", "x", "__import__('os')", "abs(1)", "True", "'a' * 9", "[1]", "1 if 1 else 2", "1 < 2", "1; 2",
        "1j", "0x10", "1e999", "9**9**9**9", "2 ** 4096", "(-8) ** 0.5", "1 << 9", "e",
        "(" * 999, "-" * 999 + "1", "(" * 300 + "1" + ")" * 300, "9" * 1001, "1 = 1", "9" * 900 + "**9" * 30,
    ],
)  # fmt: skip
def test_the_calculator_refuses(text):
    started = time.process_time()
    assert call({"expression": text}, calculator).startswith("error: calculator: ")
    assert time.process_time() - started < 0.5


def test_the_calculator():
    assert call({"expression": " (2 + 3) * 4 ** 2 / 8 "}, calculator) == "10.0"
    assert call({"expression": "1_000 // 3"}, calculator) == "333"
    assert call({"expression": "1 / 0"}, calculator) == "error: calculator: ZeroDivisionError: division by zero"
