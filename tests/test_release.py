"""Releases, made in repositories of their own: what they change, and that a failed check changes nothing."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import commit_message
import pytest
import release
import repositories
from repositories import commit, git

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- One more loss.\n\n## [0.9.0] - 2026-01-02\n\n- The first.\n"
)


def state():
    """All that a failed release must leave as it was."""
    files = sorted(path for path in Path().rglob("*") if ".git" not in path.parts)
    contents = {path.as_posix(): path.read_bytes() for path in files if path.is_file()}
    refs = git("for-each-ref").stdout + git("rev-parse", "HEAD", "--abbrev-ref", "HEAD").stdout
    return contents, refs, git("status", "--porcelain").stdout, git("worktree", "list").stdout


def test_entries_move_under_the_version_and_its_day():
    assert release.moved(CHANGELOG, "0.10.0", "2026-03-04") == CHANGELOG.replace(
        "## [Unreleased]\n", "## [Unreleased]\n\n## [0.10.0] - 2026-03-04\n"
    )
    first = CHANGELOG.partition("## [0.9.0]")[0]
    assert release.moved(first, "0.1.0", "2026-03-04").count("## [") == 2


@pytest.mark.parametrize("version", ["1.0", "v1.0.0", "1.0.0rc1", "01.0.0", "", "1.0.0\n"])
def test_a_version_has_three_numbers(version):
    with pytest.raises(ValueError, match=re.escape(f"VERSION must have the form x.y.z, got {version!r}; for example")):
        release.number(version)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The working directory is a repository that could be released."""
    repositories.enter(tmp_path, monkeypatch)
    Path(".gitignore").write_text("dist/\n")
    Path("CHANGELOG.md").write_text(CHANGELOG)
    assert commit("feat: all of it", file="__init__.py", line='__version__ = "0.9.0"\n').returncode == 0


def untracked():
    Path("notes.txt").write_text("mine")


def side():
    git("switch", "--quiet", "--create", "side")


def detached():
    git("switch", "--quiet", "--detach")


def tagged():
    git("tag", "v0.10.0")


def nothing_to_say():
    Path("CHANGELOG.md").write_text(CHANGELOG.replace("- One more loss.\n", ""))
    git("commit", "--quiet", "--all", "--message", "docs(changelog): nothing left")


def no_package():
    """The checks pass, and the build fails."""


@pytest.mark.parametrize(
    "before, version, error",
    [
        (untracked, "0.10.0", "the tree must be clean, got 1 changed files; commit or stash them"),
        (side, "0.10.0", "a release is made on main, got side; git switch main"),
        (detached, "0.10.0", "a release is made on main, got no branch; git switch main"),
        (tagged, "0.10.0", "VERSION must be new, got 0.10.0, of which there is a tag"),
        (nothing_to_say, "0.10.0", "CHANGELOG.md must have an entry under Unreleased, got none; say what changed"),
        (no_package, "0.9.0", "VERSION must be higher than the last, 0.9.0, got 0.9.0; take a higher one"),
        (no_package, "0.8.99", "VERSION must be higher than the last, 0.9.0, got 0.8.99"),
        (no_package, "0.10", "VERSION must have the form x.y.z, got '0.10'"),
        (no_package, "0.10.0", "must succeed, got exit code 1"),
    ],
)
def test_a_failed_check_changes_nothing(repository, capsys, monkeypatch, before, version, error):
    before()
    monkeypatch.setattr(release, "ROOT", Path.cwd())
    was = state()
    assert release.main([version]) == 1
    assert error in capsys.readouterr().err
    assert state() == was


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The working directory is a repository with the files of this one, as they are now."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=release.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (release.ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(release.ROOT / name, tmp_path / name)
    repositories.enter(tmp_path, monkeypatch)
    git("add", "--all")
    git("commit", "--quiet", "--message", "feat: all of it")


def make_release(version):
    """With the packages of this environment, since the clone has no .venv."""
    words = ["make", "release", f"VERSION={version}", f"py={sys.executable}", "dev="]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
def test_make_release(clone):
    done = make_release("99.1.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "released areax 99.1.0 on main of this checkout, tag v99.1.0" in done.stdout
    assert git("status", "--porcelain").stdout == "" and git("branch", "--show-current").stdout == "main\n"
    assert git("show", "--name-only", "--format=", "v99.1.0^{commit}").stdout.split() == ["CHANGELOG.md", "__init__.py"]
    assert git("rev-parse", "v99.1.0^{commit}").stdout == git("rev-parse", "HEAD").stdout
    message = git("log", "-1", "--format=%B").stdout.strip()
    assert message == "chore(release): areax 99.1.0"
    assert commit_message.violations(message, ["CHANGELOG.md", "__init__.py"]) == []
    assert '\n__version__ = "99.1.0"\n' in Path("__init__.py").read_text()
    assert re.search(
        r"## \[Unreleased\]\n\n## \[99\.1\.0\] - \d{4}-\d\d-\d\d\n\n### ", Path("CHANGELOG.md").read_text()
    )
    assert len(git("worktree", "list").stdout.splitlines()) == 1

    assert sorted(path.name for path in Path("dist").iterdir()) == [
        "areax-99.1.0-py3-none-any.whl", "areax-99.1.0.tar.gz",
    ]  # fmt: skip
    code = set(git("ls-files", "core", "models", "rollout", "recipes", "parallel", "adapters").stdout.split())
    with zipfile.ZipFile("dist/areax-99.1.0-py3-none-any.whl") as wheel:
        assert {f"areax/{name}" for name in code} <= set(wheel.namelist())
    with tarfile.open("dist/areax-99.1.0.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert code | {"CHANGELOG.md", "constraints.txt", "LICENSE"} <= names and "tests" not in names

    was = state()
    again = make_release("99.1.0")
    assert again.returncode and "VERSION must be new, got 99.1.0, of which there is a tag" in again.stderr
    again = make_release("99.2.0")
    assert again.returncode and "CHANGELOG.md must have an entry under Unreleased" in again.stderr
    assert state() == was


@pytest.mark.slow
def test_a_wheel_that_does_not_work_is_not_released(clone):
    project = Path("pyproject.toml")
    project.write_text(project.read_text().replace('    "areax.adapters.command_line",\n', ""))
    git("commit", "--quiet", "--all", "--message", "build: a folder that is not packaged")
    was = state()
    done = make_release("99.1.0")
    assert done.returncode and "areax --version` must succeed, got exit code" in done.stderr
    assert "command_line" in done.stderr
    assert {**state()[0], **was[0]} == state()[0] and state()[1:] == was[1:]
