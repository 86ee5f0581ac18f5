"""Writes what the chips' compilers make of each model family to docs/compiled.md: `compiled_table.py RESULTS ...`.

The results are those of `tests/compilers/test_families.py`, a program a line. Cells of programs that are not among them
stay as they are. `make compiled-table` runs the tests, for hours.
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


def written(page: str) -> dict[tuple[str, str, str], str]:
    """(chip, family, part) -> a cell of the page."""
    found = {}
    for chip, title in CHIPS.items():
        for line in page.partition(f"### {title[0].upper()}{title[1:]}\n")[2].partition("\n#")[0].splitlines():
            if line.startswith("| `"):
                family, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
                found |= {(chip, family.strip("`"), part): cell for part, cell in zip(PARTS, cells, strict=True)}
    return found


def cell(one: Mapping) -> str:
    """Bytes of arguments and temporaries, and kernels; or why it was refused."""
    if one["problem"]:
        return f"refused: {one['problem'][:80]}".replace("|", "/")
    short = lambda name: next((short for begin, short in KERNELS.items() if name.startswith(begin)), name)
    named = dict.fromkeys(map(short, one["kernels"]))
    mark = "*" if one.get("quickly") else ""
    size = lambda name: f"{one[f'{name}_bytes'] / 1e9:.1f}"
    return f"{size('argument')} + {size('temporary')}{mark} {', '.join(named) or 'no kernel'}"


def table(found: Found, before: Mapping[tuple[str, str, str], str], chip: str) -> str:
    """A row for each model_type."""
    each = lambda key: cell(found[key]) if key in found else before.get(key, "not run")
    cells = lambda family: [each((chip, family, part)) for part in PARTS]
    row = lambda family: [f"`{family}`", family_sizes.MODELS[family][0], *cells(family)]
    lines = [["model_type", "sizes of", *PARTS], *map(row, sorted(family_sizes.MODELS))]
    head, *rows = [f"| {' | '.join(line)} |\n" for line in lines]
    return head + "|---" * len(lines[0]) + "|\n" + "".join(rows)


def write(page: str, found: Found, versions: str) -> str:
    """The page with the tables of these results, and a line with the versions of the compilers."""
    known = written(page)
    named = ((chip, f"{title[0].upper()}{title[1:]}") for chip, title in CHIPS.items())
    parts = "".join(f"\n### {title}\n\n{table(found, known, chip)}" for chip, title in named)
    return written_parts.replaced(page, BEGIN, END, f"{parts}\n{versions}\n\n")


if __name__ == "__main__":
    found = results(line for path in map(Path, sys.argv[1:]) if path.exists() for line in path.read_text().splitlines())
    versions = f"With {', '.join(f'{name} {metadata.version(name)}' for name in PACKAGES)}."
    PAGE.write_text(write(PAGE.read_text(), found, versions))
    if refused := sorted(key for key, one in found.items() if one["problem"]):
        sys.exit(f"the compilers refuse: {refused}")
