"""Log-probabilities of tokens in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..detokenizer import UNFINISHED, Text
from ..trajectory import Interaction

# Byte-level BPE spells printable bytes of Latin-1 as themselves and the others, in order, from U+0100 on.
_OTHERS = [byte for byte in range(256) if not (33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte)]
SPELLED = {chr(byte): byte for byte in range(256) if byte not in _OTHERS}
SPELLED |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}

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


class Offsets:
    """The places in a text at which its tokens begin; the parts of a character begin where it does.

    Args:
      read: the first tokens, which are a prompt's: its text shows special tokens, that of an answer does not.
    """

    def __init__(self, tokenizer: Any, read: int = 0):
        decode = lambda skip: (
            (lambda ids: tokenizer.decode(ids, skip_special_tokens=skip)) if tokenizer is not None else lambda ids: ""
        )
        self._read, self._prompt, self._answer = read, Text(decode(False)), Text(decode(True))

    def add(self, token: int) -> int:
        """Appends a token; returns its place."""
        place = len(self._prompt.text) + len(self._answer.text)
        (self._prompt if self._read else self._answer).feed([token])
        if self._read == 1:
            self._prompt.end()
        self._read = max(0, self._read - 1)
        return place


def completion(reading: Reading, tokenizer: Any, top: int, offsets: Offsets) -> dict[str, Any]:
    """As in `/v1/completions`.

    Args:
      top: the request's `logprobs`; with 0 there are no others.
      offsets: those of the text before.
    """
    return {
        "tokens": [name(tokenizer, token) for token, _, _ in reading],
        "token_logprobs": [logp for _, logp, _ in reading],
        "top_logprobs": [_named(tokenizer, others) for _, _, others in reading] if top else None,
        "text_offset": [offsets.add(token) for token, _, _ in reading],
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
    return {"token": piece(tokenizer, token), "logprob": logp, "bytes": _bytes(tokenizer, token)}


@functools.lru_cache(2**16)
def _bytes(tokenizer: Any, token: int) -> list[int]:
    """A token's UTF-8; of a part of a character, whose text is U+FFFD, the bytes that its vocabulary entry spells."""
    text = piece(tokenizer, token)
    if UNFINISHED in text:
        entry = tokenizer.convert_ids_to_tokens(token) or ""
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", entry):  # SentencePiece's
            return [int(found[1], 16)]
        if entry and all(character in SPELLED for character in entry):
            return [SPELLED[character] for character in entry]
    return list(text.encode())


def _named(tokenizer: Any, others: Mapping[int, float]) -> dict[str, float] | None:
    """The likeliest tokens by name; of two with the same name, the likelier. None for the first token of a sequence."""
    return {name(tokenizer, token): logp for token, logp in sorted(others.items(), key=lambda x: x[1])} or None
