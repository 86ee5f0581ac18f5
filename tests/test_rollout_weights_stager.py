"""Staging versions on machines that do not see the trainer's files: whole or not at all, whatever fails."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import scripted
import staging
from scripted import V0, controls, run, serving, states, until
from staging import KEY, contents, process, published

from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Published
from areax.rollout.weights import fetch, file_server, http_source, listing


async def fetched(root, label, url, key, speeds=None):
    """What `fetch_version` reports of a version of a file server."""
    async with http_source.session(key) as http:
        source = http_source.HTTPSource(http, f"{url}/{label}")
        return await fetch.fetch_version(root, label, [source], speeds)


@pytest.fixture
def weights():
    return staging.similar()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "server").mkdir()
    return tmp_path


def test_versions_arrive_intact_and_later_ones_as_deltas(place, weights):
    async def main():
        async with file_server.serve("127.0.0.1") as here:
            said = []
            for v, data in enumerate(weights):
                one = published(place / "trainer", v, data)
                here.offer(one)
                said.append(await fetched(place / "server", one.label, here.url, here.key))
                assert contents(said[-1]["path"]) == contents(one.directory)
                again = await fetched(place / "server", one.label, here.url, here.key)
                assert again["bytes"] == 0 and again["path"] == said[-1]["path"]
            assert [one["delta"] for one in said] == [False, True, True, False]  # a delta of the last would not pay
            assert max(said[1]["bytes"], said[2]["bytes"]) < 0.1 * said[0]["bytes"] and said[3]["bytes"] > 3_000_000
            kept = sorted(os.listdir(place / "server"))
            assert [name[0] for name in kept] == ["2", "3"]
            # another run starts again with version 0
            (place / "trainer/0/manifest.json").write_text('{"version": 0}')
            one = Published(str(place / "trainer/0"), read_label(place / "trainer/0/manifest.json"))
            here._listings.clear()
            here.offer(one)
            assert contents((await fetched(place / "server", one.label, here.url, here.key))["path"])
            assert sorted(name[0] for name in os.listdir(place / "server")) == ["0", "3"]

    run(main)


def test_deltas_are_not_used_over_a_connection_faster_than_applying_them(place, weights):
    async def main():
        async with file_server.serve("127.0.0.1") as here:
            speeds, ways = {}, []
            for v, told in enumerate(({}, {}, {"delta": 1.0, "all": 2.0}, {"delta": 2.0, "all": 1.0})):
                speeds |= told
                one = published(place / "trainer", v, weights[v % 3])
                here.offer(one)
                said = await fetched(place / "server", one.label, here.url, here.key, speeds)
                ways.append(said["delta"])
                assert contents(said["path"]) == contents(one.directory)
            assert ways == [False, True, False, True] and speeds["delta"] > 100  # as measured

    run(main)


@pytest.mark.parametrize("v, way", [(1, "delta"), (3, "whole")])
def test_files_that_do_not_change_are_not_fetched_again(place, weights, v, way):
    """Such as a vision tower's, between versions of its text model."""
    tower = np.random.default_rng(9).bytes(5_000_000)

    async def main():
        async with file_server.serve("127.0.0.1") as here:
            said = []
            for at in (0, v, 2):
                one = published(place / "trainer", at, weights[at])
                (Path(one.directory) / "tower.safetensors").write_bytes(tower)
                if at == 2:  # the copy here was damaged
                    (Path(said[-1]["path"]) / "tower.safetensors").write_bytes(tower[:-1] + b"x")
                here.offer(one)
                said.append(await fetched(place / "server", one.label, here.url, here.key))
                assert contents(said[-1]["path"]) == contents(one.directory)
            assert said[0]["bytes"] > 8_000_000 and said[1]["bytes"] < 4_000_000 and said[2]["bytes"] > 5_000_000
            assert said[1]["delta"] == (way == "delta") == (said[1]["bytes"] < 300_000)

    run(main)


@contextlib.asynccontextmanager
async def between(here, cut=(), damage=()):
    """A proxy of a file server that cuts answers off or flips a byte; yields its address and the requests so far.

    Args:
      cut, damage: the position for each successive file; None = the file passes unchanged.
    """
    cut, damage, asked = list(cut), list(damage), []

    async def forward(request):
        asked.append((request.path, request.headers.get("range")))
        headers = {name: request.headers[name] for name in ("authorization", "range") if name in request.headers}
        async with http.get(here.url + request.path_qs, headers=headers) as reply:
            body = await reply.read()
        if request.path.endswith(".safetensors") or request.path.endswith(".delta"):
            if (at := damage.pop(0) if damage else None) is not None:
                body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            if (at := cut.pop(0) if cut else None) is not None:
                answer = aiohttp.web.StreamResponse(status=reply.status, headers={"Content-Length": str(len(body))})
                await answer.prepare(request)
                await answer.write(body[:at])
                request.transport.close()
                return answer
        return aiohttp.web.Response(status=reply.status, body=body, content_type="application/octet-stream")

    app = aiohttp.web.Application()
    app.router.add_get("/{path:.*}", forward)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", asked
    finally:
        await runner.cleanup()


def test_an_interrupted_transfer_resumes_where_it_stopped(place, weights, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.01)

    async def main():
        async with file_server.serve("127.0.0.1") as here:
            one = published(place / "trainer", 1, weights[0])
            here.offer(one)
            async with between(here, cut=[1_000_000, 0, 500_000, None]) as (url, asked):
                said = await fetched(place / "server", one.label, url, here.key)
            assert contents(said["path"]) == contents(one.directory)
            ranges = [asked_for for path, asked_for in asked if path.endswith(".safetensors")]
            assert ranges == [None, "bytes=1000000-", "bytes=1000000-", "bytes=1500000-"]
            assert said["bytes"] == sum(len(data) for data in contents(one.directory).values())

            # a partial file of a killed stager is used, too
            two = published(place / "trainer", 2, weights[1])
            part = place / f"server/.{two.label}.part"
            part.mkdir()
            (part / "model.safetensors").write_bytes(weights[1][:2_000_000])
            here._versions.pop(one.label)  # no delta
            here.offer(two)
            said = await fetched(place / "server", two.label, here.url, here.key)
            assert said["resumed"] == 2_000_000 and contents(said["path"]) == contents(two.directory)

    run(main)


def test_the_stager_gives_up_on_an_unreachable_file_server(place, weights, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.001)

    async def main():
        async with file_server.serve("127.0.0.1") as here:
            one = published(place / "trainer", 1, weights[0])
            here.offer(one)
            async with between(here, cut=[0] * 99) as (url, _):
                with pytest.raises(RuntimeError, match="5 attempts in a row without progress; the last: ClientPayload"):
                    await fetched(place / "server", one.label, url, here.key)
            with pytest.raises(RuntimeError, match="5 attempts in a row without progress; the last: ClientConnector"):
                await fetched(place / "server", one.label, url, here.key)
            assert [name for name in os.listdir(place / "server") if not name.startswith(".")] == []

    run(main)


def test_a_damaged_file_is_fetched_again(place, weights):
    async def main():
        async with file_server.serve("127.0.0.1") as here:
            one, two = (published(place / "trainer", v, weights[v]) for v in (0, 1))
            here.offer(one)
            async with between(here, damage=[99]) as (url, _):
                said = await fetched(place / "server", one.label, url, here.key)
            assert contents(said["path"]) == contents(one.directory) and said["bytes"] > 6_000_000
            here.offer(two)
            async with between(here, damage=[99, 99]) as (url, _):  # the delta, twice: fetches the whole
                said = await fetched(place / "server", two.label, url, here.key)
            assert not said["delta"] and contents(said["path"]) == contents(two.directory)
            three = published(place / "trainer", 3, weights[3])
            here.offer(three)
            async with between(here, damage=[99, 99]) as (url, _):
                with pytest.raises(RuntimeError, match="model.safetensors: arrived damaged twice"):
                    await fetched(place / "server", three.label, url, here.key)

    run(main)


def test_a_delta_on_a_damaged_base_is_not_used(place, weights):
    async def main():
        async with file_server.serve("127.0.0.1") as here:
            one, two = (published(place / "trainer", v, weights[v]) for v in (0, 1))
            here.offer(one)
            path = (await fetched(place / "server", one.label, here.url, here.key))["path"]
            with open(f"{path}/model.safetensors", "r+b") as file:
                file.write(b"rot")
            here.offer(two)
            said = await fetched(place / "server", two.label, here.url, here.key)
            assert not said["delta"] and contents(said["path"]) == contents(two.directory)

    run(main)


def test_a_full_disk_leaves_nothing_behind(place, weights, monkeypatch):
    async def main():
        async with file_server.serve("127.0.0.1") as here:
            one = published(place / "trainer", 1, weights[0])
            here.offer(one)
            with monkeypatch.context() as patch:
                patch.setattr(http_source, "open", staging.Full, raising=False)
                with pytest.raises(OSError, match="No space left"):
                    await fetched(place / "server", one.label, here.url, here.key)
            assert os.listdir(place / "server") == []
            await fetched(place / "server", one.label, here.url, here.key)

    run(main)


def test_answers_of_the_file_server_are_verified(place, weights):
    one = published(place / "trainer", 1, weights[0])
    good = listing.files_of(place / "trainer/1")

    async def ask(here, label, files=None, key=None):
        here._listings[label] = files
        if files is None:
            del here._listings[label]
        await fetched(place / "server", label, here.url, key or here.key)

    async def main():
        async with file_server.serve("127.0.0.1") as here:
            here.offer(one)
            with pytest.raises(ValueError, match="HTTP 401: the key is missing or wrong"):
                await ask(here, one.label, key="another")
            with pytest.raises(ValueError, match="HTTP 404: no version 7-00000000 here"):
                await ask(here, "7-00000000")
            here.offer(Published(one.directory, "1-00000000"))
            with pytest.raises(RuntimeError, match="1-00000000 is the name of another manifest"):
                await ask(here, "1-00000000")
            with pytest.raises(RuntimeError, match="must name files once, without folders"):
                await ask(here, one.label, good | {"../x": good["config.json"]})
            with pytest.raises(RuntimeError, match="is malformed"):
                await ask(here, one.label, {"config.json": good["config.json"]})
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {here.key}"}) as http:
                for name in ("../secret", "%2e%2e%2fsecret", "other"):
                    async with http.get(f"{here.url}/{one.label}/{name}") as reply:
                        assert reply.status == 404
            here.offer(one)
            for path in (place / "trainer/1").iterdir():
                path.unlink()
            (place / "trainer/1").rmdir()
            here.offer(published(place / "trainer", 2, weights[0]))
            with pytest.raises(ValueError, match="HTTP 404"):
                await ask(here, one.label)

    run(main)


def test_a_file_server_that_is_busy_is_asked_again_and_junk_names_it(place, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.01)
    said = [(429, b"busy"), (503, b"busy"), (200, b'{"files": ' + b"9" * 5000 + b"}")]

    async def answer(request):
        status, body = said.pop(0)
        return aiohttp.web.Response(status=status, body=body)

    async def main():
        async with scripted.answering(answer) as url:
            with pytest.raises(RuntimeError, match=f"^{url}/1-00000000: not the answer of a file server .Exceeds the"):
                await fetched(place / "server", "1-00000000", url, "k")

    run(main)
    assert not said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stager_that_is_told_to_end_leaves_no_versions(tmp_path, number):
    """Those in progress neither, but whatever else is there."""
    for name in ("1-00000000", ".2-00000000.part", "other"):
        (tmp_path / "root" / name).mkdir(parents=True)
    with process(tmp_path / "root") as (_, own):
        own.send_signal(number)
        own.wait(20)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["other"]
    with process(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_folder_has_one_stager_at_a_time(tmp_path):
    with process(tmp_path / "root") as (_, first):
        with process(tmp_path / "root") as (at, second):
            assert at is None and second.wait(20) == 2
            assert "another stager has its versions in" in second.stderr.read()
        first.kill()
        first.wait(20)
        with process(tmp_path / "root") as (at, _):
            assert at
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_a_fleet_pushes_to_servers_that_do_not_see_our_files(place, weights, monkeypatch):
    monkeypatch.setenv(file_server.KEY, KEY)

    async def main():
        with process(place / "a") as (first, _), process(place / "b") as (second, own):
            async with serving(V0) as a, serving(V0) as b:
                async with client.connect([a.url, b.url], stagers=[first, second]) as fleet:
                    labels = []
                    for v in (1, 2):
                        one = published(place / "trainer", v, weights[v])
                        report = await push_weights(fleet, one.directory, one.label)
                        labels.append(one.label)
                        assert set(report.loaded) == {a.url, b.url} and report.stage_s > 0
                        assert report.stage_bytes > 6_000_000 if v == 1 else 0 < report.stage_bytes < 600_000
                    for server, folder in ((a, "a"), (b, "b")):
                        given = [body["model_path"] for path, body in server.calls if path.endswith("from_disk")]
                        assert given == [str(place / folder / label) for label in labels]
                        assert contents(given[1]) == contents(one.directory)
                    # a stager that dies: its server is skipped, and recovers with it
                    own.kill()
                    three = published(place / "trainer", 3, weights[3])
                    report = await push_weights(fleet, three.directory, three.label)
                    assert report.loaded == (a.url,) and "staging version" in report.failed[b.url]
                    assert states(fleet) == ["healthy", "stale"] and b.label == labels[1]
                    with process(place / "b", port=second.rpartition(":")[2]):
                        await until(lambda: states(fleet) == ["healthy", "healthy"])
                    assert b.label == three.label and controls(b)[-1] == "/continue_generation"
                    async with serving(V0) as c:
                        with pytest.raises(ValueError, match="a server has a stager where the others have one"):
                            await fleet.join(c.url)
                        await fleet.join(c.url, stager=first)
                        await until(lambda: states(fleet)[2] == "healthy")
                        assert c.label == three.label

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_stager_refuses_wrong_keys_and_malformed_requests(place, monkeypatch):
    async def main():
        with process(place / "server") as (url, _):
            async with aiohttp.ClientSession() as http:
                ask = {"label": "1-00000000", "sources": ["http://127.0.0.1:1"], "source_key": "k"}
                right = {"Authorization": f"Bearer {KEY}"}
                for body, headers, status, words in (
                    (ask, {"Authorization": "Bearer wrong"}, 401, "AREAX_STAGER_KEY"),
                    (ask, {}, 401, "AREAX_STAGER_KEY"),
                    (ask | {"label": "../../etc"}, right, 400, "a label must be"),
                    (ask | {"sources": [*ask["sources"], "file:///etc/passwd"]}, right, 400, "the source must be"),
                    (ask | {"sources": []}, right, 400, "the body must be an object with label, sources"),
                    (ask | {"sources": ["s3://bucket/prefix"]}, right, 400, "for a bucket start it with --bucket"),
                    ({}, right, 400, "the body must be an object"),
                    ([], right, 400, "the body must be a JSON object"),
                ):
                    async with http.post(f"{url}/stage", json=body, headers=headers) as reply:
                        assert reply.status == status and words in (await reply.json())["error"]["message"]
                for path, headers, wanted in (
                    ("/versions", {}, 401), ("/versions", right, {"versions": []}), ("/health", {}, {"status": "ok"}),
                ):  # fmt: skip
                    async with http.get(url + path, headers=headers) as reply:
                        assert wanted in (reply.status, await reply.json())

    run(main)


def test_a_wrong_key_of_a_stager_is_refused_before_the_run(place, monkeypatch):
    monkeypatch.setenv(file_server.KEY, KEY)

    async def connected(stagers):
        async with serving(V0) as a, client.connect([a.url], stagers=stagers, ready_s=5.0):
            pass

    async def main():
        with process(place / "server") as (url, _):
            await connected([url])
            monkeypatch.setenv(file_server.KEY, "wrong")
            with pytest.raises(ValueError, match=f"{url}/versions: HTTP 401: the key is wrong; set AREAX_STAGER_KEY"):
                await connected([url])
            monkeypatch.delenv(file_server.KEY)
            with pytest.raises(ValueError, match="the key is missing; set AREAX_STAGER_KEY"):
                await connected([url])

    run(main)


@pytest.mark.slow
def test_invalid_addresses_and_options(place):
    async def main():
        with pytest.raises(ValueError, match="stagers must be one per server, in the same order, got 1 for 2"):
            async with client.connect(["http://a", "http://b"], stagers=["http://c"]):
                pass

    run(main)
    with process(place / "server", key="") as (url, _):
        assert url  # no key is needed on loopback
    for arguments, words in (
        (["--root", str(place / "x"), "--host", "0.0.0.0"], "can be reached from other machines"),
        (["--root", "/proc/none"], "cannot write to"),
        (["--root", str(place / "x"), "--port", "99999"], "port must be from 0"),
    ):
        environment = {name: value for name, value in os.environ.items() if name != file_server.KEY}
        done = subprocess.run(
            [sys.executable, "-m", "areax.rollout.weights.stager", *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_listing_may_arrive_late_and_in_parts_but_from_nowhere_else(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.01)
    content, asked = {"files": {f"file-{i}": {"bytes": i} for i in range(100)}}, []

    async def parts(request):
        asked.append(request.path)
        if len(asked) <= 2:
            raise aiohttp.web.HTTPTooManyRequests(headers={"Retry-After": "0"}, text="busy")
        if len(asked) > 3:
            raise aiohttp.web.HTTPFound("http://127.0.0.2/elsewhere")
        response = aiohttp.web.StreamResponse()
        await response.prepare(request)
        text = json.dumps(content).encode()
        await response.write(text[:1000])
        await asyncio.sleep(0.05)  # so that the first part is read alone
        await response.write(text[1000:])
        return response

    async def main():
        async with scripted.answering(parts) as url, aiohttp.ClientSession() as http:
            source = http_source.HTTPSource(http, f"{url}/1-00000000")
            found = await fetch.persistently(url, lambda: source.listing("", ""))
            with pytest.raises(ValueError, match=r"HTTP 302: redirects to 'http://127.0.0.2/elsewhere', which is not"):
                await source.listing("", "")
        return found

    assert asyncio.run(main()) == content and len(asked) == 4
