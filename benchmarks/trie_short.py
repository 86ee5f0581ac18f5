"""GRPO's update on 16 samples with a prompt of 512 tokens and completions of 256: 12,288 tokens, 4,608 of them
different."""

import trie

UNIT, PEERS = "tokens/s", {"S": ("rows",), "M": ("rows",)}
PROMPT, NEW = 512, 256


def paths(model):
    return trie.group(trie.sizes.HF[model]["vocab_size"], PROMPT, NEW)


def work(model):
    return trie.GROUP * (PROMPT + NEW), trie.flops(model, paths(model))


def ours(folder, model):
    return trie.ours(folder, paths(model), PROMPT + trie.GROUP * NEW)


def rows(folder, model):
    return trie.rows(folder, paths(model), PROMPT + NEW, trie.GROUP)
