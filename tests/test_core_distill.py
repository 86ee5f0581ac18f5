"""Distillation against float64 loops from the papers and TRL's trainer, and what must not change its numbers."""

import types
import warnings
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import torch
from sweeps import thinned

from areax import models
from areax.core import divergence, logprobs, losses, metrics, packing, step
from areax.models import frozen as teacher
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

KINDS = ("forward", "reverse", "js")


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


# -- the papers ----------------------------------------------------------------------------------


def outcomes(logits, temperature, ids=None):
    """Log-probabilities of all tokens; with ids of these, and of all others as one."""
    logp = torch.log_softmax(logits / temperature, 0)
    if ids is None or len(ids) == len(logp):
        return list(logp)
    rest = [logp[v] for v in range(len(logp)) if v not in ids]
    return [logp[v] for v in ids] + [torch.logsumexp(torch.stack(rest), 0)]


def paper(student, teachers, kind, beta, temperature, ids=None):
    """KL(T || S), KL(S || T) or eq. 1 of arXiv:2306.13649, outcome by outcome."""
    s, t = outcomes(student, temperature, ids), [x.detach() for x in outcomes(teachers, temperature, ids)]
    total = torch.zeros((), dtype=torch.float64)
    for s_v, t_v in zip(s, t, strict=True):
        p, q = torch.exp(t_v), torch.exp(s_v)
        m = torch.log(beta * p + (1 - beta) * q)
        total = (
            total
            + {
                "forward": p * (t_v - s_v),
                "reverse": q * (s_v - t_v),
                "js": beta * p * (t_v - m) + (1 - beta) * q * (s_v - m),
            }[kind]
        )
    return total


def both(C=5, V=11, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(C, V)), scale * rng.normal(size=(C, V))


def by_hand(student, teachers, ids_CK=None, **how):
    """(each token's, the gradient of their sum in the student's logits)."""
    leaf = torch.tensor(student, requires_grad=True)
    ids = [None] * len(student) if ids_CK is None else [list(map(int, row)) for row in ids_CK]
    each = [paper(x, t, **how, ids=k) for x, t, k in zip(leaf, torch.tensor(teachers), ids, strict=True)]
    torch.stack(each).sum().backward()
    return np.array([x.item() for x in each]), leaf.grad.numpy()


def ours(function, student):
    """(each token's, the gradient of their sum)."""
    value, pull = jax.vjp(function, jnp.asarray(student))
    return np.asarray(value), np.asarray(pull(jnp.ones_like(value))[0])


DIVERGENCES = [("forward", 0.5), ("reverse", 0.5), ("js", 0.1), ("js", 0.5), ("js", 0.9)]
# Of each divergence one temperature in `make test`, in turn.
CASES = [(*how, (1.0, 0.5, 2.0)[(i + t) % 3]) for i, how in enumerate(DIVERGENCES) for t in range(3)]


@pytest.mark.sweep
@pytest.mark.parametrize("kind, beta, temperature", thinned(CASES, 3, pytest.mark.slow))
def test_divergences_match_the_papers(wide, kind, beta, temperature):
    student, teachers = both()
    how = dict(kind=kind, beta=beta, temperature=temperature)
    full = partial(divergence.full, teacher_CV=jnp.asarray(teachers), **how)
    for got, wanted in zip(ours(full, student), by_hand(student, teachers, **how), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)
    for K in (1, 4, 10):
        ids_CK, logp_CK = divergence.teacher_top(jnp.asarray(teachers), K, temperature)
        top = partial(divergence.top, ids_CK=ids_CK, logp_CK=logp_CK, **how)
        for got, wanted in zip(ours(top, student), by_hand(student, teachers, ids_CK, **how), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-9)
        assert (top(jnp.asarray(student)) <= full(jnp.asarray(student)) + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_the_vocabulary_size_equals_the_full_divergence(wide, kind):
    student, teachers = both()
    ids_CK, logp_CK = divergence.teacher_top(jnp.asarray(teachers), 11, 0.7)
    top = partial(divergence.top, ids_CK=ids_CK, logp_CK=logp_CK, kind=kind, temperature=0.7)
    full = partial(divergence.full, teacher_CV=jnp.asarray(teachers), kind=kind, temperature=0.7)
    for got, wanted in zip(ours(top, student), ours(full, student), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_equal_to_its_teacher_has_zero_loss_and_gradient(wide, kind):
    student, _ = both()
    ids_CK, logp_CK = divergence.teacher_top(jnp.asarray(student), 4)
    for function in (
        partial(divergence.full, teacher_CV=jnp.asarray(student), kind=kind),
        partial(divergence.top, ids_CK=ids_CK, logp_CK=logp_CK, kind=kind),
    ):
        for got in ours(function, student):
            np.testing.assert_allclose(got, 0, atol=1e-12)


def test_no_gradient_reaches_the_teacher(wide):
    student, teachers = map(jnp.asarray, both())
    grad = jax.grad(lambda t: jnp.sum(divergence.full(student, t, kind="js")))(teachers)
    np.testing.assert_array_equal(grad, 0)


def test_generalised_js_tends_to_forward_and_reverse_kl(wide):
    student, teachers = map(jnp.asarray, both())
    of = lambda kind, beta=0.5: divergence.full(student, teachers, kind=kind, beta=beta)
    np.testing.assert_allclose(of("js", 1e-7) / 1e-7, of("forward"), rtol=1e-4)
    np.testing.assert_allclose(of("js", 1 - 1e-7) / 1e-7, of("reverse"), rtol=1e-4)


@pytest.mark.slow
def test_fp32_keeps_its_precision_where_probabilities_underflow():
    """Logits far apart, and a teacher whose named tokens leave less to the tail than fp32 can tell."""
    student, teachers = both(scale=60.0)
    for kind in KINDS:
        full = partial(divergence.full, teacher_CV=jnp.asarray(teachers, jnp.float32), kind=kind)
        got, grad = ours(jax.jit(full), student.astype(np.float32))
        wanted, slope = by_hand(student, teachers, kind=kind, beta=0.5, temperature=1.0)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grad, slope, rtol=1e-4, atol=1e-4)
        ids_CK, logp_CK = divergence.teacher_top(jnp.asarray(teachers, jnp.float32), 3)
        top = partial(divergence.top, ids_CK=ids_CK, logp_CK=logp_CK, kind=kind)
        for x in ours(jax.jit(top), student.astype(np.float32)):
            assert np.isfinite(x).all()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind, beta, theirs", [("forward", 0.5, 0.0), ("js", 0.3, 0.3), ("reverse", 0.5, 1.0)])
def test_the_loss_matches_trl(wide, kind, beta, theirs, temperature):
    """TRL calls forward and reverse beta 0 and 1, where its scale jumps: between them js goes to 0 at both ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd.gkd_trainer import GKDTrainer as trainer
    student, teachers = both(C=6)
    leaf = torch.tensor(student[None], requires_grad=True)
    labels = torch.tensor([[-100, 1, 2, -100, 3, 4]])
    loss = trainer.generalized_jsd_loss(leaf, torch.tensor(teachers[None]), labels, theirs, temperature)
    loss.backward()
    learnt = jnp.asarray(labels[0].numpy() >= 0)

    def mean(x):
        each = divergence.full(x, jnp.asarray(teachers), kind=kind, beta=beta, temperature=temperature)
        return jnp.sum(jnp.where(learnt, each, 0)) / jnp.sum(learnt)

    value, grad = jax.value_and_grad(mean)(jnp.asarray(student))
    np.testing.assert_allclose(value, loss.item(), atol=1e-12)
    np.testing.assert_allclose(grad, leaf.grad[0].numpy(), atol=1e-12)


# -- chunks --------------------------------------------------------------------------------------


def hidden(A=37, D=8, E=12, V=23, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    return draw(A, D), draw(V, D), draw(A, E), draw(V, E), jnp.asarray(rng.integers(0, V, A))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("objective", [losses.Distill("js"), losses.Distill("reverse", top_k=5, temperature=2.0)])
def test_the_loss_does_not_depend_on_the_chunk_size(wide, objective):
    """Value and gradients in the student's hidden states and head, of a local teacher and of one that came along."""
    h, w, teachers_h, teachers_w, target = hidden()
    teachers_logits = teachers_h @ teachers_w.T
    ids, logp = divergence.teacher_top(teachers_logits, objective.top_k or 23, objective.temperature)
    given = {"teacher_ids": ids, "teacher_logp": logp}
    whole = lambda h, w: jnp.sum(objective.per_token(h @ w.T, target, None, teachers_logits)["divergence"])

    def chunked(chunk, **more):
        def total(h, w):
            how = dict(chunk=chunk, per_chunk=objective.per_token, **more)
            return jnp.sum(logprobs.from_hidden(h, w, target, **how)[3]["divergence"])

        return total

    both = lambda function: jax.tree.leaves(jax.jit(jax.value_and_grad(function, (0, 1)))(h, w))
    wanted = both(whole)
    cases = [chunked(chunk, others=((teachers_h, teachers_w),)) for chunk in (8, None)]
    for function in cases + [chunked(8, beside=given)] * bool(objective.top_k):
        for a, b in zip(both(function), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_memory_is_bounded_by_the_chunk_size():
    """The gradient of a divergence from a local teacher holds no logits of all tokens."""
    A, D, V = 1024, 32, 8192
    of = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")

    def loss(h, w, teachers_h, teachers_w, target):
        how = dict(chunk=64, per_chunk=losses.Distill("js").per_token, others=((teachers_h, teachers_w),))
        return jnp.sum(logprobs.from_hidden(h, w, target, **how)[3]["divergence"])

    made = jax.jit(jax.grad(loss, (0, 1))).lower(
        of(A, D), of(V, D), of(A, D), of(V, D), jax.ShapeDtypeStruct((A,), "int32")
    )
    assert made.compile().memory_analysis().temp_size_in_bytes < 0.6 * A * V * 4


# -- models --------------------------------------------------------------------------------------

COMMON = dict(
    model_type="qwen3", vocab_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
ROWS, LENGTH, ONE, RUN = 4, 32, mesh.Layout(), models.Run()


@cache
def model(width, seed=0, **changes):
    config = models.config_from_hf({**COMMON, "hidden_size": width, **changes})
    return config, tiny.weights(models.table(config), 0.5, seed)


STUDENT, TEACHER = partial(model, 16), partial(model, 24, 1, tie_word_embeddings=False)
SPEC = losses.Distill("js", beta=0.3, temperature=1.5, sft_coef=0.2)


@cache
def samples(K=0):
    """Sequences of unequal lengths; with K they bring the teacher's likeliest tokens, each computed alone."""
    rng = np.random.default_rng(0)
    out = []
    config, params = TEACHER()
    told = jax.jit(
        lambda token_T: divergence.teacher_top(models.forward(params, token_T[None], config=config)[0, :-1], K, 1.5)
    )
    for i, n in enumerate([20, 9, 9, 20] * 3):
        s = supervised(rng.integers(0, 64, 3), rng.integers(0, 64, n - 3), group=i, sample=i, rollout=i)
        if K:
            ids, logp = (np.asarray(x)[: n - 1] for x in told(np.pad(s.tokens, (0, 20 - n))))
            own = lambda x: ("target", np.pad(x, ((1, 0), (0, 0))))
            s = s.replace(arrays={"teacher_ids": own(ids), "teacher_logp": own(logp)})
        out.append(s)
    return out


def sgd_step(data, objective, *, rows=ROWS, layout=ONE, run=RUN, local=True):
    """(metrics, parameters) after a step of SGD of rate 1, whose change is the gradient."""
    (config, params), (its, weights) = STUDENT(), TEACHER()
    on, sgd = mesh.make(layout), optax.sgd(1.0)
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, models.table(config), on)
        score = partial(teacher.score, objective=objective, config=config, teacher_config=its, run=run)
        frozen = (jax.device_put(weights, rules.of_params(models.table(its), on)),) * local
        batch = jax.jit(objective.prepare)(batches.batch(packing.pack(data, LENGTH, rows=rows), on))
        state = step.init(jax.tree.map(jnp.copy, jax.device_put(params, shardings.params)), sgd, shardings)
        state, report = step.make_step(score, objective, sgd, shardings)(state, batch, *frozen)
        return metrics.to_dict(report), jax.tree.map(np.asarray, state.params)


def same(got, wanted):
    for name, value in wanted[0].items():
        np.testing.assert_allclose(got[0][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b, start in zip(*map(jax.tree.leaves, (got[1], wanted[1], STUDENT()[1])), strict=True):
        scale = float(np.abs(b - start).max())
        assert scale > 0 and float(np.abs(a - b).max()) <= 1e-5 * scale + 2e-7


@cache
def one_device():
    return sgd_step(samples(), SPEC)


@pytest.mark.slow
def test_a_step_averages_the_divergence_over_tokens():
    """Each sequence alone, through plain forward passes of both models; what is padded behind it changes nothing."""
    (config, params), (its, weights) = STUDENT(), TEACHER()

    @jax.jit
    @jax.value_and_grad
    def alone(params, token_T, mask_T):
        logits, other = (models.forward(w, token_T[None], config=c)[0] for w, c in ((params, config), (weights, its)))
        each = divergence.full(logits, other, kind="js", beta=0.3, temperature=1.5)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], token_T[1:, None], -1)[:, 0]
        return jnp.sum((each[:-1] - 0.2 * logp) * mask_T[1:])

    loss, grad = 0.0, jax.tree.map(np.zeros_like, params)
    learnt = sum(s.mask.sum() for s in samples())
    for s in samples():
        pad = (0, 20 - len(s.tokens))
        value, more = alone(params, np.pad(s.tokens, pad), np.pad(s.mask, pad))
        loss, grad = loss + value / learnt, jax.tree.map(lambda a, b: a + b / learnt, grad, more)
    report, after = one_device()
    np.testing.assert_allclose(report["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(report["loss"], report["divergence"] + 0.2 * report["nll"], rtol=1e-5)
    for a, b, g in zip(*map(jax.tree.leaves, (after, params, grad)), strict=True):
        np.testing.assert_allclose(b - a, g, atol=1e-5 * float(np.abs(g).max()) + 2e-7)


@pytest.mark.slow
def test_the_loss_does_not_depend_on_packing_order_or_microbatching():
    shuffled = [samples()[i] for i in np.random.default_rng(1).permutation(len(samples()))]
    same(sgd_step(shuffled, SPEC, rows=1), one_device())


def extras(K=0, objective=SPEC, its=None, weights=None):
    """The divergence of the learnt tokens by `teacher.score`, from a local teacher or one that came with the batch."""
    (config, params), teachers = STUDENT(), (weights,) if its else ()
    batch = jax.tree.map(lambda x: x[0], packing.pack(samples(K), LENGTH, rows=8))
    score = partial(teacher.score, objective=objective, config=config, teacher_config=its, run=RUN)
    return np.asarray(jax.jit(score)(params, batch, *teachers).extra["divergence"])[batch.mask_BT]


@pytest.mark.slow
def test_a_served_teacher_equals_a_local_one():
    """The whole vocabulary named; and fewer tokens, taken here or brought along."""
    np.testing.assert_allclose(extras(64, replace(SPEC, top_k=64)), extras(0, SPEC, *TEACHER()), atol=1e-5)
    few = replace(SPEC, top_k=5)
    np.testing.assert_allclose(extras(5, few), extras(0, few, *TEACHER()), atol=1e-5)
    with pytest.raises(ValueError, match="must have teacher_ids and teacher_logp"):
        extras()


@pytest.mark.slow
def test_a_teacher_may_have_more_entries_but_not_fewer():
    """Its first ones are compared; so do families whose larger models pad the vocabulary further."""
    its, weights = TEACHER()
    more = lambda x, value: jnp.pad(x, ((0, 8), (0, 0)), constant_values=value)
    padded = {**weights, "head": more(weights["head"], 9.0), "embed": more(weights["embed"], 0.0)}
    got = extras(0, SPEC, replace(its, vocab=72), padded)
    np.testing.assert_allclose(got, extras(0, SPEC, its, weights), atol=1e-5)
    with pytest.raises(ValueError, match="vocabulary of at least 64 entries, got 60"):
        extras(0, SPEC, replace(its, vocab=60), weights)


LAYOUTS = {"dp2 cp2 tp2 ring": "ring", "cp4 tp2": "gather", "cp2 tp4": "gather", "fsdp4 tp2": "gather"}
SIZES = {
    "dp2 cp2 tp2 ring": mesh.Layout(dp=2, cp=2, tp=2), "cp4 tp2": mesh.Layout(cp=4, tp=2),
    "cp2 tp4": mesh.Layout(cp=2, tp=4), "fsdp4 tp2": mesh.Layout(fsdp=4, tp=2),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_same_on_a_mesh(layout):
    run = models.Run(cp=LAYOUTS[layout])
    same(sgd_step(samples(), SPEC, layout=SIZES[layout], run=run), one_device())


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("layout", LAYOUTS)
def test_teacher_log_probabilities_stay_with_their_tokens_when_packed(layout):
    run, few = models.Run(cp=LAYOUTS[layout]), replace(SPEC, top_k=5)
    got = sgd_step(samples(5), few, layout=SIZES[layout], run=run, local=False)
    same(got, sgd_step(samples(5), few, local=False))


# -- the objective -------------------------------------------------------------------------------


def scored(batch, **changes):
    """Numbers that a score might have given."""
    rng = np.random.default_rng(3)
    draw = lambda: jnp.asarray(rng.random(batch.mask_BT.shape))
    extra = {"divergence": draw(), "usable": jnp.ones(batch.mask_BT.shape, bool), **changes}
    return types.SimpleNamespace(logp_BT=-draw(), entropy_BT=draw(), extra=extra)


@pytest.mark.slow
def test_tokens_with_non_finite_teacher_values_are_masked_and_counted():
    data = samples(5)
    ids, logp = data[0].arrays["teacher_ids"], data[0].arrays["teacher_logp"][1].copy()
    logp[5, 2], logp[6, 0], logp[1, 1] = np.nan, -np.inf, np.nan  # the last one is not learnt
    broken = [data[0].replace(arrays={"teacher_ids": ids, "teacher_logp": ("target", logp)}), *data[1:]]
    spec = replace(SPEC, top_k=5)
    report, params = sgd_step(broken, spec, local=False)
    learnt = sum(int(s.mask.sum()) for s in data)
    np.testing.assert_allclose(report["unusable_fraction"], 2 / learnt, rtol=1e-5)
    assert report["skipped"] == 0
    unlearnt = data[0].replace(mask=data[0].mask & ~np.isin(np.arange(20), (5, 6)))
    wanted, reference = sgd_step([unlearnt, *data[1:]], spec, local=False)
    same((report, params), ({k: x for k, x in wanted.items() if "unusable" not in k}, reference))
    teachers = jnp.asarray(both(C=3)[1]).at[1, 4].set(jnp.nan)
    made = SPEC.per_token(jnp.asarray(both(C=3)[0]), None, None, teachers)
    np.testing.assert_array_equal(made["usable"], [True, False, True])
    assert jnp.isfinite(made["divergence"]).all()


@pytest.mark.slow
def test_a_non_finite_student_gives_a_non_finite_loss():
    """On a token that is learnt; on others nothing is read."""
    batch = jax.tree.map(jnp.asarray, packing.pack(samples(), LENGTH, rows=8))
    total = jax.jit(jax.value_and_grad(lambda x: SPEC.loss(scored(batch, divergence=x), SPEC.prepare(batch))[0]))
    assert jnp.isnan(total(jnp.where(batch.mask_BT, jnp.nan, 0.0))[0])
    loss, grad = total(jnp.where(batch.mask_BT, 1.0, jnp.nan))
    assert jnp.isfinite(loss) and jnp.isfinite(grad).all()
    student, teachers = map(jnp.asarray, both(C=2))
    made = SPEC.per_token(student.at[0, 3].set(jnp.nan), None, None, teachers)
    np.testing.assert_array_equal(jnp.isnan(made["divergence"]), [True, False])


def test_bad_settings_give_a_one_line_error():
    for changes, words in (
        (dict(divergence="kl"), "divergence must be one of forward, reverse, js, got kl"),
        (dict(beta=1.0), "beta must be between 0 and 1"),
        (dict(top_k=-1), "top_k must be at least 0"),
        (dict(temperature=0.0), "temperature must be above 0"),
        (dict(sft_coef=-1.0), "sft_coef must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            losses.Distill(**changes)
    given = {"teacher_ids": jnp.zeros((5, 3), int), "teacher_logp": jnp.zeros((5, 3))}
    with pytest.raises(ValueError, match="top_k must be the number of tokens in teacher_ids, 3, got 4"):
        losses.Distill(top_k=4).per_token(jnp.zeros((5, 11)), None, given)
    assert "KL(pi || teacher)" in str(losses.Distill()) and "- 0.2 log pi" in str(SPEC)
