"""Fleets whose servers come and go: listed in a file, behind a name, or registered at the run's own route."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import aiohttp
import pytest
import staging
import tiny
from scripted import V0, V1, V2, check, run, serving, states, until

from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet import members
from areax.rollout.fleet.push import push_weights
from areax.rollout.processes import joining, keys
from areax.rollout.weights import file_server


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(members, "EVERY_S", 0.02)


def listing(path, *servers):
    path.write_text("# servers\n" + "".join(f"{server.url}/  # one\n\n" for server in servers))


def urls(fleet):
    return sorted(server.url for server in fleet.servers)


def test_servers_follow_a_file_and_new_ones_load_the_newest_version_first(tmp_path):
    file = tmp_path / "servers"

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            a, b, fixed = [await stack.enter_async_context(serving()) for _ in range(3)]
            listing(file, a)
            fleet = await stack.enter_async_context(client.connect([fixed.url, f"@{file}"]))
            await push_weights(fleet, tmp_path, V1)
            listing(file, b)
            await until(lambda: urls(fleet) == sorted([fixed.url, b.url]) and states(fleet) == ["healthy"] * 2)
            assert b.label == V1 and not b.generated()
            done = await asyncio.gather(*(fleet.generate([i], max_new_tokens=2) for i in range(8)))
            assert {one.info["url"] for one in done} == {fixed.url, b.url} and all(
                one.version == [1, 1] for one in done
            )
            assert (fleet.counts["joined"], fleet.counts["left"]) == (1, 1)

    run(main)


def test_a_server_that_leaves_ends_its_requests_first(tmp_path):
    file = tmp_path / "servers"

    async def main():
        async with serving(step_s=0.02) as a, serving() as b:
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                task = asyncio.create_task(fleet.generate([1], max_new_tokens=20))
                await until(lambda: a.load)
                listing(file, b)
                await until(lambda: urls(fleet) == [b.url])
                done = await task
                check(done, [1], 20)
                assert done.info["url"] == a.url and a.aborts == 0

    run(main)


def test_requests_and_pushes_wait_while_there_is_no_server(tmp_path, caplog):
    file = tmp_path / "servers"

    async def main():
        async with serving() as a, serving() as b:
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                await push_weights(fleet, tmp_path, V1)
                listing(file)
                await until(lambda: not fleet.servers)
                asked = asyncio.create_task(fleet.generate([1], max_new_tokens=3))
                pushed = asyncio.create_task(push_weights(fleet, tmp_path, V2))
                await until(lambda: "1 requests and a push wait" in caplog.text)
                assert fleet.version == 1 and not asked.done() and not pushed.done()
                listing(file, b)
                done = await asked
                check(done, [1], 3)
                assert done.info["url"] == b.url and set(done.version) <= {1, 2}
                assert (await pushed).loaded == (b.url,)

    run(main)


def test_a_run_starts_once_the_first_listed_server_answers(tmp_path, caplog):
    file = tmp_path / "servers"
    file.write_text("")

    async def main():
        async with serving() as a:
            started = asyncio.create_task(asyncio.wait_for(connected(f"@{file}"), 50))
            await until(lambda: "names none yet" in caplog.text)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                file.write_text(f"http://127.0.0.1:{free.getsockname()[1]}\n{a.url}\n")
            assert await started == [a.url]

    async def connected(entry):
        async with client.connect([entry], ready_s=0.2) as fleet:
            return urls(fleet)

    run(main)


@pytest.mark.slow
def test_a_stager_that_has_moved_is_used_where_it_is_now(tmp_path, monkeypatch):
    monkeypatch.setenv(file_server.KEY, staging.KEY)
    file = tmp_path / "servers"

    async def main():
        async with serving() as a:
            with staging.process(tmp_path / "one") as (one, own), staging.process(tmp_path / "two") as (two, _):
                file.write_text(f"{a.url} {one}\n")
                async with client.connect([f"@{file}"]) as fleet:
                    own.kill()
                    file.write_text(f"{a.url} {two}/\n")
                    await until(lambda: fleet.servers and fleet.servers[0].stager.url == two)
                    (tmp_path / "trainer").mkdir()
                    version = staging.published(tmp_path / "trainer", 1, b"weights")
                    assert (await push_weights(fleet, version.directory, version.label)).loaded == (a.url,)
                    assert fleet.counts["joined"] == fleet.counts["left"] == 1

    run(main)


def test_servers_that_are_gone_hold_up_no_other(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(members, "AT_A_TIME", 1)
    file = tmp_path / "servers"

    async def main():
        async with serving() as a, serving() as b:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                gone = [f"http://127.0.0.1:{free.getsockname()[1]}/{i}" for i in range(50)]
                file.write_text("\n".join([*gone, a.url]))
                async with client.connect([f"@{file}"]) as fleet:
                    assert urls(fleet) == [a.url]
                    file.write_text("\n".join([*gone, a.url, b.url]))
                    await until(lambda: len(fleet.servers) == 2)
                    assert f"{gone[49]}: cannot connect ([Errno 111] " in caplog.text

    run(main)


@pytest.mark.parametrize("how", ["pipe", "endless", "folder"])
def test_what_is_no_file_any_more_changes_nothing_and_is_named(tmp_path, caplog, how):
    file = tmp_path / "servers"

    async def main():
        async with serving() as a, serving() as b:
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                file.unlink()
                {"pipe": os.mkfifo, "endless": lambda x: x.symlink_to("/dev/zero"), "folder": os.mkdir}[how](file)
                await until(lambda: "keeps the servers that it had" in caplog.text and "regular file" in caplog.text)
                file.rmdir() if how == "folder" else file.unlink()
                listing(file, b)
                await until(lambda: urls(fleet) == [b.url])

    run(main)


def test_one_server_in_several_spellings_is_one(tmp_path, caplog):
    file = tmp_path / "servers"

    async def main():
        async with serving() as a:
            other = a.url.replace("127.0.0.1", "localhost")
            file.write_text(f"\ufeff{other}/\n{a.url}\n{a.url.replace('http', 'HTTP')}/.\n", encoding="utf-8")
            async with client.connect([f"@{file}"]) as fleet:
                assert len(fleet.servers) == 1
                with pytest.raises(ValueError, match="is in the fleet already"):
                    await fleet.join(other)
            with pytest.raises(ValueError, match="one or more different servers"):
                async with client.connect([a.url, other]):
                    pass
            async with client.connect([other, f"@{file}"]) as fleet:
                await asyncio.sleep(0.1)
                assert len(fleet.servers) == 1

    run(main)


def test_a_push_without_a_server_ends_and_says_why(tmp_path):
    async def main():
        async with serving() as a:
            listing(tmp_path / "servers", a)
            async with client.connect([f"@{tmp_path}/servers"], timeout_s=1.0) as fleet:
                listing(tmp_path / "servers")
                await until(lambda: not fleet.servers)
                with pytest.raises(ServerError, match="push: no server to push to in 1 s"):
                    await push_weights(fleet, tmp_path, V1)

    run(main)


@pytest.mark.parametrize("text", ["{a}\nnonsense\n", "{a} http://10.0.0.1:1 more\n", "http://ann:hush@10.0.0.1:80\n"])
def test_a_file_that_is_damaged_changes_nothing(tmp_path, caplog, text):
    file = tmp_path / "servers"

    async def main():
        async with serving() as a:
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                file.write_text(text.format(a=a.url))
                await until(lambda: "keeps the servers that it had" in caplog.text)
                file.unlink()
                await until(lambda: "No such file" in caplog.text)
                await asyncio.sleep(0.1)
                assert urls(fleet) == [a.url] and "hush" not in caplog.text

    run(main)


def test_a_file_that_is_empty_for_a_moment_changes_nothing(tmp_path):
    async def main():
        async with serving() as a:
            reads = [[members.Member(a.url)], [], [members.Member(a.url)], [members.Member(a.url)], [], []]
            lists = members.Lists({"it": lambda: asyncio.sleep(0, reads.pop(0))})
            seen = [await lists.read(at_once=True)] + [await lists.read() for _ in range(5)]
            assert [len(one) for one in seen] == [1, 1, 1, 1, 1, 0]

    run(main)


def test_a_name_stands_for_all_its_addresses(monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        found = ["127.0.0.2", "127.0.0.1", "::1", "127.0.0.1"]

        async def getaddrinfo(host, port, **_):
            assert (host, port) == ("servers.local", 30000)
            return [(None, None, None, "", (address, port)) for address in found]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        made = await members.reader("dns+http://servers.local:30000")()
        assert [url for url, _ in made] == ["http://127.0.0.1:30000", "http://127.0.0.2:30000", "http://[::1]:30000"]

    run(main)


def test_a_name_that_resolves_no_longer_keeps_its_servers(caplog):
    async def main():
        async with serving() as a:
            port = a.url.rpartition(":")[2]
            async with client.connect([f"dns+http://localhost:{port}"]) as fleet:  # ::1, if it has it, does not answer
                assert f"http://127.0.0.1:{port}" in urls(fleet)
                lists = members.Lists({"x": members.reader("dns+http://nowhere.invalid:1")})
                assert await lists.read() == [] and "keeps the servers" in caplog.text

    run(main)


def address(server):
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_servers_register_and_leave_with_a_key(monkeypatch):
    monkeypatch.setenv(keys.FLEET, "secret")
    at = f"http://127.0.0.1:{free_port()}"

    async def main():
        async with serving() as a, serving() as b, aiohttp.ClientSession() as http:

            async def ask(method, body=None, key="secret"):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.request(method, f"{at}/servers", json=body, headers=headers) as reply:
                    return reply.status, await reply.json()

            async with client.connect([a.url, f"join+{at}"]) as fleet:
                for key in ("", "secre"):
                    assert (await ask("POST", {"url": b.url}, key))[0] == 401
                for body in (
                    {}, {"url": 1}, {"url": b.url, "for_s": 0}, {"url": b.url, "for_s": 10**400}, {"url": "@x"},
                    {"url": b.url, "fast": True}, {"url": "http://a..b:1"}, {"url": "http://127.0.0.1:1/\n"},
                ):  # fmt: skip
                    assert (await ask("POST", body))[0] == 400, body
                assert await ask("POST", {"url": b.url}) == (200, {"servers": [{"url": b.url, "stager": ""}]})
                await until(lambda: urls(fleet) == sorted([a.url, b.url]))
                other = b.url.replace("127.0.0.1", "LOCALHOST")
                assert await ask("DELETE", {"url": other}) == (200, {"servers": []})
                await until(lambda: urls(fleet) == [a.url])
                await ask("POST", {"url": b.url, "for_s": 0.2})
                await until(lambda: len(fleet.servers) == 2)
                await until(lambda: urls(fleet) == [a.url])  # it did not say again that it stays

    run(main)


def test_a_server_registers_itself_before_the_run_starts_or_after_and_leaves(monkeypatch, caplog):
    monkeypatch.setattr(joining, "AGAIN_S", 0.05)
    monkeypatch.setenv(keys.FLEET, "secret")
    at = f"http://127.0.0.1:{free_port()}"

    async def main():
        async with serving() as a, serving() as b:
            with joining.joined(at, a.url.replace("http", "HTTP")) as leaving:
                await until(lambda: f"{at}: does not take this server in" in caplog.text)
                async with client.connect([f"join+{at}", b.url]) as fleet:
                    await until(lambda: urls(fleet) == sorted([a.url, b.url]))
                    assert f"{at}: has taken in {a.url}" in caplog.text
                    leaving.set()
                    await until(lambda: urls(fleet) == [b.url])

    run(main)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: {other}/servers\r\nContent-Length: 0\r\n\r\n", "HTTP Error 302"),
        (b"garbage\r\n\r\n", "does not take this server in: garbage"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "its answer is not that of a run"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"servers": []}', "it does not list this server"),
    ],
)
def test_who_is_no_run_gets_no_key_and_is_asked_again(monkeypatch, caplog, answer, why):
    monkeypatch.setattr(joining, "AGAIN_S", 0.05)
    monkeypatch.setenv(keys.FLEET, "secret")

    async def main():
        asked, strayed = [], []

        async def answering(reader, writer):
            asked.append(await reader.readuntil(b"}"))
            writer.write(answer.replace(b"{other}", there.encode()))
            writer.close()

        async with contextlib.AsyncExitStack() as stack:
            other = await asyncio.start_server(lambda *_: strayed.append(1), "127.0.0.1", 0)
            there = address(other)
            own = await asyncio.start_server(answering, "127.0.0.1", 0)
            stack.callback(other.close), stack.callback(own.close)
            with joining.joined(address(own), "http://127.0.0.1:1"):
                await until(lambda: len(asked) > 2)
        assert why in caplog.text and not strayed and all(b"Bearer secret" in one for one in asked)

    run(main)


@pytest.mark.slow
def test_a_real_server_joins_works_and_leaves(tmp_path, monkeypatch):
    monkeypatch.delenv(keys.FLEET, raising=False)
    tiny.model(tmp_path / "model")
    at = f"http://127.0.0.1:{free_port()}"

    async def main():
        words = [sys.executable, "-m", "areax", "serve", str(tmp_path / "model"), "--context", "64", "--port", "0"]
        with subprocess.Popen([*words, "--join", at], stdout=subprocess.PIPE, text=True) as process:
            try:
                url = process.stdout.readline().split()[0]
                async with client.connect([f"join+{at}"]) as fleet:
                    assert urls(fleet) == [url] and (await fleet.generate([1, 2], max_new_tokens=3)).tokens
                    process.terminate()
                    await until(lambda: not fleet.servers)
                assert process.wait(30) == 0
            finally:
                process.kill()

    run(main)


def test_the_route_is_for_this_machine_unless_it_has_a_key(monkeypatch):
    monkeypatch.delenv(keys.FLEET, raising=False)

    async def main():
        with pytest.raises(ValueError, match="0.0.0.0 can be reached from other machines; set AREAX_FLEET_KEY"):
            async with client.connect([f"join+http://0.0.0.0:{free_port()}"]):
                pass

    run(main)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("@nowhere", "@nowhere must name a file"),
        ("dns+http://name", r"must be dns\+http://HOST:PORT, got 'dns\+http://name'"),
        ("join+http://127.0.0.1:1/x", r"must be join\+http://HOST:PORT"),
        ("dns+ftp://name:1", "must be an address such as"),
    ],
)
def test_lists_that_cannot_be_are_refused(entry, why):
    async def main():
        with pytest.raises(ValueError, match=why):
            async with client.connect([entry]):
                pass

    run(main)


def test_a_key_that_all_listed_servers_refuse_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("AREAX_SERVER_KEY", raising=False)

    async def main():
        async with serving(key="secret") as a:
            listing(tmp_path / "servers", a)
            with pytest.raises(ValueError, match="the key is missing; set AREAX_SERVER_KEY"):
                async with client.connect([f"@{tmp_path}/servers"]):
                    pass

    run(main)


def test_a_server_without_seeds_or_with_other_weights_is_named_and_gets_no_work(tmp_path, caplog):
    file = tmp_path / "servers"

    async def main():
        async with serving(seeded=True) as a, serving() as unseeded, serving("default", seeded=True) as other:
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                listing(file, a, unseeded, other)
                await until(lambda: "honours no seed" in caplog.text and "has weights 'default'" in caplog.text)
                assert urls(fleet) == [a.url] and fleet.seeded and fleet.version == 0
                await push_weights(fleet, tmp_path, V1)
                await until(lambda: len(fleet.servers) == 2 and states(fleet) == ["healthy"] * 2)
                assert (other.label, unseeded.label) == (V1, V0)

    run(main)


def test_a_server_of_another_model_is_named_where_nothing_is_pushed(tmp_path, caplog):
    file = tmp_path / "servers"

    async def main():
        async with serving("default") as a, serving("default") as b, serving("default") as c:
            a.source, b.source, c.source = "/models/small/", "/elsewhere/small", "/models/large"
            listing(file, a)
            async with client.connect([f"@{file}"]) as fleet:
                listing(file, a, b, c)
                await until(lambda: len(fleet.servers) == 3)
                [said] = [line for line in caplog.messages if "different ones" in line]
                assert said.startswith(f"{c.url}: serves 'large', the first server 'small'; unless")

    run(main)


def test_in_a_fleet_of_both_kinds_only_servers_that_honour_seeds_get_one():
    async def main():
        async with serving(seeded=True) as a, serving() as b, client.connect([a.url, b.url], concurrency=2) as fleet:
            assert not fleet.seeded
            await asyncio.gather(*(fleet.generate([i]) for i in range(4)))
            seeds = [[body["sampling_params"].get("sampling_seed") for body in one.generated()] for one in (a, b)]
            assert len({*seeds[0]}) == len(seeds[0]) > 0 and None not in seeds[0] and {*seeds[1]} == {None}

    run(main)


def test_the_last_server_of_a_fleet_without_lists_does_not_leave():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            with pytest.raises(ValueError, match="leave: must name one of several servers"):
                await fleet.leave(a.url)
        with pytest.raises(ServerError, match="no usable generation server"):
            fleet.servers.clear()
            await fleet.generate([1])

    run(main)
