"""Addresses of servers: what can be one, and which two are of the same server."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from . import keys

HOST = re.compile(r"[\w-]+(?:\.[\w-]+)*\.?|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%\w+)?")  # a name, or an address of IPv6


def check(url: str, what: str) -> None:
    """Raises ValueError unless `url` is the address of a server, http://HOST[:PORT][/PATH], without a secret; `what`
    names the option."""
    keys.check_address(url, what)
    try:
        parts = urlsplit(url)
        host, right = parts.hostname or "", parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # a port that is none
        host, right = "", False
    if not (right and url.isprintable() and HOST.fullmatch(host)):
        raise ValueError(f"{what}: must be an address such as http://127.0.0.1:30000, got {url!r:.200}")


def plain(url: str) -> str:
    """The address with scheme and host in lower case, without a slash at its end."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{parts.path.rstrip('/.')}"


def identity(url: str) -> str:
    """A key that is equal for different spellings of one server's address; of names only localhost is resolved."""
    return re.sub(r"//(localhost|\[::1\])(?=[:/]|$)", "//127.0.0.1", plain(url))
