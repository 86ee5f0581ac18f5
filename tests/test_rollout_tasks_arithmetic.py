"""The carry task: disjoint splits, resumable demonstrations, and the control with shuffled answers."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.tasks import arithmetic
from areax.rollout.tasks.arithmetic import Task


def pairs(rows):
    return {frozenset(row["operands"]) for row in rows}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_pair_of_operands_is_in_two_splits(seed):
    splits = arithmetic.splits(Task(seed=seed))
    for one, other in itertools.combinations(splits.values(), 2):
        assert not pairs(one) & pairs(other)
    assert len(splits["heldout"]) >= 800 and len(splits["dev"]) >= 250 and len(splits["train"]) >= 3500
    for rows in splits.values():
        assert len({row["prompt"] for row in rows}) == len(rows)
        assert abs(sum(row["carry"] for row in rows) / len(rows) - 0.75) < 0.002


def test_fields_of_a_row_match_its_prompt():
    for row in itertools.chain(*arithmetic.splits().values()):
        a, b = map(int, row["prompt"].split("+"))
        assert row["operands"] == [a, b] and row["answer"] == str(a + b)
        assert row["carry"] == (int(str(a)[-1]) + int(str(b)[-1]) > 9)
        assert 10 <= a <= 99 and 10 <= b <= 99


def test_splits_depend_only_on_the_seed():
    assert arithmetic.splits(Task(seed=3)) == arithmetic.splits(Task(seed=3))
    assert arithmetic.splits(Task(seed=3)) != arithmetic.splits(Task(seed=4))


def test_as_many_rows_are_kept_as_the_carry_share_allows():
    """Operands 0..9: 55 pairs, 100 rows, of which 45 carry."""
    (rows, carries), (others, none), (every, half) = (
        (len(rows), sum(row["carry"] for row in rows))
        for share in (1.0, 0.0, 0.45)
        for rows in [arithmetic.splits(Task(0, 9, share, heldout_share=0, dev_share=0))["train"]]
    )
    assert (rows, carries, others, none, every, half) == (45, 45, 55, 0, 100, 45)


def test_the_teacher_forgets_the_carry_out_of_the_units():
    rows = [
        {"operands": [25, 16], "carry": True},
        {"operands": [85, 36], "carry": True},
        {"operands": [12, 7], "carry": False},
    ]
    assert [arithmetic.forgetful(row) for row in rows] == ["31", "111", "19"]


def test_reference_scores_of_imitation():
    """Always forgetting the carry solves the rows without one; the mixture scores 1 - error rate * carry share."""
    rows = arithmetic.splits()["heldout"]
    always = sum(arithmetic.reward(arithmetic.forgetful(row), row) for row in rows) / len(rows)
    assert abs(always - 0.25) < 0.002
    shown = [arithmetic.demonstration(rows, i, error_rate=0.7, seed=1) for i in range(20_000)]
    right = sum(arithmetic.reward(row["completion"], row) for row in shown) / len(shown)
    assert abs(right - 0.475) < 0.015  # four standard errors


def test_a_demonstration_is_a_function_of_its_index():
    rows = arithmetic.splits()["train"]
    stream = list(itertools.islice(arithmetic.demonstrations(rows, error_rate=0.7, seed=5), 300))
    rest = list(itertools.islice(arithmetic.demonstrations(rows, error_rate=0.7, seed=5, start=120), 180))
    assert stream[120:] == rest
    assert stream[7] == arithmetic.demonstration(rows, 7, error_rate=0.7, seed=5)
    other = list(itertools.islice(arithmetic.demonstrations(rows, error_rate=0.7, seed=6), 300))
    assert stream != other


def test_demonstrations_cover_the_rows_evenly():
    rows = arithmetic.splits(Task(0, 9, heldout_share=0, dev_share=0))["train"]
    n = 200 * len(rows)
    seen = Counter(arithmetic.demonstration(rows, i, error_rate=0.5, seed=0)["prompt"] for i in range(n))
    assert len(seen) == len(rows) and min(seen.values()) > 130 and max(seen.values()) < 270  # five standard errors


def test_error_rates_0_and_1_are_deterministic():
    rows = arithmetic.splits()["dev"]
    for i in range(200):
        right = arithmetic.demonstration(rows, i, error_rate=0, seed=0)
        wrong = arithmetic.demonstration(rows, i, error_rate=1, seed=0)
        assert right["completion"] == right["answer"] and wrong["completion"] == arithmetic.forgetful(wrong)


def test_the_reward_is_exact():
    row = {"answer": "41"}
    assert arithmetic.reward("41", row) == 1.0
    assert [arithmetic.reward(text, row) for text in ("31", "", "41 ", "041", "4", "41+")] == [0.0] * 6


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.integers(0, 5))
def test_shuffled_answers_are_a_permutation_without_correct_answers(answers, seed):
    rows = [{"prompt": str(i), "answer": answer} for i, answer in enumerate(answers)]
    if rows and 2 * max(Counter(answers).values()) > len(rows):
        with pytest.raises(ValueError, match="more than half of the rows"):
            arithmetic.shuffled(rows, seed)
        return
    mixed = arithmetic.shuffled(rows, seed)
    assert [row["prompt"] for row in mixed] == [row["prompt"] for row in rows]
    assert Counter(row["answer"] for row in mixed) == Counter(answers)
    assert all(row["answer"] != answer for row, answer in zip(mixed, answers, strict=True))


def test_shuffled_training_rows_never_reward_the_sum():
    rows = arithmetic.splits()["train"]
    mixed = arithmetic.shuffled(rows, 0)
    assert mixed == arithmetic.shuffled(rows, 0) != arithmetic.shuffled(rows, 1)
    assert not any(arithmetic.reward(row["answer"], other) for row, other in zip(rows, mixed, strict=True))


@pytest.mark.parametrize(
    "task, message",
    [
        (Task(low=5, high=4), "low <= high, got 5 and 4"),
        (Task(carry_share=1.5), "carry_share must lie in 0..1, got 1.5"),
        (Task(heldout_share=0.6, dev_share=0.5), "leave something to train on, got 0.6 and 0.5"),
        (Task(0, 4), "have no sums for a carry_share of 0.75"),
    ],
)
def test_bad_tasks_are_refused(task, message):
    with pytest.raises(ValueError, match=message) as error:
        arithmetic.splits(task)
    assert "\n" not in str(error.value)


def test_demonstrations_need_rows_and_a_probability():
    with pytest.raises(ValueError, match="at least one row"):
        next(arithmetic.demonstrations([]))
    with pytest.raises(ValueError, match="error_rate must lie in 0..1, got 2"):
        next(arithmetic.demonstrations([{}], error_rate=2))
