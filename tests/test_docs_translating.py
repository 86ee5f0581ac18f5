"""The guide to translating, followed on a page whose English original changes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import repositories
import skills
import translations
from repositories import git, shell

GUIDE = (skills.DOCS / "translate-to-chinese.md").read_text()
ENGLISH = "# Keys\n\nSet `AREAX_SERVER_KEY`.\n\n## Files\n\nA file may have it.\n\n```\nareax serve m # here\n```\n"
CHINESE = "# 密钥\n\n设置 `AREAX_SERVER_KEY`。\n\n## 文件\n\n也可以放在文件里。\n\n```\nareax serve m # here\n```\n"


@pytest.mark.docs
def test_the_guide_to_translating(tmp_path, monkeypatch):
    repositories.enter(tmp_path, monkeypatch)
    Path("docs/zh").mkdir(parents=True)
    Path("tests").mkdir()
    for name in ("translations.py", "test_docs_zh.py"):
        shutil.copy(skills.ROOT / "tests" / name, "tests")
    Path(".gitignore").write_text("__pycache__/\n.pytest_cache/\n")
    english, chinese = Path("docs/servers.md"), Path("docs/zh/servers.md")
    english.write_text(ENGLISH)
    see, what, record = (block for language, block in re.findall(r"```(\w*)\n(.*?)```", GUIDE, re.S) if not language)
    assert shell(see).stdout == "no section lags behind\nwithout translation: servers.md\n"

    chinese.write_text(CHINESE)
    shell(record)
    git("add", "--all")
    git("commit", "--quiet", "--message", "docs(zh): the page on servers in Chinese")
    english.write_text(ENGLISH.replace("A file may have it.", "A file has it: `KEY_FILE`."))
    shown = shell(see).stdout
    assert (
        shown == "docs/zh/servers.md lags behind docs/servers.md: section 'Files' changed\nwithout translation: none\n"
    )
    changed = [line for line in shell(what).stdout.splitlines() if re.match(r"[-+]\w", line)]
    assert changed == ["-A file may have it.", "+A file has it: `KEY_FILE`."]

    refused = subprocess.run(["bash", "-ec", record], capture_output=True, text=True)
    assert refused.returncode == 1 and "section '文件'" in refused.stderr and "KEY_FILE" in refused.stderr
    chinese.write_text(chinese.read_text().replace("也可以放在文件里", "`KEY_FILE` 指向存放密钥的文件"))
    assert "no section lags behind" in shell(record).stdout


def test_the_terms_that_the_guide_names_are_those_of_the_glossary():
    glossary = (translations.FOLDER / translations.GLOSSARY).read_text()
    kept = re.search(r"in English \((.*?)\)", GUIDE)[1].split(", ")
    assert kept and [term for term in kept if f"| {term} | {term} |" not in glossary] == []
    assert "| verify | 校验 |" in glossary and "| estimate / exact | 估算" in glossary
