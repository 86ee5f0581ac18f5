"""What goes into the engine and what comes out, free of jax: shared by the engine and its server."""

from dataclasses import dataclass, field


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
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    input_logprobs_from: int | None = None
    top_logprobs: int = 0


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
    finish: dict | None = None
    text: str = ""
    cached_tokens: int = 0
    retractions: int = 0
