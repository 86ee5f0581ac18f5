"""GRPO's objective: advantages, corrections, loss and gradient on [8, 2048] log-probabilities; the other side is a full
training step of the model on as many tokens."""

import numpy as np
import sizes
import train

UNIT, PEERS = "tokens/s", {"M": ("plain",)}
ROWS, LENGTH, GROUP = 8, 2048, 4


def work(model):
    """(units per repetition, FLOPs); those of the objective are negligible."""
    return ROWS * LENGTH, 0


def ours(folder, model):
    """Returns a function that prepares a batch, computes loss and gradient, and returns the number of tokens."""
    import jax
    import jax.numpy as jnp

    from areax import models
    from areax.core import losses, packing
    from areax.rollout.types import Completion, sampled

    rng = np.random.default_rng(0)
    draw = lambda: Completion(
        rng.integers(0, 99, LENGTH - 1).tolist(), (-rng.random(LENGTH - 1)).tolist(), [0] * (LENGTH - 1), "stop"
    )
    samples = [
        sampled([0], draw(), temperature=1.0, reward=float(rng.random()), group=i // GROUP, rollout=i, sample=i)
        for i in range(ROWS)
    ]
    batch = jax.tree.map(jnp.asarray, packing.pack(samples, LENGTH, rows=ROWS))
    logp_MBT = batch.logp_BT + 0.1 * jnp.asarray(rng.normal(size=batch.logp_BT.shape), jnp.float32)
    objective = losses.GRPO()

    @jax.jit
    def evaluate(batch, logp_MBT):
        out = lambda logp: models.Scores(logp, logp, logp)
        ready = objective.prepare(batch, out(batch.logp_BT))
        one = jax.tree.map(lambda x: x[0], ready)
        return jax.value_and_grad(lambda logp: objective.loss(out(logp), one), has_aux=True)(logp_MBT[0])

    def once():
        jax.block_until_ready(evaluate(batch, logp_MBT))
        return ROWS * LENGTH

    return once


def plain(folder, model):
    step = train.packed(folder, sizes.tokens(model, folder, ROWS, LENGTH), LENGTH, ROWS)

    def once():
        step()
        return ROWS * LENGTH

    return once
