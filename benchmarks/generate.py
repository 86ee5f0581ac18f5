"""Greedy generation of 128 tokens for each of 16 prompts of 64 tokens, without early stopping; fp32."""

import numpy as np
import peers
import sizes

UNIT, PEERS = "tokens/s", {"M": ("transformers", "tunix"), "S": ("transformers", "tunix")}
PROMPTS, PROMPT, NEW = 16, 64, 128


def work(model):
    # All tokens but the last of each sequence pass through the model once.
    return PROMPTS * NEW, PROMPTS * sizes.flops(model, [PROMPT + NEW - 1], backward=False)


def rows(vocab):
    return np.random.default_rng(0).integers(0, vocab, (PROMPTS, PROMPT))


def ours(folder, model):
    """Returns a function that generates once and returns the new tokens."""
    from areax.adapters import hf
    from areax.rollout.engine.engine import Engine
    from areax.rollout.engine.request import Request, Sampling

    config, params = hf.load(folder)
    engine = Engine(config, params, slots=PROMPTS, context=256)
    sampling = Sampling(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)

    def once():
        requests = [Request(str(i), tuple(row.tolist()), sampling) for i, row in enumerate(rows(config.vocab))]
        return [token for progress in engine.generate(requests) for token in progress.tokens]

    return once


def transformers(folder, model):
    import torch

    net = peers.causal_lm(folder).eval()
    token = torch.from_numpy(rows(net.config.vocab_size))
    more = dict(attention_mask=torch.ones_like(token), do_sample=False, eos_token_id=None, pad_token_id=0)

    @torch.inference_mode()
    def once():
        made = net.generate(token, **more, max_new_tokens=NEW, min_new_tokens=NEW)
        return made[:, PROMPT:].flatten().tolist()

    return once


def tunix(folder, model):
    vocab = sizes.config(model)["vocab_size"]
    sample = peers.tunix_sampler(folder, vocab, PROMPT + NEW)
    prompts = [peers.text(row) for row in rows(vocab).tolist()]

    def once():
        made = sample(prompts, max_generation_steps=NEW, max_prompt_length=PROMPT)
        return [token for row in made.tokens for token in row.tolist()]

    return once
