"""Agents of agent-lightning, which call the model themselves. Their tasks are the rows of `--data`."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Mapping
from typing import Any

from ...rollout import object_path
from . import library

EMITTED: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("EMITTED")  # spans of the episode


class Agent:
    """Runs an agent, a `LitAgent`, on its tasks.

    Args:
      name: object path of the agent: a function with agent-lightning's `@rollout`, an object, or a class.
      options: arguments of the class.

    Raises:
      ValueError: it is no agent, or takes no options.
    """

    def __init__(self, name: str, **options: Any):
        self._library = library("agentlightning", "agentlightning")
        made = object_path.load_object(name)
        if isinstance(made, type):
            made = made(**options)
        elif options:
            raise ValueError(f"agentlightning: only a class takes options, got {', '.join(options)} for {name}")
        if not isinstance(made, self._library.LitAgent):
            rule = "must be a LitAgent, or a function with agentlightning's @rollout"
            raise ValueError(f"agentlightning: {name} {rule}, got {type(made).__name__}")
        self._agent, self.tracer = made, _tracer()
        made.set_runner(self)  # that an agent may ask for its tracer

    @staticmethod
    def rows(split: str, name: str, **options: Any) -> list[dict]:
        """Raises ValueError: an agent has no tasks of its own."""
        raise ValueError(f"agentlightning: tasks of {name} are rows of a file; give one as --data, or --heldout FILE")

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str, session_id: str) -> dict[str, float]:
        """Runs the agent on a task, in a thread unless it is a coroutine.

        Returns:
          The reward that it returned, or else emitted last, and its other dimensions.

        Raises:
          ValueError: it did neither.
        """
        spans: list[Any] = []
        EMITTED.set(spans)
        resources = {"main_llm": self._library.LLM(endpoint=base_url, model="areax", api_key=api_key)}
        now = time.time()
        attempt = self._library.Attempt(rollout_id=session_id, attempt_id=session_id, sequence_id=1, start_time=now)
        rollout = self._library.AttemptedRollout(
            rollout_id=session_id, input=row, start_time=now, mode="train", attempt=attempt
        )
        if self._agent.is_async():
            made = await self._agent.training_rollout_async(row, resources, rollout)
        else:
            made = await asyncio.to_thread(self._agent.training_rollout, row, resources, rollout)
        if isinstance(made, int | float):
            return {"reward": float(made)}
        rewards = self._library.find_reward_spans([*spans, *(made if isinstance(made, list) else [])])
        if not rewards:
            raise ValueError(f"must return a reward, or call emit_reward, got {made!r:.80}")
        others = self._library.get_rewards_from_span(rewards[-1])[1:]
        return {one.name: one.value for one in others} | {"reward": self._library.get_reward_value(rewards[-1])}


@functools.cache
def _tracer() -> Any:
    """The tracer of this process, which keeps what an episode emits for it."""
    tracer = library("agentlightning.tracer", "agentlightning")

    class Tracer(tracer.DummyTracer):  # type: ignore[name-defined]
        def create_span(self, *args: Any, **given: Any) -> Any:
            EMITTED.get([]).append(span := super().create_span(*args, **given))
            return span

    tracer.set_active_tracer(own := Tracer())
    return own
