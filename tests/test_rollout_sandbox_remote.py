"""A sandbox server in its own process: what it runs, what it refuses, and that it keeps serving."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import uvicorn

from areax.rollout import sandbox
from areax.rollout.sandbox import Result, remote, supervisor
from areax.rollout.sandbox.remote import KEY, connect
from areax.rollout.workflows import tools

if sys.platform != "linux":
    pytest.skip("sandboxes need Linux", allow_module_level=True)


@contextlib.contextmanager
def server(*arguments, key="secret"):
    command = [sys.executable, "-m", "areax.rollout.sandbox.remote", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != KEY} | ({KEY: key} if key else {})
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            found = re.match(r"(http://\S+) ", process.stdout.readline())
            yield found and found.group(1), process
        finally:
            process.terminate()
            process.communicate(timeout=20)


@pytest.fixture(scope="module")
def url():
    with server() as (url, _):
        yield url


def remotely(url, code, key="secret", **options):
    async def run():
        async with connect(url, key=key) as box:
            return await box.run_python(code, **options)

    return asyncio.run(run())


def posted(url, body, key="secret"):
    """(status, answer) of a raw request, as our client would never send it."""
    request = urllib.request.Request(f"{url}/run", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def alive(url):
    with urllib.request.urlopen(f"{url}/health") as answer:
        return json.load(answer)


def test_a_program_is_run(url):
    code = "import sys\nprint(input(), 'é')\nprint('no', file=sys.stderr)\nsys.exit(3)"
    assert remotely(url, code, stdin="ü\n") == Result("ü é\n", "no\n", 3, "")
    assert remotely(url, "import time; time.sleep(9)", timeout_s=0.3).why == "wall"
    assert alive(url)["mode"] == sandbox.isolation().mode


def test_the_python_tool_runs_on_the_server(url):
    async def run():
        async with connect(url, key="secret") as box:
            return await tools.call([tools.python_tool(box, timeout_s=5)], "python", '{"code": "print(6 * 7)"}')

    assert asyncio.run(run()) == "42"


def test_the_server_keeps_serving_during_and_after_attacks(url):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    codes = [bomb, "bytearray(10 * 2**30)", "while True: print('x' * 999)"]

    async def all_at_once():
        async with connect(url, key="secret") as box:
            *results, last = await asyncio.gather(*(box.run_python(code) for code in [*codes, "print(1)"]))
        return [result.why for result in results], last

    assert asyncio.run(all_at_once()) == (["processes", "memory", "output"], Result("1\n", "", 0, ""))
    code = (
        "import glob\nfor one in glob.glob('/proc/*/environ'):\n    try: print(open(one).read())\n    except OSError: 0"
    )
    read = remotely(url, code, output_bytes=2**20).stdout
    assert (f"{KEY}=secret" in read) != sandbox.isolation().environment
    assert alive(url)


@pytest.mark.parametrize("key", ["", "Secret", "secret ", "é", "secret" * 1000])
def test_a_wrong_key_is_refused(url, key):
    with pytest.raises(RuntimeError, match="answered 401: the key is missing or wrong"):
        remotely(url, "print(1)", key=key)


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "Expecting value"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b"{}", "must be strings"),
        (b'{"code": 1}', "must be strings"),
        (b'{"code": "", "limits": []}', "limits an object"),
        (b'{"code": "", "path": "/"}', "must be an object with code"),
        (b'{"code": "", "limits": {"wall": 1}}', "files_bytes, processes, got 'wall'"),
        (b'{"code": "", "limits": {"timeout_s": "1"}}', "timeout_s must be a positive number"),
        (b'{"code": "", "limits": {"timeout_s": NaN}}', "NaN is not JSON"),
        (b'{"code": "", "limits": {"timeout_s": 1e9}}', "timeout_s must be at most 60 here"),
        (b'{"code": "", "limits": {"cpu_s": 61}}', "cpu_s must be at most 60 here"),
        (b'{"code": "", "limits": {"memory_bytes": 1099511627776}}', "memory_bytes must be at most"),
    ],
)
def test_a_wrong_body_is_refused(url, body, message):
    status, said = posted(url, body)
    assert status == 400 and message in said["error"]["message"]


def test_limits_refused_by_the_server_are_value_errors(url):
    with pytest.raises(ValueError, match="timeout_s must be at most 60 here, got 61"):
        remotely(url, "", timeout_s=61)
    with pytest.raises(ValueError, match="timeout_s must be a positive number"):
        remotely(url, "", timeout_s=-1)


def test_a_large_body_is_refused_before_it_is_read(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = "POST /run HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nContent-Length: 100000000\r\n\r\n"
        sock.sendall(head.encode())
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 10**8:
                sent += sock.send(b"x" * 2**16)
        with contextlib.suppress(ConnectionError):
            assert b" 413 " in sock.recv(100)
    assert sent < 5 * 10**7
    assert alive(url)


def test_other_paths_are_not_found(url):
    for path in ("/", "/run/..", "/../etc/passwd", "/health/x"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url + path)
        caught.value.close()
        assert caught.value.code == 404


def test_an_unreachable_server_is_an_error():
    with pytest.raises(RuntimeError, match="no answer from http://127.0.0.1:1"):
        remotely("http://127.0.0.1:1", "print(1)")


@pytest.mark.parametrize(
    "body, why",
    [
        (b"[]", r"no answer from http.* \(HTTP 200\): TypeError"),
        (
            b'{"stdout": "", "stderr": "", "code": "0", "why": "", "seconds": 1}',
            "no answer from http.*: TypeError: not the",
        ),
        (b'{"stdout": ""}', "no answer from http.*: KeyError"),
        (b"[" * 100_000, "no answer from http.*: RecursionError"),
        (b" " * (remote.LARGEST + 1), f"has more than {remote.LARGEST} bytes"),
    ],
)
def test_an_answer_that_is_not_of_a_sandbox_server_is_an_error(body, why):
    async def run():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            async with connect(f"http://127.0.0.1:{port}") as box:
                await box.run_python("")

    with pytest.raises(RuntimeError, match=why):
        asyncio.run(run())


def test_a_slow_body_is_refused(monkeypatch):
    monkeypatch.setattr(remote, "BODY_S", 0.2)

    async def run():
        with socket.create_server(("127.0.0.1", 0)) as sock:
            config = uvicorn.Config(remote.app(places=1), log_level="warning")
            running = asyncio.create_task((server := uvicorn.Server(config)).serve(sockets=[sock]))
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"POST /run HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            answer = await reader.read()
            writer.close()
            server.should_exit = True
            await running
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 408 ")


def test_concurrency_and_queue_are_limited():
    with server("--places", "1") as (url, _):

        async def many():
            async with connect(url, key="secret") as box:
                first = asyncio.create_task(box.run_python("import time; time.sleep(2); print('first')"))
                await asyncio.sleep(0.5)
                rest = [box.run_python("print('rest')") for _ in range(remote.WAITING + 3)]
                return [await first, *await asyncio.gather(*rest, return_exceptions=True)]

        done = asyncio.run(many())
    busy = [one for one in done if isinstance(one, RuntimeError)]
    served = [one.stdout for one in done if one not in busy]
    assert 1 <= len(busy) <= 4 and all("answered 503" in str(one) for one in busy)
    assert served == ["first\n", *["rest\n"] * (len(done) - 1 - len(busy))]


def test_the_server_ends_together_with_its_programs():
    with server(key=None) as (url, process):  # no key is needed on loopback

        async def run():
            async with connect(url) as box:
                task = asyncio.create_task(box.run_python("import time; time.sleep(60)"))
                while len(started := supervisor.tree(process.pid)) < 2:  # the supervisor and the program
                    await asyncio.sleep(0.05)
                process.send_signal(signal.SIGTERM)
                with pytest.raises(RuntimeError):
                    await task
                return started

        started = asyncio.run(run())
        assert process.wait(20) == 0
        until = time.monotonic() + 30
        while any(map(lives, started)):
            assert time.monotonic() < until, started
            time.sleep(0.05)


def lives(pid):
    """Whether a process is alive; a zombie, which its new parent has yet to reap, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.sweep
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--host", "0.0.0.0"], f"0.0.0.0 can be reached from other machines; set {KEY}"),
        (["--host", "::"], "can be reached"),
        (["--host", "127.0.0.1.example.com"], "can be reached"),
        (["--port", "99999"], "port must be from 0 (any free port) to 65535, got 99999"),
        (["--places", "0"], "places must be at least 1"),
    ],
)
def test_bad_options_prevent_the_start(arguments, message):
    with server(*arguments, key=None) as (url, process):
        assert process.wait(20) == 2
        said = process.stderr.read()
    assert message in said and "Traceback" not in said
