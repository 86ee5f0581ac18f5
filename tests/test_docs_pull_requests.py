"""The guides to pull requests and reviews: their commands, followed in a repository, and what their tables name."""

import re
import subprocess
from pathlib import Path

import pytest
import repositories
import skills
from repositories import commit, git, shell

BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)
LEVELS = "critical", "high", "medium", "low"
CLIP = '''"""Clips."""


def clip(ratio, low, high):
    return min(ratio, 1 + high)
'''
TEST = """import importlib.util

spec = importlib.util.spec_from_file_location("clip", "core/clipping.py")
clip = importlib.util.module_from_spec(spec)
spec.loader.exec_module(clip)


def test_it_clips_below():
    assert clip.clip(0.1, 0.2, 0.28) == 0.8
"""


def page(name):
    return (skills.DOCS / f"{name}.md").read_text()


def commands(name):
    return [block for language, block in BLOCK.findall(page(name)) if not language]


def risks():
    """{folder of the table in the page on reviews: level}."""
    rows = re.findall(rf"^\| ({'|'.join(LEVELS)}) \| (.*?) \|", page("review-a-pull-request"), re.M)
    assert [level for level, _ in rows] == list(LEVELS)
    found = [(folder, level) for level, folders in rows for folder in re.findall(r"`(.+?)/`", folders)]
    assert len(found) == len(dict(found)), "a folder has one level"
    return dict(found)


def test_every_folder_has_a_level():
    known = risks()
    made = {"areax.egg-info", "build", "dist", "runs", "site"}
    top = {folder.name for folder in skills.ROOT.iterdir() if folder.is_dir() and folder.name[0] not in "._"} - made
    assert top | {".agents", ".ci", ".github"} <= known.keys()
    assert [folder for folder in known if not (skills.ROOT / folder).is_dir()] == []


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (skills.ROOT / "Makefile").read_text(), re.M))
    pages = [page(file.parent.name) for file in skills.SKILLS.glob("*/SKILL.md")] + [page("releases")]
    pages += [(skills.ROOT / name).read_text() for name in ("CONTRIBUTING.md", ".github/pull_request_template.md")]
    for text in pages:
        for words in re.findall(r"`make ([^`]+)`", text):
            named = {word for word in words.split() if "=" not in word}
            assert named <= targets, words


def test_every_folder_that_needs_a_run_exists():
    rows = re.findall(r"^\| (.*) \| (.*`make .*) \|$", page("create-a-pull-request"), re.M)
    folders = [folder for changed, _ in rows for folder in re.findall(r"`([\w/]+/)`", changed)]
    assert len(rows) > 8 and [folder for folder in folders if not (skills.ROOT / folder).is_dir()] == []
    package = {"core", "models", "parallel", "rollout", "adapters", "service", "recipes", "benchmarks", "docs"}
    assert package <= {folder.split("/")[0] for folder in folders}


@pytest.fixture
def branch(tmp_path, monkeypatch):
    """A clone whose origin's main gets another commit, and uncommitted work on a change."""
    origin = tmp_path / "origin.git"
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch", "main", origin], check=True)
    (tmp_path / "clone").mkdir()
    repositories.enter(tmp_path / "clone", monkeypatch)
    git("remote", "add", "origin", str(origin))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    Path("tests").mkdir()
    Path("tests/commit_message.py").write_text((skills.ROOT / "tests" / "commit_message.py").read_text())
    assert commit("feat(core): clipped ratios", file="core/clipping.py", line=CLIP).returncode == 0
    git("push", "--quiet", "origin", "main")
    assert commit("docs: the work of someone else", file="docs/x.md").returncode == 0
    git("push", "--quiet", "origin", "main")
    git("reset", "--quiet", "--hard", "HEAD^")
    Path("core/clipping.py").write_text(CLIP.replace("min(ratio, 1 + high)", "max(min(ratio, 1 + high), 1 - low)"))
    Path("tests/test_core_clipping.py").write_text(TEST)


@pytest.mark.docs
def test_the_guides_to_pull_requests_and_reviews(branch):
    start, work, rebase, squash, push = commands("create-a-pull-request")
    git("stash", "--quiet", "--include-untracked")
    shell(start)
    git("stash", "pop", "--quiet")
    shell(work)
    assert git("log", "--format=%s", "origin/main..").stdout.splitlines() == [
        "fixup! fix(core): ratios are clipped on both sides", "fix(core): ratios are clipped on both sides",
    ]  # fmt: skip
    shown = shell(rebase)
    assert git("log", "--format=%s", "origin/main..").stdout == "fix(core): ratios are clipped on both sides\n"
    assert "+    return max(min(ratio, 1 + high), 1 - low)" in shown.stdout
    commit("docs: more", file="docs/y.md")
    shell(squash, GIT_EDITOR="sed -i '1s/^/fix(core): both in one/'")
    assert git("log", "--format=%s", "origin/main..").stdout == "fix(core): both in one\n"
    assert len(git("diff", "--name-only", "origin/main...").stdout.split()) == 3
    shell(push)

    look, weaker, fails = commands("review-a-pull-request")
    shown = shell(look).stdout
    assert {line.split()[1] for line in shown.splitlines() if "%" in line} == {"core/", "docs/", "tests/"}
    assert shell(weaker).stdout == ""
    before, _, after = fails.partition("  # must fail\n")
    steps = before.splitlines()
    shell("\n".join(steps[:-1]))
    done = subprocess.run(["bash", "-ec", steps[-1]], capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed" in done.stdout
    assert "1 passed" in shell(after).stdout
    assert git("status", "--porcelain").stdout == ""


@pytest.mark.docs
def test_a_message_in_another_form_stops_the_rebase(branch):
    rebase = commands("create-a-pull-request")[2]
    git("switch", "--quiet", "--create", "side")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Did things")
    done = subprocess.run(["bash", "-ec", rebase], capture_output=True, text=True)
    assert done.returncode and "commit message: the first line must be" in done.stderr
