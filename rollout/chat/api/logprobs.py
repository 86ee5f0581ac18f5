"""Log-probabilities of tokens in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..detokenizer import UNFINISHED
from ..trajectory import Interaction

Reading = Sequence[tuple[int, float | None, Mapping[int, float]]]  # token, its log-probability, {likeliest token: logp}


def sampled(x: Interaction) -> Reading:
    """The tokens of a completion, without the likeliest others."""
    return [(token, logp, {}) for token, logp in zip(x.completion.tokens, x.completion.logp, strict=True)]


def chat(reading: Reading, tokenizer: Any) -> dict[str, Any]:
    """As in `/v1/chat/completions`."""
    rows = [
        _token(tokenizer, id, logp) | {"top_logprobs": [_token(tokenizer, *other) for other in others.items()]}
        for id, logp, others in reading
    ]
    return {"content": rows, "refusal": None}


def completion(reading: Reading, tokenizer: Any, top: int, start: int = 0) -> dict[str, Any]:
    """As in `/v1/completions`.

    Args:
      top: the request's `logprobs`; with 0 there are no others.
      start: characters of the text before.
    """
    names = [name(tokenizer, token) for token, _, _ in reading]
    return {
        "tokens": names,
        "token_logprobs": [logp for _, logp, _ in reading],
        "top_logprobs": [_named(tokenizer, others) for _, _, others in reading] if top else None,
        "text_offset": list(itertools.accumulate(map(len, names[:-1]), initial=start)) if names else [],
    }


@functools.lru_cache(2**16)
def piece(tokenizer: Any, token: int) -> str:
    """The text of one token; its id as text if there is no tokenizer."""
    return str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def name(tokenizer: Any, token: int) -> str:
    """A token's text; for a part of a character its vocabulary entry, because all such parts decode alike."""
    text = piece(tokenizer, token)
    return tokenizer.convert_ids_to_tokens(token) if UNFINISHED in text else text


def _token(tokenizer: Any, token: int, logp: float | None) -> dict[str, Any]:
    text = piece(tokenizer, token)
    whole = UNFINISHED not in text  # else part of a character, whose bytes are not those of the text
    return {"token": text, "logprob": logp, "bytes": list(text.encode()) if whole else None}


def _named(tokenizer: Any, others: Mapping[int, float]) -> dict[str, float] | None:
    """The likeliest tokens by name; of two with the same name, the likelier. None for the first token of a sequence."""
    return {name(tokenizer, token): logp for token, logp in sorted(others.items(), key=lambda x: x[1])} or None
