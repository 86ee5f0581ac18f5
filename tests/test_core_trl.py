"""Objectives against TRL's own loss code (its GRPO and RLOO trainers), given the log-probabilities of each token.

A trainer is made without a model: a stand-in says what a model would of each token, and the loss under test is TRL's.
"""

import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from areax.core import losses, packing
from areax.rollout.types import Sample

pytestmark = pytest.mark.slow  # to import trl takes long, so that is left to where it is used

PROMPT, LENGTHS, GROUP, WIDTH = 2, [5, 3, 7, 1, 6, 4], 3, 8
MASK = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
REWARDS = [1.0, 0.0, 2.0, 0.0, 0.5, 0.0]
RNG = np.random.default_rng(0)
OLD = RNG.normal(-1, 0.5, MASK.shape)
NOW, REF = OLD + RNG.normal(0, 0.3, MASK.shape), OLD + RNG.normal(0, 0.3, MASK.shape)
ENTROPY = RNG.uniform(0.5, 2.0, MASK.shape)


def trl(name, advantages, *, loss_type="grpo", level="token", low=0.2, high=0.28, beta=0.0, entropy=0.0, **args):
    """(loss, gradient with respect to NOW and ENTROPY) of a trainer's `_compute_loss`."""
    import trl as library

    trainer = getattr(library, name)
    defaults = {field.name: field.default for field in library.GRPOConfig.__dataclass_fields__.values()}
    defaults |= dict(steps_per_generation=1, use_bias_correction_kl=False)
    self = trainer.__new__(trainer)
    vars(self).update(
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=beta,
        args=types.SimpleNamespace(**defaults | args), top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False, _entropy_bonus_enabled=entropy > 0,
        entropy_coef=entropy, use_adaptive_entropy=False, current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH, model=types.SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x.reshape(-1), reduce=lambda x, reduction: x, sync_gradients=True,
        ),
    )  # fmt: skip
    now, h = (torch.tensor(x, requires_grad=True) for x in (NOW, ENTROPY))
    self._get_per_token_logps_and_entropies = lambda *_, **__: (now, h, None)
    mask, ids = torch.tensor(MASK, dtype=torch.float64), torch.zeros(MASK.shape, dtype=torch.long)
    old = torch.tensor(OLD)
    inputs = dict(
        prompt_ids=ids[:, :PROMPT], prompt_mask=ids[:, :PROMPT] + 1, completion_ids=ids, completion_mask=mask,
        advantages=torch.tensor(advantages), old_per_token_logps=old, ref_per_token_logps=torch.tensor(REF),
        num_items_in_batch=mask.sum(), old_logps=(old * mask).sum(1),
    )  # fmt: skip
    loss = trainer._compute_loss(self, self.model, inputs)
    slopes = torch.autograd.grad(loss, (now, h), allow_unused=True, materialize_grads=True)
    return loss.item(), *(g.numpy() for g in slopes)


def areax(spec):
    """The same of an objective, for samples whose behaviour policy is TRL's old one."""
    rows = [row(i, OLD) for i in range(len(LENGTHS))]
    wide = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(wide, packing.pack(rows, 16, rows=8))
    put = lambda x: wide(packing.pack([row(i, x) for i in range(len(rows))], 16, rows=8).target["x"])
    batch = batch.replace(logp_BT=put(OLD), ref_BT=put(REF))  # not rounded to 32 bits
    scores = types.SimpleNamespace(logp_BT=put(OLD), entropy_BT=put(ENTROPY), aux={})
    ready = jax.tree.map(lambda x: x[0], spec.prepare(batch, scores))

    def loss(now, entropy):
        return spec.loss(types.SimpleNamespace(logp_BT=now, entropy_BT=entropy, aux={}), ready)[0]

    value, slopes = jax.value_and_grad(loss, (0, 1))(put(NOW)[0], put(ENTROPY)[0])
    own = [packing.unpack(x[None], batch, rows) for x in slopes]
    pad = lambda x: np.stack([np.pad(one[PROMPT:], (0, WIDTH - len(one[PROMPT:]))) for one in x])
    return float(value), pad(own[0]), pad(own[1])


def row(i, x):
    n = PROMPT + LENGTHS[i]
    own = np.concatenate([np.zeros(PROMPT), x[i, : LENGTHS[i]]])
    return Sample(
        tokens=np.zeros(n, np.int32), mask=np.arange(n) >= PROMPT, logp=own.astype(np.float32),
        version=np.zeros(n, np.int32), turn=np.zeros(n, np.int32), rewards=((n - 1, REWARDS[i]),), group=i // GROUP,
        prompt=i // GROUP, sample=i, rollout=i, arrays={"x": ("target", own)},
    )  # fmt: skip


def standardised(std="group"):
    """TRL's advantages: the deviation with one degree of freedom less, and 1e-4."""
    groups = np.reshape(REWARDS, (-1, GROUP))
    spread = {"group": groups.std(1, ddof=1, keepdims=True), "batch": np.std(REWARDS, ddof=1)}[std]
    return ((groups - groups.mean(1, keepdims=True)) / (spread + 1e-4)).reshape(-1)


def same(theirs, spec):
    with jax.enable_x64(True):
        mine = areax(spec)
    assert np.abs(mine[1]).max() > 1e-3
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)  # TRL rounds SAPO's temperatures to 32 bits


def policy(preset, *, advantage=None, **changes):
    """With TRL's eps. Its old policy is the one that sampled, so that nothing else corrects."""
    return preset(advantage={"eps": 1e-4} | (advantage or {}), correction=dict(proximal="behaviour"), **changes)


GSPO = dict(clip_low=0.05, clip_high=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "theirs, spec",
    [
        (dict(loss_type="grpo"), policy(losses.GRPO, denominator="sequence")),
        # One microbatch, so that TRL's mean over its own tokens is that over the batch.
        (dict(loss_type="bnpo"), policy(losses.GRPO)),
        (dict(loss_type="dapo"), policy(losses.DAPO)),
        # TRL's constant is the longest completion.
        (dict(loss_type="dr_grpo"), policy(losses.GRPO, denominator="constant", denominator_tokens=WIDTH)),
        # TRL bounds the ratio by epsilon_high itself, here it is 1 + clip_high; neither has a bound below.
        (dict(loss_type="cispo", high=1.3), policy(losses.CISPO, clip_high=0.3)),
        (dict(loss_type="sapo"), policy(losses.SAPO)),
        (
            dict(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=4.0),
            policy(losses.SAPO, tau_pos=2.0, tau_neg=4.0),
        ),
        (dict(loss_type="grpo", level="sequence", low=0.05, high=0.1), policy(losses.GSPO, **GSPO)),
        (dict(loss_type="luspo", level="sequence", low=0.05, high=0.1), policy(losses.LUSPO, **GSPO)),
        (dict(loss_type="vespo"), policy(losses.VESPO)),
        (
            dict(loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=2.0, vespo_k_neg=2.0, vespo_lambda_neg=0.5),
            policy(losses.VESPO, vespo_pos=(1.0, 2.0), vespo_neg=(2.0, 0.5)),
        ),
        # Two-sided clipping; above 1 + clip_high it binds for negative advantages alone, as ratio_cap does.
        (dict(loss_type="dapo", delta=1.4), policy(losses.GRPO, ratio_cap=1.4)),
        (dict(loss_type="dapo", beta=0.1), policy(losses.GRPO, kl=dict(coef=0.1))),
        (dict(loss_type="grpo", beta=0.1), policy(losses.GRPO, denominator="sequence", kl=dict(coef=0.1))),
        # The ratio to the old policy, which is the one that sampled.
        (
            dict(loss_type="dapo", beta=0.1, use_bias_correction_kl=True),
            policy(losses.GRPO, kl=dict(coef=0.1, ratio=True)),
        ),
        # TRL's bonus is always a mean over tokens, here it has the denominator of the loss.
        (dict(loss_type="dapo", entropy=0.1), policy(losses.GRPO, entropy=dict(coef=0.1))),
    ],
)
def test_losses_match_trl_grpo(theirs, spec):
    same(trl("GRPOTrainer", standardised(), **theirs), spec)


def test_deviation_of_the_batch():
    same(trl("GRPOTrainer", standardised("batch"), loss_type="dapo", high=0.2), policy(losses.LitePPO))


def test_the_loss_matches_trl_rloo():
    """TRL clips the ratio of the whole completion; every token here gains the same, so their mean is that gain."""
    groups = np.reshape(REWARDS, (-1, GROUP))
    others = (groups - (groups.sum(1, keepdims=True) - groups) / (GROUP - 1)).reshape(-1)
    spec = policy(losses.RLOO, surrogate="clip", ratio="product", clip_low=0.4, clip_high=0.5, denominator="sequence")
    same(trl("RLOOTrainer", others, low=0.4, high=0.5), spec)


@pytest.mark.sweep
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.12])
def test_off_policy_sequence_masking_matches_trl(threshold):
    """TRL compares the current policy with the one that sampled; here that before the update, made the same."""
    mask, A = torch.tensor(MASK, dtype=torch.float64), torch.tensor(standardised())[:, None]
    now = OLD - np.random.default_rng(1).uniform(0, 0.2, MASK.shape)
    from trl import GRPOTrainer

    keep = GRPOTrainer.get_off_policy_mask(A, torch.tensor(now), torch.tensor(OLD), mask, threshold)[:, 0].bool()
    rows = [row(i, OLD) for i in range(len(LENGTHS))]
    spec = losses.GRPO(correction=dict(drift=threshold, cap=1e9))
    batch, moved = packing.pack(rows, 16, rows=8), packing.pack([row(i, now) for i in range(len(rows))], 16, rows=8)
    scores = types.SimpleNamespace(logp_BT=jnp.asarray(moved.logp_BT), entropy_BT=jnp.abs(moved.logp_BT), aux={})
    weight = packing.unpack(spec.prepare(jax.tree.map(jnp.asarray, batch), scores).weight_BT, batch, rows)
    assert [bool((w > 0).any()) for w in weight] == keep.tolist()
    assert not keep.all() and keep.any()
