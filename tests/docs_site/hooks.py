"""Hooks of mkdocs: pages from outside docs/, and links as on GitHub, where the repository's root is above docs/.

The documents of `REPOSITORY` are pages in repository/, and those that `options.py` wrote in options/. A link to any
other file of the repository, which has no address on the site, becomes the file's path.
"""

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / ".cache" / "docs"
REPOSITORY = (
    "README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md",
    "benchmarks/CHIPS.md", "benchmarks/PROFILES.md", "benchmarks/DEMO.md", "docs/zh/README.md",
)  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```", re.S | re.M)


def on_files(files, config):
    """Adds the pages from outside docs/."""
    pages = sorted(OPTIONS.glob("*.md"))
    if not pages:
        raise PluginError(f"{OPTIONS} is empty: build with `make docs`, which writes the pages of options there")
    for page in pages:
        files.append(File.generated(config, f"options/{page.name}", content=page.read_text()))
    for name in REPOSITORY:
        files.append(File.generated(config, f"repository/{name}", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites the links of a page."""
    return linked(markdown, page.file.src_uri, lambda target: (ROOT / target).exists())


def linked(text: str, page: str, exists) -> str:
    """The text of a page with its links as the site has them.

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
        elif PurePosixPath(found).parts[0] == "docs" and PurePosixPath(found).suffix:
            on_site = found.removeprefix("docs/")
        elif exists(found):
            return words if f"`{found}`" in words or words == found else f"{words} (`{found}`)"
        else:
            return link[0]  # mkdocs complains
        return f"{image}[{words}]({os.path.relpath(on_site, posixpath.dirname(page) or '.')}{hash}{anchor})"

    blocks: list[str] = []
    prose = BLOCK.sub(lambda found: blocks.append(found[0]) or f"\0{len(blocks) - 1}\0", text)
    return re.sub(r"\0(\d+)\0", lambda found: blocks[int(found[1])], LINK.sub(there, prose))
