"""GRPO's update on 16 samples with a prompt of 2,048 tokens and completions of 256: 36,864 tokens, 6,144 of them
different."""

import trie

UNIT, PEERS = "tokens/s", {"S": ("rows", "trl"), "M": ("rows",)}
work, ours, rows, trl = trie.group(2048, 256)
