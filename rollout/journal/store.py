"""The journal of a run in its directory: an SQLite database of finished episodes and of the batches made of them.

    batches   version, cursor (the position after it, JSON), sizes of its groups (JSON), samples (codec.py)
    episodes  prompt, episode, admitted, row (its hash), samples: of groups that no batch has taken yet
    calls     prompt, episode, call, start, admitted, request (its hash), tokens from `start` on: of episodes that go on
    images    hash, data, used: the last version whose samples have it
    meta      schema, run, what its episodes depend on, and since which version of the run that holds

Every record has a hash of its bytes. A batch is in the journal before servers get the weights that it made, so that a
killed process trains on the same again. An episode that took longer than AFTER_S is recorded when it ends, a shorter
one within AFTER_S unless a batch has taken it by then, behind the record that its group has begun (episode BEGUN): a
killed process loses seconds of work, and what it was in the middle of. A process that is killed leaves a whole database
(write-ahead log); a machine that loses power may lose the last seconds. The file needs no locks and no shared memory,
which network file systems may lack: a run's directory belongs to one process (folders.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..types import Generated, Image, Sample
from . import codec

log = logging.getLogger(__name__)

FILE = "journal.db"
SCHEMA = f"5 {' '.join(codec.FIELDS)}"
SINCE = "since"  # in meta: the first version whose batch was recorded by the run and with the options there
AFTER_S = 5.0  # from the end of a short episode to its record, at most
BEGUN = -1  # the episode that says that its group has begun, and, if no batch will take it, how it ended
OF_GROUPS = "episodes", "calls"  # tables of groups that no batch has taken
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  version INTEGER PRIMARY KEY, cursor TEXT NOT NULL, sizes TEXT NOT NULL, samples BLOB NOT NULL, hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (
  prompt INTEGER NOT NULL, episode INTEGER NOT NULL, admitted INTEGER NOT NULL, row TEXT NOT NULL,
  samples BLOB NOT NULL, hash TEXT NOT NULL, PRIMARY KEY (prompt, episode));
CREATE TABLE IF NOT EXISTS calls (
  prompt INTEGER NOT NULL, episode INTEGER NOT NULL, call INTEGER NOT NULL, start INTEGER NOT NULL,
  admitted INTEGER NOT NULL, request TEXT NOT NULL, tokens BLOB NOT NULL, hash TEXT NOT NULL,
  PRIMARY KEY (prompt, episode, call, start));
CREATE TABLE IF NOT EXISTS images (hash TEXT PRIMARY KEY, data BLOB NOT NULL, used INTEGER NOT NULL);
"""
OUTSIDE = {  # errors that are not the file's own: the disk is full, cannot be read, ...
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
}  # fmt: skip


class Call(NamedTuple):
    """What is recorded of a `generate` call: the hash of its request, and its tokens."""

    request: str
    made: Generated

    def until(self, version: int) -> Call:
        """The tokens before the first one of a later version."""
        n = next((i for i, one in enumerate(self.made.version) if one > version), None)
        return Call(self.request, self.made.between(0, n))


class Begun(NamedTuple):
    """A group that no batch has taken.

    Attributes:
      version: at which it was admitted.
      row: the hash of its row.
      episodes: those that have ended, by index.
      calls: those of others, by (episode, number).
      declined: how it ended, and its success, if no batch will take it.
    """

    version: int
    row: str
    episodes: dict[int, list[Sample]]
    calls: dict[tuple[int, int], Call]
    declined: tuple[str, float] | None = None


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
        self._due: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._ended: dict[tuple[int, int], tuple[float, Callable[[], None]]] = {}  # what is recorded soon, since when
        self._timer: asyncio.TimerHandle | None = None
        self._failed = self._unfit = False

    async def read(self, version: int) -> Batch:
        """Reads a batch. Raises ValueError if it is missing or damaged."""
        return await asyncio.wrap_future(self._pool.submit(_batch, self._db, self.path, version))

    def begin(self, prompt: int, admitted: int, row: str) -> None:
        """Records that a group has begun, without waiting for it; arguments as of `keep`."""

        def write() -> None:
            self._put((prompt, BEGUN, admitted, row), b"")
            self._db.execute("DELETE FROM calls WHERE prompt = ? AND admitted != ?", (prompt, admitted))

        self._soon(prompt, BEGUN, write)

    def decline(self, prompt: int, admitted: int, row: str, outcome: str, success: float) -> None:
        """Records how a group ended that no batch will take, in place of its episodes; arguments as of `keep`.

        A resumed run that played it again might accept it, although another group has taken its place."""

        def write() -> None:
            for table in OF_GROUPS:
                self._db.execute(f"DELETE FROM {table} WHERE prompt = ?", (prompt,))
            self._put((prompt, BEGUN, admitted, row), json.dumps([outcome, success]).encode())

        self._forget_ended({prompt})
        self._soon(prompt, BEGUN, write)

    def keep_calls(self, prompt: int, admitted: int, episode: int, calls: Mapping[tuple[int, int], Call]) -> None:
        """Records tokens of an episode's calls, by (number, place of the first one), without waiting for it. Those that
        were recorded from there on are forgotten."""

        def write() -> None:
            for place, (request, made) in calls.items():
                self._db.execute(
                    "DELETE FROM calls WHERE prompt = ? AND episode = ? AND call = ? AND start >= ?",
                    (prompt, episode, *place),
                )
                key, data = (prompt, episode, *place, admitted, request), codec.packed_tokens(made)
                self._db.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, data, _hash(data, key)))

        if (prompt, BEGUN) in self._ended:
            self._record([(prompt, BEGUN)])
        self._written(write)

    def keep(
        self, prompt: int, admitted: int, row: str, episode: int, samples: Sequence[Sample], seconds: float, *,
        exact: bool = False,
    ) -> None:  # fmt: skip
        """Records a finished episode, [] if it was rejected: at once if it took longer than AFTER_S, else within that,
        unless a batch takes it first.

        Args:
          seconds: that it took.
          admitted: the version at which its group was admitted.
          row: `codec.mark` of the group's row.
          exact: an episode whose `info` would not come back as it is, is not recorded.
        """

        def write() -> None:
            try:
                data = codec.packed(samples, exact=exact)
            except ValueError as error:
                if not self._unfit:
                    log.warning("%s: has no episodes whose info is not data, such as one: %s", self.path, error)
                self._unfit = True
                return
            self._keep_images(samples, admitted)
            self._put((prompt, episode, admitted, row), data)
            self._db.execute("DELETE FROM calls WHERE prompt = ? AND episode = ?", (prompt, episode))

        self._soon(prompt, episode, write)
        if seconds > AFTER_S:
            self._record([key for key in self._ended if key[0] == prompt])

    def flush(self) -> Future[None]:
        """Records what has begun and ended; the result is there when it is in the file."""
        return self._record([*self._ended])

    def _soon(self, prompt: int, episode: int, write: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._ended[prompt, episode] = loop.time(), write
        if self._timer is None:
            self._timer = loop.call_later(AFTER_S, self._record_old)

    def _forget_ended(self, prompts: Collection[int]) -> None:
        self._ended = {key: one for key, one in self._ended.items() if key[0] not in prompts}

    def _record_old(self) -> None:
        """Records what no batch has taken for a while, and comes again before the rest is older than AFTER_S."""
        loop, self._timer = asyncio.get_running_loop(), None
        self._record([key for key, (since, _) in self._ended.items() if since <= loop.time() - AFTER_S / 2])
        if self._ended:
            oldest, _ = next(iter(self._ended.values()))
            self._timer = loop.call_at(oldest + AFTER_S, self._record_old)

    def _record(self, keys: Sequence[tuple[int, int]]) -> Future[None]:
        writes = [self._ended.pop(key)[1] for key in keys]
        if not writes:
            (done := Future[None]()).set_result(None)
            return done

        def write() -> None:
            for one in writes:
                one()

        return self._written(write)

    def close_batch(
        self, version: int, groups: Sequence[Sequence[Sample]], cursor: Mapping[str, Any], ended: Collection[int]
    ) -> Future[None]:
        """Records a batch, and forgets the episodes of the prompts that ended; the result is there when that is in the
        file.

        Args:
          cursor: the run's position after it.
          ended: the prompts of the batch, and others whose episodes no batch will take.
        """

        def write() -> None:
            samples = [sample for group in groups for sample in group]
            data, sizes = codec.packed(samples, exact=False), json.dumps([*map(len, groups)])
            text = json.dumps(cursor)
            self._keep_images(samples, version)
            row = (version, text, sizes, data, _hash(data, (version, text, sizes)))
            self._db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", row)
            for table in OF_GROUPS:
                self._db.executemany(f"DELETE FROM {table} WHERE prompt = ?", ((prompt,) for prompt in ended))

        self._forget_ended({*ended})
        return self._written(write)

    def prune(self, before: int, eta: int) -> None:
        """Forgets the batches before a version, and the images that only they had, without waiting for it.

        Args:
          eta: most versions between the admission of a group and its batch.
        """

        def write() -> None:
            self._db.execute("DELETE FROM batches WHERE version < ?", (before,))
            self._db.execute("DELETE FROM images WHERE used < ?", (before - eta,))

        self._written(write)

    def close(self) -> None:
        """Records what has begun and ended, and closes the file; the pool waits for it."""
        self.flush()
        if self._timer:
            self._timer.cancel()
        self._pool.submit(self._db.close)

    def _put(self, key: tuple[int, int, int, str], data: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?)", (*key, data, _hash(data, key)))

    def _keep_images(self, samples: Sequence[Sample], used: int) -> None:
        found = {image.hash: image.data for sample in samples for image in sample.images}
        self._db.executemany(
            "INSERT INTO images VALUES (?, ?, ?) ON CONFLICT (hash) DO UPDATE SET used = max(used, excluded.used)",
            ((name, data, used) for name, data in found.items()),
        )

    def _written(self, write: Callable[[], None]) -> Future[None]:
        """Runs `write` in the database's thread, with others that are due as one transaction. A full disk does not end
        the run: what is missing here is generated again after a kill."""
        done = Future[None]()
        self._due.append((write, done))
        if len(self._due) == 1:  # else the thread has not come to the first one yet
            self._pool.submit(self._write_due)
        return done

    def _write_due(self) -> None:
        while self._due:
            taken: dict[Future[None], ValueError | None] = {}
            try:
                with self._db:
                    while self._due:
                        write, done = self._due.popleft()
                        if not done.set_running_or_notify_cancel():
                            continue
                        taken[done] = None
                        try:
                            write()
                        except ValueError as error:  # it has not begun to write
                            taken[done] = error
            except (sqlite3.DatabaseError, OverflowError) as error:  # the disk is full or damaged, 2 GiB in a record
                if not self._failed:
                    log.warning("%s: not all was written (%s); after a kill, more is generated again", self.path, error)
                self._failed = True
            for done, wrong in taken.items():
                done.set_exception(wrong) if wrong else done.set_result(None)


@contextlib.asynccontextmanager
async def opened(folder: Path, start: int, identity: Mapping[str, str]) -> AsyncIterator[Journal]:
    """Opens the journal in a run's directory, for a process that goes on from version `start`.

    What it holds from there on is only used if it was recorded by the same run with the same options. A damaged file,
    or one of another schema, is renamed; a damaged record ends what is used; each with a line.

    Args:
      identity: the run's id, and what its episodes and batches depend on.

    Raises OSError if the file cannot be opened or written.
    """
    path = folder / FILE
    with ThreadPoolExecutor(1, "journal") as pool:
        db, past = await asyncio.wrap_future(pool.submit(_opened, path, start, dict(identity)))
        journal = Journal(path, db, pool, past)
        try:
            yield journal
        finally:
            journal.close()


def _opened(path: Path, start: int, identity: Mapping[str, str]) -> tuple[sqlite3.Connection, Past]:
    for last in (False, True):
        try:
            db = sqlite3.connect(f"{path.absolute().as_uri()}?vfs=unix-none", uri=True, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise OSError(f"{path}: {error}; make it a file that can be written, or remove it") from error
        db.text_factory = lambda text: text.decode(errors="replace")
        try:
            db.execute("PRAGMA page_size = 1024")  # of a new file: half a page of each record is empty
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(TABLES)
            with db:
                return db, _past(db, path, start, {"schema": SCHEMA, **identity})
        except sqlite3.DatabaseError as error:
            db.close()
            if last or getattr(error, "sqlite_errorcode", 0) & 0xFF in OUTSIDE:
                raise OSError(f"{path}: {error}") from error
            aside = path.with_name(f"{path.name}.aside")
            log.warning("%s: %s; it is now %s, and what it had is generated again", path, error, aside.name)
            for end in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + end).rename(f"{aside}{end}")
    raise AssertionError


def _past(db: sqlite3.Connection, path: Path, start: int, now: dict[str, str]) -> Past:
    """What the journal has from version `start` on that can be used; removes the rest."""
    then = dict(db.execute("SELECT name, value FROM meta").fetchall())
    others = [name for name in now if then and then.get(name) != now[name]]
    if "schema" in others:
        raise sqlite3.DatabaseError("it was written by another version of areax")
    since = int(then.get(SINCE, 0))
    foreign = bool(others) or start < since
    [[newest]] = db.execute("SELECT max(version) FROM batches").fetchall()
    end, cursor = start, None
    what = ["another run" if name == "run" else f"other {name}" for name in others]
    why = f"it is of {' and '.join(what)}" if others else f"other options were given at version {since}"
    while not foreign and newest is not None and end <= newest:
        try:
            cursor, end = _batch(db, path, end).cursor, end + 1
        except ValueError as error:
            why = str(error)
            break
    begun = {} if foreign else _begun(db, path)
    first = 0 if "run" in others else end
    gone = db.execute("DELETE FROM batches WHERE version >= ?", (first,)).rowcount
    gone += sum(db.execute(f"DELETE FROM {table}").rowcount for table in OF_GROUPS) if foreign else 0
    now = now | {SINCE: str(start if foreign else since)}
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", now.items())
    if gone:
        log.warning("%s: what it has from version %d on is generated again: %s", path, first, why)
    return Past(range(start, end), cursor, begun)


def _begun(db: sqlite3.Connection, path: Path) -> dict[int, Begun]:
    made: dict[int, Begun] = {}
    rows = db.execute("SELECT prompt, episode, admitted, row, samples, hash FROM episodes ORDER BY prompt, episode")
    for prompt, episode, admitted, row, data, given in rows.fetchall():
        try:
            if _hash(data, (prompt, episode, admitted, row)) != given:
                raise ValueError("it is damaged")
            if episode == BEGUN:
                outcome, rate = json.loads(data) if data else (None, 0.0)
                made[prompt] = Begun(admitted, row, {}, {}, (outcome, rate) if outcome else None)
            elif prompt not in made or made[prompt][:2] != (admitted, row):
                raise ValueError("its group is not the one that began")
            else:
                made[prompt].episodes[episode] = codec.unpacked(data, lambda name: _image(db, name))
        except ValueError as error:
            log.warning("%s: episode %s of prompt %s is generated again: %s", path, episode, prompt, error)
    rows = db.execute("SELECT * FROM calls ORDER BY prompt, episode, call, start")
    for prompt, episode, number, start, admitted, request, data, given in rows.fetchall():
        try:
            if _hash(data, (prompt, episode, number, start, admitted, request)) != given:
                raise ValueError("it is damaged")
            if prompt not in made or made[prompt].version != admitted:
                raise ValueError("its group is not the one that began")
            calls, tokens = made[prompt].calls, codec.unpacked_tokens(data)
            before = calls.get((episode, number), Call(request, Generated([], [], [])))
            if before.request != request or len(before.made.tokens) != start:
                raise ValueError("what was before is damaged")
            calls[episode, number] = Call(request, before.made.then(tokens))
        except ValueError as error:
            what = f"{path}: call {number} of episode {episode} of prompt {prompt}"
            log.warning("%s is generated again from token %s on: %s", what, start, error)
    return made


def _batch(db: sqlite3.Connection, path: Path, version: int) -> Batch:
    """Reads a batch. Raises ValueError if it is missing or damaged."""
    row = db.execute("SELECT cursor, sizes, samples, hash FROM batches WHERE version = ?", (version,)).fetchone()
    try:
        if not row or _hash(row[2], (version, row[0], row[1])) != row[3]:
            raise ValueError("its bytes changed" if row else "it is missing")
        samples = iter(codec.unpacked(row[2], lambda name: _image(db, name)))
    except ValueError as error:
        raise ValueError(f"{path}: the batch of version {version} cannot be used: {error}") from error
    return Batch([[next(samples) for _ in range(size)] for size in json.loads(row[1])], json.loads(row[0]))


def _image(db: sqlite3.Connection, name: str) -> bytes:
    """The bytes of an image. Raises ValueError if it is missing or damaged, and forgets it, to be stored anew."""
    for (data,) in db.execute("SELECT data FROM images WHERE hash = ?", (name,)).fetchall():
        if isinstance(data, bytes) and Image(data).hash == name:
            return data
    db.execute("DELETE FROM images WHERE hash = ?", (name,))
    raise ValueError(f"its image {name} is missing or damaged")


def _hash(data: Any, key: Sequence[Any]) -> str:
    """Of a record; whatever a damaged file has in its place."""
    return xxhash.xxh3_128_hexdigest(
        f"{list(key)}".encode(errors="replace") + (data if isinstance(data, bytes) else b"")
    )
