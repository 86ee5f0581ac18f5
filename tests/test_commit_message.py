"""The form of commit messages: rules, git's hook, docs/commit-conventions.md, and the history."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import commit_message
import pytest
import repositories
import yaml
from repositories import commit, git, shell

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / commit_message.PAGE).read_text()
FILES = ["core/step.py", "rollout/engine/programs/sampling.py", "tests/test_recipes_grpo.py", "docs/plan.md", ".ci/run"]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)
WRITTEN = "2026-11-27"  # the day of the rules; a later message that breaks them is its author's to answer for

GOOD = [
    "fix(core): masked tokens do not count",
    "feat: answers in several languages",
    "perf(engine): one program for all lengths\n\nA third less time a step, on two cores with AVX-512.",
    "test(recipes): a resumed run equals an uninterrupted one",
    "docs(plan): which figures are exact",
    "ci: the sglang job installs before it tests",
    "chore(release): areax 0.2.0",
    "Merge branch 'main' into plan",
    'Revert "fix(core): masked tokens do not count"\n\nThis reverts commit 1234567. They do count.',
    "fixup! fix(core): masked tokens do not count",
]
BAD = {
    "Fixed the loss": "the first line must be `type(scope): subject`",
    "fix(core):no blank": "the first line must be",
    "": "the first line must be `type(scope): subject` or `type: subject`, got ''",
    "feature(core): one more loss": "the type must be one of feat, fix, docs, refactor, perf, test, build, ci, chore, "
    "got 'feature'",
    "Fix(core): one more loss": "got 'Fix'",
    "fix(models): one more loss": "the scope must be one folder of the change (.ci, core, docs, rollout, tests), "
    "got 'models'",
    "fix(core, rollout): one more loss": "got 'core, rollout'; name one, or leave it out",
    "fix(core): one more loss.": "the subject must not end with a full stop",
    "fix(core): fixes a bug": "the subject must say what changes",
    f"fix(core): {'long ' * 18}": "the first line may have 100 characters, got 101; move the reason to the body",
    "fix(core): one more loss\nwith its body here": "the second line must be empty, got 'with its body here'",
}


@pytest.mark.parametrize("message", GOOD)
def test_good_messages_pass(message):
    assert commit_message.violations(message, FILES) == []


@pytest.mark.parametrize("message", BAD)
def test_each_violation_is_one_line_that_says_what_to_do(message):
    (line,) = commit_message.violations(message, FILES)
    assert BAD[message] in line and ", got " in line and "; " in line and "\n" not in line


def test_several_violations_are_all_named():
    assert len(commit_message.violations("feature(models): update.\nbody", FILES)) == 5


def test_scopes_are_folders_and_what_pages_and_tests_are_named_after():
    assert commit_message.scopes(["rollout/engine/programs/sampling.py"]) == {
        "release",
        "rollout",
        "engine",
        "programs",
    }
    assert commit_message.scopes([".github/workflows/ci.yml"]) == {"release", "github", "workflows"}
    assert commit_message.scopes(["tests/test_core_step.py"]) == {
        "release", "tests", "test_core_step", "test", "core", "step",
    }  # fmt: skip
    assert {"docs", "add-a-reward", "reward"} <= commit_message.scopes(["docs/add-a-reward.md"])
    assert commit_message.scopes(["Makefile"]) == {"release", "makefile"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history, which a source archive has not")
def test_the_rules_are_those_of_the_history():
    """Of the last 50 commits before the rules were written, all that have the form; a shallow clone has fewer."""
    git = ["git", "-c", "safe.directory=*", "log", "-50", "--no-merges", f"--before={WRITTEN}T02:30:00Z", "-z"]
    log = subprocess.run(
        [*git, "--name-only", "--format=%x01%B%x02"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commits = re.findall("\x01(.*?)\x02\0?\n?([^\x01]*)", log.stdout, re.S)
    for message, names in commits:
        header = commit_message.HEADER.fullmatch(message.splitlines()[0])
        if header and header["type"] in commit_message.TYPES:
            assert commit_message.violations(message, names.strip("\0\n").split("\0")) == [], message


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The working directory is a repository with two commits, the Makefile and the hook's program."""
    repositories.enter(tmp_path, monkeypatch)
    (tmp_path / "tests").mkdir()
    shutil.copy(commit_message.__file__, "tests")
    shutil.copy(ROOT / "Makefile", ".")
    Path(".gitignore").write_text("__pycache__/\n")
    assert commit("feat(core): the first step").returncode == 0
    assert commit("feat(core): the second step").returncode == 0


def test_git_commit_is_refused_and_can_be_repeated(repository):
    shell("make hooks")
    done = commit("Step three.\n")
    assert done.returncode == 1
    assert done.stderr == (
        "commit message: the first line must be `type(scope): subject` or `type: subject`, got 'Step three.'; "
        "see docs/commit-conventions.md\n"
    )
    assert len(git("log", "--format=%h").stdout.split()) == 2
    again = re.search(r"^git commit --edit .*$", PAGE, re.M)[0]
    shell(again, GIT_EDITOR="sed -i 's/Step three./feat(core): the third step/'")
    assert git("log", "-1", "--format=%s").stdout == "feat(core): the third step\n"


def test_the_hook_takes_what_git_makes_of_a_message(repository):
    """Comments, the diff of --verbose, amended commits whose change is in HEAD, merges, reverts and fixups."""
    shell("make hooks")
    Path("core/step.py").write_text("# another\n")
    message = Path("message")
    message.write_text("\n# git's help\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n")
    check = ["python", "tests/commit_message.py", message]
    assert "got ''" in subprocess.run(check, capture_output=True, text=True).stderr
    message.unlink()
    shell("git commit --all --verbose", GIT_EDITOR="sed -i '1s/^/fix(core): a third step/'")
    assert commit("fix(core): a third step, tested", "--amend", file="tests/test_more.py").returncode == 0
    assert commit("fix(core): a test of nothing in core", file="Makefile").returncode == 0  # core is in HEAD
    assert commit("fix(core): a test of nothing in core", file="Makefile").returncode == 1
    git("commit", "--quiet", "--message", "build: lines at the end")
    git("revert", "--no-edit", "HEAD")
    assert commit("fixup! build: lines at the end").returncode == 0
    git("switch", "--quiet", "--create", "side", "HEAD~2")
    assert commit("docs(changelog): a side branch", file="CHANGELOG.md").returncode == 0
    git("merge", "--no-edit", "main")


@pytest.mark.parametrize("what", ["a hook", "a link to nothing", "a folder of hooks"])
def test_hooks_overwrite_none(repository, what):
    hook = Path(".git/hooks/commit-msg")
    if what == "a hook":
        hook.write_text("# mine")
    elif what == "a link to nothing":
        hook.symlink_to("nothing")
    else:
        hook = Path("all-hooks/commit-msg")
        git("config", "core.hooksPath", "all-hooks")
    done = subprocess.run(["make", "hooks"], capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith(
        f"make hooks: there must be no commit-msg hook and no core.hooksPath, got {hook}; add this line to that file: "
    )
    assert not hook.exists() or hook.read_text() == "# mine"


def test_hooks_of_every_worktree(tmp_path, monkeypatch):
    """Of a repository without a folder of hooks, at a path with a blank; a second call changes nothing."""
    (tmp_path / "a b").mkdir()
    repositories.enter(tmp_path / "a b", monkeypatch)
    shutil.rmtree(".git/hooks", ignore_errors=True)
    shutil.copy(ROOT / "Makefile", ".")
    Path("tests").mkdir()
    shutil.copy(commit_message.__file__, "tests")
    assert commit("build: the first files").returncode == 0
    shell("make hooks")
    assert "git checks commit messages already: .git/hooks/commit-msg" in shell("make hooks").stdout
    git("worktree", "add", "--quiet", "../other")
    for folder in ".", "../other":
        monkeypatch.chdir(folder)
        assert commit("no type").returncode == 1
        assert commit("feat(core): a type").returncode == 0
    git("rm", "--quiet", "tests/commit_message.py")  # as on a branch from before
    assert commit("no type").returncode == 0


def test_the_hook_in_any_locale(repository):
    """With names of files that are not UTF-8, and a message that is neither."""
    shell("make hooks")
    os.close(os.open(b"core/caf\xe9", os.O_CREAT))
    git("add", "--all")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shell("git commit --quiet --message 'fix(core): \u4fee\u6b63 \U0001f680'", **plain)
    shell("git commit --quiet --allow-empty --message $'fix(core): caf\\xe9'", **plain)


def test_a_message_that_cannot_be_read_is_named(tmp_path, capsys):
    for words in [], [str(tmp_path / "none")], [str(tmp_path)]:
        assert commit_message.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("commit_message.py: needs ")


def test_a_diff_below_a_longer_comment_sign_is_no_message():
    assert commit_message.SCISSORS.sub("", "fix: a\n// ------ >8 ------\ndiff --git a/x b/x\n") == "fix: a\n"


def test_pre_commit_runs_it_on_messages_only():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = [hook for hook in config["repos"][0]["hooks"] if hook.get("stages") == ["commit-msg"]]
    assert os.access(ROOT / hook["entry"], os.X_OK) and hook["language"] == "system"
    assert config["default_stages"] == ["pre-commit"] and "commit-msg" in config["default_install_hook_types"]


def test_the_page_tells_what_the_hook_does(repository):
    assert set(re.findall(r"^\| `(\w+)` \| [^`]", PAGE.partition("## Scope")[0], re.M)) == set(commit_message.TYPES)
    for message in re.findall(r"```text\n(.*?)```", PAGE, re.S):
        assert commit_message.violations(message, ["rollout/fleet/fleet.py"]) == []
    refused = re.findall(r"^\| `(.*)` \| (.*) \|$", PAGE.partition("## The hook")[2], re.M)
    assert len(refused) == 5
    for message, reason in refused:
        (line,) = commit_message.violations(message, ["core/losses.py"])
        assert reason in line
    for files, scope in re.findall(r"^\| (`.*`)(?: alone)? \| (`.*?`)", PAGE, re.M):
        if "/" in files:
            assert scope.strip("`") in commit_message.scopes(re.findall(r"`([^`]+)`", files))

    git("switch", "--quiet", "--create", "branch")
    commit("docs: a page")
    Path("core/step.py").write_text("# fixed\n")
    git("add", "--all")
    for language, block in BLOCK.findall(PAGE):
        if not language and "COMMIT_EDITMSG" not in block:  # test_git_commit_is_refused_and_can_be_repeated
            shell(block)
    assert git("log", "-1", "--format=%s").stdout == "docs: a page\n"  # with the fixup folded in
    assert git("show", "HEAD:core/step.py").stdout == "# fixed\n"
