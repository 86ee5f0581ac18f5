"""A teacher that reads another prompt before the same completion: against forward passes of each text alone."""

import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import torch

from areax import models
from areax.core import divergence, losses, metrics, optim, packing, step, teacher_rows
from areax.models import frozen
from areax.parallel import batches, mesh, rules
from areax.rollout.types import Image, supervised

HF = dict(
    model_type="qwen3", vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
LENGTH, ONE, RUN = 32, mesh.Layout(), models.Run()


@cache
def model(seed=0, **changes):
    config = models.config_from_hf({**HF, **changes})
    return config, tiny.weights(models.table(config), 0.5, seed)


@cache
def samples():
    """Completions behind prompts of 3 tokens; the teacher's are longer, shorter, or the same."""
    rng, made = np.random.default_rng(0), []
    for i, (n, prompt) in enumerate([(9, 7), (5, 2), (12, 0), (6, 12), (9, 1), (4, 5)]):
        s = supervised(rng.integers(0, 64, 3), rng.integers(0, 64, n), group=i, sample=i, rollout=i)
        made.append(s.replace(teacher_prompt=tuple(rng.integers(0, 64, prompt).tolist())))
    # Of an episode of two turns, the second is learnt as well, and what stands between them is not.
    made[0] = made[0].replace(mask=made[0].mask & ~np.isin(np.arange(12), (5, 6)))
    return made


# -- rows ----------------------------------------------------------------------------------------


def test_a_teacher_reads_its_prompt_and_the_same_completion():
    batch = packing.pack(samples(), LENGTH, rows=2)
    assert batch.input[teacher_rows.TOKEN].shape == batch.token_BT.shape
    read = teacher_rows.of(jax.tree.map(jnp.asarray, batch))
    for m, b, j in np.argwhere(batch.sample_BJ >= 0):
        s, own = samples()[batch.sample_BJ[m, b, j]], lambda x, m=m, b=b: np.asarray(x)[m, b]
        first, prompt = int(s.mask.argmax()), list(s.teacher_prompt) or s.tokens[:3].tolist()
        there = own(read.segment_BT) == j + 1
        np.testing.assert_array_equal(own(read.token_BT)[there], [*prompt, *s.tokens[first:]])
        np.testing.assert_array_equal(own(read.position_BT)[there], np.arange(there.sum()))
        np.testing.assert_array_equal(own(read.mask_BT)[there].sum(), s.mask.sum())
        aligned = teacher_rows.aligned(read.target_BT, read.replace(input=batch.input))
        here = (own(batch.segment_BT) == j + 1) & own(batch.mask_BT)
        np.testing.assert_array_equal(own(aligned)[here], s.tokens[s.mask])
        assert own(teacher_rows.aligned(read.mask_BT, read.replace(input=batch.input)))[here].all()


def test_without_prompts_of_a_teacher_nothing_changes():
    plain = [s.replace(teacher_prompt=()) for s in samples()]
    batch = packing.pack(plain, LENGTH, rows=2)
    assert not batch.input and teacher_rows.of(batch).token_BT is batch.token_BT
    assert packing.pack(samples(), LENGTH, rows=2).input.keys() == {*teacher_rows.NAMES}


def test_a_row_holds_what_the_teacher_reads():
    """A row of 32 would hold the 8 tokens of each of 4 samples, but holds the 16 of their teacher twice."""
    many = [supervised([1], [2] * 7, rollout=i).replace(teacher_prompt=(3,) * 9) for i in range(4)]
    batch = packing.pack(many, LENGTH, rows=1)
    np.testing.assert_array_equal((batch.segment_BT > 0).sum(-1).ravel(), [16, 16])
    np.testing.assert_array_equal((batch.input[teacher_rows.SEGMENT] > 0).sum(-1).ravel(), [32, 32])
    with pytest.raises(ValueError, match="must fit in a row of 32 tokens, got 33 in sample 0"):
        packing.pack([many[0].replace(teacher_prompt=(3,) * 26)], LENGTH)
    with pytest.raises(ValueError, match="samples must have no images where some have a teacher_prompt"):
        packing.pack([many[0], supervised([1], [2], images=(Image(b""),)).replace(rollout=9)], LENGTH)


def test_samples_whose_teacher_reads_another_prompt_share_no_tokens():
    alike = [supervised([1] * 20, [i], rollout=i) for i in range(4)]
    assert packing.pack_tries(alike, LENGTH, rows=1).trie is not None
    told = [s.replace(teacher_prompt=(5,)) for s in alike]
    tried, plain = packing.pack_tries(told, LENGTH, rows=1), packing.pack(told, LENGTH, rows=1)
    assert tried.trie is None
    jax.tree.map(np.testing.assert_array_equal, tried, plain)


# -- the loss ------------------------------------------------------------------------------------


def sgd_step(objective, *, layout=ONE, run=RUN, local=False, rows=4):
    """(metrics, parameters) after a step of SGD of rate 1; the teacher is the student itself, or a local one."""
    (config, params), on, sgd = model(), mesh.make(layout), optax.sgd(1.0)
    its, weights = model(1) if local else (config, None)
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, models.table(config), on)
        score = partial(frozen.score, objective=objective, config=config, teacher_config=its, run=run)
        theirs = (jax.device_put(weights, rules.of_params(models.table(its), on)),) if local else ()
        batch = jax.jit(objective.prepare)(batches.batch(packing.pack(samples(), LENGTH, rows=rows), on))
        state = step.init(jax.tree.map(jnp.copy, jax.device_put(params, shardings.params)), sgd, shardings)
        state, report = step.make_step(score, objective, sgd, shardings)(state, batch, *theirs)
        return metrics.to_dict(report), jax.tree.map(np.asarray, state.params)


def test_distributions_are_compared_without_the_temperature_of_sampling():
    config, params = model()
    batch = jax.tree.map(lambda x: x[0], packing.pack(samples(), LENGTH, rows=4))
    score = partial(
        frozen.score, params, batch, objective=losses.Distill("forward"), config=config, teacher_config=config, run=RUN
    )
    one, other = (score(temperature=t) for t in (1.0, 0.5))
    np.testing.assert_allclose(one.extra["divergence"], other.extra["divergence"], rtol=1e-4, atol=1e-6)
    assert not np.allclose(one.logp_BT, other.logp_BT)


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_a_step_is_that_of_the_paper(local):
    """SDPO: sum_t KL(pi(. | x, y_<t) || stopgrad pi(. | x, f, y_<t)), in float64 of each text alone; the mean over the
    learnt tokens."""
    config, params = model()
    told = lambda weights, token_T: jax.nn.log_softmax(models.forward(weights, token_T[None], config=config)[0])
    padded = lambda tokens: np.pad(tokens, (0, 24 - len(tokens)))  # which what comes before does not see

    @jax.jit
    @jax.value_and_grad
    def alone(params, weights, own_T, theirs_T, mask_T, more):
        p, q = told(params, own_T)[:-1], told(weights, theirs_T)
        q = q[jnp.clip(jnp.arange(23) + more, 0, 23)]
        return jnp.sum(jnp.sum(jnp.exp(p) * (p - q), -1) * mask_T[1:])

    with jax.enable_x64(True):
        student, weights = (jax.tree.map(lambda x: x.astype(jnp.float64), x) for x in (params, model(int(local))[1]))
        count = sum(s.mask.sum() for s in samples())
        wanted, grad = np.float64(0), jax.tree.map(np.zeros_like, student)
        for s in samples():
            theirs = [*(s.teacher_prompt or s.tokens[:3]), *s.tokens[3:]]
            rows = padded(s.tokens), padded(theirs), padded(s.mask)
            value, slope = alone(student, weights, *rows, len(theirs) - len(s.tokens))
            assert value.dtype == jnp.float64
            wanted, grad = wanted + value / count, jax.tree.map(lambda a, b: a + np.asarray(b) / count, grad, slope)
    for rows in (1, 4):
        report, after = sgd_step(losses.Distill("reverse"), local=local, rows=rows)
        np.testing.assert_allclose(report["loss"], wanted, rtol=1e-5)
        for a, b, g in zip(*map(jax.tree.leaves, (after, params, grad)), strict=True):
            np.testing.assert_allclose(b - a, g, atol=1e-5 * float(np.abs(g).max()) + 2e-7)


@pytest.mark.slow
def test_a_student_that_reads_what_its_teacher_reads_has_nothing_to_learn():
    (config, params), plain = model(), [s.replace(teacher_prompt=()) for s in samples()]
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack(plain, LENGTH, rows=8))
    score = partial(frozen.score, objective=losses.Distill("js"), config=config, teacher_config=config)
    out = score(params, batch, run=models.Run())
    np.testing.assert_allclose(out.extra["divergence"], 0, atol=1e-6)


@pytest.mark.slow
def test_a_teacher_may_be_the_average_of_its_student():
    """SDPO: teacher <- 0.75 teacher + 0.25 student after each step, kept in numpy and given as a local teacher."""
    (config, params), objective = model(), losses.Distill("reverse")
    optimizer = optim.make_optimizer(optim.Optimizer("sgd", lr=1.0, clip=0, ema=0.75), models.table(config))
    score = partial(frozen.score, objective=objective, config=config, teacher_config=config, run=RUN)
    batch = objective.prepare(jax.tree.map(jnp.asarray, packing.pack(samples(), LENGTH, rows=4)))
    start = lambda: step.init(jax.tree.map(jnp.copy, params), optimizer)
    state, by_hand, live = start(), start(), start()
    follows = step.make_step(score, objective, optimizer, average=True)
    given = step.make_step(score, objective, optimizer)
    teacher = jax.tree.map(np.asarray, params)
    for _ in range(3):
        state, report = follows(state, batch)
        by_hand, wanted = given(by_hand, batch, teacher)
        live, _ = given(live, batch)
        teacher = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * np.asarray(new), teacher, by_hand.params)
        np.testing.assert_allclose(metrics.to_dict(report)["loss"], metrics.to_dict(wanted)["loss"], rtol=1e-5)
    far = 0.0
    trees = state.params, by_hand.params, live.params, params
    for a, b, other, begun in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b - begun).max()) + 2e-7)
        far = max(far, float(jnp.abs(a - other).max()))
    assert far > 1e-3  # the student itself teaches something else
    for a, b in zip(*map(jax.tree.leaves, (optim.averaged(state.params, state.opt_state), teacher)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("cp", ["gather", "ring"])
def test_the_loss_is_the_same_on_a_mesh(cp):
    one = sgd_step(losses.Distill("js"))
    many = sgd_step(losses.Distill("js"), layout=mesh.Layout(fsdp=2, cp=2, tp=2), run=models.Run(cp=cp))
    np.testing.assert_allclose(many[0]["loss"], one[0]["loss"], rtol=1e-5)
    for a, b, start in zip(*map(jax.tree.leaves, (many[1], one[1], model()[1])), strict=True):
        assert float(np.abs(a - b).max()) <= 1e-5 * float(np.abs(b - start).max()) + 2e-7


@pytest.mark.slow
@pytest.mark.parametrize("kind, beta, alpha", [("forward", 0.5, 0.0), ("js", 0.3, 0.3), ("reverse", 0.5, 1.0)])
def test_each_token_has_the_loss_of_trl(kind, beta, alpha):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.sdpo import loss_utils as theirs
    rng = np.random.default_rng(0)
    student, teachers = 3 * rng.normal(size=(2, 5, 11))
    leaf = torch.tensor(student, requires_grad=True)
    each = theirs.compute_full_logit_self_distillation_loss(leaf, torch.tensor(teachers), distillation_alpha=alpha)
    each.sum().backward()
    with jax.enable_x64(True):
        own = lambda x: divergence.full(x, jnp.asarray(teachers), kind=kind, beta=beta)
        got, pull = jax.vjp(own, jnp.asarray(student))
        np.testing.assert_allclose(got, each.detach().numpy(), atol=1e-12)
        np.testing.assert_allclose(pull(jnp.ones_like(got))[0], leaf.grad.numpy(), atol=1e-12)
