"""Matches names with a regular expression of somebody else's, in a process with limits: one may take for ever.

The file is run as the program of that process, so it imports nothing of areax.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence

SECONDS, BYTES = 10, 2**30  # of processor time, of memory
WALL = 6  # times as long it may take, where Python is slow to start


def fullmatches(pattern: str, names: Sequence[str]) -> set[str]:
    """Those of `names` that all of the pattern matches, as `re.fullmatch`.

    Raises:
      ValueError: it is no regular expression, or does not keep the limits.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=json.dumps({"pattern": pattern, "names": list(names), "seconds": SECONDS}),
            capture_output=True,
            timeout=WALL * SECONDS,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        done = None
    if not done or done.returncode:
        raise ValueError(f"must match {len(names)} names within {SECONDS} s and {BYTES >> 20} MiB")
    made = json.loads(done.stdout)
    if isinstance(made, str):
        raise ValueError(f"must be a regular expression ({made})")
    return set(made)


def main() -> None:
    """Reads {pattern, names, seconds} from standard input; writes the names that match, or why the pattern is none."""
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"],) * 2)
    try:
        pattern = re.compile(asked["pattern"])
    except (re.error, RecursionError, OverflowError) as error:
        json.dump(str(error)[:80], sys.stdout)
        return
    json.dump([name for name in asked["names"] if pattern.fullmatch(name)], sys.stdout)


if __name__ == "__main__":
    main()
