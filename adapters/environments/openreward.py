"""Environment servers of OpenReward (the Open Reward Standard), over HTTP: nothing of one runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...rollout.errors import ServerError
from ...rollout.processes.printable import one_line, shown
from ...rollout.rewards.signatures import reported_number
from . import arguments, function
from .server import Server

MOST = 1_000_000  # tasks of a split
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
        self._server, self._variant = Server(name), variant
        self.tools: list[dict[str, Any]] = []

    @staticmethod
    def rows(
        split: str, name: str, *, variant: str = "", train_split: str = "train", eval_split: str = "test"
    ) -> Iterable[dict]:
        """{"variant", "split", "index"} of each task. Raises ValueError if the server does not know how many."""
        given = train_split if split == "train" else eval_split
        try:
            with ThreadPoolExecutor(1) as pool:  # whose thread has no event loop yet
                variant, count = pool.submit(asyncio.run, _tasks(name, variant, given)).result()
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"openreward: {name}: no tasks of the split {given}: {one_line(error)}") from error
        return [{"variant": variant, "split": given, "index": n} for n in range(count)]

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begins a session with the row's task."""
        self._variant = row["variant"]
        events = dict(await self._server.events("create_session", None, begins=True))
        if not events.get("task_id"):
            raise ServerError(f"{self._server.url}/create_session must name a session, got {shown(events)}")
        self._server.headers = {"X-Session-ID": events["task_id"].strip()}
        task = {"env_name": self._variant, "split": row["split"], "index": row["index"]}
        await self._server.json("POST", "create", task)
        listed = await self._server.json("GET", f"{self._variant}/task_tools")
        self.tools = [
            function(one["name"], one["description"], one.get("input_schema") or NOTHING) for one in listed["tools"]
        ]
        self._terminal = listed.get("terminal_tool")
        return [_message(one) for one in await self._server.json("GET", f"{self._variant}/messages")]

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
        try:
            if self._server.headers:
                await self._server.json("POST", "delete")
                await self._server.json("POST", "delete_session")
        finally:
            await self._server.close()

    async def _called(self, name: str, given: Any) -> tuple[Any, float | None, bool]:
        """What a tool shows, its reward, and whether it ended the episode; an error is for the policy to read."""
        if given is None:
            return "error: arguments must be a JSON object", None, False
        path = f"{self._variant}/call"
        events = await self._server.events(path, {"name": name, "input": given})
        if failed := [data for event, data in events if event == "error"]:
            raise RuntimeError(f"{self._server.url}: the tool {name} failed: {failed[0]:.500}")
        text = "".join(data for event, data in events if event in ("chunk", "end"))
        result = self._server.parsed(path, text)
        if isinstance(result, dict) and result.get("ok") is False and isinstance(result.get("error"), str):
            return f"error: {result['error']}", None, False
        return _output(f"{self._server.url}/{path}", result)


async def _tasks(name: str, variant: str, split: str) -> tuple[str, int]:
    """The environment, a server's first unless it is named, and the number of its tasks in a split."""
    server = Server(name)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            variant = variant or (await server.json("GET", "list_environments"))[0]
            count = (await server.json("POST", f"{variant}/num_tasks", {"split": split}))["num_tasks"]
    except TimeoutError as error:
        raise ValueError(f"no answer in {TIMEOUT_S:g} s") from error
    finally:
        await server.close()
    if type(count) is not int or not 0 <= count <= MOST:
        raise ValueError(f"num_tasks must be a number up to {MOST:,}, got {count!r:.80}")
    return variant, count


def _output(where: str, result: Any) -> tuple[Any, float | None, bool]:
    """What a call that succeeded shows, its reward, and whether the episode ended. Raises ValueError for anything else;
    also for an end without a reward, for which the protocol has null if there is none."""
    output = result.get("output") if isinstance(result, dict) and result.get("ok") is True else None
    output = output if isinstance(output, dict) else {}
    reward, finished, blocks = output.get("reward"), output.get("finished", False), output.get("blocks")
    if not (isinstance(blocks, list) and isinstance(finished, bool)) or (finished and "reward" not in output):
        rule = "must answer with ok, and with blocks, finished and reward, or with an error"
        raise ValueError(f"{where} {rule}, got {shown(result)}")
    return _parts(blocks), None if reward is None else reported_number(reward, where), finished


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
