"""Every server of ours under hostile input: sizes, times, bodies, origins. Real processes and sockets."""

import asyncio
import contextlib
import json
import socket

import fuzz
import hostile_servers
import pytest
from fuzz import Route
from starlette.responses import PlainTextResponse
from starlette.routing import Route as Handled

from areax.rollout.processes import http_limits as limits
from areax.rollout.processes import http_process
from areax.rollout.weights import file_server

MB = 2**20


@pytest.fixture(scope="module", params=hostile_servers.NAMES)
def server(request, tmp_path_factory):
    with hostile_servers.running(request.param, tmp_path_factory.mktemp(request.param)) as found:
        found.name = request.param
        yield found


def held(report, *, grown=50 * MB):
    assert not report.failures, report.failures
    assert report.slowest_s < 15.0, "/health: 0.5 s where nothing else runs; what hangs takes longer than any load"
    assert report.grown < grown


@pytest.mark.sweep
def test_hostile_requests_are_answered(server):
    held(fuzz.attack(server.port, server.process.pid, server.routes, 120, 0, warm=90, upkeep=server.upkeep))


@pytest.mark.sweep
@pytest.mark.long
def test_two_thousand_hostile_requests_a_server_are_answered(server):
    report = fuzz.attack(server.port, server.process.pid, server.routes, 2_000, 1, warm=300, upkeep=server.upkeep)
    held(report)
    assert report.sent == 2_300 and fuzz.ask(server.port, "GET", "/health")[0] in (200, 401, 503)


def ask(server, route: Route, **headers):
    """(status, JSON of the answer)."""
    body = fuzz.encoded(route.body) if route.method == "POST" else b""
    status, answer = fuzz.ask(server.port, route.method, route.path, body, route.headers | headers)
    return status, json.loads(answer or b"null")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://evil.example", "host": "evil.example"},  # a name that leads here (DNS rebinding)
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_pages_of_other_addresses_are_refused(server, headers):
    status, answer = ask(server, server.routes[0], **headers)
    assert status == 403 and "Origin" in answer["error"]["message"]


def test_a_page_of_the_server_itself_is_not_refused(server):
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}"):
        route = server.routes[-1]
        assert ask(server, route, host=host, origin=f"http://{host}", **{"sec-fetch-site": "same-origin"})[0] != 403


def test_errors_have_one_form(server):
    for route in (Route("GET", "/a/b/c"), Route("PATCH", server.routes[0].path), Route("DELETE", "/health")):
        status, answer = ask(server, route)
        assert status in (401, 404, 405) and isinstance(answer["error"]["message"], str), answer


def test_an_upgrade_to_websockets_is_answered(server):
    status, _ = fuzz.ask(server.port, "GET", "/health", b"", {"upgrade": "websocket", "connection": "upgrade"})
    assert status in (200, 401, 503)  # 503: paused by a request before


@contextlib.contextmanager
def sent(server, data):
    """A connection on which `data` was sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(data)
        yield sock


def test_an_endless_head_is_cut_off(server):
    with sent(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx: ") as sock:
        with pytest.raises(ConnectionError):
            for _ in range(500):
                sock.sendall(b"y" * 2**16)
    assert ask(server, server.routes[-1])[0] < 500


def test_a_body_that_is_too_large_is_refused_before_it_arrives(server):
    if server.name == "files":  # reads no bodies
        return
    route = next(route for route in server.routes if route.method == "POST")
    headers = "".join(f"{name}: {value}\r\n" for name, value in route.headers.items())
    head = f"POST {route.path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {10**9}\r\n\r\n"
    with sent(server, head.encode()) as sock:
        assert sock.recv(2**16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.sweep
@pytest.mark.long
def test_idle_connections_are_closed(server):
    """Those that never send a request, and those that stop in the middle of its head."""
    with sent(server, b"") as silent, sent(server, HALF) as stuck:
        assert silent.recv(1) == b"" and stuck.recv(1) == b""


# -- the same in this process, with short times --------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(**bounds):
    """Yields the port of a server that answers with 50 MB."""
    most = limits.Limits(**bounds)

    async def large(http):
        await http.body()
        return PlainTextResponse(bytes(50 * MB))

    app = limits.app([Handled("/large", large, methods=["GET", "POST"])], most)
    with http_process.bind("127.0.0.1", 0) as sock:
        async with http_process.running(http_process.server(app, most, lifespan="off"), sock):
            yield sock.getsockname()[1]


async def answer(port, data):
    """Everything received over a connection until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def run(main):
    asyncio.run(asyncio.wait_for(main(), 30))


HALF, WHOLE = b"GET /large HTTP/1.1\r\nhost: x\r\n", b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /large HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"


def test_slow_connections_are_closed():
    async def main():
        async with serving(head_s=0.2, body_s=0.2, idle_s=0.2) as port:
            silent, stuck, late = [answer(port, data) for data in (b"", HALF, POST)]
            assert await silent == b"" and await stuck == b""
            assert (await late).startswith(b"HTTP/1.1 408 ")
            assert len(await answer(port, WHOLE)) > 50 * MB  # and closed when nothing follows
            assert (await answer(port, WHOLE + HALF)).count(b"HTTP/1.1 200") == 1

    run(main)


def test_slow_connections_to_the_file_server_are_closed():
    async def main():
        async with file_server.serve("127.0.0.1", limits.Limits(head_s=0.2)) as files:
            port = int(files.url.rpartition(":")[2])
            assert await answer(port, b"") == b"" and await answer(port, HALF) == b""
            assert (await answer(port, WHOLE)).startswith(b"HTTP/1.1 401 ")

    run(main)


def test_more_connections_than_allowed_get_a_503():
    async def main():
        async with serving(connections=3) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert (await answer(port, WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))).startswith(
                b"HTTP/1.1 503 "
            )
            for _, writer in held:
                writer.close()

    run(main)


@pytest.mark.slow
def test_a_client_that_takes_no_data_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_process, "STALLED_S", 0.3)

    async def main():
        async with serving() as port:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.sendall(WHOLE)
                await asyncio.sleep(1.5)
                sock.settimeout(10)
                received = 0
                with contextlib.suppress(ConnectionError):
                    while data := await asyncio.to_thread(sock.recv, 2**20):
                        received += len(data)
                assert received < 50 * MB

    run(main)
