"""Runs unmodified AReaL workflows: provides its request and result types on top of areax's generation.

Change `from areal.api... import X` to `from areax.rollout.workflows.areal import X`, and name the class on the command
line: `--workflow my_workflow.py:MyWorkflow`. Names and fields are AReaL's (arXiv:2505.24298).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import object_path, rewards
from ..types import Finish, Generate, Sample, Sampling, Workflow


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
        """Returns a dict of arrays or tensors [rows, T]: input_ids, loss_mask, logprobs, versions and attention_mask,
        with rewards [rows]; None rejects the episode."""


class InferenceEngine:
    """The engine with which an episode generates."""

    def __init__(self, generate: Generate):
        self._generate = generate
        self._version = 0
        self.temperatures: set[float] = set()
        self.finishes: dict[tuple[int, ...], Finish] = {}  # by all tokens of a request

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
        self.finishes[(*req.input_ids, *done.tokens)] = done.finish
        return ModelResponse(
            input_tokens=list(req.input_ids), output_tokens=done.tokens, output_logprobs=done.logp,
            output_versions=done.version, stop_reason=done.finish, latency=time.monotonic() - began,
            tokenizer=req.tokenizer,
        )  # fmt: skip

    def get_version(self) -> int:
        """The newest version that sampled tokens of this episode."""
        return self._version


class AsyncRewardWrapper:
    """Wraps a reward `fn(prompt, completions, prompt_ids, completion_ids, **data)` as a coroutine function; a plain
    function runs in a thread. After `timeout_seconds` the reward is unscorable, NaN."""

    def __init__(self, reward_fn: Callable | str, timeout_seconds: float = 15.0, **_):
        self._function = object_path.resolve(reward_fn) if isinstance(reward_fn, str) else reward_fn
        self._timeout_s = timeout_seconds

    async def __call__(self, *arguments, **data) -> float:
        function = self._function
        called = function if inspect.iscoroutinefunction(function) else _threaded(function)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await called(*arguments, **data)
        except TimeoutError:
            return float("nan")


def _threaded(function: Callable) -> Callable:
    return lambda *arguments, **data: asyncio.to_thread(function, *arguments, **data)


def concat_padded_tensors(results: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Concatenates results of several episodes, padding rows with zeros to the longest."""
    width = max(np.asarray(x).shape[1] for result in results for x in result.values() if np.ndim(x) > 1)
    pad = lambda x: x if x.ndim < 2 else np.pad(x, ((0, 0), (0, width - x.shape[1])))
    return {name: np.concatenate([pad(np.asarray(result[name])) for result in results]) for name in results[0]}


def workflow(made: RolloutWorkflow, tokenizer: Any) -> Workflow:
    """Wraps an AReaL workflow as one of ours. A row's finish is that of the request it ends with."""

    decode = lambda tokens: tokenizer.decode(tokens.tolist())

    async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
        engine = InferenceEngine(generate)
        result = await made.arun_episode(engine, dict(row))
        if result is None:
            return None
        if len(engine.temperatures) != 1:
            raise ValueError(
                f"{type(made).__name__}: an episode must be sampled at one temperature, got "
                f"{sorted(engine.temperatures)}"
            )
        rows = samples(result, engine.temperatures.pop(), row)
        return [
            sample.replace(
                finish=engine.finishes.get(tuple(sample.tokens.tolist()), "stop"),
                info={**sample.info, "prompt": decode(sample.tokens[:start]), "text": decode(sample.tokens[start:])},
            )
            for sample in rows
            for start in [int(sample.mask.argmax())]
        ]

    return episode


def samples(result: Mapping[str, Any], temperature: float, row: Mapping[str, Any]) -> list[Sample]:
    """Converts an episode's result to samples, one per row.

    Raises:
      ValueError: an entry is missing, or its shape does not match input_ids.
    """
    needed = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
    if missing := [name for name in needed if name not in result]:
        raise ValueError(f"an episode's result must have {', '.join(needed)}, but lacks {', '.join(missing)}")
    ids_RT = np.asarray(result["input_ids"])
    valid_RT = np.asarray(result.get("attention_mask", np.ones_like(ids_RT))).astype(bool)
    reward_R = np.asarray(result["rewards"], np.float64).reshape(-1)
    arrays = {name: np.asarray(result[name]) for name in ("loss_mask", "logprobs", "versions")}
    for name, array in {**arrays, "attention_mask": valid_RT}.items():
        if array.shape != ids_RT.shape or ids_RT.ndim != 2:
            raise ValueError(f"an episode's {name} must be [rows, T] as input_ids {ids_RT.shape}, got {array.shape}")
    if len(reward_R) != len(ids_RT):
        raise ValueError(f"an episode's rewards must be one per row, got {len(reward_R)} for {len(ids_RT)} rows")
    rows = []
    for i, valid_T in enumerate(valid_RT):
        mask = arrays["loss_mask"][i][valid_T].astype(bool)
        tokens = ids_RT[i][valid_T].astype(np.int32)
        rows.append(
            Sample(
                tokens=tokens, mask=mask,
                logp=np.where(mask, arrays["logprobs"][i][valid_T], 0).astype(np.float32),
                version=np.where(mask, arrays["versions"][i][valid_T], -1).astype(np.int32),
                turn=np.zeros(len(tokens), np.int32), temperature=temperature,
                rewards=((len(tokens) - 1, float(reward_R[i])),), info={"row": row},
            )
        )  # fmt: skip
    return rows


def settings(sampling: Sampling) -> GenerationHyperparameters:
    """Converts sampling parameters to AReaL's."""
    return GenerationHyperparameters(
        max_new_tokens=sampling.max_new_tokens, min_new_tokens=sampling.min_new_tokens,
        greedy=sampling.temperature == 0, top_p=sampling.top_p, top_k=sampling.top_k,
        temperature=sampling.temperature or 1.0, stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids),
    )  # fmt: skip


def signature(reward: Callable) -> Callable:
    """Wraps our reward `(text, row)` in AReaL's signature (prompt, completions, prompt_ids, completion_ids, **row)."""

    async def fn(prompt, completions, prompt_ids, completion_ids, /, **row) -> float:
        value = await reward(completions, row, prompt=prompt, prompt_ids=prompt_ids, completion_ids=completion_ids)
        return rewards.score(value).value

    return fn
