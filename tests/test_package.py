"""The built package: folders, version, declared dependencies, and which copy is imported."""

import ast
import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

import areax

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS = {name: ROOT.joinpath(*name.split(".")[1:]) for name in PACKAGES}


def normal(requirement):
    """The normalised distribution name of a requirement."""
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", requirement).group()).lower()


def imported(tree):
    """Top-level names of all modules that a file imports absolutely, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_every_folder_with_code_is_packaged():
    outside = {"tests", "benchmarks", "docs", "build", "dist", "runs", "site"}
    with_code = {
        file.parent
        for top in ROOT.iterdir()
        if top.is_dir() and not top.name.startswith((".", "_")) and top.name not in outside
        for file in top.rglob("*.py")
    }
    assert with_code | {ROOT} == set(FOLDERS.values())
    assert all((folder / "__init__.py").is_file() for folder in FOLDERS.values())


def test_every_data_file_is_packaged():
    data = {
        file.relative_to(ROOT).as_posix()
        for folder in set(FOLDERS.values()) - {ROOT}
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    declared = {
        file.relative_to(ROOT).as_posix()
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in FOLDERS[package].glob(pattern)
    }
    assert data | {"py.typed"} == declared


def test_the_version_of_the_package_is_that_of_its_code():
    assert "version" in PROJECT["project"]["dynamic"]  # setuptools reads __init__.py
    assert areax.__version__ == importlib.metadata.version("areax")


def test_the_copy_under_test_is_imported():
    here = Path(areax.__file__).resolve().parent
    if os.environ.get("AREAX_EXPECT_INSTALLED"):
        assert here.is_relative_to(Path(sys.prefix).resolve()) and here != ROOT
    else:
        assert here == ROOT


def test_every_import_is_declared():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *(
            x
            for name in (
                "torch",
                "vision",
                "gguf",
                "grammar",
                "tensorboard",
                "trackio",
                "wandb",
                "mlflow",
                "swanlab",
                "ray",
                "verifiers",
                "docker",
                "e2b",
                "daytona",
                "modal",
            )
            for x in extras[name]
        ),
    ]
    provides = importlib.metadata.packages_distributions()
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for folder in FOLDERS.values()
        for file in folder.glob("*.py")
        if file != ROOT / "setup.py"  # not in the package; needs what `build-system` requires
        for name in imported(ast.parse(file.read_text()))
        if name not in sys.stdlib_module_names | {"areax"}
        and not set(map(normal, provides.get(name, [name]))) & set(map(normal, declared))
    }
    assert not missing
