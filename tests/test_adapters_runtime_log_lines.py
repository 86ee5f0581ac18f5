"""What a server or a file may write does not reach the terminal as it is."""

import logging
import sys

from areax.adapters.runtime import log_lines


def test_messages_of_areax_are_one_printable_line_of_bounded_length(caplog):
    before = logging.getLogRecordFactory()
    try:
        log_lines.keep_printable()
        logging.getLogger("areax.rollout.fleet").warning("%s: \x1b[2J\n%s", "a server", "x" * 10**6)
        logging.getLogger("other").warning("two\nlines")
    finally:
        logging.setLogRecordFactory(before)
    ours, others = (record.getMessage() for record in caplog.records)
    assert ours.startswith("a server: \\x1b[2J\\nxxx") and len(ours) == log_lines.LONGEST
    assert others == "two\nlines"


def test_tracebacks_have_no_characters_that_control_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = logging.getLogRecordFactory()
    log_lines.keep_printable()
    logging.setLogRecordFactory(before)
    try:
        raise RuntimeError("\x1b[2Jgone\nand more")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    told = capfd.readouterr().err
    assert told.endswith("RuntimeError: \\x1b[2Jgone\nand more\n") and "\x1b" not in told
