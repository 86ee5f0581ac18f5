"""The notebooks of examples/ run without a warning and print what is committed; `make examples` writes that."""

import base64
import re

import nbformat
import notebooks
import numpy as np
import pytest

NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
PATH = re.compile(r"(?<![\w./<])/[\w.-]+/")  # an absolute one
MOST = 60_000  # bytes of a picture

each = pytest.mark.parametrize("file", notebooks.NOTEBOOKS, ids=lambda file: file.stem)


def texts(cell) -> list[str]:
    """What a cell printed, and the text of what it showed."""
    return [output["text"] if "text" in output else output["data"]["text/plain"] for output in cell.outputs]


def kinds(cell) -> list:
    """The kinds of a code cell's outputs: the names of streams, and the formats of what it showed."""
    return [output.get("name") or sorted(output["data"]) for output in cell.outputs]


@pytest.mark.docs
@each
def test_a_notebook_runs_and_prints_what_is_committed(file, tmp_path):
    """Cells tagged "varies" show what the last bit of a number may change, such as samples: their texts may differ."""
    committed, now = nbformat.read(file, as_version=4), notebooks.execute(file, tmp_path)
    for old, new in zip(committed.cells, now.cells, strict=True):
        if new.cell_type != "code":
            continue
        assert "stderr" not in kinds(new), texts(new)
        assert kinds(new) == kinds(old), f"{new.source}\n\nrun `make examples`"
        if "varies" in new.metadata.get("tags", ()):
            continue
        for before, after in zip(texts(old), texts(new), strict=True):
            assert NUMBER.sub("#", after) == NUMBER.sub("#", before)
            numbers = [[float(number) for number in NUMBER.findall(text)] for text in (after, before)]
            np.testing.assert_allclose(*numbers, rtol=0.02)


@each
def test_a_notebook_is_written_to_be_read(file):
    """It has a title, a sentence before each cell of code, links that exist, and the outputs of a complete run, with
    small pictures and no path of a machine."""
    cells = nbformat.read(file, as_version=4).cells
    assert cells[0].source.startswith("# ") and cells[0].source.count("\n\n") == 1
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert {cell.cell_type for cell in cells if cell not in code} == {"markdown"}
    assert all(cells[place - 1].cell_type == "markdown" for place, cell in enumerate(cells) if cell in code)
    for cell in cells:
        links = [link for link in LINK.findall(cell.source) if cell.cell_type == "markdown" and ":" not in link]
        assert not [link for link in links if not (file.parent / link).exists()]
    for place, cell in enumerate(code, 1):
        assert cell.execution_count == place, "run `make examples`"
        assert not PATH.findall("\n".join(texts(cell)))
        for output in cell.outputs:
            if picture := output.get("data", {}).get("image/png"):
                assert len(base64.b64decode(picture)) < MOST


def test_paths_of_a_machine_are_found():
    assert PATH.findall("wrote /tmp/x/model") and PATH.findall("file '/home/me/x'")
    assert not PATH.findall("grpo/model/ with <|im_end|> a/b/c </tool_call>/x ./runs/ 1 / 2")


def test_every_notebook_is_listed():
    readme = (notebooks.ROOT / "examples" / "README.md").read_text()
    assert [file.name for file in notebooks.NOTEBOOKS] == sorted(re.findall(r"\]\((\w+\.ipynb)\)", readme))
