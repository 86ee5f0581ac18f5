"""Competition mathematics (MATH, arXiv:2103.03874): rows, and a reward for symbolic answers."""

from __future__ import annotations

import re
import threading

PROMPT = "{problem}\nReason step by step, and put the final answer into \\boxed{{}}."
SECONDS = 3  # each for parsing and for comparing an answer


def row(record: dict) -> dict:
    """Converts a record of MATH to a row `{"prompt", "answer", "completion", "problem", "level", "subject"}`.

    The answer is the record's "answer", else the last box of its "solution"; `level` is 1 (easy) to 5, parsed from
    "Level 5" or 5, None for the few without one; `subject` is the record's, or its "type".
    """
    problem, solution, answer = (record.get(name) for name in ("problem", "solution", "answer"))
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise ValueError(
            f"competition_math: a record needs strings 'problem' and 'solution', got the fields {sorted(record)}"
        )
    answer = boxed(solution) if answer is None else str(answer)
    if not answer:
        raise ValueError(f"competition_math: no \\boxed answer in the solution, got ...{solution[-60:]!r}")
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
    """The content of the last \\boxed{...} or \\fbox{...} in a text; without a brace, up to the next space."""
    places = list(re.finditer(r"\\(boxed|fbox)(?![a-zA-Z])", text))
    if not places:
        return None
    rest = text[places[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest)[0]
    depth = 0
    for bracket in re.finditer(r"\\.|[{}]", rest):  # \{ and \} are skipped
        depth += (bracket[0] == "{") - (bracket[0] == "}")
        if depth == 0:
            return rest[1 : bracket.start()].strip()
    return None


def reward(text: str, row: dict) -> float:
    """1.0 if the final answer in `text` is equivalent to `row["answer"]` according to math-verify, else 0.0.

    The final answer is the \\boxed{...} one, else what the text calls its answer, else its last expression; several
    boxes count as a set of answers, so guessing twice does not pay. An answer that takes longer than `SECONDS` to parse
    or compare counts as wrong. The timeout uses an alarm signal, which works only in the main thread, where workers of
    a reward pool run their rewards; in other threads only the caller's timeout applies.
    """
    from math_verify import parse, verify

    gold = str(row["answer"])
    alarm = threading.current_thread() is threading.main_thread()
    seconds = SECONDS if alarm else None
    wanted = parse(gold if "\\boxed{" in gold else f"\\boxed{{{gold}}}", parsing_timeout=seconds)
    if not wanted:
        raise ValueError(f"competition_math: the answer of a row cannot be parsed, got {gold!r}")
    return float(verify(wanted, parse(text, parsing_timeout=seconds), timeout_seconds=seconds))
