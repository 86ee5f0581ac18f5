"""`areax plan` as users see it: figures as text and JSON, one-line errors, and --check."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import tiny_families

from areax import models
from areax.adapters import cli
from areax.adapters.command_line import help
from areax.adapters.commands import suggest
from areax.adapters.launch import devices as launch_devices
from areax.core import param
from areax.models import mtp
from areax.parallel.planner.chips import CHIPS

GUIDE = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
KINDS = {"exact", "estimate"}
UNITS = (
    "_bytes",
    "_s",
    "_flops",
    "params",
    "tokens",
    "devices",
    "rows_that_fit",
    "mfu",
    "utilisation",
    "per_token",
    "ratio",
)
HF = {**tiny.HF, "vocab_size": 16, "torch_dtype": "bfloat16", "max_position_embeddings": 1 << 20}


@pytest.fixture
def model(tmp_path):
    """A directory with config.json and nothing else."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    return str(tmp_path / "model")


def run(capsys, *argv, code=0):
    """What a plan prints; `code` is the exit code: 1 where the run does not fit, None = either."""
    got = cli.main(["plan", *map(str, argv)])
    assert got in (0, 1) if code is None else got == code
    said = capsys.readouterr()
    return said.err if code == 2 else said.out


@pytest.mark.parametrize("option", ["--compile", "--check"])
def test_a_suggestion_is_not_compiled(capsys, model, option):
    said = run(capsys, "sft", "--model", model, "--suggest", "--devices", 2, option, code=2)
    assert "--suggest compiles nothing" in said and said.count("\n") == 1


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
    assert report["fits"] and re.search("^fits: ", text, re.M)
    assert report["devices"] == 4 and "agrees" not in report


@pytest.mark.long
def test_rl_plans_include_generation_and_scoring(capsys, model):
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    report = json.loads(run(capsys, "grpo", *options, "--json"))
    figures = {name: f["value"] for name, f in report["figures"].items()}
    assert figures["generated_tokens"] == 16 * 48
    assert figures["score_flops"] > 0 and figures["reference_bytes"] == 0
    kl = *options, "--objective.kl.coef", 0.1
    with_kl = json.loads(run(capsys, "grpo", *kl, "--json"))["figures"]
    assert 0.5 < with_kl["reference_bytes"]["value"] / figures["params_bytes"] < 0.51  # norms are in fp32
    fp32 = json.loads(run(capsys, "grpo", *kl, "--run.dtype", "float32", "--json"))["figures"]
    assert fp32["reference_bytes"]["value"] == figures["params_bytes"]
    resting = json.loads(run(capsys, "grpo", *kl, "--offload-reference", "--json"))["figures"]
    assert resting["reference_bytes"]["value"] == 0
    assert resting["host_bytes"]["value"] == with_kl["reference_bytes"]["value"]
    assert with_kl["score_flops"]["value"] == 2 * figures["score_flops"]
    assert figures["rollout_devices"] == figures["server_devices"] == 1  # the server started by the recipe
    fleet = [*options, "--servers", "http://127.0.0.1:1", "--rollout-chips", 2]
    assert json.loads(run(capsys, "grpo", *fleet, "--json"))["figures"]["rollout_devices"]["value"] == 2
    said = run(capsys, "grpo", *options, "--rollout-chips", 2, code=2)
    assert "starts 1, on one chip each, got --rollout-chips 2" in said
    whole, half = (
        json.loads(run(capsys, "grpo", *options, "--rows", 8, "--sample-tokens", n, "--json")) for n in (64, 32)
    )
    assert half["microbatches"] == whole["microbatches"] / 2 == 1


@pytest.mark.parametrize(
    "recipe", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "distill", "grpo"))]
)
def test_a_plan_advises_options_that_its_recipe_has(capsys, tmp_path, recipe):
    large = {**HF, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 16}
    (tmp_path / "config.json").write_text(json.dumps(large))
    more = ["--teacher", tmp_path] if recipe == "distill" else []
    more += ["--objective.kl.coef", 0.1] if recipe == "grpo" else []
    said = run(capsys, recipe, "--model", tmp_path, "--length", 512, "--rows", 1, "--chip", "h100", *more, code=1)
    advised = re.findall(r"--([a-z][\w.-]*)", re.search("^fits with .*", said, re.M)[0])
    assert advised and {*advised} <= help.names(cli._recipe(recipe, "plan")[0].Config)


@pytest.mark.slow
def test_prompts_of_groups_are_computed_once_with_trie_auto(capsys, model):
    """The speed counts the samples' tokens; a plan with tries off names the option where it is faster."""
    options = ["--model", model, "--length", 4096, "--rows", 8, "--groups", 64, "--group-size", 16, "--chip", "h100"]
    known = [*options, "--sampling.max-new-tokens", 400, "--sample-tokens", 1200]
    off, auto = (json.loads(run(capsys, "grpo", *known, "--trie", trie, "--json")) for trie in ("off", "auto"))
    value = lambda report, name: report["figures"][name]["value"]
    # 8 samples of a group in a row: 800 + 8 * 400 places for 8 * 1200 tokens; 3 samples in a row without tries.
    assert (off["microbatches"], auto["microbatches"]) == (43, 16)
    assert value(auto, "trie_ratio") == 4000 / 9600 and value(auto, "sample_tokens") == 1024 * 1200
    assert value(auto, "saved_bytes") == value(off, "saved_bytes")
    assert value(auto, "matmul_flops") == pytest.approx(value(off, "matmul_flops") * 16 / 43)
    assert value(auto, "tokens_per_device_per_s") == pytest.approx(1024 * 1200 / value(auto, "step_s"))
    assert off["suggested"][0] == "--trie auto" and "--trie auto" not in auto["suggested"]
    text = run(capsys, "grpo", *known, "--trie", "auto")
    assert "\n--trie auto: a prompt is computed once for 8 of its 16 samples, as many as fit a row; in all 42%" in text
    assert "faster with --trie auto" in run(capsys, "grpo", *known, "--trie", "off")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("more, reason", [
    ([], "a row of 64 tokens holds one sample of 64; --sample-tokens says how long they are"),
    (["--sample-tokens", 20, "--sampling.max-new-tokens", 18],
     "8 samples with prompts of 2 and completions of 18 tokens share too little"),
    (["--mesh.cp", 2, "--run.cp", "ring"], "--run.cp ring cannot split tries; gather and ulysses can"),
    (["--sample-tokens", 20, "--sampling.max-new-tokens", 30],
     "--sampling.max-new-tokens 30 leaves nothing of --sample-tokens 20 for a prompt"),
])  # fmt: skip
def test_a_plan_says_why_it_has_no_tries(capsys, model, more, reason):
    options = ["--model", model, "--length", 64, "--group-size", 8, *more]
    off, auto = (json.loads(run(capsys, "grpo", *options, "--trie", trie, "--json")) for trie in ("off", "auto"))
    assert auto["shared"] == f"planned without tries, because {reason}"
    assert auto | {"shared": ""} == off


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["sft", "dpo", "rewardmodel"])
def test_a_plan_of_data_that_it_has_not_seen_says_that_nothing_is_shared(capsys, model, recipe):
    options = [recipe, "--model", model, "--length", 64]
    assert "--trie auto: planned as if samples shared no tokens; if they do, a step takes less" in run(capsys, *options)
    assert "--trie" not in run(capsys, *options, "--trie", "off")
    refused = run(capsys, *options, "--mesh.cp", 2, "--run.cp", "ring")
    assert "--trie auto: planned without tries, because --run.cp ring cannot split tries" in refused


@pytest.mark.slow
def test_a_servers_layer_for_multi_token_prediction_is_counted(capsys, tmp_path):
    """Its weights twice, with those of the next version, and its keys and values; with drafts only."""
    config = tiny_families.config("glm4_moe", num_nextn_predict_layers=1, torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(config.source)
    options = ["--model", tmp_path, "--length", 64, "--groups", 4, "--group-size", 4]
    plain, with_it = (
        {name: figure["value"] for name, figure in json.loads(run(capsys, *words))["figures"].items()}
        for words in (("grpo", *options, "--serve.draft", n, "--json") for n in (1, 4))
    )
    more = {name: with_it[name] - plain[name] for name in plain}
    own = 2 * param.count(mtp.table(config)) + 2 * config.experts  # the bias of the router is in fp32
    assert more["server_weights_bytes"] == more["chip_weights_bytes"] == own
    assert more["cache_bytes_per_token"] == plain["cache_bytes_per_token"] / config.layers
    assert more["server_bytes"] == 2 * own + more["chip_cache_bytes"]


# Config.json as published, in bfloat16; billions of weights, and of those that a token uses, as published.
PUBLISHED = {
    "GPT-OSS-20B": (20.9, 3.6, dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, max_position_embeddings=131072, attention_bias=True, tie_word_embeddings=False,
    )),
    "DeepSeek-V3": (671, 37, dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        moe_intermediate_size=2048, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1,
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        max_position_embeddings=163840, num_nextn_predict_layers=1, tie_word_embeddings=False,
    )),
    "GLM-4.5-Air": (106, 12, dict(
        model_type="glm4_moe", vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46,
        moe_intermediate_size=1408, num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_shared_experts=1,
        n_routed_experts=128, num_experts_per_tok=8, first_k_dense_replace=1, attention_bias=True, use_qk_norm=False,
        max_position_embeddings=131072, num_nextn_predict_layers=1, tie_word_embeddings=False,
    )),
    "Qwen3.5-35B-A3B": (35, 3, dict(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        max_position_embeddings=262144, tie_word_embeddings=False,
    )),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name][2]["model_type"] in models.FAMILIES])
def test_published_models_have_the_published_sizes(capsys, tmp_path, name):
    """Plans of config.json alone. Weights agree within 1 %; active ones when rounded as published, for which GLM leaves
    out the output head."""
    total, active, hf = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(hf | {"torch_dtype": "bfloat16"}))
    mesh = ["--mesh.fsdp", 64, "--rows", 64, "--run.dtype", "bfloat16", "--length", 4096]
    began = time.process_time()
    report = json.loads(
        run(capsys, "grpo", "--model", tmp_path, *mesh, "--servers", "http://127.0.0.1:1", "--json", code=None)
    )  # fmt: skip
    figures = {name: f["value"] for name, f in report["figures"].items()}
    assert time.process_time() - began < 20
    assert figures["params"] / 1e9 == pytest.approx(total, rel=0.01)
    head = hf["vocab_size"] * hf["hidden_size"] * (name == "GLM-4.5-Air")
    assert round((figures["active_params"] - head) / 1e9, int(isinstance(active, float))) == active


@pytest.mark.long
def test_latent_vectors_and_states_are_cached_in_place_of_keys_and_values(capsys, tmp_path):
    """DeepSeek-V3: 512 + 64 numbers a token and layer, which the embedded engine keeps as keys, and 512 as values.
    Qwen3.5-9B: eight layers of four with keys and values, and in the others states of 32 heads of 128 x 128, and three
    tokens of 8,192 channels."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"][2] | {"num_hidden_layers": 4}))
    options = ["--model", tmp_path, "--mesh.fsdp", 8, "--length", 512]
    figures = lambda *more: json.loads(run(capsys, "grpo", *options, *more, "--json", code=None))["figures"]
    servers = "--servers", "http://127.0.0.1:1"
    assert figures(*servers)["cache_bytes_per_token"]["value"] == 4 * (512 + 64) * 4
    assert figures("--chip", "b200")["cache_bytes_per_token"]["value"] == 4 * (512 + 64 + 512) * 2
    hybrid = dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, torch_dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    found = figures(*servers)
    assert found["cache_bytes_per_token"]["value"] == 8 * 2 * 4 * 256 * 2
    assert found["state_bytes"]["value"] == 24 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert found["recurrence_flops"]["value"] > 0


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {"hidden_size": 10**9}),
        ("gpt_oss", {"num_hidden_layers": 10_000, "num_local_experts": 10_000, "num_experts_per_tok": 2}),
        ("qwen3_5_text", {"linear_num_key_heads": 10**6, "linear_num_value_heads": 10**6}),
    ],
)
def test_absurd_models_are_planned_in_seconds_without_arrays(capsys, tmp_path, family, options):
    (tmp_path / "config.json").write_text(json.dumps(tiny.HF | {"model_type": family, "vocab_size": 64} | options))
    began = time.process_time()
    said = run(capsys, "sft", "--model", tmp_path, "--length", 32, code=1)
    assert re.search("fits?[ :].* usable on one h100", said) and time.process_time() - began < 20


@pytest.mark.slow
def test_servers_on_the_trainers_device_count(capsys, model):
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    huge = ["--serve.slots", 1 << 20, "--serve.context", 1 << 20]
    for shared, word in ((["--serve.inside", "--eta", 0], "keeps"), (["--colocated", "--eta", 0], "one at a time")):
        text = run(capsys, "grpo", *options, *shared)
        assert re.search(rf"shared_bytes .* the same with the server, .*{word}", text)
        assert re.search("^fits: ", text, re.M)
        said = run(capsys, "grpo", *options, *shared, *huge, code=1)
        assert said.splitlines()[-2].startswith("does not fit with --rows 1:")
    said = run(capsys, "grpo", *options, *huge, code=1)
    assert said.splitlines()[-1].startswith("the server does not fit; lower --serve.slots or --serve.context, or name")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--serve.mesh.tp", 4], "mesh: tp must divide the query heads of each layer, 2 in this qwen3, got 4"),
        (["--serve.mesh.ep", 2], "mesh: ep must divide the model's experts, 0 in this qwen3, got 2"),
        (["--serve.draft", 65], "plan: --serve.draft must be at most the context, 64 tokens, got 65; lower it"),
    ],
)
def test_what_a_server_would_refuse_is_not_planned(capsys, model, options, words):
    assert words in run(capsys, "grpo", "--model", model, "--length", 64, *options, code=2)


@pytest.mark.slow
def test_a_plan_counts_the_servers_devices_and_says_when_generation_is_what_takes_long(capsys, model):
    options = ["--model", model, "--mesh.fsdp", 4, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 64]
    last = lambda *more: run(capsys, "grpo", *options, *more).splitlines()[-3:-1]
    devices, slow = last("--serve.count", 2, "--serve.slots", 1)
    assert devices == "6 x h100 in all: 4 to train, 2 to generate, those behind the trainer's"
    assert launch_devices.of_own_servers(6, 4, 2, 1) == [[4], [5]]  # what a run on so many does
    for elsewhere in (["--serve.count", 5], ["--chip", "v5p"]):
        assert last(*elsewhere, "--serve.slots", 1)[0].endswith("each its own by areax launch (docs/launch.md)")
    assert re.fullmatch(r"a batch takes \S+ s to generate and \S+ s to train: it needs more servers, .*", slow)
    _, shared = last("--colocated", "--eta", 0, "--serve.slots", 1)
    assert shared.endswith("it needs --serve.mesh.dp 4, or more --serve.slots")
    assert "in all" not in run(capsys, "grpo", *options, "--colocated", "--eta", 0)
    assert "in all" not in run(capsys, "sft", "--model", model, "--length", 64)


@pytest.mark.slow
def test_a_server_over_chips_has_parts_of_weights_and_caches(capsys, tmp_path):
    """And a server that does not fit one chip is split; with heads of keys and values for one, each has them."""
    options = ["--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    two, one = (tiny.model(tmp_path / str(n), num_key_value_heads=n, vocab_size=64) for n in (2, 1))
    figures = lambda model, *more: {
        name: f["value"]
        for name, f in json.loads(run(capsys, "grpo", "--model", model, *options, *more, "--json"))["figures"].items()
    }
    for model, share in ((two, 2), (one, 1)):
        whole, split = figures(model), figures(model, "--serve.mesh.tp", 2)
        assert whole["chip_weights_bytes"] == whole["server_weights_bytes"] == split["server_weights_bytes"]
        assert whole["chip_cache_bytes"] == share * split["chip_cache_bytes"]
        assert whole["cache_bytes_per_token"] == share * split["cache_bytes_per_token"]
        assert split["server_bytes"] == 2 * split["chip_weights_bytes"] + split["chip_cache_bytes"]
        assert 0.5 < split["chip_weights_bytes"] / whole["chip_weights_bytes"] < 0.51  # norms are whole
        assert split["server_devices"] == split["rollout_devices"] == 2
    many = ["--serve.slots", 5 << 20]
    said = run(capsys, "grpo", "--model", two, *options, *many, code=1).splitlines()[-1]
    assert said.startswith("the server does not fit; split it with --serve.mesh.tp 2, lower --serve.slots")
    run(capsys, "grpo", "--model", two, *options, *many, "--serve.mesh.tp", 2)
    shared = [*options, *many, "--serve.inside", "--eta", 0, "--mesh.fsdp", 4]
    assert run(capsys, "grpo", "--model", two, *shared, code=1).splitlines()[-1].endswith("with --serve.mesh.tp 2")
    run(capsys, "grpo", "--model", two, *shared, "--serve.mesh.tp", 2)
    said = run(capsys, "grpo", "--model", two, *options, "--serve.mesh.tp", 2, "--rollout-chips", 4, code=2)
    assert "the recipe starts 1, on 2 chips each, got --rollout-chips 4" in said
    assert "tp must divide the query heads of each layer, 2" in run(
        capsys, "grpo", "--model", two, *options, "--serve.mesh.tp", 5, code=2
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


@pytest.mark.slow
def test_a_preference_pair_is_two_sequences_and_may_need_a_reference_model(capsys, model):
    """Three microbatches of four rows hold the twelve full-length sequences of six pairs."""
    options = ["--model", model, "--length", 32, "--rows", 4, "--batch", 6, "--run.dtype", "float32"]
    for name, held in (("dpo", True), ("simpo", False)):
        report = json.loads(run(capsys, name, *options, "--json"))
        figures = {name: f["value"] for name, f in report["figures"].items()}
        assert report["microbatches"] == 3
        assert figures["reference_bytes"] == held * figures["params_bytes"]
        assert (figures["score_flops"] > 0) == held
    figures = json.loads(run(capsys, "rewardmodel", *options, "--json"))["figures"]
    assert figures["logits_bytes"]["value"] == 0  # a scalar head in place of the output head


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options, line",
    [
        (["--mesh.tp", 3], "query heads must be a multiple of tp = 3, got 2"),
        (["--mesh.fsdp", 3, "--rows", 8], "--rows must be a multiple of dp x fsdp x ep = 3, got 8"),
        (["--mesh.fsdp", 5, "--rows", 5], "embed: embed of size 32 cannot be split over fsdp = 5 devices"),
        (["--mesh.cp", 3], "--length must be a multiple of cp = 3, got 1024"),
        (["--mesh.dp", 1 << 40], "--mesh.dp must be at most 1048576, got 1099511627776"),
        (
            ["--mesh.dp", 1 << 12, "--mesh.tp", 1 << 9],
            "dp 4096 x tp 512 must have at most 1048576 devices, got",
        ),
        (["--mesh.tp", 0], "--mesh.tp must be at least 1, got 0"),
        (["--sample-tokens", 2000], "--sample-tokens must be from 1 to --length 1024, got 2000"),
        (
            ["--chip", "h300"],
            "--chip must be one of h100, h200, b200, b300, a100, mi300, v5p, v6e, v5e, v4, got 'h300'; add it to",
        ),
        (["--lora.rank", 8, "--lora.targets", "w"], "lora.targets: each must name matrices of the layers"),
        (["--suggest"], "--suggest and --devices go together: add --devices N to find a mesh for N h100"),
        (["--devices", 4], "to plan a mesh of yours, name it, such as --mesh.fsdp N; got --devices 4"),
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_plan_that_does_not_fit_suggests_what_would(capsys, model):
    big = ["--model", model, "--length", 1 << 20, "--rows", 1 << 14]
    *_, verdict, remedy = run(capsys, "sft", *big, code=1).splitlines()
    assert verdict.startswith("does not fit with --rows 16384: ")
    assert re.fullmatch(r"fits with --rows \d+.*", remedy)


@pytest.mark.slow
def test_what_a_plan_suggests_fits_and_is_faster(capsys, tmp_path):
    """Qwen3-8B on one H100: a set of options that save memory, or more devices; on eight, a larger microbatch."""
    (tmp_path / "config.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.S).group(1))
    base = {"--model": tmp_path, "--length": 4096, "--rows": 2, "--batch": 64}
    words = lambda options: [word for pair in options.items() for word in pair if word != ""]

    def planned(options, code):
        report = json.loads(run(capsys, "sft", *words(options), "--json", code=code))
        return report["suggested"], report["figures"]["tokens_per_device_per_s"]["value"]

    suggested, _ = planned(base, 1)
    assert len(suggested) == 2 and "--optim.offload" in suggested[0] and "--mesh.fsdp" in suggested[1]
    for each in suggested:
        given = re.findall(r"(--\S+)(?: ([^-]\S*))?", each)
        planned(base | dict(given), 0)
    eight = base | {"--mesh.fsdp": 16, "--rows": 16, "--batch": 512, "--length": 512}
    [more], before = planned(eight, 0)
    _, after = planned(eight | {"--rows": more.removeprefix("--rows ")}, 0)
    assert after > before


@pytest.mark.slow
def test_a_plan_suggests_what_the_memory_guide_has(capsys, tmp_path):
    """Adapters of Qwen3-8B: their base in 8 or 4 bits; on narrower devices, weights in bf16 as the last resort."""
    (tmp_path / "config.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.S).group(1))
    words = ["--model", tmp_path, "--length", 512, "--rows", 1, "--batch", 64]
    report = lambda *more, code: json.loads(run(capsys, "sft", *words, *more, "--json", code=code))
    adapters = [*words, "--chip", "v5e", "--lora.rank", 8]
    suggested = json.loads(run(capsys, "sft", *adapters, "--json", code=1))["suggested"]
    assert ["--lora.base int8", "--lora.base nf4"] == [each for each in suggested if each.startswith("--lora.base")]
    for each in suggested:
        report("--chip", "v5e", "--lora.rank", 8, *each.split(), code=0)
    options = "--chip", "h200", "--optim.ema", 0.99  # which --optim.offload does not keep
    [narrow] = [each for each in report(*options, code=1)["suggested"] if "--optim.weights" in each]
    report(*options, *narrow.split(), code=0)


@pytest.mark.slow
def test_a_critic_and_a_teacher_count(capsys, model):
    """Their weights, and what they compute; a teacher on servers costs the trainer the arrays in the batch alone."""
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 4, "--group-size", 4]
    figures = lambda recipe, *more: {
        name: f["value"] for name, f in json.loads(run(capsys, recipe, *options, *more, "--json"))["figures"].items()
    }
    plain, ppo = figures("grpo"), figures("ppo")
    policy = plain["params_bytes"] + plain["moments_bytes"]
    assert 0.9 < (ppo["critic_params_bytes"] + ppo["critic_moments_bytes"]) / policy < 1.1
    assert ppo["peak_bytes"] > plain["peak_bytes"] + 0.9 * policy
    assert ppo["critic_flops"] > 0.5 * plain["matmul_flops"] and ppo["step_s"] > 1.5 * plain["step_s"]
    passes = figures("ppo", "--epochs", 4)
    assert passes["score_flops"] == ppo["score_flops"] / 4 and passes["train_batch_s"] > 3 * ppo["train_batch_s"]
    taught = figures("grpo", "--distill-coef", 0.5, "--teacher", model)
    assert 0 < taught["teacher_bytes"] < plain["params_bytes"] and taught["teacher_flops"] == plain["score_flops"]
    servers = "--teachers", "http://127.0.0.1:1"
    served = figures("grpo", "--distill-coef", 0.5, "--distill.top-k", 4, *servers)
    assert served["teacher_bytes"] == served["teacher_flops"] == 0 and served["batch_bytes"] > plain["batch_bytes"]
    assert "addresses of servers, or --self-distillation" in run(capsys, "distill", "--model", model, code=2)


@pytest.mark.slow
def test_suggestions_fit_and_are_ranked(capsys, tmp_path):
    """Qwen3-8B on 16 H100: with the options of the first line, the plan says what the line says."""
    (tmp_path / "config.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.S).group(1))
    options = ["--model", tmp_path, "--length", 4096]
    report = json.loads(run(capsys, "sft", *options, "--suggest", "--devices", 16, "--json"))
    first, *rest = report["suggestions"]
    assert len(rest) == 2 and all(first["step_s"] <= 1.01 * one["step_s"] for one in rest)
    planned = json.loads(run(capsys, "sft", *options, *first["options"].split(), "--json"))
    assert planned["devices"] == 16 and planned["fits"]
    assert planned["figures"]["peak_bytes"]["value"] == pytest.approx(first["peak_bytes"], rel=1e-4)
    assert planned["figures"]["step_s"]["value"] == pytest.approx(first["step_s"], rel=1e-3)
    text = run(capsys, "sft", *options, "--suggest", "--devices", 2, "--chip", "v5e", code=1)
    assert "does not fit on 2 x v5e with any mesh" in text and text.count("\n") == 1


@pytest.mark.slow
def test_suggestions_say_what_they_try_and_simulate_no_eta_that_cannot_be_faster(capsys, model, monkeypatch):
    """Into a pipe a line before each stage. A batch takes as long as the trainer trains and publishes, at least."""
    seen, real = {}, suggest.simulate.simulate

    def simulated(run, eta):
        train_s = run.groups * run.group_size * (run.prompt + run.new) / run.train_tokens_s
        seen.setdefault(run.servers, []).append((train_s + run.publish_s, (out := real(run, eta)).step_s))
        return out

    monkeypatch.setattr(suggest.simulate, "simulate", simulated)
    options = ["--model", str(model), "--length", "64", "--sampling.max-new-tokens", "48", "--groups", "2"]
    options += ["--group-size", "2", "--serve.slots", "1"]
    assert cli.main(["plan", "grpo", *options, "--suggest", "--devices", "4"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "plan: at most 3 splits ..." and "plan: at most 12 simulations ..." in lines
    assert seen.keys() == {1, 2, 3}
    for tried in seen.values():
        assert all(least <= step_s * (1 + 1e-9) for least, step_s in tried)
        assert all(least <= suggest.BETTER * step_s for least, step_s in tried[:-1])


@pytest.mark.parametrize(
    "devices, words",
    [(6, "--devices 6"), (12, "--processes 2 --devices 6"), (48, "--processes 6 --devices 8")],
)
def test_the_suggested_launch_has_all_devices_in_processes_of_equal_size(devices, words):
    job = SimpleNamespace(layout=SimpleNamespace(devices=devices))
    one = suggest.Suggestion(SimpleNamespace(job=job), 1.0, 1.0, servers=4, server_devices=1)
    assert suggest._launch(one, CHIPS["h100"]) == f"areax launch {words} --servers 4 -- train ..."


@pytest.mark.slow
def test_suggestions_split_devices_between_trainer_and_servers(capsys, model):
    options = ["--model", model, "--length", 64, "--sampling.max-new-tokens", 48, "--groups", 2, "--group-size", 2]
    report = json.loads(run(capsys, "grpo", *options, "--suggest", "--devices", 4, "--json"))
    for one in report["suggestions"]:
        assert one["trainers"] + one["servers"] * one["server_devices"] == 4
        assert f"--eta {one['eta']}" in one["options"] and 0 <= one["staleness"] <= one["eta"]
    line = run(capsys, "grpo", *options, "--suggest", "--devices", 4).splitlines()[1]
    assert "devices train" in line and "tokens/s" in line and "staleness" in line and "of memory" in line
    _, split, launch = run(capsys, "grpo", *options, "--suggest", "--devices", 4, "--serve.mesh.tp", 2).splitlines()
    assert "2 devices train, 1 servers of 2" in split
    assert "areax launch --devices 2 --servers 1 --server.mesh.tp 2 -- train" in launch
    few = run(capsys, "grpo", *options, "--suggest", "--devices", 2, "--serve.mesh.tp", 2, code=2)
    assert "needs at least 3 --devices, 2 of them for a server, got 2" in few
    assert "got --colocated" in run(
        capsys, "grpo", *options, "--suggest", "--devices", 4, "--colocated", "--eta", 0, code=2
    )
