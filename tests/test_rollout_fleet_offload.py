"""Offloading: servers release their memory to the trainer until the next push, also when servers fail meanwhile."""

import asyncio
import contextlib
import dataclasses
import functools

import pytest
from scripted import V0, V1, V2, answers, controls, hangs_up, run, serving, states, until

from areax.rollout import client
from areax.rollout.fleet import offload
from areax.rollout.fleet.push import push_weights

QUICK = client.Timeouts(retry_s=0.02, lost_s=1.0, lost_own_s=1.0, heartbeat_s=0.02, reach_s=0.5, resume_memory_s=0.2)
connect = functools.partial(client.connect, timeouts=QUICK)


def test_requests_wait_from_offloading_until_the_push(tmp_path):
    async def main():
        async with serving(step_s=0.002) as a, serving() as b, connect([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            running = asyncio.create_task(fleet.generate([1], max_new_tokens=30))
            await until(lambda: a.load)
            assert await offload.offload(fleet) > 0
            assert states(fleet) == ["offloaded", "offloaded"] and a.released and b.released
            waiting = asyncio.create_task(fleet.generate([2], max_new_tokens=3))
            await asyncio.sleep(0.1)  # several heartbeats
            assert (
                states(fleet) == ["offloaded", "offloaded"] and fleet.version == 1 and await offload.offload(fleet) == 0
            )
            assert not running.done() and not waiting.done() and len(a.generated()) + len(b.generated()) == 1

            assert (await push_weights(fleet, tmp_path, V2)).failed == {}
            assert set((await running).version) <= {1, 2} and (await waiting).version == [2] * 3
            assert states(fleet) == ["healthy", "healthy"] and fleet.counts["resumed"] == 0
            assert [path for path in controls(b) if path not in ("/model_info", "/weights_checker")][3:] == [
                "/pause_generation", "/release_memory_occupation", "/pause_generation", "/resume_memory_occupation",
                "/update_weights_from_disk", "/continue_generation",
            ]  # fmt: skip
            assert a.wrong == b.wrong == []
            await push_weights(fleet, tmp_path, V1)  # a push to servers that are not offloaded
            assert a.wrong == []

    run(main)


@pytest.mark.parametrize("mode", ["retract", "abort", "drain"])
def test_every_push_mode_ends_offloading(tmp_path, mode):
    async def main():
        async with serving(step_s=0.002) as a, connect([a.url]) as fleet:
            running = asyncio.create_task(fleet.generate([1], max_new_tokens=30))
            await until(lambda: a.load)
            await offload.offload(fleet)
            await push_weights(fleet, tmp_path, V1, mode=mode)
            assert len((await running).tokens) == 30 and states(fleet) == ["healthy"] and a.wrong == []

    run(main)


@pytest.mark.parametrize(
    "path, wrong",
    [
        ("/pause_generation", answers(500, {})),
        ("/release_memory_occupation", answers(400, {"message": "it is not idle"})),
        ("/release_memory_occupation", answers(503, {})),
        ("/release_memory_occupation", hangs_up),
    ],
)
def test_a_server_that_fails_to_release_is_reloaded_after_the_push(tmp_path, path, wrong):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            a.refuse[path] = wrong
            await offload.offload(fleet)
            a.refuse.clear()
            a.released = wrong is hangs_up  # it had released its memory before it hung up
            await asyncio.sleep(0.1)
            assert states(fleet) == ["weights_unknown", "offloaded"]  # not recovered until the push
            assert controls(a).count("/update_weights_from_disk") == 1
            assert (await push_weights(fleet, tmp_path, V2)).loaded == (b.url,)
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert a.label == V2 and a.wrong == b.wrong == []

    run(main)


def test_a_failed_resume_leaves_the_weights_unknown(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            await offload.offload(fleet)
            a.refuse["/resume_memory_occupation"] = answers(500, {"message": "out of memory"})
            report = await push_weights(fleet, tmp_path, V1)
            assert list(report.failed) == [a.url] and states(fleet) == ["weights_unknown", "healthy"]
            a.refuse.clear()
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert a.label == V1 and a.wrong == []

    run(main)


@pytest.mark.parametrize("path", ["/model_info", "/resume_memory_occupation", "/update_weights_from_disk"])
def test_a_server_that_fails_while_offloaded_is_skipped_by_the_push(tmp_path, path):
    """These calls may take minutes on a live server; for one that is down the push must not wait that long."""

    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            await offload.offload(fleet)
            a.refuse[path] = answers(503, {})
            report = await push_weights(fleet, tmp_path, V2)
            assert (report.loaded, list(report.failed)) == ((b.url,), [a.url])
            await until(lambda: states(fleet) == ["dead", "healthy"])
            await offload.offload(fleet)  # offloading does not wait for it either
            a.refuse.clear()
            await push_weights(fleet, tmp_path, V1)
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert a.label == b.label == V1 and a.wrong == b.wrong == []

    run(main)


def test_a_server_restarted_while_offloaded_is_not_asked_to_resume(tmp_path):
    async def main():
        async with serving() as a, connect([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            await offload.offload(fleet)
            a.released, a.label = False, "default"
            await push_weights(fleet, tmp_path, V2)
            assert a.label == V2 and a.wrong == [] and states(fleet) == ["healthy"]

    run(main)


def test_a_suspect_offloaded_server_recovers_only_by_loading_weights(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            await offload.offload(fleet)
            fleet.mark_suspect(fleet.servers[0], "a connection broke")
            await asyncio.sleep(0.1)
            assert states(fleet) == ["suspect", "offloaded"] and a.released
            assert (await push_weights(fleet, tmp_path, V2)).failed == {}
            assert fleet.counts["recovered"] == 1 and a.label == b.label == V2 and a.wrong == b.wrong == []

    run(main)


def test_no_server_is_restarted_while_servers_are_offloaded(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            started, fresh = [], []

            async def restart(url, weights):
                started.append(url)
                fresh.append(await stack.enter_async_context(serving(weights.label)))
                return fresh[-1].url

            b = await stack.enter_async_context(serving())
            async with serving() as a, serving() as c:
                fleet = await stack.enter_async_context(connect([a.url, b.url, c.url], restart=restart))
                fleet.timeouts = dataclasses.replace(QUICK, max_restarts=0)
                await push_weights(fleet, tmp_path, V1)
                fleet.mark_suspect(fleet.servers[2], "a test")
                c.refuse["/model_info"] = answers(500, {})
                await until(lambda: states(fleet)[2] == "dead")
                await offload.offload(fleet)
                fleet.timeouts = QUICK
            assert states(fleet) == ["offloaded", "offloaded", "dead"]
            await asyncio.sleep(0.1)
            assert started == []
            assert (await push_weights(fleet, tmp_path, V2)).loaded == (b.url,)
            await until(lambda: states(fleet) == ["healthy"] * 3)
            assert sorted(started) == sorted([a.url, c.url])
            done = await asyncio.gather(*(fleet.generate([i], max_new_tokens=2) for i in range(9)))
            assert {v for one in done for v in one.version} == {2} and not any(one.wrong for one in (b, *fresh))

    run(main)


def test_the_push_restarts_the_only_server_that_died_while_offloaded(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            fresh = []

            async def restart(url, weights):
                fresh.append(await stack.enter_async_context(serving(weights.label)))
                return fresh[-1].url

            async with serving() as a:
                fleet = await stack.enter_async_context(connect([a.url], restart=restart))
                await push_weights(fleet, tmp_path, V1)
                await offload.offload(fleet)
            assert (await push_weights(fleet, tmp_path, V2)).loaded == tuple(one.url for one in fresh)
            assert (await fleet.generate([1], max_new_tokens=2)).version == [2, 2] and fresh[0].wrong == []

    run(main)


def test_offloading_waits_for_servers_that_are_recovering(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            a.refuse["/update_weights_from_disk"] = answers(500, {})
            await push_weights(fleet, tmp_path, V1)
            resting = asyncio.create_task(offload.offload(fleet))
            await asyncio.sleep(0.1)
            assert not resting.done() and not b.released
            a.refuse.clear()
            await resting
            assert states(fleet) == ["offloaded", "offloaded"] and a.released and a.label == V1

    run(main)


@pytest.mark.wide
@pytest.mark.slow
def test_a_run_that_ends_resumes_the_memory_of_its_servers(tmp_path):
    async def main():
        async with serving() as a, serving() as b:
            async with connect([a.url, b.url]) as fleet:
                await offload.offload(fleet)
                b.refuse["/resume_memory_occupation"] = answers(500, {})
            assert not a.released and a.wrong == [] and not a.going.is_set()  # paused, as it has no weights
            async with connect([a.url]) as fleet:
                await push_weights(fleet, tmp_path, V0)
                assert (await fleet.generate([1], max_new_tokens=2)).version == [0, 0] and a.wrong == []

    run(main)


def test_a_server_left_offloaded_by_a_killed_run_can_be_used_again(tmp_path):
    async def main():
        async with serving() as a:
            a.released = True
            a.going.clear()
            async with connect([a.url]) as fleet:
                await push_weights(fleet, tmp_path, V1)
                assert (await fleet.generate([1], max_new_tokens=2)).version == [1, 1] and a.wrong == []

    run(main)
