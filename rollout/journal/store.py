"""The journal of a run in its directory: an SQLite database of finished episodes and of the batches made of them.

    batches   version, cursor (the position after it, JSON), sizes of its groups (JSON), samples (codec.py)
    episodes  prompt, episode, admitted, samples: of groups that no batch has taken yet
    images    hash, data, used: the last version whose samples have it
    meta      schema, run, options

Every record has a hash of its bytes. A record is written before what it says is used, so that a killed process loses
what it was in the middle of, and nothing else: a batch is in the journal when it is handed out, an episode when its
group sees it. A process that is killed leaves a whole database (write-ahead log); a machine that loses power may lose
the last seconds. The file needs no locks: a run's directory belongs to one process (folders.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from ..types import Sample
from . import codec

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FILE = "journal.db"
SCHEMA = 1
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  version INTEGER PRIMARY KEY, cursor TEXT NOT NULL, sizes TEXT NOT NULL, samples BLOB NOT NULL, hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (
  prompt INTEGER NOT NULL, episode INTEGER NOT NULL, admitted INTEGER NOT NULL, samples BLOB NOT NULL,
  hash TEXT NOT NULL, PRIMARY KEY (prompt, episode));
CREATE TABLE IF NOT EXISTS images (hash TEXT PRIMARY KEY, data BLOB NOT NULL, used INTEGER NOT NULL);
"""


class Begun(NamedTuple):
    """A group that no batch has taken: the version at which it was admitted, and its finished episodes by index."""

    version: int
    episodes: dict[int, list[Sample]]


class Batch(NamedTuple):
    """A batch that was handed out: its groups, and the run's position after it."""

    groups: list[list[Sample]]
    cursor: dict[str, Any]


class Past(NamedTuple):
    """What a former process recorded after the state that this one goes on from.

    Attributes:
      batches: the versions that were trained on, without a gap.
      cursor: the position after the last of them; None without any.
      begun: groups that no batch has taken, by prompt.
    """

    batches: range
    cursor: dict[str, Any] | None
    begun: dict[int, Begun]


class Journal:
    """A run's journal, open for writing in one process; made by `opened`."""

    def __init__(self, path: Path, db: sqlite3.Connection, pool: ThreadPoolExecutor, past: Past):
        self.path, self.past = path, past
        self._db, self._pool = db, pool  # the database is used in the pool's one thread
        self._failed = False

    async def read(self, version: int) -> Batch:
        """Reads a batch. Raises ValueError if it is missing or damaged."""
        return await asyncio.wrap_future(self._pool.submit(_batch, self._db, self.path, version))

    async def keep(self, prompt: int, episode: int, admitted: int, samples: Sequence[Sample]) -> None:
        """Records a finished episode, [] if it was rejected; returns when it is in the file."""

        def write() -> None:
            data = codec.packed(samples)
            key = (prompt, episode, admitted)
            self._keep_images(samples, admitted)
            self._db.execute("INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?)", (*key, data, _hash(data, key)))

        await self._written(write)

    async def close_batch(
        self, version: int, groups: Sequence[Sequence[Sample]], cursor: Mapping[str, Any], ended: Collection[int]
    ) -> None:
        """Records a batch, and forgets the episodes of the prompts that ended; returns when that is in the file.

        Args:
          cursor: the run's position after it.
          ended: the prompts of the batch, and others whose episodes no batch will take.
        """

        def write() -> None:
            samples = [sample for group in groups for sample in group]
            data, sizes = codec.packed(samples), json.dumps([*map(len, groups)])
            text = json.dumps(cursor)
            self._keep_images(samples, version)
            row = (version, text, sizes, data, _hash(data, (version, text, sizes)))
            self._db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", row)
            self._db.executemany("DELETE FROM episodes WHERE prompt = ?", ((prompt,) for prompt in ended))

        await self._written(write)

    async def prune(self, before: int, eta: int) -> None:
        """Forgets the batches before a version, and the images that only they had.

        Args:
          eta: most versions between the admission of a group and its batch.
        """

        def write() -> None:
            self._db.execute("DELETE FROM batches WHERE version < ?", (before,))
            self._db.execute("DELETE FROM images WHERE used < ?", (before - eta,))

        await self._written(write)

    def _keep_images(self, samples: Sequence[Sample], used: int) -> None:
        self._db.executemany(
            "INSERT INTO images VALUES (?, ?, ?) ON CONFLICT (hash) DO UPDATE SET used = max(used, excluded.used)",
            ((image.hash, image.data, used) for sample in samples for image in sample.images),
        )

    async def _written(self, write: Callable[[], None]) -> None:
        """Runs `write` as a transaction in the database's thread. A full disk does not end the run: what is missing
        here is generated again after a kill."""

        def transaction() -> None:
            try:
                with self._db:
                    write()
                self._failed = False
            except sqlite3.OperationalError as error:  # SQLITE_FULL, SQLITE_IOERR, SQLITE_READONLY
                if not self._failed:
                    log.warning("the journal is not written (%s): a killed process would generate more again", error)
                self._failed = True

        await asyncio.wrap_future(self._pool.submit(transaction))


@contextlib.asynccontextmanager
async def opened(folder: Path, start: int, identity: Mapping[str, str]) -> AsyncIterator[Journal]:
    """Opens the journal in a run's directory, for a process that goes on from version `start`.

    What it holds from there on is only used if it was recorded by the same run with the same options. A damaged file is
    put aside; a damaged record ends what is used; each with a line.

    Args:
      identity: the run's id, and what its episodes and batches depend on.

    Raises OSError if the file cannot be opened or written.
    """
    path = folder / FILE
    with ThreadPoolExecutor(1, "journal") as pool:
        do = lambda work: asyncio.wrap_future(pool.submit(work))
        db = await do(lambda: _connected(path))
        try:
            past = await do(lambda: _past(db, path, start, dict(identity)))
            yield Journal(path, db, pool, past)
        finally:
            await do(db.close)


def _connected(path: Path) -> sqlite3.Connection:
    for number in (1, 2):
        db = sqlite3.connect(f"file:{path}?nolock=1", uri=True, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(TABLES)
            return db
        except sqlite3.DatabaseError as error:
            db.close()
            if number == 2 or isinstance(error, sqlite3.OperationalError):
                raise OSError(f"{path}: {error}") from error
            aside = path.with_name(f"{path.name}.damaged")
            log.warning("%s: %s; it is now %s, and what it held is generated again", path, error, aside.name)
            path.rename(aside)
            for other in ("-wal", "-shm"):
                path.with_name(path.name + other).unlink(missing_ok=True)
    raise AssertionError


def _past(db: sqlite3.Connection, path: Path, start: int, identity: dict[str, str]) -> Past:
    """What the journal has from version `start` on that can be used; removes the rest."""
    now = {"schema": f"{SCHEMA} {' '.join(codec.FIELDS)}", **identity}
    then = dict(db.execute("SELECT name, value FROM meta").fetchall())
    others = [name for name in now if then and then.get(name) != now[name]]
    first = 0 if "schema" in others else start
    end, cursor = start, None
    found = db.execute(
        "SELECT version, cursor, sizes, samples, hash FROM batches WHERE version >= ? ORDER BY version", (first,)
    )
    for version, text, sizes, data, given in [] if others else found:
        if version != end or _hash(data, (version, text, sizes)) != given:
            log.warning("%s: the batch of version %d is missing or damaged", path, end)
            break
        end, cursor = version + 1, json.loads(text)
    begun = {} if others else _begun(db, path)
    with db:
        gone = db.execute("DELETE FROM batches WHERE version >= ?", (first if others else end,)).rowcount
        gone += db.execute("DELETE FROM episodes").rowcount if others else 0
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", now.items())
    if gone:
        why = f": it is of another {' and '.join(others)}" if others else ""
        log.warning("%s: what it has from version %d on is generated again%s", path, end, why)
    return Past(range(start, end), cursor, begun)


def _begun(db: sqlite3.Connection, path: Path) -> dict[int, Begun]:
    made: dict[int, Begun] = {}
    for prompt, episode, admitted, data, given in db.execute("SELECT * FROM episodes").fetchall():
        try:
            if _hash(data, (prompt, episode, admitted)) != given:
                raise ValueError("it is damaged")
            samples = codec.unpacked(data, lambda name: _image(db, name))
            made.setdefault(prompt, Begun(admitted, {})).episodes[episode] = samples
        except ValueError as error:
            log.warning("%s: episode %d of prompt %d is generated again: %s", path, episode, prompt, error)
    return made


def _batch(db: sqlite3.Connection, path: Path, version: int) -> Batch:
    """Reads a batch. Raises ValueError if it is missing or damaged."""
    row = db.execute("SELECT cursor, sizes, samples, hash FROM batches WHERE version = ?", (version,)).fetchone()
    if not row or _hash(row[2], (version, row[0], row[1])) != row[3]:
        raise ValueError(f"{path}: the batch of version {version} is {'damaged' if row else 'missing'}")
    samples = iter(codec.unpacked(row[2], lambda name: _image(db, name)))
    return Batch([[next(samples) for _ in range(size)] for size in json.loads(row[1])], json.loads(row[0]))


def _image(db: sqlite3.Connection, name: str) -> bytes:
    """The bytes of an image. Raises ValueError if it is missing."""
    row = db.execute("SELECT data FROM images WHERE hash = ?", (name,)).fetchone()
    if not row:
        raise ValueError(f"the image {name} is missing")
    return row[0]


def _hash(data: bytes, key: Sequence[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(f"{list(key)}".encode() + data)
