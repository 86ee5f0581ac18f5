"""Tokenizers: loading and saving, tiny tokenizers, encoding chats, and incremental decoding."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

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
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
REPLACEMENT = "\ufffd"  # decoded for bytes that are invalid or incomplete UTF-8


# -- loading and creating ------------------------------------------------------------------------


def load(path: str | Path) -> Any:
    """Loads the tokenizer of a model folder, or of a hub model `owner/name`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in FILES):
            raise ValueError(f"tokenizer.load: no tokenizer in the folder {path}; it needs {FILES[0]}")
        for file in (*folder.glob("tokenizer*.json"), *folder.glob("config.json")):
            try:
                json.loads(file.read_bytes())
            except ValueError as error:
                raise ValueError(f"{file}: damaged or half-written: {error}; copy it again from its source") from None
    elif isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ValueError(f"tokenizer.load: no such folder, got {path}")
    import transformers

    kind: Any = transformers.PreTrainedTokenizerFast if _plain(folder) else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(folder if folder.is_dir() else path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer.load: {path} cannot be loaded: {_line(error)}") from None


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


def save(tokenizer: Any, path: str | Path) -> None:
    """Writes the tokenizer's files into a folder, chat template included.

    Fast tokenizers are saved under the class name that both transformers 4 and 5 know, since servers that read a
    published version may run either.
    """
    folder = Path(path)
    tokenizer.save_pretrained(folder)
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
    from transformers import PreTrainedTokenizerFast

    named = {PAD, UNKNOWN, START, END}
    inner.add_special_tokens([t for t in vocabulary if t in named or t.startswith(EXTRA)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, **special
    )


# -- encoding chats ------------------------------------------------------------------------------


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens added; raises ValueError for characters without a token."""
    return known(tokenizer, tokenizer.encode(text, add_special_tokens=False), text)


def encode_chat(tokenizer: Any, messages: Sequence[dict]) -> list[int]:
    """Token ids of a conversation by the chat template, up to and including the generation prompt."""
    check(messages)
    if not tokenizer.chat_template:
        raise ValueError(
            "tokenizer.encode_chat: the tokenizer has no chat template; "
            "use a chat model's tokenizer, or rows with a plain prompt"
        )
    ids = rendered(
        tokenizer.apply_chat_template, list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return known(tokenizer, ids, *texts(messages))


def prompt(tokenizer: Any, row: dict) -> list[int]:
    """Prompt ids of a row: its `messages`, else its `prompt` as a user message; without a chat template, the prompt is
    plain text to be continued."""
    if row.get("messages"):
        return encode_chat(tokenizer, row["messages"])
    if not isinstance(row.get("prompt"), str):
        raise ValueError(f"a row needs messages or a prompt, got the fields {sorted(row)}")
    if tokenizer.chat_template:
        return encode_chat(tokenizer, [{"role": "user", "content": row["prompt"]}])
    return known(tokenizer, tokenizer.encode(row["prompt"]), row["prompt"])


def supervised(tokenizer: Any, row: dict) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids) of a demonstration; the completion ends with the end-of-turn token.

    The completion is the row's `completion`, else the last of its `messages` if it is the assistant's. It is encoded
    separately, as in generation: no token spans prompt and completion.
    """
    messages, completion = row.get("messages"), row.get("completion")
    if completion is None and messages and messages[-1].get("role") == "assistant":
        row, completion = {**row, "messages": messages[:-1]}, messages[-1].get("content")
    if not isinstance(completion, str):
        raise ValueError(f"a demonstration needs a completion, got the fields {sorted(row)}")
    return prompt(tokenizer, row), [*encode(tokenizer, completion), end_of_turn(tokenizer)]


def end_of_turn(tokenizer: Any) -> int:
    """The token that ends an assistant turn in the chat template, else the end-of-text token."""
    return _end_of_turn(tokenizer, tokenizer.chat_template, tokenizer.eos_token_id)


@functools.lru_cache(maxsize=32)  # once per tokenizer, not per row
def _end_of_turn(tokenizer, template, eos):
    if template:
        content = "areax"
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        after = tokenizer.encode(text[text.rfind(content) + len(content) :], add_special_tokens=False)
        special = _special(tokenizer)
        for id in after:
            if id in special:
                return id
    if eos is None:
        raise ValueError("the tokenizer has no end-of-text token; set its eos_token")
    return eos


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """Stop token ids for a config's eos_token_id: end of turn and end of text."""
    ids = {end_of_turn(tokenizer), tokenizer.eos_token_id} - {None}
    return tuple(sorted(ids))


def _special(tokenizer):
    added = tokenizer.added_tokens_decoder.items()
    return {id for id, token in added if token.special}.union(tokenizer.all_special_ids)


def check(messages: Sequence[dict]) -> None:
    """Raises ValueError unless each message has a role and a content."""
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a message needs a role and a content, got {str(message)[:80]}")


def texts(messages: Sequence[dict]) -> list[str]:
    """The texts of the messages that a chat template renders, for `known`."""
    return [str(message[field]) for message in messages for field in ("role", "content")]


def rendered(render: Callable, *args, **kwargs) -> Any:
    """Calls `render(...)` of a chat template; its errors become a one-line ValueError."""
    from jinja2 import TemplateError

    try:
        return render(*args, **kwargs)
    except TemplateError as error:
        raise ValueError(f"tokenizer: the chat template rejects the messages: {_line(error)}") from None


def known(tokenizer: Any, ids: list[int], *texts: str) -> list[int]:
    """Returns `ids`, the encoded texts; raises ValueError if a text contains the unknown token, which is lossy."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return ids
    is_unknown = lambda text: unknown in tokenizer.encode(text, add_special_tokens=False)
    for text in filter(is_unknown, texts):
        lost = "".join(dict.fromkeys(filter(is_unknown, text)))
        raise ValueError(
            f"the tokenizer has no token for {lost or tokenizer.unk_token!r} in {text[:80]!r}; add it to its alphabet"
        )
    return ids


# -- incremental decoding ------------------------------------------------------------------------


class Decoder:
    """Decodes token ids incrementally into pieces of text, which concatenate to the full text.

    No piece ends within a character: incomplete bytes are held back until the next token completes them or `finish`
    flushes them. The work per token does not grow with the text.

    Attributes:
      text: the concatenated pieces so far.
    """

    CONTEXT = 8  # tokens: more than the 3 bytes of an incomplete character plus a word before it

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True):
        self.text = ""
        self._tokenizer = tokenizer
        self._skipped = _special(tokenizer) if skip_special_tokens else set()
        self._window: list[int] = []  # the last tokens
        self._shown = 0  # characters of the window's text already returned

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text they complete, possibly ""."""
        self._window += [id for id in ids if id not in self._skipped]
        text = self._decode(self._window)
        piece = text[self._shown : len(text) - self._held(text)]
        self._shown += len(piece)
        self._forget(text)
        self.text += piece
        return piece

    def finish(self) -> str:
        """Returns the text held back, at the end of the sequence."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        self.text += piece
        return piece

    def _decode(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _held(self, text):
        """Number of characters at the end that may still change.

        Byte-level tokenizers decode an incomplete character as one U+FFFD; those with byte-fallback tokens like <0xE2>
        decode one U+FFFD per byte of the run.
        """
        held = len(text) - len(text.rstrip(REPLACEMENT))
        return held if self._is_byte(self._window[-1:]) else min(held, 1)

    def _forget(self, text):
        """Drops all but the last tokens, which decode the same without the others."""
        kept = self._window[-self.CONTEXT :]
        if len(self._window) > 2 * self.CONTEXT and not self._is_byte(kept):
            held = len(text) - self._shown
            self._window, self._shown = kept, len(self._decode(kept)) - held

    def _is_byte(self, ids):
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        return any(token and re.fullmatch("<0x[0-9A-F]{2}>", token) for token in tokens)


def _line(error):
    return " ".join(str(error).split())
