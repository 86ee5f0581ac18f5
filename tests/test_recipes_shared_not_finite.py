"""A number that is not finite is traced to where it was first: quantity, sample and token, or weights or gradient."""

import dataclasses
import re
from dataclasses import replace

import jax.numpy as jnp
import job_program
import numpy as np
import pytest
import tiny

from areax import models
from areax.adapters import tokenizer
from areax.adapters.command_line.options import replaced
from areax.core import losses
from areax.recipes import grpo
from areax.recipes.shared import trainer

GROUP, SAMPLE, TOKEN = 2, 9, 4  # where numbers are planted; the prompt has 3 tokens
MARK = -7.25  # the behaviour log-probability there: a way for a loss to know the token


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("not finite")
    tiny.model(path / "model")
    return path


def groups():
    """Those of `job_program`, with a token that is known by its log-probability, and a row with an id."""
    made = job_program.groups(0)
    [sample] = [s for group in made for s in group if s.sample == SAMPLE]
    assert len(sample.tokens) > TOKEN + 1
    logp = sample.logp.copy()
    logp[TOKEN] = MARK
    marked = sample.replace(logp=logp, info={"row": {"id": "nine"}})
    return [[marked if s.sample == SAMPLE else s for s in group] for group in made]


def built(place, **changes):
    config = replaced(
        grpo.Config(str(place / "model"), data="", reward=""), groups=4, group_size=4, length=32, rows=4,
        optim=job_program.PLAIN, **{"objective": losses.GRPO(advantage={"std": "none"}), **changes},
    )  # fmt: skip
    return grpo.build_trainer(config)


def traced(place, state, made=None):
    """(what the trainer says of a step, its metrics)."""
    report = trainer.train_on_batch(state, made or groups())
    origin = report.pop("not_finite", None)
    return origin and origin[0].said(origin[1], tokenizer.load(place / "model")), report


def at_mark(batch, x_BT, value=jnp.nan):
    return jnp.where(batch.logp_BT == MARK, value, x_BT)


WHERE = f"prompt {GROUP}, group {GROUP}, sample {SAMPLE}, id 'nine', which begins "


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
    made = [[s.replace(logp=np.where(s.logp == MARK, -np.inf, s.logp)) for s in group] for group in groups()]
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
    many = [[s.replace(rewards=((TOKEN, np.inf),)) if s.sample == SAMPLE else s for s in g] for g in groups()]
    names_the_token(traced(place, critical, many)[0], "the reward", "inf")
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


def steep(spec, now):
    """The score function, with a slope of 0 / 0 at one token."""
    return now.logp_BT * now.adv_BT + jnp.sqrt(jnp.where(now.sampler_BT == MARK, (0 * now.gap_BT) ** 2, 1.0)), None


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gradient_alone(place, minibatches):
    """Of two minibatches the second has it: group 2 of 4. The head's slope is not finite either: it is the loss's."""
    state = built(place, objective=losses.GRPO(advantage={"std": "none"}, surrogate=steep), minibatches=minibatches)
    said, report = traced(place, state)
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
