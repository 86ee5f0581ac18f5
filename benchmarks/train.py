"""A training step on 8 sequences of 512 tokens (R: 2): forward, backward, clipping, AdamW; loss on all tokens; fp32."""

import numpy as np
import peers
import sizes

UNIT = "tokens/s"
BOTH = ("transformers", "tunix")
PEERS = {"M": BOTH, "S": BOTH, "MoE": ("transformers",), "R": BOTH}
LENGTH = 512
# Rows per microbatch: on dense models 1,024 to 2,048 tokens are faster than 4,096 (RESULTS.md)
ROWS = {"M": 2, "S": 4, "MoE": 8, "R": 2}
ADAM = dict(lr=1e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.01)
CLIP = 1.0


def work(model):
    """(units per repetition, FLOPs)."""
    return count(model) * LENGTH, sizes.flops(model, [LENGTH] * count(model), backward=True)


def count(model):
    """Sequences of a step."""
    return 2 if model == "R" else 8


def rows(folder, model):
    return sizes.tokens(model, folder, count(model), LENGTH)


def ours(folder, model):
    """Returns a function that runs one step and returns its loss."""
    return packed(folder, rows(folder, model), LENGTH, ROWS[model])


def packed(folder, rows, length, count):
    """`ours` on the sequences `rows`, packed into microbatches of `count` rows of `length` tokens."""
    from functools import partial

    import jax

    from areax import models
    from areax.adapters import hf
    from areax.core import losses, optim, packing, step
    from areax.recipes.shared import common
    from areax.rollout.types import supervised

    common.keep_memory()  # as the recipes do
    config, params = hf.load(folder)
    optimizer = optim.make_optimizer(optim.Optimizer(**ADAM, clip=CLIP), models.table(config))
    objective = losses.SFT()
    update = step.make_step(partial(models.score, config=config, run=models.Run(remat="dots")), objective, optimizer)
    prepare = jax.jit(objective.prepare)
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in enumerate(rows)]
    state = step.init(params, optimizer)

    def once():
        nonlocal state
        batch = packing.pack(samples, length, rows=count)
        state, report = update(state, prepare(batch))
        jax.block_until_ready(state)
        return float(report["loss"].sum)

    return once


def transformers(folder, model):
    import torch

    net = peers.causal_lm(folder).train()
    optimizer = peers.torch_adamw(net, **ADAM)
    token = torch.from_numpy(rows(folder, model))

    def once():
        loss = net(input_ids=token, labels=token, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return once


def tunix(folder, model):
    from tunix.sft import utils
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    net = peers.tunix_model(folder)
    trainer = PeftTrainer(net, peers.optax_adamw(ADAM, CLIP), TrainingConfig(eval_every_n_steps=10**9))
    trainer.is_managed_externally = True  # otherwise `train` closes it after every step
    trainer.with_gen_model_input_fn(
        lambda x: {
            "input_tokens": x.input_tokens,
            "input_mask": x.input_mask,
            "positions": utils.build_positions_from_mask(x.input_mask),
            "attention_mask": utils.make_causal_attn_mask(x.input_mask),
        }
    )
    token = rows(folder, model).astype(np.int32)
    batch = TrainingInput(input_tokens=token, input_mask=np.ones(token.shape, bool))

    def once():
        trainer.train([batch])
        return float(trainer._prev_buffered_train_metrics.loss)  # reported a step late: this is the step just run

    return once
