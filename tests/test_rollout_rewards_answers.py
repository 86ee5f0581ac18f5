"""Thoughts and fenced blocks of completions. The blocks are those that CommonMark's rules say, worked out by hand."""

import asyncio

import cpu
import pytest

from areax.rollout.rewards import choice, code, http, json_schema, length, match
from areax.rollout.rewards.answers import block, without_thoughts
from areax.rollout.tasks import countdown

F = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "text, answer",
    [
        ("8", "8"),
        ("<think>7</think>8", "8"),
        ("<think>\n7\n</think>\n\n8\n", "\n\n8\n"),
        ("7</think>8", "8"),  # the prompt began the thought
        ("<think>7</think>8<think>9</think>", "8"),
        ("8 <think>7</think> is it", "8  is it"),
        ("<think>6<think>7</think></think>8", "8"),
        ("<think>7", ""),  # cut off
        ("<think>7</think>8<think>9", "8"),
        ("", ""),
    ],
)
def test_thoughts_are_not_part_of_an_answer(text, answer):
    assert without_thoughts(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{F}```",
        f"```\n{F}```",
        f"Input:\n```text\n1\n```\nSolution:\n```python\n{F}```",
        f"First:\n```bash\npip install x\n```\nThen:\n```python\n{F}```\n",
        f"```python\n{F}```\nIt prints:\n```\n2\n```\n",
        f"```\n1\n```\n```python\n{F}```",
        f"```python\nbad\n```\nno:\n```py\n{F}```\nso",
        f"```text\n1\n```\n```\n{F}```\n```text\n2\n```",
        # info strings
        f"```python3\n{F}```",
        f"```Python\n{F}```",
        f"``` PY3\n{F}```",
        f"```python3.11\n{F}```",
        f"```python:solution.py\n{F}```",
        f'```python title="a b"\n{F}```',
        f"```{{.python .numberLines}}\n{F}```",
        # ends
        f"Here:\n```python\n{F}",
        f"{F}```",
        f"{F}\n```\n\n",
        f"```python\n{F}```\n```",
        f"```python\n{F}``````",
        f"```python\n{F}   ```",
        # other fences
        f"~~~python\n{F}~~~",
        f"````python\n{F}````",
        f"~~~text\n```\n1\n~~~\n```python\n{F}```",
        f"````text\n```python\nbad\n```\n````\n~~~~python\n{F}~~~~",
        f"Use `x` or ``` ``` inline.\n```python\n{F}```",
        "   ```python\n   def f(x):\n       return x + 1\n   ```",
        # fences within lines
        f"<answer>```python\n{F}```</answer>",
        f"Solution: ```python\n{F}```\nIt prints:\n```\n2\n```",
        f"```python\n{F.rstrip()}```",
        f"```python\n{F.rstrip()}```\nDone.",
        f"```\n{F.rstrip()}```",
        f"**Solution** ```Python3\n{F}```.",
        # containers
        "1. So:\n   ```python\n   def f(x):\n       return x + 1\n   ```\n2. Done.",
        "- So:\n\n  - Look:\n\n    ```python\n    def f(x):\n        return x + 1\n    ```\n",
        "> ```python\n> def f(x):\n>     return x + 1\n> ```\nDone.",
        # thoughts and line ends
        f"<think>```python\nbad\n```</think>\n```python\n{F}```",
        f"<think>\n```python\nnever closed\n</think>\n```python\n{F}```",
        f"bad```\n</think>\n{F}",
        f"```python\n{F}```".replace("\n", "\r\n"),
        f"<details>\n```python\n{F}```\n</details>",
        # other languages whose names begin with it
        f"```python\n{F}```\n```python-repl\n>>> f(1)\n2\n```",
        f"```python-3.11\n{F}```\n```python_traceback\nError\n```",
    ],
)
def test_the_program_in_a_text(text):
    assert block(text, "python", "py").strip() == F.strip()


def test_fences_in_a_block_are_part_of_it():
    text = '````python\nx = """\n```\n~~~\n    ````\n"""\n````\n'
    assert block(text, "python") == 'x = """\n```\n~~~\n    ````\n"""\n'
    assert block("```python\n1\n```python\n2\n```", "python") == "1\n```python\n2\n"  # a fence that closes has no info
    assert block("```python\nx\u2028y\n```\n```", "python") == "x\u2028y\n"


@pytest.mark.parametrize("text", ["", "```", "```\n```", "```python\n```", "<think>```python\n1\n```"])
def test_no_program(text):
    assert block(text, "python") == ""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "piece",
    [
        "```\n",
        "~~~\n```\n",
        "> ",
        "- ",
        "- a\n",
        "1. ",
        "    ",
        "[a]: ",
        "`",
        "*",
        "<think>",
        "</think>",
        "<a>\n",
        "a",
        "a ```python\n",
        "```python a",
    ],
)
def test_long_texts_are_read_quickly(piece):
    with cpu.limit(2):
        block(piece * 20_000, "python")


@pytest.mark.parametrize(
    "schema, text, valid",
    [
        ({"multipleOf": 0.1}, "0.3", True),
        ({"multipleOf": 0.01}, "19.99", True),
        ({"multipleOf": 0.1}, "0.35", False),
        ({"multipleOf": 0.1}, "1" + "0" * 40, True),
        ({"maximum": 1}, "1.00000000000000000001", False),
        ({"exclusiveMinimum": 0}, "1e-400", True),
        ({"type": "integer"}, "10000000000000000.5", False),
        ({"type": "integer"}, "1e2", True),
        ({"type": "integer", "$schema": "http://json-schema.org/draft-04/schema#"}, "1.0", False),
        ({"const": 0.1}, "0.10", True),
        ({"const": 1}, "true", False),
        ({"type": "number"}, "1e999999999", False),
    ],
)
def test_numbers_satisfy_a_schema_exactly(schema, text, valid):
    assert json_schema.reward(text, {"schema": schema}) == valid


def test_fields_of_rewards_that_are_null_are_missing():
    """Parquet adds them to rows without."""
    row = {"max_tokens": None, "max_characters": 2, "form": None, "answer": None, "reward_url": None}
    assert length.reward("abc", row) == -0.5 and match.form("<think>a</think>b", row) == 1.0
    with pytest.raises(ValueError, match="a row's answer must be a text, or a list of them, got None"):
        match.exact("None", row)
    with pytest.raises(ValueError, match="a row needs reward_url"):
        asyncio.run(http.reward("a", row))
    with pytest.raises(ValueError, match="length: a row needs either .*, above 0, got {'max_characters': '2'}"):
        length.reward("abc", {"max_characters": "2"})


@pytest.mark.parametrize(
    "schema, message", [(None, "an object or its text, got None"), ("{", "is not JSON: .*, got '{'")]
)
def test_a_schema_that_is_none_is_refused(schema, message):
    with pytest.raises(ValueError, match=f"json_schema: the schema of a row .*{message}"):
        json_schema.reward("{}", {"schema": schema})


def test_a_block_of_json_is_not_one_of_another_form():
    text = '```json\n{"a": 1}\n```\nas by\n```json-schema\n[]\n```'
    assert json_schema.reward(text, {"schema": {"type": "object"}}) == 1.0


def test_rewards_read_what_is_said():
    schema, row = {"schema": {"type": "object"}}, {"answer": "B"}
    assert code.reward(f"<think>\n```python\n0\n```\n</think>\n```Python\n{F}```", {"tests": "assert f(1) == 2"}) == 1.0
    assert json_schema.reward('You said:\n```text\nhi\n```\nSo:\n```JSON\n{"a": 1}\n```', schema) == 1.0
    assert json_schema.reward('<think>\n```json\n1\n```\n</think>\n{"a": 1}', schema) == 1.0
    assert (
        choice.chosen("Answer: \\(B\\)") == "B"
        and choice.chosen("Answer: B; C") is choice.chosen("Answer: B + C") is None
    )
    assert choice.reward("<think>\\boxed{A}</think>B", row) == match.exact("A</think> B", row) == 1.0
    assert choice.reward("<think>\\boxed{B}", row) == match.exact("<think>B", row) == 0.0
    assert match.regex("<think>B", {"pattern": "B"}) == 1.0  # all of the text
    thought = "<think><answer>3-1</answer></think><answer>1+2</answer>"
    assert countdown.reward(thought, {"operators": "+-", "target": 3, "numbers": [1, 2]}) == 1.0
