"""Sampling masks end to end: a server's answer, the client, samples, the journal, a batch and the trainer's scores."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest
import servers
import tiny

from areax import models
from areax.adapters import hf
from areax.core import losses, packing
from areax.rollout import client as clients
from areax.rollout.chat.trajectory import Interaction, samples
from areax.rollout.journal import codec
from areax.rollout.scheduling import executor
from areax.rollout.scheduling.validation import checked
from areax.rollout.types import Sampling, sampled

V, NEW, TEMPERATURE = 300, 24, 0.8
SAMPLING = Sampling(temperature=TEMPERATURE, max_new_tokens=NEW, top_p=0.9, top_k=64, sampling_mask=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tiny.model(tmp_path_factory.mktemp("masks"), vocab_size=V, initializer_range=0.4)
    with servers.embedded(path, slots=8, context=64, draft=3) as remote:
        remote.path = path
        yield remote


def completions(server, count=16, sampling=SAMPLING):
    """Completions of the prompt [1, 2, 3]."""

    async def main():
        async with clients.connect([server.url], vocabulary=V) as fleet:
            ask = functools.partial(executor._undistorted, fleet.generate, [1, 2, 3], **sampling.arguments())
            return await asyncio.gather(*(ask(ignore_eos=True, seed=i) for i in range(count)))

    return asyncio.run(main())


def by_full_logits(config, params, sample):
    """Log-probabilities of the tokens over their masks, and over all tokens, in float64 from the model's logits."""
    logits = models.forward(params, np.asarray(sample.tokens)[None], config=config)[0]
    scaled = np.asarray(logits, np.float64)[:-1] / TEMPERATURE
    target, mask = sample.tokens[1:], sample.arrays["sampling_mask"][1][1:]
    picked = scaled[np.arange(len(target)), target]
    lse = lambda rows: np.array([np.log(np.exp(x - x.max()).sum()) + x.max() for x in rows])
    return picked - lse([x[ids[ids >= 0]] if (ids >= 0).any() else x for x, ids in zip(scaled, mask, strict=True)]), (
        picked - lse(scaled)
    )


@pytest.mark.slow
def test_the_ratio_at_the_samplers_own_weights_is_one(server):
    """Its mean to 1e-6, each to 1e-5: engine and trainer compute logits of size 10 in float32, of which a unit in the
    last place is 1e-6, by programs that add in another order. Without the mask the trainer's distribution is another
    one, in which all tokens have the less probable by what the sampler left out, a tenth or more."""
    config, params = hf.load(server.path)
    made = [sampled([1, 2, 3], done, temperature=TEMPERATURE, reward=0.0) for done in completions(server)]
    made = [checked(one, vocabulary=V) for one in codec.unpacked(codec.packed(made, exact=True), {}.__getitem__)]
    kept = np.concatenate([s.arrays["sampling_mask"][1][s.mask] for s in made])
    count = (kept >= 0).sum(1)
    assert count.min() < 5 and count.max() > 40 and len(count) == 16 * NEW  # peaked and flat
    for pack in (packing.pack, packing.pack_tries):
        batch = jax.tree.map(lambda x: x[0], pack(made, 64, rows=8))
        score = jax.jit(lambda params, batch: models.score(params, batch, config=config, temperature=TEMPERATURE))
        out, learnt = score(params, batch), np.asarray(batch.mask_BT)
        gap = np.asarray(out.logp_BT - batch.logp_BT)[learnt]
        assert len(gap) == 16 * NEW and np.abs(gap).max() < 1e-5 and abs(gap.mean()) < 1e-6
        objective = losses.GRPO(correction={"proximal": "behaviour"})
        _, report = objective.loss(out, objective.prepare(batch))
        mean = float(report["ratio"].sum / report["ratio"].count)
        assert (
            abs(mean - 1) < 1e-6 and float(report["ratio"].max) < 1 + 1e-5 and float(report["clip_fraction"].sum) == 0
        )
        plain = score(params, batch.replace(target={}))
        bias = np.asarray(plain.logp_BT - batch.logp_BT)[learnt]
        assert bias.mean() < -0.1 and bias.max() < np.log(0.9) + 0.05
        assert (np.asarray(out.entropy_BT) <= np.asarray(plain.entropy_BT) + 1e-5)[learnt].all()
    for one in made:
        masked, full = by_full_logits(config, params, one)
        np.testing.assert_allclose(one.logp[1:][one.mask[1:]], masked[one.mask[1:]], atol=1e-5)
        assert (masked >= full - 1e-12).all()


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{"top_p": 1.0, "top_k": 5}, {"top_p": 1.0, "min_p": 0.1}], ids=str)
def test_the_mask_is_of_all_filters(server, filters):
    for done in completions(server, 4, dataclasses.replace(SAMPLING, **filters)):
        count = (done.sampling_mask >= 0).sum(1)
        assert (count == 5).all() if "top_k" in filters else 1 <= count.min() < count.max() < 64


@pytest.mark.slow
def test_an_answer_continues_over_pauses_and_turns_have_their_own_masks(server):
    async def main():
        async with clients.connect([server.url], vocabulary=V) as fleet:
            seen = asyncio.Event()
            ask = fleet.generate(
                [1, 2, 3], **{**SAMPLING.arguments(), "max_new_tokens": 50}, ignore_eos=True,
                on_tokens=lambda tokens: seen.set(),
            )  # fmt: skip
            going = asyncio.create_task(ask)
            await seen.wait()
            await asyncio.to_thread(server.ok, "/pause_generation", {"mode": "abort"})
            await asyncio.to_thread(server.ok, "/continue_generation", {})
            return await going

    done = asyncio.run(main())
    assert done.sampling_mask.shape == (50, 64)
    assert (done.sampling_mask == np.array(done.tokens)[:, None]).any(1).all()
    [short] = completions(server, 1, dataclasses.replace(SAMPLING, max_new_tokens=5))
    first = Interaction(prompt=(1, 2, 3), temperature=TEMPERATURE, completion=short)
    prompt = (*first.tokens, 4, 5)
    second = Interaction(prompt=prompt, temperature=TEMPERATURE, completion=done, parent=first, extends=True)
    [row] = samples([first, second])
    kind, mask = row.arrays["sampling_mask"]
    assert kind == "target" and len(mask) == len(row.tokens)
    np.testing.assert_array_equal(mask[3:8], short.sampling_mask)
    np.testing.assert_array_equal(mask[10:], done.sampling_mask)
    assert (mask[[0, 1, 2, 8, 9]] == -1).all()
    checked(row, vocabulary=V)


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(server):
    one = {"input_ids": [1, 2], "return_sampling_mask": True}
    for params, words in (
        ({"top_p": 0.9}, "return_sampling_mask needs a top_k from 1 to 1024, the most tokens of a mask, got -1"),
        ({"top_k": 1025}, "got 1025"),
        ({"top_k": 5, "temperature": 0}, "return_sampling_mask needs a temperature above 0"),
    ):
        status, answer = server.post("/generate", one | {"sampling_params": params})
        assert status == 400 and words in str(answer), answer
    plain = server.ok("/generate", {"input_ids": [1, 2], "sampling_params": {"top_k": 5, "max_new_tokens": 2}})
    assert "output_token_sampling_mask" not in plain["meta_info"]
    with pytest.raises(ValueError, match="got top_p=0.9; set it to 1.0, or sampling_mask to True"):
        completions(server, 1, dataclasses.replace(SAMPLING, sampling_mask=False))
    with pytest.raises(ValueError, match="training needs samples .* got min_new_tokens=2; set it to 0$"):
        completions(server, 1, dataclasses.replace(SAMPLING, min_new_tokens=2))
    with pytest.raises(ValueError, match="top_k must be at least 1 with sampling_mask"):
        Sampling(top_p=0.9, sampling_mask=True)
    [done] = completions(server, 1)
    good = sampled([1, 2, 3], done, temperature=1.0)
    for wrong in (np.full_like(done.sampling_mask, V), np.where(np.arange(64) < 1, done.sampling_mask * 0 + 299, -1)):
        bad = dataclasses.replace(done, sampling_mask=wrong)
        with pytest.raises(ValueError, match=r"arrays\['sampling_mask'\] must (lie in|have each token)"):
            checked(sampled([1, 2, 3], bad, temperature=1.0), vocabulary=V)
    checked(good, vocabulary=V)
