"""The check of a sample before it is trained on, whoever made it: a server, a workflow, an agent or a teacher.

A wrong value would not stop training but become another token, another policy or a step that is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn, get_args

import numpy as np

from ..processes.printable import shown
from ..rewards.signatures import COMPONENTS, LARGEST, LONGEST_NAME
from ..types import LARGEST_LOGP, LEAST_LOGP, SEATS, Finish, Image, Sample

CheckImages = Callable[[np.ndarray, tuple[Image, ...]], None]  # (tokens, images)
IDS = "group", "prompt", "sample", "rollout", "pair", "seat"
RANGES = {"pair": (-(2**31), 2**31), "seat": (0, SEATS)}  # those of the others are given anew


def checked(
    sample: Sample, *, vocabulary: int | None = None, newest: int | None = None, oldest: int = 0,
    experts: int | None = None, check_images: CheckImages | None = None,
) -> Sample:  # fmt: skip
    """A copy of a sample in the types of its fields, which shares no array with it: workflows may reuse theirs.

    Args:
      vocabulary: number of the policy's tokens; None = unknown.
      newest: the newest policy version that a server can have; None = unknown.
      oldest: the version at which the sample's group was admitted, which all servers had.
      experts: number of the policy's experts in a layer; None = unknown.
      check_images: raises ValueError unless the policy can read a sample's images, and its prompt tokens stand for
        them; None = unknown.

    Raises:
      ValueError: a value is wrong: "FIELD must ..., got ...".
    """
    if type(sample) is not Sample:
        sample = _plain(sample)
    given = _read(np.array, sample.tokens)
    n = given.size if given is not None else 0
    if not n:
        _wrong("tokens", "be an array of one token or more", sample.tokens)
    tokens = _array("tokens", sample.tokens, n, "iu", f"have {n} whole numbers")
    mask = _array("mask", sample.mask, n, "b", f"be bool[{n}]")
    version = _array("version", sample.version, n, "iu", f"have {n} whole numbers")
    turn = _array("turn", sample.turn, n, "iu", f"have {n} whole numbers")
    logp = _array("logp", sample.logp, n, "fiu", f"have {n} numbers").astype(np.float64)
    _within("tokens", tokens, 0, vocabulary or 2**31, "vocabulary size ")
    _within("version", version, -1, 2**31 if newest is None else newest + 1, "the newest version + 1 = ")
    _within("turn", turn, 0, 2**31, "")
    _all("logp", f"lie in [{LEAST_LOGP:g}, 0]", logp[mask], lambda x: (x >= LEAST_LOGP) & (x <= LARGEST_LOGP))
    _all("logp", "be 0 outside the mask", logp[~mask], lambda x: x == 0)
    _all("version", "be -1 outside the mask", version[~mask], lambda x: x == -1)
    if (version[mask] < 0).any() and ((version >= 0).any() or not logp[mask].any()):  # else weights had no version
        _wrong("mask", "cover sampled tokens alone, which have the version that sampled them", sample.version)
    rule = f"be at least {oldest}, at which the group was admitted"
    _all("version", rule, version[version >= 0], lambda x: x >= oldest)
    images = _images(sample.images)
    if check_images:
        check_images(tokens[version < 0], images)
    group, prompt, number, rollout, pair, seat = (_id(name, getattr(sample, name)) for name in IDS)
    return Sample(
        tokens=tokens.astype(np.int32),
        mask=mask,
        logp=logp.astype(np.float32),
        version=version.astype(np.int32),
        turn=turn.astype(np.int32),
        temperature=_scalar(sample, "temperature", "at least 0", lambda x: x >= 0),
        rewards=_rewards(sample.rewards, n),
        components=_components(sample.components),
        finish=_finish(sample.finish),
        group=group,
        prompt=prompt,
        sample=number,
        rollout=rollout,
        weight=_scalar(sample, "weight", "above 0", lambda x: bool(np.float32(x) > 0)),
        pair=pair,
        seat=seat,
        label=_scalar(sample, "label", "a number", lambda x: True),
        arrays=_arrays(sample.arrays, tokens, mask, vocabulary, experts),
        images=images,
        info=_info(sample.info),
        teacher_prompt=_teacher_prompt(sample.teacher_prompt, vocabulary),
        reading=_reading(sample.reading),
    )


def forms(sample: Sample) -> dict[str, str]:
    """Kind, type and shape of a sample's arrays, which all samples of a batch must share; any floats are one type."""
    type_of = lambda x: "float" if x.dtype.kind == "f" else str(x.dtype)
    return {name: " ".join([kind, type_of(x), *map(str, x.shape[1:])]) for name, (kind, x) in sample.arrays.items()}


def like_first(sample: Sample, first: Mapping[str, str]) -> Sample:
    """The sample itself; raises ValueError unless its arrays have the `forms` of the first one."""
    if (own := forms(sample)) != first:
        differ = sorted(name for name in {*own, *first} if own.get(name) != first.get(name))
        said = lambda some: {name: some[name] for name in differ if name in some}
        _wrong("arrays", f"be those of the first sample, of which {said(first)} differ", said(own))
    return sample


def _plain(sample: Sample) -> Sample:
    """A sample of a subclass, whose fields may be code, as one of values."""
    made = _read(lambda x: {field.name: getattr(x, field.name) for field in fields(Sample)}, sample)
    if made is None:
        _wrong("a sample", "have fields that can be read", type(sample).__name__)
    return Sample(**made)


def _read(how: Callable[[Any], Any], value: Any) -> Any:
    """`how(value)`; None if it fails, or code of the value's own, which may raise anything."""
    try:
        return how(value)
    except Exception:
        return None


def _array(name: str, value: Any, n: int, kinds: str, rule: str) -> np.ndarray:
    array = _read(np.array, value)
    if array is None or array.shape != (n,) or array.dtype.kind not in kinds:
        _wrong(name, rule, value)
    return array


def _all(name: str, rule: str, values: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]) -> None:
    if (bad := ~holds(values)).any():
        _wrong(name, rule, values[bad][0])


def _within(name: str, values: np.ndarray, low: int, high: int, what: str) -> None:
    _all(name, f"lie in [{low}, {what}{high})", values, lambda x: (x >= low) & (x < high))


def _number(value: Any) -> float | None:
    """A number that training can compute with in float32, or not finite; None for anything else."""
    value = value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value
    number = _read(float, value) if isinstance(value, bool | int | float | np.floating) else None
    return None if number is None or LARGEST < abs(number) < math.inf else number


def _scalar(sample: Sample, name: str, rule: str, holds: Callable[[float], bool]) -> float:
    number = _number(value := getattr(sample, name))
    if number is None or not math.isfinite(number) or not holds(number):
        _wrong(name, f"be {rule} and finite", value)
    return number


def _id(name: str, value: Any) -> int:
    low, high = RANGES.get(name, (-(2**63), 2**63))
    number = _read(int, value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
    if number is None or not low <= number < high:
        _wrong(name, f"be a whole number in [{low}, {high})" if name == "seat" else "be a whole number", value)
    return number


def _rewards(value: Any, n: int) -> tuple[tuple[int, float], ...]:
    made = []
    for pair in _items("rewards", value):
        index, reward = _pair(pair)
        whole = _read(int, index) if isinstance(index, int | np.integer) and not isinstance(index, bool) else None
        if whole is None or not 0 <= whole < n:
            _wrong("rewards", f"have indices in [0, {n})", pair)
        number = _number(reward)
        if number is None or math.isinf(number):
            _wrong("rewards", "be finite, or NaN", reward)
        made.append((whole, number))
    if abs(total := sum(number for _, number in made)) > LARGEST:
        _wrong("rewards", f"have a sum from -{LARGEST:g} to {LARGEST:g}", total)
    return tuple(made)


def _components(value: Any) -> dict[str, float]:
    made, given = {}, _entries("components", value)
    if len(given) > COMPONENTS:
        _wrong("components", f"be at most {COMPONENTS}", len(given))
    for name, part in given.items():
        number = _number(part) if isinstance(name, str) and _read(str.encode, name) is not None else None
        if number is None or math.isinf(number):
            _wrong("components", "be finite numbers, or NaN, by name", {name: part})
        if len(name) > LONGEST_NAME or not name.isprintable():
            _wrong("components", f"have printable names of at most {LONGEST_NAME} characters", name)
        made[str(name)] = number
    return made


def _finish(value: Any) -> Finish:
    for finish in get_args(Finish):
        if isinstance(value, str) and str.__eq__(value, finish) is True:
            return finish
    _wrong("finish", f"be one of {', '.join(get_args(Finish))}", value)


def _arrays(
    given: Any, tokens: np.ndarray, mask: np.ndarray, vocabulary: int | None, experts: int | None
) -> dict[str, tuple[Any, np.ndarray]]:  # fmt: skip
    arrays = {name: _extra(name, entry, mask, experts) for name, entry in _entries("arrays", given).items()}
    for name, least, count in (("sampling_mask", -1, "most kept"), ("sampler_ids", 0, "likeliest")):
        if name in arrays:
            field, (kind, ids) = f"arrays['{name}']", arrays[name]
            if kind != "target" or ids.ndim != 2 or ids.dtype.kind not in "iu":
                _wrong(field, f'be ("target", whole numbers [tokens, {count}])', given[name])
            _within(field, ids, least, vocabulary or 2**31, "vocabulary size ")
    if "sampling_mask" in arrays:
        field, kept = "arrays['sampling_mask']", arrays["sampling_mask"][1]
        drawn = (kept == tokens[:, None]).any(1) | (kept < 0).all(1)
        _all(field, "have each token that is learnt from", tokens[mask & ~drawn], lambda x: x < 0)
    return arrays


def _extra(name: Any, entry: Any, mask: np.ndarray, experts: int | None) -> tuple[Any, np.ndarray]:
    field, n = f"arrays[{shown(name)}]", len(mask)
    kind, values = _pair(entry)
    array = _read(np.array, values) if isinstance(values, np.ndarray) else None
    named = isinstance(name, str) and isinstance(kind, str) and kind in ("input", "target")
    if not named or array is None or array.dtype.kind not in "fiub" or array.shape[:1] != (n,):
        _wrong(field, f'be ("input" or "target", an array of numbers [{n}, ...])', entry)
    if name == "routed_experts":
        _within(field, array, -1, experts or 2**31, "the number of experts ")
    if array.dtype in (np.int64, np.uint32, np.uint64):
        _within(field, array, -(2**31), 2**31, "")
    if array.dtype.kind == "f":
        _all(field, "be finite in 32 bits, or NaN", array, _held)
    if array.dtype.kind == "f" and name != "teacher_logp":  # training leaves out where it is not a number
        learnt = array if kind == "input" else array[mask]
        _all(field, "be numbers where they are learnt from", learnt, lambda x: ~np.isnan(x))
    return kind, array


def _held(x: np.ndarray) -> np.ndarray:
    """Where float32 holds numbers; NaN counts."""
    return ~np.isinf(x) if x.dtype.itemsize <= 4 else ~(np.abs(x) > float(np.finfo(np.float32).max))


def _images(value: Any) -> tuple[Image, ...]:
    images = _items("images", value)
    for image in images:
        if not isinstance(image, Image) or not isinstance(image.data, bytes):
            _wrong("images", "be images, of bytes", image)
    return images


def _teacher_prompt(value: Any, vocabulary: int | None) -> tuple[int, ...]:
    items = _items("teacher_prompt", value)
    tokens = _array("teacher_prompt", items, len(items), "iu", "have whole numbers") if items else np.zeros(0, int)
    _within("teacher_prompt", tokens, 0, vocabulary or 2**31, "vocabulary size ")
    return tuple(tokens.tolist())


def _reading(value: Any) -> tuple[np.ndarray, ...]:
    items = _items("reading", value)
    if items and (len(items) != 2 or np.shape(items[0]) != np.shape(items[1])):
        _wrong("reading", "be (), or a teacher's tokens and the number of the span of each", value)
    made = tuple(_array("reading", x, len(x), "iu", "have whole numbers").astype(np.int32) for x in items)
    for x in made:
        _within("reading", x, 0, 2**31, "")
    return made


def _info(value: Any) -> dict[Any, Any]:
    made = _entries("info", value)
    if "episode_reward" in made:
        number = _number(made["episode_reward"])
        if number is None or math.isinf(number):
            _wrong("info['episode_reward']", "be finite, or NaN", made["episode_reward"])
        made["episode_reward"] = number
    for name in ("prompt", "text"):  # which are shown; some workflows report messages
        if not isinstance(made.get(name, ""), str):
            made[name] = shown(made[name])
    return made


def _items(name: str, value: Any) -> tuple[Any, ...]:
    made = _read(tuple, value) if isinstance(value, tuple | list) else None
    if made is None:
        _wrong(name, "be a sequence", value)
    return made


def _pair(value: Any) -> tuple[Any, Any]:
    """The two entries of a pair; (None, None) for anything else."""
    made = _read(tuple, value) if isinstance(value, tuple | list) else ()
    return made if made and len(made) == 2 else (None, None)


def _entries(name: str, value: Any) -> dict[Any, Any]:
    made = _read(dict, value) if isinstance(value, Mapping) else None
    if made is None:
        _wrong(name, "be a mapping", value)
    return made


def _wrong(name: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{name} must {rule}, got {shown(value)}")
