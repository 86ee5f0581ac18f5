"""The table of tested families in docs/models.md: complete, and what a report of pytest says."""

import re

import family_table

from areax import models

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_models_parity" name="test_logits[qwen3 untied]"/>
<testcase classname="tests.test_models_parity" name="test_logits[qwen3]"><failure message="far off"/></testcase>
<testcase classname="tests.test_models_parity" name="test_packed_rows[qwen3_moe]"/>
<testcase classname="tests.test_models_parity" name="test_old_config_spellings_are_read[phi3]"/>
<testcase classname="tests.test_parallel_mesh" name="test_a_step_equals_one_device[deepseek_v3-cp8 ring-sft]"/>
<testcase classname="tests.test_adapters_peft"
  name="test_saved_adapters_give_the_same_outputs_in_peft_and_merged[glm4]"><skipped/></testcase>
<testcase classname="tests.sglang.test_families" name="test_a_push_replaces_the_weights[llama-disk]"/>
<testcase classname="tests.sglang.test_families" name="test_sglang_on_a_cpu_does_not_serve[phi3]"/>
</testsuite></testsuites>"""


def rows(text):
    return {row[1]: row[2].split(" | ") for row in re.finditer(r"^\| `(\w+)` \| (.*) \|$", text, re.M)}


def test_the_committed_table_names_every_model_type_once():
    text = family_table.PAGE.read_text().partition(family_table.BEGIN)[2].partition(family_table.END)[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == sorted(models.FAMILIES)
    assert all(set(cells) <= {"yes", "no", "-"} for cells in rows(text).values())


def test_the_chinese_page_has_the_same_table_and_versions():
    (english, before), (chinese, after) = family_table.VERSIONS.items()
    table, other = (page.read_text().partition(family_table.BEGIN)[2] for page in (english, chinese))
    table, other = (text.partition(family_table.END)[0] for text in (table, other))
    versions = re.search(before.format("(.*)"), table)[1]
    assert other == table.replace(before.format(versions), after.format(versions))


def test_cells_are_what_the_report_says(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    before, after = f"a\n{family_table.BEGIN}old\n", f"{family_table.END}z\n"
    page = family_table.write(before + after, family_table.results([path]))
    assert page.startswith(f"a\n{family_table.BEGIN}\n| model_type | exact |") and page.endswith(after)
    found = rows(page)
    own = {"qwen3": "no - - - -", "qwen3_moe": "yes - - - -", "glm4": "- - - no -", "llama": "- - - - yes"}
    both = dict.fromkeys(("deepseek_v3", "kimi_k2"), "- - yes - -")
    assert found == {family: (own | both).get(family, "- - - - -").split() for family in models.FAMILIES}
    assert family_table.write(page, family_table.results([path])) == page
