"""`areax plan` as users see it: figures as text and JSON, one-line errors, and --check."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from areax import models
from areax.adapters import cli
from areax.core import param
from areax.parallel.planner.chips import CHIPS

GUIDE = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
KINDS = {"exact", "estimate"}
UNITS = ("_bytes", "_s", "_flops", "params", "tokens", "devices", "rows_that_fit", "mfu", "utilisation", "per_token")
HF = {**tiny.HF, "vocab_size": 16, "torch_dtype": "bfloat16", "max_position_embeddings": 1 << 20}


@pytest.fixture
def model(tmp_path):
    """A directory with config.json and nothing else."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    return str(tmp_path / "model")


def run(capsys, *argv, code=0):
    assert cli.main(["plan", *map(str, argv)]) == code
    said = capsys.readouterr()
    return said.err if code == 2 else said.out


def test_a_chip_of_ones_own_is_an_entry_of_the_table(capsys, model, monkeypatch):
    monkeypatch.setitem(CHIPS, "own", replace(CHIPS["h100"], memory=7e9))
    text = run(capsys, "sft", "--model", model, "--length", 32, "--rows", 2, "--chip", "own")
    assert "x own" in text and re.search(r"usable_bytes +6.44 GB", text)


def test_json_holds_the_same_figures_as_the_text(capsys, model):
    options = ["--model", model, "--mesh.fsdp", 2, "--mesh.tp", 2, "--length", 32, "--rows", 2]
    text = run(capsys, "sft", *options)
    report = json.loads(run(capsys, "sft", *options, "--json"))
    rows = {name: kind for name, kind in re.findall(r"^  (\w+) .*? (exact|estimate) ", text, re.M)}
    assert rows == {name: f["kind"] for name, f in report["figures"].items() if f["value"]}
    assert all(f["kind"] in KINDS and f["text"] and name.endswith(UNITS) for name, f in report["figures"].items())
    count = param.count(models.table(models.config_from_hf(HF)))
    assert report["figures"]["params"]["value"] == count
    assert report["figures"]["push_bytes"]["value"] == 2 * count  # config.json says bfloat16
    assert report["fits"] and text.splitlines()[-1].startswith("fits: ")
    assert report["devices"] == 4 and "agrees" not in report


def test_rl_plans_include_generation_and_scoring(capsys, model):
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    report = json.loads(run(capsys, "grpo", *options, "--json"))
    figures = {name: f["value"] for name, f in report["figures"].items()}
    assert figures["generated_tokens"] == 16 * 48
    assert figures["score_flops"] > 0 and figures["reference_bytes"] == 0
    with_kl = json.loads(run(capsys, "grpo", *options, "--objective.kl.coef", 0.1, "--json"))["figures"]
    assert with_kl["reference_bytes"]["value"] == figures["params_bytes"]
    assert with_kl["score_flops"]["value"] == 2 * figures["score_flops"]
    assert figures["rollout_devices"] == figures["server_devices"] == 1  # the server started by the recipe
    fleet = [*options, "--servers", "http://127.0.0.1:1", "--rollout-chips", 2]
    assert json.loads(run(capsys, "grpo", *fleet, "--json"))["figures"]["rollout_devices"]["value"] == 2
    said = run(capsys, "grpo", *options, "--rollout-chips", 2, code=2)
    assert "starts one server on one chip, got --rollout-chips 2" in said
    half = json.loads(run(capsys, "grpo", *options, "--sample-tokens", 32, "--json"))
    assert half["microbatches"] == report["microbatches"] / 2 == 1


@pytest.mark.parametrize(
    "family, options, words",
    [
        ("qwen3_5_text", {"num_hidden_layers": 4}, "qwen3_5_text, with the weights decay, decay_bias, decay_log"),
        ("granite", {"attention_multiplier": 0.5}, "granite, whose layers attend in ways of their own"),
        ("olmo2", {}, "olmo2, with the weights norm1_after, norm2_after"),
        ("mistral", {"sliding_window": 8}, "sliding windows .layers .0, 1.."),
    ],
)
def test_families_that_the_formulas_do_not_cover_are_refused(capsys, tmp_path, family, options, words):
    (tmp_path / "config.json").write_text(json.dumps(tiny.HF | {"model_type": family, "vocab_size": 64} | options))
    assert re.search(
        f"plan: {words} cannot be planned", run(capsys, "sft", "--model", tmp_path, "--length", 32, code=2)
    )


def test_servers_on_the_trainers_device_count(capsys, model):
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    huge = ["--serve.slots", 1 << 20, "--serve.context", 1 << 20]
    for shared, word in ((["--serve.inside", "--eta", 0], "keeps"), (["--colocated", "--eta", 0], "one at a time")):
        text = run(capsys, "grpo", *options, *shared)
        assert re.search(rf"shared_bytes .* the same with the server, .*{word}", text)
        assert text.splitlines()[-1].startswith("fits: ")
        assert run(capsys, "grpo", *options, *shared, *huge).splitlines()[-2].startswith("does not fit with --rows 8")
    assert (
        run(capsys, "grpo", *options, *huge)
        .splitlines()[-1]
        .startswith("the server does not fit; lower --serve.slots or --serve.context: ")
    )


def test_a_recipe_given_by_path(capsys, model, tmp_path):
    """Any file whose Config has the fields that a plan reads; other required fields may be left out."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom areax import models\n"
        "from areax.parallel.mesh import Layout\n@dataclass(frozen=True)\nclass Config:\n"
        "    model: str\n    secret: str\n    rows: int = 2\n    length: int = 16\n    batch: int = 2\n{}\n"
        "def main(config): raise RuntimeError('a plan runs nothing')\n"
    )
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(source.format("    mesh: Layout = Layout()\n    run: models.Run = models.Run()\n"))
    bad.write_text(source.format("    run: models.Run = models.Run()\n"))
    assert json.loads(run(capsys, good, "--model", model, "--json"))["microbatches"] == 1
    assert "got no mesh" in run(capsys, bad, "--model", model, code=2)
    some = tmp_path / "some.py"  # a recipe that generates is not planned as supervised
    some.write_text(good.read_text().replace("    batch: int = 2\n", "    group_size: int = 2\n    groups: int = 2\n"))
    assert "got no minibatches" in run(capsys, some, "--model", model, code=2)


def test_a_preference_pair_is_two_sequences_and_may_need_a_reference_model(capsys, model):
    """Three microbatches of four rows hold the twelve full-length sequences of six pairs."""
    options = ["--model", model, "--length", 32, "--rows", 4, "--batch", 6]
    for name, held in (("dpo", True), ("simpo", False)):
        report = json.loads(run(capsys, name, *options, "--json"))
        figures = {name: f["value"] for name, f in report["figures"].items()}
        assert report["microbatches"] == 3
        assert figures["reference_bytes"] == held * figures["params_bytes"]
        assert (figures["score_flops"] > 0) == held
    assert "the objective RewardModel cannot be planned" in run(capsys, "rewardmodel", *options, code=2)


@pytest.mark.parametrize(
    "options, line",
    [
        (["--mesh.tp", 3], "query heads must be a multiple of tp = 3, got 2"),
        (["--mesh.fsdp", 3], "--rows must be a multiple of dp x fsdp x ep = 3, got 8"),
        (["--mesh.fsdp", 5, "--rows", 5], "embed: embed of size 32 cannot be split over fsdp = 5 devices"),
        (["--mesh.cp", 3], "--length must be a multiple of cp = 3, got 1024"),
        (["--mesh.tp", 0], "--mesh.tp must be at least 1, got 0"),
        (["--sample-tokens", 2000], "--sample-tokens must be from 1 to --length 1024, got 2000"),
        (["--chip", "h300"], "--chip must be one of h100, h200, b200, v5p, v6e, got 'h300'; add it to parallel/"),
        (["--run.dispatch", "all_to_all"], "--run.dispatch all_to_all cannot be planned"),
        (["--lora.rank", 8], "--lora.rank 8 cannot be planned; plan the run without it"),
        (["--balance.z", 0.1], "Balance(load=0.0, z=0.1, bias=0.0) cannot be planned"),
        (["--run.remat", "offload"], "--run.remat must be one of"),
        (["--chp", "h100"], "did you mean --chip?"),
    ],
)
def test_options_that_cannot_be_planned_give_a_one_line_error(capsys, model, options, line):
    said = run(capsys, "sft", "--model", model, *options, code=2)
    assert line in said and said.count("\n") == 1


def test_a_plan_needs_a_recipe_and_a_model(capsys, tmp_path):
    assert "needs a recipe" in run(capsys, code=2)
    assert "did you mean sft?" in run(capsys, "sfx", code=2)
    assert "--model" in run(capsys, "sft", code=2)
    assert "needs config.json" in run(capsys, "sft", "--model", tmp_path, code=2)


def test_the_check_compiles_the_real_step(capsys, model):
    options = ["--model", model, "--mesh.fsdp", 2, "--length", 32, "--rows", 2, "--batch", 2, "--check"]
    report = json.loads(run(capsys, "sft", *options, "--json"))
    figures = {name: f["value"] for name, f in report["figures"].items()}
    assert report["agrees"] and figures["compiled_argument_bytes"] == figures["argument_bytes"]
    assert figures["cpu_temporary_bytes"] > 0 and figures["check_s"] > 0


def test_the_guide_shows_what_the_command_prints(capsys, tmp_path, monkeypatch):
    """The example in docs/plan.md is correct to the last figure."""
    config, session = (re.search(rf"```{kind}\n(.*?)```", GUIDE, re.S).group(1) for kind in ("json", "console"))
    command, _, printed = session.partition("\n")
    assert command.startswith("$ areax plan ")
    words = command.split()[3:]
    monkeypatch.chdir(tmp_path)
    (tmp_path / words[words.index("--model") + 1]).mkdir()
    (tmp_path / words[words.index("--model") + 1] / "config.json").write_text(config)
    assert run(capsys, *words) == printed


def test_the_guide_explains_every_figure(capsys, model):
    layouts = [["--mesh.dp", 2, "--mesh.fsdp", 2, "--mesh.tp", 2]]
    layouts += [["--mesh.cp", 2, "--run.cp", how] for how in ("gather", "ulysses", "ring")]
    seen = set()
    for options in layouts:
        seen |= set(json.loads(run(capsys, "grpo", "--model", model, *options, "--json"))["figures"])
    assert {"gradients_reduce_bytes", "cp_gather_bytes", "cp_trade_bytes", "cp_send_bytes"} <= seen
    for name in seen:
        assert f"`{name}`" in GUIDE, name
    assert "ep_gather_bytes" in GUIDE and "compiled_argument_bytes" in GUIDE


def test_a_plan_that_does_not_fit_suggests_what_would(capsys, model):
    big = ["--model", model, "--length", 1 << 20, "--rows", 1 << 14]
    *_, verdict, rows = run(capsys, "sft", *big).splitlines()
    assert verdict.startswith("does not fit with --rows 16384: ") and re.fullmatch(
        r"largest --rows that fits: \d+", rows
    )
