"""Classes whose methods are tools, as TRL's `environment_factory` takes them; they run as they are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .. import object_path
from . import tools

NO_TOOLS = ("reset", "get_reward", "rows")


class World:
    """An episode of an object of such a class. The policy calls its public methods, and ends it by an answer without a
    call.

    Args:
      make: object path of the class. `reset(**row)` returns None, or a text that is appended to the row's prompt.
      reward: object path of a reward function as TRL's, f(environments=, prompts=, completions=, **columns), each a
        list of one; "" = the class has `get_reward()`.
      options: arguments of the class.
    """

    def __init__(self, make: str, reward: str = "", **options: Any):
        self._own = object_path.resolve(make)(**options)
        methods = inspect.getmembers(type(self._own), inspect.isfunction)
        names = [name for name, _ in methods if name not in NO_TOOLS and not name.startswith("_")]
        self._kit = [tools.tool(getattr(self._own, name)) for name in names]
        self.tools = [tools.schema(tool) for tool in self._kit]
        self._reward = object_path.resolve(reward) if reward else None
        if not (reward or hasattr(self._own, "get_reward")):
            raise ValueError(f"{make} must have get_reward(), got none; or name a function as reward in --env-options")

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins the episode of a row, whose "messages" or "prompt" are the beginning of the conversation, if any."""
        self._row, told = row, await tools.called(self._own.reset, **row)
        begun = row.get("messages") or row.get("prompt") or ""
        *first, last = [{"role": "user", "content": begun}] if isinstance(begun, str) else map(dict, begun)
        if told is not None:
            content, parts = last["content"], lambda x: [{"type": "text", "text": x}] if isinstance(x, str) else x
            both = isinstance(content, str) and isinstance(told, str)
            last = {**last, "content": content + told if both else parts(content) + parts(told)}
        self._prompt: list[dict[str, Any]] = [*first, last]
        self._said: list[dict[str, Any]] = []
        return self._prompt

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any, bool]:
        """Calls the tools; errors are for the policy to read."""
        self._said.append(dict(message))
        if not message.get("tool_calls"):
            return [], await self.stop(), True
        results = []
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            text = await tools.call(self._kit, name, call["function"]["arguments"])
            results.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
        self._said += results
        return results, None, False

    async def stop(self) -> Any:
        """The reward of the episode as it is now; a number, or None = unscorable."""
        if not self._reward:
            value = await tools.called(self._own.get_reward)
        else:
            columns = {name: [value] for name, value in self._row.items() if name not in ("prompt", "messages")}
            given = {"environments": [self._own], "prompts": [self._prompt], "completions": [self._said], **columns}
            [value] = await tools.called(self._reward, **given)
        return float("nan") if value is None else value
