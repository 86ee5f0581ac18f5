"""What training needs of a generation server, by the client, of each kind that there is."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from areax.adapters.command_line.options import replaced
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet import fleet as fleets
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.sglang import SGLang
from areax.rollout.servers.vllm import VLLM
from areax.rollout.types import Sampling

pytestmark = pytest.mark.long


def run(server, work, **options):
    async def main():
        async with client.connect([server.url], vocabulary=288, **options) as fleet:
            return await work(fleet)

    return asyncio.run(main())


def pushed(fleet, versions, v):
    return push_weights(fleet, versions.paths[v], versions.labels[v], probe=versions.probe(v))


def test_it_is_found_and_described(server):
    async def work(fleet):
        [own] = fleet.servers
        assert isinstance(own.api, VLLM if server.kind == "vllm" else SGLang)
        assert (own.slots, own.ranks, own.seeded) == (16, 1, server.kind == "areax") and 4000 < own.context <= 4096

    run(server, work)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probabilities_are_those_of_the_scaled_distribution(server, versions, temperature):
    async def work(fleet):
        report = await pushed(fleet, versions, 0)
        return report, await fleet.generate(
            versions.prompt, max_new_tokens=24, temperature=temperature, ignore_eos=True
        )

    report, done = run(server, work)
    logp_TV = versions.logp(0, versions.prompt + done.tokens, temperature)
    theirs = [logp_TV[len(versions.prompt) - 1 + i, token] for i, token in enumerate(done.tokens)]
    np.testing.assert_allclose(done.logp, theirs, atol=2e-5)
    assert done.version == [0] * 24 and done.finish == "length" and report.probe_diff < 1e-5


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_p": 0.7, "min_p": 0.02}, {"min_p": 0.05}, {}], ids=str)
def test_sampling_masks_are_the_tokens_that_the_filters_keep(server, versions, filters):
    """By the model's own probabilities in float64, but for a token at the very edge; log-probabilities are over them.
    SGLang's top-p counts the mass of all tokens, that of areax serve what top-k leaves."""
    if server.kind == "vllm":
        pytest.skip("its masks are not read yet")

    async def work(fleet):
        await pushed(fleet, versions, 0)
        how = {"temperature": 0.8, "top_k": 60, "sampling_mask": True, "max_new_tokens": 40, "ignore_eos": True}
        return await fleet.generate(versions.prompt, **how, **filters)

    done = run(server, work)
    logp_TV = versions.logp(0, versions.prompt + done.tokens, 0.8)[len(versions.prompt) - 1 : -1].astype(np.float64)
    assert done.sampling_mask.shape == (40, 60)
    for row, token, own, theirs in zip(done.sampling_mask, done.tokens, done.logp, logp_TV, strict=True):
        kept, order = row[row >= 0], np.argsort(-theirs)
        p = np.exp(theirs[order][:60])
        p /= 1 if server.kind == "sglang" else p.sum()
        before = np.cumsum(p) - p  # of likelier tokens
        wanted = {*order[:60][(before < filters.get("top_p", 1)) & (p >= filters.get("min_p", 0) * p[0])].tolist()}
        assert len(wanted ^ {*kept.tolist()}) <= 1 and token in kept and (np.diff(kept) > 0).all()
        np.testing.assert_allclose(own, theirs[token] - np.log(np.exp(theirs[kept]).sum()), atol=2e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_completion_goes_on_over_a_push_with_the_version_of_each_token(server, versions, mode, streamed):
    length = {"areax": 3000, "vllm": 2500, "sglang": 700}[server.kind]  # tokens that take more than a moment

    probe = versions.probe(1)  # not within the loop, which it would hold up until the completion has ended

    async def work(fleet):
        for pause in (0.7, 0.3, 0.1, 0.05, 0.02):  # until a push meets the completion in the middle
            await pushed(fleet, versions, 0)
            seen = []
            how = {"on_tokens": seen.append} if streamed else {}
            going = asyncio.create_task(fleet.generate(versions.prompt, max_new_tokens=length, ignore_eos=True, **how))
            await asyncio.sleep(pause)
            await push_weights(fleet, versions.paths[1], versions.labels[1], mode=mode, probe=probe)
            done = await going
            assert not streamed or seen[-1] == done.tokens
            if 1 in done.version:
                break
        return done

    done = run(server, work)
    assert len(done.tokens) == length and done.version == sorted(done.version) and {*done.version} == {0, 1}
    assert done.info["resumed"] == (server.kind == "vllm" and mode == "retract")  # the others requeue it themselves
    start = done.version.index(1)
    for v, part in ((0, range(start)), (1, range(start, length))) if mode == "retract" else ((0, range(start)),):
        logp_TV = versions.logp(v, versions.prompt + done.tokens)
        theirs = [logp_TV[len(versions.prompt) - 1 + i, done.tokens[i]] for i in part]
        np.testing.assert_allclose([done.logp[i] for i in part], theirs, atol=2e-4)


class Kept:
    """A record in memory."""

    grows = True

    def __init__(self, last=None):
        self.last, self.sizes = last, []

    def begun(self, request):
        return self.last

    def keep(self, request, made):
        self.last = made
        self.sizes.append(len(made.tokens))


def test_a_long_answer_is_recorded_while_it_grows_and_goes_on_behind_its_tokens(server, versions, monkeypatch):
    monkeypatch.setattr(fleets, "EVERY", 32)

    async def work(fleet):
        await pushed(fleet, versions, 0)
        ask = dict(max_new_tokens=200, ignore_eos=True)
        await fleet.generate(versions.prompt, **ask, record=(record := Kept()))
        begun = record.last.between(0, 120)
        return record.sizes, begun, await fleet.generate(versions.prompt, **ask, record=Kept(begun))

    sizes, begun, done = run(server, work)
    assert sizes[-1] == 200 and (server.kind == "vllm" or 4 <= len(sizes) <= 8)  # whose events say no version
    assert len(done.tokens) == 200 and done.tokens[:119] == begun.tokens[:119] and {*done.version} == {0}
    logp_TV = versions.logp(0, versions.prompt + done.tokens)
    theirs = [logp_TV[len(versions.prompt) - 1 + i, token] for i, token in enumerate(done.tokens)]
    np.testing.assert_allclose(done.logp, theirs, atol=2e-4)


def test_a_prompt_is_read_with_its_likeliest_tokens(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 1)
        return await fleet.read(versions.prompt, top_k=3)

    _, part = run(server, work)
    logp_TV = versions.logp(1, versions.prompt)
    assert part.inputs[0][0] is None and [row[1] for row in part.inputs] == versions.prompt
    np.testing.assert_allclose(
        [row[0] for row in part.inputs[1:]], [logp_TV[t, id] for t, id in enumerate(versions.prompt[1:])], atol=2e-5
    )
    for t, row in enumerate(part.input_top[1:]):
        assert [one[1] for one in row] == np.argsort(-logp_TV[t])[:3].tolist()


def test_stops_and_grammars(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 0)
        first = await fleet.generate(versions.prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        stop = first.tokens[3]
        ended = await fleet.generate(
            versions.prompt, max_new_tokens=8, temperature=0.0, stop_token_ids=[stop], ignore_eos=False
        )
        said = await fleet.generate(versions.prompt, max_new_tokens=8, regex="ab{2}c")
        with pytest.raises(ValueError, match="longer|at most|maximum"):
            await fleet.generate(versions.prompt * 600, max_new_tokens=8)
        return first, ended, said

    first, ended, said = run(server, work)
    end = first.tokens.index(ended.tokens[-1]) + 1
    assert ended.tokens == first.tokens[:end] and ended.finish == "stop" and said.text == "abbc"


def test_weights_that_are_not_those_of_the_label_are_found(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 0)
        with pytest.raises(ServerError, match="log-probabilities of the probe must be within"):
            await push_weights(fleet, versions.paths[1], versions.labels[1], probe=versions.probe(0))

    run(server, work)


def test_weights_that_another_program_loads_under_the_label_are_found_and_replaced(server, versions):
    often = dataclasses.replace(client.TIMEOUTS, heartbeat_s=0.2)

    async def work(fleet):
        await pushed(fleet, versions, 0)
        other = str(versions.paths[1])
        path, body = "/update_weights_from_disk", {"model_path": other, "weight_version": versions.labels[0]}
        if server.kind == "vllm":
            path, body = "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": other}}
        await asyncio.to_thread(server.ok, path, body)
        while not fleet.counts["recovered"]:
            await asyncio.sleep(0.1)
        assert fleet.counts["stale"] == 1
        return await fleet.generate(versions.prompt, max_new_tokens=8, ignore_eos=True)

    done = run(server, work, timeouts=often)
    assert done.version == [0] * 8
    logp_TV = versions.logp(0, versions.prompt + done.tokens)
    np.testing.assert_allclose(
        done.logp, [logp_TV[len(versions.prompt) - 1 + i, id] for i, id in enumerate(done.tokens)], atol=2e-5
    )


def test_a_server_that_is_killed_and_started_again_gets_the_newest_weights_before_it_works(server, versions):
    patient = dataclasses.replace(client.TIMEOUTS, lost_s=400.0, heartbeat_s=1.0)

    async def work(fleet):
        await pushed(fleet, versions, 1)
        seen = []
        how = {"max_new_tokens": 1500, "ignore_eos": True, "on_tokens": seen.append}
        going = asyncio.create_task(fleet.generate(versions.prompt, **how))
        while not seen:
            await asyncio.sleep(0.01)
        server.kill()
        await asyncio.sleep(0)
        assert not going.done()
        server.start()
        return await going, fleet.counts

    try:
        done, counts = run(server, work, timeouts=patient)
    finally:
        server.ready()
    assert done.version == [1] * 1500 and counts["recovered"] == 1 and counts["strange"] == 0
    logp_TV = versions.logp(1, versions.prompt + done.tokens)
    theirs = [logp_TV[len(versions.prompt) - 1 + i, id] for i, id in enumerate(done.tokens)]
    np.testing.assert_allclose(done.logp, theirs, atol=2e-4)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 100, "sampling_mask": True}], ids=["all", "masks"])
def test_a_policy_learns_from_it(server, versions, tmp_path, filters):
    """GRPO at eta 0: more of the letters a to m are right."""
    if server.kind == "vllm" and filters:
        pytest.skip("its masks are not read yet")
    model = tmp_path / "model"
    model.mkdir()
    for file in versions.paths[0].iterdir():
        if file.name != "manifest.json":
            (model / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefgh" * 4))
    (tmp_path / "own.py").write_text(
        "def score(text, row):\n    return sum('a' <= c <= 'm' for c in text) / max(1, len(text))\n"
    )
    config = grpo.Config(str(model), str(tmp_path / "rows.jsonl"), f"{tmp_path}/own.py:score")
    config = replaced(
        config, out=str(tmp_path / "out"), steps=16, groups=4, group_size=8, max_concurrent=16, length=64, rows=4,
        eta=0, servers=(server.url,), sampling=Sampling(max_new_tokens=12, temperature=0.8, **filters),
        objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=2e-2, b2=0.99),
    )  # fmt: skip
    summary = grpo.main(config)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rewards = [x["reward"] for x in lines if x.get("kind") == "grpo"]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert summary["max_logp_diff"] < 1e-4 and summary["complete"]
