"""Writes what the chips' compilers make of each model family to docs/compiled.md: `compiled_table.py RESULTS ...`.

The results are those of `tests/compilers/test_families.py`, a program a line; ones that do not exist are left out.
`make compiled-table` runs the tests, for hours.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import written_parts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compiled.md"
sys.path.append(str(ROOT / "tests" / "compilers"))
import family_sizes  # noqa: E402

PARTS = "train", "score", "decode", "prefill"
PACKAGES = "jax", "jax-cuda13-plugin", "libtpu"
CHIPS = {"h100": "one H100", "v5p": "one TPU v5p"}
# The beginning of a kernel's name in a program -> what the page calls it.
KERNELS = {
    "attention_forward": "triton", "attention_d": "triton", "attention_pages": "pages", "splash": "splash",
    "jit(gmm)": "megablox", "jit(tgmm)": "megablox",
}  # fmt: skip
BEGIN, END = "<!-- written by make compiled-table -->\n", "<!-- end of what make compiled-table writes -->\n"

Found = dict[tuple[str, str, str], dict]


def results(lines: Iterable[str]) -> Found:
    """(chip, family, part) -> what was found last: the fields of `compiled.Compiled`, and perhaps "quickly"."""
    each = (json.loads(line) for line in lines if line.strip())
    return {(one["chip"], one["family"], one["part"]): one for one in each}


def cell(one: Mapping | None) -> str:
    """Bytes of arguments and temporaries, and kernels; why it was refused; or that it was not run."""
    if one is None:
        return "not run"
    if one["problem"]:
        return f"refused: {one['problem'][:80]}".replace("|", "/")
    short = lambda name: next((short for begin, short in KERNELS.items() if name.startswith(begin)), name)
    named = dict.fromkeys(map(short, one["kernels"]))
    mark = "*" if one.get("quickly") else ""
    size = lambda name: f"{one[f'{name}_bytes'] / 1e9:.1f}"
    return f"{size('argument')} + {size('temporary')}{mark} {', '.join(named) or 'no kernel'}"


def table(found: Found, chip: str) -> str:
    """A row for each model_type."""
    cells = lambda family: [cell(found.get((chip, family, part))) for part in PARTS]
    row = lambda family: [f"`{family}`", family_sizes.MODELS[family][0], *cells(family)]
    lines = [["model_type", "sizes of", *PARTS], *map(row, sorted(family_sizes.MODELS))]
    head, *rows = [f"| {' | '.join(line)} |\n" for line in lines]
    return head + "|---" * len(lines[0]) + "|\n" + "".join(rows)


def write(page: str, found: Found, versions: str) -> str:
    """The page with the tables of these results, and a line with the versions of the compilers."""
    parts = "".join(f"\n### {title[0].upper()}{title[1:]}\n\n{table(found, chip)}" for chip, title in CHIPS.items())
    return written_parts.replaced(page, BEGIN, END, f"{parts}\n{versions}\n\n")


if __name__ == "__main__":
    found = results(line for path in map(Path, sys.argv[1:]) if path.exists() for line in path.read_text().splitlines())
    versions = f"With {', '.join(f'{name} {metadata.version(name)}' for name in PACKAGES)}."
    PAGE.write_text(write(PAGE.read_text(), found, versions))
    if refused := sorted(key for key, one in found.items() if one["problem"]):
        sys.exit(f"the compilers refuse: {refused}")
