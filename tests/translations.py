"""Chinese pages beside their English ones: what lags behind, and the record of what was translated.

docs/zh/X.md translates docs/X.md, in folders too (docs/zh/concepts/data.md), and docs/zh/README.md the README. The
first line of a Chinese page is a comment with the first 8 hex digits of the SHA-256 of each section that it
translates; a section is a heading and all text up to the next heading. A section of the English page whose hash is not
there lags behind.

    python tests/translations.py                         # lists sections that lag behind, and pages without translation
    python tests/translations.py --done docs/zh/plan.md  # after translating: checks the page, then records the hashes

`--done` also makes the links of all Chinese pages lead to Chinese pages and their headings where these exist, so a
translator may keep the English page's links. docs/zh/glossary.md has the terms, and translates no page.
"""

import argparse
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER, GLOSSARY = ROOT / "docs" / "zh", "glossary.md"
# A fence may stand in a list; a line that is not in a fence and begins with more than 4 spaces continues a list's item.
CODE = re.compile(r"^ *```.*?^ *```$|^    (?! ).*?$", re.S | re.M)
ADDRESS = re.compile(r"[a-z]+:")
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


@dataclass(frozen=True)
class Section:
    level: int
    title: str
    text: str  # with the heading

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.strip().encode()).hexdigest()[:8]

    @property
    def anchor(self) -> str:
        """As GitHub makes it from the heading."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    def code(self) -> list[str]:
        return CODE.findall(self.text)

    def inline_code(self) -> list[str]:
        return sorted(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", CODE.sub("", self.text)))

    def links(self) -> list[str]:
        return LINK.findall(CODE.sub("", self.text))

    def table_rows(self) -> list[str]:
        rows = re.findall(r"^\|.*", CODE.sub("", self.text), re.M)
        return [f"a row of {len(row.split('|')) - 2}" for row in rows]


def pages() -> list[Path]:
    """The Chinese pages that translate an English one."""
    return [page for page in sorted(FOLDER.rglob("*.md")) if page.name != GLOSSARY]


def english(page: Path) -> Path:
    """The page that a Chinese page translates; other pages as they are."""
    if not page.is_relative_to(FOLDER) or page.name == GLOSSARY:
        return page
    place = page.relative_to(FOLDER)
    return ROOT / place if place == Path("README.md") else FOLDER.parent / place


def translation(page: Path) -> Path:
    """The Chinese page of an English page if there is one, else the page."""
    chinese = FOLDER / (page.relative_to(FOLDER.parent) if page.is_relative_to(FOLDER.parent) else page.name)
    return chinese if chinese.exists() and english(chinese) == page else page


def sections(page: Path) -> list[Section]:
    """The sections of a page, without what stands before its first heading.

    Raises:
      ValueError: it has no heading, or a code block that does not end.
    """
    found: list[tuple[int, str, list[str]]] = []
    begun = 0  # the line of the code block
    for number, line in enumerate(page.read_text().splitlines(keepends=True), 1):
        if line.startswith("```"):
            begun = 0 if begun else number
        heading = re.match(r"(#+) (.*)", line)
        if heading and not begun:
            found.append((len(heading[1]), heading[2], []))
        if found:
            found[-1][2].append(line)
    if begun:
        raise ValueError(f"{page}: the code block that begins in line {begun} must end with a line of ```")
    if not found or found[0][0] != 1:
        raise ValueError(f"{page}: must begin with a heading `# Title`, got {found[0][1] if found else 'none'}")
    return [Section(level, title, "".join(lines)) for level, title, lines in found]


def anchors(page: Path) -> list[str]:
    return [section.anchor for section in sections(page)]


def recorded(page: Path) -> set[str]:
    """The hashes on the first line of a Chinese page."""
    return set(re.findall(r"\b[0-9a-f]{8}\b", page.read_text().partition("\n")[0]))


def lagging(page: Path) -> list[str]:
    """One line for each section of the English page that a Chinese page does not translate as it is now."""
    here, source = (path.relative_to(ROOT) for path in (page, english(page)))
    changed = [section.title for section in sections(english(page)) if section.hash not in recorded(page)]
    return [f"{here} lags behind {source}: section '{title}' changed" for title in changed]


def differences(page: Path, everything: bool = False) -> list[str]:
    """One line for each place where a Chinese page is not built like its English page.

    Headings and code must always be equal. Inline code, links and rows of tables are compared in sections that do not
    lag behind, or in all.
    """
    here, source = page.relative_to(ROOT).as_posix(), english(page).relative_to(ROOT).as_posix()
    theirs, ours = sections(english(page)), sections(page)
    if [section.level for section in theirs] != [section.level for section in ours]:
        outline = [f"{'#' * section.level} {section.title}" for section in ours]
        return [f"{here}: must have the headings of {source}, in number, order and levels, got {outline}"]
    found = []
    for old, new in zip(theirs, ours, strict=True):
        pairs = [("code blocks", old.code(), new.code())]
        if everything or old.hash in recorded(page):
            pairs += [
                ("pieces of inline code", old.inline_code(), new.inline_code()),
                ("links", sorted(target(link, english(page)) for link in old.links()),
                 sorted(target(link, page) for link in new.links())),
                ("table rows", old.table_rows(), new.table_rows()),
            ]  # fmt: skip
        for name, wanted, got in pairs:
            if wanted != got:
                change = f"missing {without(wanted, got)}, added {without(got, wanted)}"
                found.append(f"{here}, section '{new.title}': {name} must be those of {source}, {change}")
    return found


def without(some: list[str], others: list[str]) -> list[str]:
    """What is more often in one list than in another."""
    return [item for item in dict.fromkeys(some) for _ in range(some.count(item) - others.count(item))]


def target(link: str, page: Path) -> str:
    """Where a link leads, as an English page, from the root; on a Chinese page it may be written as on the English."""
    path, hash_sign, anchor = link.partition("#")
    if ADDRESS.match(link):
        return link
    places = [(folder / path).resolve() for folder in (page.parent, english(page).parent)]
    file = page if not path else next((place for place in places if place.exists()), places[0])
    if anchor:
        anchor = dict(zip(anchors(file), anchors(english(file)), strict=False)).get(anchor, anchor)
    if not file.is_relative_to(ROOT):
        raise ValueError(f"{page}: links must lead to files of the repository, got {link}")
    return english(file).relative_to(ROOT).as_posix() + hash_sign + anchor


def chinese_link(link: str, page: Path) -> str:
    """A link of a Chinese page, to the Chinese page where there is one.

    Raises:
      ValueError: there is no heading for its anchor.
    """
    if ADDRESS.match(link):
        return link
    path, hash_sign, anchor = target(link, page).partition("#")
    file = translation(ROOT / path)
    if anchor:
        there = dict(zip(anchors(ROOT / path), anchors(file), strict=False))
        if anchor not in there:
            raise ValueError(
                f"{page.relative_to(ROOT)}: {path} must have a heading for the link {link}, got {[*there]}"
            )
        anchor = there[anchor]
    return (os.path.relpath(file, page.parent) if file != page or not anchor else "") + hash_sign + anchor


def recording(page: Path) -> str:
    """A Chinese page with a line on which sections it translates, and a link to the English page, before its title."""
    source = english(page)
    hashes = " ".join(section.hash for section in sections(source))
    first = f"<!-- 译自 {source.relative_to(ROOT).as_posix()}，各节 sha256 前 8 位：{hashes} -->"
    text = page.read_text()
    body = text[re.search(r"^# ", text, re.M).start() :]
    return f"{first}\n\n[English]({os.path.relpath(source, page.parent)})\n\n{body}"


def linked(text: str, page: Path) -> str:
    """The text of a Chinese page with links that lead to Chinese pages where there are any."""
    head, heading, body = text.partition("\n# ")
    parts = re.split(f"({CODE.pattern})", body, flags=CODE.flags)
    parts[::2] = [LINK.sub(lambda link: chinese_link(link[0], page), part) for part in parts[::2]]
    return head + heading + "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--done", nargs="+", type=Path, default=[], metavar="PAGE", help="Chinese pages")
    done = [page.resolve() for page in parser.parse_args().done]
    try:
        if wrong := record(done):
            print("\n".join(wrong), file=sys.stderr)
            return 1
        behind = [line for page in pages() for line in lagging(page)]
    except (ValueError, OSError) as error:
        print(f"translations: {error}; nothing was written", file=sys.stderr)
        return 1
    print("\n".join(behind) or "no section lags behind")
    english_pages = [page for page in sorted(FOLDER.parent.rglob("*.md")) if not page.is_relative_to(FOLDER)]
    missing = [page.relative_to(FOLDER.parent).as_posix() for page in english_pages if translation(page) == page]
    print("without translation:", ", ".join(missing) or "none")
    return 0


def record(done: list[Path]) -> list[str]:
    """Records that these pages are done, and adjusts links, unless something is wrong: then one line for each thing."""
    if alone := [page.relative_to(ROOT).as_posix() for page in pages() if not english(page).is_file()]:
        return [f"{', '.join(alone)}: must translate a page, got none of that name; move or delete it"]
    wrong = [f"{page}: must be a page of docs/zh that translates one of docs" for page in done if page not in pages()]
    wrong = wrong or [line for page in done for line in differences(page, everything=True)]
    if wrong:
        return wrong
    texts = {page: recording(page) if page in done else page.read_text() for page in pages()} if done else {}
    texts = {page: linked(text, page) for page, text in texts.items()}  # before any is written
    for page, text in texts.items():
        page.write_text(text)
    return []


if __name__ == "__main__":
    sys.exit(main())
