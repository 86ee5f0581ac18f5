"""Shapes of rows: few, and the one that computes fewest positions."""

import itertools

import numpy as np
import pytest
from test_core_packing import make

from areax.core import fitting, packing


def place(sizes, shapes, pairs=None):
    column = np.array(sizes)[:, None]
    return fitting.place(column, [-1] * len(sizes) if pairs is None else pairs, shapes, range(len(sizes)))


@pytest.mark.parametrize(("length", "rows", "unit", "multiple"), [
    (1024, 8, 1, 1), (1024, 8, 8, 2), (1000, 5, 5, 1), (32, 8, 1, 1), (4096, 64, 4, 384),
])  # fmt: skip
def test_shapes_are_few_and_none_is_larger(length, rows, unit, multiple):
    shapes = fitting.shapes(length, rows, unit, multiple)
    assert (length, rows) in shapes and len(shapes) == len(set(shapes))
    for T, B in shapes:
        assert T * B <= length * rows and B % unit == 0
        assert T == length or (T < length and T % 128 == T % multiple == 0)
    of_one = lambda i: {shape[i] for shape in shapes}
    assert len(shapes) <= 4 * max(1, (length * rows // unit // 128).bit_length()) + 4
    assert length > 128 or of_one(0) == {length}


def test_the_shape_that_computes_fewest_positions():
    """Against every shape, tried one by one; 5 % are given up for a shape that more batches have."""
    rng = np.random.default_rng(0)
    shapes = fitting.shapes(1024, 8, 1)
    for count in (1, 3, 4, 16, 64):
        sizes = np.minimum(rng.lognormal(5.2, 0.5, count).astype(int) + 1, 1024)
        pairs = rng.integers(-1, count, count) if count % 4 else [-1] * count
        made = place(sizes, shapes, pairs)
        cost = lambda made: -(-made.rows // made.B) * (made.B * made.T + fitting.MICROBATCH)
        costs = [cost(place(sizes, [shape], pairs)) for shape in shapes if shape[0] >= sizes.max()]
        assert cost(made) <= fitting.CLOSE * min(costs)
        ends = sorted(zip(made.row.tolist(), made.start.tolist(), sizes.tolist(), strict=True))
        for (row, start, size), (other, begin, _) in itertools.pairwise(ends):
            assert row != other or start + size <= begin
        assert all(start + size <= made.T for _, start, size in ends)


def test_a_batch_has_the_samples_whatever_its_shape():
    rng = np.random.default_rng(0)
    samples = [make(i, int(n), rng) for i, n in enumerate(rng.integers(20, 300, 9))]
    wide = packing.pack(samples, 1024)
    made = packing.pack(samples, 1024, shapes=fitting.shapes(1024, 8, 1))
    assert packing.filled(wide) < 0.2 and packing.filled(made) > 0.75
    assert made.token_BT.size < wide.token_BT.size / 4
    for name in ("token_BT", "logp_BT", "mask_BT"):
        for a, b in zip(
            packing.unpack(getattr(made, name), made, samples), packing.unpack(getattr(wide, name), wide, samples),
            strict=True,
        ):  # fmt: skip
            np.testing.assert_array_equal(a, b)
    assert packing.filled(made) == sum(len(s.tokens) for s in samples) / made.token_BT.size


def test_pairs_choose_a_shape_that_holds_them():
    shapes = [(128, 1), (256, 1), (128, 3)]
    made = place([100, 100, 60], shapes, [0, 0, -1])
    assert (made.T, made.B) == (256, 1) or made.B == 3
    with pytest.raises(ValueError, match=r"fit into 1 rows of 128 tokens, got \[100, 100\] tokens in samples"):
        place([100, 100], [(128, 1)], [0, 0])
