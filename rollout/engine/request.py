"""Requests to the engine and their progress, without jax: shared by the engine and its server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..types import Image

TOP = 128  # most likeliest tokens reported per position
FEW = 20  # as many as OpenAI's API has: prompts are scored by a program of its own for so many
STOPS = 32  # most stop ids of a request, including the model's
KEPT = 1024  # most tokens of a sampling mask
BIASES = 1024  # most tokens of a logit_bias


@dataclass(frozen=True)
class Grammar:
    """What the generated text must be.

    Attributes:
      kind: of the `text`: "json_schema"; "regex", matched by the whole text; "ebnf" (GBNF, or Lark as llguidance reads
        it); "choice", a JSON list of strings; or "llguidance", a grammar in that library's own JSON.
      field: the request's field that it comes from, for errors.
    """

    kind: str
    text: str
    field: str = field(default="", compare=False)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Log-probabilities are those of softmax(logits / temperature) before penalties, grammars and
    filters; with temperature 0 (greedy) those at temperature 1.

    Attributes:
      top_p, top_k, min_p: filters of the sampling distribution; 1, -1 and 0 disable them.
      max_new_tokens: budget, 0 allowed; min_new_tokens: stop tokens are not sampled before this many tokens.
      stop: strings that end the text; stop_token_ids: ids that do, in addition to the model's unless ignore_eos.
      frequency_penalty, presence_penalty, repetition_penalty, logit_bias: as in `penalties.penalised`; the last as
        (token id, bias) pairs.
      grammar: what the text must be; it ends with a stop token, drawn where the grammar may end.
      seed: token i of the whole sequence is drawn with fold(seed, i); None = the engine's choice.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    seed: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether penalties or biases change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1 or self.logit_bias)

    @property
    def constrained(self) -> bool:
        """Whether tokens are drawn from another distribution than softmax(logits / temperature), whose
        log-probabilities are reported: such samples are not fit for training."""
        filters = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return filters or self.penalised or self.grammar is not None or self.min_new_tokens > 0


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
      rid: the caller's name for it.
      prompt: token ids, at least one.
      input_logprobs_from: prompt index from which to report log-probabilities of the prompt's tokens; None = none.
      top_logprobs: number of likeliest tokens to report per position, for output (and reported input).
      routed_experts: report the experts of each token.
      adapter: name of the adapter to generate with; "" = none.
      images: in the order of their tokens in the prompt, each as often as the image has features.
      sampling_mask: report the tokens that each was drawn from; needs a top_k.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    input_logprobs_from: int | None = None
    top_logprobs: int = 0
    routed_experts: bool = False
    adapter: str = ""
    images: tuple[Image, ...] = ()
    sampling_mask: bool = False


@dataclass
class Progress:
    """The cumulative state of a request; the last one has a `finish`.

    Attributes:
      tokens, logp: generated ids (stop token included) and their log-probabilities.
      versions: (version, start, end) spans that cover `tokens`.
      top: per position, [(logp, id), ...] of the likeliest tokens.
      input_logp, input_top: for the prompt from `input_logprobs_from`; None for the first token of a sequence.
      finish: None while running, else {"type": "stop", "matched": id or string}, {"type": "length", "length": n} or
        {"type": "abort", "message": ...}; with a "status_code" it failed, and the message says why.
      decoded: text of the output without the stop token or string; None if the engine cannot decode.
      routed: if requested, i32[layers, top_k] for each token but the last, -1 in layers without experts.
      masks: if requested, of each token (log-probability among the tokens that it was drawn from, their ids).
      cached_tokens: prompt tokens that were already in the cache.
      retractions: how often the request was requeued.
    """

    rid: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logp: list[float | None] = field(default_factory=list)
    input_top: list[list[tuple[float, int]] | None] = field(default_factory=list)
    routed: list = field(default_factory=list)
    masks: list[tuple[float, list[int]]] = field(default_factory=list)
    finish: dict | None = None
    decoded: str | None = None
    cached_tokens: int = 0
    retractions: int = 0

    @property
    def text(self) -> str:
        """`decoded`. Raises ValueError if the engine cannot decode."""
        if self.decoded is None:
            raise ValueError("Progress.text needs an engine that decodes; make it with Engine(decode=tokenizer.decode)")
        return self.decoded

    def snapshot(self) -> Progress:
        """A copy that later progress does not modify."""
        return Progress(
            self.rid, self.prompt_tokens, self.tokens[:], self.logp[:], self.versions[:], self.top[:],
            self.input_logp[:], self.input_top[:], self.routed[:], self.masks[:], self.finish, self.decoded,
            self.cached_tokens, self.retractions,
        )  # fmt: skip


def check_prompt(prompt: Sequence[int], vocab: int) -> None:
    """Raises ValueError unless each token is in the vocabulary."""
    if problem := _outside("input_ids", prompt, vocab):
        raise ValueError(problem)


def check(request: Request, stops: frozenset[int], vocab: int, context: int, decodes: bool, experts: bool) -> None:
    """Raises ValueError if the request cannot be served; one line, in SGLang's wording where it has any. The tokens of
    its prompt are left to `check_prompt`, once for all samples.

    Args:
      stops: all ids that end it, including the model's.
      vocab, context: sizes of the model, in tokens.
      decodes: whether the engine can convert tokens to text.
      experts: whether the model has experts.
    """
    if problem := _problem(request, stops, vocab, context, decodes, experts):
        raise ValueError(problem)


def too_long(n: int, most: int, context: int) -> str:
    """Why `n` tokens of a prompt and `most` new ones do not fit into a context."""
    if n > context:
        return f"The input ({n} tokens) is longer than the model's context length ({context} tokens)."
    return (
        f"The input ({n} tokens) and max_new_tokens ({most}) are together longer than the model's context length "
        f"({context} tokens)."
    )


def _problem(
    request: Request, stops: frozenset[int], vocab: int, context: int, decodes: bool, experts: bool
) -> str | None:
    s, n = request.sampling, len(request.prompt)
    if request.routed_experts and not experts:
        return "return_routed_experts needs a model with experts, but this one has none."
    if request.sampling_mask and not 1 <= s.top_k <= KEPT:
        return f"return_sampling_mask needs a top_k from 1 to {KEPT}, the most tokens of a mask, got {s.top_k}."
    if request.sampling_mask and not s.temperature > 0:
        return f"return_sampling_mask needs a temperature above 0, got {s.temperature}."
    start = request.input_logprobs_from
    if len(stops) > STOPS:
        return f"stop_token_ids: at most {STOPS} are supported, including the model's."
    if problem := _outside("stop_token_ids", s.stop_token_ids, vocab):
        return problem
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed"):
        value = getattr(s, name)
        if type(value) is not int and not (name == "seed" and value is None):
            return f"{name} must be an integer, got {value!r}."
    if n == 0:
        return "Either text, input_ids or input_embeds should be provided."
    if n > context:
        return too_long(n, 0, context)
    if s.max_new_tokens < 0:
        return f"max_new_tokens must be at least 0, got {s.max_new_tokens}."
    if n + s.max_new_tokens > context:
        return too_long(n, s.max_new_tokens, context)
    if not 0 <= s.min_new_tokens <= s.max_new_tokens:
        return f"min_new_tokens must be from 0 to max_new_tokens ({s.max_new_tokens}), got {s.min_new_tokens}."
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        return f"temperature must be a non-negative finite number, got {s.temperature}."
    if not 0 < s.top_p <= 1:
        return f"top_p must be in (0, 1], got {s.top_p}."
    if not 0 <= s.min_p <= 1:
        return f"min_p must be in [0, 1], got {s.min_p}."
    if not (s.top_k == -1 or 1 <= s.top_k < 2**31):
        return f"top_k must be -1 (off) or at least 1, got {s.top_k}."
    if not (s.seed is None or 0 <= s.seed < 2**64):
        return f"sampling_seed must be from 0 to 2^64 - 1, got {s.seed}."
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= (value := getattr(s, name)) <= 2:
            return f"{name} must be in [-2, 2], got {value}."
    if not 0 < s.repetition_penalty <= 2:
        return f"repetition_penalty must be in (0, 2], got {s.repetition_penalty}."
    if len(s.logit_bias) > BIASES:
        return f"logit_bias: at most {BIASES} tokens are supported, got {len(s.logit_bias)}."
    if problem := _outside("logit_bias: token ids", [id for id, _ in s.logit_bias], vocab):
        return problem
    if not all(-100 <= bias <= 100 for _, bias in s.logit_bias):
        return "logit_bias: values must be in [-100, 100]."
    if s.grammar and s.ignore_eos:
        return "ignore_eos must be false with a grammar, which ends the text by a stop token."
    if s.stop and not decodes:
        return "stop strings need a tokenizer, but the engine has none; in Python: Engine(decode=tokenizer.decode)."
    if not all(s.stop):
        return "stop strings must not be empty."
    if not 0 <= request.top_logprobs <= TOP:
        return f"top_logprobs must be from 0 to {TOP}, got {request.top_logprobs}."
    if not (start is None or 0 <= start <= n):
        return f"input logprobs must start within the input ({n} tokens), got {start}."
    return None


def _outside(name: str, ids: Sequence[int], vocab: int) -> str | None:
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab:
            return f"{name} must be integers from 0 to {vocab - 1}, the model's vocabulary, got {id!r:.80}."
    return None
