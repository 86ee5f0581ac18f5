"""The durable state of the service, in SQLite: sessions, models, requests in order with their results, what is saved.

A request is known by its owner (a model, or a sampling session) and its `seq`: sent again, it is the same request, and
runs once. Every transaction is on the disk when it returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # after which a result is written again that the disk did not take
PENDING, DONE, FAILED, REFUSED = "pending", "done", "failed", "refused"
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, key TEXT, ended INTEGER DEFAULT 0, about TEXT);
CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, session TEXT, about TEXT, saved INTEGER);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, key TEXT, about TEXT, made REAL, expires REAL);
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, seq INTEGER, session TEXT, kind TEXT, body BLOB, state TEXT,
  result BLOB, UNIQUE (owner, seq));
CREATE INDEX IF NOT EXISTS pending ON requests (number) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS by_session ON requests (session);
"""
COLUMNS = "owner, seq, session, kind, body, state, result"


class Unwritable(RuntimeError):
    """The disk is full, or the database is damaged: nothing of the transaction is kept."""


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
      owner, seq: what it is known by; `seq` 0 of a model is its creation.
      kind: its route.
      body: as it was received; None once it is not needed any more.
      result: bytes of the answer, or of the JSON that says why it failed.
    """

    owner: str
    seq: int
    session: str
    kind: str
    body: bytes | None
    state: str = PENDING
    result: bytes | None = None

    @property
    def id(self) -> str:
        return f"{self.owner}:{self.seq}"


@dataclass(frozen=True)
class Session:
    id: str
    key: str
    ended: bool


@dataclass(frozen=True)
class Model:
    """A model; `about` is {"rank", "base", ...}, `saved` the `seq` after which its state was last saved."""

    id: str
    session: str
    about: dict[str, Any]
    saved: int | None


@dataclass(frozen=True)
class Checkpoint:
    """What is saved under a tinker:// path, of the key that may read it; `made` and `expires` in s since 1970, None =
    never."""

    path: str
    key: str
    about: dict[str, Any]
    made: float
    expires: float | None = None


class Log:
    """The database; methods may be called from any thread."""

    def __init__(self, path: Path):
        """Opens or creates it. Raises ValueError if another process has it open, or it is damaged."""
        self._path, self._lock, self._depth = path, threading.RLock(), 0
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(TABLES)
            [(said,)] = self._db.execute("PRAGMA quick_check(1)").fetchall()
            if said != "ok":
                raise sqlite3.DatabaseError(" ".join(said.split()))
        except sqlite3.OperationalError as error:
            self._db.close()
            raise ValueError(f"{path}: cannot be opened ({error}); does another server use this folder?") from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ValueError(f"{path}: must be a database of this server ({error}); choose another --out") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Makes what is written in the block one transaction. Raises Unwritable."""
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._db.execute("BEGIN IMMEDIATE")
                yield
                if self._depth == 1:
                    self._db.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                raise Unwritable(f"{self._path}: cannot be written ({error})") from None
            finally:
                self._depth -= 1
                if self._depth == 0 and self._db.in_transaction:  # SQLite itself ends some that fail
                    self._db.execute("ROLLBACK")

    def _write(self, text: str, *values: Any) -> int:
        with self.together():
            return self._db.execute(text, values).rowcount

    def _rows(self, text: str, *values: Any) -> list[tuple]:
        with self._lock:
            return self._db.execute(text, values).fetchall()

    # -- sessions ----------------------------------------------------------------------------------

    def add_session(self, id: str, key: str, about: dict[str, Any]) -> None:
        self._write("INSERT INTO sessions (id, key, about) VALUES (?, ?, ?)", id, key, json.dumps(about))

    def session(self, id: str) -> Session | None:
        rows = self._rows("SELECT id, key, ended FROM sessions WHERE id = ?", id)
        return Session(rows[0][0], rows[0][1], bool(rows[0][2])) if rows else None

    def end_session(self, id: str) -> None:
        """Ends a session: its requests and their results are forgotten; what it saved stays."""
        with self.together():
            self._write("UPDATE sessions SET ended = 1 WHERE id = ?", id)
            self._write("DELETE FROM requests WHERE session = ?", id)
            self._write("DELETE FROM samplers WHERE session = ?", id)
            self._write("DELETE FROM models WHERE session = ?", id)

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Adds a request unless its owner has one with this `seq`; returns whether it did."""
        row = request.owner, request.seq, request.session, request.kind, request.body, request.state, request.result
        return self._write(f"INSERT OR IGNORE INTO requests ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", *row) > 0

    def request(self, owner: str, seq: int) -> Request | None:
        rows = self._rows(f"SELECT {COLUMNS} FROM requests WHERE owner = ? AND seq = ?", owner, seq)
        return Request(*rows[0]) if rows else None

    def finish(self, request: Request, state: str, result: bytes) -> None:
        text = "UPDATE requests SET state = ?, result = ? WHERE owner = ? AND seq = ? AND state = 'pending'"
        self._write(text, state, result, request.owner, request.seq)

    def settle(
        self, request: Request, state: str, result: bytes, closing: threading.Event,
        write: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """`finish` with what `write` writes; a result that the disk does not take waits for room.

        Returns False if `closing` was set before there was: the request stays pending."""
        while True:
            try:
                with self.together():
                    write()
                    self.finish(request, state, result)
                return True
            except Unwritable as error:
                log.critical("%s of %s waits to be written: %s", request.kind, request.id, error)
                if closing.wait(AGAIN_S):
                    return False

    def pending(self) -> list[Request]:
        """All requests that have not run, in the order of their arrival."""
        text = f"SELECT {COLUMNS} FROM requests WHERE state = 'pending' ORDER BY number"
        return [Request(*row) for row in self._rows(text)]

    def known(self, owner: str) -> list[int]:
        """Each `seq` of an owner that has run or was refused, ascending."""
        text = "SELECT seq FROM requests WHERE owner = ? AND state != 'pending' ORDER BY seq"
        return [seq for (seq,) in self._rows(text, owner)]

    def ran(self, owner: str, after: int) -> Iterator[Request]:
        """The requests of a model that ran after its `seq` `after`, in their order, one at a time."""
        text = "SELECT seq FROM requests WHERE owner = ? AND seq > ? AND state = 'done' ORDER BY seq"
        for (seq,) in self._rows(text, owner, after):
            found = self.request(owner, seq)
            assert found is not None
            yield found

    # -- models, samplers, checkpoints -------------------------------------------------------------

    def add_model(self, id: str, session: str, about: dict[str, Any]) -> None:
        self._write("INSERT INTO models (id, session, about) VALUES (?, ?, ?)", id, session, json.dumps(about))

    def model(self, id: str) -> Model | None:
        rows = self._rows("SELECT id, session, about, saved FROM models WHERE id = ?", id)
        return Model(rows[0][0], rows[0][1], json.loads(rows[0][2]), rows[0][3]) if rows else None

    def models_of(self, session: str) -> list[str]:
        return [id for (id,) in self._rows("SELECT id FROM models WHERE session = ?", session)]

    def saved(self, model: str, seq: int) -> None:
        """Notes that the state after `seq` is in a folder: bodies up to there are not needed any more."""
        with self.together():
            self._write("UPDATE models SET saved = ? WHERE id = ?", seq, model)
            text = "UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ? AND state != 'pending'"
            self._write(text, model, seq)

    def add_sampler(self, id: str, session: str, path: str) -> None:
        self._write("INSERT OR IGNORE INTO samplers (id, session, path) VALUES (?, ?, ?)", id, session, path)

    def sampler(self, id: str) -> tuple[str, str] | None:
        """(session, tinker:// path of the weights, "" = the base's)."""
        rows = self._rows("SELECT session, path FROM samplers WHERE id = ?", id)
        return rows[0] if rows else None

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        row = checkpoint.path, checkpoint.key, json.dumps(checkpoint.about), checkpoint.made, checkpoint.expires
        self._write("INSERT OR REPLACE INTO checkpoints (path, key, about, made, expires) VALUES (?, ?, ?, ?, ?)", *row)

    def checkpoint(self, path: str, now: float) -> Checkpoint | None:
        """What is saved under a path and has not expired."""
        return next(iter(self._checkpoints("path = ?", path, now)), None)

    def checkpoints(self, key: str, prefix: str, now: float) -> list[Checkpoint]:
        """What a key has saved under paths that begin with `prefix`, the latest last."""
        found = self._checkpoints("key = ?", key, now)
        return [each for each in found if each.path.startswith(prefix)]

    def _checkpoints(self, condition: str, value: str, now: float) -> list[Checkpoint]:
        text = f"SELECT path, key, about, made, expires FROM checkpoints WHERE {condition}"
        rows = self._rows(f"{text} AND (expires IS NULL OR expires > ?) ORDER BY made", value, now)
        return [Checkpoint(path, key, json.loads(about), *times) for path, key, about, *times in rows]

    def expired(self, now: float) -> list[str]:
        return [path for (path,) in self._rows("SELECT path FROM checkpoints WHERE expires <= ?", now)]

    def drop_checkpoint(self, path: str) -> None:
        self._write("DELETE FROM checkpoints WHERE path = ?", path)
