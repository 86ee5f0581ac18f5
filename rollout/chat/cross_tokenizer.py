"""Distillation across tokenizers: what a teacher with another tokenizer reads, and where both split a text alike.

The teacher reads its own prompt and the text of the student's completion, in its own tokens. Spans are the shortest
pieces of the completion at whose end a token of each ends; in bytes, since a token may be a part of a character. The
sum of log-probabilities over a span is that of its text, for both (chunks in arXiv:2606.09456, aligned groups of byte
offsets in TRL's GOLD). What is in no span is left out of losses, and counted.
"""

from __future__ import annotations

import functools
import itertools
import json
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import object_path
from ..types import Sample
from . import conversation, template

SPACE = "\u2581"  # what SentencePiece writes for a space
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
PROBES = "0123456789abcdefghijklmnopqrstuvwxyz"


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """{id: bytes that the token stands for}; of an added token, those of its name. The unknown token has none.

    Raises:
      ValueError: tokens have no bytes of their own: the tokenizer is a slow one, or writes spaces between them.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    decoder = inner and json.loads(inner.to_str())["decoder"]
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
    kinds = {part["type"] for part in parts}
    if not kinds & {"ByteLevel", "Metaspace", "Fuse"}:
        raise ValueError(
            "distillation across tokenizers needs fast ones whose tokens are bytes or pieces of text, got one with "
            f"the decoder {', '.join(sorted(kinds))}; take a model of the same family"
        )
    spaced = "Metaspace" in kinds or any(part.get("pattern") == {"String": SPACE} for part in parts)

    def one(word: str) -> bytes | None:
        if "ByteLevel" in kinds:
            return bytes(_LETTERS[c] for c in word) if all(c in _LETTERS for c in word) else None
        if "ByteFallback" in kinds and (byte := FALLBACK.fullmatch(word)):
            return bytes([int(byte[1], 16)])
        return (word.replace(SPACE, " ") if spaced else word).encode()

    added = {id: token.content.encode() for id, token in tokenizer.added_tokens_decoder.items()}
    found = {id: one(word) for word, id in tokenizer.get_vocab().items()} | added
    return {id: raw for id, raw in found.items() if raw is not None and id != tokenizer.unk_token_id}


def _letters() -> dict[str, int]:
    """{character: byte} of byte-level BPE (GPT-2): printable ones are themselves, others characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _letters()


def aligned(own_ends: Sequence[int], their_ends: Sequence[int]) -> list[tuple[int, int]]:
    """The ends of spans: pairs (own tokens, their tokens) up to which both have the same bytes of a text, ascending.

    Args:
      own_ends, their_ends: bytes of the text up to the end of each token.
    """
    i, j, cuts = 0, 0, []
    while i < len(own_ends) and j < len(their_ends):
        behind = own_ends[i] - their_ends[j]
        i, j = i + (behind <= 0), j + (behind >= 0)
        if behind == 0:
            cuts.append((i, j))
    return cuts


class Pair:
    """The tokenizers of a student ("own") and its teacher ("theirs").

    Attributes:
      tokenizer: the teacher's.
      common: i32[2, K], ids of the tokens that both have, the same bytes for both; ends of a turn are one.
      to_own: i32[W], the student's id of each of the teacher's tokens; -1 = it has none.
    """

    def __init__(self, own: Any, theirs: Any, stops: Sequence[int], ends: tuple[int, int]):
        """
        Args:
          stops: tokens that end the student's completions.
          ends: the token that ends a turn, of each.

        Raises:
          ValueError: as `token_bytes`; or no token is common.
        """
        self.tokenizer, self._stops, self._end = theirs, frozenset(stops), ends[1]
        self._own, self._theirs = token_bytes(own), token_bytes(theirs)
        self._before = _before(own, self._own), _before(theirs, self._theirs)
        self._special = tuple(frozenset(template.special_tokens(one)) for one in (own, theirs))
        ids = [_by_bytes(*each) for each in zip((self._own, self._theirs), self._special, (own, theirs), strict=True)]
        shared = {a: ids[1][key] for key, a in ids[0].items() if key in ids[1]}
        shared = {a: b for a, b in shared.items() if a != ends[0] and b != ends[1]} | {ends[0]: ends[1]}
        if len(shared) < 2:
            raise ValueError("student and teacher must have tokens in common, got none of the same bytes")
        self.common = np.array(sorted(shared.items()), np.int32).T
        self.to_own = np.full(max(self._theirs) + 1, -1, np.int32)
        self.to_own[self.common[1]] = self.common[0]

    def prompt(self, row: Mapping[str, Any]) -> list[int]:
        """What the teacher reads before a row's completion: the row's prompt, or its "teacher_prompt", as its own chat
        template has it; raises as `template.prompted`."""
        asked = row if row.get("teacher_prompt") is None else conversation.read_by_teacher(row)
        ids = template.prompted(self.tokenizer, asked).tokens
        if not ids:
            raise ValueError(f"a teacher's prompt must have at least one token, got none; {object_path.row(row)}")
        return ids

    def read(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> list[Sample]:
        """The samples of a row, each with what its teacher reads (`reading`) and "target" arrays: `teacher_span`
        i32[n], the number of each token's span, 0 = it is in none; `teacher_exact` bool[n], whether the span is one
        token of each.

        Raises:
          ValueError: as `prompt`; or a sample has images, several completions, or a `teacher_prompt` of tokens.
        """
        made = functools.cache(lambda: self.prompt(row))
        return [self._read(sample, made(), row) for sample in samples]

    def _read(self, sample: Sample, prompt: list[int], row: Mapping[str, Any]) -> Sample:
        first = int(sample.mask.argmax()) if sample.mask.any() else len(sample.tokens)
        for wrong, rule, got in (
            (sample.images, "no images", f"{len(sample.images)}"),
            (sample.teacher_prompt, "no teacher_prompt of tokens", f"{len(sample.teacher_prompt)}"),
            (first == 0 or not sample.mask[first:].all(), "one completion behind a prompt", "another mask"),
        ):
            if wrong:
                raise ValueError(
                    f"a sample for a teacher with another tokenizer must have {rule}, got {got}; take a teacher with "
                    f"the student's tokenizer; {object_path.row(row)}"
                )
        own = sample.tokens[first:].tolist()
        ids, cuts = self.spans(own)
        numbers = np.zeros(len(sample.tokens), np.int32), np.zeros(len(prompt) + len(ids), np.int32)
        exact = np.zeros(len(sample.tokens), bool)
        for number, ((i, j), (k, l)) in enumerate(cuts, 1):
            numbers[0][first + i : first + k], numbers[1][len(prompt) + j : len(prompt) + l] = number, number
            exact[first + i : first + k] = k - i == l - j == 1
        arrays = {"teacher_span": ("target", numbers[0]), "teacher_exact": ("target", exact)}
        reading = np.array([*prompt, *ids], np.int32), numbers[1]
        return sample.replace(reading=reading, arrays={**sample.arrays, **arrays})

    def spans(self, own: Sequence[int]) -> tuple[list[int], list[tuple[tuple[int, int], tuple[int, int]]]]:
        """(the teacher's tokens of a completion, its spans: ((own, their) index of the first tokens, and behind the
        last)).

        The teacher reads the text up to a token without bytes or bytes that are no character. In no span are tokens
        behind that, those of which its tokens have other bytes (of a normaliser), special tokens that it does not have,
        and what is last in a completion that is cut off, where it would have more to read.
        """
        body = [*own[:-1]] if (ended := bool(own) and own[-1] in self._stops) else [*own]
        words = _words(self._own, body)
        raw, own_ends = _joined(words, self._before[0])
        text = _text(raw)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        spaces = len(text) - len(text.lstrip(" "))
        theirs, their_ends = _joined(_words(self._theirs, ids), self._before[1], spaces)
        length, same = len(text.encode()), len(os.path.commonprefix([text.encode(), theirs]))
        whole = ended and len(words) == len(body) and length == len(raw)
        cuts = [
            (i, j) for i, j in aligned(own_ends, their_ends)
            if own_ends[i - 1] <= same and (whole or own_ends[i - 1] < length)
        ]  # fmt: skip
        found = [
            (start, stop) for start, stop in itertools.pairwise([(0, 0), *cuts])
            if self._plain(body[start[0] : stop[0]], ids[start[1] : stop[1]])
        ]  # fmt: skip
        if whole and same == length:
            found.append(((len(body), len(ids)), (len(own), len(ids) + 1)))
        return ids + [self._end] * whole, found

    def _plain(self, own: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether a span has no special tokens, or is one of each."""
        special = [any(id in names for id in ids) for ids, names in zip((own, theirs), self._special, strict=True)]
        return not any(special) or (all(special) and len(own) == len(theirs) == 1)


def _before(tokenizer: Any, raw: Mapping[int, bytes]) -> bytes:
    """What the tokenizer adds before a text: b" " or nothing."""
    known = {*raw.values()}
    probe = next((c for c in PROBES if {c.encode(), f" {c}".encode()} & known), None)
    found = probe and b"".join(raw.get(id, b"") for id in tokenizer.encode(probe, add_special_tokens=False))
    if not probe or found not in (probe.encode(), b" " + probe.encode()):
        raise ValueError(
            f"distillation across tokenizers needs tokens of the bytes of a text, got {found!r} for {probe!r}; take a "
            "model of the same family"
        )
    return found[:-1]


def _by_bytes(raw: Mapping[int, bytes], special: frozenset[int], tokenizer: Any) -> dict[tuple[bytes, bool], int]:
    """{(bytes, whether it is special): id}; of several with the same bytes, the one that is no byte fallback."""
    names = tokenizer.convert_ids_to_tokens([*raw])
    fallback = {id for id, name in zip(raw, names, strict=True) if FALLBACK.fullmatch(name or "")}
    order = sorted(raw, key=lambda id: (id not in fallback, -id))  # the last one wins
    return {(raw[id], id in special): id for id in order if raw[id]}


def _words(raw: Mapping[int, bytes], ids: Sequence[int]) -> list[bytes]:
    """The bytes of tokens up to the first that has none."""
    return [raw[id] for id in itertools.takewhile(raw.__contains__, ids)]


def _joined(words: Sequence[bytes], before: bytes, spaces: int = 0) -> tuple[bytes, list[int]]:
    """(the bytes of tokens without what the tokenizer adds before a text, the end of each token there).

    Args:
      spaces: with which the text begins; many tokenizers add one only before a text that begins with none.
    """
    raw = b"".join(words)
    cut = len(before) if before and raw.startswith(before + b" " * spaces) else 0
    return raw[cut:], [max(end - cut, 0) for end in itertools.accumulate(map(len, words))]


def _text(raw: bytes) -> str:
    """The characters up to the first byte that belongs to none."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()
