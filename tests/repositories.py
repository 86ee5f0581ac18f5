"""Git repositories for tests, apart from the settings of whoever runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "A. Author"), ("EMAIL", "author@example.org"))
    },
}


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Starts a repository with the branch main in a folder, and makes it the working directory."""
    patch.chdir(folder)
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    patch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)  # `python` is this one
    git("init", "--quiet", "--initial-branch", "main")


def git(*words: str, succeeds: bool = True, **options) -> subprocess.CompletedProcess:
    """Runs git in the working directory."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, **options)
    assert not succeeds or done.returncode == 0, done.stderr
    return done


def commit(
    message: str, *words: str, file: str = "core/step.py", line: str = "# a line\n"
) -> subprocess.CompletedProcess:
    """Appends a line to a file and commits all that changed; may fail."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as out:
        out.write(line)
    git("add", "--all")
    return git("commit", "--file", "-", *words, input=message, succeeds=False)


def shell(block: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a block of a page, which must succeed."""
    done = subprocess.run(["bash", "-ec", block], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, block + done.stdout + done.stderr
    return done
