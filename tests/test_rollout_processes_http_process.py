"""Our HTTP servers: binding addresses, running inside a program, and shutting down as a process."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from areax.adapters import tokenizer
from areax.rollout.engine import server as engine
from areax.rollout.gateway import server as gateway
from areax.rollout.processes import http_process
from areax.rollout.sandbox import remote
from areax.rollout.weights import stager


async def begin(tokens, port):
    async with gateway.serve(tokens, port=port):
        pass


SERVERS = {
    "serve": lambda root, port: engine.serve(str(root), port=port),
    "gateway": lambda root, port: asyncio.run(begin(tokenizer.byte_level(), port)),
    "stager": lambda root, port: stager.serve(root=str(root), port=port),
    "sandbox": lambda root, port: remote.serve(port=port),
}


@pytest.mark.parametrize("name", SERVERS)
def test_all_servers_give_the_same_errors_for_an_unusable_address(tmp_path, name):
    what = name if name in ("stager", "sandbox") else "serve"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        words = f"^{what}: port {port} of 127.0.0.1 is in use; choose another, or 0 for any free port$"
        with pytest.raises(ValueError, match=words):
            SERVERS[name](tmp_path, port)
    with pytest.raises(ValueError, match=f"^{what}: port must be from 0 .any free port. to 65535, got 70000$"):
        SERVERS[name](tmp_path, 70000)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("127.0.0.1.example.com", False),
        ("", False),
    ],
)
def test_loopback(host, own):
    assert http_process.loopback(host) is own
    if own:
        return
    with pytest.raises(ValueError, match="sandbox: .* can be reached from other machines; set THE_KEY"):
        http_process.bind_guarded(host, 0, key=None, variable="THE_KEY", what="sandbox")


def test_no_server_accepts_an_empty_key(tmp_path):
    words = "a key must be one line of printable ASCII, .* got an empty one"
    with pytest.raises(ValueError, match=f"^serve: {words}"):
        engine.serve(str(tmp_path), port=0, api_key="")
    with pytest.raises(ValueError, match=f"^stager: {words}"):
        stager.serve(root=str(tmp_path), port=0, key="")
    with pytest.raises(ValueError, match=f"^sandbox: {words}"):
        remote.serve(port=0, key="")


def test_address():
    assert http_process.address(("127.0.0.1", 5)) == "http://127.0.0.1:5"
    assert http_process.address(("::1", 5, 0, 0)) == "http://[::1]:5"


def app():
    return Starlette(routes=[Route("/", lambda http: PlainTextResponse("here"))])


def test_a_server_inside_a_program_runs_until_the_block_ends():
    before = signal.getsignal(signal.SIGTERM)

    async def main():
        with contextlib.closing(http_process.bind("127.0.0.1", 0)) as sock:
            url = http_process.address(sock.getsockname())
            async with http_process.running(http_process.server(app(), timeout_graceful_shutdown=1), sock):
                assert signal.getsignal(signal.SIGTERM) == before
                assert await asyncio.to_thread(lambda: urllib.request.urlopen(url).read()) == b"here"
            with pytest.raises(OSError):
                await asyncio.to_thread(urllib.request.urlopen, url)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_process_shuts_down_cleanly_on_a_signal(number):
    program = (
        "from areax.rollout.processes import http_process as own; from starlette.applications import Starlette\n"
        "sock = own.bind('127.0.0.1', 0)\n"
        "own.serve(Starlette(), sock, 'ready', ending=lambda: print('ending', flush=True))\n"
        "print('ended')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "ending\nended\n"
        assert process.wait(20) == 0
