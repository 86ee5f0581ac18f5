"""Chinese pages are built like their English pages: headings, code, and in sections that are up to date the rest, too.

A section that lags behind its English one does not fail: it is told as an expected failure (`pytest -rx`), and by
`python tests/translations.py`. tests/translations.py says how a page is translated and recorded.
"""

import re

import pytest
import translations

PAGE = "# One\n\nSee [it](#two), `--rows 8`.\n\n```\nls # here\n```\n\n## Two\n\n| a | b |\n|---|---|\n| `1` | 2 |\n"
SAME = "# 一\n\n见[它](#two)、`--rows 8`。\n\n```\nls # here\n```\n\n## 二\n\n| 甲 | 乙 |\n|---|---|\n| `1` | 2 |\n"


@pytest.fixture(params=translations.pages(), ids=lambda page: page.relative_to(translations.FOLDER).as_posix())
def page(request):
    return request.param


def test_a_page_is_built_like_its_english_page(page):
    assert translations.differences(page) == []


def test_links_lead_to_chinese_pages_where_there_are_any(page):
    links = [link for section in translations.sections(page) for link in section.links()]
    assert links == [translations.chinese_link(link, page) for link in links]


def test_a_page_is_up_to_date(page):
    if lines := translations.lagging(page):
        pytest.xfail("\n".join(lines))


@pytest.mark.parametrize("drawing", sorted(translations.FOLDER.rglob("*.svg")), ids=lambda drawing: drawing.name)
def test_a_drawing_differs_from_the_english_one_in_its_words_alone(drawing):
    shapes = [re.sub(r">[^<]*<", "><", file.read_text()) for file in (drawing, translations.english(drawing))]
    assert shapes[0] == shapes[1]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A translated page in a folder of its own."""
    folder = tmp_path / "docs" / "zh"
    folder.mkdir(parents=True)
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "FOLDER", folder)
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    (folder / "page.md").write_text(SAME)
    monkeypatch.setattr("sys.argv", ["translations.py", "--done", str(folder / "page.md")])
    assert translations.main() == 0
    return tmp_path / "docs" / "page.md", folder / "page.md"


def test_done_records_the_page_and_adjusts_its_links(pair, capsys):
    _, page = pair
    assert translations.lagging(page) == translations.differences(page) == []
    assert page.read_text().endswith(SAME.replace("#two", "#二"))
    assert translations.main() == 0  # changes nothing
    assert page.read_text().endswith(SAME.replace("#two", "#二"))
    assert capsys.readouterr().out == "no section lags behind\nwithout translation: none\n"


def test_pages_in_folders_link_to_each_other(pair, monkeypatch):
    """Also to the English page's pictures, which have no Chinese copy."""
    english, page = pair
    source, inner = english.parent / "concepts" / "inner.md", page.parent / "concepts" / "inner.md"
    for file, text in [
        (source, "# Inner\n\n![a drawing](inner.svg) of [the page](../page.md#two)\n"),
        (source.with_suffix(".svg"), "<svg/>"),
        (inner, "# 内层\n\n![示意图](inner.svg)，[该页](../page.md#two)\n"),
    ]:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["translations.py", "--done", str(inner)])
    assert translations.main() == 0
    assert "[English](../../concepts/inner.md)" in inner.read_text()
    assert "![示意图](../../concepts/inner.svg)，[该页](../page.md#二)" in inner.read_text()


def test_a_changed_section_lags_behind_and_only_its_code_and_heading_are_compared(pair):
    source, page = pair
    source.write_text(PAGE.replace("| `1` | 2 |", "| `1` | 2 |\n| `3` | 4 |"))
    assert translations.lagging(page) == ["docs/zh/page.md lags behind docs/page.md: section 'Two' changed"]
    assert translations.differences(page) == []
    assert translations.differences(page, everything=True) == [
        "docs/zh/page.md, section '二': pieces of inline code must be those of docs/page.md, missing ['3'], added []",
        "docs/zh/page.md, section '二': table rows must be those of docs/page.md, missing ['a row of 2'], added []",
    ]
    source.write_text(PAGE.replace("ls #", "ls -l #"))
    assert ["code blocks must be" in line for line in translations.differences(page)] == [True]
    source.write_text(PAGE.replace("## Two", "### Two"))
    assert ["must have the headings of docs/page.md" in line for line in translations.differences(page)] == [True]


def test_code_in_a_list_is_code_and_the_second_line_of_a_nested_item_is_text(pair):
    source, page = pair
    code = "   ```text\n   push # it\n   ```\n\n"
    source.write_text(f"# One\n\n1. Push:\n   - see,\n     and read `--rows`\n\n{code}Then `stop`, `--eta`.\n")
    page.write_text(f"# 一\n\n1. 推送：\n   - 看，然后读 `--rows`\n\n{code}然后 `stop`、`--eta`。\n")
    assert translations.main() == 0
    page.write_text(page.read_text().replace("# it", "# 它"))
    assert ["code blocks must be" in line for line in translations.differences(page)] == [True]


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("# here", "# 这里", "code blocks"),
        ("--rows 8", "--rows 9", "pieces of inline code"),
        ("(#二)", "(#一)", "links"),
        ("| `1` | 2 |", "`1` 2", "table rows"),
        ("## 二", "二", "headings"),
    ],
)
def test_what_a_translation_must_keep(pair, old, new, name):
    _, page = pair
    page.write_text(page.read_text().replace(old, new))
    assert [name in line and "docs/page.md" in line for line in translations.differences(page)] == [True]
    assert translations.main() == 1
