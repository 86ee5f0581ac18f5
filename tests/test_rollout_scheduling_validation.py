"""Any wrong value in any field of a sample is found, and good ones pass."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.scheduling.validation import checked
from areax.rollout.types import Completion, Sample, sampled

GOOD = sampled([1, 2], Completion([3, 4], [-0.5, -1.5], [7, 8], "stop"), temperature=1.0, reward=0.5)
NUMBERS = st.one_of(
    st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=3), st.none(), st.booleans(), st.complex_numbers(),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip


def violation(sample, **known):
    """What is wrong with a sample; "" if nothing is."""
    try:
        checked(sample, **known)
        return ""
    except ValueError as error:
        return str(error)


def changed(**fields):
    """The good sample with other values, as code that bypasses its constructor may leave them."""
    sample = dataclasses.replace(GOOD)
    for name, value in fields.items():
        object.__setattr__(sample, name, value)
    return sample


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tokens": np.array([1, 2, -7, 4])}, r"tokens must lie in \[0, vocabulary size 100\), got -7"),
        ({"tokens": np.array([1, 2, 100, 4])}, r"tokens must lie in \[0, vocabulary size 100\), got 100"),
        ({"tokens": np.array([1, 2, 2**40, 4])}, "got 1099511627776"),
        ({"tokens": np.array([1, 2, 5.5, 4])}, "tokens must have 4 whole numbers"),
        ({"tokens": [1, 2, "3", 4]}, "tokens must have 4 whole numbers"),
        ({"tokens": np.array([[1, 2], [3, 4]])}, "tokens must have 4 whole numbers"),
        ({"logp": np.array([0, 0, 0.5, -1.0])}, r"logp must lie in \[-10000, 0\], got .*0.5"),
        ({"logp": np.array([0, 0, np.nan, -1.0])}, "logp must lie in"),
        ({"logp": np.array([0, 0, -np.inf, -1.0])}, "logp must lie in"),
        ({"logp": np.array([0, 0, -3.4e38, -1.0])}, "logp must lie in .*-3.4e.38"),
        ({"logp": np.array([0, 0, -1.0])}, "logp must have 4 numbers"),
        ({"version": np.array([-1, -1, 7, 10])}, r"version must lie in \[-1, the newest version \+ 1 = 10\), got 10"),
        ({"version": np.array([-1, -1, 7, -2])}, "version must lie in .* got -2"),
        ({"version": np.array([-1, -1, 7, -1])}, "mask must cover sampled tokens alone, .* got array.*7, -1"),
        ({"mask": np.array([False, True, True, True])}, "mask must cover sampled tokens alone"),
        ({"logp": np.zeros(4), "version": np.full(4, -1)}, "mask must cover sampled tokens alone"),
        ({"version": np.array([-1, -1, 7.0, 8.0])}, "version must have 4 whole numbers"),
        ({"mask": np.array([0, 0, 1, 1])}, r"mask must be bool\[4\]"),
        ({"turn": None}, "turn must have 4 whole numbers, got None"),
        ({"temperature": -1.0}, "temperature must be at least 0 and finite"),
        ({"temperature": np.nan}, "temperature must be at least 0"),
        ({"weight": 0.0}, "weight must be above 0 and finite, got 0.0"),
        ({"weight": -1}, "weight must be above 0"),
        ({"weight": np.nan}, "weight must be above 0"),
        ({"label": "good"}, "label must be a number and finite, got 'good'"),
        ({"rewards": ((3, np.inf),)}, "rewards must be finite, or NaN, got inf"),
        ({"rewards": ((3, 1e300),)}, "rewards must be finite, or NaN, got 1e.300"),
        ({"weight": 1e-300}, "weight must be above 0 and finite, got 1e-300"),
        ({"finish": np.array(["stop", "stop"])}, "finish must be one of"),
        ({"images": None}, "images must be a sequence, got None"),
        ({"rewards": ((3, None),)}, "rewards must be finite, or NaN, got None"),
        ({"rewards": ((4, 1.0),)}, r"rewards must have indices in \[0, 4\), got .4, 1.0."),
        ({"rewards": ((-1, 1.0),)}, "rewards must have indices"),
        ({"components": {"form": None}}, "components must be finite numbers"),
        ({"components": {"form": -np.inf}}, "components must be finite numbers"),
        ({"finish": "tired"}, "finish must be one of stop, length, abort, error, got 'tired'"),
        ({"group": 1.5}, "group must be a whole number, got 1.5"),
        (
            {name: [] for name in ("tokens", "mask", "logp", "version", "turn")},
            "must be an array of one token or more",
        ),
        ({"turn": np.array([0, 0, 0, 2**40])}, r"turn must lie in \[0, 2147483648\), got 1099511627776"),
        ({"turn": np.array([0, 0, 0, -1])}, "turn must lie in"),
        ({"rewards": ((2, 8e17), (3, 8e17))}, "rewards must have a sum from -1e.18 to 1e.18, got 1.6e.18"),
        ({"components": {f"c{i}": 1.0 for i in range(257)}}, "components must be at most 256, got 257"),
        ({"components": {"c" * 101: 1.0}}, "components must have printable names of at most 100 characters, got 'ccc"),
        ({"images": ("x",)}, "images must be images, of bytes, got 'x'"),
        ({"info": {"episode_reward": "1"}}, r"info\['episode_reward'\] must be finite, or NaN, got '1'"),
        (
            {"arrays": {"x": ("input", np.array([0, 0, 0, 2**40]))}},
            r"must lie in \[-2147483648, 2147483648\), got 1099",
        ),
        ({"arrays": {"x": ("output", np.zeros(4))}}, r"arrays\['x'\] must be"),
        ({"arrays": {"x": ("input", np.zeros(3))}}, r"arrays\['x'\] must be"),
        ({"arrays": {"x": ("input", np.array(["a"] * 4))}}, r"arrays\['x'\] must be"),
        (
            {"arrays": {"x": ("input", np.array([0, 0, 0, np.inf], np.float16))}},
            r"\['x'\] must be finite in 32 bits, or NaN, got inf",
        ),
        (
            {"arrays": {"x": ("target", np.array([0, 0, 0, np.nan]))}},
            r"must be numbers where they are learnt from, got nan",
        ),
        ({"teacher_prompt": (1, 100)}, r"teacher_prompt must lie in \[0, vocabulary size 100\), got 100"),
        ({"teacher_prompt": (1, 0.5)}, r"teacher_prompt must have whole numbers"),
        (
            {"arrays": {"routed_experts": ("input", np.full((4, 2, 2), 8))}},
            r"must lie in \[-1, the number of experts 8\), got 8",
        ),
        (
            {"arrays": {"sampler_ids": ("target", np.full((4, 2), 100))}},
            r"arrays\['sampler_ids'\] must lie in \[0, vocabulary size 100\), got 100",
        ),
        (
            {"arrays": {"sampler_ids": ("target", np.zeros((4, 2)))}},
            r"arrays\['sampler_ids'\] must be \(\"target\", whole numbers \[tokens, likeliest\]\)",
        ),
    ],
)
def test_a_wrong_value_is_named(fields, words):
    found = violation(changed(**fields), vocabulary=100, newest=9, experts=8)
    assert re.search(words, found), found
    assert len(found) < 300 and "\n" not in found


def test_a_sample_of_a_subclass_is_read_as_its_fields():
    class Own(Sample):
        pass

    class Failing(Sample):
        logp = property(lambda self: 1 / 0)

    fields = {field.name: getattr(GOOD, field.name) for field in dataclasses.fields(Sample)}
    assert type(checked(Own(**fields))) is Sample
    broken = object.__new__(Failing)
    vars(broken).update(fields)
    assert re.search("a sample must have fields that can be read, got .*Failing", violation(broken))


def test_a_sample_is_not_older_than_its_group():
    assert violation(GOOD, oldest=7) == ""
    assert violation(GOOD, oldest=8) == "version must be at least 8, at which the group was admitted, got 7"


def test_good_samples_pass():
    unnamed = dataclasses.replace(GOOD, version=np.full(4, -1))  # of weights whose label has no number
    assert violation(GOOD) == violation(GOOD, vocabulary=5, newest=8) == violation(unnamed) == ""
    rounded = dataclasses.replace(GOOD, logp=np.array([0, 0, 1e-6, -2.0], np.float32))  # log-softmax in float32
    unscored = dataclasses.replace(GOOD, rewards=((3, float("nan")),), components={"form": float("nan")})
    right = dataclasses.replace(GOOD, rewards=((3, True),), components={"exact": np.True_, "form": np.float32(0.5)})
    assert violation(rounded) == violation(unscored) == violation(right) == ""
    arrays = {"x": ("target", np.array([np.nan, 0, 1, 2])), "routed_experts": ("input", np.full((4, 2, 2), 7))}
    assert violation(dataclasses.replace(GOOD, arrays=arrays), experts=8) == ""


@given(st.sampled_from([f.name for f in dataclasses.fields(Sample) if f.name not in ("info", "images")]), NUMBERS)
def test_no_value_makes_the_check_itself_fail_or_passes_as_tokens(field, value):
    found = violation(changed(**{field: value}), vocabulary=5, newest=8)
    if field in ("tokens", "mask", "logp", "version", "turn"):
        assert found
    for i in range(2, 4):  # a single wrong entry
        if field in ("tokens", "logp", "version") and isinstance(value, int | float) and not isinstance(value, bool):
            entries = list(getattr(GOOD, field))
            entries[i] = value
            bounds = {"tokens": (0, 4), "version": (0, 9), "logp": (-1e4, 1e-3)}[field]
            holds = bounds[0] <= value <= bounds[1] and (field == "logp" or isinstance(value, int))
            assert bool(violation(changed(**{field: np.array(entries)}), vocabulary=5, newest=8)) is not holds
