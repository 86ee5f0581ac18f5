"""Environments of verifiers, which call the model themselves: agents, not worlds.

Up to verifiers 0.3 an environment is what `load_environment` of a module returns, and its rubric scores episodes; from
0.4 on it is a taskset, whose tasks are played by a program in a process of its own. Either runs in one thread with an
event loop, for all episodes: its code may block, and what it opens belongs to the loop that it was opened in.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import signal
import threading
import types
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import is_too_long, library

LOADING = threading.Lock()
CLOSING_S = 10.0
CONNECT_S = 60.0  # many episodes begin together, and openai's own 5 s are few on a busy machine


class Outcome(dict[str, float]):
    """The reward and the metrics of an episode.

    Attributes:
      state: that of verifiers, until the rubric has scored it.
    """

    state: Any = None


class Agent:
    """Plays tasks of an environment.

    Args:
      name: of the environment: a module with `load_environment`, or a taskset.
      eval: options for evaluation, in place of those of the same names; a taskset needs them to be evaluated on.
      options: arguments of `load_environment`; of a taskset the configuration of its environment, such as {"agent":
        {"max_turns": 4}, "taskset": {"split": "train"}}.
    """

    def __init__(self, name: str, *, eval: Mapping[str, Any] | None = None, **options: Any):
        self._load = functools.partial(_loaded, name, options, eval)
        self._client: Any = None  # of OpenAI, up to 0.3
        self._served: dict[str, _Served] = {}  # by split, from 0.4 on

    @staticmethod
    def rows(split: str, name: str, *, eval: Mapping[str, Any] | None = None, **options: Any) -> Iterable[dict]:
        """{"split", "index"} of each task."""
        _, tasks = _loaded(name, options, eval, split)
        if isinstance(tasks, _Endless):
            return ({"split": split, "index": n} for n in itertools.count())
        return [{"split": split, "index": n} for n in range(len(tasks))]

    async def run(
        self, row: Mapping[str, Any], base_url: str, api_key: str, session_id: str, admin_key: str,
        refusal: Callable[[], str],
    ) -> Outcome:  # fmt: skip
        """Plays the task of the row."""
        env, tasks = await asyncio.to_thread(self._load, row["split"])
        if _has_rubrics():
            return await _elsewhere(self._rollout(env, tasks, row, base_url, api_key))
        return await _elsewhere(self._episode(env, tasks, row, base_url, session_id, admin_key, refusal))

    async def regroup(self, episodes: Sequence[Sequence[Any]]) -> list[Outcome | None] | None:
        """Scores the episodes of a group whose rubric compares them; those that failed stay unscorable."""
        outcomes = [samples[0].info["result"] for samples in episodes]
        waiting = [outcome for outcome in outcomes if outcome is not None and outcome.state is not None]
        if not waiting:
            return None
        env, _ = self._load(episodes[0][0].info["row"]["split"])
        await _elsewhere(_scored(env, waiting))
        return outcomes

    async def aclose(self) -> None:
        """Ends servers of the environment, unless its code blocks."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_elsewhere(self._close()), CLOSING_S)

    async def _close(self) -> None:
        for served in self._served.values():
            await served.end()
        if self._client:
            await self._client.close()

    async def _rollout(self, env: Any, tasks: Any, row: Mapping[str, Any], base_url: str, api_key: str) -> Outcome:
        """An episode of verifiers up to 0.3. An answer that it cannot read, and a prompt that has become too long, are
        the policy's doing, and worth what the rubric says. Groups are scored once they are complete."""
        import openai
        from verifiers.legacy import clients, errors

        if not self._client:
            wait = openai.Timeout(None, connect=CONNECT_S)  # the run ends episodes
            self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=wait)
        client = clients.OpenAIChatCompletionsClient(self._client.copy(api_key=api_key))
        state = await env.rollout(tasks[row["index"]], client, "areax", {})
        error = state.get("error")
        if error is not None and not isinstance(error, errors.InvalidModelResponseError | errors.ToolParseError):
            raise error.__cause__ or error
        outcome = Outcome(reward=0.0)
        outcome.state = state
        if not env.requires_group_rollouts:
            await _scored(env, [outcome])
        return outcome

    async def _episode(
        self, env: Any, tasks: Any, row: Mapping[str, Any], base_url: str, session_id: str, admin_key: str,
        refusal: Callable[[], str],
    ) -> Outcome:  # fmt: skip
        """An episode of verifiers from 0.4 on. It keeps one client for all, with the key of the first, and sends the
        id of the trace with each request: that of the session."""
        import verifiers.v1 as vf

        variable = f"AREAX_API_KEY_{base_url.rpartition(':')[2].partition('/')[0]}"  # programs inherit no "API_KEY"
        os.environ[variable] = admin_key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        begun: list[Any] = []

        def on_trace(trace: Any) -> None:
            if trace.agent.trainable:
                begun.append(trace)
                trace.id = session_id
                if len(begun) > 1:
                    raise ValueError(f"{trace.agent.name} must be run once in an episode, and was again")

        own = await self._served.setdefault(row["split"], _Served(env)).env()
        context = vf.ModelContext("areax", client)
        episode = await own.run_episode(tasks[row["index"]], context, on_trace=on_trace)
        failed = [(trace.agent.trainable, one) for trace in episode.traces if not trace.ok for one in trace.errors]
        for of_policy, error in (*((False, one) for one in episode.errors), *failed):
            if not (of_policy and error.type == "ProviderError" and is_too_long(error.message, refusal())):
                raise RuntimeError(f"{error.type}: {error.message}")
        [trace] = begun
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Outcome(metrics | rewards | {"reward": trace.reward})


class _Served:
    """An environment from 0.4 on with its servers, from the first episode to `end`. One task opens and closes them."""

    def __init__(self, env: Any):
        self._like = env
        self._task: asyncio.Task[None] | None = None

    async def env(self) -> Any:
        if not self._task:
            self._ready, self._end = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._serve())
        return await asyncio.shield(self._ready)  # a cancelled episode must not cancel it

    async def end(self) -> None:
        if self._task:
            self._end.set()
            await self._task

    async def _serve(self) -> None:
        try:
            env = type(self._like)(self._like.config)  # one that nobody else serves
            async with env.serving():
                self._ready.set_result(env)
                await self._end.wait()
        except Exception as error:  # a stranger's code may raise anything
            if self._ready.done():
                raise
            self._ready.set_exception(error)


class _Endless(Sequence):
    """The tasks of a taskset without an end, each made once."""

    def __init__(self, tasks: Iterator[Any]):
        self._rest, self._made, self._lock = tasks, [], threading.Lock()  # type: ignore[var-annotated]

    def __getitem__(self, index: Any) -> Any:
        with self._lock:
            self._made += itertools.islice(self._rest, max(0, index + 1 - len(self._made)))
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)


async def _scored(env: Any, outcomes: Sequence[Outcome]) -> None:
    """Has the rubric of an environment up to 0.3 score episodes, which are a group if it compares them."""
    states = [outcome.state for outcome in outcomes]
    if env.requires_group_rollouts:
        await env.rubric.score_group(states)
    for outcome, state in zip(outcomes, states, strict=True):
        if not env.requires_group_rollouts:
            await env.rubric.score_rollout(state)
        await env.rubric.cleanup(state)
        outcome.update((state["metrics"] or {}) | {"reward": state["reward"]})
        outcome.state = None


def _elsewhere(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """What a coroutine returns that runs in the loop of environments."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_kept(work), _loop()))


async def _kept(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except SystemExit as error:  # it would end the loop
        raise RuntimeError(f"the environment exited ({error.code!r:.80})") from error


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="verifiers").start()
    return loop


def _has_rubrics() -> bool:
    """Whether verifiers is of version 0.3 or older."""
    library("verifiers", "verifiers")
    return importlib.util.find_spec("verifiers.legacy") is not None


def _loaded(name: str, options: Mapping[str, Any], eval: Mapping[str, Any] | None, split: str) -> tuple[Any, Any]:
    """An environment and its tasks of a split, loaded once.

    Raises:
      ValueError: there is none, not with these options, or none that can be trained on.
    """
    given = {**options, **(eval or {})} if split == "eval" else options
    with LOADING:
        try:
            rubrics = _has_rubrics()
            if split == "eval" and eval is None and not rubrics:
                raise ValueError('a taskset has no tasks for evaluation alone; say in --env-options which they are, as '
                                 '{"eval": {"taskset": {"split": "test"}}}')  # fmt: skip
            said = json.dumps(given, sort_keys=True)
            if not rubrics:
                return _taskset(name, said)
            env = _environment(name, said)
            return env, env.get_eval_dataset() if split == "eval" else env.get_dataset()
        except Exception as error:  # a stranger's code may raise anything
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"verifiers: the environment {name} cannot be loaded: {told}") from error


@functools.lru_cache(maxsize=4)
def _environment(name: str, options: str) -> Any:
    """One of verifiers up to 0.3."""
    from verifiers.legacy.envs import environment
    from verifiers.legacy.utils import env_utils

    # It would take these signals, which are the run's, and only in the main thread.
    environment.signal = types.SimpleNamespace(signal=lambda *_: None, SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM)
    return env_utils.load_environment(name, **json.loads(options))


@functools.lru_cache(maxsize=4)
def _taskset(name: str, options: str) -> tuple[Any, Any]:
    """One of verifiers from 0.4 on, on this machine unless the options say otherwise: its default is a cloud.

    Raises:
      ValueError: it trains several agents, or one that is not trained has no client of its own.
    """
    from verifiers.v1.agent import Agents
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.utils import loaders

    given = json.loads(options)
    given["taskset"] = {**given.get("taskset", {}), "id": name}
    for seat, field in loaders.env_config_type(name, given.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig) and field.default.runtime.type == "prime":
            given[seat] = {"runtime": {"type": "subprocess"}, **given.get(seat, {})}
    env = loaders.load_environment(loaders.resolve_env_config(given))
    seats = agent_config_fields(env.config)
    agents = {seat: types.SimpleNamespace(trainable=True, config=config) for seat, config in seats.items()}
    asyncio.run(env.setup(Agents(env.config, lambda seat, _: agents[seat])))  # says who is trained
    trained = [seat for seat in seats if agents[seat].trainable]
    if len(trained) != 1:
        raise ValueError(f"one agent of an episode must be trained, got {', '.join(trained) or 'none'}")
    if away := [seat for seat in seats if seat not in trained and seats[seat].client is None]:
        rule = "an agent that is not trained needs a model of its own; give it in --env-options, as"
        client = {"type": "eval", "base_url": "http://..."}
        raise ValueError(f"{rule} {json.dumps({away[0]: {'model': '...', 'client': client}})}, got none")
    return env, list(env.taskset) if env.taskset.bounded else _Endless(iter(env.taskset))
