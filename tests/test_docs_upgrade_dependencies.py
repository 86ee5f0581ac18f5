"""docs/upgrade-dependencies.md names every library of pyproject.toml, its tested version, and files that use it."""

import ast
import re
import tomllib

import pytest
import skills

PAGE = (skills.DOCS / "upgrade-dependencies.md").read_text()
SECTIONS = dict(re.findall(r"^### (\S+) \d\S+\n(.*?)(?=^##)", PAGE, re.S | re.M))
VERSIONS = dict(re.findall(r"^### (\S+) (\d\S+)$", PAGE, re.M))
TABLE = [
    (name, version, use)
    for names, versions, use in re.findall(r"^\| ([\w, -]+) \| ([\d., post]+) \| (.+) \|$", PAGE, re.M)
    for name, version in zip(names.split(", "), versions.split(", "), strict=True)
]
MODULES = {  # of libraries whose name in Python is another
    "orbax-checkpoint": "orbax", "docstring-parser": "docstring_parser", "huggingface-hub": "huggingface_hub",
    "math-verify": "math_verify", "prometheus-client": "prometheus_client", "pyyaml": "yaml", "pillow": "PIL",
    "markdown-it-py": "markdown_it", "protobuf": "google",
}  # fmt: skip
KINDS = "Files", "Tests"


def normal(name):
    return name.lower().replace("_", "-")


def pinned():
    """{name: version} of constraints.txt, and of sglang, which has an environment of its own."""
    lines = (skills.ROOT / "constraints.txt").read_text() + (
        skills.ROOT / "tests/sglang_cpu/requirements.txt"
    ).read_text()
    pairs = re.findall(r"^([\w.-]+)==(\S+)$", lines, re.M)
    return {normal(name): version for name, version in reversed(pairs)}  # the first wins


def required():
    project = tomllib.loads((skills.ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return {normal(re.match(r"[\w-]+", one)[0]) for one in every}


def imported(file):
    """The packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse((skills.ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_every_library_has_a_section_or_a_row_with_its_tested_version():
    written = VERSIONS | {name: version for name, version, _ in TABLE}
    pins = pinned()
    assert {normal(name) for name in written} == required()
    assert {name: version for name, version in written.items() if pins[normal(name)] != version} == {}


@pytest.mark.parametrize("library", SECTIONS)
def test_files_and_tests_of_a_section_exist_and_import_the_library(library):
    section = SECTIONS[library]
    files, tests = (re.search(rf"^- {kind}: (.*?)(?=^- |\n\n|\Z)", section, re.S | re.M)[1] for kind in KINDS)
    named = re.findall(r"`([\w/]+\.py)`", files)
    assert bool(named) == ("none import it" not in files)
    assert [file for file in named if MODULES.get(library, library) not in imported(file)] == []
    assert re.findall(r"`tests/[\w/]+\.py`", tests)
    missing = [name for name in re.findall(r"`([\w./]+/[\w./]+)`", section) if not (skills.ROOT / name).exists()]
    assert missing == []


@pytest.mark.sweep
@pytest.mark.parametrize("library", [name for name in SECTIONS if name in ("flax", "orbax-checkpoint", "torch", "ray")])
def test_no_file_of_the_package_that_imports_it_is_missing(library):
    """Of libraries with few files; jax, optax and transformers name those that break first."""
    packages = (path.parent for path in skills.ROOT.glob("*/__init__.py"))
    module = MODULES.get(library, library)
    using = {
        str(file.relative_to(skills.ROOT)) for package in packages for file in package.rglob("*.py")
        if module in imported(file.relative_to(skills.ROOT))
    }  # fmt: skip
    assert [file for file in sorted(using) if f"`{file}`" not in SECTIONS[library]] == []


def test_rows_name_files_that_import_the_library():
    wrong = [
        (name, file)
        for name, _, use in TABLE
        for file in re.findall(r"^`([\w/]+\.py)`$", use)
        if MODULES.get(name, name) not in imported(file)
    ]
    assert wrong == []


def test_the_peers_of_benchmarks_have_the_tested_versions():
    pins = pinned()
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (skills.ROOT / "benchmarks/requirements.txt").read_text(), re.M)
    assert [name for name, version in lines if pins.get(normal(name), version) != version] == []


def test_the_image_of_sglang_has_the_tested_version():
    assert f'"sglang=={pinned()["sglang"]}"' in (skills.ROOT / "Dockerfile").read_text()
