"""Grammars: compiled by llguidance (the extra `grammar`) on the host, applied on the device as a mask of bits.

A request's `Matcher` follows its tokens and knows which may come next. Its state survives a retraction.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ...parallel import mesh
from ..chat.fields import Refused
from ..chat.template import special_tokens
from .request import Grammar

KEPT = 128  # most compiled grammars
LONGEST, LONGEST_EBNF = 2**17, 2**14  # characters of a grammar; llguidance converts GBNF in quadratic time
# The rule that Lark begins with; `grammar_from` knows it only without a modifier (`?start:`) and attributes.
LARK = re.compile(r'^\s*[?!]?start(\[[\w =,."-]*\])?\s*:(?!:=)', re.MULTILINE)
# JSON as Python's json.dumps writes it: white space that a model may choose freely is white space without end.
FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
INSTALL = "grammars need llguidance, which is not installed; pip install 'areax[grammar]'"

DEAD_END = "the grammar allows no token of this model's vocabulary"


def masked(logits_SV, mask_SM, masked_S):
    """Logits with -inf for the tokens whose bit is 0, in the rows `masked_S`; others keep their bits.

    Args:
      mask_SM: i32, M = ceil(V / 32) words; token t is bit t % 32 of word t // 32.
    """
    S, V = logits_SV.shape
    bit_SV = ((mask_SM[:, :, None] >> jnp.arange(32)[None, None]) & 1).reshape(S, -1)[:, :V]
    return jnp.where((bit_SV == 1) | ~masked_S[:, None], logits_SV, -jnp.inf)


class Grammars:
    """Compiled grammars for one tokenizer, by content, for any thread.

    Args:
      tokenizer: a fast tokenizer of transformers: byte-level, with byte fallback, or one whose tokens are characters.

    Attributes:
      vocab: tokens of the model.
      eos: the ids that end a text: the model's, or else the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Sequence[int] = ()):
        self._tokenizer, self.vocab, self._words = tokenizer, vocab, -(-vocab // 32)
        self.eos = tuple(eos) or tuple(id for id in (tokenizer.eos_token_id,) if id is not None)
        self._compiled: collections.OrderedDict[Grammar, Future] = collections.OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._library: tuple[Any, Any] | None = None

    def known(self, grammar: Grammar) -> bool:
        """Whether a grammar has been compiled: `start` then takes no time."""
        with self._lock:
            return grammar in self._compiled and self._compiled[grammar].done()

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning, to be copied; the same grammar is compiled once, which takes 1 to 1000 ms.

        Raises:
          Refused: the grammar is invalid, too large, uses what llguidance does not know, or llguidance is missing.
        """
        with self._lock:
            done = self._compiled.get(grammar)
            if found := done is not None:
                self._compiled.move_to_end(grammar)
            else:
                done = self._compiled[grammar] = Future()
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        assert done is not None
        if not found:
            try:
                done.set_result(self._made(grammar))
            except ValueError as error:
                done.set_exception(error)
            except RecursionError:
                done.set_exception(ValueError("is nested too deeply"))
            finally:
                if not done.done():  # lest others wait for it
                    done.set_exception(ValueError("llguidance failed"))
        try:
            return done.result()
        except ValueError as error:
            raise Refused(grammar.field or grammar.kind, _line(str(error))) from None

    def start(self, grammar: Grammar, stops: Iterable[int] = (), least: int = 0) -> Matcher:
        """A matcher for a request that ends by one of `stops`, and if possible not before `least` tokens; raises as
        `compile`."""
        return self.compile(grammar).copy(frozenset(stops) | frozenset(self.eos), least)

    def _made(self, grammar: Grammar) -> Matcher:
        longest = LONGEST_EBNF if grammar.kind == "ebnf" else LONGEST
        if len(grammar.text) > longest:
            raise ValueError(f"must have at most {longest} characters, got {len(grammar.text)}")
        with self._loading:
            if self._library is None:
                self._library = _load(self._tokenizer, self.vocab, self.eos)
        library, tokenizer = self._library
        inner = library.LLMatcher(tokenizer, json.dumps({"grammars": pieces(grammar)}), log_level=0)
        if inner.is_error():
            raise ValueError(_problem(inner))
        made = Matcher(inner, np.zeros(self._words, np.int32), -(-tokenizer.vocab_size // 32), frozenset(self.eos), 0)
        made.advance()
        if made.problem:
            raise ValueError(made.problem)
        return made


class Matcher:
    """Follows the tokens of one text.

    Attributes:
      mask_M: i32, the tokens that may come next, as in `masked`.
      problem: why it cannot go on, in one line; "" while it can.
    """

    def __init__(self, inner: Any, mask_M: np.ndarray, words: int, stops: frozenset[int], least: int):
        self.mask_M, self.problem = mask_M, ""
        self._inner, self._words, self._stops, self._least = inner, words, stops, least
        self._taken = 0

    def copy(self, stops: frozenset[int], least: int) -> Matcher:
        """One that has taken no token yet, like this one, with its own `stops` and `least`."""
        made = Matcher(self._inner.deep_copy(), self.mask_M.copy(), self._words, stops, least)
        made._settle()
        return made

    def take(self, token: int) -> None:
        """Goes on by a token that the mask allows."""
        self._taken += 1
        if token in self._stops:
            return
        if self._inner.consume_token(token):
            self.advance()
        else:
            self.problem = _problem(self._inner)

    def advance(self) -> None:
        """Computes the mask of the next token."""
        bits_N = np.frombuffer(self._inner.compute_bitmask(), np.int32, self._words)
        if self._inner.is_error():
            self.problem = _problem(self._inner)
            return
        self.mask_M[:] = 0
        shared = min(self._words, len(self.mask_M))
        self.mask_M[:shared] = bits_N[:shared]
        self._settle()

    def _settle(self) -> None:
        """Adds the stop ids where the text may end, or removes them where it is too short and may go on."""
        stop_M = np.zeros(len(self.mask_M), np.uint32)
        for id in self._stops:
            if id < 32 * len(stop_M):
                stop_M[id // 32] |= np.uint32(1 << id % 32)
        stop_M = stop_M.view(np.int32)
        if self._inner.is_accepting():
            self.mask_M |= stop_M
        if self._taken < self._least and (rest_M := self.mask_M & ~stop_M).any():
            self.mask_M[:] = rest_M
        if not self.mask_M.any():
            self.problem = DEAD_END


class Masks:
    """The mask of all slots, i32[S, M]."""

    def __init__(self, slots: int, vocab: int):
        self._mask_SM = np.zeros((slots, -(-vocab // 32)), np.int32)

    def fill(self, matchers: Mapping[int, Matcher]) -> np.ndarray | None:
        """The mask with the rows of these slots; None while no slot has a grammar."""
        for slot, matcher in matchers.items():
            self._mask_SM[slot] = matcher.mask_M
        return self._mask_SM.copy() if matchers else None  # a dispatch may still read the last one


@functools.partial(jax.jit, static_argnames=("slots", "vocab"))
def empty(slots: int, vocab: int) -> jax.Array:
    """The mask on the device, once and for all, while no slot has a grammar."""
    mask_SM = jnp.zeros((slots, -(-vocab // 32)), jnp.int32)
    return mask_SM if mesh.one_device() else jax.lax.with_sharding_constraint(mask_SM, P())


def pieces(grammar: Grammar, **more: str) -> list[dict[str, Any]]:
    """The `grammars` of llguidance's JSON format, the first with the further keys, such as its name.

    Raises ValueError if it is malformed.
    """
    if grammar.kind == "llguidance":
        return json.loads(grammar.text)["grammars"]
    return [{**_piece(grammar), **more}]


def _piece(grammar: Grammar) -> dict[str, Any]:
    kind, text = grammar.kind, grammar.text
    if kind == "json_schema":
        return {"json_schema": formatted(json.loads(text))}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(literal, json.loads(text)))}
    library = _imported()
    if kind == "regex":
        return {"lark_grammar": f"start: /{library.regex_to_lark(text, 'dws')}/"}  # of ASCII, as re.ASCII
    return {"lark_grammar": text if LARK.search(text) else library.grammar_from("ebnf", text)}


def formatted(schema: Any) -> Any:
    """A JSON schema, with our format of JSON."""
    return {**schema, "x-guidance": FORMAT} if isinstance(schema, Mapping) else schema


def literal(text: str) -> str:
    """A string in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _load(tokenizer: Any, vocab: int, eos: Sequence[int]) -> tuple[Any, Any]:
    """(llguidance, the tokenizer as it knows it)."""
    library = _imported()
    if not eos:
        raise ValueError("grammars need a token that ends a text, but neither model nor tokenizer has one")
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ValueError("grammars need a fast tokenizer, but this model's is not one")
    described = json.loads(inner.to_str())
    ends = list(eos)
    if (described.get("decoder") or {"type": "Fuse"})["type"] == "Fuse":  # tokens are the text that they stand for
        return library, library.LLTokenizer(library.TokenizerWrapper(_Words(tokenizer, ends[0])), eos_token=ends)
    text = json.dumps(described | {"padding": None, "truncation": None})
    return library, library.LLTokenizer(text, n_vocab=max(vocab, len(tokenizer)), eos_token=ends)


class _Words:
    """A tokenizer for llguidance, whose tokens are plain text."""

    def __init__(self, tokenizer: Any, eos: int):
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [tokenizer.decode([id]).encode() for id in range(len(tokenizer))]
        self.special_token_ids = list(special_tokens(tokenizer))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        words = text if isinstance(text, str) else text.decode(errors="replace")
        ids = self._tokenizer.encode(words, add_special_tokens=False)
        return [id for id in ids if id != self._tokenizer.unk_token_id]


def _imported() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(INSTALL) from None
    return llguidance


def _problem(inner: Any) -> str:
    """The error of a matcher, without the parser's state that follows."""
    error = inner.get_error().partition("<state>")[0]
    return DEAD_END if error.startswith("NoExtension") else _line(error)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
