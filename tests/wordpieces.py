"""Tokenizers whose tokens are parts of a character, single characters or several."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "Grüße aus Zürich 😀👍🏽, ça va ? 数学は楽しい。 The quick brown fox doesn't jump ."


def trained():
    """Byte-level BPE with merges: some tokens are parts of a character, some are several characters."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")


def falling_back():
    """Byte fallback as in Llama 2 and Gemma: words start with a mark, unknown characters become <0xE2>-like tokens."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdeé.", "▁a", "ab", "cd"]
    inner = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("c", "d")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
