"""Folders that a process owns, and the guard that removes them and ends its children: with real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from areax.rollout.processes import folders

# Makes a scratch folder and starts a child that ignores SIGTERM, prints both and waits.
OWNER = """
import subprocess, sys, time
from pathlib import Path
from areax.rollout.processes import folders, guard
with folders.scratch(Path(sys.argv[1]), "test") as path:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    guard.process(child.pid, 0.3)
    print(path, child.pid, guard._guard.pid, flush=True)
    time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.fixture
def owner(tmp_path):
    """(the process, its folder, its child's pid)."""
    command = [sys.executable, "-c", OWNER, str(tmp_path), STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        path, child, _ = process.stdout.readline().split()
        yield process, Path(path), int(child)
        process.kill()


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def guards():
    """Guards that run now: they are nobody's children."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"orphan_guard.py" in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def test_a_killed_process_leaves_neither_children_nor_folders(owner):
    process, path, child = owner
    assert path.is_dir() and runs(child)
    process.kill()
    jobs.until(lambda: not runs(child) and not path.exists(), 20)


def test_what_a_killed_guard_leaves_is_removed_by_the_next_start(tmp_path):
    before = guards()
    command = [sys.executable, "-c", OWNER, str(tmp_path), STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        path, child, _ = process.stdout.readline().split()
        try:
            [guard] = [pid for pid in guards() - before if os.getsid(pid) != os.getsid(0) and of(pid, process.pid)]
            os.kill(guard, signal.SIGKILL)
            folders.sweep(tmp_path)
            assert Path(path).is_dir()  # its process lives
            process.kill()
            process.wait()
            with folders.scratch(tmp_path, "test") as mine:
                assert list(tmp_path.iterdir()) == [mine]
            assert not list(tmp_path.iterdir())
        finally:
            os.kill(int(child), signal.SIGKILL)
            process.kill()


def of(guard, process):
    """Whether a guard reads the pipe that a process writes."""
    ends = {os.readlink(f"/proc/{process}/fd/{entry}") for entry in os.listdir(f"/proc/{process}/fd")}
    return os.readlink(f"/proc/{guard}/fd/0") in ends


def test_the_same_process_number_twice_is_no_conflict(tmp_path):
    """Two containers on one shared memory: in both the trainer is process 1, and the first was killed."""
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    program = """
import os, sys
from pathlib import Path
from areax.rollout.processes import folders
with folders.scratch(Path(sys.argv[1]), "test") as path:
    print(os.getpid(), path, flush=True)
    sys.stdin.read()
"""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([*inside, program, str(tmp_path)], **pipes) as first:
        number, path = first.stdout.readline().split()
        with subprocess.Popen([*inside, program, str(tmp_path)], **pipes) as second:
            again, other = second.stdout.readline().split()
            assert number == again == "1" and path != other and Path(path).is_dir()
            first.kill()
            first.wait()
            jobs.until(lambda: not Path(path).exists() or not swept(tmp_path, path), 20)
            assert Path(other).is_dir()
            second.stdin.close()
            assert second.wait(20) == 0 and not Path(other).exists()


def swept(root, path):
    folders.sweep(root)
    time.sleep(0.05)
    return Path(path).exists()


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "areax-mine").mkdir()  # without a lock
    (tmp_path / "other").mkdir()
    held = folders.lock(tmp_path / "other/.lock")
    assert held and folders.lock(tmp_path / "other/.lock") is None
    folders.sweep(tmp_path)
    held.close()
    folders.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["areax-mine", "other"]


def test_a_folder_whose_lock_another_process_has_is_not_left_behind(tmp_path, monkeypatch):
    """Another process asks for the lock between the folder's first moment and its owner's."""
    taken, lock = [], folders.lock

    def second(file):
        taken.append(lock(file))
        return lock(file) if len(taken) == 1 else taken[-1]

    monkeypatch.setattr(folders, "lock", second)
    with folders.scratch(tmp_path, "test") as mine:
        assert len(taken) == 2 and list(tmp_path.iterdir()) == [mine]
    taken[0].close()
