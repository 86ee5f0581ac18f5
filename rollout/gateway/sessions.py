"""The sessions of a gateway, by key and by id, and their limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..chat.api.stored import Stored
from ..chat.session import Session
from ..processes import http_limits as limits

SESSION_ID = "X-Session-ID"  # the header that names a session, with the admin key


@dataclass(frozen=True)
class Limits:
    """Limits of clients; requests that exceed one are refused.

    Attributes:
      http: of connections, headers and bodies.
      generations: running in one session at the same time.
      sessions: open at the same time.
      idle_s, total_s: seconds after which a session started over HTTP expires, when unused and in any case.
    """

    http: limits.Limits = limits.Limits()
    generations: int = 128
    sessions: int = 4096
    idle_s: float = 3600.0
    total_s: float = 86400.0


@dataclass(eq=False)
class Entry:
    """An open session, its running generations, its responses that are kept, and when it was started and last used."""

    session: Session
    digest: bytes
    online: bool
    started: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    running: set[asyncio.Task] = field(default_factory=set)
    closed: bool = False
    stored: Stored = field(default_factory=Stored)


class Sessions:
    """The open sessions, and who may access them.

    Keys are looked up by hash, so that timing reveals nothing about them.

    Args:
      admin_key: allows for every session what its own key allows; "" = disabled.
    """

    def __init__(self, limits: Limits, admin_key: str):
        self._limits, self._admin_key = limits, admin_key.encode()
        self._by_key: dict[bytes, Entry] = {}
        self._by_id: dict[str, Entry] = {}

    @property
    def full(self) -> bool:
        return len(self._by_id) >= self._limits.sessions

    def open(self, session: Session, *, online: bool) -> str:
        """Opens a session; returns its new key. Raises RuntimeError if too many are open, ValueError if this one is."""
        if self.full:
            raise RuntimeError(f"gateway: at most {self._limits.sessions} sessions may be open at the same time")
        if session.id in self._by_id:
            raise ValueError(f"gateway: session {session.id} is already open")
        key = secrets.token_urlsafe(32)
        entry = Entry(session, _digest(key), online)
        self._by_key[entry.digest] = self._by_id[session.id] = entry
        return key

    def find(self, key: str) -> Entry | None:
        return self._by_key.get(_digest(key))

    async def close(self, entry: Entry) -> bool:
        """Closes a session and cancels its generations; False if it was closed already."""
        if self._by_key.pop(entry.digest, None) is None:
            return False
        del self._by_id[entry.session.id]
        entry.closed = True
        for task in entry.running:
            task.cancel()
        await asyncio.gather(*entry.running, return_exceptions=True)
        return True

    async def close_all(self) -> None:
        await asyncio.gather(*map(self.close, list(self._by_id.values())))

    def stale(self) -> list[Entry]:
        """The expired sessions, among those started over HTTP."""
        now, most = time.monotonic(), self._limits
        old = lambda entry: now - entry.started > most.total_s
        idle = lambda entry: not entry.running and now - entry.used > most.idle_s
        return [entry for entry in self._by_id.values() if entry.online and (old(entry) or idle(entry))]

    # -- authentication; raises HTTPException if it fails ----------------------------------------

    def admin(self, http: Request) -> bool:
        """Whether the request has the admin key."""
        given = _key(http).encode("latin-1")
        return bool(self._admin_key) and hmac.compare_digest(given, self._admin_key)

    def of(self, http: Request) -> Entry:
        """The session whose key the request has, or, with the admin key, whose id the header X-Session-ID has."""
        if self.admin(http):
            name = http.headers.get(SESSION_ID, "")
            if entry := self._by_id.get(name):
                return entry
            raise HTTPException(404, f"with the admin key, {SESSION_ID} must be an open session's id, got {name!r:.80}")
        if entry := self.find(_key(http)):
            return entry
        raise HTTPException(401, "no open session has this key")

    def named(self, http: Request) -> Entry:
        """The session whose id is in the path; without access to it, as if it did not exist."""
        found = self._by_id.get(http.path_params["id"])
        if not self.admin(http) and self.of(http) is not found:
            found = None
        if found is None:
            raise HTTPException(404, "no such session")
        return found


def _key(http: Request) -> str:
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
