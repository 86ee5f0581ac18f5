"""Makes a release of this checkout: `make release VERSION=x.y.z`. docs/releases.md says what it checks.

Everything happens in a temporary worktree under dist/, which git ignores; main, the tag and the files in dist/ appear
at the end, so a failed check changes nothing. Nothing is pushed or uploaded.
"""

import datetime
import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
HEADING = re.compile(r"^## \[(.+?)\].*$", re.M)
PLACE = "__init__.py", re.compile(r'^__version__ = ".*"$', re.M)  # the only place of the version


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
    if git("tag", "--list", f"v{version}"):
        raise ValueError(f"VERSION must be new, got {version}, of which there is a tag; take a higher one")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    changelog = moved((root / "CHANGELOG.md").read_text(), version, today)

    dist = root / "dist"
    dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist, prefix=".release-") as folder:
        tree, built = Path(folder, "tree"), Path(folder, "built")
        git("worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        try:
            (tree / "CHANGELOG.md").write_text(changelog)
            name, line = PLACE
            (tree / name).write_text(line.sub(f'__version__ = "{version}"', (tree / name).read_text()))
            wheel, sdist = build(tree, built)
            check(wheel, sdist, version)
            # Hooks of pre-commit would want a .venv in the worktree.
            message = f"chore(release): areax {version}"
            git("commit", "--quiet", "--no-verify", "--message", message, "--", "CHANGELOG.md", name, at=tree)
            commit = git("rev-parse", "HEAD", at=tree)
        finally:
            git("worktree", "remove", "--force", str(tree))
        git("merge", "--quiet", "--ff-only", commit)
        git("tag", "--annotate", f"v{version}", "--message", f"areax {version}", commit)
        return wheel.rename(dist / wheel.name), sdist.rename(dist / sdist.name)


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
      ValueError: the version is not newer than those that it has, or nothing is under Unreleased.
    """
    headings = list(HEADING.finditer(changelog))
    if not headings or headings[0][1] != "Unreleased":
        raise ValueError("CHANGELOG.md must begin with `## [Unreleased]`; add it")
    last = max((heading[1] for heading in headings[1:]), key=number, default="0.0.0")
    if number(version) <= number(last):
        raise ValueError(f"VERSION must be higher than the last, {last}, got {version}; take a higher one")
    start, end = headings[0].end(), headings[1].start() if headings[1:] else len(changelog)
    if not re.search(r"^- ", changelog[start:end], re.M):
        raise ValueError("CHANGELOG.md must have an entry under Unreleased, got none; say what changed")
    return f"{changelog[:start]}\n\n## [{version}] - {day}{changelog[start:]}"


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
    """What a command prints; without PYTHONPATH, by which another copy of areax might be imported.

    Raises:
      RuntimeError: it failed; with all that it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=at, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(words)}` must succeed, got exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    version = " ".join(arguments)
    try:
        wheel, sdist = release(version, ROOT)
    except (ValueError, RuntimeError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"released areax {version} on main of this checkout, tag v{version}\n  {wheel}\n  {sdist}")
    print(f"to publish it: git push --atomic origin main v{version}, then upload both files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
