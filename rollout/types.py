"""Completions and samples, which rollout produces and training consumes (imports only numpy)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import numpy as np

Finish = Literal["stop", "length", "abort", "error"]
LARGEST_LOGP = 1e-3  # nats: a log-probability is at most 0, up to rounding
SEATS = 64  # most players of an episode
LEAST_LOGP = -1e4  # nats: far below what any model of finite logits gives a token; servers report -inf as -3.4e38


@dataclass(frozen=True)
class Image:
    """An image as the policy sees it; `adapters.data.images.read` makes one of what users have.

    Samples and requests hold the same object, so that the trainer sees the very bytes that the server saw.

    Attributes:
      data: an encoded RGB image (PNG, JPEG or WebP), upright without EXIF.
    """

    data: bytes = field(repr=False)

    def __deepcopy__(self, _: Any) -> Image:
        return self

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the bytes, hexadecimal: its identity in prefix caches and logs."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Completion:
    """The result of one generation request; the three lists have one entry per generated token.

    Attributes:
      tokens: generated ids, the stop token included.
      logp: log-probability (nats) of each token under the temperature-scaled distribution it was drawn from.
      version: policy version that sampled each token, as reported by the server.
      finish: `stop`, `length`, `abort` or `error`.
      text: decoded text if the server has a tokenizer, else "".
      routed: if requested, the experts of every token of prompt and completion except the last,
        i32[n - 1, layers, experts per token].
      info: other fields of the server's report (cached tokens, retractions, seconds).
      sampling_mask: if requested, the ids of the tokens that each token was drawn from, ascending, then -1,
        i32[n, top_k]; `logp` is then that among them.
      top: if requested, the ids of the likeliest tokens at each token's place, i32[n, top_logprobs], and their
        log-probabilities, f32, as `logp`.
    """

    tokens: list[int]
    logp: list[float]
    version: list[int]
    finish: Finish
    text: str = ""
    routed: np.ndarray | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    sampling_mask: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None


class Generated(NamedTuple):
    """The tokens of a completion so far, with log-probabilities and versions as there; no `finish` while it goes on;
    and, if requested, the tokens that each was drawn from, and (ids, log-probabilities) of the likeliest."""

    tokens: list[int]
    logp: list[float]
    version: list[int]
    finish: Finish | None = None
    masks: list[np.ndarray] = []
    top: list[tuple[list[int], list[float]]] = []

    def between(self, start: int, end: int | None = None) -> Generated:
        """Tokens [start, end); None = all from `start` on."""
        finish = self.finish if end is None else None
        of = slice(start, end)
        return Generated(self.tokens[of], self.logp[of], self.version[of], finish, self.masks[of], self.top[of])

    def then(self, more: Generated) -> Generated:
        """These tokens and `more` behind them."""
        joined = self.tokens + more.tokens, self.logp + more.logp, self.version + more.version
        return Generated(*joined, more.finish, self.masks + more.masks, self.top + more.top)


class Record(Protocol):
    """Where the tokens of a `generate` call are recorded. `request` computes a hash of all that they depend on but the
    weights.

    Attributes:
      grows: also before the call has ended.
    """

    grows: bool

    def begun(self, request: Callable[[], str]) -> Generated | None:
        """What a former process recorded of the same request; None = nothing."""

    def keep(self, request: Callable[[], str], made: Generated) -> None:
        """Records the tokens so far, if it is time to."""


@dataclass(frozen=True)
class Sample:
    """One row of training data: a token sequence with per-token arrays, each value at its token's own index.

    Only `pack` shifts to the predicting position. Arrays have length n = len(tokens).

    Attributes:
      tokens: i32[n].
      mask: bool[n], tokens to train on: in RL those the policy sampled (stop token included), in SFT the completion.
      logp: f32[n], behaviour log-probability (nats, temperature-scaled), 0 outside mask.
      version: i32[n], policy version that sampled the token, -1 elsewhere.
      turn: i32[n], conversation turn.
      temperature: the sampling temperature.
      rewards: (index, value) pairs; NaN = unscorable (no gradient, not counted in the baseline).
      components: named components of the reward, for reports and for objectives that use them separately.
      finish: why generation ended.
      group, prompt, sample, rollout: globally unique ids; several rows may share one rollout.
      weight: weight of this row; the rows of one rollout sum to 1.
      seat: number of the player whose answers these are, where one policy plays several in an episode. Each seat of an
        episode is a rollout of its own, compared with those of the same seat.
      pair, label: for preference data: the pair's number, -1 without a pair; label 1 = preferred, 0 = rejected, -1 =
        neither, for a baseline.
      arrays: {name: ("input" | "target", ndarray[n, ...])}, packed with the tokens.
      images: in the order of the tokens that stand for them, each as many as the image has features.
      info: what a workflow reports of it, such as its texts; stays in the process that runs the workflow.
      teacher_prompt: what a teacher reads in place of all tokens before the first learnt one, such as a prompt with the
        answer; () = the same tokens.
      reading: (tokens, span), i32[m] each, of a teacher with another tokenizer: the ids that it reads, and the number
        of the span of each, as in the array `teacher_span`, 0 = none (`chat.cross_tokenizer`); () = its tokenizer is
        the same.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    turn: np.ndarray
    temperature: float = 1.0
    rewards: tuple[tuple[int, float], ...] = ()
    components: Mapping[str, float] = field(default_factory=dict)
    finish: Finish = "stop"
    group: int = 0
    prompt: int = 0
    sample: int = 0
    rollout: int = 0
    weight: float = 1.0
    seat: int = 0
    pair: int = -1
    label: float = 0.0
    arrays: Mapping[str, tuple[Literal["input", "target"], np.ndarray]] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    teacher_prompt: tuple[int, ...] = ()
    reading: tuple[np.ndarray, ...] = ()

    def __post_init__(self):
        n = len(self.tokens)
        for name in ("mask", "logp", "version", "turn"):
            if len(getattr(self, name)) != n:
                raise ValueError(
                    f"Sample: {name} needs one entry per token, got {len(getattr(self, name))} for {n} tokens"
                )
        for index, _ in self.rewards:
            if not 0 <= index < n:
                raise ValueError(f"Sample: a reward index must lie in 0..{n - 1}, got {index}")

    @property
    def reward(self) -> float:
        """The sum of all rewards; NaN if any is unscorable; 0.0 without rewards."""
        return float(sum(value for _, value in self.rewards))

    @property
    def teacher_tokens(self) -> np.ndarray:
        """What a teacher reads, i32[m]: the tokens, with `teacher_prompt`, if any, before the first learnt one; those
        of its `reading`, if its tokenizer is another."""
        if self.reading:
            return self.reading[0]
        if not self.teacher_prompt:
            return self.tokens
        first = int(np.argmax(self.mask[1:])) + 1 if self.mask[1:].any() else len(self.tokens)
        return np.concatenate([np.asarray(self.teacher_prompt, np.int32), self.tokens[first:]])

    def replace(self, **changes) -> Sample:
        return dataclasses.replace(self, **changes)


class SampledLabels(TypedDict, total=False):
    """The fields of a Sample that `sampled` passes on: what the completion does not say itself; `prompt` is an id."""

    components: Mapping[str, float]
    group: int
    prompt: int
    sample: int
    rollout: int
    weight: float
    pair: int
    label: float
    arrays: Mapping[str, tuple[Literal["input", "target"], np.ndarray]]
    images: tuple[Image, ...]
    info: Mapping[str, Any]
    teacher_prompt: tuple[int, ...]


class Labels(SampledLabels, total=False):
    """The fields of a Sample that `supervised` and `demonstration` pass on."""

    temperature: float
    rewards: tuple[tuple[int, float], ...]
    finish: Finish


def supervised(prompt_tokens: Sequence[int], completion_tokens: Sequence[int], **fields: Unpack[Labels]) -> Sample:
    """An SFT sample that trains on the completion, given the prompt."""
    mask = [False] * len(prompt_tokens) + [True] * len(completion_tokens)
    return demonstration([*prompt_tokens, *completion_tokens], mask, **fields)


def demonstration(tokens: Sequence[int], mask: Sequence[bool], **fields: Unpack[Labels]) -> Sample:
    """An SFT sample that trains on the tokens where `mask` is true."""
    n = len(tokens)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        mask=np.asarray(mask, bool),
        logp=np.zeros(n, np.float32),
        version=np.full(n, -1, np.int32),
        turn=np.zeros(n, np.int32),
        **fields,
    )


def sampled(
    prompt_tokens: Sequence[int],
    completion: Completion,
    *,
    temperature: float,
    reward: float = 0.0,
    **fields: Unpack[SampledLabels],
) -> Sample:
    """An RL sample: one completion of a prompt, with its reward at the last token.

    If the completion reports routed experts, they become the array `routed_experts`, -1 at the last token, which the
    sampler never read; its sampling mask becomes `sampling_mask`, -1 at the prompt's tokens; its likeliest tokens and
    their log-probabilities become `sampler_ids` and `sampler_logp`, 0 at the prompt's tokens.
    """
    n, m = len(prompt_tokens) + len(completion.tokens), len(prompt_tokens)

    def padded(value: float, values: Sequence[float], dtype: type) -> np.ndarray:
        array: np.ndarray = np.full(n, value, dtype)
        array[m:] = values
        return array

    if completion.routed is not None:
        routed = np.pad(completion.routed, ((0, 1), (0, 0), (0, 0)), constant_values=-1)
        fields["arrays"] = {**fields.get("arrays", {}), "routed_experts": ("input", routed)}
    if completion.sampling_mask is not None:
        kept = np.pad(completion.sampling_mask, ((m, 0), (0, 0)), constant_values=-1)
        fields["arrays"] = {**fields.get("arrays", {}), "sampling_mask": ("target", kept)}
    if completion.top is not None:
        of_sampler = zip(("sampler_ids", "sampler_logp"), completion.top, strict=True)
        own: Any = {name: ("target", np.pad(x, ((m, 0), (0, 0)))) for name, x in of_sampler}
        fields["arrays"] = {**fields.get("arrays", {}), **own}
    return Sample(
        tokens=np.asarray([*prompt_tokens, *completion.tokens], np.int32),
        mask=np.arange(n) >= m,
        logp=padded(0.0, completion.logp, np.float32),
        version=padded(-1, completion.version, np.int32),
        turn=np.zeros(n, np.int32),
        temperature=temperature,
        rewards=((n - 1, reward),),
        finish=completion.finish,
        **fields,
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: the keyword arguments of `generate`.

    Training needs a temperature above 0, and the full distribution unless it replays the `sampling_mask`: else top_p,
    top_k and min_p are for evaluation, and so is min_new_tokens, which masks stop tokens.

    Attributes:
      temperature: sampling temperature; 0 = greedy.
      max_new_tokens: longest completion in tokens; the stop token counts (max_completion_length in TRL).
      min_new_tokens: shortest completion in tokens; the stop token counts.
      top_p: nucleus sampling: the likeliest tokens up to this total probability; 1 = off.
      top_k: only the k likeliest tokens; -1 = off.
      min_p: only tokens of at least this share of the likeliest token's probability; 0 = off.
      stop: strings that end a completion, in addition to the model's own stop tokens.
      stop_token_ids: token ids that end a completion, in addition to the model's own.
      routed_experts: for MoE models: record the experts each token is routed to and replay them in training.
      sampling_mask: record which tokens top_k, top_p and min_p keep, and train on the distribution over these alone;
        needs a top_k, the most tokens that are recorded.
      top_logprobs: record this many of the likeliest tokens at each step, with their log-probabilities, for
        `objective.score_centering`; 0 = none. The paper has 128.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    routed_experts: bool = False
    sampling_mask: bool = False
    top_logprobs: int = 0

    def __post_init__(self):
        for name, holds, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "at least 1, or -1 for off"),
            (
                "top_k",
                self.top_k >= 1 or not self.sampling_mask,
                "at least 1 with sampling_mask, the most tokens that it records, such as 256",
            ),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("top_logprobs", self.top_logprobs >= 0, "at least 0"),
            ("top_logprobs", not self.top_logprobs or not self.sampling_mask, "0 with sampling_mask"),
            ("stop_token_ids", min(self.stop_token_ids, default=0) >= 0, "token ids"),
        ):
            if not holds:
                raise ValueError(f"Sampling: {name} must be {rule}, got {getattr(self, name)}")

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


Generate = Callable[..., Awaitable[Completion]]  # generate(tokens, images=(), **sampling) continues a list of tokens
Workflow = Callable[[Generate, Mapping[str, Any]], Awaitable[Sample | list[Sample] | None]]
