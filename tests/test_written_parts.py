"""Programs that write pages: damaged input is refused in one line, before anything is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skills
import written_parts

BEGIN, END = "<!-- begin -->\n", "<!-- end -->\n"
LIST = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
NEEDED = [
    "*.md",
    "tests/*.py",
    "pyproject.toml",
    "constraints.txt",
    "tests/sglang_cpu/*",
    ".ci/run",
    ".github/workflows/*",
]


def test_only_what_is_between_the_marks_changes():
    assert written_parts.replaced(f"a\n{BEGIN}old\n{END}b\n", BEGIN, END, "new\n") == f"a\n{BEGIN}new\n{END}b\n"


@pytest.mark.parametrize("page", ["a\n", BEGIN, END, END + BEGIN, 2 * (BEGIN + END)])
def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(
        ValueError, match=r"a page must have '<!-- begin -->' once, and '<!-- end -->' once below, got "
    ):
        written_parts.replaced(page, BEGIN, END, "new\n")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The working directory has the pages of this repository, and the programs that write them."""
    listed = subprocess.run([*LIST, *NEEDED], cwd=skills.ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (skills.ROOT / name).is_file(), listed.stdout.splitlines()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(skills.ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def append(text, *names):
    def damage():
        for name in names:
            with open(name, "ab") as file:
                file.write(text)

    return damage


def remove(name):
    return lambda: Path(name).unlink()


def replace(name, old, new):
    def damage():
        text = Path(name).read_text()
        assert old in text
        Path(name).write_text(text.replace(old, new))

    return damage


BOTH = "docs/moe.md", "docs/zh/moe.md"
DONE = "translations.py", "--done", "docs/zh/moe.md"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "damage, words, error",
    [
        (remove("docs/moe.md"), ["translations.py"], "docs/zh/moe.md: must translate a page, got none of that name"),
        (append(b"\n```\nopen\n", "docs/zh/moe.md"), DONE, "must end with a line of ```; nothing was written"),
        (append(b"\n[x](plan.md#none)\n", *BOTH), DONE, "docs/plan.md must have a heading for the link plan.md#none"),
        (append(b"\n[x](gone.md#x)\n", *BOTH), DONE, "No such file or directory"),
        (append(b"\n[x](../../../x.md)\n", *BOTH), DONE, "links must lead to files of the repository, got ../../../x"),
        (append(b"\xff", "docs/zh/moe.md"), DONE, "can't decode byte 0xff"),
        (remove("docs/add-a-workflow.md"), ["skills.py"], "must have a guide, got no "),
        (replace(".agents/skills/write-tests/SKILL.md", "---\n", ""), ["skills.py"], "must begin with front matter"),
        (replace("docs/releases.md", "<!-- end of what", "<!--"), ["version_table.py"], "once below, got 1 and 0"),
        (replace(".ci/run", "parts=", "pieces="), ["version_table.py"], ".ci/run must have one line `parts="),
        (append(b": : :\n", ".github/workflows/ci.yml"), ["version_table.py"], "expected <block end>"),
    ],
)  # fmt: skip
def test_damage_is_named_and_nothing_is_written(copy, damage, words, error):
    contents = lambda: {path: path.read_bytes() for path in Path().rglob("*") if path.suffix in (".md", ".yml")}
    damage()
    with open("docs/add-a-family.md", "a") as page:  # of which a skill is made, before those with names further on
        page.write("\nMore.\n")
    was = contents()
    done = subprocess.run([sys.executable, f"tests/{words[0]}", *words[1:]], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and error in done.stderr, done.stderr
    assert contents() == was


def test_an_address_with_another_scheme_stays(copy):
    append(b"\n[x](mailto:x@example.org)\n", *BOTH)()
    subprocess.run([sys.executable, "tests/translations.py", *DONE[1:]], check=True, capture_output=True)
    assert Path("docs/zh/moe.md").read_text().endswith("[x](mailto:x@example.org)\n")
