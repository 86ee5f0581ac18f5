"""Hostile HTTP requests, seeded: each takes a valid body and spoils it, or sends bytes that are no body at all.

`attack` sends them to a server process while it watches /health and the process's memory.
"""

import contextlib
import copy
import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 60  # without an answer for this long a request hangs
THREADS = 3
ENOUGH = 20  # failures, after which it ends
DEEP = 100_000


@dataclass
class Route:
    """A route, a valid body for it, and the headers that it needs."""

    method: str
    path: str
    body: dict = field(default_factory=dict)
    headers: dict = field(default_factory=dict)


class Raw(str):
    """A value that is spelt out in JSON as it is."""


VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**9, 10**400, -(10**400), 0.5, 1e308, -0.0, Raw("1e999"),
    Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("9" * 5000), Raw("1" + "0" * 4000), Raw("0x10"),
    Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * 900 + "]" * 900),
    Raw('"\\ud800"'), Raw('"\\udfff\\ud800"'), Raw("[" + "[]," * 100_000 + "[]]"),
    Raw("{" + ",".join(f'"{i}":{i}' for i in range(20_000)) + "}"), "", " ", "\0", "a\0b", "é" * 5, "\U0001f600" * 3,
    "a" * 5_000, "1" * 300_000, "../" * 2_000, "/dev/zero", "/dev/stdin", "/proc/self/mem", "/etc/passwd",
    "/" + "a" * 300, "/" + "a/" * 3_000, "http://[::1", "file:///etc/passwd", "%00", "{{ 7 * 7 }}", "1+1", "NaN",
    "abort", "enabled", "user", "text", [], [[]], [None], [1, "a"], [True], [5, 6, 7], [-1], [2**64], ["a", "a"],
    [{}], [[5], [6]], [[5, 6], "a"], list(range(20_000)), [str(i) for i in range(20_000)], ["a"] * 20_000,
    [[5]] * 20_000, [{"role": "user", "content": "1+1"}] * 2_000, {}, {"a": 1}, {"": ""}, {"type": "x"},
    {"type": ["x"]}, {"n": 10**9}, {"role": "user"}, [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": {}, "content": []}],
]  # fmt: skip
BODIES = [
    b"", b"{", b"nul", b"null", b"true", b"1", b'"a"', b"[]", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{\"a\": \xff}",
    b"\0" * 100, b"[" * DEEP, b"{" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"9" * 10_000, b"-" * 1_000,
    b'{"a": 1e400}', b'{"\\ud800": 1}', b"{}" + b" " * 100_000, b'{"a": 1, "a": 2}', b"NaN", b"{\"a\": NaN}", b"'a'",
]  # fmt: skip
HEADERS = [
    {"authorization": "Bearer "}, {"authorization": "é\xff"}, {"authorization": "Basic " + "a" * 4_000},
    {"x-api-key": "\xff"}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-16"},
    {"content-encoding": "gzip"}, {"expect": "100-continue"}, {"upgrade": "websocket", "connection": "upgrade"},
    {"range": "bytes=0-0,5-"}, {"range": "bytes=-" + "9" * 40}, {"accept-encoding": "\xff"},
    {"if-modified-since": "\xff"}, {"if-none-match": '"' * 100}, {"cookie": "a=" + "b" * 4_000},
    {f"x-{i}": "a" for i in range(150)}, {"x": "a" * 70_000}, {"origin": "http://evil.example"},
    {"host": "evil.example"}, {"content-length": "-1"}, {"content-length": "9" * 30}, {"content-length": "1e3"},
    {"transfer-encoding": "gzip, chunked"},
]  # fmt: skip
TAILS = [
    "/", "/..", "/%00", "/%2e%2e/%2e%2e/etc/passwd", "/" + "a" * 5_000, "?" + "a=" * 1_000, "?base=%ff%00",
    "?discount=nan", "?discount=1e400", "?style=\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "?timeout=nan", "/%ed%a0%80", "/\xe9", "#a", "?discount=" + "9" * 5_000,
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"]


def encoded(value) -> bytes:
    """JSON, with `Raw` values as they are."""
    if isinstance(value, Raw):
        return value.encode()
    if isinstance(value, dict):
        pairs = (json.dumps(name).encode() + b":" + encoded(item) for name, item in value.items())
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list) and any(isinstance(item, Raw | dict | list) for item in value):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()


SPELT = [Raw(encoded(value).decode()) for value in VALUES]


def places(value, found=None):
    """Every container and key in a JSON value."""
    found = [] if found is None else found
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def spoilt(rng: random.Random, routes: list[Route]) -> tuple[str, str, bytes, dict]:
    """A hostile request: (method, path, body, headers)."""
    route = rng.choice(routes)
    method, path, headers, kind = route.method, route.path, dict(route.headers), rng.random()
    body = copy.deepcopy(route.body)
    if kind < 0.7 and body:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            container, key = rng.choice(places(body))
            container[key] = rng.choice(SPELT)
        if rng.random() < 0.1:
            body[rng.choice(["n", "rid", "stop", "seed", "extra", "", "\0", "a" * 1_000])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        return method, path, encoded(body), headers
    if kind < 0.8:
        return method, path, rng.choice(BODIES), headers
    if kind < 0.9:
        headers |= rng.choice(HEADERS)
    elif kind < 0.95:
        path += rng.choice(TAILS)
    else:
        method = rng.choice(METHODS)
    return method, path, encoded(body), headers


def ask(port: int, method: str, path: str, body: bytes = b"", headers: dict | None = None) -> tuple[int, bytes]:
    """One request over a connection of its own: (status, answer); (0, b"") if the server closed the connection."""
    headers = {"connection": "close"} | (headers or {})
    names = {name.lower() for name in headers}
    head = [f"{method} {path} HTTP/1.1"]
    head += [] if "host" in names else [f"host: 127.0.0.1:{port}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    head += [] if "content-length" in names else [f"content-length: {len(body)}"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.connect()
        with contextlib.suppress(ConnectionError):  # answered before all was sent
            connection.sock.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body)
        reply = http.client.HTTPResponse(connection.sock, method=method)
        try:
            reply.begin()
            return reply.status, reply.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@dataclass
class Report:
    """What happened during an attack.

    Attributes:
      sent: number of requests.
      statuses: how many answers had each status; 0 = the connection was closed.
      failures: requests that were answered with 500, or not at all.
      slowest_s: the longest that /health took.
      grown: bytes by which the process's memory had grown afterwards.
    """

    sent: int = 0
    statuses: dict = field(default_factory=dict)
    failures: list = field(default_factory=list)
    slowest_s: float = 0.0
    grown: int = 0


def attack(
    port: int, pid: int, routes: list[Route], count: int, seed: int, *, warm: int = 0, upkeep: Sequence[Route] = ()
) -> Report:
    """Sends `count` hostile requests to the server, after `warm` further ones before memory is measured.

    Args:
      upkeep: requests made now and then that undo pauses and the like, so that others are answered.
    """
    report, lock, ended = Report(), threading.Lock(), threading.Event()
    rng = random.Random(seed)

    def send(most: int) -> None:
        while report.sent < most and len(report.failures) < ENOUGH:
            with lock:
                request = spoilt(rng, routes)
                report.sent += 1
            begun = time.monotonic()
            try:
                status, answer = ask(port, *request)
            except OSError as error:
                status, answer = -1, repr(error).encode()
            with lock:
                report.statuses[status] = report.statuses.get(status, 0) + 1
                if status in (-1, 500):
                    method, path, body, headers = request
                    took = time.monotonic() - begun
                    report.failures.append(
                        (status, method, path[:80], body[:200], str(headers)[:100], answer[:200], round(took, 1))
                    )

    def watch() -> None:
        while not ended.wait(0.05):
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                ask(port, "GET", "/health")
            report.slowest_s = max(report.slowest_s, time.monotonic() - begun)
            for route in upkeep:
                with contextlib.suppress(OSError):
                    ask(port, route.method, route.path, encoded(route.body), route.headers)

    def send_all(most: int) -> None:
        share = [threading.Thread(target=send, args=(most,)) for _ in range(THREADS)]
        for thread in share:
            thread.start()
        for thread in share:
            thread.join()

    watcher = threading.Thread(target=watch)
    watcher.start()
    send_all(warm)
    before, report.slowest_s = resident(pid), 0.0
    send_all(warm + count)
    ended.set()
    watcher.join()
    report.grown = resident(pid) - before
    return report
