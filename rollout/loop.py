"""The training loop: orders rollouts, updates, saves, pushes and evaluations, whatever each of them does.

    state v: publish(v), save(v) -> host copies -> groups of batch v -> update -> state v + 1
                  `- in the background: push to the servers -> admit(v) -> check() -> evaluate(v)

With eta = 0 the loop waits for the background work, so that every token of batch v comes from version v. With eta > 0
the push and the evaluation of v overlap the update to v + 1; the push of v + 1 waits for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from . import events

Push = Callable[[], Awaitable[Any]]
PARTS = ("publish_s", "save_s", "wait_s", "rollout_s", "update_s")  # of a step, sequential
BACKGROUND = ("push_s", "evaluate_s")
PUSH_S = 10.0  # that a push may go on when the loop is to end


async def run(
    next_groups: Callable[[int], Awaitable[Any]],
    update: Callable[[Any], Any],
    publish: Callable[[int], Push] | None = None,
    save: Callable[[int, Any], Any] | None = None,
    evaluate: Callable[[int], Awaitable[Any]] | None = None,
    *,
    check: Callable[[], Awaitable[Any]] | None = None,
    eta: int,
    steps: int,
    start: int = 0,
    admit: Callable[[int], Any] = lambda v: None,
    cursor: Callable[[], Any] = lambda: None,
    save_every: int = 0,
    save_seconds: float = 0,
    evaluate_every: int = 0,
    on_step: Callable[[int, Any, dict[str, float]], Any] = lambda v, result, seconds: None,
) -> dict[str, float]:
    """Trains from version `start` to version `steps`, one `update` per version.

    `update`, `publish` and `save` are plain functions, run one at a time in a thread and never interrupted, so that
    `update` may donate its buffers; the rest runs on the event loop. The last state is always published and saved. If
    the run is cancelled (Ctrl-C) or anything but `update` fails, the newest state is saved before the error is raised.

    Args:
      next_groups: returns the batch that takes version v to v + 1 (`Executor.batch`).
      update: trains on the batch; its result is passed to `on_step`.
      publish: takes a host copy of state v and returns a coroutine function that pushes it to the servers.
      save: writes state v, or a host copy of it, with the matching cursor.
      evaluate: a coroutine function; version v stays on the servers until it returns.
      check: called once the servers take requests of a version, which stays on them until it returns.
      eta: 0 = push and evaluation finish before the next batch is requested.
      steps: the final version.
      start: the version of the initial state, which is published first.
      admit: called once the servers have version v (`Executor.admit`).
      cursor: returns the position in the data (`Executor.cursor`); called when a batch has been handed out.
      save_every: versions between two saves; 0 = only the last state.
      save_seconds: a version is also saved if the last save is this long ago; 0 = never for this reason.
      evaluate_every: versions between two evaluations, in addition to `start` and the last version; 0 = never.
      on_step: called with (v + 1, update's result, seconds). `publish_s, save_s, wait_s, rollout_s, update_s` add up
        to `step_s`, where wait_s is time spent waiting for the last push and evaluation; `push_s` and `evaluate_s` are
        the durations of those that ended within the step, which overlap it if eta > 0.

    Returns:
      The seconds of the whole run, under the same names.
    """
    if not 0 <= start <= steps:
        raise ValueError(f"loop.run: start must lie in 0..steps = {steps}, got {start}")
    seconds, total = (dict.fromkeys((*PARTS, *BACKGROUND, "step_s"), 0.0) for _ in range(2))
    current: int | None = start  # the version of the state; None while an update consumes it
    saved, position = start, cursor()  # newest saved version; the data position that matches `current`
    background: asyncio.Task | None = None
    now = asyncio.get_running_loop().time
    mark = saved_at = now()  # start of the step, and of the last save

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        began = now()
        try:
            yield
        finally:
            seconds[part] += now() - began
            events.emit("part", begun=began, name=part.removesuffix("_s"))

    async def push_and_evaluate(v: int, push: Push | None) -> None:
        if push:
            with timed("push_s"):
                await _uninterrupted(push(), PUSH_S)
        if v < steps:
            admit(v)
        if check:
            await check()
        if evaluate and evaluate_every and (v % evaluate_every == 0 or v in (start, steps)):
            with timed("evaluate_s"):
                await evaluate(v)

    async def wait_for_background() -> None:
        if background:
            with timed("wait_s"):
                await asyncio.wait({background})
            background.result()

    async def save_once(v: int) -> None:
        nonlocal saved, saved_at
        if save and v > saved:
            saved, saved_at = v, now()  # set first: a failed save is not retried on the way out
            with timed("save_s"):
                await _uninterrupted(asyncio.to_thread(save, v, position))

    def end_step() -> dict[str, float]:
        nonlocal seconds, mark
        at = now()
        step, seconds = {**seconds, "step_s": at - mark}, dict.fromkeys(seconds, 0.0)
        mark = at
        for name, value in step.items():
            total[name] += value
        return step

    try:
        for v in range(start, steps + 1):
            await wait_for_background()
            push = None
            if publish:
                with timed("publish_s"):
                    push = await _uninterrupted(asyncio.to_thread(publish, v))
            background = asyncio.create_task(push_and_evaluate(v, push))
            by_time = save_seconds and now() - saved_at >= save_seconds
            if v == steps or by_time or (save_every and v % save_every == 0):
                await save_once(v)
            if v == steps or eta == 0:
                await wait_for_background()
            if v == steps:
                break
            with timed("rollout_s"):
                groups = await _unless_failed(background, next_groups(v))
            after = cursor()
            current, updating = None, asyncio.ensure_future(asyncio.to_thread(update, groups))
            try:
                with timed("update_s"):
                    await _uninterrupted(updating)
            finally:  # also of a step that was interrupted, which is complete: what is saved is reported
                if updating.done() and not updating.exception():  # not done: interrupted twice
                    current, position = v + 1, after
                    on_step(v + 1, updating.result(), end_step())
        end_step()
        return total
    finally:
        try:
            if current is not None:
                await save_once(current)
        finally:
            if background:
                await _stop(background)


async def _uninterrupted(awaitable: Awaitable[Any], seconds: float | None = None) -> Any:
    """Awaits to completion even if the caller is cancelled; the cancellation is raised afterwards, unless it failed.

    Args:
      seconds: after which it is cancelled, too; None = never.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            task.result()
        else:
            await _stop(task)
        raise


async def _unless_failed(background: asyncio.Task, awaitable: Awaitable[Any]) -> Any:
    """The awaitable's result; raises the error of `background` if that fails first."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, background}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            background.result()
        return await task
    finally:
        await _stop(task)


async def _stop(task: asyncio.Future) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
