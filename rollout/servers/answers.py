"""What the answers of all kinds of servers have in common: a value that cannot be right becomes a ServerError.

What a server samples is trained on, so such a value must not reach the trainer as another one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from ..errors import ServerError
from ..types import LARGEST_LOGP, LEAST_LOGP, Finish
from .image_tokens import TokensPrompt
from .types import Part

# What reading an answer of another form raises.
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
FINISHES = tuple(finish for finish in get_args(Finish) if finish != "error")  # which is a sample's alone
LONGEST = 2**20  # tokens of an answer, where no number is asked for
BESIDES, A_TOKEN, EXPERTS = 2**20, 2**10, 2**15  # bytes of an answer: besides its tokens, of each, of its experts
AN_ID = 2**4  # bytes of a token id in a sampling mask
A_LIKELY = 2**6  # bytes of one of the likeliest tokens, with its log-probability
ADAPTERS = 2  # newest adapters that stay loaded on a server, in addition to those in use
RESERVED = 512  # tokens of the context that servers may keep free, such as pages


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Has errors about an answer, also of reading one of another form, name where it came from."""
    try:
        yield
    except MALFORMED as error:
        raise ServerError(f"{where}: the answer lacks what a single request returns ({described(error)})") from error
    except ServerError as error:
        raise ServerError(f"{where}: {error}") from error


def check(
    part: Part, seen: Sequence[int], prompt: TokensPrompt, sampling: Mapping[str, Any], asked: int, context: int
) -> None:
    """Checks an answer against its request.

    Args:
      seen: tokens that were streamed.
      asked: most tokens that were asked for.
      context: tokens of the server's longest sequence; 0 = unknown.

    Raises:
      ServerError: in words, without the server's address.
    """
    check_number(part.tokens, asked)
    check_stream(seen, part.tokens)
    if len(part.tokens) < len(seen):
        raise ServerError(f"{len(seen)} tokens were streamed, the answer has {len(part.tokens)}")
    if why := wrong_end(part, sampling, len(prompt.tokens), context):
        raise ServerError(f"{why}; look for a server, or a proxy, that changes answers")
    read, sent = part.info.get("prompt_tokens"), len(prompt.tokens)
    if prompt.images and read != sent:
        raise ServerError(
            f"a prompt with {len(prompt.images)} images must have the {sent} tokens that the model's image processor "
            f"makes of it, got {read}; serve with the model's preprocessor_config.json"
        )
    if read not in (None, sent):
        raise ServerError(f"the answer must be to a prompt of {sent} tokens, got one to {read!r:.80}")


def check_number(tokens: Sequence[int], asked: int) -> None:
    if len(tokens) > asked:
        raise ServerError(f"at most {asked} tokens were asked for, got {len(tokens)}")


def check_stream(seen: Sequence[int], tokens: Sequence[int]) -> None:
    both = min(len(seen), len(tokens))
    if list(tokens[:both]) != list(seen[:both]):
        raise ServerError(
            "an event must have the tokens of those before it, got others; look for a proxy that changes answers"
        )


def wrong_end(part: Part, sampling: Mapping[str, Any], prompt: int, context: int) -> str:
    """Why an answer cannot end as it says it does; "" if it can.

    Args:
      sampling: of the request.
      prompt: its tokens.
      context: tokens of the server's longest sequence; 0 = unknown.
    """
    asked = sampling.get("max_new_tokens", 0)
    if asked == 0 and "max_new_tokens" in sampling:
        return ""
    stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids", ())  # SGLang drops both
    if after := set(stops).intersection(part.tokens[:-1]):
        return f"an answer must end at the first stop token, got tokens after {min(after)}"
    if part.finish == "abort":
        return ""
    if not part.tokens:
        return f"an answer must have a token or more, got none, and the finish {part.finish}"
    if part.finish == "length" and len(part.tokens) < asked and 0 < prompt + len(part.tokens) < context - RESERVED:
        return f"an answer cut off at its length must have the {asked} tokens asked for, got {len(part.tokens)}"
    if part.finish == "stop":
        matched, last = part.info["finish_reason"].get("matched"), part.tokens[-1]
        by_text = any(sampling.get(name) for name in ("stop", "json_schema", "regex", "ebnf"))
        ended = last in stops or not stops if matched is None else last == matched  # or a token of the model's own
        if not (ended or by_text):
            return f"an answer that stops must end in the stop token, {matched or sorted(stops)}, got {last}"
    return ""


def ids(tokens: Any, vocabulary: int) -> list[int]:
    """A list of token ids; raises ServerError unless each is a whole number in [0, vocabulary), 0 = any."""
    if not isinstance(tokens, list):
        raise ServerError(f"output_ids must be a list of token ids, got {tokens!r:.80}")
    if tokens and ({*map(type, tokens)} != {int} or min(tokens) < 0 or max(tokens) >= (vocabulary or 2**31)):
        for token in tokens:
            token_id(token, vocabulary)
    return tokens


def token_id(token: Any, vocabulary: int) -> int:
    """A token id; raises as `ids`."""
    if type(token) is not int or not 0 <= token < (vocabulary or 2**31):
        below = f"below the vocabulary size {vocabulary}" if vocabulary else "below 2^31"
        raise ServerError(f"a token id must be a whole number from 0 on, {below}, got {token!r:.80}")
    return token


def logprob(value: Any) -> float:
    """A log-probability in nats; raises ServerError unless it is a number from LEAST_LOGP to 0, up to rounding."""
    if type(value) not in (int, float) or not LEAST_LOGP <= value <= LARGEST_LOGP:
        raise ServerError(f"a log-probability must be a number from {LEAST_LOGP:g} to 0, got {value!r:.80}")
    return float(value)


def logprobs(values: list[Any]) -> list[float]:
    """Log-probabilities of many tokens at a time; raises as `logprob`."""
    known = not values or {*map(type, values)} == {float} and LEAST_LOGP <= min(values) and max(values) <= LARGEST_LOGP
    return values if known and not math.isnan(sum(values)) else [logprob(value) for value in values]


def text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ServerError(f"a text must be a string, got {value!r:.80}")
    return value or ""


def described(error: Exception) -> str:
    """An error of MALFORMED in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def positive(info: Mapping[str, Any], name: str) -> int:
    """The field if it is a whole number above 0, else 0."""
    value = info.get(name)
    return value if type(value) is int and value > 0 else 0
