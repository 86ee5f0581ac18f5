"""The check of a sample before it is trained on, whoever made it: a server, a workflow, an agent or a teacher.

A wrong value would not stop training but become another token, another policy or a step that is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from ..rewards.signatures import COMPONENTS, LARGEST, LONGEST_NAME
from ..types import LARGEST_LOGP, Finish, Image, Sample

LONGEST = 80  # characters of a wrong value in a message


def violation(sample: Sample, *, vocabulary: int | None = None, newest: int | None = None) -> str:
    """What is wrong with a sample, as "FIELD must ..., got ..."; "" if nothing is.

    Args:
      vocabulary: number of the policy's tokens; None = unknown.
      newest: the newest policy version that a server can have; None = unknown.
    """
    return next(_violations(sample, vocabulary, newest), "")


def _violations(sample: Sample, vocabulary: int | None, newest: int | None) -> Iterator[str]:
    n, mask = _array(sample.tokens).size, _array(sample.mask)
    if not n:
        yield _wrong("tokens", "have at least one; return None to leave an episode out", sample.tokens)
    if mask.shape != (n,) or mask.dtype != bool:
        yield _wrong("mask", f"be bool[{n}]", sample.mask)
    for name, kinds in (("tokens", "iu"), ("version", "iu"), ("turn", "iu"), ("logp", "fiu")):
        values = _array(getattr(sample, name))
        if values.shape != (n,) or values.dtype.kind not in kinds:
            yield _wrong(name, f"have {n} {'whole numbers' if kinds == 'iu' else 'numbers'}", getattr(sample, name))
    yield from _outside("tokens", sample.tokens, 0, vocabulary or 2**31, "vocabulary size ")
    yield from _outside("turn", sample.turn, 0, 2**31)
    if newest is not None:
        yield from _outside("version", sample.version, -1, newest + 1, "the newest version + 1 = ")
    logp = _array(sample.logp)[mask]
    if (bad := ~((logp <= LARGEST_LOGP) & (logp >= -LARGEST))).any():
        yield _wrong("logp", "be finite and at most 0", logp[bad][0])
    for name, rule, holds in (
        ("temperature", "at least 0", lambda x: x >= 0),
        ("weight", "above 0", lambda x: np.float32(x) > 0),
        ("label", "a number", lambda x: True),
    ):
        value = getattr(sample, name)
        if not (_number(value) and math.isfinite(value) and holds(value)):
            yield _wrong(name, f"be {rule} and finite", value)
    for name, form in (
        ("rewards", Sequence), ("components", Mapping), ("arrays", Mapping), ("images", Sequence), ("info", Mapping),
    ):  # fmt: skip
        if not isinstance(getattr(sample, name), form):
            yield _wrong(name, f"be a {form.__name__.lower()}", getattr(sample, name))
    for pair in sample.rewards:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and _whole(pair[0]) and 0 <= pair[0] < n):
            yield _wrong("rewards", f"have indices in [0, {n})", pair)
        if not _number(pair[1]) or math.isinf(pair[1]):
            yield _wrong("rewards", "be finite, or NaN", pair[1])
    if not math.isnan(sample.reward) and not _number(sample.reward):
        yield _wrong("rewards", "have a sum that is finite in float32", sample.reward)
    if len(sample.components) > COMPONENTS:
        yield _wrong("components", f"be at most {COMPONENTS}", len(sample.components))
    for name, value in sample.components.items():
        if not (isinstance(name, str) and _number(value)) or math.isinf(value):
            yield _wrong("components", "be finite numbers, or NaN, by name", {name: value})
        if len(name) > LONGEST_NAME:
            yield _wrong("components", f"have names of at most {LONGEST_NAME} characters", name)
    if not (isinstance(sample.finish, str) and sample.finish in get_args(Finish)):
        yield _wrong("finish", f"be one of {', '.join(get_args(Finish))}", sample.finish)
    for name in ("group", "prompt", "sample", "rollout", "pair"):
        if not _whole(getattr(sample, name)):
            yield _wrong(name, "be a whole number", getattr(sample, name))
    for name, entry in sample.arrays.items():
        kind, values = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", None)
        good = kind in ("input", "target") and isinstance(values, np.ndarray) and values.dtype.kind in "fiub"
        if not (good and values.shape[:1] == (n,)):
            yield _wrong(f"arrays[{name!r}]", f'be ("input" or "target", an array of numbers [{n}, ...])', entry)
        if values.dtype.kind in "iu":
            yield from _outside(f"arrays[{name!r}]", values, -(2**31), 2**31)
    for image in sample.images:
        if not isinstance(image, Image):
            yield _wrong("images", "be of the type Image (`areax.adapters.data.images.read` makes one)", image)
    if not _number(sample.info.get("episode_reward", 0.0)):
        yield _wrong("info['episode_reward']", "be a number", sample.info["episode_reward"])


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        return np.array(None)


def _outside(name: str, values: Any, low: int, high: int, what: str = "") -> Iterator[str]:
    values = _array(values)
    if (bad := (values < low) | (values >= high)).any():
        yield _wrong(name, f"lie in [{low}, {what}{high})", values[bad][0])


def _number(value: Any) -> bool:
    """Whether a value is a number that float32 can hold, in which training has it."""
    if isinstance(value, bool | np.bool_):
        return True
    if not isinstance(value, int | float | np.integer | np.floating):
        return False
    size: Any = abs(value)
    return not LARGEST < size < math.inf


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(-(2**63) <= value < 2**63)


def _wrong(name: str, rule: str, value: Any) -> str:
    shown = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return f"{name} must {rule}, got {shown[:LONGEST]}{'...' if len(shown) > LONGEST else ''}"
