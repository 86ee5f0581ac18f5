"""Log-probability of each next token of 8 sequences of 512 tokens (R: 2), without gradients; fp32.

areax also computes entropies, as `models.score` always does; the peer does not.
"""

import numpy as np
import peers
import sizes
from train import LENGTH, count, rows

UNIT, PEERS = "tokens/s", dict.fromkeys(("M", "S", "R"), ("transformers",))


def work(model):
    return count(model) * LENGTH, sizes.flops(model, [LENGTH] * count(model), backward=False)


def ours(folder, model):
    """Returns a function that scores once and returns the mean."""
    from functools import partial

    from areax import models
    from areax.adapters import hf
    from areax.core import packing, step
    from areax.rollout.types import supervised

    config, params = hf.load(folder)
    scores = step.make_scores(partial(models.score, config=config, run=models.Run()))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in enumerate(rows(folder, model))]

    def once():
        batch = packing.pack(samples, LENGTH, rows=count(model))
        return float(np.asarray(scores(params, batch).logp_BT)[batch.mask_BT].mean())

    return once


def transformers(folder, model):
    import torch

    net = peers.causal_lm(folder).eval()
    token = torch.from_numpy(rows(folder, model))

    @torch.inference_mode()
    def once():
        logits = net(input_ids=token, use_cache=False).logits[:, :-1]
        picked = logits.gather(-1, token[:, 1:, None])[..., 0]
        return (picked - logits.logsumexp(-1)).mean().item()

    return once
