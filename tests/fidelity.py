"""A scripted policy that records what it sampled, and the check that training sees exactly that."""

import itertools

import numpy as np
from gateways import TOKENS

from areax.rollout.types import Completion, Sampling

SAMPLING = Sampling(max_new_tokens=512)


class Policy:
    """A `generate` that answers with the texts in order, the last one for ever, or with `say(prompt, turn)`.

    Attributes:
      heard: prompts as texts.
      said: (tokens, log-probabilities) of each answer; no two log-probabilities are the same.
    """

    def __init__(self, *texts, say=None):
        self._say = say or (lambda prompt, turn: texts[min(turn, len(texts) - 1)])
        self._steps = itertools.count(1)
        self.heard, self.said = [], []

    async def __call__(self, prompt, **sampling):
        self.heard.append(TOKENS.decode(prompt))
        tokens = [*TOKENS.encode(self._say(self.heard[-1], len(self.said))), TOKENS.eos_token_id]
        logp = [-next(self._steps) / 1024 for _ in tokens]
        self.said.append((tokens, logp))
        return Completion(tokens, logp, [3] * len(tokens), "stop")


def trained(samples):
    """(tokens, log-probabilities) of each turn that is trained on, in the order in which they were sampled."""
    turns = []
    for sample in samples:
        for turn in np.unique(sample.turn[sample.mask]):
            at = sample.mask & (sample.turn == turn)
            turns.append((sample.tokens[at].tolist(), sample.logp[at].tolist()))
    return sorted(turns, key=lambda turn: -turn[1][0])


def exact(policy, samples):
    """Whether each sampled turn is trained on exactly once, with its own tokens and log-probabilities."""
    return trained(samples) == policy.said
