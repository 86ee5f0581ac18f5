"""Links of the documentation as the site has them. On GitHub they are relative to the file, the repository's root
above docs/; on the site the pages of docs/ are at the root, other documents and notebooks in repository/."""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import PurePosixPath

REPOSITORY = (
    "README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md",
    "benchmarks/CHIPS.md", "benchmarks/PROFILES.md", "benchmarks/DEMO.md", "examples/README.md", "docs/zh/README.md",
)  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```", re.S | re.M)


def linked(text: str, page: str, exists: Callable[[str], bool]) -> str:
    """The text of a page with its links as the site has them; a file that is no page there becomes its path.

    Args:
      page: its path on the site, as `concepts/data.md`.
      exists: whether a path, relative to the repository, does.
    """
    here = page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"

    def there(link: re.Match) -> str:
        image, words, target = link.groups()
        path, hash, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path) or page.startswith("options/"):
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if found in REPOSITORY:
            on_site = f"repository/{found}"
        elif found.endswith(".ipynb"):
            on_site = f"repository/{found.removesuffix('.ipynb')}.md"
        elif PurePosixPath(found).parts[:1] == ("docs",) and PurePosixPath(found).suffix:
            on_site = found.removeprefix("docs/")
        elif exists(found):
            return words if f"`{found}`" in words or words == found else f"{words} (`{found}`)"
        else:
            return link[0]  # mkdocs complains
        return f"{image}[{words}]({os.path.relpath(on_site, posixpath.dirname(page) or '.')}{hash}{anchor})"

    blocks: list[str] = []
    prose = BLOCK.sub(lambda found: blocks.append(found[0]) or f"\0{len(blocks) - 1}\0", text)
    return re.sub(r"\0(\d+)\0", lambda found: blocks[int(found[1])], LINK.sub(there, prose))
