"""The documentation site: its pages, entries and examples. `make docs` builds it and checks every link."""

import base64
import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import servers
import tiny
import yaml
from docs_site import check, links, notebook, options

from areax.adapters import cli
from areax.adapters.command_line import help, parse

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)  # and what it prints, perhaps with a remark behind it
EXAMPLES = [*sorted((DOCS / "api").glob("*.md")), *sorted((DOCS / "concepts").glob("*.md"))]
EXAMPLES = [page for page in EXAMPLES if BLOCK.search(page.read_text())]
OPTION = re.compile(r"(?<![\w-])--([a-z][\w.-]*\w)")
EVERYWHERE = {"help", "help-all", "config"}  # docs/command-line.md has them
SERVED = "http://127.0.0.1:30000"


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without what its tags stand for."""


Loader.add_multi_constructor("", lambda loader, tag, node: None)


def pages(entry) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for part in below for page in pages(part)]


def test_every_page_is_in_the_navigation_once():
    named = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    own = [page for page in named if not page.startswith(("options/", "repository/"))]
    assert sorted(page for page in named if page.startswith("options/")) == sorted(
        f"options/{name}" for name in options.pages()
    )
    others = [page.removeprefix("repository/") for page in named if page.startswith("repository/")]
    notebooks = [page for page in others if page.startswith("examples/") and page != "examples/README.md"]
    assert sorted(notebooks) == [f"examples/{file.stem}.md" for file in sorted((ROOT / "examples").glob("*.ipynb"))]
    assert all((ROOT / page).is_file() for page in others if page not in notebooks)
    own += [page.removeprefix("docs/") for page in others if page.startswith("docs/")]
    assert sorted(own) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert len(named) == len(set(named))


def test_every_public_name_has_an_entry_and_every_module_an_example():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", text, re.M))
    assert check.public_names().keys() <= shown
    for module in check.public_names():
        [page] = [page for page in EXAMPLES if f"::: {module}\n" in page.read_text()]
        before = page.read_text().partition(f"::: {module}\n")[0]
        assert before.rstrip().endswith("```"), f"{module} has no example before its entry"
        package, _, name = module.rpartition(".")
        assert re.search(rf"from {package} import .*\b{name}\b|from {module} import", page.read_text()), module


def test_public_names_are_those_of_all_or_without_underscore():
    names = check.public_names()
    assert {"pack", "pack_tries"} <= set(names["areax.core.packing"])
    assert {"POLICIES", "GRPO", "Distill"} <= set(names["areax.core.losses"])
    assert {"load", "save", "MANIFEST"} <= set(names["areax.adapters.hf"])
    assert {"connect", "Fleet"} <= set(names["areax.rollout.client"])
    assert not [name for module in names.values() for name in module if name.startswith("_")]


def options_of_help(prog, capsys):
    """The options that tyro itself lists."""
    with pytest.raises(SystemExit):
        cli.main([*prog.split(), "--help"])
    return set(OPTION.findall(capsys.readouterr().out))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in ("train", "plan")])
def test_a_page_names_every_option_of_its_command(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = options.pages()[f"{name}.md"]
    if name == "replay":
        assert "All options of [training](train-grpo.md)" in page
        page += options.pages()["train-grpo.md"]
    # A switch is listed once, without its `--no-` name.
    shown = {option for option in options_of_help(name, capsys) if not is_switched_off(option)}
    assert shown - EVERYWHERE - mentioned(page) <= listed(page)


def listed(page):
    """The options of a page's tables."""
    return set(re.findall(r"^\| `--(\S+?)`", page, re.M))


def mentioned(page):
    """Options that texts of a page speak of."""
    return set(OPTION.findall(re.sub(r"^\| `--\S+`", "|", page, flags=re.M)))


def is_switched_off(option):
    """Whether it is the name that sets a switch to false."""
    return option.rpartition(".")[2].startswith("no-")


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", cli.RECIPES)
def test_a_page_names_every_option_of_its_recipe(recipe):
    page = options.pages()[f"train-{recipe}.md"]
    shown = set(OPTION.findall(parse._help(options.RECIPES[recipe].Config, "areax")))
    assert len(shown) > 40
    assert {option for option in shown if not is_switched_off(option)} - {"help"} - mentioned(page) <= listed(page)
    assert listed(page) <= shown


def test_the_page_of_a_recipe_lists_its_algorithms_with_their_defaults():
    page = options.pages()["train-grpo.md"]
    assert "| `areax train dapo` | `--objective.shaping.dynamic-sampling true` |" in page
    assert all(f"| `areax train {name.lower()}` |" in page for name in options.ALGORITHMS["grpo"])


def test_the_options_on_the_page_of_recipes_exist():
    text = (DOCS / "recipes.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert len(sections) == 8
    for section in sections:
        known: set[str] = set()
        for command, arguments in re.findall(r"^areax (train \w+|eval) (.*)$", section, re.M):
            own = names_of(command)
            assert set(OPTION.findall(arguments)) <= own, command
            known |= own
        assert set(OPTION.findall(section)) <= known


def names_of(command):
    """The options of a recipe, an algorithm or `eval`."""
    if command == "eval":
        return help.names(options.CONFIGS["eval"])
    module, settings = cli._recipe(command.removeprefix("train "), "train")
    return help.names(module.Config, parse.instance(module.Config, settings) if settings else None)


@pytest.mark.docs
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_examples_of_a_page_print_what_they_say(page, tmp_path):
    text, space = page.read_text(), {}
    with contextlib.ExitStack() as stack:
        if SERVED in text:
            text = text.replace(SERVED, stack.enter_context(servers.embedded(tiny.model(tmp_path / "model"))).url)
        for block in BLOCK.findall(text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block, space)
            lines = printed.getvalue().splitlines()
            assert [said[: len(line)] for said, line in zip(PRINTS.findall(block), lines, strict=True)] == lines


def test_a_broken_site_is_reported(tmp_path):
    """Links, anchors, what is fetched from elsewhere; the other language and the search; names without an entry."""
    (tmp_path / "api").mkdir()
    (tmp_path / "zh").mkdir()
    (tmp_path / "zh" / "b.html").write_text('<a class="other-language" href="../b.html">English</a>')
    entry = '<h2 id="areax.core.packing.pack">pack</h2> <a href="../b.html#there">b</a>'
    (tmp_path / "api" / "a.html").write_text(entry)
    body = '<a href="zh/b.html">b</a><a id="there" href="c.html">c</a><a href="api/a.html#no"></a><a href="https://x.org">x</a>'
    (tmp_path / "b.html").write_text(f'{body}<script src="https://x.org/x.js"></script><a href="#there"></a>')
    found = check.problems(tmp_path)
    assert found[:3] == ["b.html: there is no c.html", "b.html: there is no anchor api/a.html#no",
                         "b.html: fetches https://x.org/x.js"]  # fmt: skip
    assert found[3:5] == ["b.html: has no link to zh/b.html", "search: there is no index for pages opened as files"]
    assert "api: there is no entry of areax.core.packing.unpack" in found
    assert "api: there is no entry of areax.core.packing.pack" not in found
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.html").write_text('<a href="../outside.html#there"></a>')
    (tmp_path / "outside.html").write_text("")  # is none of the site's pages
    assert check.problems(tmp_path / "d")[0] == "a.html: there is no ../outside.html#there"
    (tmp_path / "e").mkdir()
    assert check.problems(tmp_path / "e") == [f"{tmp_path / 'e'}: a site must have pages, got none; make docs"]


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("mesh.md", "[ten lines](../README.md#the-tree)", "[ten lines](repository/README.md#the-tree)"),
        ("concepts/data.md", "[servers](../servers.md#keys)", "[servers](../servers.md#keys)"),
        ("launch.md", "[the image](../Dockerfile)", "the image (`Dockerfile`)"),
        ("launch.md", "[`Dockerfile`](../Dockerfile)", "`Dockerfile`"),
        ("train-an-agent.md", "[agents](agents)", "agents (`docs/agents`)"),
        ("repository/README.md", "[demo](docs/demo.md)", "[demo](../demo.md)"),
        ("repository/README.md", "![drawing](docs/concepts/data.svg)", "![drawing](../concepts/data.svg)"),
        ("repository/benchmarks/RESULTS.md", "[chips](CHIPS.md)", "[chips](CHIPS.md)"),
        ("repository/docs/zh/README.md", "[eta](concepts/staleness.md)", "[eta](../../../zh/concepts/staleness.md)"),
        ("zh/index.md", "[目录](README.md)", "[目录](../repository/docs/zh/README.md)"),
        ("repository/examples/README.md", "[loss](own_loss.ipynb)", "[loss](own_loss.md)"),
        ("repository/examples/own_loss.md", "[guide](../docs/moe.md)", "[guide](../../moe.md)"),
        ("repository/benchmarks/RESULTS.md", "[moe](../docs/moe.md)", "[moe](../../moe.md)"),
        ("demo.md", "[away](https://x.org), [here](#pictures)", "[away](https://x.org), [here](#pictures)"),
        ("demo.md", "[all](..)", "all (`.`)"),
        ("demo.md", "[nothing](../nothing.md)", "[nothing](../nothing.md)"),
        ("demo.md", "```\n[code](../README.md)\n```", "```\n[code](../README.md)\n```"),
    ],
)
def test_links_are_rewritten_for_the_site(page, link, wanted):
    assert links.linked(link, page, lambda target: (ROOT / target).exists()) == wanted


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    drawn = {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"png").decode()}}
    printed = {"output_type": "stream", "text": ["3\n", "4\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Words."]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": [printed, drawn]},
    ]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}))
    text, drawings = notebook.page(tmp_path / "one.ipynb")
    assert text == (
        "# Title\nWords.\n\n```python\nprint(3)\n```\n\n```text\n3\n4\n```\n\n![what this draws](one-0.png)\n"
    )
    assert drawings == {"one-0.png": b"png"}
