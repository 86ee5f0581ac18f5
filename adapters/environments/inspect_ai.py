"""Tasks of inspect-ai, whose solvers call the model themselves: agents, not worlds.

A process can have one evaluation of inspect-ai at a time. It runs in a thread, to which agents add tasks, and to these
samples, one for each episode, as an epoch with a number of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import math
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...rollout import object_path
from . import is_too_long, library

MODEL = "areax/policy"
MOST = 10_000  # samples and requests at the same time: the run limits its episodes
GRADES, WORDS = {"C", "I", "P", "N"}, {"yes", "no", "true", "false"}  # that inspect-ai reads as numbers
NUMBERS = itertools.count(1)  # of tasks and epochs
PLAYING: dict[int, _Playing] = {}
SESSIONS: dict[int, str] = {}  # by epoch
SESSION: contextvars.ContextVar[str] = contextvars.ContextVar("SESSION")  # of the sample that runs


class Agent:
    """Plays the samples of a task.

    Args:
      name: object path of a function with `@task`.
      eval: options for evaluation, in place of those of the same names; a task needs them to be evaluated on.
      model_roles: models besides the policy, by role, as of `inspect eval --model-role`.
      options: arguments of the task.
    """

    def __init__(
        self, name: str, *, eval: Mapping[str, Any] | None = None, model_roles: Mapping[str, Any] | None = None,
        **options: Any,
    ):  # fmt: skip
        self._load = lambda split: _made(name, options, eval, split)
        self._roles, self._lock = model_roles, asyncio.Lock()
        self._playing: dict[str, _Playing] = {}

    @staticmethod
    def rows(
        split: str, name: str, *, eval: Mapping[str, Any] | None = None, model_roles: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[dict]:  # fmt: skip
        """{"split", "index"} of each sample."""
        return [{"split": split, "index": n} for n in range(len(_made(name, options, eval, split)[1]))]

    async def run(
        self, row: Mapping[str, Any], base_url: str, session_id: str, admin_key: str, refusal: Callable[[], str]
    ) -> dict[str, float]:
        """Plays a sample.

        Returns:
          Each scorer's value as a number, of which the reward is the first. A prompt of the policy that has become too
          long is its own doing, and worth 0.

        Raises:
          RuntimeError: the sample failed, or the evaluation did.
          ValueError: a scorer gave no score.
        """
        split = row["split"]
        async with self._lock:
            if split not in self._playing or self._playing[split].error:
                task, samples = await asyncio.to_thread(self._load, split)
                self._playing[split] = _Playing(task, samples, self._roles, base_url, admin_key)
        sample = await self._playing[split].played(row["index"], session_id)
        if sample.error and is_too_long(sample.error.message, refusal()):
            return {"reward": 0.0}
        if sample.error:
            raise RuntimeError(sample.error.message)
        values = {name: _number(name, score.value) for name, score in (sample.scores or {}).items()}
        if len(values) < (count := self._playing[split].scorers):
            raise ValueError(
                f"inspect_ai: each of {count} scorers must give a score, got {', '.join(values) or 'none'}"
            )
        return values | {"reward": next(iter(values.values()))}

    async def aclose(self) -> None:
        """Ends its tasks, once their samples have."""
        for playing in self._playing.values():
            playing.feed.end()


class _Feed:
    """Adds something to what runs in a thread with an event loop, by a function that its code may call.

    Attributes:
      next: waits for the next, as inspect-ai does when it has nothing to do; returns None at the end.
    """

    def __init__(self, enqueue: Callable[..., None]):
        self._enqueue, self._over = enqueue, False
        self._running: concurrent.futures.Future[Any] = concurrent.futures.Future()  # its loop and context

    async def next(self) -> list[Any] | None:
        if not self._running.done():
            self._added = asyncio.Event()
            self._running.set_result((asyncio.get_running_loop(), contextvars.copy_context()))
        if not self._over:
            await self._added.wait()
            self._added.clear()
        return None if self._over else []

    def add(self, one: Any, **how: Any) -> None:
        """Adds it, now or when what it is added to has begun."""
        self._call(functools.partial(self._enqueue, one, **how))

    def end(self) -> None:
        self._over = True
        self._call(lambda: None)

    def _call(self, do: Callable[[], None]) -> None:
        def wake() -> None:
            do()
            self._added.set()

        def call(running: concurrent.futures.Future[Any]) -> None:
            loop, context = running.result()
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(wake, context=context)

        self._running.add_done_callback(call)


class _Playing:
    """A task in the evaluation, until its feed ends.

    Attributes:
      error: why it ended before that; None = it has not.
      scorers: how many scores a sample gets.
    """

    def __init__(self, task: Any, samples: Sequence[Any], roles: Any, base_url: str, api_key: str):
        inspect, self._samples, self.scorers = library("inspect_ai", "inspect-ai"), samples, len(task.scorer)
        self.error: Exception | None = None
        self.feed = _Feed(inspect.enqueue_sample)
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}  # by epoch
        server = dict(base_url=base_url, api_key=api_key, max_retries=0)
        model = library("inspect_ai.model", "").get_model(f"openai-api/{MODEL}", memoize=False, **server)
        source = inspect.SampleSource.from_samples([], next_samples=self.feed.next, sample_complete=self._complete)
        number = next(NUMBERS)
        given = dict(model=model, metadata={**(task.metadata or {}), "areax": number})
        PLAYING[number] = self
        _evaluation().add(inspect.task_with(task, dataset=source, **given, **({"model_roles": roles} if roles else {})))

    async def played(self, index: int, session: str) -> Any:
        """Adds a sample; returns what became of it."""
        if self.error:
            raise self.error
        epoch = next(NUMBERS)
        done = self._waiting[epoch] = concurrent.futures.Future()
        SESSIONS[epoch] = session
        self.feed.add(self._samples[index].model_copy(deep=True), epoch=epoch)
        return await asyncio.wrap_future(done)

    def fail(self, error: Exception) -> None:
        self.error = error
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(error)

    async def _complete(self, sample: Any) -> None:
        SESSIONS.pop(sample.epoch)
        done = self._waiting.pop(sample.epoch)
        if not done.cancelled():
            done.set_result(sample)


@functools.cache
def _evaluation() -> _Feed:
    """The evaluation of this process, which ends with it, or by an error: then the next begins."""
    inspect = library("inspect_ai", "inspect-ai")
    _hooks()
    feed, logs = _Feed(inspect.enqueue_task), tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    how: dict[str, Any] = dict(
        model=None, display="none", log_dir=logs.name, log_level="notset", log_samples=False, log_realtime=False,
        log_model_api=False, ctl_server=False, fail_on_error=False, max_samples=MOST, max_tasks=MOST,
        max_connections=MOST, max_retries=0,
    )  # fmt: skip
    keeper = inspect.Task(dataset=inspect.SampleSource.from_samples([], next_samples=feed.next))  # which others follow

    async def task_complete(log: Any) -> None:
        if playing := PLAYING.pop((log.eval.metadata or {}).get("areax", 0), None):
            playing.fail(RuntimeError(f"inspect-ai: {log.error.message if log.error else 'the task has ended'}"))

    def run() -> None:
        told = "the evaluation has ended"
        try:
            inspect.eval(inspect.TaskSource.from_tasks([keeper], task_complete=task_complete), **how)
        except BaseException as error:  # a stranger's code may raise anything
            told = f"{type(error).__name__}: {error}"
        _evaluation.cache_clear()
        logs.cleanup()
        for number in list(PLAYING):
            PLAYING.pop(number).fail(RuntimeError(f"inspect-ai: {told}"))

    threading.Thread(target=run, daemon=True, name="inspect-ai").start()
    return feed


@functools.cache
def _hooks() -> None:
    """Has each sample's requests to the policy go to its episode's session, and none of its scorers'."""
    hooks = library("inspect_ai.hooks", "inspect-ai")

    @hooks.hooks(name="areax", description="sends the requests of a sample to its episode")
    class Sessions(hooks.Hooks):  # type: ignore[name-defined]
        async def on_sample_start(self, data: Any) -> None:
            SESSION.set(SESSIONS[data.summary.epoch])

        async def on_sample_scoring(self, data: Any) -> None:
            SESSION.set("none: a scorer needs a model of its own, by model_roles in --env-options")

        async def on_before_model_generate(self, data: Any) -> None:
            if data.model_name.endswith(MODEL):
                data.config.extra_headers = {**(data.config.extra_headers or {}), "X-Session-ID": SESSION.get()}


def _number(name: str, value: Any) -> float:
    """A scorer's value: a number, or a text as inspect-ai reads it, such as C = 1 and I = 0. Raises ValueError for
    another text, such as a grader's error, which inspect-ai takes for 0."""
    text = value if isinstance(value, str) else ""
    if isinstance(value, int | float) or text in GRADES or text.lower() in WORDS or _is_number(text):
        return library("inspect_ai.scorer", "inspect-ai").value_to_float()(value)
    raise ValueError(f"inspect_ai: the scorer {name} must give a number, or a text such as C, got {value!r:.80}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _made(
    name: str, options: Mapping[str, Any], eval: Mapping[str, Any] | None, split: str
) -> tuple[Any, Sequence[Any]]:
    """A new task of a split, and its samples.

    Raises:
      ValueError: there is none, not with these options, or it has no scorer.
    """
    if split == "eval" and eval is None:
        raise ValueError(
            f"inspect_ai: {name} has no samples for evaluation alone; say in --env-options which they are, with "
            'arguments of the task, as {"eval": {"split": "test"}}'
        )
    try:
        kind = library("inspect_ai", "inspect-ai").Task
        task = object_path.resolve(name)(**{**options, **(eval or {} if split == "eval" else {})})
        if not isinstance(task, kind):
            raise TypeError(f"must be a function with @task, got {type(task).__name__}")
        samples = [
            one if one.id is not None else one.model_copy(update={"id": n}) for n, one in enumerate(task.dataset, 1)
        ]
        if not task.scorer:
            raise ValueError("it has no scorer")
    except Exception as error:  # a stranger's code may raise anything
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"inspect_ai: the task {name} cannot be made: {told}") from error
    return task, samples
