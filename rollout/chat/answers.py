"""The text of sampled tokens that a reward reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import detokenizer, parsers
from .parsers import STYLES, Parser, Text


def text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text without special tokens; where a format marks reasoning in a way of its own what is said to the user
    (`parsers.said`)."""
    style = parsers.style_for(tokenizer)
    if STYLES[style].apart:
        return parsers.said(parsers.decoder(tokenizer, style)(tokens), style).content
    return tokenizer.decode(tokens, skip_special_tokens=True)


def completing(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each number of characters of `text` the index of the token that completes them; the last token if they are
    all."""
    style = parsers.style_for(tokenizer)
    if STYLES[style].apart:
        return detokenizer.completed(_said(parsers.decoder(tokenizer, style), tokens, style), ends)
    return detokenizer.completing(functools.partial(tokenizer.decode, skip_special_tokens=True), tokens, ends)


def _said(decode: Callable[[list[int]], str], tokens: Sequence[int], style: str) -> Iterator[str]:
    parser = Parser(style, tools=False)
    for piece in detokenizer.growing(decode, tokens):
        yield "".join(x.text for x in parser.push(piece) if isinstance(x, Text) and x.kind == "content")
