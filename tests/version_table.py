"""Writes which versions are tested together to docs/releases.md and its Chinese page: `make version-table`.

They are those of the files that continuous integration installs from and runs.
"""

import re
import sys
import tomllib
from pathlib import Path

import written_parts
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHINESE = ROOT / "docs" / "releases.md", ROOT / "docs" / "zh" / "releases.md"
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "torch",
    "trl",
    "peft",
    "SGLang",
)
CHINESE_CELLS = {
    "pyproject.toml allows": "pyproject.toml 允许的",
    "tested": "测试过的",
    "in SGLang's environment": "SGLang 环境里的",
    "job": "任务",
    "runs": "运行",
    "that of the machine": "本机的版本",
}
BEGIN, END = "<!-- written by make version-table -->\n", "<!-- end of what make version-table writes -->\n"


def pinned(file: str) -> dict[str, str]:
    """{distribution: version} of a file of requirements."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.M))


def required() -> dict[str, str]:
    """{distribution: the versions that pyproject.toml allows}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?(\S*)", line) for line in every)
    return {"Python": project["requires-python"]} | {match[1]: match[2] for match in found if match}


def jobs() -> dict[str, tuple[list[str], list[str]]]:
    """{job of the workflow that sets up Python: (its versions, the make targets that it runs)}."""
    found = {}
    for name, job in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].items():
        steps = job["steps"]
        python = next(
            (step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")), None
        )
        if python is None:  # builds images, publishes pages
            continue
        versions = job["strategy"]["matrix"]["python"] if "matrix" in python else [python]
        found[name] = versions, re.findall(r"^make (.+)$", "\n".join(step.get("run", "") for step in steps), re.M)
    return found


def parts() -> list[str]:
    """The make targets that .ci/run runs, in its order."""
    text = (ROOT / ".ci" / "run").read_text()
    lists = re.findall(r'^parts="(.*)"$', text, re.M)
    if len(lists) != 1:
        raise ValueError('.ci/run must have one line `parts="..."`')
    return lists[0].split()


def tables() -> str:
    """A row for each package, and one for each job."""
    needs, tested, server = required(), pinned("constraints.txt"), pinned("tests/sglang_cpu/requirements.txt")
    tests, sglang = jobs()["test"][0], jobs()["sglang"][0]
    rows = [("", "pyproject.toml allows", "tested", "in SGLang's environment"), ("---",) * 4]
    rows.append(("Python", needs["Python"], ", ".join(tests), ", ".join(sglang)))
    for name in PACKAGES:
        lower = name.lower()
        rows.append((name, needs.get(lower, "-"), tested.get(lower, "-"), server.get(lower, "-")))
    rows += [(), ("job", "Python", "runs"), ("---",) * 3]
    for job, (versions, targets) in jobs().items():
        rows.append((job, ", ".join(versions), f"`make {' '.join(targets)}`"))
    rows.append(("`.ci/run`", "that of the machine", f"`make {' '.join(parts())}`"))
    lines = "".join(f"| {' | '.join(row)} |\n" if row else "\n" for row in rows)
    return lines.replace("|  |", "| |").replace("| --- ", "|---").replace("--- |", "---|")


def chinese(tables: str) -> str:
    """The tables with Chinese words in their cells."""
    return re.sub(r"(?<=\| )[^|\n]+(?= \|)", lambda cell: CHINESE_CELLS.get(cell[0], cell[0]), tables)


def write(page: str, tables: str) -> str:
    """The page with the tables of the files as they are."""
    return written_parts.replaced(page, BEGIN, END, f"\n{tables}\n")


if __name__ == "__main__":
    try:
        made = {
            PAGE: write(PAGE.read_text(), tables()),
            CHINESE: write(CHINESE.read_text(), chinese(tables())),
        }
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.exit(f"version-table: {' '.join(str(error).split())}; nothing was written")
    for page, text in made.items():
        page.write_text(text)
