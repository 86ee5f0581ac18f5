"""Speculative decoding: drafts change how many tokens a step gives, and not one bit of a sample."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_engine_decode import ALL, COMMON, TINY, model
from test_rollout_engine_pages import CASES, CONTEXT, PAGE, engine_of, requests, same, unused

from areax.rollout.engine import drafts
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling

WIDTH = 4
NONE = ((0, 0.0),)  # biases: they change nothing, but slots with biases take no drafts


def changed(request, **sampling):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **sampling))


def spoil(engine, seed):
    """Replaces a third of the tokens in all histories, so that drafts are accepted in part."""
    rng, histories = np.random.default_rng(seed), engine._slots._histories
    token_SL = np.asarray(histories.token_SL)
    other_SL = rng.integers(0, TINY["vocab_size"], token_SL.shape)
    token_SL = np.where(rng.random(token_SL.shape) < 1 / 3, other_SL, token_SL)
    engine._slots._histories = dataclasses.replace(histories, token_SL=jnp.asarray(token_SL))


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in ALL if case not in CASES)]
)
def test_drafts_change_no_bit(case):
    """None, one's own text and that of siblings, all of the answer and parts of it; alone, or in company with little
    memory, in another order."""
    asked = requests(case)
    with engine_of(case, 0.4, draft=WIDTH) as engine:
        counts = lambda: np.array([engine.stats()[name] for name in ("drafted", "accepted", "dispatches")])
        wanted = []
        for one in asked:
            engine.flush()
            wanted += engine.generate([changed(one, logit_bias=NONE)])
        assert list(counts()[:2]) == [0, 0]
        for i in (1, 4, 5):
            for known in ("nothing", "all", "parts"):
                engine.flush()
                if known == "parts":
                    spoil(engine, i)
                before = counts()
                [found] = engine.generate(asked[i : i + 1])
                assert same(found, wanted[i])
                drafted, accepted, dispatches = counts() - before
                if known == "all":
                    assert accepted >= 50 and dispatches <= 70 / (0.75 * WIDTH * 4) + 1
                if known == "parts":
                    assert 0 < accepted < drafted - 10
        for order in (slice(None), slice(None, None, -1)):
            assert all(map(same, engine.generate(asked[order]), wanted[order]))
        assert engine.stats()["preemptions"] > 0 and unused(engine)
