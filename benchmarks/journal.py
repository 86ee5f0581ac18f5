"""What a run's journal costs: bytes a token on disk, CPU time of recording an episode by itself and with its batch.

    python benchmarks/journal.py RUN

Reads the batches that RUN/journal.db has, of a run that has ended or was killed, and records their episodes once more,
one at a time, into a new journal. Prints a line of JSON.
"""

import asyncio
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from areax.rollout.journal import store


async def measured(run: Path) -> dict[str, float]:
    """The figures of a run's directory."""
    with tempfile.TemporaryDirectory() as folder:
        for path in run.glob(f"{store.FILE}*"):  # also the log that a killed run leaves
            shutil.copy(path, folder)
        db = sqlite3.connect(Path(folder, store.FILE))
        batches = [store._batch(db, run, v) for (v,) in db.execute("SELECT version FROM batches ORDER BY version")]
        db.close()
        size = Path(folder, store.FILE).stat().st_size
    samples = [sample for batch in batches for group in batch.groups for sample in group]
    tokens, episodes = sum(len(s.tokens) for s in samples), len({s.rollout for s in samples})
    with tempfile.TemporaryDirectory() as folder:
        async with store.opened(Path(folder), 0, {}) as journal:
            cpu = time.process_time()
            for i, sample in enumerate(samples):
                journal.keep(i, 0, "", 0, [sample], 1.0)
                await asyncio.wrap_future(journal.flush())
            kept = time.process_time() - cpu
            for v, batch in enumerate(batches):
                await asyncio.wrap_future(journal.close_batch(v, batch.groups, batch.cursor, []))
            cpu = time.process_time() - cpu
    return {
        "episodes": episodes,
        "tokens_per_episode": tokens / episodes,
        "sampled_share": sum(int(s.mask.sum()) for s in samples) / tokens,
        "bytes_per_token": size / tokens,
        "cpu_ms_per_episode": 1e3 * cpu / episodes,
        "cpu_ms_to_keep": 1e3 * kept / episodes,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(Path(sys.argv[1])))))
