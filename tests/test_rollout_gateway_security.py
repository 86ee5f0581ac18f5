"""Security of the gateway: session isolation, keys, large and slow bodies, header floods, path tricks."""

import asyncio
import contextlib
import json
import logging
import signal

import aiohttp
import pytest
from gateways import CHAT, TOKENS, Place, online, served

from areax.rollout.gateway.server import serve
from areax.rollout.gateway.sessions import Limits
from areax.rollout.processes import http_limits


async def good(place):
    """Asserts that the gateway still serves."""
    place.engine.say("fine")
    status, answer = await place.request("POST", "/v1/chat/completions", json=CHAT)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "fine"


def test_sessions_are_isolated_from_each_other():
    engine, ended, options = online()

    async def test(place):
        _, mine = await place.request("POST", "/sessions", "the admin's")
        _, other = await place.request("POST", "/sessions", "the admin's")
        engine.say("secret")
        await place.request("POST", "/v1/chat/completions", other["api_key"], json=CHAT)
        for method, tail, more in (
            ("GET", "/trajectories", {}),
            ("POST", "/reward", {"json": {"value": 1}}),
            ("DELETE", "", {}),
        ):
            for key, status in (
                (mine["api_key"], 404),
                (place.key, 404),
                ("", 401),
                ("guess", 401),
                (other["id"], 401),
            ):
                assert (await place.request(method, f"/sessions/{other['id']}{tail}", key, **more))[0] == status
            unknown = await place.request(method, f"/sessions/{'0' * 16}{tail}", mine["api_key"], **more)
            assert unknown == await place.request(method, f"/sessions/{other['id']}{tail}", mine["api_key"], **more)
        for key in (mine["api_key"], "", "the admin'", "the admin's ", "The admin's"):
            status, _ = await place.request("POST", "/sessions", key)
            assert status == (
                200 if key == "the admin's " else 401
            )  # whitespace around a header's value is not part of it
        assert not ended and not place.session.interactions
        await good(place)

    served(test, **options)


def test_the_admin_key_and_the_name_of_a_session_are_its_key():
    """For clients that are shared by episodes; no other key may name a session."""

    async def test(place):
        other = Place(place.gateway, place.engine)
        for one in (place, other, place):
            place.engine.say("fine")
            named = {"X-Session-ID": one.session.id}
            status, _ = await place.request("POST", "/v1/chat/completions", "the admin's", json=CHAT, headers=named)
            assert status == 200
        assert [len(one.session.interactions) for one in (place, other)] == [2, 1]
        for key, name, status in (
            ("the admin's", "guess", 404), ("the admin's", "", 404), ("guess", other.session.id, 401)
        ):  # fmt: skip
            named = {"X-Session-ID": name}
            got, answer = await place.request("POST", "/v1/chat/completions", key, json=CHAT, headers=named)
            assert got == status
        place.engine.say("mine")
        named = {"X-Session-ID": other.session.id}
        assert (await place.request("POST", "/v1/chat/completions", json=CHAT, headers=named))[0] == 200
        assert [len(one.session.interactions) for one in (place, other)] == [3, 1]  # a session's key is its own

    served(test, admin_key="the admin's")


def test_without_an_admin_key_there_is_no_admin_access():
    async def test(place):
        for key in ("", place.key):
            assert (await place.request("POST", "/sessions", key))[0] == 401
        await good(place)

    served(test)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_non_loopback_address_needs_an_admin_key(host):
    async def run():
        async with serve(TOKENS, host=host):
            pass

    with pytest.raises(ValueError, match="needs an admin_key"):
        asyncio.run(run())


def test_serving_does_not_change_signal_handlers():
    before = signal.getsignal(signal.SIGTERM)

    async def test(place):
        assert signal.getsignal(signal.SIGTERM) == before

    served(test)


def test_bad_options():
    async def run(**options):
        async with serve(TOKENS, **options) as gateway:
            async with serve(TOKENS, port=int(gateway.url.rpartition(":")[2])):
                pass

    for options, words in (
        ({"style": "odd"}, "style must be"),
        ({"port": -1}, "port must be"),
        ({}, "is in use; choose another"),
    ):
        with pytest.raises(ValueError, match=words):
            asyncio.run(run(**options))


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb(declared, caplog):
    async def pieces():
        for _ in range(1600):
            yield b" " * 65536

    async def test(place):
        size = {"content-length": str(1600 * 65536)} if declared else {}
        async with aiohttp.ClientSession() as http:
            with contextlib.suppress(aiohttp.ClientOSError, ConnectionError):  # may be closed while sending
                headers = {"authorization": f"Bearer {place.key}", **size}
                url = f"{place.gateway.url}/v1/chat/completions"
                async with http.post(url, data=pieces(), headers=headers) as reply:
                    assert reply.status == 413
        await good(place)
        refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert refused == ["refused: POST '/v1/chat/completions': 413 HTTPException"]

    with caplog.at_level(logging.WARNING):
        served(test, limits=Limits(http=http_limits.Limits(body_bytes=2**20)))


async def raw(place, sent, *, wait=5.0):
    """Sends bytes over a new connection, and returns everything received until the server closes it."""
    reader, writer = await asyncio.open_connection(*place.gateway.url.removeprefix("http://").split(":"))
    try:
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), wait)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_slow_requests(caplog):
    async def test(place):
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.key}\r\n".encode()
        late = await raw(place, head + b"content-length: 100\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 408")
        assert await raw(place, head) == b""  # headers that never end
        assert await raw(place, b"") == b""
        assert place.key not in caplog.text
        await good(place)

    with caplog.at_level(logging.WARNING):
        served(test, limits=Limits(http=http_limits.Limits(body_s=0.2, head_s=0.2)))


def test_a_body_that_arrives_after_its_session_was_closed_is_refused():
    async def test(place):
        reader, writer = await asyncio.open_connection(*place.gateway.url.removeprefix("http://").split(":"))
        body = json.dumps({"model": "m", "prompt": [5], "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.key}\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        await writer.drain()
        await asyncio.sleep(0.2)
        await place.gateway.close(place.key)
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 409")
        writer.close()
        assert place.session.interactions == []

    served(test)


def test_header_floods():
    async def test(place):
        line = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        many = await raw(place, line + b"".join(b"x-%d: y\r\n" % i for i in range(150)) + b"\r\n")
        assert many.startswith(b"HTTP/1.1 431")
        long = await raw(place, line + b"x: " + b"y" * 70_000 + b"\r\n\r\n")
        assert long.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        endless = await raw(place, line + b"x: " + b"y" * 5_000_000)
        assert not endless or endless.startswith(b"HTTP/1.1 400")
        assert (await raw(place, b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 400")
        await good(place)

    served(test)


def test_path_tricks():
    async def test(place):
        for id in (
            "../../etc/passwd",
            "%2e%2e%2fetc%2fpasswd",
            "%00",
            "a" * 5000,
            "%ff",
            "*",
            "..",
            f"{place.session.id}/..",
        ):
            line = f"GET /sessions/{id}/trajectories HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            answer = await raw(place, f"{line}authorization: Bearer {place.key}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 404"), id
        for bad in (b"{", b"\xff", b'{"a": NaN}', b"[" * 200_000, b'{"messages": "\\ud800"}'):
            status, answer = await place.request("POST", "/v1/chat/completions", data=bad)
            assert status == 400 and answer["error"]["param"] == "body"
        assert (await place.request("GET", "/v1/chat/completions"))[0] == 405
        await good(place)

    served(test)
