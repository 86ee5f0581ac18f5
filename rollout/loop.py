"""The training loop: who waits for whom, for any update, any data and any way of publishing.

    state v: publish(v), save(v) -> host copies -> groups of batch v -> update -> state v + 1
                  `- in the background: push to the servers -> admit(v) -> evaluate(v)

With eta = 0 the background is waited for, so that every token of batch v comes from version v. With eta > 0 the push
and the evaluation of v run beside the update that makes v + 1; the push of v + 1 waits for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from . import events

Push = Callable[[], Awaitable[Any]]
PARTS = ("publish_s", "save_s", "wait_s", "rollout_s", "update_s")  # of a step, one after the other
BESIDE = ("push_s", "evaluate_s")


async def run(
    next_groups: Callable[[int], Awaitable[Any]],
    update: Callable[[Any], Any],
    publish: Callable[[int], Push] | None = None,
    save: Callable[[int, Any], Any] | None = None,
    evaluate: Callable[[int], Awaitable[Any]] | None = None,
    *,
    eta: int,
    steps: int,
    start: int = 0,
    admit: Callable[[int], Any] = lambda v: None,
    cursor: Callable[[], Any] = lambda: None,
    save_every: int = 0,
    evaluate_every: int = 0,
    on_step: Callable[[int, Any, dict[str, float]], Any] = lambda v, result, seconds: None,
) -> dict[str, float]:
    """Goes from version `start` to version `steps`, one `update` a version.

    `update`, `publish` and `save` are plain functions, run one at a time in a thread and always to their end, so that
    `update` may donate its buffers; the rest runs on the event loop. The last state is always published
    and saved. When the run is cancelled (Ctrl-C) or something else than `update` fails, the newest state is saved
    too, before the error goes on.

    Args:
      next_groups: the batch that takes version v to v + 1 (`Executor.batch`).
      update: consumes it; its result goes to `on_step`.
      publish: takes a host copy of state v and returns a coroutine function that brings it to the servers.
      save: writes state v, or a host copy of it, with the cursor that belongs to it.
      evaluate: a coroutine function; version v stays on the servers until it is done.
      eta: 0 = push and evaluation end before the next batch is asked for.
      steps: the version to end with.
      start: the version that `update` begins with, which is published first.
      admit: told when the servers have version v (`Executor.admit`).
      cursor: where the data stands (`Executor.cursor`), asked for when a batch was handed out.
      save_every: versions between two saves; 0 = the last state only.
      evaluate_every: versions between two evaluations, version `start` and the last one included; 0 = none at all.
      on_step: called with (v + 1, update's result, seconds). `publish_s, save_s, wait_s, rollout_s, update_s` add up
        to `step_s`, where wait_s was spent waiting for the last push and evaluation; `push_s` and `evaluate_s` are
        what those took that ended within the step, beside it if eta > 0.

    Returns:
      The seconds of the whole run, under the same names.
    """
    if not 0 <= start <= steps:
        raise ValueError(f"loop.run: start must lie in 0..steps = {steps}, got {start}")
    seconds, total = (dict.fromkeys((*PARTS, *BESIDE, "step_s"), 0.0) for _ in range(2))
    whole: int | None = start  # the version of the state in hand; None while an update consumes it
    saved, position = start, cursor()  # newest version saved; where the data stands for `whole`
    behind: asyncio.Task | None = None
    now = asyncio.get_running_loop().time
    mark = now()  # when the step began

    @contextlib.contextmanager
    def spent(part: str) -> Iterator[None]:
        began = now()
        try:
            yield
        finally:
            seconds[part] += now() - began
            events.note("part", begun=began, name=part.removesuffix("_s"))

    async def bring(v: int, push: Push | None) -> None:
        if push:
            with spent("push_s"):
                await _to_end(push())
        if v < steps:
            admit(v)
        if evaluate and evaluate_every and (v % evaluate_every == 0 or v in (start, steps)):
            with spent("evaluate_s"):
                await evaluate(v)

    async def settle() -> None:
        if behind:
            with spent("wait_s"):
                await asyncio.wait({behind})
            behind.result()

    async def keep(v: int) -> None:
        nonlocal saved
        if save and v > saved:
            saved = v  # first: a save that failed is not tried again on the way out
            with spent("save_s"):
                await _to_end(asyncio.to_thread(save, v, position))

    def advance(v: int, groups: Any, after: Any) -> Any:
        nonlocal whole, position
        whole = None
        result = update(groups)
        whole, position = v + 1, after
        return result

    def account() -> dict[str, float]:
        nonlocal seconds, mark
        at = now()
        step, seconds = {**seconds, "step_s": at - mark}, dict.fromkeys(seconds, 0.0)
        mark = at
        for name, value in step.items():
            total[name] += value
        return step

    try:
        for v in range(start, steps + 1):
            await settle()
            push = None
            if publish:
                with spent("publish_s"):
                    push = await _to_end(asyncio.to_thread(publish, v))
            behind = asyncio.create_task(bring(v, push))
            if v == steps or (save_every and v % save_every == 0):
                await keep(v)
            if v == steps or eta == 0:
                await settle()
            if v == steps:
                break
            with spent("rollout_s"):
                groups = await _beside(behind, next_groups(v))
            after = cursor()
            with spent("update_s"):
                result = await _to_end(asyncio.to_thread(advance, v, groups, after))
            on_step(v + 1, result, account())
        account()
        return total
    finally:
        try:
            if whole is not None:
                await keep(whole)
        finally:
            if behind:
                await _stop(behind)


async def _to_end(awaitable: Awaitable[Any]) -> Any:
    """Its result; a cancellation of the caller is delivered only when it is done, and its own error before that."""
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.result()
        raise


async def _beside(behind: asyncio.Task, awaitable: Awaitable[Any]) -> Any:
    """Its result, unless `behind` fails first: then that error."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, behind}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            behind.result()
        return await task
    finally:
        await _stop(task)


async def _stop(task: asyncio.Future) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
