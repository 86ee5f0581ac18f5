"""A number that is not finite is traced to where it was first: quantity, sample and token, or weights or gradient."""

import dataclasses
import re
from dataclasses import replace

import jax.numpy as jnp
import job_program
import numpy as np
import pytest
import tiny
from job_program import MARK, MARKED, TOKEN

from areax import models
from areax.adapters import tokenizer
from areax.adapters.command_line.options import replaced
from areax.core import losses
from areax.recipes import grpo
from areax.recipes.shared import trainer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("not finite")
    tiny.model(path / "model")
    return path


def built(place, **changes):
    config = replaced(
        grpo.Config(str(place / "model"), data="", reward=""), groups=4, group_size=4, length=32, rows=4,
        optim=job_program.PLAIN, **{"objective": losses.GRPO(advantage={"std": "none"}), **changes},
    )  # fmt: skip
    return grpo.build_trainer(config)


def traced(place, state, made=None):
    """(what the trainer says of a step, its metrics)."""
    report = trainer.train_on_batch(state, made or job_program.marked())
    origin = report.pop("not_finite", None)
    return origin and origin[0].said(origin[1], tokenizer.load(place / "model")), report


def at_mark(batch, x_BT, value=jnp.nan):
    return jnp.where(batch.logp_BT == MARK, value, x_BT)


WHERE = f"prompt 2, group 2, sample {MARKED}, id 'nine', which begins "


def names_the_token(said, what, value="nan"):
    start = f"not finite first: {what}, {value}, of token {TOKEN} (id "
    assert said.startswith(start) and WHERE in said and said.endswith("(1 tokens of 1 samples)"), said


@pytest.fixture(scope="module")
def critical(place):
    """A trainer with a critic and a reference, and no number that is not finite."""
    state = built(place, objective=losses.PPO(kl={"coef": 0.1}), critic=trainer.CriticOptions(optim=job_program.GENTLE))
    assert traced(place, state)[0] is None and not state.traced
    return state


@pytest.mark.slow
def test_a_behaviour_log_probability(place, critical):
    made = job_program.marked(-np.inf)
    said, report = traced(place, critical, made)
    names_the_token(said, "the sampler's log-probability", "-inf")
    assert report["unusable_fraction"] > 0 == report["skipped"]
    assert critical.traced and traced(place, critical, made)[0] is None  # once
    critical.traced = False


@pytest.mark.slow
def test_a_number_of_a_reference_or_a_critic(place, critical):
    for name, field, what in (
        ("reference", "logp_BT", "the reference's log-probability"), ("critic", "value_BT", "the critic's value"),
    ):  # fmt: skip
        model = getattr(critical, name)

        def scores(params, batch, *frozen, field=field, whole=model.scores):
            out = whole(params, batch, *frozen)
            return replace(out, **{field: at_mark(batch, getattr(out, field))})

        setattr(critical, name, replace(model, scores=scores))
        names_the_token(traced(place, critical)[0], what)
        setattr(critical, name, replace(getattr(critical, name), scores=model.scores))
        critical.traced = False


@pytest.mark.slow
def test_an_advantage_or_a_weight_or_a_reward(place, critical):
    plain = critical.policy.prepare
    weight = "the weight in the loss, with the importance weight"
    for field, what in (("adv_BT", "the advantage"), ("weight_BT", weight)):
        critical.policy.prepare = lambda batch, scores, field=field: (
            lambda made: made.replace(**{field: at_mark(batch, getattr(made, field), jnp.inf)})
        )(plain(batch, scores))
        said, report = traced(place, critical)
        names_the_token(said, what, "inf")
        assert report["skipped"] == 1
        critical.traced, critical.policy.prepare = False, plain
    reward = ((TOKEN, 3e38),)
    made = [[s.replace(rewards=reward) if s.sample == MARKED else s for s in g] for g in job_program.marked()]
    names_the_token(traced(place, critical, made)[0], "the reward", "3e+38")  # squares overflow
    critical.traced = False


@pytest.mark.slow
def test_a_log_probability_of_the_model(place, monkeypatch):
    plain = models.score

    def score(params, batch, **how):
        out = plain(params, batch, **how)
        return replace(out, logp_BT=at_mark(batch, out.logp_BT))

    monkeypatch.setattr(models, "score", score)
    state = built(place)
    names_the_token(traced(place, state)[0], "the model's log-probability")


@pytest.mark.slow
def test_a_gradient_alone(place):
    """Of two minibatches the second has it: group 2 of 4. The head's slope is not finite either: it is the loss's."""
    objective = losses.GRPO(advantage={"std": "none"}, surrogate=job_program.steep)
    said, report = traced(place, built(place, objective=objective, minibatches=2))
    assert report["skipped"] > 0 and np.isfinite(report["loss"])
    assert said.startswith("not finite first: the gradient of the model of " + WHERE), said
    assert re.search(r"\(model\.norm\.weight and \d+ others\)$", said), said


@pytest.mark.slow
def test_weights(place):
    state = built(place)
    stacks = state.policy.state.params["stacks"]
    [name] = [name for name in stacks[0] if name == "o"]
    broken = [{**stacks[0], name: stacks[0][name].at[1, 0, 0].set(jnp.nan)}]
    params = {**state.policy.state.params, "stacks": broken}
    state.policy.state = dataclasses.replace(state.policy.state, params=params)
    said, _ = traced(place, state)
    assert said == "not finite first: weights of the model (model.layers.1.self_attn.o_proj.weight)"
