"""Countdown: every row is solvable, and the reward agrees with a search over all expressions."""

import itertools
from fractions import Fraction

import cpu
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.tasks import countdown
from areax.rollout.tasks.countdown import Task


def every(numbers, operators):
    """All (text, value) over an ordered tuple of numbers, by recursive splitting: an independent search."""
    if len(numbers) == 1:
        yield str(numbers[0]), Fraction(numbers[0])
    for cut in range(1, len(numbers)):
        for (left, a), (right, b) in itertools.product(
            every(numbers[:cut], operators), every(numbers[cut:], operators)
        ):
            for symbol in operators:
                if symbol != "/" or b:
                    value = a + b if symbol == "+" else a - b if symbol == "-" else a * b if symbol == "*" else a / b
                    yield f"({left} {symbol} {right})", value


@pytest.mark.parametrize(
    "task", [Task(), Task(numbers=4, operators="+-", high=9, train=300), Task(prompt="{numbers}={target}", seed=7)]
)
def test_the_answer_of_every_row_solves_it(task):
    splits = countdown.splits(task)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": task.train, "dev": 200, "heldout": 500}
    for row in itertools.chain(*splits.values()):
        assert countdown.reward(row["answer"], row) == countdown.reward(row["completion"], row) == 1.0
        assert len(row["numbers"]) == task.numbers and 1 <= row["target"] <= 100
        assert str(row["target"]) in row["prompt"] and all(str(n) in row["prompt"] for n in row["numbers"])


def test_no_problem_is_in_two_splits():
    splits = countdown.splits(Task(high=9, train=800))
    problems = [(*sorted(row["numbers"]), row["target"]) for row in itertools.chain(*splits.values())]
    assert len(set(problems)) == len(problems) == 1500
    assert splits == countdown.splits(Task(high=9, train=800)) != countdown.splits(Task(high=9, train=800, seed=1))


def test_the_reward_agrees_with_a_search():
    for row in countdown.splits(Task(high=9, train=1, dev=1, heldout=4))["heldout"]:
        for numbers in set(itertools.permutations(row["numbers"])):
            for text, value in every(numbers, "+-*/"):
                assert countdown.reward(text, row) == float(value == row["target"]), text


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.data())
def test_values_equal_those_of_python(numbers, data):
    text = str(numbers[0])
    exact = f"Fraction({numbers[0]})"
    for number in numbers[1:]:
        symbol = data.draw(st.sampled_from("+-*/"))
        if data.draw(st.booleans()):
            text, exact = f"({text})", f"({exact})"
        text, exact = f"{text} {symbol}{number}", f"{exact} {symbol} Fraction({number})"
    try:
        wanted = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            countdown.evaluate(text)
    else:
        assert countdown.evaluate(text) == (wanted, numbers)


@pytest.mark.parametrize(
    "text, score",
    [
        ("3*7+1", 1),
        (" ( 3 * 7 ) + 1 ", 1),
        ("<answer>1 + 7*3</answer>", 1),
        ("I try <answer>7+1</answer> no, <answer>\n3*7+1\n</answer> it is", 1),
        ("<answer>3*7+1</answer> or rather <answer>3+7+1</answer>", 0),
        ("3*7+1=22", 0),
        ("22", 0),
        ("3*7+1*1", 0),  # 1 twice
        ("7*3+2-1", 0),  # a number that is not given
        ("3*7", 0),  # 1 is not used
        ("37-15", 0),
        ("--3*7+1", 0),
        ("3**7+1", 0),
        ("3*7//1+1", 0),
        ("(3*7)(1)", 0),
        ("3*07+1", 0),
        ("3*7+True", 0),
        ("__import__('os')", 0),
        ("3*7+1/0", 0),
        ("", 0),
        ("(" * 100 + "3*7+1" + ")" * 100, 1),
        ("(" * 4000 + "3*7+1" + ")" * 4000, 0),
        ("9" * 10_000, 0),
        ("<answer>" * 20_000, 0),
        ("<answer>1 <answer>3*7+1</answer>", 1),
    ],
)
def test_the_reward_of_a_text(text, score):
    with cpu.limit(1):
        assert countdown.reward(text, {"numbers": [7, 3, 1], "target": 22, "operators": "+*"}) == score


def test_fractions_are_exact_and_the_row_limits_the_operators():
    row = {"numbers": [8, 3, 8, 3], "target": 24, "operators": "+-*/"}
    assert countdown.reward("8/(3-8/3)", row) == 1.0
    assert countdown.reward("8/(3-8/3)", {**row, "operators": "+-*"}) == 0.0


@pytest.mark.parametrize(
    "task, message",
    [
        (Task(numbers=2, high=3), "need 2700 different problems, found"),
        (Task(operators="+^"), "operators must be a subset of '\\+-\\*/', got '\\+\\^'"),
        (Task(numbers=0), "numbers >= 1"),
        (Task(prompt="{goal}"), "got 'goal' in '{goal}'"),
    ],
)
def test_bad_tasks_are_refused(task, message):
    with pytest.raises(ValueError, match=message) as error:
        countdown.splits(task)
    assert "\n" not in str(error.value)


def test_a_record_becomes_the_same_row_as_a_generated_problem():
    [made] = countdown.splits(Task(train=1, dev=0, heldout=0))["train"]
    wanted = {name: value for name, value in made.items() if name not in ("answer", "completion")}
    for name in ("nums", "numbers"):
        read = countdown.row({"target": made["target"], name: made["numbers"]})
        assert read == wanted and countdown.reward(made["completion"], read) == 1.0
    for record in ({"nums": [1, 2]}, {"target": 3, "nums": "1 2"}, {"target": 3, "nums": [1.5, 2]}, {"target": 3}):
        with pytest.raises(ValueError, match="needs an integer 'target' and a list"):
            countdown.row(record)
