"""A GRPO update on given samples that share tokens: areax computes what they share once.

The peers compute every sample by itself: `rows` is areax without tries, `trl` the update of TRL's trainer, whose
samples come from a rollout function. Samples are those of the weights, so no side computes log-probabilities of an old
policy. The gradient's norm is compared; fp32, no KL.
"""

from pathlib import Path

import numpy as np
import peers
import sizes
from grpo import RL, STEPS
from train import CLIP

GROUP = 16


def case(paths, places: int):
    """(work, ours, rows, trl) of a case, the functions that `run.py` looks for.

    Args:
      paths: f(vocabulary) -> (prompt, completion) of each sample: lists of token ids.
      places: different tokens of the samples, for one row of tries.
    """
    of = lambda model: paths(sizes.HF[model]["vocab_size"])

    def work(model):
        lengths = [len(asked) + len(made) for asked, made in of(model)]
        return sum(lengths), sizes.flops(model, lengths, backward=True)

    return (
        work,
        lambda folder, model: with_tries(folder, of(model), places),
        lambda folder, model: with_rows(folder, of(model)),
        lambda folder, model: with_trl(folder, of(model)),
    )


def group(prompt: int, completion: int):
    """`case` of a group of samples with one prompt."""

    def paths(vocabulary):
        rng = np.random.default_rng(0)
        draw = lambda n: rng.integers(0, vocabulary, n).tolist()
        asked = draw(prompt)
        return [(asked, draw(completion)) for _ in range(GROUP)]

    return case(paths, prompt + GROUP * completion)


def rewards(count: int) -> list[float]:
    return np.random.default_rng(1).random(count).tolist()


def with_tries(folder, paths, places: int):
    """Returns a function that runs one step and returns the gradient's norm."""
    from areax.core import packing

    def pack(samples):
        batch = packing.pack_tries(samples, places, rows=1)
        assert batch.trie is not None
        return batch

    return areax(folder, paths, pack)


def with_rows(folder, paths):
    """`with_tries` with a row for each sample, in one microbatch."""
    from areax.core import packing

    longest = max(len(asked) + len(made) for asked, made in paths)
    return areax(folder, paths, lambda samples: packing.pack(samples, longest, rows=len(paths)))


def areax(folder, paths, pack):
    from functools import partial

    import jax

    from areax import models
    from areax.adapters import hf
    from areax.core import losses, optim, packing, step
    from areax.recipes.shared import common
    from areax.rollout.types import Completion, sampled

    common.keep_memory()  # as the recipes do
    config, params = hf.load(folder)
    optimizer = optim.make_optimizer(optim.Optimizer(**RL, clip=CLIP), models.table(config))
    objective = losses.GRPO(clip_high=0.2, correction={"proximal": "behaviour"})
    score = partial(models.score, config=config, run=models.Run(remat="dots"))
    update, prepare = step.make_step(score, objective, optimizer), jax.jit(objective.prepare)
    state, samples = step.init(params, optimizer), []
    for i, ((asked, made), reward) in enumerate(zip(paths, rewards(len(paths)), strict=True)):
        completion = Completion(made, [0.0] * len(made), [0] * len(made), "stop")
        samples.append(sampled(asked, completion, temperature=1.0, reward=reward, group=0, rollout=i, sample=i))
    batch = pack(samples)
    logps = packing.unpack(step.make_scores(score)(state.params, batch).logp_BT, batch, samples)
    samples = [s.replace(logp=np.where(s.mask, logp, 0)) for s, logp in zip(samples, logps, strict=True)]

    def once():
        nonlocal state
        state, report = update(state, prepare(pack(samples)))
        jax.block_until_ready(state)
        return float(report["grad_norm"].sum)

    return once


def with_trl(folder, paths):
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    net, count = peers.causal_lm(folder), len(paths)
    settings = GRPOConfig(
        output_dir=str(Path(folder).parent / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=count, num_generations=count, max_completion_length=max(len(x) for _, x in paths),
        beta=0.0, loss_type="grpo", temperature=1.0, learning_rate=RL["lr"], adam_beta1=RL["b1"],
        adam_beta2=RL["b2"], adam_epsilon=RL["eps"], weight_decay=RL["weight_decay"], max_grad_norm=CLIP,
        lr_scheduler_type="constant", optim="adamw_torch_fused", max_steps=STEPS, shuffle_dataset=False,
        save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def given(prompts, trainer):
        made = [completion for _, completion in paths]
        return {"prompt_ids": [asked for asked, _ in paths], "completion_ids": made, "logprobs": None}

    def loop(pause):
        tokens = peers.number_tokenizer(net.config.vocab_size)
        data = datasets.Dataset.from_list([{"prompt": "0"}] * 2)
        worth = lambda completions, **_: rewards(count)
        trainer = GRPOTrainer(
            net, worth, args=settings, train_dataset=data, processing_class=tokens, rollout_func=given,
            callbacks=[peers.pausing(pause, "grad_norm")],
        )  # fmt: skip
        trainer.train()

    return peers.paced(loop)
