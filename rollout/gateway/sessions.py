"""The sessions that a gateway serves, by key and by id, and what they may use."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..chat.session import Session


@dataclass(frozen=True)
class Limits:
    """What clients may use; what exceeds a limit is refused.

    Attributes:
      body_bytes, body_s: the size of a request's body, and the seconds it may take to arrive.
      header_bytes, headers: the size and the number of a request's headers.
      head_s: seconds that the line and headers of a request may take to arrive.
      connections: open at the same time.
      generations: of one session at the same time.
      sessions: open at the same time.
      idle_s, total_s: seconds after which a session that was started over HTTP ends, unused or whatever it does.
    """

    body_bytes: int = 32 * 2**20
    body_s: float = 60.0
    header_bytes: int = 2**16
    headers: int = 100
    head_s: float = 10.0
    connections: int = 4096
    generations: int = 128
    sessions: int = 4096
    idle_s: float = 3600.0
    total_s: float = 86400.0


@dataclass(eq=False)
class Entry:
    """A session that is open, the generations that run in it, and when it was started and last used."""

    session: Session
    digest: bytes
    online: bool
    started: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    running: set[asyncio.Task] = field(default_factory=set)
    closed: bool = False


class Sessions:
    """The open sessions, and who may use them.

    Keys are looked up by their hash, so that how long it takes tells nothing about them.

    Args:
      admin_key: who has it may do to each session what its own key allows; "" = nobody may.
    """

    def __init__(self, limits: Limits, admin_key: str):
        self._limits, self._admin_key = limits, admin_key.encode()
        self._by_key: dict[bytes, Entry] = {}
        self._by_id: dict[str, Entry] = {}

    @property
    def full(self) -> bool:
        return len(self._by_id) >= self._limits.sessions

    def open(self, session: Session, *, online: bool) -> str:
        """The new key of a session. Raises RuntimeError where too many are open, ValueError where this one is."""
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
        """Ends a session and what runs in it; False if it has been ended."""
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
        """Sessions started over HTTP whose time is over."""
        now, limits = time.monotonic(), self._limits
        old = lambda entry: now - entry.started > limits.total_s
        idle = lambda entry: not entry.running and now - entry.used > limits.idle_s
        return [entry for entry in self._by_id.values() if entry.online and (old(entry) or idle(entry))]

    # -- whose request it is; HTTPException if it is nobody's ------------------------------------

    def admin(self, http: Request) -> bool:
        """Whether it has the admin key."""
        given = _key(http).encode("latin-1")
        return bool(self._admin_key) and hmac.compare_digest(given, self._admin_key)

    def of(self, http: Request) -> Entry:
        """The session whose key it has."""
        if entry := self.find(_key(http)):
            return entry
        raise HTTPException(401, "no open session has this key")

    def named(self, http: Request) -> Entry:
        """The session whose id is in the path; one that is another's looks as if it was not there."""
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
