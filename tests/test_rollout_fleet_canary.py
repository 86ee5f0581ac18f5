"""Canaries against real servers in this process, with faults that are planted in their engines, and without."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from areax import models
from areax.adapters import hf, peft
from areax.models import lora
from areax.rollout import client, events
from areax.rollout.engine import in_process
from areax.rollout.fleet import canary, health
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.engine_options import EngineOptions
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe

pytestmark = pytest.mark.slow
OPTIONS = EngineOptions(slots=4, context=128)
SPEC = lora.Lora(rank=2)
VERSIONS = 3
PROMPTS = [tuple(int(x) for x in np.random.default_rng(i).integers(0, 11, 100)) for i in range(3)]  # of three pages


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(root, config, weights, adapters) of versions that move by little; `root`/v and `root`/lora/v are published."""
    root = tmp_path_factory.mktemp("canary")
    tiny.model(root / "model", max_position_embeddings=128)
    config, first = hf.load(root / "model")
    table = models.table(config)
    moved = lambda tree, table, v, by: jax.tree.map(lambda x, y: x + v * by * y, tree, tiny.weights(table, 1.0, 9))
    weights = [moved(first, table, v, 0.002) for v in range(VERSIONS)]
    none = jax.tree.map(jnp.zeros_like, tiny.weights(lora.table(table, SPEC), 1.0))
    adapters = [moved(none, lora.table(table, SPEC), v, 0.02) for v in range(VERSIONS)]
    for v in range(VERSIONS):
        hf.write_published(root, v, config, weights[v])
        base = read_label(root / "0/manifest.json")
        peft.write_published(root / "lora", v, config, adapters[v], SPEC, root / "0", base)
    return root, config, weights, adapters


@pytest.fixture(scope="module")
def logp_of(place):
    """f(weights or adapters, prompt) -> log-probability of each token but the first, by the trainer's forward pass."""
    config = place[1]
    forward = jax.jit(lambda w, ids: jax.nn.log_softmax(models.forward(w, ids[None], config=config)[0]))

    def known(w, ids):
        whole = w if "stacks" in w and "embed" in w else lora.join(place[2][0], w, SPEC)
        logp_TV = np.asarray(forward(whole, np.array(ids)))
        return tuple(float(logp_TV[t, token]) for t, token in enumerate(ids[1:]))

    return known


@pytest.fixture(scope="module")
def both(place):
    """(addresses, engines) of two servers."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(serving(place)) for _ in range(2)]
        yield [url for url, _ in made], [inside._service.engine for _, inside in made]


def serving(place, dtype="float32"):
    return in_process.serving(str(place[0] / "model"), OPTIONS, dtype=dtype)


@dataclass
class Run:
    """A fleet, pushes to it with canaries, and the events of these."""

    fleet: Any
    place: Any
    logp_of: Any
    by_name: bool = False
    events: list = field(default_factory=list)

    async def push(self, v, **how):
        root, _, weights, adapters = self.place
        folder, w = (root / "lora" / str(v), adapters[v]) if self.by_name else (root / str(v), weights[v])
        known = tuple(Probe(ids, self.logp_of(w, ids), dtype="F32") for ids in PROMPTS)
        await push_weights(self.fleet, folder, read_label(folder / "manifest.json"), canaries=known, **how)
        await canary.check(self.fleet)

    async def settled(self):
        """Waits until no server is being recovered; the states."""
        while any(server.recovery for server in self.fleet.servers):
            await asyncio.sleep(0.02)
        return [server.state for server in self.fleet.servers]

    def found(self, url=""):
        """(after what, whether it drifts) of each comparison, of all servers or the one at an address."""
        made = [event for event in self.events if event["kind"] == "canary" and event["url"].startswith(url)]
        return [(event["after"], event["drifts"]) for event in made]


def play(place, logp_of, urls, main, by_name=False, **options):
    """Runs `main(run)` with a fleet of these servers."""

    async def connected():
        async with client.connect(urls, timeout_s=60, **options) as fleet:
            run = Run(fleet, place, logp_of, by_name)
            with events.watching(run.events.append):
                await main(run)

    asyncio.run(asyncio.wait_for(connected(), 240))


def keeps_its_cache(engine, monkeypatch):
    """Keys and values of the old weights stay after an update; /flush_cache drops them."""
    slots, updated = engine._slots, []
    swap, clear = slots.swap, slots.clear
    monkeypatch.setattr(slots, "swap", lambda weights: (updated.append(True), swap(weights)))
    monkeypatch.setattr(slots, "clear", lambda: updated.pop() if updated else clear())


def loads_half(engine, monkeypatch):
    """Every second tensor stays that of the load before."""
    slots, last = engine._slots, []
    stage = slots.stage

    def mixed(params):
        new, of = jax.tree.flatten(params)
        old = last[0] if last else new
        last[:] = [new]
        return stage(jax.tree.unflatten(of, [x if i % 2 else y for i, (x, y) in enumerate(zip(new, old, strict=True))]))

    monkeypatch.setattr(slots, "stage", mixed)


def binds_nothing(engine, monkeypatch):
    """It takes adapters and finds no module for them."""
    made = engine._slots.adapter_factors
    none = lambda spec, tree: made(spec, jax.tree.map(np.zeros_like, tree))
    monkeypatch.setattr(engine._slots, "adapter_factors", none)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_servers_without_a_fault_do_not_drift(place, logp_of, both, by_name, mode):
    async def main(run):
        for v in range(3):
            await run.push(v, mode=mode)
        assert run.found() == [("", False)] * 6 and run.fleet.counts["drifted"] == 0
        assert max(max(x["trainer"], x["cache"]) for x in run.events if x["kind"] == "canary") < 1e-5

    play(place, logp_of, both[0], main, by_name)


def test_keys_and_values_of_old_weights_are_found_and_flushed(place, logp_of, both, monkeypatch, caplog):
    async def main(run):
        keeps_its_cache(both[1][1], monkeypatch)
        await run.push(0)
        await run.push(1)
        assert await run.settled() == ["healthy"] * 2
        well, wrong = (run.found(url) for url in both[0])
        assert well == [("", False)] * 2 and wrong == [("", False), ("", True), ("flush", False)]
        [found] = [event for event in run.events if event.get("drifts")]
        assert found["label"].startswith("1-") and found["trainer"] < 1e-5 < found["limits"][1] < found["cache"]

    play(place, logp_of, both[0], main)
    assert "of the trainer (F32) and" in caplog.text and "over the prefix cache (F32), got" in caplog.text
    assert "worst: token" in caplog.text and "canary after a flush: version 1-" in caplog.text


def test_half_loaded_weights_are_found_and_loaded_again(place, logp_of, both, monkeypatch):
    async def main(run):
        await run.push(0)
        loads_half(both[1][1], monkeypatch)
        await run.push(2)
        await run.push(1)
        assert await run.settled() == ["healthy"] * 2
        wrong = [("", False), ("", False), ("", True), ("flush", True), ("load", False)]
        assert run.found(both[0][1]) == wrong

    play(place, logp_of, both[0], main)


def test_a_server_that_nothing_helps_is_dead_and_the_others_go_on(place, logp_of, both, monkeypatch):
    async def main(run):
        await run.push(0)
        binds_nothing(both[1][1], monkeypatch)
        await run.push(1)
        assert await run.settled() == ["healthy", "dead"] and "canary after a load" in run.fleet.servers[1].why
        assert run.found(both[0][1]) == [("", False), ("", True), ("flush", True), ("load", True)]
        await run.push(2)
        assert (await run.fleet.generate([1, 2], max_new_tokens=2, ignore_eos=True)).version == [2, 2]
        assert await run.settled() == ["healthy", "dead"] and run.fleet.counts["drifted"] == 1

    play(place, logp_of, both[0], main, by_name=True)


def test_a_server_that_computes_in_another_dtype_is_found_and_restarted(place, logp_of, both, caplog):
    """One comes back in bfloat16; one says float32 from the beginning; one says bfloat16, which is no fault."""
    with serving(place, "bfloat16") as (coarse, _):
        starts = iter([coarse, both[0][1]])

        async def restart(url, weights):
            return next(starts)

        async def comes_back(run):
            [server] = run.fleet.servers
            await run.push(0)
            await health._restart(run.fleet, server, restart)  # as after a crash
            run.fleet.fail(server, "stale", "was restarted")
            assert await run.settled() == ["healthy"] and server.url == coarse
            await run.push(1)
            assert await run.settled() == ["healthy"] and server.url == both[0][1]
            await run.push(2)
            steps = [("", True), ("flush", True), ("load", True), ("restart", False)]
            assert run.found() == [("", False), *steps, ("", False)]

        async def says_float32(run):
            run.fleet.servers[0].layout = json.dumps(["float32", None])
            await run.push(0)
            assert run.found()[0] == ("", True)

        async def says_bfloat16(run):
            for v in range(3):
                await run.push(v)
            assert run.found() == [("", False)] * 3

        fast = client.Timeouts(retry_s=0.01)
        play(place, logp_of, both[0][:1], comes_back, restart=restart, timeouts=fast)
        play(place, logp_of, [coarse], says_float32)
        play(place, logp_of, [coarse], says_bfloat16)
    assert caplog.text.count("computes in BF16, the trainer in F32") == 1


def test_a_push_during_a_comparison_is_no_drift(place, logp_of, both):
    async def main(run):
        await run.push(0)
        old, known = run.fleet.published, []
        pushing = asyncio.create_task(run.push(1))
        while not pushing.done():
            with contextlib.suppress(ValueError):
                known.append(await canary.prove(run.fleet.servers[0], old))
            await asyncio.sleep(0)
        await pushing
        assert False in known and {drifts for _, drifts in run.found()} == {False}

    play(place, logp_of, both[0], main)
