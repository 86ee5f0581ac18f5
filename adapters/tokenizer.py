"""Tokenizers of transformers: loading, tiny ones made here, and demonstrations to ids."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..rollout.chat import demonstration, template
from ..rollout.chat.template import encode as encode
from .runtime import hub, template_trial

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
EXTRA = "<|extra_"
CHAT_TEMPLATE = (  # the generation block marks the assistant's tokens and does not change the text
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IMPORTING = threading.Lock()
LARGEST = 2**28  # bytes of a file
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
OBJECTS = "config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"
READ = (  # what tokenizers read of a folder
    *FILES, "config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


# -- loading and creating ------------------------------------------------------------------------


def load(path: str | Path) -> Any:
    """Loads the tokenizer of a model folder, or of a hub model `owner/name`."""
    is_path = isinstance(path, Path)
    path = hub.folder(path, needs=FILES)
    folder = Path(path)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in FILES):
            adapters = (folder / "adapter_config.json").is_file()
            what = (
                f"; merge its adapters: areax convert {path} MERGED --merge" if adapters else f"; it needs {FILES[0]}"
            )
            raise ValueError(f"tokenizer.load: no tokenizer in the folder {path}{what}")
        for file in (folder / name for name in READ if os.path.lexists(folder / name)):
            if not file.is_file() or file.stat().st_size > LARGEST:
                raise ValueError(
                    f"{file}: a tokenizer's files must be regular files of at most {LARGEST >> 20} MiB; remove it, or "
                    "copy it again from its source"
                )
        for file in filter(Path.is_file, (*folder.glob("tokenizer*.json"), *(folder / name for name in OBJECTS))):
            try:
                if not isinstance(json.loads(file.read_bytes()), dict):
                    raise ValueError("no JSON object")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: damaged or half-written: {error}; copy it again from its source") from None
    elif is_path or path.startswith(("/", ".", "~")) or "/" in path:
        raise ValueError(f"tokenizer.load: no such folder, got {path}")
    else:
        hub.check(path)
    transformers = _transformers()
    kind: Any = transformers.PreTrainedTokenizerFast if _plain(folder) else transformers.AutoTokenizer
    try:
        tokens = kind.from_pretrained(folder if folder.is_dir() else path)
    except Exception as error:
        if not (isinstance(error, OSError | ValueError | KeyError) or type(error) is Exception):  # of `tokenizers`
            raise
        raise ValueError(f"tokenizer.load: {path} cannot be loaded: {_line(error)}") from None
    _check_template(tokens, path)
    return tokens


def _check_template(tokens: Any, path: str) -> None:
    """Raises ValueError for a chat template that does not end, or grows, on a short conversation: it is a program of
    the checkpoint's author, and nothing can stop it once it runs in earnest."""
    templates = tokens.chat_template or {}
    for text in templates.values() if isinstance(templates, Mapping) else [templates]:
        if wrong := template_trial.problem(template.GENERATION.sub("", text)):
            raise ValueError(f"{path}: its chat template must {wrong}; use a checkpoint that you trust")


def _transformers() -> Any:
    """The module. Of two threads that import it first at a time, one would see it without its classes."""
    with IMPORTING:
        import transformers

        return transformers


def _plain(folder: Path) -> bool:
    """Whether tokenizer.json is sufficient, judged by the folder's tokenizer_class. AutoTokenizer would read the
    model's config, which imports torch and takes two seconds. Qwen2 needs AutoTokenizer: it has its own class."""
    if not (folder / "tokenizer.json").is_file():
        return False
    read = lambda file: json.loads(file.read_bytes()) if file.is_file() else {}
    config, model = read(folder / "tokenizer_config.json"), read(folder / "config.json")
    if not (isinstance(config, dict) and isinstance(model, dict)) or "auto_map" in config:
        return False
    named = config.get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend") and model.get("model_type") != "qwen2"


def bind(tokenizer: Any, variables: Mapping[str, Any]) -> Any:
    """Gives variables such as enable_thinking to the chat template, wherever this tokenizer renders one; returns it.

    Those that a caller gives as well win. The template that `save` writes does not change.

    Raises:
      ValueError: there is no chat template, it does not read one of the variables, or that is not one to choose, such
        as messages.
    """
    if not variables:
        return tokenizer
    read = sorted(template.variables_of(tokenizer))
    if unread := [name for name in variables if name not in read]:
        raise ValueError(f"the chat template reads {', '.join(read) or 'no variables'}, got {', '.join(unread)}")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **variables)
    return tokenizer


def save(tokenizer: Any, path: str | Path) -> None:
    """Writes the tokenizer's files into a folder, chat template included.

    Fast tokenizers are saved under the class name that both transformers 4 and 5 know, since servers that read a
    published version may run either.
    """
    folder = Path(path)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of `tokenizers`, whose errors have no type of their own, and of files without a name
        code = re.search(r"os error (\d+)", str(error)) if type(error) is Exception else None
        number = int(code[1]) if code else error.errno if isinstance(error, OSError) else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        file.write_text(text, encoding="utf-8")


def character(
    alphabet: Iterable[str], *, words: Sequence[str] = ("system", "user", "assistant"), multiple: int = 32
) -> Any:
    """A character-level tokenizer, with one extra token for each of `words` (the roles of a chat).

    Ids are in the order <pad>, <unk>, <|im_start|>, <|im_end|>, the newline, `words`, the alphabet; the vocabulary is
    padded to a multiple of `multiple` with unused special tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted({*alphabet} - {"\n"})
    if any(len(c) != 1 for c in characters):
        raise ValueError("tokenizer.character: the alphabet must hold single characters")
    vocabulary = _padded([PAD, UNKNOWN, START, END, "\n", *words, *characters], multiple)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    return _as_fast_tokenizer(inner, vocabulary, unk_token=UNKNOWN)


def byte_level(*, multiple: int = 32) -> Any:
    """A tokenizer of UTF-8 bytes, for any text: 256 + 3 tokens, padded to a multiple of `multiple`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = _padded([PAD, START, END, *alphabet], multiple)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _as_fast_tokenizer(inner, vocabulary)


def _padded(tokens, multiple):
    """{token: id} in the given order, padded with <|extra_i|>."""
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"{EXTRA}{i}|>" for i in range(-len(tokens) % multiple)]
    return {token: i for i, token in enumerate(tokens)}


def _as_fast_tokenizer(inner, vocabulary, **special):
    named = {PAD, UNKNOWN, START, END}
    inner.add_special_tokens([t for t in vocabulary if t in named or t.startswith(EXTRA)])
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, **special
    )


# -- demonstrations --------------------------------------------------------------------------------


def supervised(tokenizer: Any, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids) of a row without images, as `chat_sft.demonstration` has them of the last turn."""
    ids, mask, *_ = demonstration.encoded(tokenizer, row, "last", end_of_turn(tokenizer)).whole()
    start = mask.index(True)
    return ids[:start], ids[start:]


def stepwise(tokenizer: Any, row: Mapping[str, Any], steps: Sequence[str], marker: str) -> tuple[list[int], list[int]]:
    """(ids of the row's prompt and its completion in steps, the index of the last token of each).

    A step and the marker behind it are encoded separately, as in TRL's PRMTrainer, so that the marker's tokens are the
    same after every step.
    """
    ids, ends, mark = template.prompt(tokenizer, row), [], encode(tokenizer, marker)
    for step in steps:
        ids += [*encode(tokenizer, step), *mark]
        ends.append(len(ids) - 1)
    return ids, ends


def end_of_turn(tokenizer: Any) -> int:
    """The token that ends an assistant turn in the chat template, else the end-of-text token."""
    end = _turn_marker(tokenizer)
    if end is None and tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token; set its eos_token")
    return tokenizer.eos_token_id if end is None else end


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a completion: the ends of a turn and of a turn of calls, which training learns, and the end
    of text, as far as the tokenizer has them. Whatever generates, or exports a model, takes them from here."""
    try:
        turn = _turn_marker(tokenizer)
    except ValueError:  # the template cannot write a conversation, so nothing is trained on its turns
        turn = None
    called = tokenizer.convert_tokens_to_ids(end) if (end := template.call_end(tokenizer)) else None
    return tuple(sorted({turn, called, tokenizer.eos_token_id} - {None}))


def _turn_marker(tokenizer):
    """The special token after an assistant's turn in the chat template, or None: the first that the turn itself does
    not have, such as <|close|> after a thought."""
    return _marker(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else None


@functools.lru_cache(maxsize=32)  # once per template, not per row
def _marker(tokenizer, chat_template):
    special, ids = template.special_tokens(tokenizer), functools.partial(tokenizer.encode, add_special_tokens=False)
    found = [id for id in ids(template.closing(tokenizer)) if id in special]
    inside = ids(template.opening(tokenizer))
    return next((id for id in found if id not in inside), found[0] if found else None)


def _line(error):
    return " ".join(str(error).split())
