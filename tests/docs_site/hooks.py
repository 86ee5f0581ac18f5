"""Hooks of mkdocs: adds the pages from outside docs/, rewrites links, and shows mkdocstrings the packages alone.

The documents of `links.REPOSITORY` and the notebooks become pages in repository/, those that `options.py` wrote in
options/.
"""

import posixpath
import re
from pathlib import Path

import notebook
from links import REPOSITORY, linked
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / ".cache" / "docs"
OTHER = re.compile(r"\A(?:<!--.*?-->\n+)?(\[(?:English|中文)\]\(\S+\))(\n+)(# .*\n)")  # above a title
OPTION = re.compile(r"--\w[\w.-]*")
CODE = re.compile(r"(?<=<code>)[^<\n]*(?=</code>)")
PLAIN = re.compile(r'\s*<small class="doc doc-label doc-label-(?:class|instance|module)-attribute">.*?</small>')


def on_config(config):
    """Links the packages into a folder `areax` of their own.

    mkdocstrings reads every folder below the package it documents. `.dev/areax` is the whole checkout with its
    environments, and contains itself.
    """
    (OPTIONS / "areax").mkdir(parents=True, exist_ok=True)
    for old in (OPTIONS / "areax").iterdir():
        old.unlink()
    for source in [ROOT / "__init__.py", *(init.parent for init in ROOT.glob("*/__init__.py"))]:
        (OPTIONS / "areax" / source.name).symlink_to(source)
    return config


def on_files(files, config):
    """Adds the pages from outside docs/."""
    pages = sorted(OPTIONS.glob("*.md"))
    if not pages:
        raise PluginError(f"{OPTIONS} is empty: build with `make docs`, which writes the pages of options there")
    for page in pages:
        files.append(File.generated(config, f"options/{page.name}", content=page.read_text()))
    for name in REPOSITORY:
        files.append(File.generated(config, f"repository/{name}", content=(ROOT / name).read_text()))
    for file in sorted((ROOT / "examples").glob("*.ipynb")):
        text, drawings = notebook.page(file)
        for name, content in {f"{file.stem}.md": text, **drawings}.items():
            files.append(File.generated(config, f"repository/examples/{name}", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites the links of a page, and begins it with its title, which mkdocs takes for the navigation only there.

    Below it is a link to the page in the other language.
    """
    here = page.file.src_uri
    text = linked(markdown, here, lambda target: (ROOT / target).exists())
    if files.get_file_from_path(f"zh/{here}"):
        text = f"[中文]({posixpath.relpath(f'zh/{here}', posixpath.dirname(here) or '.')})\n\n{text}"
    return OTHER.sub(r"\3\n\1{ .other-language data-search-exclude }\2", text)


def on_page_content(html, page, config, files):
    """Lets options break after dots alone, and removes labels of the API that say what every attribute is."""

    def whole(option: re.Match) -> str:
        return "<wbr>".join(f"<span>{part}</span>" for part in re.split(r"(?<=\.)", option[0]) if part)

    return CODE.sub(lambda code: OPTION.sub(whole, code[0]), PLAIN.sub("", html))


def on_page_context(context, page, config, nav):
    """Takes the theme's own words in the language of the page."""
    config.theme["language"] = "zh" if "zh/" in page.file.src_uri else "en"
    return context
