"""Makes a release of this checkout: `make release VERSION=x.y.z`. docs/releases.md says what it checks.

Everything happens in a worktree under dist/, which git ignores; the files in dist/, the tag and main change at the end,
so a failed check changes nothing. A release removes what a killed one left behind. Nothing is pushed or uploaded.
"""

import contextlib
import datetime
import email
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
HEADING = re.compile(r"^## \[(.+?)\][^\r\n]*", re.M)
PLACE = "__init__.py", re.compile(r'^__version__ = ".*"', re.M)  # the only place of the version


def release(version: str, root: Path) -> tuple[Path, Path]:
    """Builds, checks, commits and tags a version of the checkout at `root`; returns its wheel and its sdist.

    Raises:
      ValueError: a check failed.
      RuntimeError: a command failed.
    """
    number(version)
    git = lambda *words, at=root: run("git", *words, at=at)
    if dirty := git("status", "--porcelain"):
        raise ValueError(f"the tree must be clean, got {len(dirty.splitlines())} changed files; commit or stash them")
    if (branch := git("branch", "--show-current")) != "main":
        raise ValueError(f"a release is made on main, got {branch or 'no branch'}; git switch main")
    tag = f"v{version}"
    if git("tag", "--list", tag):
        if git("branch", "--list", "--contains", tag, "main"):
            raise ValueError(f"VERSION must be new, got {version}, of which there is a tag; take a higher one")
        raise ValueError(
            f"VERSION must be new, got {version}, whose tag is not on main: a release that was killed left it; "
            f"git tag --delete {tag}, and run this again"
        )
    for who in "AUTHOR", "COMMITTER":
        git("var", f"GIT_{who}_IDENT")  # fails without the name and email address that the commit needs
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    changelog = moved(text(root / "CHANGELOG.md"), version, today)

    dist = root.resolve() / "dist"
    dist.mkdir(exist_ok=True)
    with alone(dist), workplace(dist / ".release", git) as tree, contextlib.ExitStack() as undo:
        (tree / "CHANGELOG.md").write_bytes(changelog.encode())
        name, line = PLACE
        (tree / name).write_bytes(line.sub(f'__version__ = "{version}"', text(tree / name)).encode())
        built = build(tree, tree.parent / "built")
        check(*built, version)
        # Hooks of pre-commit would want a .venv in the worktree.
        message = f"chore(release): areax {version}"
        git("commit", "--quiet", "--no-verify", "--message", message, "--", "CHANGELOG.md", name, at=tree)
        commit = git("rev-parse", "HEAD", at=tree)
        wheel, sdist = (file.rename(dist / file.name) for file in built)
        undo.callback(wheel.unlink)
        undo.callback(sdist.unlink)
        git("tag", "--annotate", tag, "--message", f"areax {version}", commit)
        undo.callback(git, "tag", "--delete", tag)
        git("merge", "--quiet", "--ff-only", commit)  # the last step: until here, main has no trace of the release
        undo.pop_all()
    return wheel, sdist


@contextlib.contextmanager
def alone(dist: Path) -> Iterator[None]:
    """Raises ValueError if another release works in this folder."""
    held = os.open(dist, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("only one release at a time, got another one of this checkout; wait for it") from None
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def workplace(folder: Path, git: Callable[..., str]) -> Iterator[Path]:
    """A worktree of HEAD in a folder. What a killed release left there is removed first, and the folder at the end."""
    tree = folder / "tree"

    def remove() -> None:
        if folder.exists():
            shutil.rmtree(folder)
        if f"worktree {tree}" in git("worktree", "list", "--porcelain").splitlines():
            git("worktree", "remove", "--force", "--force", str(tree))  # twice: also if killed while it was made

    remove()
    try:
        git("worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        yield tree
    finally:
        remove()


def text(file: Path) -> str:
    """The text of a file, with its own line ends.

    Raises:
      ValueError: it is not UTF-8.
    """
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} must be UTF-8, got {error}; save it as UTF-8") from None


def number(version: str) -> tuple[int, ...]:
    """(x, y, z) of "x.y.z", which compare as versions do.

    Raises:
      ValueError: it has another form.
    """
    if not (match := VERSION.fullmatch(version)):
        raise ValueError(f"VERSION must have the form x.y.z, got {version!r}; for example make release VERSION=0.2.0")
    return tuple(map(int, match.groups()))


def moved(changelog: str, version: str, day: str) -> str:
    """The changelog with the entries of Unreleased under this version and day.

    Raises:
      ValueError: the version is not higher than all in the changelog, a heading is not `## [x.y.z]`, or there are no
        entries under Unreleased.
    """
    headings = list(HEADING.finditer(changelog))
    if not headings or headings[0][1] != "Unreleased":
        raise ValueError("CHANGELOG.md must begin with `## [Unreleased]`; add it")
    for heading in headings[1:]:
        if not VERSION.fullmatch(heading[1]):
            raise ValueError(
                f"CHANGELOG.md: below Unreleased, headings must be `## [x.y.z]`, got {heading[0]!r}; correct it"
            )
    last = max((heading[1] for heading in headings[1:]), key=number, default="0.0.0")
    if number(version) <= number(last):
        raise ValueError(f"VERSION must be higher than the last, {last}, got {version}; take a higher one")
    start, end = headings[0].end(), headings[1].start() if headings[1:] else len(changelog)
    if not re.search(r"^- ", changelog[start:end], re.M):
        raise ValueError("CHANGELOG.md must have an entry under Unreleased, got none; say what changed")
    line_end = "\r\n" if changelog.startswith("\r\n", start) else "\n"
    return f"{changelog[:start]}{2 * line_end}## [{version}] - {day}{changelog[start:]}"


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The sdist of a tree, and the wheel made from the sdist alone, by the setuptools that is installed."""
    backend = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", backend, str(out), at=tree)
    (sdist,) = out.glob("*.tar.gz")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(sdist))
    (wheel,) = out.glob("*.whl")
    return wheel, sdist


def check(wheel: Path, sdist: Path, version: str) -> None:
    """Raises ValueError unless both have valid metadata of this version, and the wheel works in an empty environment.

    The environment borrows all other packages from this one by a path file.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        texts = {wheel.name: archive.read(name)}
    with tarfile.open(sdist) as archive:
        found = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert found
        texts[sdist.name] = found.read()
    for file, text in texts.items():
        try:
            metadata = Metadata.from_email(text, validate=True)
        except ExceptionGroup as group:
            wrong = "; ".join(map(str, group.exceptions))
            raise ValueError(f"{file} must have valid metadata, got: {wrong}; see pyproject.toml") from None
        if (metadata.name, str(metadata.version)) != ("areax", version):
            raise ValueError(f"{file} must be areax {version}, got {metadata.name} {metadata.version}; see {PLACE[0]}")
        if not email.message_from_bytes(text).get_payload():
            raise ValueError(f"{file} must have a description, got none; see `readme` in pyproject.toml")

    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        python = str(environment / "bin" / "python")
        run(sys.executable, "-m", "venv", "--without-pip", str(environment))
        pip("--python", python, "install", str(wheel))
        where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(where, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
        printed = run(str(environment / "bin" / "areax"), "--version", at=Path(folder))
        if printed != f"areax {version}":
            raise ValueError(f"`areax --version` of {wheel.name} must print areax {version}, got {printed!r}")


def pip(*words: str) -> None:
    python = words[:2] if words[0] == "--python" else ()
    rest = words[len(python) :]
    options = "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"
    run(sys.executable, "-m", "pip", *python, rest[0], *options, *rest[1:])


def run(*words: str, at: Path | None = None) -> str:
    """What a command prints. It runs without PYTHONPATH, by which another copy of areax might be imported.

    Raises:
      RuntimeError: it failed; what it printed is on stderr.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=at, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="", end="", file=sys.stderr)
        what = f"`{' '.join(words)}` must succeed, got exit code {done.returncode}"
        raise RuntimeError(f"{what}; fix what it says above, and run this again")
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    version = " ".join(arguments)
    try:
        wheel, sdist = release(version, ROOT)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("release: interrupted; run it again", file=sys.stderr)
        return 130
    print(f"released areax {version} on main of this checkout, tag v{version}\n  {wheel}\n  {sdist}")
    print(f"to publish it: git push --atomic origin main v{version}, then upload both files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
