"""The tables of tested versions in docs/releases.md are those of the files that continuous integration uses."""

import re
import tomllib

import oldest
import packaging.version
import pytest
import version_table

PAGE = version_table.PAGE.read_text()


def rows(text):
    """{first cell: the others}."""
    lines = re.findall(r"^\| (.*) \|$", text, re.M)
    return {first: rest for first, *rest in (line.split(" | ") for line in lines)}


def test_the_page_is_up_to_date():
    assert version_table.write(PAGE, version_table.tables()) == PAGE, "run `make version-table`"


def test_the_chinese_tables_are_those_of_the_files_with_chinese_words():
    page, tables = version_table.CHINESE.read_text(), version_table.chinese(version_table.tables())
    assert version_table.write(page, tables) == page, "run `make version-table`"
    assert all(word in tables for word in version_table.CHINESE_CELLS.values())


def test_cells_are_what_the_files_say():
    found = rows(version_table.tables())
    constraints, server = (
        (version_table.ROOT / file).read_text() for file in ("constraints.txt", "tests/sglang_cpu/requirements.txt")
    )
    for name in version_table.PACKAGES:
        _, tested, beside = found[name]
        for text, version in ((constraints, tested), (server, beside)):
            assert (f"\n{name.lower()}=={version}\n" in text) if version != "-" else f"\n{name.lower()}==" not in text
    project = (version_table.ROOT / "pyproject.toml").read_text()
    allowed = {name: found[name][0] for name in version_table.PACKAGES if found[name][0] != "-"}
    assert {"jax", "transformers", "torch", "SGLang"} <= allowed.keys()
    assert [name for name, needs in allowed.items() if f'"{name.lower()}{needs}"' not in project] == []
    assert f'requires-python = "{found["Python"][0]}"' in project
    workflow = (version_table.ROOT / ".github/workflows/ci.yml").read_text()
    pythons = ", ".join(f'"{version}"' for version in found["Python"][1].split(", "))
    assert f"python: [{pythons}]" in workflow and found["Python"][1] == found["test"][0]
    assert found["test"][1] == "`make test test-wheel test-clients`"
    assert "test-sglang" in found["`.ci/run`"][1]


def test_versions_that_are_allowed_include_those_that_are_tested():
    number = lambda version: tuple(int(part) for part in re.findall(r"\d+", version))
    for name in version_table.PACKAGES:
        needs, tested, _ = rows(version_table.tables())[name]
        if "-" not in (needs, tested):
            assert number(tested) >= number(needs.removeprefix(">=")), name


def test_the_oldest_versions_are_the_bounds_of_every_requirement():
    """None is above the version that is tested."""
    project = tomllib.loads((version_table.ROOT / "pyproject.toml").read_text())["project"]
    versions, tested = oldest.oldest(project), version_table.pinned("constraints.txt")
    assert versions["jax"] == "0.10.2" and {"torch", "trl", "lm-eval", "sglang"} <= versions.keys()
    normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
    pinned = {normal(name): packaging.version.parse(version) for name, version in tested.items()}
    for name, version in versions.items():
        if name != "sglang":
            assert packaging.version.parse(version) <= pinned[normal(name)], name


@pytest.mark.parametrize("other", ["numpy", "numpy~=2.1", "numpy>=2.1,<3", "numpy>=2.2"])
def test_requirements_without_one_oldest_version_are_refused(other):
    with pytest.raises(ValueError, match=r"must be NAME>=VERSION, with one version each, got 'numpy"):
        oldest.oldest({"dependencies": ["numpy>=2.1"], "optional-dependencies": {"x": ["scipy>=1", other]}})
