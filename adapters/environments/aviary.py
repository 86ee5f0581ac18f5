"""Data sets of environments of aviary: the policy acts by calls of tools."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import inspect
import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jsonschema

from . import library
from .randomness import Randomness

LOADING = threading.Lock()
HELDOUT = 1 << 30  # seeds from here on are for evaluation


class World:
    """One environment.

    Args:
      name: of the data set, such as gsm8k.
      train_split: of the data set's splits, the one to train on; "" = train. Only for a data set with splits.
      eval_split: that to evaluate on; "" = test.
      options: arguments of the data set, such as hf_source.
    """

    def __init__(self, name: str, *, train_split: str = "", eval_split: str = "", **options: Any):
        self._name, self._splits, self._options = name, {"train": train_split, "eval": eval_split}, options
        self._core: Any = _core()
        self._env: Any = None

    @staticmethod
    def rows(split: str, name: str, *, train_split: str = "", eval_split: str = "", **options: Any) -> Iterable[dict]:
        """{"split", "index"} of each environment, or "seed" for n from 0 on if the data set makes them without end."""
        tasks = _tasks(name, split, {"train": train_split, "eval": eval_split}, options)
        try:
            count = len(tasks)
        except TypeError:
            first = HELDOUT if split == "eval" else 0
            return ({"split": split, "seed": n} for n in itertools.count(first))
        return [{"split": split, "index": n} for n in range(count)]

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(by_alias=True, exclude_none=True) for tool in self._env.tools]

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins the environment of the row."""
        self._env = await asyncio.to_thread(self._made, row)
        # aviary's switch: what a tool raises is told
        self._env.exec_tool_calls = functools.partial(self._env.exec_tool_calls, handle_tool_exc=True)
        seen, _ = await self._env.reset()
        return _messages(seen)

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """Takes the message; the environment says what a text without calls, or a call of no tool, is worth. Arguments
        with which it cannot be stepped, because they do not fit the tool's schema, are told."""
        calls = copy.deepcopy(message.get("tool_calls") or [])
        try:
            kind = self._core.ToolRequestMessage if calls else self._core.Message
            action = kind(role="assistant", content=message["content"], **({"tool_calls": calls} if calls else {}))
            seen, reward, done, truncated = await self._env.step(action)
        except Exception as error:  # of a tool: the arguments say whose fault it is
            wrong = [said for call in message.get("tool_calls") or [] if (said := self._misfit(call["function"]))]
            if not wrong:
                raise
            return [_told(call, f"error: {wrong[0]} ({type(error).__name__})") for call in calls], None, False
        return _messages(seen), float(reward), bool(done or truncated)

    async def close(self) -> None:
        if self._env:
            await self._env.close()

    def _made(self, row: Mapping[str, Any]) -> Any:
        tasks = _tasks(self._name, row["split"], self._splits, self._options)
        if "index" in row:
            return tasks.get_new_env_by_idx(row["index"])
        with Randomness(row["seed"]).drawn():
            return tasks.get_new_env()

    def _misfit(self, function: Mapping[str, str]) -> str:
        """Why a call's arguments are none of the tool's; "" if they are, or if there is no such tool."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}
        if function["name"] not in schemas:
            return ""
        strict = {"type": "object", "additionalProperties": False, **schemas[function["name"]]}
        try:
            jsonschema.validate(json.loads(function["arguments"] or "{}"), strict)
        except jsonschema.ValidationError as error:
            return f"{function['name']}: {error.message:.200}"
        except (ValueError, RecursionError):
            return f"{function['name']}: the arguments must be a JSON object"
        return ""


def _core() -> Any:
    library("aviary", "aviary")
    return library("aviary.core", "aviary")


def _tasks(name: str, split: str, splits: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    """The data set of a split, loaded once.

    Raises:
      ValueError: there is none, or not with these options.
    """
    given = splits[split] or {"train": "train", "eval": "test"}[split]
    with LOADING:
        try:
            return _loaded(name, given, any(splits.values()), json.dumps(options, sort_keys=True))
        except Exception as error:  # a stranger's code may raise anything
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"aviary: the data set {name} cannot be loaded: {told}") from error


@functools.lru_cache(maxsize=4)
def _loaded(name: str, split: str, named: bool, options: str) -> Any:
    known = _core().TASK_DATASET_REGISTRY
    if name not in known:
        raise ValueError(f"must be one of {', '.join(sorted(known))}")
    module, kind = known[name]
    try:
        made = getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'fhaviary[{name}]'") from error
    splits = {"split": split} if "split" in inspect.signature(made).parameters else {}
    if named and not splits:
        raise ValueError("it has no splits; leave out train_split and eval_split")
    return made(**splits, **json.loads(options))


def _messages(seen: Sequence[Any]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in seen]


def _told(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
