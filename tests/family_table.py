"""Writes what was tested of each model family to docs/models.md and its Chinese page: `family_table.py REPORT.xml ...`.

The reports are those of pytest's --junitxml; ones that do not exist are left out. `make family-table` runs the tests.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import written_parts

from areax import models

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "models.md"
VERSIONS = {
    PAGE: "With {}.",
    DOCS / "zh" / "models.md": "测试所用的版本：{}。",
}  # the line below the table of each page
COLUMNS = {  # a file of tests, and those that count
    "exact": ("test_models_parity", ("test_logits", "test_gradients", "test_packed_rows")),
    "engine": (
        "test_rollout_engine_programs_decode",
        ("test_greedy_tokens_are_those_of_transformers", "test_logprobs_equal_those_of_a_teacher_forced_forward_pass"),
    ),
    "meshes": ("test_parallel_mesh", ("test_a_step_equals_one_device",)),
    "adapters": ("test_adapters_peft", ("test_saved_adapters_give_the_same_outputs_in_peft_and_merged",)),
    "SGLang": ("test_families", ("test_sglang_computes_what_we_do", "test_a_push_replaces_the_weights")),
}
BEGIN, END = "<!-- written by make family-table -->\n", "<!-- end of what make family-table writes -->\n"
PACKAGES = "jax", "transformers", "peft"


def results(reports: Iterable[Path]) -> dict[tuple[str, str], list[bool]]:
    """(column, model_type) -> whether each of its tests passed; one that was skipped did not. Later reports count."""
    each: dict[tuple[str, str], dict[str, bool]] = {}
    columns = {file: (column, names) for column, (file, names) in COLUMNS.items()}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            column, names = columns.get(case.get("classname", "").rpartition(".")[2], ("", ()))
            test, _, parameters = case.get("name", "").partition("[")
            if test in names:
                passed = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
                for family in set(re.findall(r"\w+", parameters)) & models.FAMILIES.keys():
                    each.setdefault((column, family), {})[case.get("name", "")] = passed
    return {key: list(passed.values()) for key, passed in each.items()}


def table(found: dict[tuple[str, str], list[bool]]) -> str:
    """A row for each model_type: `yes` where all tests passed, `no` where one did not, a dash where there is none.

    A model_type that is another name of a family has that family's results where it has none of its own.
    """

    def cell(column: str, family: str) -> str:
        others = [other for other, module in models.FAMILIES.items() if module is models.FAMILIES[family]]
        cases = found.get((column, family)) or [x for other in others for x in found.get((column, other), ())]
        return ("yes" if all(cases) else "no") if cases else "-"

    rows = [[f"`{family}`", *(cell(column, family) for column in COLUMNS)] for family in sorted(models.FAMILIES)]
    lines = [["model_type", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def write(page: str, found: dict[tuple[str, str], list[bool]], versions: str = VERSIONS[PAGE]) -> str:
    """The page with the table of a run, and a line with the versions of the packages that it was compared with."""
    line = versions.format(", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    return written_parts.replaced(page, BEGIN, END, f"\n{table(found)}\n{line}\n\n")


if __name__ == "__main__":
    found = results(path for path in map(Path, sys.argv[1:]) if path.exists())
    for page, versions in VERSIONS.items():
        page.write_text(write(page.read_text(), found, versions))
    if failed := sorted(key for key, passed in found.items() if not all(passed)):
        sys.exit(f"these have tests that did not pass: {failed}")
