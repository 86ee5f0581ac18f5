"""Rewards computed by an HTTP server: posts JSON, with protection against SSRF through URLs in the data.

A URL in a data row could point into the trainer's own network. Its host is therefore resolved once, every address
checked, and the connection made to a checked address; redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import aiohttp
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from ..errors import ServerError
from ..processes import json_rows, keys
from ..processes.http_answers import LATER, read_body, wait_s
from ..processes.printable import one_line
from .signatures import is_fault

LARGEST = 1 << 20  # bytes of an answer
FIRST_DELAY_S = 0.25  # before a second attempt; doubles


def post(
    url: str | None = None, *, allow: Collection[str] = (), timeout_s: float = 3.0, attempts: int = 3
) -> Callable[..., Awaitable[Any]]:
    """Makes a reward that posts {"text", "prompt", "row"} to a URL and returns the JSON answer: a number, an object of
    numbers, or null for unscorable. Rows must be JSON-serialisable; bytes of
    images are sent as data URLs. In a file of your own:

        reward = http.post("http://10.0.0.7:8000/grade")

    Args:
      url: None = the row's `reward_url`. A host given here is trusted; one given by a row must have only public
        addresses.
      allow: hosts, as written in the URL, that rows may use whatever their addresses.
      timeout_s: seconds per attempt.
      attempts: made if the server is unreachable, late, busy (408, 425, 429) or broken (5xx). All of them together,
        with the pauses in between, which a server may lengthen (Retry-After), should fit into the timeout of the pool.
    """

    async def reward(text: str, row: Mapping[str, Any], *, prompt: str | None = None) -> Any:
        body = {"text": text, "prompt": prompt, "row": json_rows.json_row(row)}
        if url is None and row.get("reward_url") is None:
            raise ValueError("rewards.http: a row needs reward_url, the address of its reward")
        trusted = allow if url is None else hosts(url)
        where = row["reward_url"] if url is None else url
        said = await ask(where, body, allow=trusted, timeout_s=timeout_s, attempts=attempts)
        if is_fault(said):
            raise ServerError(f"{keys.redacted(str(where))}: must answer with a reward, got {json.dumps(said):.200}")
        return said

    return reward


reward = post()  # at the row's reward_url


def hosts(url: str) -> Collection[str]:
    """The host of a URL, as the `allow` of `ask`."""
    host = URL(url).raw_host
    return (host,) if host else ()


async def ask(
    url: str,
    body: Any,
    *,
    allow: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    attempts: int,
) -> Any:
    """Posts `body` to `url` and returns the JSON answer.

    Raises:
      ValueError: not an http or https URL, or its address is not public and its host is not in `allow`.
      ServerError: no answer after all attempts; or, at once, a redirect, another error status, or invalid JSON.
    """
    shown = keys.redacted(str(url))  # errors are logged
    try:
        address = URL(url)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rewards.http: not a URL: {shown!r:.80} ({error})") from None
    host = address.raw_host
    if address.scheme not in ("http", "https") or not host:
        raise ValueError(f"rewards.http: a URL must begin with http:// or https:// and a host, got {shown!r:.80}")
    resolver = None if host in allow else Checked()
    if resolver and (":" in host or not any(character.isalpha() for character in host)):
        check(host, host)  # a literal address bypasses the resolver
    trouble, asked_s = "", 0.0
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(max(asked_s, FIRST_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)))
        asked_s = 0.0
        # One session per attempt: rewards are few, and a shared session would outlive its event loop.
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers) as http:
            try:
                async with http.post(address, json=body, allow_redirects=False) as answer:
                    if answer.status in LATER or answer.status >= 500:
                        trouble, asked_s = f"HTTP {answer.status}", wait_s(answer.headers.get("Retry-After", ""))
                        continue
                    if answer.status != 200:
                        what = "redirects are refused" if answer.status // 100 == 3 else answer.reason
                        raise ServerError(f"{shown}: HTTP {answer.status}, {what}")
                    return await _read(shown, answer)
            except TimeoutError:
                trouble = f"no answer in {timeout_s:g} s"
            except aiohttp.ClientError as error:
                trouble = f"{type(error).__name__}: {one_line(error)}"
    raise ServerError(f"{shown}: {trouble}, in each of {attempts} attempts")


async def _read(url: str, answer: aiohttp.ClientResponse) -> Any:
    data = await read_body(answer, url, LARGEST)
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(f"{url}: the answer is not JSON: {bytes(data[:80])!r}") from None
    cut = isinstance(said, int | float) and not isinstance(said, bool)
    if cut and not {"Content-Length", "Transfer-Encoding"} & answer.headers.keys():
        raise ServerError(
            f"{url}: a number must come with a Content-Length, for a part of one is a number, too, got {said!r:.80}"
        )
    return said


class Checked(ThreadedResolver):
    """Resolves host names to public addresses; raises ValueError if any of the addresses is not public."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list:
        found = await super().resolve(host, port, family)
        for entry in found:
            check(host, entry["host"])
        return found


def check(host: str, address: str) -> None:
    """Raises ValueError if an address is not public: private, loopback, link-local, shared, multicast, reserved, or
    IPv6 that embeds such an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(f"rewards.http: {host!r:.80} is neither a host name nor an address") from None
    real, local = ip, False
    if isinstance(ip, ipaddress.IPv6Address):
        real, local = ip.ipv4_mapped or ip.sixtofour or ip, ip.is_site_local
    if local or not real.is_global or real.is_multicast or real.is_reserved:
        raise ValueError(
            f"rewards.http: {host} resolves to {address}, which is not a public address; if that is intended, add the "
            "host to `allow`"
        )
