"""Loading functions by name: wrong names give a one-line error, and other processes find the same objects."""

import pickle
import subprocess
import sys

import pytest

from areax.rollout import object_path

FILE = """
import dataclasses

@dataclasses.dataclass
class Row:
    answer: int = 41

LIMIT = 3

def reward(text, row):
    return float(text == row["answer"])
"""


def test_a_function_of_a_module():
    assert object_path.resolve("json:dumps")([1]) == "[1]"
    assert object_path.resolve("areax.rollout.object_path:resolve") is object_path.resolve


def test_a_file_is_executed_once_and_its_dataclasses_work(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    reward = object_path.resolve("mine.py:reward")
    assert object_path.resolve(f"{tmp_path}/../{tmp_path.name}/mine.py:reward") is reward
    Row = object_path.resolve("mine.py:Row")
    assert Row() == Row(41) and pickle.loads(pickle.dumps(Row(7))) == Row(7)


def test_objects_defined_in_a_file_can_be_unpickled_by_another_process(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    row = object_path.resolve(f"{file}:Row")(5)
    program = (
        "import pickle, sys\n"
        "from areax.rollout import object_path\n"
        f"object_path.module({str(file)!r})\n"
        "print(pickle.loads(sys.stdin.buffer.read()))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(row), capture_output=True, check=True)
    assert done.stdout == b"Row(answer=5)\n"


def test_files_of_the_same_name_are_different_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def where(): return {folder!r}")
    assert [object_path.resolve(f"{tmp_path}/{f}/mine.py:where")() for f in "ab"] == ["a", "b"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("reward", "'reward' does not name a function; write 'package.module:function' or"),
        ("json:", "does not name a function"),
        (":dumps", "does not name a function"),
        ("json:dumps()", "does not name a function"),
        ("some/file:reward", "'some/file' is neither a module nor a path ending in .py"),
        ("no_such_package.tasks:reward", "there is no module 'no_such_package'; is it installed?"),
        ("json.nothing:reward", "there is no module 'json.nothing'"),
        ("nowhere/mine.py:reward", "^nowhere/mine.py: there is no such file"),
        ("json:dump_s", "there is no 'dump_s' in json; did you mean dumps"),
        ("math:pi", "must be a function, got float"),
        ("broken.py:reward", r"broken.py: cannot be imported \\(.*line 1\\)"),
        ("needs.py:reward", r"needs.py: cannot be imported \\(No module named 'no_such_package'\\)"),
        ("empty.py:reward", "there is no 'reward' in empty.py; it defines no functions"),
    ],
)
def test_a_wrong_name_gives_a_one_line_error(tmp_path, monkeypatch, name, message):
    (tmp_path / "broken.py").write_text("def reward(:")
    (tmp_path / "needs.py").write_text("import no_such_package")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message.replace("\\\\", "\\")) as caught:
        object_path.resolve(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_raises_leaves_no_partial_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("value = 1\n1 / 0")
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(ValueError, match="its import ends with ZeroDivisionError: division by zero .mine.py:2."):
            object_path.resolve(f"{file}:value")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise RuntimeError('no\\nway')", "its import ends with RuntimeError: no way (mine.py:1)"),
        ("import sys\nsys.exit(3)", "its import ends with SystemExit: 3 (mine.py:2)"),
        ("import json\njson.loads('{')", "its import ends with JSONDecodeError: "),
        ("assert False", "its import ends with AssertionError:  (mine.py:1)"),
    ],
)
def test_a_module_that_raises_or_exits_at_import_is_one_line(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError) as caught:
        object_path.resolve(f"{tmp_path}/mine.py:reward")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rows_are_abbreviated_in_messages():
    assert object_path.row({"id": "x-7", "prompt": "long" * 99}) == "row id 'x-7'"
    shown = object_path.row({"prompt": "a\nb" * 99})
    assert shown.startswith("row {'prompt': 'a\\nba") and len(shown) <= 124 and "\n" not in shown
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert (
        object_path.row({"schema": deep, "prompt": "a"}) == "row nested too deep, with the fields ['prompt', 'schema']"
    )
