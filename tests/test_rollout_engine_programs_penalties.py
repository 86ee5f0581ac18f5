"""Penalties and biases, against their formulas in float64, and in the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from areax import models
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import penalties, sampling
from areax.rollout.engine.request import Request, Sampling

CONFIG = models.config_from_hf({**tiny.HF, "vocab_size": 90, "eos_token_id": 7})
WEIGHTS = tiny.weights(models.table(CONFIG), 0.16, 0)
PROMPT, MORE = (11, 30, 30, 9, 25), 24
forward = jax.jit(functools.partial(models.forward, config=CONFIG))


@pytest.fixture(scope="module")
def engine():
    with Engine(CONFIG, WEIGHTS, slots=4, context=64, steps=4) as engine:
        yield engine


def ask(rid, more=MORE, **sampling):
    return Request(rid, PROMPT, Sampling(**{"max_new_tokens": more, "ignore_eos": True, "seed": 3, **sampling}))


def expected(logits_V, tokens, frequency=0.0, presence=0.0, repetition=1.0, biases=()):
    """Token by token, in float64, as OpenAI's reference (frequency, presence, bias) and CTRL (repetition) have it."""
    x_V = np.asarray(logits_V, np.float64).copy()
    for token in {*tokens}:
        x_V[token] -= frequency * tokens.count(token) + presence
        x_V[token] *= repetition if x_V[token] < 0 else 1 / repetition
    for token, bias in biases:
        x_V[token] += bias
    return x_V


def test_the_formulas():
    rng = np.random.default_rng(0)
    S, V = 7, 40
    logits_SV = rng.normal(size=(S, V)).astype(np.float32) * 3
    histories = [rng.integers(0, V, n).tolist() for n in (0, 1, 5, 16, 17, 40, 30)]
    biases = [[(int(id), float(rng.normal() * 9)) for id in rng.permutation(V)[: i * 3]] for i in range(S)]
    frequency_S, presence_S = rng.uniform(-2, 2, (2, S)).astype(np.float32)
    repetition_S = rng.uniform(0.3, 2, S).astype(np.float32)
    used_S = np.arange(S) != 6
    tables = penalties.empty(S, V)
    for slot, (tokens, bias) in enumerate(zip(histories, biases, strict=True)):
        tables = penalties.rewritten(tables, slot, [3, 3, 3], [(1, 5.0)])  # an earlier request of the slot
        tables = penalties.rewritten(tables, slot, tokens, bias)
    token_S, where_S = rng.integers(0, V, S), np.arange(S) % 3 > 0
    tables = jax.jit(penalties.counted)(tables, jnp.asarray(token_S), jnp.asarray(where_S))
    given = penalties.Penalties(*map(jnp.asarray, (used_S, frequency_S, presence_S, repetition_S)))
    made_SV = np.asarray(jax.jit(penalties.penalised)(jnp.asarray(logits_SV), tables, given))
    for s in range(S):
        tokens = histories[s] + [int(token_S[s])] * bool(where_S[s])
        options = float(frequency_S[s]), float(presence_S[s]), float(repetition_S[s])
        if used_S[s]:
            np.testing.assert_allclose(made_SV[s], expected(logits_SV[s], tokens, *options, biases[s]), 1e-5, 1e-5)
        else:
            np.testing.assert_array_equal(made_SV[s], logits_SV[s])


def test_counts_end_at_their_type():
    tables = penalties.rewritten(penalties.empty(1, 4), 0, [2] * (penalties.MOST - 1), [])
    for _ in range(3):
        tables = jax.jit(penalties.counted)(tables, jnp.array([2]), jnp.array([True]))
    assert tables.count_SV.tolist() == [[0, 0, penalties.MOST, 0]]


CASES = {
    "frequency": dict(frequency_penalty=0.4),
    "presence": dict(presence_penalty=1.5),
    "repetition": dict(repetition_penalty=1.4),
    "reward": dict(frequency_penalty=-0.3, repetition_penalty=0.8),
    "bias": dict(logit_bias=((20, 4.0), (21, -100.0))),
    "all": dict(frequency_penalty=0.2, presence_penalty=0.3, repetition_penalty=1.2, logit_bias=((30, 2.5),)),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_decoding_follows_the_formulas(engine, name, temperature):
    """Tokens are those that the formulas give, of logits by the trainer's forward pass, and the same noise."""
    options = CASES[name]
    one, plain = engine.generate(
        [ask("one", temperature=temperature, **options), ask("plain", temperature=temperature)]
    )
    logits_TV = np.asarray(forward(WEIGHTS, jnp.asarray([[*PROMPT, *one.tokens]]))[0], np.float64)
    short = {key.partition("_")[0]: value for key, value in options.items() if key != "logit_bias"}
    noise_TV = np.zeros((MORE, CONFIG.vocab))
    if temperature:
        index_T = jnp.arange(len(PROMPT), len(PROMPT) + MORE)
        seed_T2 = jnp.tile(jnp.array([[0, 3]], jnp.uint32), (MORE, 1))
        noise_TV = np.asarray(sampling.noise(seed_T2, index_T, CONFIG.vocab))
    for i, token in enumerate(one.tokens):
        logits_V = logits_TV[len(PROMPT) + i - 1]
        x_V = expected(logits_V, one.tokens[:i], **short, biases=options.get("logit_bias", ()))
        x_V = x_V / (temperature or 1) + noise_TV[i]
        assert x_V[token] >= x_V.max() - 1e-4
        scaled_V = logits_V / (temperature or 1)  # the log-probabilities are those of the whole
        assert one.logp[i] == pytest.approx(scaled_V[token] - np.logaddexp.reduce(scaled_V), abs=2e-5)
    assert one.tokens != plain.tokens and ask("one", **options).sampling.constrained


@pytest.mark.slow
def test_neighbours_keep_their_bits_and_slots_their_counts(engine):
    free = [ask(f"free {i}", seed=i, temperature=(1.0, 0.0)[i % 2]) for i in range(6)]
    held = [ask(f"held {i}", seed=i, **CASES["all"]) for i in range(6)]
    alone = [engine.generate([one])[0] for one in free + held]
    together = engine.generate([one for pair in zip(free, held, strict=True) for one in pair])
    assert together == [one for pair in zip(alone[:6], alone[6:], strict=True) for one in pair]


def retracted_twice(engine, request, reports):
    """The end of a request that is requeued after these of its reports."""
    seen, done = [], []

    def tell(progress):
        seen.append(progress)
        if len(seen) in reports:
            engine._post(engine._retract)  # between two dispatches
        if progress.finish:
            done.append(progress)

    engine.submit(request, tell)
    while not done:
        engine.set_version(engine.version)  # waits for the engine's thread
    return done[0]


@pytest.mark.slow
def test_counts_survive_a_retraction(engine):
    request = ask("r", more=50, temperature=0.0, frequency_penalty=1.0)
    (whole,) = engine.generate([request])
    done = retracted_twice(engine, request, (2, 5))
    assert done.retractions == 2 and done.tokens == whole.tokens
    free = engine.generate([ask("free", more=50, temperature=0.0)])[0].tokens
    assert max(map(whole.tokens.count, whole.tokens)) < max(map(free.count, free))


WRONG = {
    "frequency_penalty": (-2.1, "[-2, 2]"),
    "presence_penalty": (2.1, "[-2, 2]"),
    "repetition_penalty": (0.0, "(0, 2]"),
    "logit_bias": (((CONFIG.vocab, 1.0),), "the model's vocabulary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_out_of_range_are_refused(engine, name):
    value, words = WRONG[name]
    with pytest.raises(ValueError, match=name) as refused:
        engine.generate([ask("a", **{name: value})])
    assert words in str(refused.value)
