"""Random models of the families that GGUF files hold, and tokenizers of the kinds that llama.cpp knows."""

from pathlib import Path

import tiny
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as inner_models
from transformers import PreTrainedTokenizerFast

from areax import models
from areax.adapters import hf
from areax.adapters.gguf import vocabulary

WORDS = ("the", "and", " the", " and", "ing", "ed", "0", "un", "é", "日本", "😀", "\n\n", "  ")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 16}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama with rope of Llama 3": {"model_type": "llama", "rope_scaling": LLAMA3, "max_position_embeddings": 32768},
    "llama with yarn": {"model_type": "llama", "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False, "head_dim": 16},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"num_hidden_layers": 7, "rope_theta": 1e6, "rope_scaling": {
        "rope_type": "linear", "factor": 8.0,
    }},
    "granite": {"attention_multiplier": 0.25, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
                "logits_scaling": 4.0},
    "olmo2": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 5},
}  # fmt: skip


def byte_level(pre="qwen2", extra=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), words=WORDS):
    """Byte-level BPE that makes each of the words a token, split as llama.cpp's pre-tokenizer of this name."""
    patterns, nfc, whole = vocabulary.SPLITS[pre]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words:
        text = letters.pre_tokenize_str(word)[0][0]
        for at in range(1, len(text)):
            if text[: at + 1] not in vocab:
                merges.append((text[:at], text[at]))
                vocab[text[: at + 1]] = len(vocab)
    made = Tokenizer(inner_models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    made.normalizer = normalizers.NFC() if nfc else None
    steps = [
        pre_tokenizers.Digits(individual_digits=True) if pattern == vocabulary.DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in patterns if pattern != vocabulary.GPT2
    ]  # fmt: skip
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=vocabulary.GPT2 in patterns)
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*extra])
    made.add_tokens(["<think>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=extra[-1], pad_token=extra[0], chat_template=TEMPLATE
    )


def sentencepiece(prefix=False, words=("▁the", "▁and", "ing", "▁▁", "日本", "é")):
    """BPE with bytes as SentencePiece makes it, of Llama 2 with a space first, or of Gemma."""
    vocab = {name: i for i, name in enumerate(("<unk>", "<s>", "</s>"))}
    vocab |= {f"<0x{i:02X}>": len(vocab) + i for i in range(256)}
    whole = dict.fromkeys(c for word in words for c in word) | dict.fromkeys("abcdefghijklmnopqrstuvwxyz0123456789.,")
    vocab |= {c: len(vocab) + i for i, c in enumerate(whole)}
    scores = [-1000.0] * len(vocab)
    for word in words:
        for at in range(1, len(word)):
            if word[: at + 1] not in vocab:
                vocab[word[: at + 1]] = len(vocab)
                scores.append(-float(len(scores)))
    special = {"<unk>", "<s>", "</s>"}
    merges = vocabulary.merges_of({text: id for text, id in vocab.items() if text not in special}, scores)
    made = Tokenizer(inner_models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def model(path: Path, name: str, dtype=None, tokens=None, **changes) -> Path:
    """A random model of a family of FAMILIES in a folder."""
    tokens = tokens or byte_level()
    source = {**SIZES, "model_type": name.split()[0], "eos_token_id": tokens.eos_token_id, **FAMILIES[name], **changes}
    config = models.config_from_hf({"vocab_size": -(-len(tokens) // 32) * 32, **source})
    return hf.save(path, config, tiny.weights(models.table(config), 0.1), dtype, tokenizer=tokens)


RECORDED = Path(__file__).with_name("data") / "llama_cpp.json"  # what llama.cpp says of the files of `recorded`
RECORDED_FAMILIES = ("llama with rope of Llama 3", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "granite")
RECORDED_TEXTS = ("the thing and", "  a  b\n\n\tc 12345", "é日本語 😀👍🏽 I'm", "<|im_start|>the<|im_end|> <think>x")
RECORDED_IDS = [7, 19, 230, 41, 41, 200, 3, 90, 150, 11, 64, 101]


def recorded(folder: Path, name: str) -> Path:
    """A GGUF file, in 16 bits, of a family."""
    from areax.adapters.commands import convert

    tokens = sentencepiece() if "gemma" in name else byte_level("llama-bpe" if "llama" in name else "qwen2")
    convert.convert(model(folder / "model", name, tokens=tokens), folder / "x.gguf", gguf_kind="f16")
    return folder / "x.gguf"
