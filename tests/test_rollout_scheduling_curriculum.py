"""Row orders: which rows are preferred, that none starves, and that a restored state continues the same draws."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.scheduling.curriculum import Adaptive, Curriculum, EasyFirst, Prompts, difficulties, ordered, success
from areax.rollout.types import supervised

ROWS = [{"id": i, "level": 1 + i % 3} for i in range(9)]
SUCCESS = Curriculum(order="success")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 5), st.integers(0, 3))
def test_easy_first_shows_every_row_once_per_epoch_in_order_of_difficulty(levels, seed, epoch):
    rows = [{"id": i, "level": level} for i, level in enumerate(levels)]
    order = EasyFirst(rows, "level", seed)
    order[5 * len(rows)]  # earlier accesses do not matter
    shown = [order[epoch * len(rows) + i] for i in range(len(rows))]
    assert sorted(row["id"] for row in shown) == list(range(len(rows)))
    assert [row["level"] for row in shown] == sorted(levels)
    assert shown == [EasyFirst(rows, "level", seed)[epoch * len(rows) + i] for i in range(len(rows))]


def test_ties_are_shuffled_again_in_each_epoch():
    order = EasyFirst([{"level": 1, "id": i} for i in range(50)], "level")
    epochs = [[order[e * 50 + i]["id"] for i in range(50)] for e in range(2)]
    assert epochs[0] != epochs[1] != list(range(50))


def test_difficulties():
    assert difficulties([{"d": 1}, {"d": None}, {"d": 4.0}], "d").tolist() == [1.0, 2.5, 4.0]
    for value in ("3", True, float("nan"), [1]):
        with pytest.raises(ValueError, match="every row needs a number 'd', got .*; row id 7"):
            difficulties([{"d": 1}, {"d": value, "id": 7}], "d")
    with pytest.raises(ValueError, match="every row needs a number 'e', got 'missing'; row {'d': 1}"):
        difficulties([{"d": 1}], "e")
    with pytest.raises(ValueError, match="got None in all 2"):
        difficulties([{"d": None}] * 2, "d")


def shares(order, count=6000):
    """How often each row is drawn if no outcome is informative."""
    drawn: Counter = Counter()
    for ordinal in range(count):
        drawn[order[ordinal]["id"]] += 1
        order.observe(ordinal, float("nan"))
    return np.array([drawn[i] for i in range(len(order.rows))]) / count


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_rows_near_the_target_are_preferred_and_none_starves(target):
    order = Adaptive(ROWS, Curriculum(order="success", target=target, floor=0.05, memory=0.0), seed=4)
    rates = [0.0, 0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 1.0]
    for ordinal in range(9):  # every row is drawn once before any is drawn twice
        order[ordinal]
    rows = [order[ordinal]["id"] for ordinal in range(9)]
    assert sorted(rows) == list(range(9))
    for ordinal, row in enumerate(rows):
        order.observe(ordinal, rates[row])
    assert order.rate.tolist() == rates
    by_hand = [max(0.05, r ** (2 * target) * (1 - r) ** (2 - 2 * target) * 4) for r in rates]
    if target == 0.5:
        assert by_hand == pytest.approx([0.05, 0.36, 0.64, 0.96, 1.0, 0.96, 0.64, 0.36, 0.05])
    else:
        by_hand = [max(0.05, r**1.6 * (1 - r) ** 0.4 / (0.8**1.6 * 0.2**0.4)) for r in rates]
        assert int(np.argmax(by_hand)) == rates.index(0.8)
    found = shares(order)
    np.testing.assert_allclose(found, np.array(by_hand) / sum(by_hand), atol=0.02)
    assert found.min() > 0


def test_a_field_gives_the_initial_estimates():
    order = Adaptive(ROWS, Curriculum(order="success", field="level"))
    assert order.rate.tolist() == pytest.approx([0.9, 0.5, 0.1] * 3)
    assert Adaptive(ROWS, SUCCESS).rate.tolist() == [0.5] * 9
    assert Adaptive([{"level": 2}] * 3, Curriculum(order="success", field="level")).rate.tolist() == [0.9] * 3


def test_an_estimate_is_a_moving_average():
    order = Adaptive(ROWS[:1], Curriculum(order="success", memory=0.75))
    for ordinal, outcome in enumerate([1.0, float("nan"), 0.0]):
        order[ordinal]
        order.observe(ordinal, outcome)
    assert order.rate.tolist() == pytest.approx([0.75 * (0.75 * 0.5 + 0.25)])
    with pytest.raises(ValueError, match="order success needs rewards from 0 to 1, got a mean of 1.5; row id 0"):
        order[3]
        order.observe(3, 1.5)


ENDS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0, float("nan")])), min_size=1, max_size=20)


@given(ENDS, st.integers(0, 20), st.integers(0, 3), st.sampled_from([0.5, 0.3]))
def test_a_restored_state_continues_with_the_same_draws(ends, stop, seed, target):
    """Draws some prompts, observes the oldest, and so on; in between the order may be rebuilt from its saved state."""
    spec = Curriculum(order="success", target=target)

    def play(interrupted):
        order, shown, open_ = Adaptive(ROWS, spec, seed), [], []
        for turn, (count, outcome) in enumerate(ends):
            if interrupted and turn == stop:
                before, state = order, json.loads(json.dumps(order.state(open_)))
                order = Adaptive(ROWS, spec, seed)
                order.restore(state)
                assert (order.rate == before.rate).all() and (order._weight == before._weight).all()
            for _ in range(count):
                open_.append(len(shown))
                shown.append(order[len(shown)]["id"])
            assert [order[prompt]["id"] for prompt in open_] == [shown[prompt] for prompt in open_]
            order.observe(open_.pop(0), outcome)
        return shown, order.state(open_)

    assert play(True) == play(False)


@given(st.integers(1, 12), st.integers(0, 3))
def test_no_row_is_drawn_twice_at_a_time_while_others_are_free(size, seed):
    order = Adaptive([{"id": i} for i in range(size)], SUCCESS, seed)
    shown = [order[i]["id"] for i in range(2 * size)]
    assert sorted(shown[:size]) == list(range(size)) and set(shown) <= set(range(size))


def test_it_finds_the_informative_rows():
    """30 of 300 rows are sometimes solved: groups with differing rewards become several times as frequent."""
    rows = [{"id": i, "rate": 0.5 if i % 10 == 0 else float(i % 2)} for i in range(300)]

    def teaching(order):
        rng, mixed = np.random.default_rng(0), []
        for batch in range(100):
            told = {}
            for ordinal in range(batch * 16, batch * 16 + 16):
                told[ordinal] = rng.binomial(8, order[ordinal]["rate"]) / 8
            for ordinal, value in told.items():
                if isinstance(order, Adaptive):
                    order.observe(ordinal, value)
            mixed.append(sum(0 < value < 1 for value in told.values()) / 16)
        return np.mean(mixed[50:])

    shuffled = teaching(ordered(rows, seed=1))
    assert 0.07 < shuffled < 0.13
    assert teaching(ordered(rows, SUCCESS, seed=1)) > 3 * shuffled


def test_the_success_rate_of_a_group():
    sample = supervised([1], [2])
    of = lambda *pairs: [sample.replace(rewards=((1, value),), weight=weight) for value, weight in pairs]
    assert success(of((1.0, 1.0), (0.0, 1.0))) == 0.5
    assert success(of((1.0, 0.25), (0.0, 0.75), (1.0, 1.0))) == 0.625  # two rows of one rollout
    assert success(of((1.0, 1.0), (float("nan"), 1.0))) == 1.0
    assert np.isnan(success([])) and np.isnan(success(of((float("nan"), 1.0))))


def test_the_curriculum_chooses_the_order():
    assert ordered(ROWS, seed=3) == Prompts(ROWS, seed=3)
    kinds = [ordered(ROWS, Curriculum(order=order, field="level"), 3) for order in ("easy_first", "success")]
    assert [type(kind) for kind in kinds] == [EasyFirst, Adaptive]
    assert [kind.order for kind in kinds] == [["easy_first", "level", 3], ["success", "level", 3]]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target": 1.0}, "target must lie between 0 and 1, got 1.0"),
        ({"floor": 0.0}, "floor must be above 0 and at most 1, got 0.0"),
        ({"memory": 1.0}, "memory must be at least 0 and below 1, got 1.0"),
        ({"order": "easy_first"}, "field must name a field of the rows for easy_first, got ''"),
        ({"field": "level"}, "field must be empty if rows are shuffled, got 'level'"),
    ],
)
def test_a_bad_curriculum_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Curriculum(**fields)
    with pytest.raises(ValueError, match="at least one row is needed"):
        Adaptive([], SUCCESS)
