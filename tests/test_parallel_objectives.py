"""Objectives over the devices of a mesh: value, gradient, metrics of one device, for every kind of sum over tokens."""

import jax
import numpy as np
import pytest

from areax import models
from areax.core import losses, packing
from areax.core.critic import Critic
from areax.parallel import batches, mesh
from areax.rollout.types import Sample

GRPO = losses.GRPO
OBJECTIVES = {
    **{
        name: losses.POLICIES[name]()
        for name in ("PPO", "ReinforcePlusPlus", "OPO", "GSPO", "M2PO", "VESPO", "ClipCov")
    },
    **{name: losses.PREFERENCES[name]() for name in ("DPO", "KTO", "BCO", "RewardModel")},
    "interpolated": GRPO(correction={"proximal": "interpolate"}),
    "masks": GRPO(correction={"mask": "k3", "mask_over": "mean", "veto": 0.1, "drift": 0.01, "normalise": True}),
    "terms": GRPO(kl={"coef": 0.1, "place": "reward"}, entropy={"coef": 0.1, "floor": 3.0}),
    "components": GRPO(advantage={"components": ("greedy",), "whiten": "rollout"}),
    "observations": GRPO(observation={"coef": 0.5}),
    "prompts": GRPO(denominator="prompt", shaping={"overlong_tokens": 9, "overlong_buffer": 4}),
}


def samples():
    """Groups of four, pairs of two, of unequal lengths, so that segments cross the borders of devices."""
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(rng.integers(6, 30, 16)):
        mask = np.arange(n) >= 3
        out.append(
            Sample(
                tokens=rng.integers(0, 50, n).astype(np.int32), mask=mask,
                logp=np.where(mask, rng.normal(-1, 0.5, n), 0).astype(np.float32),
                version=np.where(mask, 2, -1).astype(np.int32), turn=np.zeros(n, np.int32),
                rewards=((n - 1, float(rng.random())),), components={"greedy": float(rng.random())},
                group=i // 4, prompt=i // 4, rollout=i, sample=i, pair=i // 2, label=float(1 - i % 2),
                arrays={"observation": ("target", np.where(mask, 0, rng.integers(0, 4, n)).astype(np.int8))},
            )
        )  # fmt: skip
    return out


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_the_same_on_a_mesh(name):
    spec = OBJECTIVES[name]
    batch = packing.pack(samples(), 32, rows=16, components=["greedy"]).with_scalars(version=np.int32(4))
    rng = np.random.default_rng(1)
    near = lambda: (np.asarray(batch.logp_BT) + rng.normal(0, 0.3, batch.logp_BT.shape)).astype(np.float32)
    # Five more arrays that lie as the batch does: reference, values, and what the weights say before and now.
    batch = batch.replace(ref_BT=near(), value_BT=near(), prox_BT=near(), adv_BT=near(), return_BT=near())

    @jax.jit
    def whole(batch):
        before, now, value = batch.prox_BT, batch.adv_BT[0], batch.return_BT[0]
        ready = spec.prepare(batch, models.Scores(before, -before, before, before))
        one = jax.tree.map(lambda x: x[0], ready)
        loss = lambda now, value: spec.loss(models.Scores(now, -now, now, value), one)
        critic = None
        if getattr(spec, "needs_values", False):
            mine = jax.tree.map(lambda x: x[0], Critic().prepare(ready))
            critic = jax.grad(lambda value: Critic().loss(models.Scores(None, None, None, value), mine)[0])(value)
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(now, value), critic

    wanted = whole(batch)
    on = mesh.make(mesh.Layout(dp=2, cp=2, tp=2))
    with jax.set_mesh(on):
        got = whole(batches.batch(batch, on))
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(batches.host(a), b, rtol=1e-4, atol=1e-6)
