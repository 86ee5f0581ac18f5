"""GRPO's update on 16 samples with a prompt of 2,048 tokens and completions of 256: 36,864 tokens, 6,144 of them
different."""

import trie

UNIT, PEERS = "tokens/s", {"S": ("rows", "trl"), "M": ("rows",)}
PROMPT, NEW = 2048, 256


def paths(model):
    return trie.group(trie.sizes.HF[model]["vocab_size"], PROMPT, NEW)


def work(model):
    return trie.GROUP * (PROMPT + NEW), trie.flops(model, paths(model))


def ours(folder, model):
    return trie.ours(folder, paths(model), PROMPT + trie.GROUP * NEW)


def rows(folder, model):
    return trie.rows(folder, paths(model), PROMPT + NEW, trie.GROUP)


def trl(folder, model):
    return trie.trl(folder, paths(model))
