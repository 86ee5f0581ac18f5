"""Resources servers of NeMo Gym, over HTTP: nothing of an environment runs in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...rollout.errors import ServerError
from ...rollout.rewards.signatures import reported
from ..data import datasets
from .server import Server

READ = {"input", "instructions", "tools", "parallel_tool_calls"}
OF_THE_RUN = {  # of a row, but the run decides, or nothing here depends on them
    "background", "include", "max_output_tokens", "model", "service_tier", "store", "stream", "temperature",
    "top_logprobs", "top_p", "user",
}  # fmt: skip


class World:
    """One session with a server; `responses_create_params` of a row has the conversation and the tools.

    Args:
      name: address of the server, such as http://127.0.0.1:8000.
      data: file of rows to train on, as `areax.adapters.data.datasets` reads them.
      heldout: file of rows to evaluate on.
      ignore: fields of `responses_create_params` to go without, such as reasoning; one that is neither read nor
        decided by the run is refused otherwise.
    """

    def __init__(self, name: str, data: str, *, heldout: str = "", ignore: Sequence[str] = ()):
        self._server = Server(name)
        self.tools: list[dict[str, Any]] = []

    @staticmethod
    def rows(split: str, name: str, data: str, *, heldout: str = "", ignore: Sequence[str] = ()) -> Iterable[dict]:
        """The rows of a file. Raises ValueError for one that cannot be played."""
        option, file = ("data", data) if split == "train" else ("heldout", heldout)
        if not file:
            raise ValueError(f'nemo_gym: rows for {split} need "{option}" in --env-options, a file, got {file!r}')
        rows = []
        for row, place in datasets.placed(file):
            try:
                _conversation(row, ignore)
            except ValueError as error:
                raise ValueError(f"nemo_gym: {place}: {error}") from error
            except (AttributeError, KeyError, TypeError) as error:
                told = f"input must be items of OpenAI's Responses ({type(error).__name__}: {error})"
                raise ValueError(f"nemo_gym: {place}: {told}") from error
            rows.append(row)
        return rows

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins a session of the row."""
        self._row, self._said = dict(row), list[dict[str, Any]]()
        asked = row["responses_create_params"]
        self._one = asked.get("parallel_tool_calls") is False
        self.tools = [{"type": "function", "function": {
            key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
        }} for tool in asked.get("tools") or ()]  # fmt: skip
        await self._server.json("POST", "seed_session", row, begins=True)
        return _conversation(row, list(asked))

    async def step(self, message: Mapping[str, Any]) -> tuple[Any, dict[str, float] | None, bool]:
        """Calls the tools that the message calls; a message without a call is verified and ends the episode."""
        calls, seen = message.get("tool_calls") or [], []
        self._said += _items(message, len(self._said))
        for n, call in enumerate(calls):
            told = "error: only one call at a time" if self._one and n else await self._called(**call["function"])
            seen.append({"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": told})
            self._said.append({"type": "function_call_output", "call_id": call["id"], "output": told})
        return (seen, None, False) if calls else ("", await self.stop(), True)

    async def stop(self) -> dict[str, float]:
        """The server's reward for what was said, and its other numbers. Raises ValueError if it gives no reward."""
        asked = self._row["responses_create_params"]
        response = {
            "id": "resp_0", "object": "response", "created_at": 0, "model": "policy", "status": "completed",
            "output": self._said, "tools": asked.get("tools") or [], "tool_choice": "auto",
            "parallel_tool_calls": not self._one,
        }  # fmt: skip
        answer = await self._server.json("POST", "verify", {**self._row, "response": response})
        numbers = reported(answer, f"{self._server.url}/verify")
        return {name: x for name, x in numbers.items() if name == "reward" or name not in self._row}

    async def close(self) -> None:
        await self._server.close()

    async def _called(self, name: str, arguments: str) -> str:
        """What the server answers to a call. Its errors are the policy's to read if they are JSON, as it writes what a
        tool raised; others are not its own."""
        if name not in [tool["function"]["name"] for tool in self.tools]:
            return f"error: must be a call of a tool, got {name!r:.80}"
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments must be a JSON object ({type(error).__name__})"
        status, text = await self._server.text("POST", name, given)
        if status != 200:
            try:
                self._server.parsed(name, text)
            except ServerError as error:
                raise RuntimeError(f"HTTP {status} of {error}") from None
        return text


def _conversation(row: Mapping[str, Any], ignore: Iterable[str]) -> list[dict[str, Any]]:
    """The messages of a row in OpenAI's format for chats.

    Raises:
      ValueError: it has none, or asks for what cannot be done.
    """
    asked = row.get("responses_create_params")
    if not isinstance(asked, Mapping) or not asked.get("input"):
        raise ValueError("must have responses_create_params with an input")
    for name, value in asked.items():
        if name in READ | OF_THE_RUN | {*ignore} or not value or (name, value) == ("tool_choice", "auto"):
            continue
        raise ValueError(
            f"{name} = {value!r:.80} is not supported; to drop it, set the option ignore, such as {[name]}"
        )
    messages = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    given = asked["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        match item.get("type") or "message":
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"])})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
            case other:
                raise ValueError(f"input must be messages, calls and their outputs, got {other}")
    return messages


def _text(content: Any) -> str:
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if strange := [part["type"] for part in parts if part["type"] not in ("input_text", "output_text")]:
        raise ValueError(f"input must be texts, got {strange[0]}")
    return "".join(part["text"] for part in parts)


def _items(message: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """A message of the policy as items of OpenAI's Responses."""
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{count}", "summary": summary})
    if message.get("content") or not message.get("tool_calls"):
        said = {"type": "output_text", "text": message.get("content") or "", "annotations": list[str]()}
        own = {"id": f"msg_{count}", "role": "assistant", "status": "completed", "content": [said]}
        items.append({"type": "message", **own})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]})
    return items
