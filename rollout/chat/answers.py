"""The text of sampled tokens that a reward reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import detokenizer, parsers
from .parsers import STYLES, Parser, Text


def text(tokenizer: Any, tokens: Sequence[int], prompt: str = "", cut: bool = False) -> str:
    """The text of an answer to this prompt, without special tokens, as `parsers.said` reads it; where a format marks
    reasoning in its own way, only what is said to the user."""
    style = parsers.style_for(tokenizer)
    return parsers.said(_decoder(tokenizer, style)(tokens), style, cut, prompt).content


def completing(
    tokenizer: Any, tokens: Sequence[int], ends: Sequence[int], prompt: str = "", cut: bool = False
) -> list[int]:
    """For each number of characters of `text` the index of the token that completes them; the last token if they are
    all."""
    style = parsers.style_for(tokenizer)
    decode = _decoder(tokenizer, style)
    if STYLES[style].apart:
        return detokenizer.completed(_said(decode, tokens, style, parsers.opened(prompt, style)), ends)
    added = len(text(tokenizer, tokens, prompt, cut)) - len(decode(tokens))
    return detokenizer.completing(decode, tokens, [max(end - added, 0) for end in ends])


def _decoder(tokenizer: Any, style: str) -> Callable[[Sequence[int]], str]:
    if STYLES[style].apart:
        return parsers.decoder(tokenizer, style)
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


def _said(decode: Callable[[list[int]], str], tokens: Sequence[int], style: str, opened: bool) -> Iterator[str]:
    parser = Parser(style, tools=False, opened=opened)
    for piece in detokenizer.growing(decode, tokens):
        yield "".join(x.text for x in parser.push(piece) if isinstance(x, Text) and x.kind == "content")
