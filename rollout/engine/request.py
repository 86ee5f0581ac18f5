"""What goes into the engine and what comes out, free of jax: shared by the engine and its server."""

import math
from dataclasses import dataclass, field

TOP = 20  # most tokens a position that top logprobs report
STOPS = 32  # most stop ids of a request, the model's own included


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. Log-probabilities are those of softmax(logits / temperature) before any filter;
    with temperature 0 (greedy) those at temperature 1.

    Attributes:
      top_p, top_k, min_p: filters on the distribution sampled from; 1, -1 and 0 are off.
      max_new_tokens: budget, 0 allowed; min_new_tokens: stop tokens are not sampled before so many tokens.
      stop: strings that end the text; stop_token_ids: ids that do, besides the model's own unless ignore_eos.
      seed: of this request's stream: token i of the whole sequence is drawn with fold(seed, i). None = engine's choice.
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
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
      rid: the caller's name for it.
      prompt: token ids, at least one.
      input_logprobs_from: prompt index from which log-probabilities of the prompt's own tokens are wanted; None = none.
      top_logprobs: how many of the likeliest tokens to report a position, for output (and input, where wanted).
      routed_experts: report the experts that tokens went to.
      adapter: name of the adapter to generate with; "" = the weights alone.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    input_logprobs_from: int | None = None
    top_logprobs: int = 0
    routed_experts: bool = False
    adapter: str = ""


@dataclass
class Progress:
    """Everything known of a request so far (cumulative); the last one has a `finish`.

    Attributes:
      tokens, logp: generated ids (stop token included) and their log-probabilities.
      versions: (version, start, end) spans that cover `tokens`.
      top: a position, [(logp, id), ...] of the likeliest tokens.
      input_logp, input_top: of the prompt from `input_logprobs_from`; the first token of a sequence has None.
      finish: None while running, else {"type": "stop", "matched": id or string}, {"type": "length", "length": n} or
        {"type": "abort", "message": ...}.
      text: decoded output without the stop token or string, where the engine can decode, else "".
      routed: where wanted, of each token but the last its experts, i32[layers, top_k], -1 in layers that have none.
      cached_tokens: prompt tokens whose cache was found ready.
      retractions: times the request was put back in the queue.
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
    finish: dict | None = None
    text: str = ""
    cached_tokens: int = 0
    retractions: int = 0


def check(request: Request, stops: frozenset[int], vocab: int, context: int, decodes: bool, experts: bool) -> None:
    """Raises ValueError with one line, in SGLang's words where it has any, if the request cannot be served.

    Args:
      stops: all ids that end it, the model's own included.
      vocab, context: sizes of the model, in tokens.
      decodes: the engine can turn tokens into text.
      experts: the model has experts.
    """
    if problem := _problem(request, stops, vocab, context, decodes, experts):
        raise ValueError(problem)


def _problem(
    request: Request, stops: frozenset[int], vocab: int, context: int, decodes: bool, experts: bool
) -> str | None:
    s, n = request.sampling, len(request.prompt)
    if request.routed_experts and not experts:
        return "return_routed_experts needs a model with experts, and this one has none."
    start = request.input_logprobs_from
    for name, ids in {"input_ids": request.prompt, "stop_token_ids": s.stop_token_ids}.items():
        bad = [x for x in ids if type(x) is not int or not 0 <= x < vocab]
        if bad:
            return f"{name} must be integers from 0 to {vocab - 1}, the model's vocabulary, got {bad[0]!r}."
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed"):
        value = getattr(s, name)
        if type(value) is not int and not (name == "seed" and value is None):
            return f"{name} must be an integer, got {value!r}."
    if n == 0:
        return "Either text, input_ids or input_embeds should be provided."
    if n > context:
        return f"The input ({n} tokens) is longer than the model's context length ({context} tokens)."
    if s.max_new_tokens < 0:
        return f"max_new_tokens must be at least 0, got {s.max_new_tokens}."
    if n + s.max_new_tokens > context:
        return (
            f"The input ({n} tokens) and max_new_tokens ({s.max_new_tokens}) are together longer than the model's "
            f"context length ({context} tokens)."
        )
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
    if s.stop and not decodes:
        return "stop strings need a tokenizer, and the engine has none."
    if not all(s.stop):
        return "stop strings must not be empty."
    if len(stops) > STOPS:
        return f"stop_token_ids: at most {STOPS} are supported, the model's own included."
    if not 0 <= request.top_logprobs <= TOP:
        return f"top_logprobs must be from 0 to {TOP}, got {request.top_logprobs}."
    if not (start is None or 0 <= start <= n):
        return f"input logprobs must start within the input ({n} tokens), got {start}."
    return None
