"""Rewards that another server computes: JSON over HTTP, to no address that a row has no business with.

A URL that comes with the data could point into the network that the trainer stands in. Its host is therefore resolved
once, every address checked, and the connection made to what was checked; redirects are not followed.
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

LARGEST = 1 << 20  # bytes of an answer
FIRST_DELAY_S = 0.25  # before a second attempt; doubles


def post(
    url: str | None = None, *, allow: Collection[str] = (), timeout_s: float = 3.0, attempts: int = 3
) -> Callable[..., Awaitable[Any]]:
    """A reward that posts {"text", "prompt", "row"} to a URL and takes the JSON that comes back: a number, an object
    of numbers, or null for unscorable. Rows must be JSON. In a file of your own:

        reward = remote.post("http://10.0.0.7:8000/grade")

    Args:
      url: None takes it from `reward_url` of the row. A host that is named here is trusted, one that a row names must
        have public addresses alone.
      allow: hosts that rows may name whatever their addresses, as they stand in the URL.
      timeout_s: seconds of one attempt.
      attempts: where the server cannot be reached, is late, busy (429) or broken (5xx). All of them together, and the
        pauses between, should fit into the time limit of the pool.
    """

    async def reward(text: str, row: Mapping[str, Any], *, prompt: str | None = None) -> Any:
        body = {"text": text, "prompt": prompt, "row": row}
        if url is None and "reward_url" not in row:
            raise ValueError("remote: a row needs reward_url, the address of its reward")
        trusted = allow if url is None else hosts(url)
        return await ask(
            row["reward_url"] if url is None else url, body, allow=trusted, timeout_s=timeout_s, attempts=attempts
        )

    return reward


reward = post()  # of rows that say where


def hosts(url: str) -> Collection[str]:
    """The host of a URL, as `ask` may be allowed to reach it."""
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
    """The JSON that `url` answers to `body`.

    Raises:
      ValueError: no http or https URL, or it leads to an address that is not public and whose host is not in `allow`.
      ServerError: after all attempts no answer, or at once a redirect, another refusal, or an answer that is no JSON.
    """
    try:
        address = URL(url)
    except (TypeError, ValueError) as error:
        raise ValueError(f"remote: not a URL: {url!r:.80} ({error})") from None
    host = address.raw_host
    if address.scheme not in ("http", "https") or not host:
        raise ValueError(f"remote: a URL must begin with http:// or https:// and a host, got {url!r:.80}")
    resolver = None if host in allow else Checked()
    if resolver and (":" in host or not any(character.isalpha() for character in host)):
        check(host, host)  # an address goes past the resolver
    trouble = ""
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(FIRST_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
        # a connection for each attempt: rewards are few, and a session would outlive the event loop it is bound to
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers) as http:
            try:
                async with http.post(address, json=body, allow_redirects=False) as answer:
                    if answer.status == 429 or answer.status >= 500:
                        trouble = f"HTTP {answer.status}"
                        continue
                    if answer.status != 200:
                        what = "redirects are refused" if answer.status // 100 == 3 else answer.reason
                        raise ServerError(f"{url}: HTTP {answer.status}, {what}")
                    return await _read(url, answer)
            except TimeoutError:
                trouble = f"no answer in {timeout_s:g} s"
            except aiohttp.ClientError as error:
                trouble = f"{type(error).__name__}: {error}"
    raise ServerError(f"{url}: {trouble}, in each of {attempts} attempts")


async def _read(url: str, answer: aiohttp.ClientResponse) -> Any:
    data = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > LARGEST:
            raise ServerError(f"{url}: the answer has more than {LARGEST} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(f"{url}: the answer is no JSON: {bytes(data[:80])!r}") from None


class Checked(ThreadedResolver):
    """Resolves names to public addresses only; one that is not public, among others that are, refuses them all."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list:
        found = await super().resolve(host, port, family)
        for entry in found:
            check(host, entry["host"])
        return found


def check(host: str, address: str) -> None:
    """Refuses an address that is not public, with a ValueError: private, loopback, link-local, shared, multicast,
    reserved, or IPv6 that carries such an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(f"remote: {host!r:.80} is neither the name of a host nor an address") from None
    real, local = ip, False
    if isinstance(ip, ipaddress.IPv6Address):
        real, local = ip.ipv4_mapped or ip.sixtofour or ip, ip.is_site_local
    if local or not real.is_global or real.is_multicast or real.is_reserved:
        raise ValueError(
            f"remote: {host} is at {address}, which is not a public address; if it is meant, name the host in `allow`"
        )
