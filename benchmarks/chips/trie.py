"""A GRPO update on a group of samples that share their prompt, as rows and as a trie.

One microbatch each: a row per sample, or one row that holds the prompt once and every completion.
"""

import math

from chips import shapes, train


def measure(shape, samples, prompt, completion, layout, remat, dtype, steps, uncounted, *, chip, keep) -> dict:
    """Runs and times the training steps; tokens/s counts the tokens of the samples, in both layouts. The gradient's
    norm is that of the first step: the rounding of a step moves the weights of the next.

    Args:
      samples: completions of the one prompt.
      prompt, completion: tokens of each.
      layout: "rows" or "trie".
    """
    import numpy as np

    from areax import models
    from areax.core import losses, packing
    from areax.rollout.types import Completion, sampled

    config = models.config_from_hf(shapes.hf(shape, prompt + completion))
    rng = np.random.default_rng(0)
    asked, uniform = rng.integers(0, config.vocab, prompt).tolist(), [-math.log(config.vocab)] * completion

    def sample(i):
        made = Completion(rng.integers(0, config.vocab, completion).tolist(), uniform, [0] * completion, "length")
        return sampled(asked, made, temperature=1.0, reward=float(rng.random()), group=0, rollout=i, sample=i)

    group = [sample(i) for i in range(samples)]
    if layout == "trie":
        batch = packing.pack_tries(group, prompt + samples * completion, rows=1, align=models.trie_alignment(config))
    else:
        batch = packing.pack(group, prompt + completion, rows=samples)
    objective = losses.GRPO(correction={"proximal": "behaviour"})
    once, reports = train.stepping(config, objective, batch, models.Run(dtype=dtype, remat=remat)), []
    times, _ = train.timed(lambda: reports.append(once()), steps, uncounted)
    return {
        "tokens_per_s": samples * (prompt + completion) / times["step_s"], **times, "peak_bytes": train.peak_bytes(),
        "trie_ratio": packing.trie_ratio(batch), "grad_norm": float(reports[0]["grad_norm"].sum),
    }  # fmt: skip
