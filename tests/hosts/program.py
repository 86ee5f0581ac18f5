"""`areax ARGUMENTS` with shorter limits: python program.py START_S SILENT_S ARGUMENTS.

WRONG_BY_S in the environment: what Python's clock of the day is wrong by.
"""

import os
import sys
import time

from areax.__main__ import main
from areax.parallel.multihost import meeting

if __name__ == "__main__":
    meeting.START_S, meeting.SILENT_S = map(int, sys.argv[1:3])
    if wrong_by_s := int(os.environ.get("WRONG_BY_S", "0")):
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + wrong_by_s
        time.time_ns = lambda: right_ns() + wrong_by_s * 10**9
    sys.argv[1:] = sys.argv[3:]
    sys.exit(main())
