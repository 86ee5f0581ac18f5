#!/usr/bin/env python3
"""Checks a commit message against docs/commit-conventions.md: `python3 tests/commit_message.py FILE`.

`make hooks` makes it git's commit-msg hook. It needs only Python and git, and runs in any checkout.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

PAGE = "docs/commit-conventions.md"
TYPES = "feat", "fix", "docs", "refactor", "perf", "test", "build", "ci", "chore"
HEADER = re.compile(r"(?P<type>[^\s(:]+)(\((?P<scope>[^)]*)\))?: (?P<subject>\S.*)")
MADE_BY_GIT = re.compile(
    "Merge (branch|branches|commit|commits|tag|tags|pull request|remote-tracking branch|remote-tracking branches) "
    '|(Revert|Reapply) "'
    "|(fixup|squash|amend)! "
)
SCISSORS = re.compile(r"^\S+ -+ >8 -+$.*", re.M | re.S)  # what follows is the diff that `git commit --verbose` shows
LONGEST = 100  # characters of the first line
FILLER = """a the some more minor small various misc stuff fix fixes fixed bug bugs typo typos change changes update
updates improve improvements clean up cleanup refactoring address review comments wip""".split()


def violations(message: str, files: Iterable[str]) -> list[str]:
    """What is wrong with a message, one line each: the rule, what was received, what to do.

    Args:
      message: without git's comments.
      files: those that the commit changes. If none are given, the scope may be any.
    """
    first, *rest = message.splitlines() or [""]
    if MADE_BY_GIT.match(first):
        return []
    wrong = list(_of_first_line(first, list(files)))
    if rest and rest[0].strip():
        wrong.append(f"the second line must be empty, got {rest[0]!r:.60}; put a blank line before the body")
    return wrong


def _of_first_line(line: str, files: list[str]) -> Iterable[str]:
    header = HEADER.fullmatch(line)
    if not header:
        yield f"the first line must be `type(scope): subject` or `type: subject`, got {line!r:.80}; see {PAGE}"
        return
    kind, scope, subject = header["type"], header["scope"], header["subject"].rstrip()
    if kind not in TYPES:
        yield f"the type must be one of {', '.join(TYPES)}, got {kind!r}; {PAGE} says which is for what"
    if scope is not None and files and scope not in scopes(files):
        folders = ", ".join(sorted({PurePosixPath(file).parts[0] for file in files if "/" in file})) or "the root"
        yield f"the scope must be one folder of the change ({folders}), got {scope!r}; name one, or leave it out"
    if subject.endswith("."):
        yield f"the subject must not end with a full stop, got {subject[-20:]!r}; remove it"
    if set(re.findall(r"\w+", subject.lower())) <= set(FILLER):
        yield f"the subject must say what changes, got {subject!r:.80}; name what is different now"
    if len(line) > LONGEST:
        yield f"the first line may have {LONGEST} characters, got {len(line)}; move the reason to the body"


def scopes(files: Iterable[str]) -> set[str]:
    """Scopes that fit a change of these files: the folders they lie in, without leading dots, and what pages, tests and
    files of the root are named after (`tests/test_core_step.py`: core, step). A release has a scope of its own."""
    found = {"release"}
    for path in map(PurePosixPath, files):
        found |= {folder.lstrip(".") for folder in path.parts[:-1]}
        if path.parts[0] in ("docs", "tests") or len(path.parts) == 1:
            found |= {path.stem.lower(), *re.findall("[a-z0-9]+", path.stem.lower())}
    return found


def changed() -> list[str]:
    """Files that differ between the index and the parent of HEAD; all files if it has none.

    They are those of the new commit and of HEAD: git does not tell this hook whether the new one replaces HEAD.
    """
    for command in ("git diff --cached --name-only -z HEAD^", "git ls-files -z"):
        done = subprocess.run(command.split(), capture_output=True)
        if done.returncode == 0:
            break
    return [name for name in done.stdout.decode(errors="replace").split("\0") if name]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("commit_message.py: needs one file, the message of a commit", file=sys.stderr)
        return 2
    try:
        written = SCISSORS.sub("", Path(arguments[0]).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        print(f"commit_message.py: needs a file with the message of a commit, got {error}", file=sys.stderr)
        return 2
    strip = ["git", "stripspace", "--strip-comments"]
    done = subprocess.run(strip, input=written.encode(), stdout=subprocess.PIPE, check=True)  # in any locale
    message = done.stdout.decode()
    wrong = violations(message, changed())
    for line in wrong:
        print(f"commit message: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
