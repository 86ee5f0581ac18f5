"""Environment servers of OpenReward (the Open Reward Standard), over HTTP: nothing of one runs in this process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from . import arguments, function

NOTHING = {"type": "object", "properties": {}}
TIMEOUT_S = 60.0  # of the requests before a run


class World:
    """One session with a server, whose tools the policy calls.

    Args:
      name: address of the server, such as http://127.0.0.1:8080.
      variant: which of its environments; "" = its first.
      train_split: the split to train on.
      eval_split: the split to evaluate on.
    """

    def __init__(self, name: str, *, variant: str = "", train_split: str = "train", eval_split: str = "test"):
        self._url, self._variant = name.rstrip("/"), variant
        self.tools: list[dict[str, Any]] = []
        self._http: aiohttp.ClientSession | None = None
        self._session: dict[str, str] = {}

    @staticmethod
    def rows(
        split: str, name: str, *, variant: str = "", train_split: str = "train", eval_split: str = "test"
    ) -> Iterable[dict]:
        """{"variant", "split", "index"} of each task. Raises ValueError if the server does not know how many."""
        url, given = name.rstrip("/"), train_split if split == "train" else eval_split
        try:
            variant = variant or _asked(f"{url}/list_environments")[0]
            count = _asked(f"{url}/{variant}/num_tasks", {"split": given})["num_tasks"]
            return [{"variant": variant, "split": given, "index": n} for n in range(count)]
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
            raise ValueError(
                f"openreward: {url}: no tasks of the split {given}: {' '.join(str(detail).split())}"
            ) from error

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins a session with the row's task."""
        self._http, self._variant = aiohttp.ClientSession(), row["variant"]
        async for event, data in self._events("create_session", None):
            if event == "task_id":
                self._session = {"X-Session-ID": data.strip()}
        task = {"env_name": self._variant, "split": row["split"], "index": row["index"]}
        await self._answer("POST", "create", task)
        listed = await self._answer("GET", f"{self._variant}/task_tools")
        self.tools = [
            function(one["name"], one["description"], one.get("input_schema") or NOTHING) for one in listed["tools"]
        ]
        self._terminal = listed.get("terminal_tool")
        return [_message(one) for one in await self._answer("GET", f"{self._variant}/messages")]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """Calls the tools that the message calls; one without a call goes to the server's terminal tool, if it has one,
        and ends the episode."""
        seen, rewards, done = [], [], False
        calls = message.get("tool_calls") or []
        for call in calls:
            given = arguments(call["function"]["arguments"])
            parts, reward, ended = await self._called(call["function"]["name"], given)
            seen.append(
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": parts}
            )
            rewards += [] if reward is None else [reward]
            done = done or ended
        if not calls:
            done = True
            if self._terminal:
                arg = self._terminal.get("arg")
                _, reward, _ = await self._called(self._terminal["name"], {arg: message["content"]} if arg else {})
                rewards += [] if reward is None else [reward]
        return seen, sum(rewards) if rewards else None, done

    async def close(self) -> None:
        if self._http:
            try:
                if self._session:
                    await self._answer("POST", "delete")
                    await self._answer("POST", "delete_session")
            finally:
                await self._http.close()

    async def _called(self, name: str, given: Any) -> tuple[Any, float | None, bool]:
        """What a tool shows, its reward, and whether it ended the episode; an error is for the policy to read."""
        if given is None:
            return "error: arguments must be a JSON object", None, False
        text = ""
        async for event, data in self._events(f"{self._variant}/call", {"name": name, "input": given}):
            if event == "error":
                raise RuntimeError(f"{self._url}: the tool {name} failed: {data[:500]}")
            text += data if event in ("chunk", "end") else ""
        result = json.loads(text)
        if not result["ok"]:
            return f"error: {result['error']}", None, False
        output = result["output"]
        return _parts(output["blocks"]), output.get("reward"), output.get("finished", False)

    async def _answer(self, method: str, path: str, content: Any = None) -> Any:
        assert self._http
        how: dict[str, Any] = dict(json=content, headers=self._session, allow_redirects=False)
        async with self._http.request(method, f"{self._url}/{path}", **how) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{self._url}/{path}: {reply.status} {(await reply.text())[:500]}")
            return await reply.json()

    async def _events(self, path: str, content: Any) -> AsyncIterator[tuple[str, str]]:
        """The server-sent events of a request: (event, data)."""
        assert self._http
        how: dict[str, Any] = dict(json=content, headers=self._session, allow_redirects=False, read_bufsize=2**20)
        async with self._http.post(f"{self._url}/{path}", **how) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{self._url}/{path}: {reply.status} {(await reply.text())[:500]}")
            event, data = "", list[str]()
            async for raw in reply.content:
                line = raw.decode().rstrip("\r\n")
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "event":
                    event = value
                elif field == "data":
                    data.append(value)
                elif not line and event:
                    yield event, "\n".join(data)
                    event, data = "", []


def _asked(url: str, content: Any = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.load(reply)


def _message(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": one["role"], "content": _parts(one["blocks"])}


def _parts(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """Blocks as the content of a message: a text, or with images a list of parts."""
    if unknown := {block["type"] for block in blocks} - {"text", "image"}:
        raise ValueError(f"blocks must be texts or images here, got {', '.join(sorted(unknown))}")
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]} if block["type"] == "text" else
        {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
        for block in blocks
    ]  # fmt: skip
