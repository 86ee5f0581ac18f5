"""A training step on sequences of very different lengths, in random order."""

import varlen
from varlen import work as work

UNIT, PEERS = "tokens/s", {"S": ("transformers",)}


def ours(folder, model):
    return varlen.ours(folder, varlen.LENGTHS)


def transformers(folder, model):
    return varlen.transformers(folder, varlen.LENGTHS)
