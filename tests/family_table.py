"""Which suites each model family passes, as a table in docs/models.md: `python tests/family_table.py REPORT.xml ...`.

The reports are those of pytest's --junitxml. `make models` runs the suites and this.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from areax import models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SUITES = {  # a column and its file of tests
    "exact": "test_models_parity",
    "engine": "test_rollout_engine_decode",
    "meshes": "test_parallel_mesh",
    "adapters": "test_adapters_peft",
    "SGLang": "test_families",
}
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|(?:.*\|)? (.*?) ?\|$", re.M)
HEADER = re.compile(r"^\| model_type \| models \|.*\n\|---.*\n", re.M)


def results(reports: Iterable[Path]) -> dict[tuple[str, str], bool]:
    """Whether all tests of a column and a module of models passed; skipped ones count as not passed."""
    columns, passed = {file: column for column, file in SUITES.items()}, {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            column = columns.get(case.get("classname", "").rpartition(".")[2])
            words = re.split(r"[\[\]\- ]", case.get("name", ""))
            for module in {models.FAMILIES[word].__name__ for word in words if word in models.FAMILIES}:
                if column:
                    well = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
                    passed[column, module] = passed.get((column, module), True) and well
    return passed


def table(page: str, passed: dict[tuple[str, str], bool]) -> str:
    """The page with the marks of a run.

    Raises:
      ValueError: a family has no row.
    """
    listed = {row[1] for row in ROW.finditer(page)}
    if missing := models.FAMILIES.keys() - listed:
        raise ValueError(f"{PAGE}: {', '.join(sorted(missing))} must have a row")

    def marked(row: re.Match) -> str:
        module = models.FAMILIES[row[1]].__name__
        marks = " | ".join("yes" if passed.get((column, module)) else "no" for column in SUITES)
        return f"| `{row[1]}` | {row[2]} | {marks} | {row[3]} |".replace("|  |", "| |")

    head = f"| model_type | models | {' | '.join(SUITES)} | to know |\n{'|---' * (len(SUITES) + 3)}|\n"
    return HEADER.sub(head, ROW.sub(marked, page))


if __name__ == "__main__":
    PAGE.write_text(table(PAGE.read_text(), results(map(Path, sys.argv[1:]))))
