"""Greedy generation for 128 requests of 64 tokens with answers of different lengths, 16 at a time; fp32.

areax uses continuous batching. The peer runs static batches of 16 in order of arrival, each until its longest answer is
complete, as a sampler without individual requests must. Only requested tokens count.
"""

import numpy as np
import peers
import sizes

UNIT, PEERS = "tokens/s", {"S": ("tunix",)}
REQUESTS, SLOTS, PROMPT, LONGEST = 128, 16, 64, 512
# The mean is 128. Static batches decode 3.01 times as many tokens; over 2,000 seeds the median is 2.98.
LENGTHS = sizes.lognormal(REQUESTS, mean=128, sigma=0.8, longest=LONGEST, seed=25)


def work(model):
    # All tokens but the last of each sequence pass through the model once.
    return sum(LENGTHS), sizes.flops(model, [PROMPT + n - 1 for n in LENGTHS], backward=False)


def prompts(vocab):
    return np.random.default_rng(0).integers(0, vocab, (REQUESTS, PROMPT)).tolist()


def ours(folder, model):
    """Returns a function that serves all requests once and returns the new tokens."""
    from areax.adapters import hf
    from areax.rollout.engine.engine import Engine
    from areax.rollout.engine.request import Request, Sampling

    config, params = hf.load(folder)
    engine = Engine(config, params, slots=SLOTS, context=PROMPT + LONGEST)
    asked = [
        Request(str(i), tuple(prompt), Sampling(temperature=0.0, max_new_tokens=n, ignore_eos=True))
        for i, (prompt, n) in enumerate(zip(prompts(config.vocab), LENGTHS, strict=True))
    ]

    def once():
        return [token for progress in engine.generate(asked) for token in progress.tokens]

    return once


def tunix(folder, model):
    vocab = sizes.config(model)["vocab_size"]
    sample = peers.tunix_sampler(folder, vocab, PROMPT + LONGEST)
    texts = [peers.text(prompt) for prompt in prompts(vocab)]

    def once():
        new = []
        for start in range(0, REQUESTS, SLOTS):
            lengths = LENGTHS[start : start + SLOTS]
            made = sample(
                texts[start : start + SLOTS], max_generation_steps=max(lengths), max_prompt_length=PROMPT
            )  # fmt: skip
            for row, n in zip(made.tokens, lengths, strict=True):
                new += row[:n].tolist()
        return new

    return once
