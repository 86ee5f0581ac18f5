"""The chips that compilers know; whether they are described as their compilers want is tested with these."""

import importlib.util

import pytest

from areax.parallel.planner import targets
from areax.parallel.planner.chips import CHIPS


def test_targets_are_chips_of_plans_with_the_same_memory():
    assert {*targets.CARDS, *targets.TORUS} <= {*CHIPS}
    for name, card in targets.CARDS.items():  # a data sheet's figures are round, a driver's what is left
        assert card.memory == pytest.approx(CHIPS[name].memory, rel=0.08), name
        assert card.bandwidth == pytest.approx(CHIPS[name].bandwidth, rel=0.05), name


@pytest.mark.parametrize(
    "chip, count, shape",
    [("v5e", 1, "2x2"), ("v5e", 8, "2x4"), ("v6e", 64, "8x8"), ("v5p", 4, "2x2x1"), ("v5p", 16, "2x2x4")],
)
def test_slices_are_as_cubic_as_they_can_be(chip, count, shape):
    assert targets._slice(chip, count) == shape


@pytest.mark.parametrize(
    "chip, count, words",
    [
        ("mi300", 1, "can compile for a100, h100, .*, v5e, v6e, v5p, got mi300"),
        ("h100", 12, "up to 8 GPUs, or for a multiple of 8, got 12"),
        ("v5p", 6, "v5p must be a slice of 1, 2 or 4 chips, or of a multiple of 8, got 6"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(chip, count, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=words):
        targets.devices(chip, count)


@pytest.mark.parametrize("chip, extra", [("h100", "cuda"), ("v5e", "tpu")])
def test_a_compiler_that_is_not_installed_is_named(chip, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{chip}'s compiler is not installed; install areax\[{extra}\]"):
        targets.devices(chip, 1)
