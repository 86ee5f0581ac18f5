"""Answers that are longer than several training steps, or than there is time and room for, on the embedded engine."""

import asyncio
import functools
import time

import jax.numpy as jnp
import numpy as np
import pytest
import servers
import tiny

from areax import models
from areax.adapters import hf
from areax.recipes.shared import rollouts
from areax.rollout import client, events, loop
from areax.rollout.fleet import fleet, step_metrics
from areax.rollout.fleet.push import push_weights
from areax.rollout.scheduling import executor
from areax.rollout.servers.labels import read_label
from areax.rollout.types import sampled

CONTEXT, NEW, LONG, PROMPT = 4096, 4000, 1000, [5, 6, 7]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """(folder, label, parameters) of four published versions of one model, and its config."""
    root = tmp_path_factory.mktemp("versions")
    config = hf.load(tiny.model(root / "model", max_position_embeddings=CONTEXT))[0]
    made = []
    for v in range(4):
        params = tiny.weights(models.table(config), 0.2, v)
        path = hf.write_published(root, v, config, params)
        made.append((str(path), read_label(path / "manifest.json"), params))
    return made, config


@pytest.fixture(scope="module")
def server(versions):
    with servers.embedded(versions[0][0][0], context=CONTEXT, slots=4) as remote:
        yield remote


def state(server):
    return server.ok("/server_info")["internal_states"][0]


def wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def check(versions, prompt, tokens, logp, version):
    """Each log-probability is that of the version that sampled the token, given everything before it."""
    made, config = versions
    ids = [*prompt, *tokens]
    padded = jnp.array([ids + [0] * (-len(ids) % 256)])  # few shapes to compile
    own = {
        v: np.asarray(models.forward(made[v][2], padded, config=config))[0, : len(ids)].astype(float)
        for v in set(version)
    }
    logp_VTV = {v: x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
                for v, x in own.items()}  # fmt: skip
    expected = [logp_VTV[v][len(prompt) + i - 1, tokens[i]] for i, v in enumerate(version)]
    np.testing.assert_allclose(logp, expected, atol=1e-4)


@pytest.mark.long
def test_an_answer_longer_than_several_steps_is_carried_over_their_pushes(versions, server):
    """With eta = 2 group 0 is admitted at version 0 and must be in batch 2, for which it needs tokens of all three."""
    made, ages, trained, eta = versions[0], {}, {}, 2

    async def main():
        async with client.connect([server.url]) as fleet:

            async def workflow(generate, row):
                done = await generate(PROMPT + [row["i"]], max_new_tokens=row["tokens"], ignore_eos=True)
                return sampled(PROMPT + [row["i"]], done, temperature=1.0, reward=1.0)

            def publish(v):
                return functools.partial(push_weights, fleet, made[v][0], made[v][1])

            def update(groups):
                """Ends once the answers of group 0, which alone are left, have tokens of the newest version."""
                v = len(ages)
                for samples in groups:
                    trained[samples[0].prompt] = samples
                ages[v] = {samples[0].prompt: v - samples[0].info["admitted"] for samples in groups}
                if v < 2:
                    wait(lambda: server.ok("/model_info")["weight_version"] == made[v][1])
                    wait(lambda: rollout.counts["running"] == 1 and state(server)["running"] == 2)
                    before = state(server)["tokens"]
                    wait(lambda: state(server)["tokens"] >= before + 16)
                    server.ok("/pause_generation", {"mode": "in_place"})  # until the next push, so that some are left

            rows = [{"i": i, "tokens": LONG if i == 0 else 4} for i in range(12)]
            async with executor.Executor(
                workflow, fleet.generate, executor.Prompts(rows, shuffle=False), group_size=2, groups_per_batch=2,
                eta=eta, max_concurrent=2, batches=4,
            ) as rollout:  # fmt: skip
                await loop.run(rollout.batch, update, publish, eta=eta, steps=4, admit=rollout.admit)
            assert rollout.counts["dropped"] == 0

    made = [*made, made[-1]]  # the loop publishes the last version, too
    asyncio.run(asyncio.wait_for(main(), 300))
    assert ages[2][0] == 2 and max(age for batch in ages.values() for age in batch.values()) <= eta
    assert sorted(trained) == list(range(8))
    for sample in trained[0]:
        version = sample.version[sample.mask].tolist()
        assert len(version) == LONG and sorted(version) == version and set(version) == {0, 1, 2}
        assert min(version.count(v) for v in range(3)) >= 8
        check(versions, PROMPT + [0], sample.tokens[sample.mask].tolist(), sample.logp[sample.mask], version)


class Kept:
    """A record in memory."""

    grows = True

    def __init__(self, begun=None):
        self.last = begun

    def begun(self, request):
        return self.last

    def keep(self, request, made):
        self.last = made


@pytest.mark.slow
def test_an_answer_goes_on_behind_its_recorded_tokens(versions, server, monkeypatch):
    """It was recorded while it grew, over a push; its client and its server's caches are gone."""
    monkeypatch.setattr(fleet, "EVERY", 64)
    pushed = lambda fleet, v: push_weights(fleet, *versions[0][v][:2])
    ask = dict(max_new_tokens=900, ignore_eos=True, seed=5)

    async def main():
        async with client.connect([server.url]) as one:
            await pushed(one, 1)
            going = asyncio.create_task(one.generate(PROMPT, **ask, record=(record := Kept())))
            while not record.last or len(record.last.tokens) < 200:
                await asyncio.sleep(0.001)
            await pushed(one, 2)
            while record.last.version[-1] == 1:
                await asyncio.sleep(0.001)
            going.cancel()
        async with client.connect([server.url]) as other:
            await pushed(other, 2)
            done = await other.generate(PROMPT, **ask, record=Kept(kept := record.last))
            assert other.counts["recalled"] == len(kept.tokens) - 1 and len(done.tokens) == 900
        return kept, done

    kept, done = asyncio.run(asyncio.wait_for(main(), 120))
    end = len(kept.tokens) - 1
    assert [x[:end] for x in (done.tokens, done.logp, done.version)] == [x[:end] for x in kept[:3]]
    assert {*kept.version} == {1, 2} and 300 < end < 900 and done.version[end:] == [2] * (900 - end)
    check(versions, PROMPT, done.tokens, done.logp, done.version)


@pytest.mark.slow
def test_generation_ends_in_time_with_what_there_is(versions, server):
    path, label, _ = versions[0][1]

    async def main():
        async with client.connect([server.url]) as fleet:
            figures = step_metrics.Figures(fleet, dict)
            await push_weights(fleet, path, label)
            clock = asyncio.get_running_loop().time

            async def workflow(generate, row):
                turns = [await generate(PROMPT, max_new_tokens=row["tokens"], ignore_eos=True)]
                with pytest.raises(ValueError, match="episode-timeout-s 0.4 are over"):
                    await generate(PROMPT, max_new_tokens=1)
                return turns

            def hold():
                before = state(server)["tokens"]
                wait(lambda: state(server)["tokens"] > before)
                server.ok("/pause_generation", {"mode": "in_place"})  # so that it cannot end by itself

            with events.watching(figures.see):
                begun, held = clock(), asyncio.create_task(asyncio.to_thread(hold))
                [done] = await rollouts.timed(workflow, 0.4, fleet.generate, {"tokens": NEW})
                await held
                assert done.finish == "length" and 1 <= len(done.tokens) < NEW and clock() - begun >= 0.4
                check(versions, PROMPT, done.tokens, done.logp, done.version)
                assert set(done.version) == {1} and fleet.counts["out_of_time"] == 1
                # One that only waited has a token nevertheless, once it may have one.
                aborted = state(server)["aborted"]
                late = asyncio.create_task(fleet.generate(PROMPT, max_new_tokens=9, until=clock() + 0.1))
                await asyncio.to_thread(wait, lambda: state(server)["aborted"] > aborted)
                server.ok("/continue_generation", {})
                done = await late
                assert len(done.tokens) == 1 and done.finish == "length"
                full = await fleet.generate(PROMPT, max_new_tokens=3, ignore_eos=True, until=clock() + 600)
                assert len(full.tokens) == 3 and fleet.counts["out_of_time"] == 2
            assert figures.step({"step_s": 0.0})["out_of_time"] == 2

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.slow
def test_generation_ends_where_a_sample_is_full(server):
    async def main():
        async with client.connect([server.url], longest=12) as fleet:
            assert fleet.context == CONTEXT
            done = await fleet.generate(PROMPT, max_new_tokens=64, min_new_tokens=32, ignore_eos=True)
            assert len(done.tokens) == 9 and done.finish == "length"
            assert len((await fleet.generate(PROMPT, max_new_tokens=4, ignore_eos=True)).tokens) == 4
            with pytest.raises(ValueError, match="leave room for a completion within 12 tokens, got 12"):
                await fleet.generate(PROMPT * 4, max_new_tokens=1)
            fleet.servers[0].context = 10  # a server that takes less
            assert len((await fleet.generate(PROMPT, max_new_tokens=64, ignore_eos=True)).tokens) == 7
        async with client.connect([server.url]) as fleet:
            with pytest.raises(ValueError, match="together longer than the model's context length"):
                await fleet.generate([5] * (CONTEXT - 3), max_new_tokens=64)

    asyncio.run(asyncio.wait_for(main(), 120))
