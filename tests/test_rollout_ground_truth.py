"""The whole controller under a virtual clock and adversarial schedules, against engines that know the true versions."""

import asyncio
import json

import pytest
import virtual
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.rollout import client
from areax.rollout.fleet import health
from areax.rollout.fleet.push import push_weights
from areax.rollout.scheduling import executor
from areax.rollout.servers import prefix_routing, server, sglang, types
from areax.rollout.servers.labels import read_label
from areax.rollout.simulation import clock
from areax.rollout.types import sampled

G, SIZE, BATCHES = 2, 2, 7
ANSWER = 51  # separates two turns
PATHS = [
    "/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation", "/weights_checker",
    "/generate", "/load_lora_adapter", "/unload_lora_adapter", "/v1/models",
]  # fmt: skip

events = st.lists(
    st.tuples(
        st.floats(0.05, 4.0),  # seconds until the event
        st.sampled_from(["die", "die for good", "hang", "forget", "swap", "busy", "join", "leave", *PATHS]),
        st.integers(0, 5),  # which engine
        st.sampled_from(["refuse", "late", "lie", "half", "cut"]),
    ),
    max_size=14,
)


def prompt(i):
    """The length of prompt i: around the block size, so that turns and samples share a whole block, or none."""
    return prefix_routing.BLOCK - 1 + i % 3


def label(v):
    return f"{v}-{v:08x}"


def adapter(root):
    """A stand-in for adapters over a published base; every version is this directory under another label."""
    for path in (root / "base", root / "adapter"):
        path.mkdir(exist_ok=True)
    (root / "base/manifest.json").write_text('{"version": 999}')
    base = read_label(root / "base/manifest.json")
    (root / "adapter/manifest.json").write_text(json.dumps({"version": 0, "base": base}))
    (root / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(root / "base")}))
    return root / "adapter"


# No limit on restarts: otherwise a schedule may kill all servers, which ends a run.
UNLIMITED = client.Timeouts(max_restarts=10**6, push_attempts=10**6)


SCHEDULES = {
    "events": events,
    "eta": st.integers(0, 3),
    "mode": st.sampled_from(["retract", "abort", "drain", "in_place"]),
    "parallel_servers": st.integers(0, 2),
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=12),
    "train_s": st.floats(0.0, 3.0),
    "max_concurrent": st.integers(1, 8),
    "restarts": st.booleans(),
    "turns": st.integers(1, 3),
    "refused": st.sampled_from([0, 3]),  # 3: every third group is refused
    "oversample": st.integers(0, G),
    "adapters": st.booleans(),
}


def check(
    tmp_path_factory,
    events,
    eta,
    mode,
    parallel_servers,
    lengths,
    train_s,
    max_concurrent,
    restarts,
    turns,
    refused,
    oversample,
    adapters,
):
    directory = tmp_path_factory.getbasetemp()  # any existing directory: these engines read no files
    if adapters:
        directory = adapter(directory)
    batches, fleets = [], []

    async def workflow(generate, row):
        """Several turns; the prompt of each is everything before it plus one separator token."""
        i = row["i"]
        samples, context = [], [i] * prompt(i)
        for turn in range(turns):
            done = await generate(context, max_new_tokens=lengths[(i + turn) % len(lengths)])
            info = {"row": i, "turn": turn}
            samples.append(sampled(context, done, temperature=1.0, reward=float(i), info=info))
            context = [*context, *done.tokens, ANSWER]
            await asyncio.sleep(0.1 * (i % 2))
        return samples

    def accept(samples):
        return not refused or samples[0].info["row"] % refused != 0

    async def main():
        network = virtual.Network()
        urls = [network.start(0.01 * (1 + i)) for i in range(3)]

        async def restart(url, weights):
            network.servers[url].die()
            await asyncio.sleep(2.0)
            return network.start(0.02)

        servers = [server.Server(sglang.SGLang(url, network), ["default"]) for url in urls]
        fleet = client.assemble(servers, concurrency=4, restart=restart if restarts else None, timeouts=UNLIMITED)
        fleets.append(fleet)

        async def back(engine, after_s):
            await asyncio.sleep(after_s)
            engine.revive()

        async def happen():
            for wait_s, what, which, how in events:
                await asyncio.sleep(wait_s)
                engine = list(network.servers.values())[which % len(network.servers)]
                if what in ("die", "die for good") and engine.alive:
                    engine.die()
                    if what == "die" or not restarts:
                        side.append(asyncio.create_task(back(engine, 3.0 + which)))
                elif what == "hang" and engine.alive:
                    engine.hung = True
                    side.append(asyncio.create_task(unhang(engine, 10.0 * which)))
                elif what in ("forget", "swap"):
                    engine.weights = engine.label = "default"
                    if what == "forget":
                        engine.adapters = {}
                elif what == "busy":
                    engine.busy = 3
                elif what == "join":
                    side.append(asyncio.create_task(quietly(fleet.join(network.start(0.015)))))
                elif what == "leave":
                    side.append(
                        asyncio.create_task(quietly(fleet.leave(fleet.servers[which % len(fleet.servers)].url)))
                    )
                elif what in PATHS and not (what == "/generate" and how in ("lie", "half", "late")):
                    engine.faults[what] = how

        async def unhang(engine, after_s):
            await asyncio.sleep(after_s)
            engine.hung = False
            engine.tick()

        async def quietly(work):
            try:
                await work
            except (ValueError, RuntimeError):  # the last server may not leave; no engine to join
                pass

        async def push(v):
            known = types.Probe((0, 1), (-float(v),))
            report = await push_weights(
                fleet, directory, label(v), mode=mode, parallel_servers=parallel_servers, probe=known
            )
            assert report.probe_diff == 0.0

        side = [asyncio.create_task(health.watch(fleet))]
        await push(0)
        side.append(asyncio.create_task(happen()))
        prompts = executor.Prompts([{"i": i} for i in range(1000)], shuffle=False)
        async with executor.Executor(
            workflow, fleet.generate, prompts, group_size=SIZE, groups_per_batch=G, eta=eta,
            max_concurrent=max_concurrent, oversample=oversample, seed=None, batches=BATCHES, accept=accept,
        ) as rollout:  # fmt: skip
            for v in range(BATCHES):
                if v:
                    await push(v)
                rollout.admit(v)
                batches.append(await rollout.batch(v))
                await asyncio.sleep(train_s)
            counts, stopped = rollout.counts, set(rollout.cursor()["stopped"])
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)
        await fleet.close()
        assert all(server.load == 0 and not server.running for server in fleet.servers)
        return counts, stopped

    counts, stopped = clock.run(asyncio.wait_for(main(), 2000.0))

    seen = set()
    for v, groups in enumerate(batches):
        assert len(groups) == G
        for samples in groups:
            assert len(samples) == SIZE * turns and len({s.group for s in samples}) == 1
            assert len({s.rollout for s in samples}) == SIZE and accept(samples)
            assert samples[0].group not in seen
            seen.add(samples[0].group)
            for s in samples:
                i = s.info["row"]
                assert s.group == s.prompt == i and s.rollout // SIZE == i
                tokens = [i] * prompt(i)
                for turn in range(s.info["turn"] + 1):
                    first, n = len(tokens), lengths[(i + turn) % len(lengths)]
                    tokens += [virtual.token_at(first + k) for k in range(n)] + [ANSWER]
                assert s.tokens.tolist() == tokens[:-1]
                assert (s.logp[first:] == -s.version[first:]).all()  # the label names the version that sampled it
                assert (0 <= s.version[first:]).all() and (s.version[first:] <= v).all()
                assert v - eta <= s.info["admitted"] <= v
                if mode == "drain" or adapters:
                    assert len(set(s.version[first:])) == 1
                if eta == 0:
                    assert (s.version[first:] == v).all()
    # no prompt is skipped, and none is dropped for its age
    missed = set(range(max(seen) + 1)) - seen
    assert not stopped & seen and len(stopped) <= counts["stopped"] and (oversample or not counts["stopped"])
    missed -= stopped  # those will be run again
    assert len({i for i in missed if not refused or i % refused}) == counts["failed"]
    assert counts["accepted"] == G * BATCHES and counts["dropped"] == counts["running"] == 0
    assert counts["refused"] >= sum(1 for i in missed if refused and i % refused == 0)


@settings(max_examples=40)
@given(**SCHEDULES)
def test_every_label_is_correct_and_nothing_is_lost(tmp_path_factory, **schedule):
    check(tmp_path_factory, **schedule)


@pytest.mark.long
@settings(max_examples=400)
@given(**SCHEDULES)
def test_every_label_is_correct_and_nothing_is_lost_in_more_schedules(tmp_path_factory, **schedule):
    check(tmp_path_factory, **schedule)
