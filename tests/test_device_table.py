"""The tables of which models fit on which devices: README and docs/devices.md agree, also the Chinese, and are what
`areax plan` says."""

import json
import re

import device_table
import pytest
from device_table import CHIPS, DEVICES, MODELS, ROOT, brief

ROW = re.compile(r"^\| ([\w.-]+) \| `(.+)` \| ([\d.]+k) \|$", re.M)


def written(page="docs/devices.md"):
    """{(model, chip, devices): (options, tokens/s)} of a page."""
    found = {}
    for name, options, tokens in ROW.findall((ROOT / page).read_text()):
        mesh = [int(count) for count in re.findall(r"--mesh\.\w+ (\d+)", options)]
        devices = 1
        for count in mesh:
            devices *= count
        found[name, re.search(r"--chip (\w+)", options).group(1), devices] = options, tokens
    return found


@pytest.mark.parametrize("page", device_table.PAGES)
def test_the_tables_of_the_pages_have_the_same_rows(page):
    assert written(page) == written()
    assert f"\n{device_table.PAGES[page]}\n" in (ROOT / page).read_text()


@pytest.mark.parametrize("file", device_table.READMES)
def test_readme_has_the_speeds_of_the_page(file):
    pages, readme = written(), (ROOT / file).read_text()
    assert len(pages) > 50
    for name in MODELS:
        cells = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", readme, re.M).group(1).split(" | ")
        for chip, cell in zip(CHIPS, cells, strict=True):
            wanted = [pages.get((name, chip, count), ("", "-"))[1] for count in DEVICES]
            assert cell == " / ".join(wanted), (name, chip)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_the_page_is_what_the_planner_says(tmp_path, name):
    """The options of one cell of each model, on another chip for each."""
    pages = [(key, cell) for key, cell in written().items() if key[0] == name]
    _, (options, tokens) = pages[list(MODELS).index(name) % len(pages)]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name] | {"torch_dtype": "bfloat16"}))
    report = device_table.planned(tmp_path, dict(re.findall(r"(--\S+)(?: ([^-]\S*))?", options)))
    assert report["fits"] and brief(device_table.speed(report)) == tokens
