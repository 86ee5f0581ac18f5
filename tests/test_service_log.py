"""The durable state when the disk is full, and when it is damaged."""

import sqlite3
import threading

import pytest

from areax.service import log


def limited(store, pages):
    """Lets the database have so many pages, as a full disk does."""
    store._db.execute(f"PRAGMA max_page_count = {pages}")


def full(store):
    limited(store, store._db.execute("PRAGMA page_count").fetchone()[0])


def test_a_result_waits_for_room_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "AGAIN_S", 0.01)
    store, closing, notes = log.Log(tmp_path / "db"), threading.Event(), []
    request = log.Request("model", 1, "session", "forward_backward", b"")
    assert store.add(request)
    full(store)
    with pytest.raises(log.Unwritable, match="db: cannot be written .*full"):
        store.add(log.Request("model", 2, "session", "forward_backward", bytes(10**5)))
    more = request, log.DONE, bytes(10**5), closing, lambda: notes.append(len(notes))
    settled = []
    thread = threading.Thread(target=lambda: settled.append(store.settle(*more)))
    thread.start()
    while len(notes) < 3:
        pass
    assert store.request("model", 1).state == log.PENDING
    limited(store, 10**6)
    thread.join()
    assert settled == [True] and store.request("model", 1).result == bytes(10**5)


def test_a_result_without_room_stays_pending_at_the_end(tmp_path, monkeypatch):
    store, closing = log.Log(tmp_path / "db"), threading.Event()
    request = log.Request("model", 1, "session", "forward_backward", b"")
    store.add(request)
    full(store)
    closing.set()
    assert not store.settle(request, log.DONE, bytes(10**5), closing)
    assert [each.id for each in store.pending()] == [request.id]


@pytest.mark.parametrize("damaged", [b"no database" * 100, None])
def test_a_damaged_database_is_refused(tmp_path, damaged):
    path = tmp_path / "db"
    store = log.Log(path)
    for seq in range(50):
        store.add(log.Request("model", seq, "session", "forward_backward", bytes(1000)))
    store.close()
    content = path.read_bytes()
    path.write_bytes(damaged or content[:8192] + bytes(len(content) - 8192))
    with pytest.raises(ValueError, match="db: must be a database of this server") as caught:
        log.Log(path)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, sqlite3.Error)
