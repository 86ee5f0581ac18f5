"""A complete synchronous GRPO step: 8 samples of 64 tokens for each of 4 prompts of 64 tokens, rewards, one update on
all of them, and loading the new weights for generation; fp32, temperature 1, no KL.

Samples are on-policy, so no side computes log-probabilities of an old policy. areax trains on a row of a trie for each
prompt (`--trie auto`), which computes the prompt once. Sampling differs between libraries; the number of tokens sampled
and trained on is compared.
"""

from pathlib import Path

import numpy as np
import peers
import sizes
from train import ADAM, CLIP

UNIT, PEERS = "tokens/s", {"S": ("trl", "tunix")}
PROMPTS, GROUP, PROMPT, NEW = 4, 8, 64, 64
STEPS = 10_000  # more than will be run
RL = ADAM | {"lr": 1e-6}


def work(model):
    """(tokens sampled per step, FLOPs of each sample by itself: a forward pass over all tokens but the last to sample,
    then training)."""
    samples, length = PROMPTS * GROUP, PROMPT + NEW
    flops = sizes.flops(model, [length - 1], backward=False) + sizes.flops(model, [length], backward=True)
    return samples * NEW, samples * flops


def prompts(vocab):
    return np.random.default_rng(0).integers(0, vocab, (PROMPTS, PROMPT)).tolist()


def reward(completion: str) -> float:
    """Fraction of even token ids."""
    ids = completion.split()
    return sum(int(i) % 2 == 0 for i in ids) / len(ids)


def ours(folder, model):
    """Returns a function that runs one step and returns the number of sampled tokens."""
    from functools import partial

    import jax

    from areax import models
    from areax.adapters import hf
    from areax.core import losses, optim, packing, step
    from areax.recipes.shared import common
    from areax.rollout.engine.engine import Engine
    from areax.rollout.engine.request import Request, Sampling
    from areax.rollout.types import Completion, sampled

    common.keep_memory()  # as the recipes do
    config, params = hf.load(folder)
    optimizer = optim.make_optimizer(optim.Optimizer(**RL, clip=CLIP), models.table(config))
    objective = losses.GRPO(clip_high=0.2, correction={"proximal": "behaviour"})
    update = step.make_step(partial(models.score, config=config, run=models.Run(remat="dots")), objective, optimizer)
    prepare = jax.jit(objective.prepare)
    engine = Engine(config, params, slots=PROMPTS * GROUP, context=PROMPT + NEW)
    state, version = step.init(params, optimizer), 0
    asked = [tuple(prompt) for prompt in prompts(config.vocab) for _ in range(GROUP)]
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW, ignore_eos=True)

    def once():
        nonlocal state, version
        samples = []
        for i, made in enumerate(engine.generate([Request(str(i), p, sampling) for i, p in enumerate(asked)])):
            completion = Completion(made.tokens, made.logp, [version] * len(made.tokens), made.finish["type"])
            value = reward(peers.text(made.tokens))
            sample = sampled(
                asked[i], completion, temperature=1.0, reward=value, group=i // GROUP, rollout=i, sample=i
            )  # fmt: skip
            samples.append(sample)
        batch = prepare(packing.pack_tries(samples, PROMPT + GROUP * NEW, rows=PROMPTS))
        state, _ = update(state, batch)
        version += 1
        engine.load(state.params, str(version))
        return sum(int(s.mask.sum()) for s in samples)

    return once


def trl(folder, model):
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    net = peers.causal_lm(folder)
    settings = GRPOConfig(
        output_dir=str(Path(folder).parent / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=NEW, beta=0.0,
        temperature=1.0, learning_rate=RL["lr"], adam_beta1=RL["b1"], adam_beta2=RL["b2"], adam_epsilon=RL["eps"],
        weight_decay=RL["weight_decay"], max_grad_norm=CLIP, lr_scheduler_type="constant", optim="adamw_torch_fused",
        max_steps=STEPS, shuffle_dataset=False, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    sampled = []

    def rewards(completions, **_):
        sampled.append(sum(len(text.split()) for text in completions))
        return [reward(text) for text in completions]

    pausing = lambda pause: peers.pausing(pause, lambda: sampled[-1] if sampled else None)
    rows = [{"prompt": peers.text(prompt)} for prompt in prompts(net.config.vocab_size)] * STEPS
    data = datasets.Dataset.from_list(rows)

    def loop(pause):
        tokens = peers.number_tokenizer(net.config.vocab_size)
        trainer = GRPOTrainer(
            net, rewards, args=settings, train_dataset=data, processing_class=tokens, callbacks=[pausing(pause)]
        )
        trainer.train()

    return peers.paced(loop)


def tunix(folder, model):
    import jax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    vocab = sizes.config(model)["vocab_size"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    role = rl_cluster.Role
    settings = rl_cluster.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=peers.optax_adamw(RL, CLIP), eval_every_n_steps=STEPS, max_steps=STEPS,
            mini_batch_size=PROMPTS, train_micro_batch_size=PROMPTS,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=NEW, max_prompt_length=PROMPT, kv_cache_size=PROMPT + NEW, temperature=1.0,
            top_p=1.0,
        ),
    )  # fmt: skip
    sampled = []

    def rewards(prompts, completions, **_):
        sampled.append(sum(len(text.split()) for text in completions))
        return [reward(text) for text in completions]

    def loop(pause):
        with mesh:
            cluster = rl_cluster.RLCluster(
                actor=peers.tunix_model(folder, mesh), tokenizer=peers.Numbers(vocab), cluster_config=settings
            )
            learner = GRPOLearner(cluster, GRPOConfig(num_generations=GROUP, beta=0.0), rewards)

            def batches():  # the next batch is requested after the previous step
                while True:
                    pause(sampled[-1] if sampled else None)
                    yield {"prompts": np.array([peers.text(prompt) for prompt in prompts(vocab)])}

            learner.train(batches())

    return peers.paced(loop)
