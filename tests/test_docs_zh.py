"""Chinese pages are built like their English pages: headings, code, and in sections that are up to date the rest, too.

A section that lags behind its English one does not fail: it is told as an expected failure (`pytest -rx`), and by
`python tests/translations.py`. tests/translations.py says how a page is translated and recorded.
"""

import pytest
import translations

PAGE = "# One\n\nSee [it](#two), `--rows 8`.\n\n```\nls # here\n```\n\n## Two\n\n| a | b |\n|---|---|\n| `1` | 2 |\n"
SAME = "# 一\n\n见[它](#two)、`--rows 8`。\n\n```\nls # here\n```\n\n## 二\n\n| 甲 | 乙 |\n|---|---|\n| `1` | 2 |\n"


@pytest.fixture(params=translations.pages(), ids=lambda page: page.name)
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
