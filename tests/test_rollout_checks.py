"""Rewards that need no model: exact match, regular expressions, format, choice, length, JSON schema."""

import json

import cpu
import pytest

from areax.rollout.rewards import choice, json_schema, length, match


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris.", "Paris", 0),
        ("42", 42, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("a", [], 0),
        ("", "", 1),
    ],
)
def test_exact(text, answer, score):
    assert match.exact(text, {"answer": answer}) == score


@pytest.mark.parametrize(
    "text, pattern, score",
    [("a\nb", "a.b", 1), ("xxabyy", "ab", 1), ("xxabyy", "^ab$", 0), ("ab", "^ab$", 1), ("", "a", 0), ("", "", 1)],
)
def test_regex(text, pattern, score):
    assert match.regex(text, {"pattern": pattern}) == score


@pytest.mark.parametrize(
    "text, row, score",
    [
        ("<think>so</think>42", {}, 1),
        ("<think>\nso\n</think>\n\n42 it\nis\n", {}, 1),
        ("<think></think>42", {}, 1),
        ("<think>so</think>", {}, 0),
        ("<think>so</think>  \n", {}, 0),
        ("<think>so 42", {}, 0),
        ("so</think>42", {}, 0),
        ("Well, <think>so</think>42", {}, 0),
        ("<think>so</think>42<think>no</think>", {}, 0),
        ("<think>so<think>so</think></think>42", {}, 0),
        ("42", {}, 0),
        ("", {}, 0),
        ("<a>1</a>", {"form": "<a>.*</a>"}, 1),
        ("<a>1</a>!", {"form": "<a>.*</a>"}, 0),
        ("<think>" + "x " * 50_000 + "</think>" + "y " * 50_000 + "<think>", {}, 0),
    ],
)
def test_form(text, row, score):
    with cpu.limit(2):
        assert match.form(text, row) == score


@pytest.mark.parametrize("reward, name", [(match.regex, "pattern"), (match.form, "form")])
@pytest.mark.parametrize("pattern", ["(", 3])
def test_a_bad_pattern_in_a_row_is_an_error(reward, name, pattern):
    with pytest.raises(ValueError, match=f"match: {name} must be a regular expression, got"):
        reward("a", {name: pattern})


@pytest.mark.parametrize(
    "text, letter",
    [
        ("The answer is (B).", "B"),
        ("The answer is B because A is wrong", "B"),
        ("Answer: **B**", "B"),
        ("**Answer:** B", "B"),
        ("ANSWER: B) twelve", "B"),
        ("The correct option is B.", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("The answer is B. Option A is wrong.", "B"),
        ("the answer is a guess\nB", "B"),
        ("\\boxed{B}", "B"),
        ("$\\boxed{\\text{(B)}}$ is the answer: not A", "B"),
        ("The answer is A, so \\boxed{B}", "B"),
        ("<answer> b </answer>", "B"),
        ("I rule out A and C.\n\nB", "B"),
        ("so\n(b).", "B"),
        ("B", "B"),
        ("The answer is A or B.", None),
        ("Answer: A, B", None),
        ("Answer: (A) and (B)", None),
        ("\\boxed{A/B}", None),
        ("The answer is Berlin", None),
        ("I think it is B", None),
        ("A\nB\nhm", None),
        ("", None),
        ("answer" + " " * 50_000, None),
        ("\\boxed{" * 20_000, None),
    ],
)
def test_choice(text, letter):
    with cpu.limit(2):
        assert choice.chosen(text) == letter
    for other in "ABC":
        assert choice.reward(text, {"answer": other}) == float(other == letter)


def test_the_answer_to_a_choice_is_a_letter_or_an_index():
    assert [choice.reward("B", {"answer": answer}) for answer in ("B", "b", "(B)", 1, 0)] == [1, 1, 1, 1, 0]
    for wrong in ("Berlin", "", 26, -1, True):
        with pytest.raises(ValueError, match="choice: answer must be a letter or the index of a choice"):
            choice.reward("B", {"answer": wrong})


@pytest.mark.parametrize("n, score", [(0, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1), (500, -1)])
def test_length(n, score):
    assert length.reward("x" * n, {"max_characters": 10}) == pytest.approx(score)
    assert length.reward("", {"max_tokens": 10}, completion_ids=[1] * n) == pytest.approx(score)
    assert length.reward("x" * n, {"max_characters": 10}, completion_ids=[1] * 99) == pytest.approx(score)


@pytest.mark.parametrize("row", [{}, {"max_tokens": 1, "max_characters": 1}, {"max_tokens": 0}])
def test_a_length_reward_needs_exactly_one_limit(row):
    with pytest.raises(ValueError, match="length: a row needs either max_tokens or max_characters, above 0, got"):
        length.reward("", row, completion_ids=[])


def test_a_length_limit_in_tokens_needs_the_token_ids():
    with pytest.raises(ValueError, match="needs completion_ids"):
        length.reward("text", {"max_tokens": 5})


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize(
    "text, score",
    [
        ('{"name": "Ann", "age": 3}', 1),
        (' {"name": "Ann"}\n', 1),
        ('Here it is:\n```json\n{"name": "Ann"}\n```\nDone.', 1),
        ('```json\n{"name": 3}\n```\n```json\n{"name": "Ann"}\n```', 1),
        ('```json\n{"name": "Ann"}\n```\n```json\n{"name": 3}\n```', 0),
        ('Here it is: {"name": "Ann"}', 0),
        ('{"name": "Ann", "age": -1}', 0),
        ('{"name": "Ann", "age": NaN}', 0),
        ('{"name": "Ann", "size": 1}', 0),
        ('{"age": 3}', 0),
        ("[]", 0),
        ('{"name": "Ann"', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"name": "Ann", "age": ' + "9" * 10_000 + "}", 0),
    ],
)
def test_json_schema(schema, text, score):
    assert json_schema.reward(text, {"schema": schema}) == score


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "thing"}, "the schema of a row is invalid: 'thing' is not valid"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "unresolvable reference"),
        ({"$ref": "#/$defs/gone"}, "unresolvable reference"),
    ],
)
def test_a_bad_schema_in_a_row_is_an_error_and_references_are_not_fetched(schema, message):
    with pytest.raises(ValueError, match=message):
        json_schema.reward("{}", {"schema": schema})
