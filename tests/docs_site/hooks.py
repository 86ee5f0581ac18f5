"""Hooks of mkdocs: adds the pages from outside docs/, and rewrites links.

The documents of `links.REPOSITORY` become pages in repository/, and those that `options.py` wrote in options/.
"""

import re
from pathlib import Path

from links import REPOSITORY, linked
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / ".cache" / "docs"
BEFORE = re.compile(r"\A(?:<!--.*?-->\n+)?(\[English\]\(\S+\)\n+)(# .*\n)")  # of the title of a Chinese page


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
    """Rewrites the links of a page, and begins it with its title, which mkdocs takes for the navigation only there."""
    text = linked(markdown, page.file.src_uri, lambda target: (ROOT / target).exists())
    return BEFORE.sub(r"\2\n\1", text)
