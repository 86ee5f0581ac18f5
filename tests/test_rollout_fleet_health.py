"""Servers that fail, hang, recover, join and leave: which ones get requests, and with which weights."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
from pathlib import Path

import aiohttp.web
import pytest
from scripted import V0, V1, V2, answers, check, controls, hangs_up, reply, run, serving, states, until

from areax.rollout import client
from areax.rollout.fleet import offload
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Reported
from areax.rollout.weights import store

QUICK = client.Timeouts(retry_s=0.02, lost_s=1.0, lost_own_s=1.0, reach_s=0.5)
WATCHFUL = dataclasses.replace(QUICK, heartbeat_s=0.05, heartbeat_answer_s=0.5)
connect = functools.partial(client.connect, timeouts=QUICK)
watched = functools.partial(client.connect, timeouts=WATCHFUL)


def port(place):
    return int(place.url.rsplit(":", 1)[1])


async def never(request, body):
    await asyncio.sleep(60)


async def spread(fleet, n=8):
    """Versions and server addresses of n concurrent completions."""
    done = await asyncio.gather(*(fleet.generate([i], max_new_tokens=3) for i in range(n)))
    return {v for one in done for v in one.version}, {one.info["url"] for one in done}


# ---------------------------------------------------------------- pushes that fail


@pytest.mark.parametrize(
    "path, wrong",
    [
        ("/pause_generation", answers(500, {})),
        ("/update_weights_from_disk", answers(400, {"message": "the cache was not flushed"})),
        ("/update_weights_from_disk", hangs_up),
        ("/model_info", answers(200, {"weight_version": V0})),
        ("/continue_generation", answers(500, {})),
    ],
)
def test_a_server_with_unknown_weights_is_reloaded_before_it_gets_requests(tmp_path, path, wrong):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            a.refuse[path] = wrong
            assert list((await push_weights(fleet, tmp_path, V1)).failed) == [a.url]
            assert states(fleet) == ["weights_unknown", "healthy"]
            assert await spread(fleet) == ({1}, {b.url})
            a.refuse.clear()
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert await spread(fleet) == ({1}, {a.url, b.url})
            assert fleet.counts["weights_unknown"] == fleet.counts["recovered"] == 1
            assert (await push_weights(fleet, tmp_path, V2)).failed == {}

    run(main)


def test_a_push_that_fails_on_all_servers_is_undone_and_retried(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)

            async def refuses(one, request, body):
                if body["weight_version"] == V2:
                    return await answers(400, {"message": "no such file"})(request, body)
                one.label = V1
                return await answers(200, {"success": True})(request, body)

            for one in (a, b):
                one.refuse["/update_weights_from_disk"] = functools.partial(refuses, one)
            task = asyncio.create_task(push_weights(fleet, tmp_path, V2))
            await until(lambda: fleet.counts["undone"] == 1)
            assert (await spread(fleet))[0] == {1}
            with pytest.raises(RuntimeError, match=f"no server took version {V2}: .*no such file"):
                await task
            assert fleet.counts["undone"] == QUICK.push_attempts
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert (await spread(fleet))[0] == {1} and fleet.version == 1

            a.refuse.clear(), b.refuse.clear()
            assert (await push_weights(fleet, tmp_path, V2)).failed == {}
            assert (await spread(fleet))[0] == {2}

    run(main)


def test_a_recovering_server_gets_a_version_pushed_meanwhile(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:
            slow = asyncio.Event()

            async def loads(request, body):
                del a.refuse[request.path]
                await slow.wait()
                a.label = body["weight_version"]
                return await answers(200, {"success": True})(request, body)

            a.refuse["/update_weights_from_disk"] = answers(500, {})
            await push_weights(fleet, tmp_path, V1)
            a.refuse["/update_weights_from_disk"] = loads
            await until(lambda: not a.refuse)  # it is reloading V1
            assert (await push_weights(fleet, tmp_path, V2)).loaded == (b.url,)
            assert states(fleet) == ["weights_unknown", "healthy"]
            slow.set()
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert (a.label, fleet.version) == (V2, 2)
            given = [body["weight_version"] for path, body in a.calls if path == "/update_weights_from_disk"]
            assert given == [V1, V1, V2]

    run(main)


# ---------------------------------------------------------------- servers that die or hang


def test_a_server_that_something_else_paused_is_named(caplog):
    none_runs = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 1, "token_usage": 0.0}]}

    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            a.refuse["/v1/loads"] = answers(200, none_runs)
            await until(lambda: sum(path == "/v1/loads" for path, _ in a.calls) > 5)
            assert not caplog.messages  # it has no requests
            a.going.clear()
            waiting = asyncio.create_task(fleet.generate([1], max_new_tokens=3))
            await until(lambda: caplog.messages)
            a.going.set()
            check(await waiting, [1], 3)
            assert [f"{a.url}: has 1 requests of this run and ran none" in line for line in caplog.messages] == [True]

    run(main)


def test_a_server_that_returns_with_other_weights_loads_the_newest_version(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            b = await stack.enter_async_context(serving())
            async with serving() as a:
                fleet = await stack.enter_async_context(connect([a.url, b.url]))
                await push_weights(fleet, tmp_path, V1)
            await spread(fleet)
            await until(lambda: states(fleet) == ["dead", "healthy"])
            again = await stack.enter_async_context(serving("default", port=port(a)))
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert again.label == V1 and set(controls(b)) - {path for path, _ in again.calls} == {"/weights_checker"}
            assert await spread(fleet) == ({1}, {again.url, b.url})

    run(main)


def test_a_dead_server_is_restarted_while_requests_wait(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            started = []

            async def restart(url, weights):
                started.append((url, weights.label))
                if len(started) == 1:
                    raise OSError("no room")
                return (await stack.enter_async_context(serving("default"))).url

            async with serving() as a:
                fleet = await stack.enter_async_context(connect([a.url], restart=restart))
                await push_weights(fleet, tmp_path, V1)
                a.going.clear()
                task = asyncio.create_task(fleet.generate([1]))
                await until(lambda: a.load)
            done = await task
            check(done, [1], 64)
            assert set(done.version) == {1} and done.info["url"] != a.url
            assert started == [(a.url, V1)] * 2
            assert fleet.counts["restarted"] == fleet.counts["recovered"] == fleet.counts["dead"] == 1

    run(main)


def test_the_version_that_a_restarted_server_reads_stays(tmp_path):
    """However many versions are pushed, and older ones removed, while it starts."""

    def version(v):
        (tmp_path / str(v)).mkdir()
        (tmp_path / str(v) / "manifest.json").write_text(json.dumps({"version": v, "tensors": {}}))
        return tmp_path / str(v), read_label(tmp_path / str(v) / "manifest.json")

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            begun, ready = asyncio.Event(), asyncio.Event()

            async def restart(url, weights):
                begun.set()
                await ready.wait()
                assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "4", "5"]
                assert (Path(weights.directory) / "manifest.json").is_file()
                return (await stack.enter_async_context(serving(weights.label))).url

            b = await stack.enter_async_context(serving())
            async with serving() as a:
                fleet = await stack.enter_async_context(connect([a.url, b.url], restart=restart))
                await push_weights(fleet, *version(0))
            await spread(fleet)
            await begun.wait()
            for v in range(1, 6):
                await push_weights(fleet, *version(v))
                store.prune(tmp_path, 2, fleet.labels)
            ready.set()
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert fleet.version == 5 and fleet.counts["restarted"] == 1
            store.prune(tmp_path, 2, fleet.labels)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]

    run(main)


def test_the_number_of_restarts_is_limited(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            tried = []

            async def restart(url, weights):
                tried.append(url)
                raise RuntimeError("the GPU fell off the bus")

            async with serving() as a:
                fleet = await stack.enter_async_context(connect([a.url], restart=restart))
            with pytest.raises(RuntimeError, match="no usable .*the restart failed: the GPU fell"):
                await fleet.generate([1])
            assert len(tried) == QUICK.max_restarts

    run(main)


def test_a_hanging_server_is_detected_without_a_broken_connection(tmp_path):
    async def main():
        async with serving() as a, serving() as b, watched([a.url, b.url], concurrency=4) as fleet:
            a.going.clear()
            a.refuse["/model_info"] = never
            tasks = [asyncio.create_task(fleet.generate([i])) for i in range(8)]
            for i, done in enumerate(await asyncio.gather(*tasks)):
                check(done, [i], 64)
                assert done.info["url"] == b.url
            assert states(fleet) == ["dead", "healthy"] and fleet.counts["rerouted"] == 4
            a.going.set()
            a.refuse.clear()
            await until(lambda: states(fleet) == ["healthy", "healthy"])

    run(main)


def test_a_push_does_not_wait_for_a_hanging_server(tmp_path):
    async def main():
        async with serving() as a, serving() as b, watched([a.url, b.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            a.refuse["/update_weights_from_disk"] = a.refuse["/model_info"] = never
            report = await push_weights(fleet, tmp_path, V2)
            assert (report.loaded, list(report.failed)) == ((b.url,), [a.url])
            assert await spread(fleet) == ({2}, {b.url})
            a.refuse.clear()
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert await spread(fleet) == ({2}, {a.url, b.url})

    run(main)


@pytest.mark.parametrize("body", [[], None, "yes", 3, {"weight_version": 7}])
def test_a_server_with_malformed_answers_counts_as_dead(tmp_path, monkeypatch, body):
    async def main():
        async with serving() as a, serving() as b, watched([a.url, b.url]) as fleet:
            a.refuse["/model_info"] = answers(200, body)
            await until(lambda: states(fleet) == ["dead", "healthy"])
            assert await spread(fleet) == ({0}, {b.url})

    run(main)


async def page(request, _):
    return aiohttp.web.Response(text="<html>down for maintenance</html>", content_type="text/html")


@pytest.mark.parametrize("wrong", [answers(502, {}), page])
def test_a_server_for_which_a_proxy_answers_has_time_to_come_back(wrong):
    """Also at the start, while it loads."""

    async def main():
        async with serving() as a:
            asked = 0

            async def twice(request, body):
                nonlocal asked
                asked += 1
                if asked == 2:
                    del a.refuse["/model_info"]
                return await wrong(request, body)

            a.refuse["/model_info"] = twice
            async with connect([a.url]) as fleet:
                asked, a.refuse["/model_info"] = 0, twice
                fleet.mark_suspect(fleet.servers[0], "a connection failed")
                await until(lambda: states(fleet) == ["healthy"])
                assert fleet.counts["dead"] == 0 and asked == 2

    run(main)


def test_an_unexpected_restart_is_detected_while_the_server_is_idle(tmp_path):
    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            a.label = "default"
            await until(lambda: fleet.counts["stale"])
            await until(lambda: states(fleet) == ["healthy"])
            assert a.label == V1

    run(main)


def test_weights_replaced_under_their_label_are_named_and_loaded_again(tmp_path, caplog):
    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            caplog.clear()
            for source in ("", str(tmp_path)):  # one that does not say it, the one that it was given
                a.source, asked = source, len(a.calls)
                await until(lambda asked=asked: sum(path == "/model_info" for path, _ in a.calls[asked:]) > 2)
            assert states(fleet) == ["healthy"] and not caplog.messages
            asked = asyncio.create_task(fleet.generate([1], max_new_tokens=3))
            a.going.clear()  # the answer is on its way when it is noticed
            a.source = "/other/weights"
            await until(lambda: fleet.counts["stale"])
            await until(lambda: states(fleet) == ["healthy"])
            assert a.source == str(tmp_path) and fleet.counts["recovered"] == 1
            check(await asked, [1], 3)
            why = f"{a.url}: has weights {V1!r} loaded from another folder, '/other/weights', not '{tmp_path}'"
            assert caplog.messages == [f"a server is stale: {why}", f"{a.url} is healthy"]

    run(main)


def test_weights_replaced_between_two_heartbeats_are_named_by_the_next_push(tmp_path, caplog):
    async def main():
        async with serving() as a, connect([a.url]) as fleet:  # which is not watched
            await push_weights(fleet, tmp_path, V1)
            caplog.clear()
            a.source = "/other/weights"
            await push_weights(fleet, tmp_path, V2)
            [said] = caplog.messages
            assert said.startswith(f"{a.url}: has weights {V1!r} loaded from another folder, '/other/weights'")

    run(main)


def test_weights_replaced_again_and_again_end_the_server(tmp_path):
    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            while states(fleet) != ["dead"]:
                if states(fleet) == ["healthy"]:
                    a.source = "/other/weights"
                await asyncio.sleep(0.01)
            assert "'/other/weights'" in fleet.servers[0].why and "took it back 3 times" in fleet.servers[0].why

    run(main)


def test_a_server_that_samples_with_other_weights_than_it_loads_ends(tmp_path):
    """All of its requests at once count once; a good answer between starts anew."""

    async def other(request, body):
        n = body["sampling_params"]["max_new_tokens"]
        return await answers(200, reply([1] * n, [0.0] * n, [V2] * n, "length"))(request, body)

    async def main():
        async with serving() as a, connect([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            for wrong in (3, 3):
                a.script += [other] * wrong
                assert (await fleet.generate([1], max_new_tokens=2)).version == [1, 1]
            assert fleet.counts["strange"] == fleet.counts["recovered"] == 6 and states(fleet) == ["healthy"]
            a.script += [other] * 999
            asked = [fleet.generate([i], max_new_tokens=2) for i in range(8)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert str(error).startswith(f"no usable generation server is left ({a.url}: samples with weights ")
                assert str(error).endswith("after it loaded them 3 times in a row; give the run another server)")
            assert fleet.counts["recovered"] == 9 and states(fleet) == ["dead"]

    run(main)


def test_weights_replaced_before_the_first_push_end_the_server():
    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            fleet.servers[0].reported = Reported(V0, "/first")
            a.source = "/other/weights"
            await until(lambda: states(fleet) == ["dead"])
            assert "'/other/weights'" in fleet.servers[0].why
            a.source = "/first"
            await until(lambda: states(fleet) == ["healthy"])

    run(main)


def test_weights_replaced_while_they_are_verified_do_not_count(tmp_path):
    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url]) as fleet:

            async def replaces(request, body):
                a.source = "/other/weights"
                del a.refuse["/weights_checker"]
                return await answers(200, {"ranks": [{"checksums": {"w": "1"}}]})(request, body)

            a.refuse["/weights_checker"] = replaces
            report = await push_weights(fleet, tmp_path, V1)
            assert report.loaded == (b.url,) and "'/other/weights'" in report.failed[a.url]

    run(main)


def test_an_adapter_replaced_under_its_name_is_named_and_loaded_again(tmp_path, caplog):
    base, ours = tmp_path / "base", tmp_path / "adapters"
    base.mkdir(), ours.mkdir()
    (base / "manifest.json").write_text('{"version": 0}')
    label = read_label(base / "manifest.json")
    (ours / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (ours / "manifest.json").write_text(json.dumps({"version": 1, "base": label}))

    async def main():
        async with serving() as a, watched([a.url]) as fleet:
            await push_weights(fleet, ours, V1)
            caplog.clear()
            listed = sum(path == "/v1/models" for path, _ in a.calls)
            await until(lambda: sum(path == "/v1/models" for path, _ in a.calls) > listed + 2)
            assert states(fleet) == ["healthy"] and not caplog.messages
            for what in ("adapter", "base"):
                if what == "adapter":
                    a.adapters[V1] = "/other/adapters"
                else:
                    a.source = "/other/weights"
                before = fleet.counts["recovered"]
                await until(lambda before=before: fleet.counts["recovered"] > before)
                assert (a.adapters, a.source) == ({V1: str(ours)}, str(base)) and states(fleet) == ["healthy"]
            first, _, second, _ = caplog.messages
            assert first.endswith(
                f"has another adapter under the name {V1!r}, loaded from '/other/adapters', not '{ours}'"
            )
            assert f"{a.url}: has weights {label!r} loaded from another folder, '/other/weights'" in second

    run(main)


# ---------------------------------------------------------------- servers that join and leave


def test_servers_join_with_the_newest_version_and_leave_after_their_requests(tmp_path):
    async def main():
        async with serving(step_s=0.002) as a, serving() as b, connect([a.url]) as fleet:
            await push_weights(fleet, tmp_path, V1)
            await fleet.join(b.url + "/")
            assert states(fleet) == ["healthy", "stale"]
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert b.label == V1 and await spread(fleet) == ({1}, {a.url, b.url})
            with pytest.raises(ValueError, match=f"{b.url} is in the fleet already"):
                await fleet.join(b.url)

            task = asyncio.create_task(fleet.generate([1]))
            await until(lambda: a.load)
            await fleet.leave(a.url)
            assert (await task).info["url"] == a.url and [s.url for s in fleet.servers] == [b.url]
            assert await spread(fleet) == ({1}, {b.url})
            with pytest.raises(ValueError, match="must name one of several servers"):
                await fleet.leave(b.url)
            assert (fleet.counts["joined"], fleet.counts["left"]) == (1, 1)

    run(main)


def test_servers_that_may_not_join(tmp_path):
    async def main():
        async with (
            serving(seeded=True) as a,
            serving() as b,
            serving(V2, seeded=True) as c,
            connect([a.url]) as fleet,
        ):
            with pytest.raises(ValueError, match=f"{b.url} honours no seed"):
                await fleet.join(b.url)
            with pytest.raises(RuntimeError, match=f"{c.url} has weights '{V2}', the others '{V0}'"):
                await fleet.join(c.url)
            with pytest.raises(RuntimeError, match="cannot connect .*0.1 s"):
                await fleet.join("http://127.0.0.1:9", ready_s=0.1)
            assert len(fleet.servers) == 1

    run(main)


# ---------------------------------------------------------------- everything at once


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [0, 6, 7, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 6))])
def test_no_token_is_mislabelled_lost_or_duplicated_under_random_failures(tmp_path, seed):
    """A token's log-probability encodes the weights that really sampled it; servers die, lie and refuse at random."""
    rng = random.Random(seed)

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            alive, ever = {}, []

            async def start():
                inner = contextlib.AsyncExitStack()
                fresh = await inner.enter_async_context(serving("default", step_s=0.001, honest=True))
                alive[fresh.url] = fresh, inner
                ever.append(fresh)
                stack.push_async_callback(inner.aclose)
                return fresh.url

            async def restart(url, weights):
                return await start()

            urls = [await start() for _ in range(3)]
            fleet = await stack.enter_async_context(
                client.connect(
                    urls, concurrency=6, restart=restart, timeouts=dataclasses.replace(WATCHFUL, max_restarts=99)
                )
            )
            label = lambda v: f"{v}-{v:08x}"
            await push_weights(fleet, tmp_path, label(1))
            done, tasks = [], set()

            async def ask(i):
                prompt = [i] * rng.randint(1, 9)
                one = await fleet.generate(prompt, max_new_tokens=rng.randint(1, 60))
                done.append((prompt, one))

            for v in range(2, 14):
                tasks |= {asyncio.create_task(ask(i)) for i in range(10)}
                await asyncio.sleep(rng.random() * 0.02)
                if rng.randrange(3) == 0:
                    await offload.offload(fleet)
                victim, inner = rng.choice(list(alive.values()))
                match rng.randrange(6):
                    case 0:  # dies
                        await alive.pop(victim.url)[1].aclose()
                    case 1:  # hangs up on its next requests
                        victim.script += [hangs_up] * 2
                    case 2:  # restarts unnoticed
                        victim.weights = victim.label = "default"
                        victim.released = False
                    case 3:  # fails in the middle of the next push, its weights new, its label old
                        victim.fails = rng.choice(["/pause_generation", "/update_weights_from_disk", "/model_info"])
                with contextlib.suppress(RuntimeError):  # the push failed on all healthy servers
                    await push_weights(fleet, tmp_path, label(v), mode=rng.choice(["retract", "abort"]))
            await asyncio.gather(*tasks)
            await until(lambda: set(states(fleet)) == {"healthy"})
            assert len(done) == 120 and not any(one.wrong for one in ever)
            for prompt, one in done:
                assert one.tokens == [((len(prompt) + i) * 7 + 3) % 50 for i in range(len(one.tokens))]
                assert one.logp == [-float(v) for v in one.version] and min(one.version) >= 1

    run(main)
