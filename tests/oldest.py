"""Prints a pip constraint for each library of pyproject.toml, its oldest allowed version: `make test-oldest`."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest(project: dict) -> dict[str, str]:
    """{distribution: the oldest version} of what a project's `dependencies` and its extras require by `>=`."""
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    found = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


if __name__ == "__main__":
    for name, version in sorted(oldest(tomllib.loads(PROJECT.read_text())["project"]).items()):
        print(f"{name}=={version}")
