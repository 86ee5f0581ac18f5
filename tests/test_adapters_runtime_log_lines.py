"""What a server or a file may write does not reach the terminal as it is."""

import logging

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
