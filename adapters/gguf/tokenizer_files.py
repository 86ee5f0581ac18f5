"""A tokenizer's files, of a file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import vocabulary
from .container import File
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

NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
ENDS = ("eos", "eot", "eom")


def files(file: File, vocab: int) -> dict[str, Any]:
    """{name: object, or text} of the tokenizer's files; templates may be in a folder of their own.

    Args:
      vocab: tokens of the model.

    Raises:
      ValueError: the tokenizer is of a kind that is not implemented, or damaged.
    """
    kind = file.get(f"{KEY}model", str)
    if kind not in (BPE, SENTENCEPIECE):
        raise ValueError(f"{file.path}: {KEY}model must be {BPE} or {SENTENCEPIECE}, got {kind!r:.80}")
    tokens = _list(file, "tokens", str, vocab)
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{file.path}: {KEY}tokens must be different from each other; copy it again")
    types = _list(file, "token_type", int, len(tokens), [NORMAL] * len(tokens))
    ids = {text: id for id, text in enumerate(tokens) if not (types[id] == UNUSED and text == PADDING.format(id))}
    found = {name: token_id(file, key, len(tokens)) for name, key in NAMED.items()}
    special = {name: id for name, id in found.items() if id is not None}
    made = _bpe(file, ids) if kind == BPE else _sentencepiece(file, ids, types)
    made["added_tokens"] = [
        {
            "id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": types[id] != USER_DEFINED,
        }
        for text, id in ids.items() if types[id] in (CONTROL, USER_DEFINED, UNKNOWN) or id in special.values()
    ]  # fmt: skip
    text_of = {name: tokens[id] for name, id in special.items()}
    made["post_processor"] = _around(file, text_of, special, kind)
    config = {f"{name}_token": text for name, text in text_of.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.metadata.get(f"{file.metadata['general.architecture']}.context_length"),
    }
    order = ("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
    whole = {"version": "1.0", "truncation": None, "padding": None} | made
    out: dict[str, Any] = {
        "tokenizer.json": {name: whole[name] for name in (*order, "decoder", "model")}, "tokenizer_config.json": config,
    }  # fmt: skip
    if template := file.get(TEMPLATE, str):
        out["chat_template.jinja"] = template
    for key in file.metadata:
        if key.startswith(f"{TEMPLATE}."):
            name = key.removeprefix(f"{TEMPLATE}.")
            vocabulary.check_template_name(name, str(file.path))
            out[f"additional_chat_templates/{name}.jinja"] = file.get(key, str)
    return out


def ends(file: File, count: int) -> list[int]:
    """The tokens that end a text, a turn or a message, of `count`."""
    found = (token_id(file, name, count) for name in ENDS)
    return list(dict.fromkeys(id for id in found if id is not None))


def token_id(file: File, name: str, count: int) -> int | None:
    """The id of a special token such as "bos", None if there is none; ValueError if it is none of `count`."""
    key = f"{KEY}{name}_token_id"
    id = file.get(key, int)
    if id is not None and not 0 <= id < count:
        raise ValueError(f"{file.path}: {key} must be below {count}, the number of tokens, got {id}; copy it again")
    return id


def _list(file: File, name: str, kind: type, count: int, default: list | None = None) -> list:
    value = file.metadata.get(f"{KEY}{name}", default)
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, list) else f"{value!r:.80}"
        raise ValueError(f"{file.path}: {KEY}{name} must have {count} entries, one a token of the model, got {got}")
    return value


def _bpe(file: File, ids: Mapping[str, int]) -> dict[str, Any]:
    pre = file.get(f"{KEY}pre", str)
    if pre not in SPLITS:
        raise ValueError(
            f"{file.path}: {KEY}pre must be one of {', '.join(SPLITS)}, got {pre!r:.80}; use the original checkpoint"
        )
    patterns, nfc, whole_words = SPLITS[pre]
    parts: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True} if pattern == DIGITS
        else {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns if pattern != GPT2
    ]  # fmt: skip
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": GPT2 in patterns}
    merges = file.metadata.get(f"{KEY}merges")
    pairs = [tuple(one.split(" ")) if isinstance(one, str) else () for one in merges or ()]
    if merges is None or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{file.path}: {KEY}merges must be pairs of texts, got {merges!r:.80}; copy it again")
    if unknown := [pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()]:
        raise ValueError(f"{file.path}: {KEY}merges must be of tokens, got {unknown[0]}; copy it again")
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, bytes_]} if parts else bytes_,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(ids, [list(pair) for pair in pairs], ignore_merges=whole_words),
    }


def _sentencepiece(file: File, ids: Mapping[str, int], types: list[int]) -> dict[str, Any]:
    scores = _list(file, "scores", float | int, len(types))  # type: ignore[arg-type]
    mergeable = {text: id for text, id in ids.items() if types[id] in (NORMAL, UNUSED)}
    # A token of the user is stored with spaces, which are others to the merges of words.
    blank = [text for text, id in ids.items() if types[id] == USER_DEFINED and not text.strip(" \n\t")]
    mergeable |= {text.replace(" ", SPACE): ids[text] for text in blank}
    prefix = file.get(f"{KEY}add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    first = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((text for text, id in ids.items() if types[id] == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
        if prefix
        else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *first]},
        "model": _model(
            ids, [list(pair) for pair in vocabulary.merges_of(mergeable, scores)], unknown, BYTE in types, True
        ),
    }  # fmt: skip


def _model(
    ids: Mapping[str, int], merges: list, unknown: str | None = None, byte_fallback: bool = False,
    fuse_unk: bool = False, ignore_merges: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": fuse_unk, "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges, "vocab": dict(ids), "merges": merges,
    }  # fmt: skip


def _around(file: File, text_of: Mapping[str, str], ids: Mapping[str, int], kind: str) -> dict[str, Any] | None:
    """What is put before and behind a text."""
    before = file.get(f"{KEY}add_bos_token", bool, kind == SENTENCEPIECE and "bos" in ids)
    behind = file.get(f"{KEY}add_eos_token", bool, False)
    for name, there in (("bos", before), ("eos", behind)):
        if there and name not in ids:
            raise ValueError(f"{file.path}: {KEY}add_{name}_token needs {KEY}{name}_token_id, which is missing")
    if not (before or behind):
        return None
    token = lambda name, place: {"SpecialToken": {"id": text_of[name], "type_id": place}}
    around = lambda letter, place: [
        *([token("bos", place)] if before else []),
        {"Sequence": {"id": letter, "type_id": place}},
        *([token("eos", place)] if behind else []),
    ]
    used = [name for name, there in (("bos", before), ("eos", behind)) if there]
    return {
        "type": "TemplateProcessing", "single": around("A", 0), "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text_of[name]: {"id": text_of[name], "ids": [ids[name]], "tokens": [text_of[name]]} for name in used
        },
    }  # fmt: skip
