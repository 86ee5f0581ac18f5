"""Releases, made in repositories of their own: what they change, and that a failed check changes nothing."""

import os
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
    windows = CHANGELOG.replace("\n", "\r\n")
    assert release.moved(windows, "0.10.0", "2026-03-04") == windows.replace(
        "## [Unreleased]\r\n", "## [Unreleased]\r\n\r\n## [0.10.0] - 2026-03-04\r\n"
    )


@pytest.mark.parametrize("heading", ["## [Unreleased]", "## [0.8.0rc1] - 2026-01-01"])
def test_a_heading_of_another_form_is_named(heading):
    with pytest.raises(ValueError, match=re.escape(f"headings must be `## [x.y.z]`, got '{heading}'; correct it")):
        release.moved(f"{CHANGELOG}\n{heading}\n", "0.10.0", "2026-03-04")


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


def no_changelog():
    git("rm", "--quiet", "CHANGELOG.md")
    git("commit", "--quiet", "--message", "docs(changelog): nothing left")


def latin_changelog():
    Path("CHANGELOG.md").write_bytes(CHANGELOG.encode() + b"\xff")
    git("commit", "--quiet", "--all", "--message", "docs(changelog): an odd letter")


def nobody():
    git("config", "user.useConfigOnly", "true")
    for name in repositories.ENVIRONMENT:  # of this test, after which they are as before
        if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER")):
            del os.environ[name]


def no_package():
    """The checks pass, and the build fails."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "before, version, error",
    [
        (untracked, "0.10.0", "the tree must be clean, got 1 changed files; commit or stash them"),
        (side, "0.10.0", "a release is made on main, got side; git switch main"),
        (detached, "0.10.0", "a release is made on main, got no branch; git switch main"),
        (tagged, "0.10.0", "VERSION must be new, got 0.10.0, of which there is a tag"),
        (nothing_to_say, "0.10.0", "CHANGELOG.md must have an entry under Unreleased, got none; say what changed"),
        (no_changelog, "0.10.0", "No such file or directory"),
        (latin_changelog, "0.10.0", "CHANGELOG.md must be UTF-8, got 'utf-8' codec can't decode byte 0xff"),
        (nobody, "0.10.0", "`git var GIT_AUTHOR_IDENT` must succeed, got exit code 128; fix what it says above"),
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


STOPPED = """
import os, signal, sys
from pathlib import Path
import release

command, (stop, how) = release.run, sys.argv[1:]

def build(tree, out):
    out.mkdir()
    files = out / "areax-0.10.0-py3-none-any.whl", out / "areax-0.10.0.tar.gz"
    for file in files:
        file.write_text((tree / "__init__.py").read_text())
    return files

def run(*words, at=None):
    if words[1] == stop:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails":
            words = "git", "no-such-command"
        if how == "waits":
            print("here", flush=True)
            sys.stdin.read()
    return command(*words, at=at)

release.build, release.check, release.run = build, lambda *_: None, run
release.ROOT = Path.cwd()
sys.exit(release.main(["0.10.0"]))
"""


def stopped(at="", how=""):
    """A release without the building, which is killed, fails or waits at a command of git."""
    path = os.environ | {"PYTHONPATH": str(release.ROOT / "tests")}
    words = [sys.executable, "-c", STOPPED, at, how]
    return subprocess.Popen(words, env=path, stdin=-1, stdout=-1, stderr=-1, text=True)


@pytest.mark.sweep
@pytest.mark.parametrize("command", ["worktree", "commit", "tag", "merge"])
def test_a_command_that_fails_undoes_all(repository, command):
    Path("dist").mkdir()
    was = state()
    failed = stopped(command, "fails")
    assert (
        failed.communicate()[1]
        .splitlines()[-1]
        .endswith("must succeed, got exit code 1; fix what it says above, and run this again")
    )
    assert failed.returncode == 1 and state() == was
    assert stopped().communicate()[0].startswith("released areax 0.10.0 on main of this checkout, tag v0.10.0\n")


@pytest.mark.parametrize("command", ["rev-parse", "merge"])
def test_what_a_killed_release_left_behind_is_removed_by_the_next(repository, command):
    was = git("rev-parse", "main").stdout
    killed = stopped(command, "killed")
    killed.communicate()
    assert killed.returncode == -9
    assert Path("dist/.release/tree").exists() and git("rev-parse", "main").stdout == was
    if command == "merge":
        line = (
            "release: VERSION must be new, got 0.10.0, whose tag is not on main: a release that was killed left it; "
            "git tag --delete v0.10.0, and run this again\n"
        )
        assert stopped().communicate()[1] == line
        git("tag", "--delete", "v0.10.0")
    assert stopped().communicate()[0].startswith("released areax 0.10.0")
    assert len(git("worktree", "list").stdout.splitlines()) == 1
    assert [path.suffix for path in sorted(Path("dist").iterdir())] == [".whl", ".gz"]


def test_one_release_at_a_time(repository):
    first = stopped("commit", "waits")
    assert first.stdout.readline() == "here\n"
    second = stopped()
    assert second.communicate()[1] == (
        "release: only one release at a time, got another one of this checkout; wait for it\n"
    )
    assert second.returncode == 1
    assert first.communicate("")[0].startswith("released areax 0.10.0") and first.returncode == 0


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


def test_make_passes_a_version_on_as_it_is(clone):
    failed = make_release('1.0.0"; touch made; "')
    assert "VERSION must have the form x.y.z, got '1.0.0\"; touch made; \"'" in failed.stderr
    assert failed.returncode and not Path("made").exists()


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
