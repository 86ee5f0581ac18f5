"""Fault injection on a fleet of three real server processes: kills, stops, damaged weights and damaged answers.

Every token's log-probability is compared with our own forward pass under the weights that its label names.
"""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import types

import aiohttp
import jax
import numpy as np
import pytest
import tiny
from aiohttp import web

from areax import models
from areax.adapters import hf, peft, tokenizer
from areax.models import lora
from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.scheduling import episodes
from areax.rollout.servers import local
from areax.rollout.servers.labels import read_label
from areax.rollout.types import sampled

pytestmark = pytest.mark.long
PROMPTS = [[5 + i % 7, 6, 7 + i % 3] for i in range(18)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Three published versions, their labels, and log-probabilities of our own forward pass."""
    root = tmp_path_factory.mktemp("published")
    tokens = tokenizer.character("0123456789+")
    config = models.config_from_hf(
        {**tiny.HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "max_position_embeddings": 256}
    )
    params = [tiny.weights(models.table(config), 0.2, seed) for seed in range(3)]
    paths = [hf.write_published(root, v, config, p, tokenizer=tokens) for v, p in enumerate(params)]
    forward = jax.jit(lambda p, token_BT: jax.nn.log_softmax(models.forward(p, token_BT, config=config)))

    def logp_of(params, v, ids):
        padded = np.zeros((1, 256), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(forward(params[v], padded))[0]

    labels = [read_label(path / "manifest.json") for path in paths]
    logp = functools.partial(logp_of, params)
    return types.SimpleNamespace(
        config=config, params=params, paths=paths, labels=labels, logp=logp, logp_of=logp_of
    )  # fmt: skip


def check(versions, prompt, done, n):
    assert len(done.tokens) == len(done.logp) == len(done.version) == n
    ids = [*prompt, *done.tokens]
    logp_VTV = {v: versions.logp(v, ids) for v in set(done.version)}
    expected = [logp_VTV[v][len(prompt) + i - 1, ids[len(prompt) + i]] for i, v in enumerate(done.version)]
    np.testing.assert_allclose(done.logp, expected, atol=1e-4)


async def until(condition, timeout_s=120):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def busy(fleet):
    """Returns once every server has at least two requests."""
    await until(lambda: all(server.load >= 2 for server in fleet.servers))


def fault(versions, main):
    """Runs `main(fleet, own)` on three servers with version 0."""

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            own = await stack.enter_async_context(
                local.servers(versions.paths[0], local.Serve(count=3, slots=4, context=256))
            )
            fleet = await stack.enter_async_context(client.connect(own.urls, restart=own.restart))
            await push_weights(fleet, versions.paths[0], versions.labels[0])
            await main(fleet, own)

    asyncio.run(asyncio.wait_for(run(), 400))


@pytest.fixture(scope="module")
def named(versions, tmp_path_factory):
    """Published adapters over version 0; attributes as in `versions`."""
    root, config, spec = tmp_path_factory.mktemp("named"), versions.config, lora.Lora(rank=2)
    trees = [tiny.weights(lora.table(models.table(config), spec), 0.2, v) for v in range(3)]
    base = versions.paths[0], versions.labels[0]
    paths = [peft.write_published(root, v, config, tree, spec, *base) for v, tree in enumerate(trees)]
    joined = [lora.join(versions.params[0], tree, spec) for tree in trees]
    labels = [read_label(path / "manifest.json") for path in paths]
    return types.SimpleNamespace(paths=paths, labels=labels, logp=functools.partial(versions.logp_of, joined))


def test_a_killed_server_gets_base_and_adapter_before_its_next_request(versions, named):
    async def main(fleet, own):
        push = lambda v: push_weights(fleet, named.paths[v], named.labels[v])
        await push(1)
        tasks = begin(fleet, 200)
        await busy(fleet)
        os.kill(next(iter(own.running.values())).pid, signal.SIGKILL)
        await push(2)
        done = await asyncio.gather(*tasks)
        for prompt, one in zip(PROMPTS, done, strict=True):
            check(named, prompt, one, 200)
            assert len(set(one.version)) == 1
        assert {one.version[0] for one in done} <= {1, 2}
        await until(lambda: healthy(fleet))
        again = await asyncio.gather(*begin(fleet, 20))
        assert {one.info["url"] for one in again} == {server.url for server in fleet.servers}
        for prompt, one in zip(PROMPTS, again, strict=True):
            check(named, prompt, one, 20)
            assert set(one.version) == {2}
        assert fleet.counts["restarted"] == 1 and len(fleet.labels) <= 3

    fault(versions, main)


def begin(fleet, n):
    return [
        asyncio.create_task(fleet.generate(prompt, max_new_tokens=n, ignore_eos=True, seed=i + 1))
        for i, prompt in enumerate(PROMPTS)
    ]


def healthy(fleet):
    return [server.state for server in fleet.servers] == ["healthy"] * 3


def test_killing_two_of_three_servers_before_a_push(versions):
    async def main(fleet, own):
        quiet = await asyncio.gather(*begin(fleet, 200))
        tasks = begin(fleet, 200)
        await busy(fleet)
        for process in list(own.running.values())[:2]:
            os.kill(process.pid, signal.SIGKILL)
        done = await asyncio.gather(*tasks)
        for prompt, one, before in zip(PROMPTS, done, quiet, strict=True):
            check(versions, prompt, one, 200)
            assert one.tokens == before.tokens  # tokens depend on weights and seed only
        report = await push_weights(fleet, versions.paths[1], versions.labels[1])
        assert fleet.servers[2].url in report.loaded
        await until(lambda: healthy(fleet))
        assert fleet.counts["restarted"] == 2 and fleet.version == 1
        done = await asyncio.gather(*begin(fleet, 50))
        for prompt, one in zip(PROMPTS, done, strict=True):
            check(versions, prompt, one, 50)
            assert set(one.version) == {1}
        assert len({one.info["url"] for one in done}) == 3

    fault(versions, main)


def test_stopping_a_server_in_the_middle_of_a_push(versions, monkeypatch):

    async def main(fleet, own):
        tasks = begin(fleet, 200)
        await busy(fleet)
        victim = fleet.servers[0]
        push = asyncio.create_task(push_weights(fleet, versions.paths[1], versions.labels[1]))
        await asyncio.sleep(0.01)
        os.kill(own.running[victim.url].pid, signal.SIGSTOP)
        report = await push
        assert len(report.loaded) >= 2
        for prompt, one in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
            check(versions, prompt, one, 200)
        await until(lambda: healthy(fleet))
        assert fleet.version == 1 and fleet.counts["restarted"] >= 1
        for prompt, one in zip(PROMPTS, await asyncio.gather(*begin(fleet, 20)), strict=True):
            check(versions, prompt, one, 20)
            assert set(one.version) == {1}

    fault(versions, main)


def test_damaged_weights_are_refused_and_undone(versions, tmp_path):
    broken = tmp_path / "2"
    shutil.copytree(versions.paths[2], broken)
    [shard] = broken.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)

    async def main(fleet, own):
        tasks = begin(fleet, 100)
        with pytest.raises(
            RuntimeError, match=f"no server took version {versions.labels[2]}: .*not match manifest.json"
        ):
            await push_weights(fleet, broken, versions.labels[2])
        for prompt, one in zip(PROMPTS, await asyncio.gather(*tasks), strict=True):
            check(versions, prompt, one, 100)
            assert set(one.version) == {0}
        await until(lambda: healthy(fleet))
        assert (await push_weights(fleet, versions.paths[2], versions.labels[2])).failed == {}
        for prompt, one in zip(PROMPTS, await asyncio.gather(*begin(fleet, 20)), strict=True):
            check(versions, prompt, one, 20)
            assert set(one.version) == {2}

    fault(versions, main)


# ---------------------------------------------------------------- answers damaged in transit


class Between:
    """A proxy of a server; `faults` maps a path to the fault of its next answer, `met` lists those injected so far."""

    def __init__(self, url):
        self.behind, self.faults, self.met = url, {}, []

    async def forward(self, request):
        async with self.http.request(request.method, self.behind + request.path, data=await request.read()) as reply:
            status, body = reply.status, await reply.read()
        fault = self.faults.pop(request.path, None)
        if not fault:
            return web.Response(status=status, body=body, content_type="application/json")
        self.met.append((request.path, fault))
        if fault == "garbage":
            return web.Response(body=bytes(b ^ 0x55 for b in body), content_type="application/json")
        if fault == "refused":
            return web.Response(status=500, text="{}")
        if fault == "wrong version":
            known = json.loads(body)
            if "weight_version" in known:
                known["weight_version"] = "77-77777777"
            for span in known.get("meta_info", {}).get("weight_versions", ()):
                span["version"] = "77-77777777"
            return web.json_response(known)
        answer = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
        await answer.prepare(request)
        for piece in (body[:1], body[1:20], body[20:]):
            await answer.write(piece)
            if fault == "cut off":
                request.transport.close()
                break
            await asyncio.sleep(0.3)  # slow
        return answer

    @contextlib.asynccontextmanager
    async def serve(self):
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as self.http:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()


FAULTS = ["slow", "cut off", "garbage", "refused", "wrong version"]
PATHS = ["/generate", "/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_damaged_at_each_step_of_a_push(versions, fault, monkeypatch):
    """One path after the other, on alternating servers; requests run meanwhile, and none is lost."""
    monkeypatch.setattr(episodes, "PAUSE_S", 0.05)

    async def play(generate, row):
        done = await generate(row["prompt"], max_new_tokens=150, ignore_eos=True)
        check(versions, row["prompt"], done, 150)
        return sampled(row["prompt"], done, temperature=1.0, info={"versions": set(done.version)})

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            own = await stack.enter_async_context(
                local.servers(versions.paths[0], local.Serve(count=3, slots=4, context=256))
            )
            gates = [await stack.enter_async_context(Between(url).serve()) for url in own.urls]
            fleet = await stack.enter_async_context(
                client.connect([gate.url for gate in gates], timeouts=client.Timeouts(retry_s=0.05))
            )
            await push_weights(fleet, versions.paths[0], versions.labels[0])
            rows = [{"prompt": prompt} for prompt in PROMPTS]
            for turn, path in enumerate(PATHS):
                old, new = turn % 2, (turn + 1) % 2
                gate = gates[turn % 3]
                gate.faults[path] = fault
                running = asyncio.create_task(episodes.rollouts(play, fleet.generate, rows, seed=turn))
                while sum(server.load for server in fleet.servers) < len(rows):
                    await asyncio.sleep(0)
                report = await push_weights(fleet, versions.paths[new], versions.labels[new])
                assert len(report.loaded) >= 2
                done = [sample for [sample] in await running]
                assert len(done) == len(rows) and all(one.info["versions"] <= {old, new} for one in done)
                await until(lambda: healthy(fleet))
                if fault == "wrong version" and path not in ("/generate", "/model_info"):
                    gate.faults.clear()  # its answers contain no version
                assert not gate.faults and fleet.version == new
                after = await episodes.rollouts(play, fleet.generate, rows, seed=99)
                assert all(sample.info["versions"] == {new} for [sample] in after)
            assert len({met for gate in gates for met in gate.met}) == len(PATHS)

    asyncio.run(asyncio.wait_for(main(), 200))
