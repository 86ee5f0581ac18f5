"""Log messages as they may stand on a terminal: they quote servers, files and programs that may write anything."""

import contextlib
import logging
import sys
import traceback
import types

from ...rollout.processes.printable import printable

LONGEST = 2000  # characters
_own = logging.getLogRecordFactory()


def record(name: str, *args, **kwargs) -> logging.LogRecord:
    """A log record; of areax's own one line, without characters that control a terminal, of at most LONGEST."""
    made = _own(name, *args, **kwargs)
    if name.startswith("areax."):
        with contextlib.suppress(Exception):  # of arguments that do not fit or fail, which logging reports itself
            made.msg, made.args = printable(made.getMessage())[:LONGEST], ()
    return made


def keep_printable() -> None:
    """Has all loggers of areax in this process make such records, and tracebacks be printed so."""
    logging.setLogRecordFactory(record)
    sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, where: types.TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, where))
    print("\n".join(map(printable, text.rstrip("\n").split("\n"))), file=sys.stderr, flush=True)
