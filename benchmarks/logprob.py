"""Log-probability of each next token of 8 sequences of 512 tokens, without gradients; fp32.

areax also computes entropies, as `models.score` always does; the peer does not.
"""

import numpy as np
import peers
import sizes
from train import LENGTHS, rows

UNIT, PEERS = "tokens/s", {"M": ("transformers",), "S": ("transformers",)}


def work(model):
    return sum(LENGTHS), sizes.flops(model, LENGTHS, backward=False)


def ours(folder, model):
    """Returns a function that scores once and returns the mean."""
    from functools import partial

    from areax import models
    from areax.adapters import hf
    from areax.core import packing, step
    from areax.rollout.types import supervised

    config, params = hf.load(folder)
    scores = step.make_scores(partial(models.score, config=config, run=models.Run()))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in enumerate(rows(config.vocab))]

    def once():
        batch = packing.pack(samples, max(LENGTHS), rows=len(LENGTHS))
        return float(np.asarray(scores(params, batch).logp_BT)[batch.mask_BT].mean())

    return once


def transformers(folder, model):
    import torch

    net = peers.causal_lm(folder).eval()
    token = torch.from_numpy(np.stack(rows(net.config.vocab_size)))

    @torch.inference_mode()
    def once():
        logits = net(input_ids=token, use_cache=False).logits[:, :-1]
        picked = logits.gather(-1, token[:, 1:, None])[..., 0]
        return (picked - logits.logsumexp(-1)).mean().item()

    return once
