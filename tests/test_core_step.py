"""The step: accumulation, donation, skipping, and its shape-stability."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from areax import models
from areax.core import losses, metrics, optim, packing, step, token_losses
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

HF = dict(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2, tie_word_embeddings=True,
)  # fmt: skip
CONFIG = models.config_from_hf(HF)
TABLE = models.table(CONFIG)
SCORE = partial(models.score, config=CONFIG)


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda k: rng.integers(0, 61, k)
    lengths = rng.choice([3, 9], n)  # few, because each is compiled where sequences stand alone
    return [supervised(draw(4), draw(int(k)), sample=i, rollout=i, group=i) for i, k in enumerate(lengths)]


PARAMS = tiny.weights(TABLE, 0.2)


def fresh(optimizer):
    return jax.jit(lambda params: step.init(params, optimizer))(PARAMS)


OBJECTIVE = losses.SFT()
ADAM = optim.make_optimizer(optim.Optimizer(lr=1e-2), TABLE)
STEP = step.make_step(SCORE, OBJECTIVE, ADAM)


def ready(n):
    """8 microbatches of one row each, for 22 to 26 sequences."""
    batch = OBJECTIVE.prepare(packing.pack(rows(n), 40, rows=1))
    assert batch.token_BT.shape[0] == 8
    return batch


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def alone(params, token_T, mask_T):
    """((sum of the learnt tokens' losses, log-probabilities of all), gradient) of a plain pass over one sequence."""
    logits_TV = models.forward(params, token_T[None], config=CONFIG)[0]
    logp_T = jnp.take_along_axis(jax.nn.log_softmax(logits_TV)[:-1], token_T[1:, None], -1)[:, 0]
    return -jnp.sum(logp_T * mask_T[1:]), logp_T


def test_gradients_do_not_depend_on_the_microbatching():
    """SGD makes the update the gradient; packing into other rows must not change it."""
    sgd = optax.sgd(1.0)
    data, out = rows(20), []
    for B in (2, 16):
        batch = packing.pack(data, 32, rows=B)
        state, report = step.make_step(SCORE, OBJECTIVE, sgd)(fresh(sgd), OBJECTIVE.prepare(batch))
        out.append((state.params, metrics.to_dict(report)["loss"]))
    for got, loss in out[1:]:
        np.testing.assert_allclose(loss, out[0][1], rtol=1e-5)
        for a, b, start in zip(*map(jax.tree.leaves, (got, out[0][0], PARAMS)), strict=True):
            scale = float(jnp.abs(b - start).max())
            np.testing.assert_allclose(a, b, atol=1e-5 * scale + 1e-7)


def test_packed_rows_equal_separate_rows():
    """Loss and gradients of packed sequences equal those of one sequence a row, without padding."""
    data = rows(9)
    batch = OBJECTIVE.prepare(packing.pack(data, 40, rows=3))
    assert len(batch.token_BT) == 1
    micro = jax.tree.map(lambda x: x[0], batch)
    loss, gradient = jax.jit(jax.value_and_grad(lambda params: OBJECTIVE.loss(SCORE(params, micro), micro)[0]))(PARAMS)
    learnt = sum(s.mask.sum() for s in data)
    wanted, total = 0.0, jax.tree.map(np.zeros_like, PARAMS)
    for s in data:
        (one, _), more = alone(PARAMS, s.tokens, s.mask)
        wanted, total = wanted + one / learnt, jax.tree.map(lambda a, b: a + b / learnt, total, more)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(np.abs(y).max()))


@pytest.mark.slow
def test_the_state_is_donated():
    state = fresh(ADAM)
    compiled = STEP.lower(state, ready(24)).compile()
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= held


@pytest.mark.slow
def test_more_microbatches_do_not_recompile():
    fn, state = step.make_step(SCORE, OBJECTIVE, ADAM), fresh(ADAM)
    for n in (22, 24, 26):
        state, _ = fn(state, ready(n))
    assert fn._cache_size() == 1


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing():
    batch, before = ready(24), jax.tree.map(np.asarray, fresh(ADAM))
    state, report = STEP(fresh(ADAM), batch.replace(weight_BT=batch.weight_BT * jnp.inf))
    assert metrics.to_dict(report)["skipped"] == 1 and int(state.step) == 1
    kept = lambda state: jax.tree.leaves((state.params, state.opt_state))
    for a, b in zip(kept(before), kept(state), strict=True):
        np.testing.assert_array_equal(a, b)
    _, report = STEP(state, batch)
    assert metrics.to_dict(report)["skipped"] == 0


def test_scores_over_microbatches_equal_one_pass():
    data = rows(12)
    batch = packing.pack(data, 32, rows=2)
    got = packing.unpack(step.make_scores(SCORE)(PARAMS, batch).logp_BT, batch, data)
    for s, x in zip(data, got, strict=True):
        np.testing.assert_allclose(x[1:], alone(PARAMS, s.tokens, s.mask)[0][1], atol=1e-5)


def split(batches, hyper, objective=OBJECTIVE, state=None):
    """A step in two halves: gradients of all batches, then one update."""
    state = state or fresh(optim.adamw(TABLE))
    gradient, reports = step.no_gradient(state.params), []
    for batch in batches:
        gradient, report = ACCUMULATE[objective](state.params, gradient, batch)
        reports.append(report)
    return *APPLY(state, gradient, hyper), gradient, reports


SUM = losses.PerToken(token_losses.cross_entropy, reduce="sum")
ACCUMULATE = {objective: step.make_accumulate(SCORE, objective) for objective in (OBJECTIVE, SUM)}
APPLY = step.make_apply(partial(optim.adamw, TABLE))


@pytest.mark.slow
def test_gradient_and_update_apart_equal_the_fused_step():
    """The same sums, bit for bit; the same update but for the rounding of 1 - b1 and 1 - b2."""
    hyper = dict(lr=1e-2, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1, clip=0.5)
    adam = optim.make_optimizer(optim.Optimizer(**hyper), TABLE)
    fused, state, apart = step.make_step(SCORE, OBJECTIVE, adam), fresh(adam), fresh(optim.adamw(TABLE))
    for i in range(3):
        before = jax.tree.map(np.asarray, state.params)
        apart = step.State(jax.tree.map(jnp.asarray, before), apart.opt_state, apart.step)  # lest differences add up
        state, whole = fused(state, ready(22 + 2 * i))
        apart, report, gradient, reports = split([ready(22 + 2 * i)], optim.AdamW(**hyper), state=apart)
        told = metrics.numbers(whole)
        assert told == metrics.numbers(reports[0] | report) | {name: told[name] for name in RATIO}
        assert told["grad_norm"] > 0.5 and float(gradient.loss) == np.float32(told["loss"])
        for a, b, start in zip(*map(jax.tree.leaves, (apart.params, state.params, before)), strict=True):
            atol = max(1e-5 * float(jnp.abs(b - start).max()), float(np.spacing(np.abs(b).max())))  # a last bit of b
            np.testing.assert_allclose(a - start, b - start, rtol=1e-5, atol=atol)
    assert int(apart.step) == 3


RATIO = ("update_ratio", "update_ratio_max")  # has the rounding of the update


@pytest.mark.slow
def test_sums_add_up_over_calls():
    """Batches of several calls give the update of one call with all of them; another learning rate compiles nothing."""
    data = rows(24)
    pack = lambda rows: SUM.prepare(packing.pack(rows, 40, rows=1))
    hyper = optim.AdamW(lr=1e-2, clip=0.0)
    one, _, whole, _ = split([pack(data)], hyper, SUM)
    two, _, parts, reports = split([pack(data[:10]), pack(data[10:])], hyper, SUM)
    np.testing.assert_allclose(parts.loss, sum(metrics.numbers(r)["loss"] for r in reports), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    wanted = [alone(PARAMS, s.tokens, s.mask) for s in data]
    np.testing.assert_allclose(whole.loss, sum(loss for (loss, _), _ in wanted), rtol=1e-5)
    second = lambda **changes: APPLY(jax.tree.map(jnp.copy, one), whole, replace(hyper, **changes))[0].params
    plain, compiled = second(), APPLY._cache_size()
    for changes in (dict(lr=2e-2), dict(b1=0.5), dict(b2=0.5), dict(eps=1e-2), dict(weight_decay=0.3), dict(clip=1e-3)):
        for a, b in zip(*map(jax.tree.leaves, (second(**changes)["stacks"], plain["stacks"])), strict=True):
            assert np.any(a != b) or "weight_decay" in changes, changes  # norms do not decay
    assert APPLY._cache_size() == compiled


@pytest.mark.slow
def test_forward_and_backward_of_a_microbatch_show_what_they_computed():
    """The same sums as `make_accumulate`; without a gradient the same values, and none is computed."""
    run = step.make_forward_backward(SCORE, SUM, lambda out, batch: out.logp_BT)
    batch = SUM.prepare(packing.pack(rows(26)[:3], 40, rows=2))
    one, params = jax.tree.map(lambda x: x[0], batch), fresh(optim.adamw(TABLE)).params
    want, _ = ACCUMULATE[SUM](params, step.no_gradient(params), batch)
    got, loss, logp_BT = run(params, step.no_gradient(params), one)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(b).max()))
    none, alone, again_BT = run(params, None, one)
    assert none is None
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    np.testing.assert_allclose(again_BT, logp_BT, rtol=1e-5)
    np.testing.assert_allclose(logp_BT, SCORE(params, one).logp_BT, rtol=1e-5)


def test_float64_weights_have_float64_sums():
    """Over several microbatches, in the step and over calls; a cubic loss, whose gradient is known."""
    score = lambda params, batch: SimpleNamespace(aux={}, cube=params["w"] ** 3 * jnp.sum(batch.token_BT))
    objective = SimpleNamespace(loss=lambda out, batch: (out.cube, {"cube": metrics.of(out.cube)}))
    batch = packing.pack(rows(20), 40, rows=1)
    tokens, w, sgd = int(batch.token_BT.sum()), 1.1, optax.sgd(1e-4)
    with jax.enable_x64(True):
        state = step.init({"w": jnp.float64(w)}, sgd)
        gradient, _ = step.make_accumulate(score, objective)(state.params, step.no_gradient(state.params), batch)
        state, report = step.make_step(score, objective, sgd)(state, batch)
        assert state.params["w"].dtype == gradient.params["w"].dtype == gradient.loss.dtype == jnp.float64
        np.testing.assert_allclose(state.params["w"], w - 1e-4 * 3 * w**2 * tokens, rtol=1e-14)
        np.testing.assert_allclose(gradient.params["w"], 3 * w**2 * tokens, rtol=1e-14)
        np.testing.assert_allclose(gradient.loss, w**3 * tokens, rtol=1e-14)
    np.testing.assert_allclose(metrics.to_dict(report)["loss"], w**3 * tokens, rtol=1e-6)


@pytest.mark.slow
def test_a_sum_that_is_not_finite_is_not_applied():
    batch, before = ready(24), jax.tree.map(np.asarray, fresh(optim.adamw(TABLE)))
    broken = batch.replace(weight_BT=batch.weight_BT * jnp.inf)
    state, report, *_ = split([batch, broken], optim.AdamW(lr=1e-2))
    assert metrics.numbers(report)["skipped"] == 1 and int(state.step) == 1
    for a, b in zip(*(jax.tree.leaves((s.params, s.opt_state)) for s in (before, state)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_mesh_keeps_the_shardings_and_the_numbers():
    data, hyper = rows(24), optim.AdamW(lr=1e-2, clip=0.0)
    _, _, wanted, _ = split([SUM.prepare(packing.pack(data, 40, rows=8))], hyper, SUM)
    on = mesh.make(mesh.Layout(dp=2, fsdp=4))
    with jax.set_mesh(on):
        shardings = rules.of_state(optim.adamw(TABLE), TABLE, on)
        copies = jax.device_put(jax.tree.map(np.asarray, PARAMS), shardings.params)
        state = step.init(copies, optim.adamw(TABLE), shardings)
        batch = SUM.prepare(batches.batch(packing.pack(data, 40, rows=8), on))
        gradient = step.no_gradient(state.params)
        traced = []

        def score(*given):
            traced.append(given)
            return SCORE(*given)

        accumulate = step.make_accumulate(score, SUM, shardings)
        gradient, _ = accumulate(state.params, gradient, batch)
        once = len(traced)
        gradient, _ = accumulate(state.params, gradient, batch)
        assert len(traced) == once > 0  # compiled once
        state, report = step.make_apply(partial(optim.adamw, TABLE), shardings)(state, gradient, hyper)
    assert metrics.numbers(report)["skipped"] == 0
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, 2 * np.asarray(b), atol=2e-5 * float(np.abs(b).max()))
    for tree in (state.params, gradient.params):
        for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings.params), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
