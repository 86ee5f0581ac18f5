"""A tokenizer of transformers as a file's metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import vocabulary
from .vocabulary import (
    BPE,
    BYTE,
    CONTROL,
    DIGITS,
    GPT2,
    KEY,
    NORMAL,
    PADDING,
    SENTENCEPIECE,
    SPACE,
    SPLITS,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)  # fmt: skip

NAMES = {"eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
FURTHER_ENDS = ("eot", "eom")  # beside the end of text
CHANGES = "dropout", "continuing_subword_prefix", "end_of_word_suffix"  # of tokenizer.json's model
LOW = -1000.0  # score of what is not merged


def metadata(tokenizer: Any, vocab: int, ends: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """(values by key, what llama.cpp will do differently, a line each).

    Args:
      tokenizer: a fast tokenizer.
      vocab: tokens of the model; those that the tokenizer lacks are marked as unused.
      ends: the tokens that end a text or a turn.

    Raises:
      ValueError: llama.cpp has no such tokenizer; says why.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ValueError(f"convert: --gguf needs a fast tokenizer, got {type(tokenizer).__name__}")
    made = json.loads(inner.to_str())
    model = made["model"]
    if model["type"] != "BPE":
        raise ValueError(f"convert: --gguf writes tokenizers of the kind BPE, got {model['type']}; leave --gguf out")
    if changes := [name for name in CHANGES if model.get(name)]:
        raise ValueError(f"convert: llama.cpp has no {changes[0]}, got {model[changes[0]]!r:.80}; leave --gguf out")
    ids = dict(model["vocab"]) | {one["content"]: one["id"] for one in made["added_tokens"]}
    if len(ids) != len({*ids.values()}) or max(ids.values()) >= vocab:
        raise ValueError(
            f"convert: --gguf needs a tokenizer of at most {vocab} ids, the model's tokens, got {max(ids.values()) + 1}"
        )
    tokens, types = [PADDING.format(i) for i in range(vocab)], [UNUSED] * vocab
    for text, id in ids.items():
        tokens[id], types[id] = text, NORMAL
    for one in made["added_tokens"]:
        if one["lstrip"] or one["rstrip"] or one["single_word"]:
            raise ValueError(
                f"convert: llama.cpp has no tokens that take spaces with them or are whole words alone, as "
                f"{one['content']!r}; leave --gguf out"
            )
        types[one["id"]] = CONTROL if one["special"] else USER_DEFINED
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"convert: --gguf needs tokens other than {PADDING.format('N')}")
    splits = vocabulary.flat(made["pre_tokenizer"], "pretokenizers")
    byte_level = any(part["type"] == "ByteLevel" for part in splits)
    kind, warnings = _bpe(made, splits) if byte_level else _sentencepiece(made, splits, ids, tokens, types)
    out: dict[str, Any] = {f"{KEY}tokens": tokens, f"{KEY}token_type": types} | kind
    if beyond := [id for id in ends if id >= vocab]:
        raise ValueError(f"convert: ends of a text must be below {vocab}, the model's tokens, got {beyond[0]}")
    return out | _special(tokenizer, ends) | _templates(tokenizer), warnings


def _bpe(made: dict, splits: list[dict]) -> tuple[dict[str, Any], list[str]]:
    """Byte-level BPE: its merges, and the name of how it splits texts."""
    model, parts = made["model"], []
    for part in splits:
        if part["type"] == "Digits" and part["individual_digits"]:
            parts.append(DIGITS)
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            parts.append(part["pattern"].get("Regex"))
        elif part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            parts += [GPT2] if part["use_regex"] else []
        else:
            raise ValueError(f"convert: llama.cpp does not split texts by {json.dumps(part)!r:.200}; leave --gguf out")
    normal = [part["type"] for part in vocabulary.flat(made["normalizer"], "normalizers")]
    if normal not in ([], ["NFC"]):
        raise ValueError(f"convert: llama.cpp does not change texts by {normal} first; leave --gguf out")
    merges = [tuple(pair) if not isinstance(pair, str) else tuple(pair.split(" ")) for pair in model["merges"]]
    whole = model["ignore_merges"]
    if not merges:
        raise ValueError("convert: llama.cpp needs a tokenizer with merges, got one of bytes alone; leave --gguf out")
    found = [name for name, (ours, _, kept) in SPLITS.items() if ours == tuple(parts) and kept == whole]
    if not found:
        raise ValueError(
            f"convert: llama.cpp is not known to split texts by {' then '.join(parts) or 'nothing'!r:.200}"
            f"{', keeping words that are tokens,' if whole else ''}; leave --gguf out"
        )
    marks = found[0] in vocabulary.MARKS
    warnings = ["llama.cpp splits words with combining marks, as in Hindi and Thai, in another way"] if marks else []
    values = {f"{KEY}model": BPE, f"{KEY}pre": found[0], f"{KEY}merges": [" ".join(pair) for pair in merges]}
    return values, warnings


def _sentencepiece(
    made: dict, splits: list[dict], ids: dict[str, int], tokens: list[str], types: list[int]
) -> tuple[dict[str, Any], list[str]]:
    """BPE of SentencePiece: the scores that its merges follow from, and whether a space comes first."""
    model = made["model"]
    normal = vocabulary.flat(made["normalizer"], "normalizers")
    prefix, scheme = any(part["type"] == "Prepend" for part in normal), "always"
    spaces = any(part["type"] == "Replace" and part["content"] == SPACE for part in normal)
    other = [part["type"] for part in normal if part["type"] not in ("Prepend", "Replace")]
    for part in splits:
        if part["type"] == "Metaspace":
            scheme, spaces = part["prepend_scheme"], True
            prefix = prefix or scheme != "never"
        elif not (part["type"] == "Split" and part["pattern"] == {"String": " "}):  # there are none left
            other.append(part["type"])
    if other or not spaces or not model["byte_fallback"]:
        raise ValueError(
            f"convert: llama.cpp has no tokenizer like this one, without bytes and with {other or 'no'} parts; leave "
            "--gguf out"
        )
    plain = {text: id for text, id in ids.items() if types[id] == NORMAL}
    scores = [LOW] * len(tokens)
    for id in plain.values():
        scores[id] = -len(model["merges"]) - 1.0
    pairs = [tuple(pair) if not isinstance(pair, str) else tuple(pair.split(" ")) for pair in model["merges"]]
    for rank in range(len(pairs) - 1, -1, -1):
        scores[ids["".join(pairs[rank])]] = -float(rank)
    known = {*pairs}
    if missing := [pair for pair in vocabulary.merges_of(plain, scores) if pair not in known]:
        raise ValueError(
            "convert: llama.cpp joins every two tokens that make a third, and this tokenizer does not join "
            f"{' and '.join(map(repr, missing[0]))}; leave --gguf out"
        )
    for id, text in enumerate(tokens):
        if types[id] == NORMAL and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[id] = BYTE
    if model["unk_token"] in ids:
        types[ids[model["unk_token"]]] = UNKNOWN
    warnings = []
    if scheme == "first":
        warnings.append("llama.cpp puts a space before texts behind special tokens, too, which this tokenizer does not")
    return {
        f"{KEY}model": SENTENCEPIECE, f"{KEY}pre": "default", f"{KEY}scores": scores,
        f"{KEY}add_space_prefix": prefix,
    }, warnings  # fmt: skip


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, Any]:
    found = {f"{KEY}{key}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name, key in NAMES.items()}
    out = {key: id for key, id in found.items() if id is not None}
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    before, behind = whole[:at], whole[at + len(bare) :]
    first = before[0] if before else tokenizer.bos_token_id
    if len(before) > 1 or len(behind) > 1 or (behind and behind[0] != tokenizer.eos_token_id):
        raise ValueError(f"convert: llama.cpp puts one token before and behind a text, this tokenizer {whole}")
    if first is not None:
        out[f"{KEY}bos_token_id"] = first
    out |= {f"{KEY}add_bos_token": bool(before), f"{KEY}add_eos_token": bool(behind)}
    known = out.get(f"{KEY}eos_token_id")
    further = [id for id in ends if id != known]
    if known is None and further:
        out[f"{KEY}eos_token_id"] = further.pop(0)
    if len(further) > len(FURTHER_ENDS):
        raise ValueError(
            f"convert: a GGUF file names up to {1 + len(FURTHER_ENDS)} ends of a text, got {[*ends]}; name fewer in "
            "generation_config.json"
        )
    return out | {f"{KEY}{name}_token_id": id for name, id in zip(FURTHER_ENDS, further, strict=False)}


def _templates(tokenizer: Any) -> dict[str, Any]:
    template = tokenizer.chat_template
    if not template:
        return {}
    named = template if isinstance(template, dict) else {"default": template}
    for name in named:
        vocabulary.check_template_name(name, "convert")
    out = {f"{TEMPLATE}.{name}": text for name, text in named.items() if name != "default"}
    out |= {f"{TEMPLATE}s": sorted(named)} if len(named) > 1 else {}
    return out | ({TEMPLATE: named["default"]} if "default" in named else {})
