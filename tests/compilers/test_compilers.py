"""The chips' own compilers make of a training step what plans say, with the kernels that it should have."""

import json
import os

import pytest

from areax.adapters import cli

DENSE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8, vocab_size=4096)
DENSE |= dict(num_key_value_heads=2, head_dim=64, torch_dtype="bfloat16", max_position_embeddings=4096)
FAMILIES = {
    "qwen3": DENSE | dict(tie_word_embeddings=True),
    "gpt_oss": DENSE | dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=512, sliding_window=128),
    "deepseek_v3": DENSE | dict(
        num_key_value_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1,
    ),
    "qwen3_next": DENSE | dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=256, shared_expert_intermediate_size=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "nemotron_h": DENSE | dict(
        hybrid_override_pattern="M*E-", num_hidden_layers=4, mamba_num_heads=16, mamba_head_dim=32, n_groups=8,
        ssm_state_size=64, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=256,
    ),
}  # fmt: skip
GPU = {"attention_forward", "attention_dq", "attention_dkv"}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))  # nothing is taken from an earlier run


def planned(capsys, folder, family, *options, rows=2, code=0):
    (folder / "config.json").write_text(json.dumps({"model_type": family} | FAMILIES[family]))
    command = ["plan", *options, "--model", str(folder), "--length", "1024", "--run.dtype", "bfloat16"]
    assert cli.main([*command, "--rows", str(rows), "--compile", "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in ("qwen3", "gpt_oss") else pytest.mark.wide) for one in FAMILIES]
)
def test_a_step_compiles_for_an_h100_with_our_kernels(family, tmp_path, capsys):
    report = planned(capsys, tmp_path, family, "sft", "--chip", "h100", "--batch", "4")
    [step] = report["compiled"].values()
    assert not step["problem"] and step["kernels"].keys() >= GPU
    assert step["argument_bytes"] == report["figures"]["argument_bytes"]["value"]
    assert not step["collectives"]


def test_a_step_on_a_mesh_of_h100_has_its_collectives(tmp_path, capsys):
    """Weights are gathered, their gradients reduced; and a second call takes what the first has found."""
    options = "sft", "--chip", "h100", "--mesh.fsdp", "4", "--batch", "16"
    report = planned(capsys, tmp_path, "qwen3", *options, rows=4)
    step = report["compiled"]["model's step"]
    assert {"all-gather", "reduce-scatter"} <= step["collectives"].keys()
    assert step["argument_bytes"] == report["figures"]["argument_bytes"]["value"]
    assert planned(capsys, tmp_path, "qwen3", *options, rows=4)["compiled"]["model's step"] == step


@pytest.mark.wide
def test_a_step_compiles_for_a_v5e(tmp_path, capsys):
    report = planned(capsys, tmp_path, "qwen3", "sft", "--chip", "v5e", "--batch", "4")
    [step] = report["compiled"].values()
    assert not step["problem"] and any(name.startswith("splash_mha_fwd") for name in step["kernels"])
