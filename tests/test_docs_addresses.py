"""Files, package addresses and links in the docs exist. CHANGELOG.md is history, and exempt."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "core|models|parallel|rollout|adapters|service|recipes|tests|benchmarks|docs|examples"
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/(?:(?:[\w-]+/)*[\w-]+\.(?:py|md|json|sh)\b|(?:[\w-]+/)+(?![\w.*<])))")
ADDRESS = re.compile(r"\bareax((?:\.[a-z]\w*|\.[A-Z]\w*)+)(?::(\w+))?")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"```.*?```", re.S)
WRITTEN_BY_THE_READER = {"models/arcee.py", "tests/test.sh"}  # docs/add-a-family.md, docs/train-in-a-terminal.md

PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "examples" / "README.md",
]


def missing(text: str) -> list[str]:
    """Files and addresses in the text that do not exist."""
    files = set(FILE.findall(text)) - WRITTEN_BY_THE_READER
    wrong = [file for file in files if not (ROOT / file).exists()]
    for dotted, function in ADDRESS.findall(text):
        names = [*dotted.strip(".").split("."), *([function] if function else [])]
        if not found(names):
            wrong.append(f"areax{dotted}{':' * bool(function)}{function}")
    return sorted(wrong)


def found(names: list[str]) -> bool:
    """Whether these names lead from the package to a module, to a name in it, or to a member of a class."""
    folder, rest = ROOT, list(names)
    while rest and (folder / rest[0] / "__init__.py").exists():
        folder = folder / rest.pop(0)
    file = folder / "__init__.py"
    if rest and (folder / f"{rest[0]}.py").exists():
        file = folder / f"{rest.pop(0)}.py"
    body = ast.parse(file.read_text()).body
    for name in rest:
        node = members(body).get(name, False)
        if node is False:
            return False
        body = getattr(node, "body", [])
    return True


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Name -> the statement that binds it."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_everything_named_on_a_page_exists(page):
    text = page.read_text()
    links = [link for link in LINK.findall(BLOCK.sub("", text)) if not link.startswith("http")]
    assert missing(text) == []
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_missing_files_and_addresses_are_found():
    assert missing("`rollout/clients.py`, areax.rollout.client.Fleet, areax.rollout.types.Sample.reward") == [
        "rollout/clients.py"
    ]
    for address in ("areax.rollout.clients", "areax.rollout.client.Float", "areax.rollout.tasks.gsm8k:rewards"):
        assert missing(address) == [address]
