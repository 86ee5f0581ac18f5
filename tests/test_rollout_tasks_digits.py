"""Sums and differences of digits: right answers, disjoint splits, and conversations with three examples."""

import itertools

import pytest

from areax.rollout.tasks import digits


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_are_right_and_no_pair_of_digits_is_in_two_splits_or_an_example(seed):
    splits = digits.splits(digits.Task(seed=seed))
    seen = {}
    for name, rows in splits.items():
        for row in rows:
            *shown, asked = row["messages"]
            assert asked["role"] == "user" and asked["content"].endswith(" =")
            a, sign, b, _ = asked["content"].split()
            assert row["answer"] == str({"+": int.__add__, "-": int.__sub__}[sign](int(a), int(b)))
            assert digits.reward(f" {row['answer']}\n", row) == 1 and digits.reward(row["answer"] + "1", row) == 0
            seen.setdefault(name, set()).add(frozenset((a, b)))
            assert [m["content"] for m in shown] == ["3 + 5 =", "8", "9 - 2 =", "7", "8 + 6 =", "14"]
            assert [m["role"] for m in shown] == ["user", "assistant"] * 3
        asked = [row["messages"][-1]["content"] for row in rows]
        assert len(set(asked)) == len(asked)
    for one, other in itertools.combinations(seen.values(), 2):
        assert not one & other
    assert not set.union(*seen.values()) & {frozenset("35"), frozenset("92"), frozenset("86")}
    assert sum(map(len, seen.values())) == 55 - 3
    assert len(splits["heldout"]) >= 50 and len(splits["train"]) >= 100 and len(splits["dev"]) >= 10


def test_splits_depend_only_on_the_seed():
    assert digits.splits(digits.Task(seed=3)) == digits.splits(digits.Task(seed=3))
    assert digits.splits(digits.Task(seed=3)) != digits.splits(digits.Task(seed=4))
