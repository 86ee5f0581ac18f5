"""A reward for answers that are expressions: fractions, roots, sets, intervals, formulas."""

from __future__ import annotations

import threading

SECONDS = 3  # for each of reading and comparing one answer


def reward(text: str, row: dict) -> float:
    """1.0 if the final answer in `text` means the same as `row["answer"]`, else 0.0, by math-verify.

    The final answer is the \\boxed{...} one, else what the text calls its answer, else its last
    expression; several boxes count as a set of answers, so that guessing twice does not pay.
    An answer that takes longer than `SECONDS` to understand counts as wrong. The limit is an alarm
    signal, which exists only in the main thread of a process, where the workers of a reward pool run;
    in another thread only the caller's own limit holds.
    """
    from math_verify import parse, verify

    gold = str(row["answer"])
    alarm = threading.current_thread() is threading.main_thread()
    seconds = SECONDS if alarm else None
    wanted = parse(gold if "\\boxed{" in gold else f"\\boxed{{{gold}}}", parsing_timeout=seconds)
    if not wanted:
        raise ValueError(f"mathematics: the answer of a row cannot be read, got {gold!r}")
    return float(verify(wanted, parse(text, parsing_timeout=seconds), timeout_seconds=seconds))
