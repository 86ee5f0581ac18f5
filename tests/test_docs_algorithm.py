"""docs/add-an-algorithm.md, with its blocks put where it says: the algorithm equals the paper's oracle."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import test_core_losses as plain
import test_core_policy as policies
import torch

from areax.adapters import cli
from areax.core import losses, packing, surrogates
from areax.recipes import grpo

GUIDE = (Path(__file__).parents[1] / "docs" / "add-an-algorithm.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
wide = policies.wide


@pytest.fixture
def topr(monkeypatch):
    function, entry, preset, place, oracle, _ = BLOCKS
    for table, name in ((surrogates.SURROGATES, "topr"), (losses.POLICIES, "TOPR")):
        monkeypatch.setitem(table, name, None)  # removes the name again at the end
    exec(function + entry, dict(vars(surrogates)))
    exec(preset + place, dict(vars(losses)))
    exec(oracle, paper := {"torch": torch})
    others = oracles.gain
    choose = lambda x, r, A, old, o: paper["topr"](r, x, A) if o.surrogate == "topr" else others(x, r, A, old, o)
    monkeypatch.setattr(oracles, "gain", choose)
    return losses.POLICIES["TOPR"]


@pytest.mark.slow
def test_the_algorithm_of_the_guide_equals_the_paper(topr, monkeypatch):
    monkeypatch.setitem(policies.EVERY, "TOPR", topr())
    monkeypatch.setitem(policies.PRESETS, "TOPR", topr())
    case = policies.Case(policies.samples())
    policies.test_value_and_gradient_match_the_papers("TOPR", case)
    policies.test_at_ratio_1_every_gradient_equals_reinforce("TOPR", case)
    policies.test_non_finite_inputs_are_masked_and_counted("TOPR", "behaviour", case)
    assert "gain = A log pi, times stop(min(r, 1)) if A < 0" in str(topr())
    assert "not as in the paper: the ratio is the token's" in str(topr())


def test_the_command_line_knows_the_algorithm(topr, monkeypatch):
    seen = []
    monkeypatch.setattr(grpo, "main", seen.append)
    assert cli.main(["train", "topr", "--model", "m", "--data", "d", "--reward", "r"]) == 0
    assert seen[0].training.objective == topr()


def test_an_option_that_the_entry_does_not_name_is_refused(topr):
    assert topr(ratio="sequence").ratio == "sequence"
    with pytest.raises(ValueError, match="TOPR: the surrogate topr does not use clip_low, got 0.1"):
        topr(clip_low=0.1)


@pytest.mark.slow
def test_the_function_is_used_without_an_entry(topr):
    case = policies.Case(policies.samples())
    exec(BLOCKS[0], space := dict(vars(surrogates)))
    named, own = (losses.GRPO(surrogate=surrogate) for surrogate in ("topr", space["topr"]))
    np.testing.assert_array_equal(case.gradient(own)[1][0], case.gradient(named)[1][0])
    assert "gain = A log pi, for A < 0 times" in str(own)


def test_the_function_of_log_probabilities_is_a_loss():
    exec(BLOCKS[5], space := {"jnp": jnp, "losses": losses})
    batch = packing.pack(plain.samples(), 32)
    scores = plain.scores_like(batch)
    scores.logp_BT -= 2
    loss, _ = space["objective"].loss(scores, space["objective"].prepare(batch))
    assert np.isfinite(loss) and loss > 0
    assert "f = -log(1 - pi)" in str(space["objective"])


def test_the_guide_takes_under_forty_lines():
    assert sum(block.count("\n") for block in BLOCKS) < 40
