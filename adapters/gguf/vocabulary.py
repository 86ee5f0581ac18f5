"""What both directions of a tokenizer share: kinds of tokens, and how texts are split before byte-level BPE."""

from __future__ import annotations

import re
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"  # SentencePiece's
KEY = "tokenizer.ggml."
BPE, SENTENCEPIECE = "gpt2", "llama"  # tokenizer.ggml.model
PADDING = "[PAD{}]"  # an id of the model without a token
TEMPLATE = "tokenizer.chat_template"
TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = "digits"  # in place of a pattern: each digit by itself
GPT2 = "gpt2"  # the pattern of `tokenizers`' ByteLevel
# tokenizer.ggml.pre -> (patterns, texts are in NFC first, a word that is a token is not merged). Of two with the same
# value the first is written.
SPLITS: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "qwen2": ((_QWEN2,), True, False),
    "llama-bpe": ((_LLAMA3,), False, True),
    "dbrx": ((_LLAMA3,), False, False),
    "smollm": ((DIGITS, GPT2), False, False),
    "gpt-2": ((GPT2,), False, False),
    "qwen35": ((_QWEN35,), True, False),
    "tekken": ((_TEKKEN,), False, True),
    "gpt-4o": ((_GPT4O,), False, False),
    "llama4": ((_GPT4O,), False, True),
}
MARKS = ("tekken", "gpt-4o", "llama4")  # llama.cpp's patterns of these have no \p{M}
SPLITS |= dict.fromkeys(("deepseek-r1-qwen",), SPLITS["qwen2"])
SPLITS |= dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), SPLITS["llama-bpe"])
SPLITS |= dict.fromkeys(("smaug-bpe", "glm4", "chatglm-bpe"), SPLITS["dbrx"])
SPLITS |= dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), SPLITS["smollm"])
SPLITS |= dict.fromkeys(("olmo", "mpt", "phi-2", "trillion"), SPLITS["gpt-2"])


def merges_of(tokens: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, as transformers makes them: every pair that makes a token, the one with
    the highest score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for text, id in tokens.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in tokens and right in tokens:
                found.append((-scores[id], tokens[left], tokens[right], left, right))
    found.sort(key=lambda one: one[:3])
    return [(left, right) for *_, left, right in found]


def check_template_name(name: str, where: str) -> None:
    """Raises ValueError unless a chat template's name can be a file's."""
    if not TEMPLATE_NAME.fullmatch(name):
        raise ValueError(f"{where}: a chat template must have a plain name, got {name!r:.80}")


def flat(node: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer of tokenizer.json, which may be a sequence of them."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    return [part for one in node[inner] for part in flat(one, inner)]
