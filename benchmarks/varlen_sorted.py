"""A training step on sequences of very different lengths, sorted by length to minimise padding."""

import varlen
from varlen import work as work

UNIT, PEERS = "tokens/s", {"S": ("transformers",)}


def ours(folder, model):
    return varlen.ours(folder, sorted(varlen.LENGTHS))


def transformers(folder, model):
    return varlen.transformers(folder, sorted(varlen.LENGTHS))
