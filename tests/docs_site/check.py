"""Checks a built site: `python check.py site`. Prints what is wrong, a line each, and exits with 1.

Every internal link and anchor resolves, no page fetches anything from elsewhere, pages opened as files can be searched,
pages in two languages link to each other, and every public name of the API pages' modules has its anchor.
"""

import ast
import os
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "models", "adapters/hf")  # with their modules, or what their `__all__` names
FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "src"), ("iframe", "src")}
NOT_FETCHED = {"canonical", "alternate", "next", "prev", "edit"}  # rel of <link>


class Page(HTMLParser):
    """The anchors of a page, its links, and what a browser fetches to show it."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.other_language = ""  # the link to it that hooks.py puts below the title; the navigation links all pages
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        for name, value in given.items():
            if (tag, name) in FETCHED and given.get("rel") not in NOT_FETCHED:
                self.fetched.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
                if given.get("class") == "other-language":
                    self.other_language = value


def public_names(root: Path = ROOT) -> dict[str, list[str]]:
    """{module: its public names}: those of `__all__`, else those without underscore that it defines."""
    found = {}
    for package in PACKAGES:
        exported = _exported(root / package / "__init__.py")
        dotted = "areax." + package.replace("/", ".")
        if exported is not None:
            found[dotted] = exported
            continue
        for file in sorted((root / package).glob("*.py")):
            if names := _defined(file):
                found[f"{dotted}.{file.stem}"] = names
    found["areax.rollout.client"] = _defined(root / "rollout" / "client.py")
    return found


def _exported(file: Path) -> list[str] | None:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def _defined(file: Path) -> list[str]:
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):  # `import a as a` exports it
            names += [alias.asname for alias in node.names if alias.asname == alias.name]
    return [name for name in names if not name.startswith("_")]


def problems(site: Path) -> list[str]:
    """What is wrong with a built site."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: a site must have pages, got none; make docs"]
    found = []
    for file, page in pages.items():
        shown = file.relative_to(site)
        if shown.name == "404.html":  # its links begin with the site's address, whatever that will be
            continue
        for address in page.links + page.fetched:
            if urllib.parse.urlsplit(address).scheme or address.startswith("//"):
                if address in page.fetched:
                    found.append(f"{shown}: fetches {address}")
                continue
            path, _, anchor = address.partition("#")
            target = (file.parent / urllib.parse.unquote(path.partition("?")[0])).resolve() if path else file.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                found.append(f"{shown}: there is no {address}")
            elif anchor and target.suffix == ".html":
                there = pages[site / target.relative_to(site.resolve())]
                if urllib.parse.unquote(anchor) not in there.anchors:
                    found.append(f"{shown}: there is no anchor {address}")
    for file in pages.keys() & {site / page.relative_to(site / "zh") for page in (site / "zh").rglob("*.html")}:
        chinese = site / "zh" / file.relative_to(site)
        for here, there in ((file, chinese), (chinese, file)):
            if pages[here].other_language != os.path.relpath(there, here.parent):
                found.append(f"{here.relative_to(site)}: has no link to {there.relative_to(site)}")
    if not (site / "search" / "search_index.js").is_file():
        found.append("search: there is no index for pages opened as files")
    api = set().union(*(page.anchors for file, page in pages.items() if file.parent.name == "api"))
    for module, names in public_names().items():
        found += [f"api: there is no entry of {module}.{name}" for name in names if f"{module}.{name}" not in api]
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
