"""Losses, gradients and updates of the service against the documented formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tinker_calls as calls
import tiny

from areax import models
from areax.adapters import hf
from areax.core import optim
from areax.models import lora
from areax.service import codec
from areax.service.model import Base, padded

RNG = np.random.default_rng(0)
LENGTHS = (9, 9, 4)
OPTIONS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, "cispo": {"clip_high_threshold": 1.1},
    "dro": {"beta": 0.3}, "gspo": {"clip_low_threshold": 0.97},
}  # fmt: skip


def draw(n):
    """A datum with every input that a loss may need; the first tokens are a prompt, of advantage 0."""
    prompt = np.arange(n - 1) < 2
    return calls.datum(
        RNG.integers(0, 11, n), weights=RNG.normal(size=n - 1),
        logprobs=-2.4 + 0.3 * RNG.normal(size=n - 1), advantages=np.where(prompt, 0, RNG.normal(size=n - 1)),
        sequence_ratio_mask=~prompt,
    )  # fmt: skip


DATA = [draw(n) for n in LENGTHS]


def gspo(p, x, low, high):
    mask = np.asarray(x["sequence_ratio_mask"], float)
    mean = jnp.sum((p - x["logprobs"]) * mask) / max(mask.sum(), 1)
    r = jax.lax.stop_gradient(jnp.exp(mean)) * jnp.exp(p - jax.lax.stop_gradient(p))
    return -jnp.minimum(r * x["advantages"], jnp.clip(r, low, high) * x["advantages"])


def ratio(p, x):
    return jnp.exp(p - x["logprobs"])


FORMULAS = {
    "cross_entropy": lambda p, x: -x["weights"] * p,
    "importance_sampling": lambda p, x: -ratio(p, x) * x["advantages"],
    "ppo": lambda p, x: -jnp.minimum(ratio(p, x) * x["advantages"], jnp.clip(ratio(p, x), 0.9, 1.05) * x["advantages"]),
    "cispo": lambda p, x: -jax.lax.stop_gradient(jnp.clip(ratio(p, x), 0, 1.1)) * p * x["advantages"],
    "dro": lambda p, x: -(p * x["advantages"] - 0.15 * (p - x["logprobs"]) ** 2),
    "gspo": lambda p, x: gspo(p, x, 0.97, 1.2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(folder):
    return Base(*hf.load(folder), 64, "float32")


def moved(adapter, dtype=np.float32):
    """The adapter's weights with B no longer 0, as after some steps."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + 0.1 * rng.normal(size=x.shape), dtype), adapter.state.params
    )


def asked(loss, data=DATA, forward_only=False):
    needs = codec.losses.loss(loss).needs + codec.losses.loss(loss).takes
    chosen = [
        (tokens, {name: x for name, x in inputs.items() if name in ("target_tokens", *needs)})
        for tokens, inputs in data
    ]
    body = calls.pass_body("m", 1, chosen, loss, OPTIONS.get(loss), forward_only)
    return codec.read_pass(body, 11, 64)


def oracle(base, spec, loss):
    """f(adapters) -> (loss, log-probabilities of each datum): one datum at a time, by the whole logits."""

    def total(adapters, params):
        joined, value, logps = lora.join(params, adapters, spec), 0.0, []
        for tokens, inputs in DATA:
            x = {name: np.asarray(np.asarray(array, np.float32), np.float64) for name, array in inputs.items()}
            logits = models.forward(joined, jnp.asarray(tokens)[None], config=base.config)[0]
            p = jax.nn.log_softmax(logits.astype(jnp.float64))[np.arange(len(tokens)), inputs["target_tokens"]]
            value += jnp.sum(FORMULAS[loss](p, x))
            logps.append(p)
        return value, logps

    return total


@pytest.mark.sweep
@pytest.mark.parametrize("loss", FORMULAS)
def test_losses_and_gradients_are_their_formulas(base, loss):
    """In float64, so that what differs is the formula: 1e-6; and in float32."""
    spec = base.spec(4)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)
        params, start = wide(base.params), base.new(spec, 0)
        adapters = moved(start, np.float64)
        (want, logps), slope = jax.jit(jax.value_and_grad(oracle(base, spec, loss), has_aux=True))(adapters, params)
        exact = Base(base.config, params, 64, None)
        one = exact.adapter(spec, adapters)
        got, of_data = exact.run(one, asked(loss))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        for a, b in zip(of_data["logprobs"], logps, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(sum(map(np.sum, of_data["elementwise_loss"])), want, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(one.gradient.params), jax.tree.leaves(slope), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(b).max()))
        want, slope = float(want), jax.tree.map(np.asarray, slope)
    narrow = base.adapter(spec, moved(base.new(spec, 0)))
    got, _ = base.run(narrow, asked(loss))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(narrow.gradient.params), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * np.abs(b).max())


def test_two_passes_are_one_over_both_and_forward_alone_adds_nothing(base):
    spec = base.spec(4)
    one, two = (base.adapter(spec, moved(base.new(spec, 0))) for _ in range(2))
    whole, of_all = base.run(one, asked("ppo"))
    alone, seen = base.run(two, asked("ppo", forward_only=True))
    assert not any(np.any(x) for x in jax.tree.leaves(two.gradient.params))
    parts = [base.run(two, asked("ppo", DATA[a:b])) for a, b in ((0, 1), (1, 3))]
    np.testing.assert_allclose(whole, sum(loss for loss, _ in parts), rtol=1e-6)
    np.testing.assert_allclose(whole, alone, rtol=1e-6)
    for name in ("logprobs", "elementwise_loss"):
        joined = [row for _, of_data in parts for row in of_data[name]]
        for a, b, c in zip(of_all[name], joined, seen[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-6)
    for a, b in zip(jax.tree.leaves(one.gradient.params), jax.tree.leaves(two.gradient.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())


def test_a_step_is_adamw_as_the_client_parametrises_it(base):
    """The formulas of arXiv:1711.05101 in float64, with hyperparameters that change; the gradient is 0 afterwards."""
    spec, hyper = base.spec(2), [(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0), (3e-3, 0.8, 0.99, 1e-8, 0.1, 0.5)]
    adapter = base.adapter(spec, moved(base.new(spec, 0)))
    w = [np.asarray(x, np.float64) for x in jax.tree.leaves(adapter.state.params)]
    m, v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
    for t, (lr, b1, b2, eps, decay, clip) in enumerate(hyper, 1):
        base.run(adapter, asked("cross_entropy"))
        g = [np.asarray(x, np.float64) for x in jax.tree.leaves(adapter.gradient.params)]
        norm = np.sqrt(sum(np.sum(x**2) for x in g))
        g = [x * min(1, clip / norm) if clip else x for x in g]
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * x**2 for a, x in zip(v, g, strict=True)]
        hat = [(a / (1 - b1**t)) / (np.sqrt(b / (1 - b2**t)) + eps) for a, b in zip(m, v, strict=True)]
        w = [x - lr * (h + decay * x) for x, h in zip(w, hat, strict=True)]
        report = base.update(adapter, optim.AdamW(lr, b1, b2, eps, decay, clip))
        np.testing.assert_allclose(report["grad_norm"], norm, rtol=1e-5)
        assert report["skipped"] == 0
        for a, b in zip(jax.tree.leaves(adapter.state.params), w, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
        assert not any(np.any(x) for x in jax.tree.leaves(adapter.gradient.params))


def test_an_adapter_of_a_lower_rank_and_fewer_matrices_is_the_same_when_padded(base):
    spec = base.spec(2, mlp=False)
    adapter = base.adapter(spec, moved(base.new(spec, 0)))
    full, more = padded(base, spec, adapter.state.params, 8)
    assert full.rank == 8 and set(full.targets) > set(spec.targets)
    tokens = jnp.asarray(DATA[1][0])[None]
    logits = lambda weights, spec: models.forward(lora.join(base.params, weights, spec), tokens, config=base.config)
    np.testing.assert_allclose(logits(more, full), logits(adapter.state.params, spec), rtol=1e-5, atol=1e-5)


def test_what_has_no_matrices_is_refused(base):
    with pytest.raises(ValueError, match="train_attn or train_mlp must be true"):
        base.spec(4, attention=False, mlp=False)
