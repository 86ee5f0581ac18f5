"""Environments of tinker-cookbook, which are rendered to messages here in place of tokens.

Its environments read and write tokens by a renderer, which their data set makes by its name; "areax" names one whose
prompts are the messages themselves, and whose answers are messages.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ...rollout import object_path
from . import arguments, library

LOADING = threading.Lock()
NAME, TOOLS = "areax", "areax_tools"
CHOSEN = {"renderer_name": NAME, "model_name": NAME, "model_name_for_tokenizer": NAME}


class World:
    """An episode of a data set, in a group of its own.

    Args:
      name: object path of an `RLDatasetBuilder`, or a function that returns one.
      options: its fields. Those that name the renderer and the model are chosen here, and its batches and groups have
        one episode unless the options say otherwise.
    """

    def __init__(self, name: str, **options: Any):
        self._name, self._options = name, options
        self.tools: list[dict[str, Any]] = []
        self._builder: Any = None

    @staticmethod
    def rows(split: str, name: str, **options: Any) -> list[dict]:
        """{"split", "batch", "index"} of each group of the data set, or for evaluation of its test set."""
        data = _data(name, split, options)
        with LOADING:
            sizes = [len(data.get_batch(batch)) for batch in range(len(data))]
        return [{"split": split, "batch": b, "index": n} for b, size in enumerate(sizes) for n in range(size)]

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins the episode of the row. Raises ValueError if the row's group has several."""
        self._builder = await asyncio.to_thread(self._group, row)
        envs = await self._builder.make_envs()
        if len(envs) != 1:
            raise ValueError(f"tinker_cookbook: a group must have one environment, got {len(envs)}; set its size to 1")
        self._env, self._steps, self._reward = envs[0], [], {"reward": 0.0}  # type: ignore[var-annotated]
        self._seen, _ = await self._env.initial_observation()
        self.tools = [_tool(spec) for one in self._seen if one["role"] == TOOLS for spec in one["content"]]
        return [one for one in self._seen if one["role"] != TOOLS]

    async def step(self, message: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, float], bool]:
        """Takes the message. The reward at the end has that of the group; metrics are its other components."""
        said = _said(message)
        made = await self._env.step(said, extra={"stop_reason": "stop"})
        after, reward = made.next_observation, float(made.reward)
        tokens = library("tinker_cookbook.completers", "").TokensWithLogprobs(said, None)
        transition = library("tinker_cookbook.rl.types", "").Transition
        self._steps.append(transition(self._seen, tokens, reward, made.episode_done, made.metrics, made.logs))
        self._reward = {**made.metrics, "reward": reward}
        if made.episode_done:
            return [], await self.stop(), True
        if after[: len(self._seen)] != self._seen or len(after) < len(self._seen) + 2:
            raise ValueError("tinker_cookbook: a conversation must grow by the answer and what follows, and did not")
        before, self._seen = len(self._seen), after
        return after[before + 1 :], self._reward, False

    async def stop(self) -> dict[str, float]:
        """The last reward, with that of the group."""
        whole = library("tinker_cookbook.rl.types", "").Trajectory(self._steps, self._seen)
        [(reward, metrics)] = await self._builder.compute_group_rewards([whole], [self._env])
        return {**self._reward, **metrics, "reward": self._reward["reward"] + float(reward)}

    async def close(self) -> None:
        if self._builder:
            await self._builder.cleanup()

    def _group(self, row: Mapping[str, Any]) -> Any:
        data = _data(self._name, row["split"], self._options)
        with LOADING:  # some draw from one source of random numbers
            return data.get_batch(row["batch"])[row["index"]]


class Prompt(list):
    """Messages in place of tokens; areax itself sees to what fits the model's context."""

    length = 0


class Renderer:
    """Renders messages to themselves."""

    def get_stop_sequences(self) -> list[str]:
        return []

    def build_generation_prompt(self, messages: Sequence[Any], **how: Any) -> Prompt:
        if how:
            raise ValueError(f"tinker_cookbook: an answer must begin as the chat template says, got {how}")
        return Prompt(copy.deepcopy(list(messages)))

    def parse_response(self, response: Any) -> tuple[Any, Any]:
        return response, library("tinker_cookbook.renderers", "").ParseTermination.STOP_SEQUENCE

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[dict]:
        first = [{"role": TOOLS, "content": tools}]
        return [*first, {"role": "system", "content": system_prompt}] if system_prompt else first


def _tool(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(spec)}


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's message as tinker-cookbook's."""
    kinds = library("tinker_cookbook.renderers", "tinker-cookbook")
    said: dict[str, Any] = {"role": "assistant", "content": message["content"] or ""}
    for call in message.get("tool_calls") or []:
        function = call["function"]
        if arguments(function["arguments"]) is None:
            wrong = kinds.UnparsedToolCall(raw_text=function["arguments"], error="arguments must be a JSON object")
            said.setdefault("unparsed_tool_calls", []).append(wrong)
        else:
            body = {"name": function["name"], "arguments": function["arguments"] or "{}"}
            said.setdefault("tool_calls", []).append(kinds.ToolCall(id=call["id"], function=body))
    return said


def _data(name: str, split: str, options: Mapping[str, Any]) -> Any:
    """A data set, made once. Raises ValueError if there is none, or not with these options."""
    with LOADING:
        try:
            train, test = _made(name, json.dumps(options, sort_keys=True))
            if split == "eval" and test is None:
                raise ValueError("it has no test set to evaluate on")
            return test if split == "eval" else train
        except Exception as error:  # a stranger's code may raise anything
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"tinker_cookbook: the data set {name} cannot be made: {told}") from error


@functools.lru_cache(maxsize=4)
def _made(name: str, options: str) -> tuple[Any, Any]:
    renderers = library("tinker_cookbook.renderers", "tinker-cookbook")
    renderers.register_renderer(NAME, lambda *_: Renderer())
    tokens = types.SimpleNamespace(name_or_path=NAME)
    library("tinker_cookbook.tokenizer_utils", "").register_tokenizer(NAME, lambda: tokens)
    make, given = object_path.resolve(name), json.loads(options)
    fields = inspect.signature(make).parameters
    if taken := given.keys() & CHOSEN.keys():
        raise ValueError(f"{', '.join(sorted(taken))} must be left out: messages are rendered by the chat template")
    one = {field: 1 for field in fields if field.endswith(("batch_size", "groups_per_batch", "group_size"))}
    chosen = {field: value for field, value in CHOSEN.items() if field in fields}
    return asyncio.run(_built(make(**{**one, **given, **chosen})))


async def _built(builder: Any) -> Any:
    return await builder()
