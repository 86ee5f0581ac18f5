"""The tables of docs/compiled.md, from the results of compilers."""

import json

import compiled_table

from areax import models

FOUND = {"problem": "", "argument_bytes": 13_020_000_000, "temporary_bytes": 960_000_000}


def line(part, **others):
    return json.dumps({"chip": "v5p", "family": "qwen3", "part": part} | FOUND | others)


def test_a_table_has_what_was_found_last_and_says_what_was_not_run():
    found = compiled_table.results(
        [
            line("train", problem="no"),
            line("train", kernels={"splash_mha_dq": 1, "jit(gmm)": 3, "splash_mha_fwd": 2}),
            line("score", kernels={}, quickly=True),
            line("decode", problem="too large | really"),
        ]
    )
    page = f"before\n{compiled_table.BEGIN}old\n{compiled_table.END}after\n"
    made = compiled_table.write(page, found, "With x 1.")
    cells = "13.0 + 1.0 splash, megablox | 13.0 + 1.0* no kernel | refused: too large / really | not run"
    assert f"| `qwen3` | Qwen3-8B | {cells} |\n" in made
    assert "| `qwen3` | Qwen3-8B | not run | not run | not run | not run |\n" in made  # on the other chip
    assert "\nWith x 1.\n" in made
    for again in (found, {}):  # what was not compiled again stays
        assert compiled_table.write(made, again, "With x 1.") == made


def test_the_page_has_every_family():
    text = compiled_table.PAGE.read_text().partition(compiled_table.BEGIN)[2]
    for family in models.FAMILIES:
        assert text.count(f"| `{family}` |") == len(compiled_table.CHIPS)
    assert compiled_table.family_sizes.MODELS.keys() == models.FAMILIES.keys()
