"""Servers of OpenEnv, by their WebSocket: nothing of an environment runs in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from ...rollout.errors import ServerError
from ...rollout.processes.printable import shown
from ...rollout.rewards.signatures import reported_number
from . import arguments, function
from .server import Server


class World:
    """One session with a server.

    The policy's texts are actions if these have one text field and need no other; else it gets tools: those of an MCP
    environment, or one, `step`, with the action's schema.

    Args:
      name: address of the server, such as http://127.0.0.1:8000.
    """

    def __init__(self, name: str):
        self._server = Server(name)
        self.tools: list[dict[str, Any]] = []
        self._field = ""  # of an action that is a text
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Begins a session; the server's environment gets the row's fields, such as "seed", that it takes."""
        schema = (await self._server.json("GET", "schema", begins=True))["action"]
        self._socket = await self._server.socket("ws")
        data = await self._asked("reset", dict(row))
        own = {name: kind for name, kind in schema.get("properties", {}).items() if name not in ("metadata", "type")}
        texts = [name for name, kind in own.items() if kind.get("type") == "string"]
        self._mcp = not own or {"tool_name", "arguments"} <= own.keys()
        if self._mcp:
            listed = (await self._asked("step", {"type": "list_tools"}))["observation"]["tools"]
            self.tools = [function(one["name"], one["description"], one["input_schema"]) for one in listed]
        elif len(texts) == 1 and {*schema.get("required", own)} <= {*texts}:
            self._field = texts[0]
        else:
            properties = {"properties": own, "required": [name for name in schema.get("required", ()) if name in own]}
            self.tools = [function("step", schema.get("description", ""), schema | properties)]
        return _text(data["observation"])

    async def step(self, message: Mapping[str, Any]) -> tuple[Any, float | None, bool]:
        """Takes the message as an action, or each of its calls; a message without a call ends an episode with tools."""
        if self._field:
            data = await self._asked("step", {self._field: message["content"]})
            return _text(data["observation"]), data["reward"], data["done"]
        seen, rewards, done = [], [], not message.get("tool_calls")
        for call in message.get("tool_calls", ()):
            name, action = call["function"]["name"], arguments(call["function"]["arguments"])
            if action is None or name not in [tool["function"]["name"] for tool in self.tools]:
                text = f"error: must be a call of a tool with a JSON object of arguments, got {name!r:.80}"
            else:
                named = {"type": "call_tool", "tool_name": name, "arguments": action}
                data = await self._asked("step", named if self._mcp else action)
                text, done = _text(data["observation"]), done or data["done"]
                rewards += [] if data["reward"] is None else [data["reward"]]
            seen.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
            if done:
                break
        return seen, sum(rewards) if rewards else None, done

    async def close(self) -> None:
        """Ends the session, for which the server may have room for one alone."""
        if self._socket:
            await self._socket.close()
        await self._server.close()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a message: {"observation", "reward", "done"}, also to an action that the server refuses. The
        protocol's reward of a step without one is null.

        Raises:
          ServerError: it closed the connection, or its answer is no JSON.
          RuntimeError: an error of the server, or of its environment.
          ValueError: an answer that the protocol does not have.
        """
        assert self._socket, "reset comes first"
        url = self._server.url
        await self._socket.send_json({"type": kind, "data": data})
        reply = await self._socket.receive()
        if reply.type != aiohttp.WSMsgType.TEXT:
            raise ServerError(f"{url} must answer, and closed the connection instead")
        answer = self._server.parsed("ws", reply.data)
        named = answer.get("type") if isinstance(answer, dict) else None
        told = answer.get("data") if named in ("observation", "error") else None
        if not isinstance(told, dict):
            raise ValueError(f"{url} must answer with an observation or an error, got {shown(answer)}")
        if named == "observation":
            if not {"observation", "reward"} <= told.keys() or not isinstance(told.get("done"), bool):
                raise ValueError(f"{url}: an observation must have observation, reward and done, got {shown(told)}")
            reward = None if told["reward"] is None else reported_number(told["reward"], url)
            return {"observation": told["observation"], "reward": reward, "done": told["done"]}
        if told.get("code") == "VALIDATION_ERROR" and kind == "step":
            refused = json.dumps(told.get("errors", told.get("message")))
            return {"observation": f"error: {refused}", "reward": None, "done": False}
        advice = "; start it with a max_concurrent_envs of at least the episodes that run at the same time"
        full = told.get("code") == "CAPACITY_REACHED"
        raise RuntimeError(f"{url}: {told.get('message')} ({told.get('code')}){advice if full else ''}")


def _text(observation: Any) -> str:
    """An observation as a text: its only field, if that is one, else its fields as JSON."""
    if isinstance(observation, Mapping):
        if isinstance(result := observation.get("result"), Mapping) and result.get("data") is not None:
            return _text(result["data"])  # of an MCP tool, which also has it as parts and as structured content
        hidden = ("metadata", "reward", "done", "tool_name")
        observation = {name: x for name, x in observation.items() if name not in hidden and x is not None}
        observation = next(iter(observation.values())) if len(observation) == 1 else observation
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
