"""The guides of docs/ as skills for coding agents: front matter, then the page. `make skills` writes them."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, SKILLS = ROOT / "docs", ROOT / ".agents" / "skills"


def skill(file: Path) -> str:
    """The content of a SKILL.md: its own front matter, and the page named like its folder, with adjusted links.

    Raises:
      ValueError: it has no front matter, or there is no such page.
    """
    matter = re.match(r"---\n.*?\n---\n", file.read_text(), re.S)
    if not matter:
        raise ValueError(f"{file}: must begin with front matter between lines of ---")

    def there(link: re.Match) -> str:
        path, anchor = re.match(r"([^#]*)(.*)", link[1]).groups()
        target = DOCS / path
        return f"]({os.path.relpath(target, file.parent)}{anchor})" if path and target.exists() else link[0]

    guide = DOCS / f"{file.parent.name}.md"
    if not guide.exists():
        raise ValueError(f"{file}: must have a guide, got no {guide}; rename or delete its folder with the page")
    page = guide.read_text()
    linked = re.sub(r"\]\(([^)]+)\)", there, page)
    return f"{matter[0]}\n{linked}"


if __name__ == "__main__":
    try:
        made = {file: skill(file) for file in sorted(SKILLS.glob("*/SKILL.md"))}
    except (ValueError, OSError) as error:
        sys.exit(f"skills: {error}; nothing was written")
    for file, text in made.items():
        file.write_text(text)
