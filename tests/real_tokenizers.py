"""Tokenizers of real models, made of the vocabularies in packages as those on the hub were."""

import base64
import json
import struct
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from areax.adapters.gguf import vocabulary

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a "
    "helpful assistant.<|im_end|>\n{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)


def qwen(packages: Path):
    """Qwen2's, with one merge a token, as in its merges.txt."""
    ranks = _tiktoken((packages / "dashscope/resources/qwen.tiktoken").read_bytes())
    merges = [_halves(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _byte_level("qwen2", ranks, merges, special, CHATML, eos="<|im_end|>", pad="<|endoftext|>")


def llama3(packages: Path):
    """Llama 3's, with all merges of a token; words that are tokens are not merged."""
    ranks = _tiktoken((packages / "llama_models/llama3/tokenizer.model").read_bytes())
    special = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    return _byte_level("llama-bpe", ranks, _all_halves(ranks), special, LLAMA3, "<|eot_id|>", bos="<|begin_of_text|>")


def tekken(packages: Path):
    """Mistral NeMo's, whose special tokens come first."""
    made = json.loads((packages / "mistral_common/data/tekken_240718.json").read_bytes())
    size, reserved = made["config"]["default_vocab_size"], made["config"]["default_num_special_tokens"]
    words = [base64.b64decode(one["token_bytes"]) for one in made["vocab"][: size - reserved]]
    ranks = {word: i for i, word in enumerate(words)}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, reserved))]
    merges = _all_halves(ranks)
    return _byte_level("tekken", ranks, merges, special, MISTRAL, "</s>", bos="<s>", first=True)


def mistral(packages: Path):
    """Mistral 7B's, of SentencePiece, as tokenizer.json of Llama 2 is."""
    tokens = _sentencepiece(packages, [], prefix=True)
    tokens.chat_template = MISTRAL
    return tokens


def gemma(packages: Path):
    """A tokenizer like Gemma's, without a space first, of Mistral 7B's vocabulary."""
    tokens = _sentencepiece(packages, ["<start_of_turn>", "<end_of_turn>"], prefix=False)
    tokens.chat_template = GEMMA
    return tokens


def _tiktoken(text: bytes) -> dict[bytes, int]:
    return {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in text.splitlines() if line)}


def _halves(ranks, token: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two parts that merges below its rank make of a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [one + other for one, other in zip(parts, parts[1:], strict=False)]
        least, at = min((ranks.get(both, rank), i) for i, both in enumerate(joined))
        assert least < rank
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _all_halves(ranks) -> list[tuple[bytes, bytes]]:
    out = []
    for token, rank in ranks.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        out += [(rank, ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
    return [(one, other) for *_, one, other in sorted(out)]


def _byte_level(pre, ranks, merges, special, template, eos, bos=None, pad=None, first=False):
    letter = _letters()
    word = lambda raw: "".join(letter[b] for b in raw)
    start = len(special) if first else 0
    vocab = {name: i for i, name in enumerate(special)} if first else {}
    vocab |= {word(raw): start + rank for raw, rank in ranks.items()}
    patterns, nfc, whole = vocabulary.SPLITS[pre]
    pairs = [(word(one), word(other)) for one, other in merges]
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole))
    made.normalizer = normalizers.NFC() if nfc else None
    made.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    if bos:
        made.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, made.token_to_id(bos))])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, pad_token=pad or eos, bos_token=bos, chat_template=template
    )


def _letters() -> dict[int, str]:
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}


def _sentencepiece(packages: Path, special, prefix: bool):
    pieces = _pieces((packages / "mistral_common/data/tokenizer.model.v1").read_bytes())
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    normal = {text: i for i, (text, _, kind) in enumerate(pieces) if kind == vocabulary.NORMAL}
    merges = vocabulary.merges_of(normal, [score for _, score, _ in pieces])
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = ["<unk>", "<s>", "</s>", *special]
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _pieces(data: bytes) -> list[tuple[str, float, int]]:
    """(text, score, kind) of the tokens in a SentencePiece model, which is a protocol buffer."""

    def fields(data):
        at = 0
        while at < len(data):
            key, at = _varint(data, at)
            if key & 7 == 2:
                size, at = _varint(data, at)
                yield key >> 3, data[at : at + size]
                at += size
            elif key & 7 == 0:
                value, at = _varint(data, at)
                yield key >> 3, value
            else:
                size = {5: 4, 1: 8}[key & 7]
                yield key >> 3, data[at : at + size]
                at += size

    out = []
    for number, value in fields(data):
        if number == 1:
            piece = dict(fields(value))
            [score] = struct.unpack("<f", piece[2])
            out.append((piece[1].decode(), score, piece.get(3, 1)))
    return out


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def texts(count: int = 500) -> list[str]:
    """Texts of words, scripts, emoji, numbers, spaces and special tokens, put together at random."""
    parts = [
        "Hello", "world", " the quick", " brown", "I'm", "we'RE", "DON'T", "naïve", "café", "Zürich", "日本語",
        "テスト",
        "한국어", "中文字符", "привет", "мир", "مرحبا", "שלום", "ไทย", "हिन्दी", "Ελληνικά",
        "😀", "👍🏽", "🇩🇪", "👨‍👩‍👧", "∑", "√2", "€",
        "1", "42", "1234567890", "3.14", "2024-05-06", "1,000,000", "½", "٣", " ", "  ", "    ", "\t", "\n", "\n\n",
        " \n", "\r\n", "\n   ", " ", "...", "!?", "--", "_x_", "a.b", "(c)", "{\"k\": 1}", "<b>", "</s", "<|im",
        "def f(x):\n    return x", "https://a.b/c?d=e", "x²", "CamelCase", "ALLCAPS", "snake_case", "'", '"', "`", "#",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    made = parts[:]
    while len(made) < count:
        made.append("".join(rng.choice(np.array(parts, object), rng.integers(2, 9))))
    return made
