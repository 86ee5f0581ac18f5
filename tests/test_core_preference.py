"""Preference objectives against loops from the papers and TRL's own losses, and the properties that all must have."""

import collections
import functools
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import thinned
from torch.nn.functional import logsigmoid

from areax.core import losses, metrics, packing
from areax.rollout.types import Sample

GOLDEN = Path(__file__).parent / "data" / "preferences.txt"
PRESETS = {name: preset() for name, preset in losses.PREFERENCES.items()}
# Of each option values that no preset has.
VARIANTS = {
    "cDPO": losses.DPO(label_smoothing=0.2, beta=0.5),
    "DPO of means": losses.DPO(score="mean", beta=2.0),
    "RPO": losses.DPO(sft_coef=0.7),
    "IPO of sums": losses.IPO(score="sum"),
    "smoothed SimPO": losses.SimPO(label_smoothing=0.1),
    "heavy ORPO": losses.ORPO(coef=2.0, beta=1.5),
    "sharp BCO": losses.BCO(beta=0.8),
    "CPO alone": losses.CPO(beta=0.6, sft_coef=0.0),
    "weighted KTO": losses.KTO(beta=0.7, desirable_weight=1.3, undesirable_weight=0.4),
    "margins": losses.RewardModel(margin=True),
    "centred": losses.RewardModel(margin=True, center_coef=0.3),
}
EVERY = PRESETS | VARIANTS
PAIRWISE = {name: spec for name, spec in EVERY.items() if isinstance(spec, losses.Preference)}
SINGLE = losses.KTO, losses.BCO
PAIRED = {name: spec for name, spec in EVERY.items() if not isinstance(spec, SINGLE)}
Out = collections.namedtuple("Out", "logp_BT entropy_BT value_BT", defaults=(None, None))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def one(rng, n, m, **fields):
    """A sample of n tokens of which those from m on are learnt, with all that a model would say of each."""
    learnt = np.arange(n) >= m
    now, value = np.where(learnt, -rng.gamma(2, 0.5, n), 0), rng.normal(size=n)
    ref = np.where(learnt, now + rng.normal(0, 0.3, n), 0)
    return Sample(
        tokens=rng.integers(0, 50, n).astype(np.int32), mask=learnt, logp=np.zeros(n, np.float32),
        version=np.full(n, -1, np.int32), turn=np.zeros(n, np.int32),
        arrays={"now": ("target", now), "ref": ("target", ref), "value": ("input", value)}, **fields,
    )  # fmt: skip


def samples(spec, seed=0, count=6):
    """Pairs; for KTO completions and, half as many, prompts with those of others; for BCO completions."""
    rng = np.random.default_rng(seed)
    draw = lambda **fields: one(rng, int(rng.choice([6, 9, 14])), int(rng.integers(2, 5)), **fields)
    if isinstance(spec, losses.KTO):
        return [draw(label=float(label)) for label in ([1, 0, 1, 0, 0, -1, -1] * count)[: 2 * count]]
    if isinstance(spec, losses.BCO):
        return [draw(label=float(label)) for label in ([1, 0, 1, 0, 0] * count)[: 2 * count]]
    out = []
    for i in range(count):
        weight = float(rng.choice([1.0, 1.0, 0.5]))
        better, worse = draw(pair=7 * i, label=1.0, weight=weight), draw(pair=7 * i, weight=weight)
        rewards = rng.integers(0, 64, 2) / 32  # exact in fp32
        out += [s.replace(rewards=((3, float(x)),)) for s, x in zip((better, worse), rewards, strict=True)]
    return [out[i] for i in rng.permutation(len(out))]


def said(sample, name):
    return sample.arrays[name][1]


def saying(sample, name, values):
    return sample.replace(arrays={**sample.arrays, name: (sample.arrays[name][0], np.asarray(values, np.float64))})


@functools.cache
def compiled(spec):
    def total(now_MBT, value_MBT, ready):
        out = Out(now_MBT, jnp.abs(now_MBT), value_MBT)
        loss_M, report_M = jax.vmap(spec.loss)(out, ready)
        over = lambda m: metrics.Metric(m.sum.sum(), m.count.sum(), m.min.min(), m.max.max(), m.bins.sum(0))
        return loss_M.sum(), {name: over(m) for name, m in report_M.items()}

    def whole(batch):
        inputs = batch.target["now"], batch.input["value"]
        ready = spec.prepare(batch.replace(ref_BT=batch.target["ref"]), Out(*inputs[:1]))
        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(*inputs, ready)

    return jax.jit(whole, compiler_options={"xla_backend_optimization_level": 0})


def evaluate(spec, rows, length=32, count=2):
    """(loss over all microbatches, {"now", "value": gradient of each sample's tokens}, metrics)."""
    packed = packing.pack(rows, length, rows=count)
    filled = jax.tree_util.tree_map_with_path(lambda path, x: fill(getattr(path[0], "name", ""), x), packed)
    (loss, report), gradient = compiled(spec)(filled)
    M, B, T = packed.token_BT.shape
    now, value = (np.asarray(x)[:M, :B, :T] for x in gradient)
    own = [np.zeros(len(s.tokens)) for s in rows]
    for m, b, j in np.argwhere(packed.sample_BJ >= 0):
        own[packed.sample_BJ[m, b, j]] = value[m, b, packed.segment_BT[m, b] == j + 1]
    return float(loss), {"now": packing.unpack(now, packed, rows), "value": own}, metrics.to_dict(report)


def fill(name, x, M=8, B=2, T=32, J=16):
    """An array of a Batch in float64, filled up to one shape, so that little is compiled."""
    shape = (M, B, J if name.endswith("_BJ") else T)
    nothing = {"label_BJ": np.nan, "reward_BJ": np.nan, "length_BJ": 0, "weight_BJ": 0}
    value = nothing.get(name, -1) if name.endswith("_BJ") else 0
    wide = x.astype(np.float64) if x.dtype == np.float32 else x
    return np.pad(wide, [(0, size - n) for size, n in zip(shape, x.shape, strict=True)], constant_values=value)


# -- the papers ----------------------------------------------------------------------------------


def oracle(spec, rows):
    """As `evaluate`, by loops over pairs or completions, in float64; the gradient by autograd."""
    leaves = {name: [torch.tensor(said(s, name), requires_grad=True) for s in rows] for name in ("now", "value")}
    now, value = leaves["now"], leaves["value"]
    loss, weights = torch.zeros((), dtype=torch.float64), 0.0
    if isinstance(spec, losses.KTO):
        ratio = [(x - torch.tensor(said(s, "ref")))[s.mask].sum() for x, s in zip(now, rows, strict=True)]
        baseline = [r.item() for r, s in zip(ratio, rows, strict=True) if s.label == -1]
        z0 = max(0.0, sum(baseline) / len(baseline))  # section 4.1
        for r, s in zip(ratio, rows, strict=True):
            if s.label == 1:  # lambda_y - v(x, y), eq. 8
                loss = loss + spec.desirable_weight * (1 - torch.sigmoid(spec.beta * (r - z0)))
            if s.label == 0:
                loss = loss + spec.undesirable_weight * (1 - torch.sigmoid(spec.beta * (z0 - r)))
            weights += s.label >= 0
    elif isinstance(spec, losses.BCO):
        r = [spec.beta * (x - torch.tensor(said(s, "ref")))[s.mask].sum() for x, s in zip(now, rows, strict=True)]
        of = lambda label: np.mean([x.item() for x, s in zip(r, rows, strict=True) if s.label == label])
        delta = (of(1) + of(0)) / 2
        loss = -sum(logsigmoid(x - delta if s.label else -(x - delta)) for x, s in zip(r, rows, strict=True))
        weights = len(rows)
    else:
        for pair in {s.pair for s in rows}:
            c, r = (next(i for i, s in enumerate(rows) if s.pair == pair and s.label == y) for y in (1, 0))
            if isinstance(spec, losses.RewardModel):
                m = rows[c].reward - rows[r].reward if spec.margin else 0.0
                its = -logsigmoid(value[c][-1] - value[r][-1] - m)
                its = its + spec.center_coef * (value[c][-1] + value[r][-1]) ** 2
            else:
                its = of_pair(
                    spec, *((now[i][rows[i].mask], torch.tensor(said(rows[i], "ref"))[rows[i].mask]) for i in (c, r))
                )
            loss, weights = loss + rows[c].weight * its, weights + rows[c].weight
    loss = loss / weights
    grads = torch.autograd.grad(loss, now + value, allow_unused=True, materialize_grads=True)
    return loss.item(), {"now": grads[: len(rows)], "value": grads[len(rows) :]}


def of_pair(spec, chosen, rejected):
    """The loss of one pair, from (log pi, log reference) of the learnt tokens of each side."""
    nll = -chosen[0].mean()
    if spec.name == "ORPO":  # eqs. 4 to 7, log P(y|x) being a mean
        p, q = (torch.exp(now.mean()) for now, _ in (chosen, rejected))
        ratio = (p / (1 - p)) / (q / (1 - q))
        return nll - spec.coef * torch.log(torch.sigmoid(spec.beta * torch.log(ratio)))
    if spec.name == "SimPO":  # eq. 6
        z = spec.beta * chosen[0].mean() - spec.beta * rejected[0].mean() - spec.gamma
    elif spec.name == "CPO":  # eq. 3
        z = spec.beta * chosen[0].sum() - spec.beta * rejected[0].sum()
    else:
        over = (lambda x: x.mean()) if spec.score == "mean" else (lambda x: x.sum())
        h = over(chosen[0] - chosen[1]) - over(rejected[0] - rejected[1])
        if spec.name == "IPO":  # eq. 17, tau = beta
            return (h - 1 / (2 * spec.beta)) ** 2
        z = spec.beta * h  # DPO, eq. 7
    link = -(1 - spec.label_smoothing) * logsigmoid(z) - spec.label_smoothing * logsigmoid(-z)
    return link + spec.sft_coef * nll


@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(EVERY, 2, pytest.mark.slow))
def test_pairwise_value_and_gradient_match_the_papers(name):
    spec = EVERY[name]
    rows = samples(spec)
    loss, gradient, report = evaluate(spec, rows)
    wanted, slopes = oracle(spec, rows)
    assert abs(loss - wanted) <= 1e-9 * max(1, abs(wanted))
    of = "value" if isinstance(spec, losses.RewardModel) else "now"
    assert max(float(g.abs().max()) for g in slopes[of]) > 1e-4
    for kind in ("now", "value"):
        for a, b in zip(gradient[kind], slopes[kind], strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-9)
    assert report["left_out"] == 0


@pytest.mark.slow
def test_metrics_are_means_over_pairs():
    spec = losses.DPO(beta=0.5)
    rows = [s.replace(weight=1.0) for s in samples(spec)]
    loss, _, report = evaluate(spec, rows)
    total = lambda s, *names: sum(sign * said(s, n)[s.mask].sum() for sign, n in zip((1, -1), names, strict=False))
    sides = [{s.pair: s for s in rows if s.label == y} for y in (1, 0)]
    rewards = [np.array([0.5 * total(side[p], "now", "ref") for p in sides[0]]) for side in sides]
    np.testing.assert_allclose(report["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(report["preference_accuracy"], np.mean(rewards[0] > rewards[1]), rtol=1e-6)
    np.testing.assert_allclose(report["margin"], np.mean(rewards[0] - rewards[1]), rtol=1e-5)
    np.testing.assert_allclose(report["reward_chosen"], np.mean(rewards[0]), rtol=1e-5)
    np.testing.assert_allclose(report["reward_rejected"], np.mean(rewards[1]), rtol=1e-5)
    for name, side in zip(("logp_chosen", "logp_rejected"), sides, strict=True):
        np.testing.assert_allclose(report[name], np.mean([total(s, "now") for s in side.values()]), rtol=1e-5)


# -- TRL -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl():
    """Its trainers' losses, called with what a trainer would have, and a model that says what it is told."""
    with warnings.catch_warnings():  # of an experimental module
        warnings.simplefilter("ignore")
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer
        from trl.trainer.reward_trainer import RewardTrainer

    return types.SimpleNamespace(
        dpo=DPOTrainer._compute_loss, kto=KTOTrainer._compute_loss, kl=KTOTrainer._compute_kl_logps,
        orpo=ORPOTrainer.odds_ratio_loss, cpo=CPOTrainer.cpo_loss, reward=RewardTrainer.compute_loss,
    )  # fmt: skip


def trainer(**fields):
    same = lambda x: x
    accelerator = types.SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    return types.SimpleNamespace(
        accelerator=accelerator, aux_loss_enabled=False, use_weighting=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", label_smoothing=0.0, _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0, _tp_size=1, model=types.SimpleNamespace(training=True), **fields,
    )  # fmt: skip


class Says(torch.nn.Module):
    """A model whose log-probabilities are given, by the id of the first token."""

    def __init__(self, logps):
        super().__init__()
        self.logps = logps

    def forward(self, input_ids, **_):
        logp = self.logps[int(input_ids[0, 0])]
        return types.SimpleNamespace(
            log_probs=logp, entropy=logp.detach(), mean_logits=logp.detach(), is_top1=logp.detach() > 0
        )


def laid(rows):
    """(log pi [N, S - 1] as a leaf, sums of the reference [N], completion mask [N, S]) of rows, padded on the right."""
    S = max(len(s.tokens) for s in rows)
    pad = lambda x: np.pad(np.asarray(x, np.float64), (0, S - len(x)))
    logp = torch.tensor(np.stack([pad(np.where(s.mask, said(s, "now"), 0))[1:] for s in rows]), requires_grad=True)
    ref = torch.tensor([said(s, "ref")[s.mask].sum() for s in rows])
    return logp, ref, torch.tensor(np.stack([pad(s.mask) for s in rows])).long()


def in_order(spec, **changes):
    """Pairs of weight 1, chosen ones first, in the order of their pairs."""
    rows = [s.replace(weight=1.0, **changes) for s in samples(spec)]
    return sorted(rows, key=lambda s: (-s.label, s.pair))


def agree(gradient, leaf, rows, tolerance=1e-9):
    """The gradients of learnt tokens are the same; a model's log-probabilities of others do not move, being 0."""
    for mine, its, s in zip(gradient, leaf.grad, rows, strict=True):
        wanted = np.where(s.mask[1:], its[: len(s.tokens) - 1].numpy(), 0)
        np.testing.assert_allclose(mine[1:], wanted, rtol=0, atol=tolerance)


TRL_DPO = {  # ours: TRL's loss types
    "DPO": (losses.DPO(), {"sigmoid": 1.0}),
    "DPO of means": (losses.DPO(score="mean"), {"sigmoid_norm": 1.0}),
    "IPO": (losses.IPO(), {"ipo": 1.0}),  # which averages too
    "RPO": (losses.DPO(sft_coef=0.7), {"sigmoid": 1.0, "sft": 0.7}),
}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", TRL_DPO)
def test_pairwise_losses_match_trl(name, trl):
    spec, kinds = TRL_DPO[name]
    rows = in_order(spec)
    if spec.sft_coef:  # TRL's is a mean over tokens of the batch, ours one over pairs: the same where lengths are equal
        rng = np.random.default_rng(1)
        rows = [one(rng, 9, 3, pair=s.pair, label=s.label) for s in rows]
    loss, gradient, report = evaluate(spec, rows)
    logp, ref, mask = laid(rows)
    its = trainer(beta=spec.beta, loss_types=list(kinds), loss_weights=list(kinds.values()))
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": ref[: len(rows) // 2], "ref_rejected_logps": ref[len(rows) // 2 :],
    }  # fmt: skip
    wanted = trl.dpo(its, Says([logp]), inputs, False)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-9)
    agree(gradient["now"], logp, rows)
    if spec.score == "sum":  # TRL reports sums whatever is compared
        told = {k: v[-1] for k, v in its._metrics["train"].items()}
        for mine, other in {
            "preference_accuracy": "accuracies",
            "margin": "margins",
            "reward_chosen": "chosen",
        }.items():
            np.testing.assert_allclose(report[mine], told[f"rewards/{other}"], rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SimPO", "smoothed SimPO", "CPO alone", "ORPO"])
def test_reference_free_losses_match_trl(name, trl):
    """Its functions take mean log-probabilities of the learnt tokens, for CPO sums; those of CPO and ORPO are without
    the SFT term, whose mean TRL takes over all tokens of prompts and completions of the batch, and in fp32."""
    spec = EVERY[name]
    rows = in_order(spec)
    loss, gradient, _ = evaluate(spec, rows)
    logp, _, mask = laid(rows)
    mean = logp.sum(1) / (mask[:, 1:].sum(1) if spec.score != "sum" else 1)
    half = len(rows) // 2
    kind = "sigmoid" if name == "CPO alone" else "simpo"
    its = trainer(beta=spec.beta, alpha=0.0, loss_type=kind, simpo_gamma=spec.gamma)
    its.label_smoothing = spec.label_smoothing
    if name == "ORPO":
        its.beta = spec.coef  # its beta is the paper's lambda, and what it returns is to be maximised
        wanted = -trl.orpo(its, mean[:half], mean[half:])[0].mean() - spec.sft_coef * mean[:half].mean()
    else:
        wanted = trl.cpo(its, mean[:half], mean[half:])[0].mean()
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-6)
    agree(gradient["now"], logp, rows, tolerance=1e-6)


@pytest.mark.slow
def test_kto_matches_trl(trl):
    spec = VARIANTS["weighted KTO"]
    rows = sorted(samples(spec), key=lambda s: -s.label)
    rows = [saying(s, "now", said(s, "now") + 0.2 * s.mask) if s.label == -1 else s for s in rows]  # so that z0 > 0
    given, others = [s for s in rows if s.label >= 0], [s for s in rows if s.label == -1]
    loss, gradient, report = evaluate(spec, rows)
    (logp, ref, mask), (kl_logp, kl_ref, kl_mask) = laid(given), laid(others)
    its = trainer(
        beta=spec.beta, loss_type="kto", calculate_KL=True, desirable_weight=spec.desirable_weight,
        undesirable_weight=spec.undesirable_weight,
    )  # fmt: skip
    its._compute_kl_logps = lambda model, batch: trl.kl(its, model, batch)
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask, "ref_logps": ref,
        "KL_input_ids": torch.ones_like(kl_mask), "KL_attention_mask": kl_mask, "KL_completion_mask": kl_mask,
        "ref_KL_logps": kl_ref, "label": torch.tensor([s.label == 1 for s in given]),
    }  # fmt: skip
    wanted = trl.kto(its, Says([logp, kl_logp]), inputs, False)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-9)
    agree(gradient["now"][: len(given)], logp, given)
    np.testing.assert_allclose(report["kl_baseline"], its._metrics["train"]["kl"][-1], rtol=1e-6)
    assert report["kl_baseline"] > 0


@pytest.mark.slow
def test_bco_matches_trl_on_pairs(trl):
    """Its loss of pairs has no reward shift, and is a sum over the two sides."""
    spec = VARIANTS["sharp BCO"]
    rows = in_order(losses.DPO())
    half = len(rows) // 2
    logp, ref, mask = laid(rows)
    shift = (logp.detach().sum(1) - ref).mean()  # of each row's reference, so that delta is 0
    rows = [saying(s, "ref", said(s, "ref") + s.mask * shift.item() / s.mask.sum()) for s in rows]
    logp, ref, mask = laid(rows)
    loss, gradient, report = evaluate(spec, rows)
    its = trainer(beta=spec.beta, loss_types=["bco_pair"], loss_weights=[1.0])
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": ref[:half], "ref_rejected_logps": ref[half:],
    }  # fmt: skip
    wanted = trl.dpo(its, Says([logp]), inputs, False) / 2
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-9)
    agree(gradient["now"], logp, rows)
    np.testing.assert_allclose(report["reward_shift"], 0, atol=1e-9)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", ["RewardModel", "margins", "centred"])
def test_reward_model_losses_match_trl(name, trl):
    spec = EVERY[name]
    rows = in_order(spec)
    loss, gradient, report = evaluate(spec, rows)
    half = len(rows) // 2
    score = torch.tensor([said(s, "value")[-1] for s in rows], requires_grad=True)
    its = trainer(args=types.SimpleNamespace(center_rewards_coefficient=spec.center_coef or None))
    inputs = {"attention_mask": torch.ones(1)}
    if spec.margin:
        inputs["margin"] = torch.tensor([a.reward - b.reward for a, b in zip(rows[:half], rows[half:], strict=True)])
    model = Says([])
    model.forward = lambda **_: types.SimpleNamespace(logits=score[:, None])
    wanted = trl.reward(its, model, inputs)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-9)
    np.testing.assert_allclose([g[-1] for g in gradient["value"]], score.grad.numpy(), atol=1e-9)
    for mine, other in {"preference_accuracy": "accuracy", "margin": "margin", "score": "mean_reward"}.items():
        np.testing.assert_allclose(report[mine], its._metrics["train"][other][-1], rtol=1e-5)


# -- properties ----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(EVERY, 2, pytest.mark.slow))
def test_the_loss_does_not_depend_on_order_packing_padding_or_microbatching(name):
    spec = EVERY[name]
    rows = samples(spec, seed=3)
    loss, gradient, report = evaluate(spec, rows)
    order = np.random.default_rng(0).permutation(len(rows))
    for length, count in ((32, 2), (32, 1), (16, 2)):
        again, slopes, told = evaluate(spec, [rows[i] for i in order], length, count)
        np.testing.assert_allclose(again, loss, rtol=1e-10)
        for kind in ("now", "value"):
            for k, i in enumerate(order):
                np.testing.assert_allclose(slopes[kind][k], gradient[kind][i], rtol=0, atol=1e-12)
        assert told.keys() == report.keys()
        for key in report:
            np.testing.assert_allclose(told[key], report[key], rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PAIRED)
def test_masked_tokens_do_not_matter(name):
    """NaN off the mask, and in values that are not of the last token, reach neither loss nor gradient."""
    spec = EVERY[name]
    rows = samples(spec)
    junk = lambda s: saying(
        saying(s, "value", np.where(np.arange(len(s.tokens)) == len(s.tokens) - 1, said(s, "value"), np.nan)),
        "now", np.where(s.mask, said(s, "now"), np.nan),
    )  # fmt: skip
    broken = [junk(saying(s, "ref", np.where(s.mask, said(s, "ref"), np.nan))) for s in rows]
    for a, b in zip(*(jax.tree.leaves(evaluate(spec, x)[:2]) for x in (rows, broken)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name, p in PAIRWISE.items() if not p.sft_coef and not p.gamma])
def test_swapped_sides_swap_the_gradient(name):
    """Where the score is equal on both sides, a swap turns every slope round."""
    spec, rng = PAIRWISE[name], np.random.default_rng(0)
    better, worse = one(rng, 9, 3, pair=0, label=1.0), one(rng, 9, 3, pair=0)
    worse = saying(saying(worse, "now", said(better, "now")), "ref", said(better, "ref"))
    first, second = evaluate(spec, [better, worse])[1]["now"]
    np.testing.assert_allclose(first, -second, atol=1e-12)
    assert np.abs(first).max() > 1e-3


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99))
def test_exactly_one_of_a_pair_and_its_mirror_is_ranked_correctly(seed):
    """Labels turned round: accuracy becomes 1 - accuracy, margin its negative, chosen and rejected change places."""
    for spec in (losses.DPO(), losses.SimPO(), losses.RewardModel()):
        rows = [s.replace(weight=1.0) for s in samples(spec, seed)]
        told, mirror = (evaluate(spec, x)[2] for x in (rows, [s.replace(label=1 - s.label) for s in rows]))
        np.testing.assert_allclose(told["preference_accuracy"] + mirror["preference_accuracy"], 1, rtol=1e-6)
        np.testing.assert_allclose(told["margin"], -mirror["margin"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(told["reward_chosen"], mirror["reward_rejected"], rtol=1e-5)


@pytest.mark.slow
def test_limits():
    rows = [s.replace(weight=1.0) for s in samples(losses.DPO())]
    even = [saying(s, "ref", said(s, "now")) for s in rows]  # the policy is the reference
    loss, gradient, _ = evaluate(losses.DPO(label_smoothing=0.5), even)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-12)
    assert max(np.abs(g).max() for g in gradient["now"]) < 1e-12  # no side is preferred
    loss, gradient, _ = evaluate(losses.DPO(beta=1e-9), rows)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    assert max(np.abs(g).max() for g in gradient["now"]) < 1e-8
    loss, gradient, report = evaluate(losses.ORPO(coef=0.0), rows)
    np.testing.assert_allclose(loss, report["nll"], rtol=1e-6)
    assert not any(g.any() for g, s in zip(gradient["now"], rows, strict=True) if s.label == 0)


@pytest.mark.slow
def test_a_certain_completion_has_finite_odds():
    """log p = 0 would have infinite ones."""
    spec, rng = losses.ORPO(), np.random.default_rng(0)
    rows = [one(rng, 6, 3, pair=0, label=1.0), one(rng, 6, 3, pair=0)]
    loss, gradient, _ = evaluate(spec, [saying(rows[0], "now", np.zeros(6)), rows[1]])
    assert np.isfinite(loss) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


BREAKS = {
    "an empty mask": lambda s: s.replace(mask=np.zeros_like(s.mask)),
    "no weight": lambda s: s.replace(weight=0.0),
    "a reference that is not finite": lambda s: saying(s, "ref", np.where(np.arange(len(s.mask)) > 4, -np.inf, 0)),
    "a reference that is NaN": lambda s: saying(s, "ref", np.where(np.arange(len(s.mask)) > 4, np.nan, 0)),
    "no partner": lambda s: s.replace(pair=999),
    "a label that is no label": lambda s: s.replace(label=0.5),
    "the partner's label": lambda s: s.replace(label=1 - s.label),
    "an unscorable reward": lambda s: s.replace(rewards=((1, np.nan),)),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", BREAKS)
def test_a_pair_that_cannot_be_compared_is_left_out_and_counted(kind, side):
    """As if it were not there: the same loss and gradient, none of its own."""
    for spec in (losses.DPO(), losses.ORPO(), losses.RewardModel(margin=True)):
        rows = samples(spec)
        if "reference" in kind and not spec.needs_reference or "reward" in kind and not hasattr(spec, "margin"):
            continue
        bad = next(i for i, s in enumerate(rows) if s.label == side)
        pair = rows[bad].pair
        broken = [BREAKS[kind](s) if i == bad else s for i, s in enumerate(rows)]
        rest = [s for s in rows if s.pair != pair]
        wanted, slopes, _ = evaluate(spec, rest)
        loss, gradient, report = evaluate(spec, broken)
        np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        np.testing.assert_allclose(report["left_out"], 2 / len(rows), rtol=1e-6)
        for own in gradient.values():
            theirs = iter(slopes["now" if own is gradient["now"] else "value"])
            for s, g in zip(rows, own, strict=True):
                np.testing.assert_allclose(g, 0 * g if s.pair == pair else next(theirs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [losses.KTO(), losses.BCO()], ids=["KTO", "BCO"])
def test_completions_that_cannot_be_learnt_from(spec):
    rows = samples(spec)
    for label in {s.label for s in rows}:
        bad = next(i for i, s in enumerate(rows) if s.label == label)
        wanted = evaluate(spec, rows[:bad] + rows[bad + 1 :])[0]
        for kind in ("an empty mask", "no weight", "a reference that is NaN", "a label that is no label"):
            broken = [BREAKS[kind](s) if i == bad else s for i, s in enumerate(rows)]
            loss, gradient, report = evaluate(spec, broken)
            np.testing.assert_allclose(loss, wanted, rtol=1e-12)
            np.testing.assert_allclose(report["left_out"], 1 / len(rows), rtol=1e-6)
            assert not gradient["now"][bad].any()


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_learn_is_finite(name):
    spec = EVERY[name]
    loss, gradient, _ = evaluate(spec, [s.replace(mask=np.zeros_like(s.mask)) for s in samples(spec)])
    assert loss == 0 and not any(g.any() for g in jax.tree.leaves(gradient))


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
def test_a_current_policy_that_is_not_finite_is_not_hidden(name):
    spec = EVERY[name]
    rows = samples(spec)
    for label in {s.label for s in rows}:
        bad = next(i for i, s in enumerate(rows) if s.label == label)
        ruin = lambda s: saying(saying(s, "now", np.where(s.mask, np.nan, 0)), "value", np.full(len(s.mask), np.nan))
        assert not np.isfinite(evaluate(spec, [ruin(s) if i == bad else s for i, s in enumerate(rows)])[0])


def test_the_baseline_has_no_gradient_and_no_sign():
    spec, rows = losses.KTO(), samples(losses.KTO())
    _, gradient, _ = evaluate(spec, rows)
    assert not any(g.any() for g, s in zip(gradient["now"], rows, strict=True) if s.label == -1)
    low = [saying(s, "now", said(s, "now") - 9 * s.mask) if s.label == -1 else s for s in rows]
    alone = [s for s in rows if s.label >= 0]
    assert evaluate(spec, low)[2]["kl_baseline"] == 0  # less likely than under the reference
    np.testing.assert_allclose(evaluate(spec, low)[0], evaluate(spec, alone)[0], rtol=1e-12)


def test_the_reward_shift_is_that_of_the_only_side_there_is():
    """With one completion the classifier is at its border: log 2, and half the slope of beta."""
    spec = losses.BCO(beta=0.5)
    rows = [s for s in samples(spec) if s.label == 1][:1]
    loss, gradient, report = evaluate(spec, rows)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-12)
    np.testing.assert_allclose(report["reward_shift"], report["reward_chosen"], rtol=1e-6)
    np.testing.assert_allclose(gradient["now"][0], -0.25 * rows[0].mask, atol=1e-12)


# -- words ---------------------------------------------------------------------------------------


def test_objectives_print_their_formula():
    """What each preset and variant optimises, as tests/data/preferences.txt has it."""
    assert "\n\n".join(map(str, EVERY.values())) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: losses.DPO(label_smoothing=0.7), "DPO: label_smoothing must be between 0 and 0.5, got 0.7"),
        (lambda: losses.IPO(label_smoothing=0.1), 'IPO: label_smoothing must be 0 with link "square", got 0.1'),
        (lambda: losses.IPO(beta=0.0), "IPO: beta must be above 0, got 0.0"),
        (lambda: losses.ORPO(reference=True), 'ORPO: reference must be False with score "odds", got True'),
        (lambda: losses.DPO(score="max"), "DPO: score must be one of sum, mean, odds, got max"),
        (lambda: losses.KTO(desirable_weight=-1.0), "KTO: desirable_weight must be at least 0, got -1.0"),
        (lambda: losses.BCO(beta=-1.0), "BCO: beta must be at least 0, got -1.0"),
        (lambda: losses.BCO().prepare(packing.pack(samples(losses.BCO()), 32)), "BCO.prepare: the reward shift needs"),
        (lambda: losses.RewardModel(center_coef=-1.0), "RewardModel: center_coef must be at least 0, got -1.0"),
        (lambda: losses.DPO().prepare(packing.pack(samples(losses.DPO()), 32)), "DPO.prepare: needs ref_BT"),
        (
            lambda: losses.KTO().prepare(packing.pack(samples(losses.KTO()), 32)),
            "KTO.prepare: the baseline needs scores",
        ),
        (
            lambda: losses.RewardModel().loss(types.SimpleNamespace(value_BT=None), None),
            "RewardModel: needs a model with a score head",
        ),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
