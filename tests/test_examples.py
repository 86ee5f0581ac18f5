"""The notebooks of examples/ run without a warning and print what is committed; `make examples` writes that."""

import base64
import re

import nbformat
import notebooks
import numpy as np
import pytest
from notebooks import texts

NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
MOST = 60_000  # bytes of a picture

each = pytest.mark.parametrize("file", notebooks.NOTEBOOKS, ids=lambda file: file.stem)


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
    assert notebooks.paths(nbformat.read(file, as_version=4)) == []
    for place, cell in enumerate(code, 1):
        assert cell.execution_count == place, "run `make examples`"
        for output in cell.outputs:
            if picture := output.get("data", {}).get("image/png"):
                assert len(base64.b64decode(picture)) < MOST


def test_paths_of_a_machine_are_found():
    assert notebooks.PATH.findall("wrote /tmp/x/model") and notebooks.PATH.findall("file '/home/me/x'")
    assert not notebooks.PATH.findall("grpo/model/ with <|im_end|> a/b/c </tool_call>/x ./runs/ 1 / 2")


def test_every_notebook_is_listed():
    readme = (notebooks.ROOT / "examples" / "README.md").read_text()
    assert [file.name for file in notebooks.NOTEBOOKS] == sorted(re.findall(r"\]\((\w+\.ipynb)\)", readme))


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """A function that makes a repository with one notebook, of one cell or of these bytes."""
    file = tmp_path / "examples" / "one.ipynb"
    file.parent.mkdir()
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NOTEBOOKS", [file])
    monkeypatch.setattr(notebooks, "SECONDS", 3)

    def make(source):
        if isinstance(source, bytes):
            file.write_bytes(source)
        else:
            nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), file)
        return file

    return make


@pytest.mark.docs
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "a cell raised ZeroDivisionError: division by zero"),
        ("while True: pass", "a cell must end within 3 s, got one that does not"),
        ("import os; os._exit(1)", "Kernel died"),
        ("print('/home/me/x')", "outputs must have no path of a machine, got /home/...; print names"),
        (b'{"cells": [', "Notebook does not appear to be JSON: "),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_notebook_that_fails_is_named_and_stays_as_it_was(notebook, capsys, source, error):
    file = notebook(source)
    before = file.read_bytes()
    assert notebooks.main() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"examples: {file}: {error}") and last.endswith("; it was not written"), last
    assert file.read_bytes() == before


@pytest.mark.docs
def test_a_notebook_is_replaced_at_once(notebook, monkeypatch, capsys):
    """Written beside it first, of which a kill leaves the old one."""
    file, places = notebook("print(1)"), []
    kept = nbformat.write
    monkeypatch.setattr(nbformat, "write", lambda book, place: (places.append(place), kept(book, place)))
    assert notebooks.main() == 0 and capsys.readouterr().out == "examples/one.ipynb\n"
    assert places == [file.parents[1] / ".cache" / file.name] and not places[0].exists()
    assert texts(nbformat.read(file, as_version=4).cells[0]) == ["1\n"]
