"""Signatures and return values of reward functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..processes.printable import one_line, shown

CONTEXT = ("prompt", "prompt_ids", "completion_ids")  # optional parameters of a reward, besides the text and the row

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")  # parameters of verl's compute_score

LARGEST = 1e18  # of a number such as a reward: float32, in which training has them, holds sums of squares of these
COMPONENTS, LONGEST_NAME = 256, 100  # most components of a reward, and characters of a component's name
FAULTS = {  # what servers call no reward
    "code", "detail", "error", "errors", "message", "retry_after", "status", "statusCode", "status_code", "success",
}  # fmt: skip
KINDS = "a number, a dict of numbers, a list of (end, reward) pairs or None"


@dataclass(frozen=True)
class Score:
    """A reward; a NaN value means unscorable.

    Attributes:
      value: the reward of the completion, the sum of those of its steps if it has any.
      components: named components.
      steps: (end, reward) of each step: the text up to character `end` completes the step.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()


# From the samples of each episode of a group to their rewards; None = as they are.
Regroup = Callable[[list[list[Any]]], Awaitable[list[Score] | None]]


def score(value: Any) -> Score:
    """Converts the return value of a reward function to a Score.

    A number is the reward, None is unscorable (NaN), and a dict gives named components: its entry "reward" is the
    total, which defaults to the sum of all. A list of (end, reward) pairs gives the rewards of steps.

    Raises:
      ValueError: anything else, or a number beyond LARGEST.
    """
    if isinstance(value, Score):
        return Score(_number(value.value), _components(value.components), _steps(value.steps))
    if value is None:
        return Score(math.nan)
    if isinstance(value, list | tuple) and value:
        steps = _steps(value)
        return Score(_number(sum(reward for _, reward in steps)), steps=steps)
    if not isinstance(value, Mapping):
        return Score(_number(value))
    if not value:
        raise ValueError(f"a reward must be {KINDS}, got an empty dict")
    components = _components(value)
    total = components.pop("reward", None)
    return Score(_number(sum(components.values())) if total is None else total, components)


def whole(value: Any) -> Score:
    """Converts as `score`, where steps cannot be told apart.

    Raises:
      ValueError: as `score`; or the reward is one of steps.
    """
    made = score(value)
    if made.steps:
        raise ValueError(
            f"a reward of steps needs the workflow single_turn, got {len(made.steps)} (end, reward) pairs; "
            "return their sum, or the least"
        )
    return made


def is_fault(said: Any) -> bool:
    """Whether an answer is an error in place of a reward: an object that has nothing but names of FAULTS, or one with a
    text, an object, or the number of a status."""
    if not isinstance(said, Mapping) or "reward" in said or not said:
        return False
    faults = [value for name, value in said.items() if name in FAULTS]
    is_one = lambda x: not isinstance(x, int | float) or isinstance(x, bool) or 400 <= x < 600
    return len(faults) == len(said) or any(map(is_one, faults))


def reported(said: Any, where: str) -> dict[str, float]:
    """The reward that a server or a program reports in an object of JSON: its number "reward", and its other numbers.

    Raises:
      ValueError: there is no such number, or one beyond LARGEST, or there are too many others; `where` says of whom.
    """
    if not isinstance(said, Mapping) or "reward" not in said:
        raise ValueError(f'{where} must answer with an object with a number "reward", got {shown(said)}')
    rest = {name: x for name, x in said.items() if isinstance(x, int | float) and name != "reward"}
    numbers = {name: float(x) for name, x in rest.items() if abs(x) <= LARGEST}  # others, such as times, are no parts
    try:
        return _components(numbers) | {"reward": reported_number(said["reward"], where)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def reported_number(value: Any, where: str) -> float:
    """A number of a server or a program as a reward. Raises ValueError for anything else, also true and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{where} must answer with a number as the reward, got {shown(value)}")
    return _number(value)


def _components(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a reward's components must be a dict of numbers, got {shown(value)}")
    if len(value) > COMPONENTS:
        raise ValueError(f"a reward must have at most {COMPONENTS} components, got {len(value)}")
    names = [*map(str, value)]
    if (longest := max(map(len, names), default=0)) > LONGEST_NAME:
        raise ValueError(f"a component's name must have at most {LONGEST_NAME} characters, got {longest}")
    if odd := [name for name in names if not name.isprintable()]:
        raise ValueError(f"a component's name must be printable, got {odd[0]!r}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"a component's name must be Unicode, got {name!r}") from None
    return {name: _number(part) for name, part in zip(names, value.values(), strict=True)}


def _steps(pairs: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(pairs, list | tuple):
        raise ValueError(f"a reward's steps must be a list of (end, reward) pairs, got {shown(pairs)}")
    return tuple(map(_step, pairs))


def _step(pair: Any) -> tuple[int, float]:
    if not (isinstance(pair, Sequence) and len(pair) == 2 and hasattr(type(pair[0]), "__index__") and pair[0] >= 0):
        what = "with end the number of characters up to the end of a step"
        raise ValueError(f"a reward must be {KINDS}, {what}, got {shown(pair)}")
    return int(pair[0]), _number(pair[1])


def _number(value: Any) -> float:
    if not hasattr(type(value), "__float__") or _no_number(getattr(value, "dtype", None)):
        raise ValueError(f"a reward must be {KINDS}, got {shown(value)}")
    try:
        number = float(value)
    except Exception as error:  # its code may raise anything
        raise ValueError(f"a reward must be {KINDS}, got {shown(value)} ({one_line(error)})") from None
    if abs(number) > LARGEST:
        raise ValueError(f"a reward must be within {LARGEST:g} of 0, or NaN if it is unscorable, got {number}")
    return number


def _no_number(dtype: Any) -> bool:
    """Whether it is numpy's of texts, bytes, complex numbers or objects, of which `float` makes numbers, too."""
    kind, name = getattr(dtype, "kind", ""), getattr(dtype, "name", "")
    return kind in ("S", "U", "c", "O") or str(name).startswith("void")


@dataclass(frozen=True)
class Bound:
    """A reward function ready to be called.

    Attributes:
      mode: "plain" and "batched" run one call at a time, "async" many.
      wants: the names in CONTEXT that it reads.
      call: f(text, row, context) -> the function's result; batched f(texts, rows). `context` has the `wants`.
    """

    mode: Literal["plain", "async", "batched"]
    wants: tuple[str, ...]
    call: Callable[..., Any]


def bind(function: Callable, name: str = "reward") -> Bound:
    """Determines from its parameter names how to call a reward function.

    - `texts` and `rows`: batched. f(texts, rows) -> one reward per text; called with all queued calls.
    - `completions`, as in AReaL: f(prompt, completions, prompt_ids, completion_ids, **row). `prompt` is the templated
      text, `completions` the single completion. Row fields named like the first four are left out, and without a **
      parameter so are those for which the function has no parameter.
    - `solution_str` and `ground_truth`, as in verl: f(data_source, solution_str, ground_truth, extra_info), those
      of them that it takes, from the row's fields; without a `reward_model` the truth is the `answer`. A dict's `score`
      is the reward, its other numbers are components.
    - any other: f(text, row), with those of prompt=, prompt_ids=, completion_ids= that it has parameters for.

    All may be `async def`. Context that the caller of the pool did not pass is None.

    Raises:
      ValueError: it has a parameter `completions`, but does not begin with AReaL's four; it cannot be called with a
        text and a row, or as in verl.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return Bound("plain", (), lambda text, row, context: function(text, row))
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    mode = _mode(function)
    if {"texts", "rows"} <= set(parameters):
        return Bound("batched", (), function)
    if "completions" in parameters:
        first = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:4]
        if len(first) < 4 or first[1] != "completions":
            raise ValueError(
                f"{name}: with a parameter 'completions' it must begin with (prompt, completions, prompt_ids, "
                f"completion_ids), as in AReaL, got ({', '.join(parameters)}); or write reward(text, row), which gets "
                "one completion, where TRL's get lists"
            )

        def areal(text: str, row: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
            fields = {k: v for k, v in row.items() if k not in first and (anything or k in parameters)}
            return function(context["prompt"], text, context["prompt_ids"], context["completion_ids"], **fields)

        return Bound(mode, CONTEXT, areal)
    if {"solution_str", "ground_truth"} <= set(parameters):
        return Bound(mode, (), _as_in_verl(function, name))
    wants = tuple(name for name in CONTEXT if anything or name in parameters)
    try:
        inspect.signature(function).bind("", {}, **dict.fromkeys(wants))
    except TypeError as error:
        shown = ", ".join(map(str, parameters.values()))
        raise ValueError(f"{name}: must be callable as reward(text, row), got ({shown}): {error}") from None
    return Bound(mode, wants, lambda text, row, context: function(text, row, **context))


def _as_in_verl(function: Callable, name: str) -> Callable[..., Any]:
    """f(text, row, context) of a `compute_score` of verl."""
    signature = inspect.signature(function)
    fixed = [key for key, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
    if unknown := [
        key for key in fixed if key not in VERL and signature.parameters[key].default is inspect.Parameter.empty
    ]:
        raise ValueError(f"{name}: must take {', '.join(VERL)}, as in verl, and got {', '.join(unknown)} besides")
    takes = VERL if len(fixed) < len(signature.parameters) else tuple(key for key in VERL if key in fixed)

    def arguments(text: str, row: Mapping[str, Any]) -> dict[str, Any]:
        judged = row.get("reward_model") or {"ground_truth": row.get("answer")}
        values = (row.get("data_source"), text, judged["ground_truth"], row.get("extra_info"))
        return {key: value for key, value in zip(VERL, values, strict=True) if key in takes}

    def parts(value: Any) -> Any:
        if not isinstance(value, Mapping) or "score" not in value:
            return value
        others = {k: v for k, v in value.items() if k != "score" and hasattr(type(v), "__float__")}
        return {"reward": value["score"], **others}

    async def later(text: str, row: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
        return parts(await function(**arguments(text, row)))

    if _mode(function) == "async":
        return later
    return lambda text, row, context: parts(function(**arguments(text, row)))


def bind_as_called(function: Callable) -> Bound:
    """Binds a function that is called with the arguments of `Pool.called`, which are the row."""
    return Bound(_mode(function), (), lambda text, row, context: function(*row["arguments"], **row["data"]))


def _mode(function: Callable) -> Literal["plain", "async"]:
    later = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return "async" if later else "plain"
