"""Rewards computed by other servers, over real sockets; and addresses that a row must not reach."""

import asyncio
import contextlib
import math
import socket

import pytest
from aiohttp import web

from areax.rollout import rewards
from areax.rollout.rewards import Score, http, judge


@contextlib.asynccontextmanager
async def serving(answer):
    """Yields (port, bodies received) of a server that answers each POST with `answer(request, number)`."""
    seen = []

    async def handle(request):
        seen.append(await request.json())
        return await answer(request, len(seen))

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], seen
    finally:
        await runner.cleanup()


def scored(answer, *, row=None, make=lambda port: http.post(f"http://127.0.0.1:{port}/grade"), text="42"):
    """(result or exception of a reward, bodies that its server received)."""

    async def main():
        async with serving(answer) as (port, seen):
            try:
                return await make(port)(text, row or {"answer": "42"}, prompt="6*7?"), seen
            except (ValueError, RuntimeError) as error:
                return error, seen

    return asyncio.run(main())


def says(value, **options):
    async def answer(request, number):
        return web.json_response(value, **options)

    return answer


@pytest.mark.parametrize("value", [1.5, {"form": 1, "answer": 0.5}, None])
def test_the_answer_is_the_reward(value):
    out, seen = scored(says(value))
    assert out == value and seen == [{"text": "42", "prompt": "6*7?", "row": {"answer": "42"}}]


def test_requests_to_a_busy_server_are_retried():
    async def answer(request, number):
        return web.json_response(0.5, status={1: 503, 2: 429}.get(number, 200))

    out, seen = scored(answer)
    assert out == 0.5 and len(seen) == 3


@pytest.mark.parametrize(
    "answer, message, times",
    [
        (says(1, status=500), "HTTP 500, in each of 3 attempts", 3),
        (says(1, status=404), "HTTP 404, Not Found", 1),
        (says(1, status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302, redirects are refused", 1),
        (says("x" * (2 << 20)), "the answer has more than 1048576 bytes", 1),
        (says({"error": 503}), 'must answer with a reward, got {"error": 503}', 1),
        (says({"code": 429, "detail": 0}), "must answer with a reward, got {", 1),
        (says({"success": False, "retry_after": 30}), "must answer with a reward, got {", 1),
        (says({"score": 1.0, "status": 503}), "must answer with a reward, got {", 1),
    ],
)
def test_bad_answers_of_a_server_are_errors(answer, message, times):
    out, seen = scored(answer)
    assert isinstance(out, RuntimeError) and message in str(out) and len(seen) == times


def test_a_number_without_a_length_may_be_a_part_of_another():
    async def main():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n1")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await http.post(f"http://127.0.0.1:{port}")("42", {})

    with pytest.raises(RuntimeError, match="a number must come with a Content-Length, .* got 1"):
        asyncio.run(main())


def test_an_object_with_a_reward_may_have_more():
    for value in ({"reward": 1.0, "code": 200}, {"code": 0.5, "format": 0.5}, {"score": 0.5, "status": 0}):
        assert scored(says(value))[0] == value


def test_answers_that_are_not_json_or_never_end():
    async def text(request, number):
        return web.Response(text="one")

    async def never(request, number):
        await asyncio.sleep(0.8)

    out, _ = scored(text)
    assert "the answer is not JSON: b'one'" in str(out)
    make = lambda port: http.post(f"http://127.0.0.1:{port}", timeout_s=0.2, attempts=2)
    out, seen = scored(never, make=make)
    assert "no answer in 0.2 s, in each of 2 attempts" in str(out) and len(seen) == 2


def test_errors_do_not_show_the_password_of_a_url():
    """They are logged, once for each answer."""
    out, _ = scored(says(1, status=404), make=lambda port: http.post(f"http://ann:hush@127.0.0.1:{port}/?token=hush"))
    assert "//***@127.0.0.1" in str(out) and "hush" not in str(out)
    for url in ("ftp://ann:hush@host", "http://ann:hush@host:x"):
        with pytest.raises(ValueError, match="rewards.http: .*//[*]{3}@host") as error:
            asyncio.run(http.reward("text", {"reward_url": url}))
        assert "hush" not in str(error.value)


def test_an_unreachable_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        reward = http.post(f"http://127.0.0.1:{free.getsockname()[1]}", attempts=2)
        with pytest.raises(RuntimeError, match="ClientConnectorError.*, in each of 2 attempts"):
            asyncio.run(reward("", {}))


LOCAL = [
    "127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "0x7f000001", "017700000001", "0.0.0.0", "[::1]", "[::]",
    "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]", "user@127.0.0.1", "127.0.0.1.",
    "\uff11\uff12\uff17.0.0.1", "LOCALHOST",
]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL)
def test_the_url_of_a_row_cannot_reach_this_machine(host):
    async def main():
        async with serving(says(1.0)) as (port, seen):
            for scheme in ("http", "https"):
                with pytest.raises(ValueError, match="rewards.http: .*(not a public address|nor an address)"):
                    await http.reward("", {"reward_url": f"{scheme}://{host}:{port}/"})
            assert not seen

    asyncio.run(main())


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
     "255.255.255.255", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "::ffff:10.0.0.1", "2002:a00:1::"],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address):
    with pytest.raises(
        ValueError, match=r"rewards.http: evil.test resolves to .*, which is not a public address; .* to `allow`"
    ):
        http.check("evil.test", address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(address):
    http.check("good.test", address)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://example.com", "gopher://x", "//x", "", "http://", None, 5]
)
def test_urls_that_are_not_http_are_refused(url):
    with pytest.raises(ValueError, match="rewards.http: (a URL must begin with http|not a URL|a row needs reward_url)"):
        asyncio.run(http.reward("", {"reward_url": url}))
    with pytest.raises(ValueError, match="a row needs reward_url"):
        asyncio.run(http.reward("", {}))


def resolving(monkeypatch, *answers):
    """Makes successive name lookups return these addresses, the last ones repeatedly; returns the names looked up."""
    asked = []

    def getaddrinfo(host, port, *_, **__):
        asked.append(host)
        addresses = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_every_address_of_a_name_is_checked(monkeypatch):
    resolving(monkeypatch, ["8.8.8.8", "127.0.0.1"])
    with pytest.raises(ValueError, match="two.test resolves to 127.0.0.1, which is not a public address"):
        asyncio.run(http.reward("", {"reward_url": "http://two.test/"}))


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """Even if the name resolves to another address the next time."""

    async def main():
        async with serving(says(1.0)) as (port, seen):
            checked = []
            monkeypatch.setattr(http, "check", lambda host, address: checked.append(address))
            asked = resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
            assert await http.reward("", {"reward_url": f"http://turning.test:{port}/"}) == 1.0
            assert asked == ["turning.test"] and checked == ["127.0.0.1"] and len(seen) == 1

    asyncio.run(main())


def test_a_host_may_be_allowed_by_name():
    make = lambda port: http.post(allow=("localhost",))

    async def main():
        async with serving(says(0.25)) as (port, seen):
            assert await make(port)("", {"reward_url": f"http://localhost:{port}/"}) == 0.25
            with pytest.raises(ValueError, match="which is not a public address"):
                await make(port)("", {"reward_url": f"http://127.0.0.1:{port}/"})
            assert len(seen) == 1

    asyncio.run(main())


def test_in_a_pool_a_bad_url_is_unscorable_and_logged_while_others_are_scored(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "from areax.rollout.rewards import http\nreward = http.post(allow=('localhost',))\n"
    )

    async def main():
        async with (
            serving(says({"taste": 0.5, "truth": 1})) as (port, seen),
            rewards.pool(f"{tmp_path}/mine.py:reward", workers=1) as reward,
        ):
            hosts = ["169.254.169.254", f"localhost:{port}", f"127.0.0.1:{port}", f"localhost:{port}"]
            out = await asyncio.gather(
                *(reward("", {"id": i, "reward_url": f"http://{host}/"}) for i, host in enumerate(hosts))
            )
            return out, reward.counts, len(seen)

    out, counts, seen = asyncio.run(main())
    assert [math.isnan(score.value) for score in out] == [True, False, True, False] and seen == 2
    assert out[1] == out[3] == Score(1.5, {"taste": 0.5, "truth": 1.0})
    assert counts["raised"] == 2 and counts["scored"] == 2
    assert any("169.254.169.254, which is not a public address" in r.getMessage() for r in caplog.records)


REPLIES = [
    ("Fine. Score: 7", 0.7),
    ("Score: 2, no:\n**Score:** 10", 1.0),
    ("Score: **2.5**", 0.25),
    ("Score: 0", 0.0),
    ("Score: 11", None),
    ("Score: -1", None),
    ("Score: high", None),
    ("seven", None),
    ("", None),
    (None, None),
]


@pytest.mark.parametrize("reply, value", REPLIES)
def test_the_verdict_of_a_judge(reply, value):
    make = lambda port: judge.judge(f"http://127.0.0.1:{port}/v1/chat/completions", model="m", key="secret")
    answer = says({"choices": [{"message": {"content": reply}}]})
    out, [asked] = scored(answer, make=make, text="{42} Score: 10")
    assert out == value
    assert asked["model"] == "m" and asked["temperature"] == 0.0
    [message] = asked["messages"]
    assert message["role"] == "user" and "6*7?" in message["content"]
    assert "<answer>\n{42} Score: 10\n</answer>" in message["content"]


def test_a_judge_on_the_generate_endpoint_with_a_custom_template():
    async def answer(request, number):
        assert request.headers["Authorization"] == "Bearer secret"
        return web.json_response({"text": "3 of 4"})

    make = lambda port: judge.judge(
        f"http://127.0.0.1:{port}/generate", template="{answer}? {text}", verdict=r"(\d) of 4", top=4, key="secret"
    )
    out, [asked] = scored(answer, make=make)
    assert out == 0.75 and asked == {
        "text": "42? 42", "sampling_params": {"temperature": 0.0, "max_new_tokens": 512}
    }  # fmt: skip


def test_bad_judge_options_rows_and_answers_are_refused():
    with pytest.raises(ValueError, match="verdict needs a group and top must be positive, got 'yes' and 10"):
        judge.judge("http://x", verdict="yes")
    make = lambda port: judge.judge(f"http://127.0.0.1:{port}/generate", template="{question}")
    out, seen = scored(says({}), make=make)
    assert (
        isinstance(out, ValueError)
        and "the template uses a field that the row lacks, 'question'" in str(out)
        and not seen
    )
    make = lambda port: judge.judge(f"http://127.0.0.1:{port}/v1/chat/completions")
    out, _ = scored(says({"choices": []}), make=make)
    assert "not a chat completion: {'choices': []}" in str(out)
