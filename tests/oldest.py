"""Prints a pip constraint for each library of pyproject.toml, its oldest allowed version: `make test-oldest`."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest(project: dict) -> dict[str, str]:
    """{distribution: the oldest version} of what a project and its extras require.

    Raises:
      ValueError: a requirement is not of the form NAME>=VERSION, or another one has another version.
    """
    extras = project["optional-dependencies"].values()
    found: dict[str, str] = {}
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", line)
        if match is None or found.setdefault(match[1].lower(), match[2]) != match[2]:
            raise ValueError(f"{PROJECT}: requirements must be NAME>=VERSION, with one version each, got {line!r}")
    return found


if __name__ == "__main__":
    try:
        versions = oldest(tomllib.loads(PROJECT.read_text())["project"])
    except ValueError as error:
        sys.exit(str(error))
    for name, version in sorted(versions.items()):
        print(f"{name}=={version}")
