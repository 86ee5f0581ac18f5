"""Mixtures and streams: exact shares, every row once, and the same rows from any ordinal on."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.scheduling import stream
from areax.rollout.scheduling.curriculum import Prompts
from areax.rollout.scheduling.mixture import Mixture
from areax.rollout.scheduling.stream import Stream


def mixture(weights, size=5, seed=0):
    named = {name: Fraction(weight) for name, weight in weights.items()}
    return Mixture({n: Prompts([{"id": i} for i in range(size)], seed) for n in named}, named, seed)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 500))
def test_every_block_has_exactly_the_shares(weights, seed, start):
    own = mixture({str(i): str(w) for i, w in enumerate(weights)}, seed=seed)
    total = sum(weights)
    drawn = Counter(own.source(ordinal) for ordinal in range(start * total, (start + 1) * total))
    assert drawn == {str(i): w for i, w in enumerate(weights)}


def test_weights_are_decimal_and_sources_start_anew():
    own = mixture({"math": "0.7", "code": "0.3"})
    rows = [own[i] for i in range(100)]
    assert Counter(row["data_source"] for row in rows) == {"math": 70, "code": 30}
    assert [row["data_source"] for row in rows[:20]] != [row["data_source"] for row in rows[20:40]]
    for name, count in (("math", 70), ("code", 30)):
        ids = [row["id"] for row in rows if row["data_source"] == name]
        assert ids == [own._sources[own._names.index(name)][i]["id"] for i in range(count)]
        assert all(sorted(ids[i : i + 5]) == list(range(5)) for i in range(0, count, 5))
    assert [mixture({"math": "0.7", "code": "0.3"})[i] for i in reversed(range(100))] == rows[::-1]
    assert own.shares(range(10)) == {"math/share": 0.7, "code/share": 0.3}
    assert own.order != mixture({"math": "0.3", "code": "0.7"}).order and own.size == 10


def test_a_field_of_the_row_stays():
    own = Mixture({"a": Prompts([{"data_source": "gsm8k"}])}, {"a": Fraction(1)})
    assert own[0] == {"data_source": "gsm8k"} and own.source(0) == "a"


def test_weights_of_too_many_digits_are_refused():
    with pytest.raises(ValueError, match="must be shares of at most 1,000,000 rows, got a 0.123457, b 1; write fewer"):
        mixture({"a": "0.1234567", "b": "1"})


class Passes:
    """Rows that depend on the epoch."""

    def __init__(self, count):
        self.count, self.epoch = count, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        epoch = self.epoch
        return ({"epoch": epoch, "id": i} for i in range(self.count))


def test_a_stream_keeps_its_order_starts_anew_and_can_start_anywhere(monkeypatch):
    monkeypatch.setattr(stream, "KEPT", 4)
    own = Stream(Passes(7))
    expected = [{"epoch": i // 7, "id": i % 7} for i in range(30)]
    assert [own[i] for i in range(30)] == expected and len(own._kept) == 4
    assert [own[i] for i in (29, 27, 3, 28)] == [expected[i] for i in (29, 27, 3, 28)]  # older ones are read again
    assert Stream(Passes(7))[25] == expected[25]
    assert own.size is None and len(own.rows) == 4


def test_an_iterator_ends_or_cannot_go_back(monkeypatch):
    monkeypatch.setattr(stream, "KEPT", 4)
    own = Stream(iter([{"id": i} for i in range(9)]))
    assert own[8] == {"id": 8}
    with pytest.raises(ValueError, match="an iterator cannot give row 1 again, after 9; give a list"):
        own[1]
    with pytest.raises(ValueError, match="must give rows, again when it ends, got none after 9; give a list"):
        own[9]
    with pytest.raises(ValueError, match="got none after 0"):
        Stream([])[0]
