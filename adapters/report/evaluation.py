"""The HTML page of an evaluation: its numbers, and what was answered to each row."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tracking import metric_catalog, run_dir
from . import charts
from . import html as page

MOST = 2_000  # answers on the page


def write(
    path: str | os.PathLike, title: str, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the page.

    Args:
      results: numbers by name.
      answers: per row {"prompt", "answers", "rewards", "finish"}; the first `MOST` answers are shown.
    """
    numbers = page.table(
        ("result", "value", "meaning"),
        ((name, _number(x), page.escape(metric_catalog.result(name))) for name, x in results.items()),
    )
    cells, room = [], MOST
    for i, row in enumerate(answers):
        if room <= 0:
            break
        room -= max(1, len(row["answers"]))
        cells.append(
            (str(i + 1), _folded(row["prompt"] or ""), _mean(row["rewards"]), "".join(map(_answer, *_parts(row))))
        )
    words = f"{len(cells)} of {len(answers)} rows; all of them are in answers.jsonl"
    table = f'<p class="lead">{words}.</p>' + page.table(("row", "prompt", "mean reward", "answers"), cells)
    accuracy = results.get("accuracy")
    subtitle = "" if accuracy is None else f"accuracy {accuracy:.4g} on {results.get('rows')} rows"
    sections = [("numbers", "Numbers", numbers, True), ("answers", "Answers", table, True)]
    run_dir.write_text(Path(path), page.document(title, subtitle, sections))


def _parts(row: Mapping[str, Any]) -> tuple[Sequence, Sequence, Sequence]:
    return row["answers"], row["rewards"], row["finish"]


def _answer(text: str, reward: float | None, finish: str) -> str:
    return f"<div>{_number(reward)}, {page.escape(finish)} {_folded(text)}</div>"


def _folded(text: str) -> str:
    first = " ".join(text[:400].split())
    return page.folded(first[:80] + ("..." if len(text) > 80 else "") or "(empty)", f"<pre>{page.escape(text)}</pre>")


def _mean(rewards: Sequence[float | None]) -> str:
    scored = [x for x in rewards if x is not None]
    return _number(sum(scored) / len(scored) if scored else None)


def _number(value: Any) -> str:
    return "–" if value is None else charts.number(value)
