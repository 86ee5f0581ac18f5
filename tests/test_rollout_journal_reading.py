"""Reading a run's journal while another process writes it, after that was killed, and when it is complete."""

import os
import signal
import subprocess
import sys

import pytest

from areax.rollout.journal import reading

WRITER = """
import asyncio, sys
from pathlib import Path
from areax.rollout.journal import store
from areax.rollout.types import Completion, sampled

def made(i):
    return sampled([1, 2], Completion([3 + i, 4], [-0.5, -0.25], [0, 0], "stop"), temperature=1.0, prompt=i)

async def main(folder, batches):
    async with store.opened(Path(folder), 0, {"run": "one"}) as journal:
        for version in range(batches):
            groups = [[made(i)] for i in range(4)]
            journal.close_batch(version, groups, {"batch": version + 1}, ()).result()
        print(batches, flush=True)
        sys.stdin.readline()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_a_journal_is_read_while_it_is_written_and_afterwards(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "60\n"

    def check():
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with reading.opened(tmp_path) as journal:
            assert journal.versions == [*range(60)]
            for version in (0, 31, 59):
                batch = journal.read(version)
                assert [len(group) for group in batch.groups] == [1] * 4 and batch.cursor == {"batch": version + 1}
                assert batch.groups[2][0].tokens.tolist() == [1, 2, 5, 4]
            with pytest.raises(ValueError, match="60"):
                journal.read(60)
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    check()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    check()
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), "60"], input="\n", text=True, check=True)
    check()  # complete
