"""Competition mathematics, as in MATH (arXiv:2103.03874): rows, and a reward for answers that are expressions."""

from __future__ import annotations

import re
import threading

PROMPT = "{problem}\nReason step by step, and put the final answer into \\boxed{{}}."
SECONDS = 3  # for each of reading and comparing one answer


def row(record: dict) -> dict:
    """A row from a record of MATH: `{"prompt", "answer", "completion", "problem", "level", "subject"}`.

    The answer is the record's "answer", else what its "solution" boxes last; `level` is 1 (easy) to 5 from "Level 5" or
    5, None for the few without one; `subject` is the record's, or its "type".
    """
    problem, solution, answer = (record.get(name) for name in ("problem", "solution", "answer"))
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise ValueError(f"mathematics: a record needs texts 'problem' and 'solution', got the fields {sorted(record)}")
    answer = boxed(solution) if answer is None else str(answer)
    if not answer:
        raise ValueError(f"mathematics: no \\boxed answer in the solution, got ...{solution[-60:]!r}")
    level = re.search(r"\d+", str(record.get("level")))
    return {
        "prompt": PROMPT.format(problem=problem),
        "answer": answer,
        "completion": solution,
        "problem": problem,
        "level": int(level[0]) if level else None,
        "subject": record.get("subject", record.get("type")),
    }


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} or \\fbox{...} of a text, or up to a space behind one without bracket."""
    places = list(re.finditer(r"\\(boxed|fbox)(?![a-zA-Z])", text))
    if not places:
        return None
    rest = text[places[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest)[0]
    depth = 0
    for bracket in re.finditer(r"\\.|[{}]", rest):  # \{ and \} open and close nothing
        depth += (bracket[0] == "{") - (bracket[0] == "}")
        if depth == 0:
            return rest[1 : bracket.start()].strip()
    return None


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
