"""Runs unmodified AReaL workflows: provides its request and result types on top of areax's generation.

Change each `from areal... import X` to `from areax.rollout.workflows.areal import X`, and name the class on the command
line: `--workflow my_workflow.py:MyWorkflow`. Names and fields are AReaL's (arXiv:2505.24298).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import logging as logging  # areal.utils has one
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import object_path, rewards
from ..chat import images
from ..errors import WrongSample
from ..processes.printable import shown
from ..types import Completion, Generate, Sample, Sampling, Workflow
from . import workflow_context as workflow_context

ABSENT = {  # what AReaL's workflows import and areax has another way for
    "stats_tracker": "a reward that returns a dict of named parts has a curve for each",
    **dict.fromkeys(
        ("perf_tracer", "trace_perf", "trace_session", "session_context", "atrace_session_phase"),
        "every run is traced: areax report writes trace.json",
    ),
}


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        raise ImportError(f"AReaL's {name} is not here: {ABSENT[name]}; take it out (docs/train-an-agent.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class GenerationHyperparameters:
    """Sampling parameters."""

    n_samples: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    max_tokens: int | None = None
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    ignore_eos: bool = False

    def new(self, **changes) -> GenerationHyperparameters:
        return dataclasses.replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's end-of-text and padding tokens."""
        ids = [*self.stop_token_ids, tokenizer.pad_token_id, tokenizer.eos_token_id]
        return self.new(stop_token_ids=list(dict.fromkeys(id for id in ids if id is not None)))


@dataclass
class ModelRequest:
    """A generation request; `n_samples` of its gconfig must be 1."""

    rid: str = field(default_factory=lambda: str(uuid.uuid4()))
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None


@dataclass
class ModelResponse:
    """The answer to a `ModelRequest`; the three output lists have one entry per generated token."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    latency: float = float("inf")
    tokenizer: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class RolloutWorkflow(Protocol):
    """A workflow, which runs one episode per row of data."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a dict of arrays or tensors, see `samples`; None rejects the episode."""


class InteractionWithTokenLogpReward:
    """For annotations only: a workflow that would return interactions is an agent here (`agents`)."""


class InferenceEngine:
    """The engine with which an episode generates."""

    def __init__(self, generate: Generate):
        self._generate = generate
        self._version = 0
        self.temperatures: set[float] = set()
        self.completions: list[tuple[list[int], Completion]] = []  # prompt and answer of each request

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Continues `input_ids`.

        Raises:
          ValueError: n_samples is not 1, the prompt leaves no room, or the server refuses the request.
        """
        how, began = req.gconfig, time.monotonic()
        budget = how.max_new_tokens
        if how.max_tokens is not None:
            budget = min(budget, how.max_tokens - len(req.input_ids))
        if how.n_samples != 1 or budget <= 0:
            raise ValueError(
                f"agenerate: n_samples must be 1 and leave room for tokens, got {how.n_samples} and {budget} tokens"
            )
        temperature = 0.0 if how.greedy else how.temperature
        self.temperatures.add(temperature)
        done = await self._generate(
            list(req.input_ids), temperature=temperature, max_new_tokens=budget, min_new_tokens=how.min_new_tokens,
            top_p=how.top_p, top_k=how.top_k, stop=tuple(how.stop or ()), stop_token_ids=tuple(how.stop_token_ids),
            ignore_eos=how.ignore_eos,
        )  # fmt: skip
        self._version = max([self._version, *done.version])
        self.completions.append((list(req.input_ids), done))
        return ModelResponse(  # lists of its own, which the workflow may change
            input_tokens=list(req.input_ids), output_tokens=list(done.tokens), output_logprobs=list(done.logp),
            output_versions=list(done.version), stop_reason=done.finish, latency=time.monotonic() - began,
            tokenizer=req.tokenizer,
        )  # fmt: skip

    def get_version(self) -> int:
        """The newest version that sampled tokens of this episode."""
        return self._version


class AsyncRewardWrapper:
    """Wraps a reward `fn(prompt, completions, prompt_ids, completion_ids, **data)` as a coroutine function.

    A plain function runs in worker processes (`rewards.pool`), which import it: it must be at the top level of a module
    or file. An attempt of more than `timeout_seconds` ends with its process; after `max_retries` further attempts the
    reward is unscorable, NaN. A coroutine function runs in the event loop, within the same time. The `reward_fn` that a
    workflow's class is given is the run's reward, whose limits are the run's.

    Args:
      max_workers: number of processes; None = as many as the run's reward has.

    Raises:
      ValueError: workers cannot import the function.
    """

    def __init__(
        self,
        reward_fn: Callable | str,
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 1,
    ):
        self._function = object_path.resolve(reward_fn) if isinstance(reward_fn, str) else reward_fn
        self._timeout_s, self._workers, self._retries = timeout_seconds, max_workers, max_retries
        self._in_loop = isinstance(self._function, RunReward) or inspect.iscoroutinefunction(self._function)
        self._name = "" if self._in_loop else object_path.of(self._function)

    async def __call__(self, *arguments, **data) -> float:
        if isinstance(self._function, RunReward):
            return await self._function(*arguments, **data)
        data = _unambiguous(self._function, arguments, data)
        if self._in_loop:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._function(*arguments, **data)
            except TimeoutError:
                return float("nan")
        async with workflow_context.current() as shared:
            make = functools.partial(
                rewards.pool, self._name, workers=self._workers or shared.workers, timeout_s=self._timeout_s,
                retries=self._retries, environment=shared.environment, as_called=True,
            )  # fmt: skip
            pool = await shared.get(self, make)
            return rewards.whole(await pool.called(*arguments, **data)).value


def _unambiguous(function: Callable, arguments: Sequence, data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without fields named like parameters that `arguments` fill: a row may have a field "prompt"."""
    filled = list(inspect.signature(function).parameters)[: len(arguments)]
    return {name: value for name, value in data.items() if name not in filled}


def concat_padded_tensors(results: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Concatenates results of several episodes, padding rows with zeros to the longest."""
    width = max(np.asarray(x).shape[1] for result in results for x in result.values() if np.ndim(x) > 1)
    pad = lambda x: x if x.ndim < 2 else np.pad(x, ((0, 0), (0, width - x.shape[1])))
    return {name: np.concatenate([pad(np.asarray(result[name])) for result in results]) for name in results[0]}


def workflow(made: RolloutWorkflow, tokenizer: Any) -> Workflow:
    """Wraps an AReaL workflow as one of ours. A row's finish is that of the request it ends with."""

    decode = lambda tokens: tokenizer.decode(tokens.tolist())

    async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
        if images.of_row(row):
            raise ValueError(f"AReaL's workflows read text alone here, got a row with images; {object_path.row(row)}")
        engine, data = InferenceEngine(generate), dict(row)
        if row.get("messages") is None and isinstance(row.get("prompt"), str):
            data["messages"] = [{"role": "user", "content": row["prompt"]}]
        result = await made.arun_episode(engine, data)
        if result is None:
            return None
        if len(engine.temperatures) != 1:
            raise ValueError(
                f"{type(made).__name__}: an episode must be sampled at one temperature, got "
                f"{sorted(engine.temperatures)}"
            )
        rows = samples(result, engine.temperatures.pop(), row, engine.completions)
        finishes = {(*prompt, *done.tokens): done.finish for prompt, done in engine.completions}
        return [
            sample.replace(
                finish=finishes.get(tuple(sample.tokens.tolist()), "stop"),
                info={**sample.info, "prompt": decode(sample.tokens[:start]), "text": decode(sample.tokens[start:])},
            )
            for sample in rows
            for start in [int(sample.mask.argmax())]
        ]

    return episode


def samples(
    result: Mapping[str, Any],
    temperature: float,
    row: Mapping[str, Any],
    completions: Sequence[tuple[list[int], Completion]] = (),
) -> list[Sample]:
    """Converts an episode's result to samples, one per row.

    Args:
      result: `input_ids`, `loss_mask`, `logprobs`, `versions` and optionally `attention_mask`, each [rows, T], or [T]
        for a single row, with `rewards` [rows]. Or `input_ids` and `output_ids`, the prompt and the answer of each row,
        whose mask, log-probabilities and versions are those of the request. `reward` is another name of `rewards`.
      completions: prompt and answer of each request of the episode.

    Raises:
      ValueError: an entry is missing, or its shape does not match input_ids; an answer is that of no request.
      WrongSample: an entry has values of another kind, or tokens that are no ids.
    """
    if not isinstance(result, Mapping):
        raise ValueError(f"an episode's result must be a dict of arrays, got {type(result).__name__}")
    if "reward" in result and "rewards" not in result:
        result = {**result, "rewards": result["reward"]}
    if "output_ids" in result and not {"loss_mask", "logprobs", "versions"} & result.keys():
        result = _whole_rows(result, completions)
    needed = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
    if missing := [name for name in needed if name not in result]:
        raise ValueError(
            f"an episode's result must have {', '.join(needed)}, or input_ids, output_ids and rewards, but lacks "
            f"{', '.join(missing)}"
        )
    try:
        ids_RT = _numbers("input_ids", result["input_ids"], "iu")
        arrays = {
            name: _numbers(name, result.get(name, np.ones_like(ids_RT)), kinds)
            for name, kinds in (
                ("attention_mask", "biuf"), ("loss_mask", "biuf"), ("logprobs", "iuf"), ("versions", "iu"),
            )
        }  # fmt: skip
        reward_R = [rewards.whole(value).value for value in np.asarray(result["rewards"]).reshape(-1).tolist()]
    except ValueError as error:
        raise WrongSample(f"an episode's result cannot be used: {error}; {object_path.row(row)}") from error
    for name, array in arrays.items():
        if array.shape != ids_RT.shape or ids_RT.ndim != 2:
            raise ValueError(f"an episode's {name} must be [rows, T] as input_ids {ids_RT.shape}, got {array.shape}")
    if len(reward_R) != len(ids_RT):
        raise ValueError(f"an episode's rewards must be one per row, got {len(reward_R)} for {len(ids_RT)} rows")
    rows = []
    for i, valid_T in enumerate(arrays["attention_mask"].astype(bool)):
        mask = arrays["loss_mask"][i][valid_T].astype(bool)
        tokens = ids_RT[i][valid_T]
        if not len(tokens):
            raise WrongSample(f"an episode's row must have a token or more, got none; {object_path.row(row)}")
        rows.append(
            Sample(
                tokens=tokens, mask=mask,
                logp=np.where(mask, arrays["logprobs"][i][valid_T], 0),
                version=np.where(mask, arrays["versions"][i][valid_T], -1),
                turn=np.zeros(len(tokens), np.int32), temperature=temperature,
                rewards=((len(tokens) - 1, reward_R[i]),), info={"row": row},
            )
        )  # fmt: skip
    return rows


def _numbers(name: str, value: Any, kinds: str) -> np.ndarray:
    """An entry of a result as [rows, T], numbers of one of these kinds; whole ones, from -1 to 2^31, in int64."""
    try:
        array = np.atleast_2d(np.asarray(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array ({object_path.line(error)})") from error
    what = "whole numbers" if kinds == "iu" else "numbers"
    if array.dtype.kind not in kinds or (array.dtype.kind == "f" and "b" in kinds and np.isnan(array).any()):
        raise ValueError(f"{name} must be {what}, got {array.dtype} {shown(array.reshape(-1)[:3].tolist())}")
    if kinds == "iu":
        low = 0 if name == "input_ids" else -1
        if (bad := (array < low) | (array >= 2**31)).any():
            raise ValueError(f"{name} must lie in [{low}, 2^31), got {array[bad][0]}")
        array = array.astype(np.int64)
    return array


def _whole_rows(result: Mapping[str, Any], completions: Sequence[tuple[list[int], Completion]]) -> dict[str, Any]:
    """A result of prompts and answers as one of whole rows; each takes the first request of just these tokens that no
    row before it took."""
    prompts, answers = (_lists(result.get(name)) for name in ("input_ids", "output_ids"))
    if len(prompts) != len(answers):
        raise ValueError(
            f"an episode's output_ids must be one answer per prompt in input_ids, got {len(answers)} for {len(prompts)}"
        )
    left, rows = list(completions), []
    for prompt, answer in zip(prompts, answers, strict=True):
        at = next((i for i, (asked, done) in enumerate(left) if asked == prompt and done.tokens == answer), None)
        if at is None:
            raise ValueError(
                "an episode's input_ids and output_ids must be the tokens of one of its requests, unpadded, from which "
                f"their log-probabilities are taken, got {len(prompt)} and {len(answer)} tokens that are not; or "
                "return whole rows, with loss_mask, logprobs and versions"
            )
        _, done = left.pop(at)
        n = len(prompt)
        row = {
            "input_ids": [*prompt, *answer], "loss_mask": [0] * n + [1] * len(answer),
            "logprobs": [0.0] * n + done.logp, "versions": [-1] * n + done.version,
            "attention_mask": [1] * (n + len(answer)),
        }  # fmt: skip
        rows.append({name: np.asarray([value]) for name, value in row.items()})
    return {**concat_padded_tensors(rows), **{name: result[name] for name in ("rewards",) if name in result}}


def _lists(ids: Any) -> list[list[int]]:
    """Token ids [T] or [rows, T], of any array type, as lists; rows may differ in length."""
    ids = ids.tolist() if hasattr(ids, "tolist") else [x.tolist() if hasattr(x, "tolist") else x for x in ids or ()]
    return [list(x) for x in ids] if ids and isinstance(ids[0], list) else [ids]


def settings(sampling: Sampling) -> GenerationHyperparameters:
    """Converts sampling parameters to AReaL's."""
    return GenerationHyperparameters(
        max_new_tokens=sampling.max_new_tokens, min_new_tokens=sampling.min_new_tokens,
        greedy=sampling.temperature == 0, top_p=sampling.top_p, top_k=sampling.top_k,
        temperature=sampling.temperature or 1.0, stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids),
    )  # fmt: skip


class RunReward:
    """The run's reward `(text, row)` with AReaL's signature, a coroutine function."""

    def __init__(self, reward: Callable):
        self._reward = reward

    async def __call__(self, prompt, completions, prompt_ids=None, completion_ids=None, /, **row) -> float:
        context = {"prompt": prompt, "prompt_ids": prompt_ids, "completion_ids": completion_ids}
        return rewards.whole(await self._reward(completions, row, **context)).value


def templating(tokenizer: Any) -> Any:
    """The tokenizer with `apply_chat_template` of transformers 4, for which AReaL's workflows are written: token ids,
    not a dict of them."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return tokenizer
    like = copy.copy(tokenizer)
    like.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return like
