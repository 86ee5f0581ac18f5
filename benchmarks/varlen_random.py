"""A training step on 64 sequences of very different lengths, in random order.

Packed here; padded in microbatches of 8 there, which is what a data collator does. One optimiser step, mean over all
tokens of the batch; fp32.
"""

import numpy as np
import sizes
from train import ADAM, CLIP, packed

CASE, PEER, UNIT, MODELS = "varlen_random", "transformers", "tokens/s", ("S",)
LENGTHS = np.clip(np.exp(np.random.default_rng(595).normal(5.0, 0.65, 64)), 16, 1024).astype(int).tolist()
MICRO = 8  # sequences a padded microbatch
ROW, ROWS = 768, 3  # packed rows of so many tokens, so many a microbatch


def work(model):
    return sum(LENGTHS), sizes.flops(model, LENGTHS, backward=True)


def rows(vocab):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n) for n in LENGTHS]


def ours(folder, model):
    """A function that takes one step and returns its loss."""
    return packed(folder, rows, ROW, ROWS)


def theirs(folder, model):
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=ADAM["lr"], betas=(ADAM["b1"], ADAM["b2"]), eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"], fused=True,
    )  # fmt: skip
    sequences = [torch.from_numpy(row) for row in rows(net.config.vocab_size)]
    learnt = sum(LENGTHS) - len(LENGTHS)

    def once():
        total = 0.0
        for i in range(0, len(sequences), MICRO):
            some = sequences[i : i + MICRO]
            token = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in some], batch_first=True)
            label = token.masked_fill(mask == 0, -100)
            out = net(input_ids=token, attention_mask=mask, labels=label, num_items_in_batch=learnt, use_cache=False)
            out.loss.backward()
            total += out.loss.item()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return once
