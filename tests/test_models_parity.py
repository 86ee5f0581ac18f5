"""Every family computes what transformers computes: logits, gradients, packed rows, both ways through files."""

import dataclasses
import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybrid_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers

from areax import models
from areax.adapters import hf, safetensors
from areax.adapters import torch as torch_dicts
from areax.models import qwen3_5
from areax.models.attention.pattern import Pattern

TINY = dict(
    vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=3, initializer_range=0.2,
    pad_token_id=None,  # torch gives the embedding of a padding token no gradient
)  # fmt: skip
# Settings that a reader of config.json could get wrong without noticing.
CASES: dict[str, dict] = {
    "qwen3": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=22, attention_bias=True, tie_word_embeddings=True,
        rms_norm_eps=3e-3, rope_parameters={"rope_type": "default", "rope_theta": 777.7}, eos_token_id=[5, 7],
    ),
    "qwen3 untied": dict(
        num_attention_heads=6, num_key_value_heads=3, head_dim=10, attention_bias=False, tie_word_embeddings=False,
        rms_norm_eps=1e-2, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 3.5}, eos_token_id=0,
    ),
    "qwen2": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        rms_norm_eps=7e-4, rope_parameters={"rope_type": "default", "rope_theta": 123.0},
    ),
    "qwen2 untied": dict(
        num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=False,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "llama": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=14, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False, rms_norm_eps=2e-3, max_position_embeddings=128,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3_moe": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=28, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "qwen3_moe sparse step": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=12, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, num_experts=5, num_experts_per_tok=3,
        moe_intermediate_size=20, norm_topk_prob=False, decoder_sparse_step=2,
    ),
    "qwen2_moe": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=28, shared_expert_intermediate_size=36, norm_topk_prob=False, mlp_only_layers=[2],
    ),
    "qwen3 window": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, use_sliding_window=True, sliding_window=7,
        max_window_layers=1,
    ),
    "qwen2 window": dict(
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, use_sliding_window=True, sliding_window=4,
        max_window_layers=2,
    ),
    "qwen3_moe window": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[1], use_sliding_window=True, sliding_window=6,
    ),
    "qwen3_moe no head_dim": dict(
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=20,
    ),
    "phi3": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, rms_norm_eps=1e-3, sliding_window=7,
        max_position_embeddings=64, original_max_position_embeddings=11, eos_token_id=[5, 7],  # LENGTHS has longer ones
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 321.0, "partial_rotary_factor": 0.5, "factor": 4.0,
            "short_factor": [1.0, 1.5, 1.2], "long_factor": [2.0, 3.0, 4.0],
        },
    ),
    "phi3 tied": dict(
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, eos_token_id=None,
    ),
    "mixtral": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, num_local_experts=6, num_experts_per_tok=3,
        sliding_window=7,
    ),
    "glm4_moe": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, attention_bias=True, use_qk_norm=True,
        tie_word_embeddings=False, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        first_k_dense_replace=1, n_routed_experts=9, num_experts_per_tok=3, n_group=3, topk_group=2, n_shared_experts=2,
        moe_intermediate_size=28, norm_topk_prob=True, routed_scaling_factor=1.7,
    ),
    "glm4_moe not normalised": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=14, attention_bias=False, use_qk_norm=False,
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        first_k_dense_replace=2, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=20, norm_topk_prob=False, routed_scaling_factor=0.8,
    ),
    "gpt_oss": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-3,
        sliding_window=6, num_local_experts=6, num_experts_per_tok=3, swiglu_limit=1.5, swiglu_alpha=1.3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
        },
    ),
    "gpt_oss tied": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=14, attention_bias=False, tie_word_embeddings=True,
        rms_norm_eps=1e-5, sliding_window=9, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.7,
    ),
    "minimax_m2": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, rotary_dim=8, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_theta=500.0, num_local_experts=6, num_experts_per_tok=3,
    ),
    "glm4": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, attention_bias=True, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.67},
        eos_token_id=[5, 7],
    ),
    "glm4 tied": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=14, attention_bias=False, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, eos_token_id=5,
    ),
    "deepseek_v3": dict(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=18, kv_lora_rank=14, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=16, attention_bias=True, tie_word_embeddings=False, rms_norm_eps=1e-3,
        n_routed_experts=9, n_group=3, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20,
        n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0, "beta_slow": 1.0,
        },
    ),
    "deepseek_v3 halves": dict(
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=14, qk_nope_head_dim=8,
        qk_rope_head_dim=10, v_head_dim=6, rope_interleave=False, tie_word_embeddings=False, n_routed_experts=5,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=20, n_shared_experts=1,
        first_k_dense_replace=0, norm_topk_prob=False, rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "deepseek_v2": dict(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=18, kv_lora_rank=14, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=16, attention_bias=True, tie_word_embeddings=False, rms_norm_eps=1e-3,
        n_routed_experts=9, n_group=3, topk_group=2, topk_method="group_limited_greedy", num_experts_per_tok=3,
        moe_intermediate_size=20, n_shared_experts=2, first_k_dense_replace=2, routed_scaling_factor=3.0,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 4.0, "beta_slow": 1.0,
        },
    ),
    "deepseek_v2 greedy": dict(
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=14, qk_nope_head_dim=8,
        qk_rope_head_dim=10, v_head_dim=6, tie_word_embeddings=False, n_routed_experts=6, n_group=3, topk_group=1,
        num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=1, first_k_dense_replace=0,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "llama4_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-3,
        intermediate_size_mlp=52, num_local_experts=6, num_experts_per_tok=1, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1], attention_chunk_size=7, floor_scale=5, attn_scale=0.3,
        rope_parameters={  # both factors are equal in Scout
            "rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama4_text biases": dict(
        num_attention_heads=6, num_key_value_heads=2, head_dim=14, tie_word_embeddings=False, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, intermediate_size_mlp=52, num_local_experts=5,
        num_experts_per_tok=2, no_rope_layers=[0, 1, 1], attn_temperature_tuning=False, use_qk_norm=False,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"], attention_chunk_size=11,
    ),
    "llama tied": dict(
        num_attention_heads=2, num_key_value_heads=2, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mistral": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, sliding_window=7, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "ministral3": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True, rms_norm_eps=1e-3,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
            "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3,
        },
    ),
    "smollm3": dict(
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, no_rope_layers=[0, 1, 0],
        use_sliding_window=True, sliding_window=5, layer_types=["full_attention", *["sliding_attention"] * 2],
    ),
    "seed_oss": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=18, attention_out_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 200.0},
    ),
    "granite": dict(
        num_attention_heads=4, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 400.0}, embedding_multiplier=1.7,
        attention_multiplier=0.21, residual_multiplier=0.6, logits_scaling=0.8,
    ),
    "gemma2": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, attention_bias=True, tie_word_embeddings=True,
        rms_norm_eps=1e-3, rope_parameters={"rope_type": "linear", "rope_theta": 250.0, "factor": 2.5},
        query_pre_attn_scalar=23, sliding_window=7, attn_logit_softcapping=5.0, final_logit_softcapping=6.0,
        layer_types=["full_attention", *["sliding_attention"] * 2],
    ),
    "gemma2 uncapped": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=22, tie_word_embeddings=False, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, query_pre_attn_scalar=9, sliding_window=4,
        attn_logit_softcapping=None, final_logit_softcapping=None,
    ),
    "gemma3_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, attention_bias=True, rms_norm_eps=1e-3,
        query_pre_attn_scalar=23, sliding_window=7, final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
        },
    ),
    "gemma3_text untied": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=10, tie_word_embeddings=False, rms_norm_eps=1e-5,
        query_pre_attn_scalar=7, sliding_window=5, sliding_window_pattern=2,
    ),
    "gemma4_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, global_head_dim=10, num_global_key_value_heads=1,
        attention_k_eq_v=True, attention_bias=True, rms_norm_eps=1e-3, sliding_window=7, final_logit_softcapping=6.0,
        hidden_size_per_layer_input=0, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma4_text experts": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, global_head_dim=10, rms_norm_eps=1e-3,
        tie_word_embeddings=False, sliding_window=5, hidden_size_per_layer_input=0, num_hidden_layers=2,
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=28,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4_text small": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=6, global_head_dim=10, rms_norm_eps=1e-2,
        sliding_window=5, hidden_size_per_layer_input=12, vocab_size_per_layer_input=67, num_kv_shared_layers=2,
        use_double_wide_mlp=True, num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    ),
    "olmo2": dict(
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 150.0},
    ),
    "qwen3_5_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=10, linear_value_head_dim=14,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3_5_text biases": dict(
        num_attention_heads=6, num_key_value_heads=3, head_dim=14, attention_bias=True, tie_word_embeddings=True,
        rms_norm_eps=1e-2, num_hidden_layers=4, full_attention_interval=2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75,
                         "mrope_section": [2, 2, 1], "mrope_interleaved": True},
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=14, linear_value_head_dim=10,
        linear_conv_kernel_dim=2,
    ),
    "qwen3_5_moe_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=10, linear_value_head_dim=14,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=28, shared_expert_intermediate_size=36,
    ),
    "qwen3_next": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, tie_word_embeddings=False, rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.6},
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=10, linear_value_head_dim=14,
        linear_conv_kernel_dim=5, layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=28, shared_expert_intermediate_size=36,
        norm_topk_prob=False, mlp_only_layers=[1],
    ),
    "qwen3_next sparse step": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=24, attention_bias=True, tie_word_embeddings=True,
        rms_norm_eps=1e-2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=14, linear_value_head_dim=10,
        full_attention_interval=3, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        shared_expert_intermediate_size=12, decoder_sparse_step=2,
    ),
    "nemotron_h": dict(
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=14, layer_norm_epsilon=1e-3,
        layers_block_type=["mlp", "linear_attention", "moe", "full_attention", "linear_attention"],
        mamba_num_heads=6, mamba_head_dim=10, n_groups=3, ssm_state_size=11, conv_kernel=5, use_bias=True,
        time_step_min=0.3, time_step_max=1.5, chunk_size=8, mlp_bias=True, n_routed_experts=9, num_experts_per_tok=3,
        n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.7, moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28, moe_latent_size=16,
    ),
    "nemotron_h plain": dict(
        num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=10, layer_norm_epsilon=1e-5,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        mamba_num_heads=4, mamba_head_dim=14, n_groups=1, ssm_state_size=6, use_conv_bias=False, n_routed_experts=5,
        num_experts_per_tok=2, norm_topk_prob=False, moe_intermediate_size=20, moe_shared_expert_intermediate_size=24,
    ),
    "olmo3": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-3, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16,
                "attention_factor": 1.2, "beta_fast": 4.0, "beta_slow": 1.0,
            },
        },
    ),
}  # fmt: skip
T = 37
LENGTHS = (1, 11, 3, 16, 6)  # of the sequences in a packed row


def perturbed(model):
    """Norms away from one, biases from zero: else half of a model's weights could be ignored unnoticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.ndim == 1 or name.endswith("_bias"):
                weight += 0.4 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def reference(name, kind="ForCausalLM", **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **TINY | CASES[name] | more)
    return perturbed(getattr(transformers, f"AutoModel{kind}").from_config(config))


def tokens():
    return np.random.default_rng(3).integers(0, TINY["vocab_size"], (2, T))


@dataclass(frozen=True)
class Case:
    """A model of transformers, its files, and what areax read from them."""

    model: Any
    path: Path
    config: Any
    params: Any
    logits_BTV: np.ndarray
    gradient: Any


@functools.partial(jax.jit, static_argnames="config")
def forward(params, token_BT, segment_BT, config):
    return models.forward(params, token_BT, config=config, segment_BT=segment_BT, run=models.Run(query_chunk=20))


@functools.partial(jax.jit, static_argnames="config")
def ours(params, token_BT, segment_BT, config):
    """(logits, gradient of the mean cross-entropy)."""

    def loss(params):
        logits_BTV = forward(params, token_BT, segment_BT, config)
        logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp_BTV, token_BT[:, 1:, None], -1)), logits_BTV

    gradient, logits_BTV = jax.grad(loss, has_aux=True)(params)
    return logits_BTV, gradient


# These have each piece of the code once; the others run with the meshes, or, if they only repeat a setting in another
# family, under `wide`.
COMMON = (
    "qwen3", "qwen2", "llama", "qwen3 window", "qwen3_moe", "qwen2_moe", "phi3", "qwen3_5_text", "olmo3", "gemma2",
    "gpt_oss", "deepseek_v3",
)  # fmt: skip
REPEATS = "llama tied", "phi3 tied", "glm4 tied", "gpt_oss tied", "qwen2 untied", "qwen2 window", "qwen3_moe window"


def marks(name):
    return [] if name in COMMON else [pytest.mark.wide] if name in REPEATS else [pytest.mark.mesh]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in CASES])
def case(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    model = reference(request.param)
    model.save_pretrained(path)
    config, params = hf.load(path)
    logits_BTV, gradient = ours(params, tokens(), np.ones((2, T), np.int32), config)
    return Case(model, path, config, params, np.asarray(logits_BTV), gradient)


def theirs(model, token_BT, **more):
    return model(input_ids=torch.from_numpy(token_BT), attention_mask=None, use_cache=False, **more).logits


def assert_close(got, wanted, tolerance=1e-4):
    """Absolute, and relative to the largest entry."""
    assert got.shape == wanted.shape
    worst = np.abs(got - wanted).max()
    assert worst <= tolerance and worst <= tolerance * np.abs(wanted).max(), worst


MIXTRAL = (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
SPELT = {"mixtral": MIXTRAL, "minimax_m2": MIXTRAL, "nemotron_h": (("model.", "backbone."),)}


def experts_apart(named, family):
    """A module holds all experts of a layer in one tensor, a checkpoint each in its own, some by other names."""
    if family in ("gpt_oss", "llama4_text", "gemma4_text"):  # as in the module
        return named
    out = {}
    for name, x in named.items():
        if name.endswith("experts.gate_up_proj"):
            half, stem = x.shape[1] // 2, name.removesuffix("gate_up_proj")
            for e in range(len(x)):
                out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = x[e, :half], x[e, half:]
        elif name.endswith((".experts.down_proj", ".experts.up_proj")):
            stem, _, matrix = name.rpartition(".")
            out |= {f"{stem}.{e}.{matrix}.weight": x[e] for e in range(len(x))}
        else:
            out[name] = x
    for old, new in SPELT.get(family, ()):
        out = {name.replace(old, new): x for name, x in out.items()}
    return out


@pytest.mark.sweep
def test_logits(case):
    with torch.no_grad():
        wanted = theirs(case.model, tokens()).numpy()
    assert wanted.std() >= 1
    assert_close(case.logits_BTV, wanted)


@pytest.mark.sweep
def test_gradients(case):
    case.model.zero_grad()
    logits = theirs(case.model, tokens())
    target = torch.from_numpy(tokens()[:, 1:]).flatten()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target).backward()
    scales = {name for name in case.model.state_dict() if name.endswith("layer_scalar")}  # factors of a layer's output
    fixed = case.model.state_dict().keys() & dict(case.model.named_buffers()).keys() - scales
    wanted = {name: np.zeros(case.model.get_buffer(name).shape) for name in fixed}
    wanted |= {name: weight.grad.numpy() for name, weight in case.model.named_parameters()}
    wanted = experts_apart(wanted, case.config.family)
    specs, arrays = hf.to_tensors(case.config, case.gradient, "float32")
    got = {name: x for name, x in zip(specs, arrays, strict=True) if name not in scales}
    assert got.keys() == wanted.keys()
    largest = max(np.abs(g).max() for g in wanted.values())
    for name, g in wanted.items():
        size = np.abs(g).max()
        # That of a key's bias in a layer without rope is 0 but for rounding.
        assert np.abs(got[name] - g).max() <= 1e-4 * (size if size > 1e-5 * largest else largest), name


HYBRIDS = [
    pytest.param(name, marks=[pytest.mark.mesh] * (name not in COMMON))
    for name in CASES
    if name.startswith(("qwen3_5", "qwen3_next"))
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("case", HYBRIDS, indirect=True)
def test_hybrids_equal_float64_token_by_token(case):
    """Logits within 1e-5 of their deviation, the gradient of each tensor within 2e-5 of its largest entry.

    Compiled with optimisations, two seeds were at most 9.8e-6 and 7.9e-6 off; without, the experts of `qwen3_next`
    1.1e-5. Transformers was 1.5e-5 and 8e-5 off. An epsilon of 1e-3 in norms instead of 1e-2 lets heads that are nearly
    0 multiply rounding: 1.6e-5 for logits.
    """
    stored = safetensors.read(case.path)
    weights = {name: torch.tensor(np.float64(x), requires_grad=True) for name, x in stored.items()}
    hf_config = json.loads((case.path / "config.json").read_text())
    token_BT = torch.from_numpy(tokens())
    wanted = torch.stack([hybrid_oracle.logits(hf_config, weights, token_T) for token_T in token_BT])
    assert np.abs(case.logits_BTV - wanted.detach().numpy()).max() <= 1e-5 * wanted.std()
    torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), token_BT[:, 1:].flatten()).backward()
    got = dict(zip(*hf.to_tensors(case.config, case.gradient, "float32"), strict=True))
    assert got.keys() == weights.keys()
    for name, x in weights.items():
        g = x.grad.numpy()
        assert np.abs(got[name] - g).max() <= 2e-5 * np.abs(g).max(), name


def test_heads_of_new_delta_nets_remember_for_a_token_up_to_a_thousand():
    """The time constants of flash-linear-attention: 1 / (A dt), A uniform up to 16, log dt from 0.001 to 0.1."""
    params = qwen3_5.delta_net(models.config_from_hf({"model_type": "qwen3_5_text"} | TINY | CASES["qwen3_5_text"]))
    draw = lambda name: params[name].init(jax.random.key(0), (2000, 4), jnp.float32)
    tokens = 1 / (np.exp(draw("decay_log")) * np.logaddexp(0, draw("decay_bias")))
    np.testing.assert_allclose(np.quantile(tokens, [0.05, 0.5, 0.95]), [0.8, 12.6, 1100], rtol=0.1)


@pytest.mark.sweep
def test_packed_rows(case):
    """Sequences side by side compute what transformers computes for each alone; packed, some of its models leak."""
    segment_BT = np.tile(np.repeat(np.arange(1, len(LENGTHS) + 1, dtype=np.int32), LENGTHS), (2, 1))
    got_BTV = np.asarray(ours(case.params, tokens(), segment_BT, case.config)[0])
    bounds = itertools.pairwise(itertools.accumulate(LENGTHS, initial=0))
    with torch.no_grad():
        wanted = np.concatenate([theirs(case.model, tokens()[:, slice(*each)]).numpy() for each in bounds], 1)
    assert_close(got_BTV, wanted)
    assert np.abs(wanted - case.logits_BTV).max() > 0.1  # packing does matter


@pytest.mark.slow
def test_dynamic_rope_of_packed_sequences():
    """transformers remembers the longest sequence it has seen, so each gets a new rotary embedding."""
    scaling = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0}
    model = reference("llama tied", rope_parameters=scaling, max_position_embeddings=8, num_hidden_layers=1)
    config, params = torch_dicts.from_state_dict(models.config_from_hf(model.config.to_dict()), model.state_dict())
    segment_BT = np.tile(np.repeat(np.arange(1, len(LENGTHS) + 1, dtype=np.int32), LENGTHS), (2, 1))
    wanted = []
    for start, end in itertools.pairwise(itertools.accumulate(LENGTHS, initial=0)):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        with torch.no_grad():
            wanted.append(theirs(model, tokens()[:, start:end]).numpy())
    assert_close(np.asarray(forward(params, tokens(), segment_BT, config)), np.concatenate(wanted, 1))


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_what_we_write(case, tmp_path, dtype):
    hf.save(tmp_path / "ours", case.config, case.params, dtype)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(model) is type(case.model) and not any(info.values())
    wanted = case.model.state_dict()
    got = model.state_dict()
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        kept = "e_score_correction_bias" in name and got[name].dtype == torch.float32
        assert torch.equal(got[name], x if kept else x.to(getattr(torch, dtype))), name
    if dtype == "float32":
        # In memory of its own: torch's products are rounded by how the weights are aligned, and those of files are not.
        again = transformers.AutoModelForCausalLM.from_config(model.config).eval()
        again.load_state_dict(got)
        with torch.no_grad():
            assert torch.equal(theirs(again, tokens()), theirs(case.model, tokens()))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_export_load_export_is_bit_identical(case, tmp_path, dtype):
    hf.save(tmp_path / "a", case.config, case.params, dtype)
    config, params = hf.load(tmp_path / "a")
    hf.save(tmp_path / "b", config, params)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    # Our tensors are those that transformers wrote, down to names and bits.
    if dtype is None:
        stored, again = safetensors.read(case.path), safetensors.read(tmp_path / "a")
        assert stored.keys() == again.keys()
        assert all(np.array_equal(stored[name], again[name]) for name in stored)


def old_spelling(config_json):
    """A config.json as transformers 4 wrote it."""
    if config_json["model_type"] == "gemma4_text":  # is younger
        return {k: v for k, v in config_json.items() if k != "dtype"} | {"torch_dtype": "bfloat16"}
    if config_json["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
        kinds = config_json.pop("layers_block_type")
        old = {"num_hidden_layers": len(kinds), "hybrid_override_pattern": "".join(map(letters.get, kinds))}
        return {k: v for k, v in config_json.items() if k != "dtype"} | old | {"torch_dtype": "bfloat16"}
    windows = "max_window_layers" in config_json
    new = ("rope_parameters", "dtype", *(["layer_types"] if windows else []))
    old = {k: v for k, v in config_json.items() if k not in new}
    rope = dict(config_json["rope_parameters"])
    rope = dict(rope.get("full_attention", rope))  # of sliding layers only theta could be stated
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config_json["model_type"] == "gemma3_text":
        old["rope_local_base_freq"] = config_json["rope_parameters"]["sliding_attention"]["rope_theta"]
    kind = rope.pop("rope_type")
    if kind == "linear":
        old["rope_scaling"] = {"type": kind, **rope}
    else:
        old |= {name: rope.pop(name) for name in ["partial_rotary_factor"] if name in rope}
        old["rope_scaling"] = None if kind == "default" and not rope else {"rope_type": kind, **rope}
    return old | {"torch_dtype": "bfloat16"}


@pytest.mark.sweep
def test_old_config_spellings_are_read(case, tmp_path):
    old = old_spelling(json.loads((case.path / "config.json").read_text()))
    config = models.config_from_hf(old)
    same = {k: v for k, v in vars(config).items() if k != "source"}
    assert same == {k: v for k, v in vars(case.config).items() if k != "source"}
    # And what we write of it is understood by transformers, in the new spelling and alone in the old.
    hf.save(tmp_path / "m", config, case.params)
    path = tmp_path / "m" / "config.json"
    written = json.loads(path.read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    new = {"gemma4_text": ["dtype"], "nemotron_h": ["dtype", "layers_block_type"]}
    new = new.get(config.family, ["dtype", "rope_parameters"])
    for drop in ((), new, ("rope_theta", "rope_scaling", "torch_dtype")):
        path.write_text(json.dumps({k: v for k, v in written.items() if k not in drop}))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        assert model.dtype == torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
        model.load_state_dict(case.model.state_dict())
        with torch.no_grad():
            assert torch.equal(theirs(model, tokens()), theirs(case.model, tokens()))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_transformers_loads_a_model_created_here(name, tmp_path):
    """From a config.json with the least in it, without transformers having touched it."""
    least = dict(TINY, model_type=name, num_attention_heads=4, head_dim=8, num_key_value_heads=2)
    config = models.config_from_hf(least)
    params = tiny.weights(models.table(config), TINY["initializer_range"])
    hf.save(tmp_path / "m", config, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        wanted = theirs(model.eval(), tokens()).numpy()
    assert wanted.std() >= 1
    got_BTV = jax.jit(lambda params, token_BT: models.forward(params, token_BT, config=config))(params, tokens())
    assert_close(np.asarray(got_BTV), wanted)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["qwen2", "qwen3 untied", "llama"])
def test_value_heads(name, tmp_path):
    """`score.weight` comes and goes through files as in transformers' sequence classifiers."""
    model = reference(name, "ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert config.score_head and "head" not in params
    token_BT = tokens()[:1]
    value = hidden(params, token_BT, config)[0, -1] @ params["score"][0]
    with torch.no_grad():
        wanted = model(torch.from_numpy(token_BT), use_cache=False).logits.item()
    assert abs(value - wanted) <= 1e-4 * max(1, abs(wanted))
    hf.save(tmp_path / "ours", config, params)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert type(again) is type(model) and torch.equal(again.score.weight, model.score.weight)
    loaded, same = hf.load(tmp_path / "ours")
    assert loaded.score_head and jax.tree.all(jax.tree.map(np.array_equal, params, same))


@functools.partial(jax.jit, static_argnames="config")
def hidden(params, token_BT, config):
    segment_BT = jnp.ones(token_BT.shape, jnp.int32)
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    return models.backbone(params, token_BT, position_BT, segment_BT, position_BT, config=config)[0]


def windows(config):
    return tuple(record.pattern.window for record in config.records)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("window", [1, 20, T - 1])
def test_windows_end_where_those_of_transformers_end(window):
    """Layers of either kind in any order; a window one wider gives other logits."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = reference("qwen3 window", layer_types=kinds)
    model.config.sliding_window = window
    config, params = torch_dicts.from_state_dict(models.config_from_hf(model.config.to_dict()), model.state_dict())
    assert windows(config) == (window, None, window)
    with torch.no_grad():
        wanted = theirs(model, tokens()).numpy()
    one = np.ones((2, T), np.int32)
    assert_close(np.asarray(forward(params, tokens(), one, config)), wanted)
    wider = tuple(
        dataclasses.replace(each, pattern=Pattern(window and window + 1))
        for each, window in zip(config.records, windows(config), strict=True)
    )
    wider_BTV = forward(params, tokens(), one, dataclasses.replace(config, records=wider))
    assert np.abs(wider_BTV - wanted).max() > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8},  # max_window_layers is 28
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 2},  # sliding_window is 4096
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", *["full_attention"] * 2],
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_have_the_windows_that_transformers_gives_them(family, options):
    least = dict(TINY, num_attention_heads=4, head_dim=8, num_key_value_heads=2) | options
    theirs = transformers.AutoConfig.for_model(family, **least)
    wanted = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    config = models.config_from_hf(least | {"model_type": family})
    assert windows(config) == wanted
    assert windows(models.config_from_hf(models.config_to_hf(config))) == wanted
    assert len(models.table(config).stacks) == len(list(itertools.groupby(wanted)))


@pytest.mark.parametrize(
    "family, options, words",
    [
        ("llama", {"use_sliding_window": True, "sliding_window": 8}, "not implemented for llama"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "not implemented for llama"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "need use_sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "got True and 0"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "each of 3 layers, got 2"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ("phi3", {"sliding_window": 0}, "sliding_window must be at least 1, or null, got 0"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "must apply to all layers",
        ),
    ],
)  # fmt: skip
def test_impossible_windows_are_refused(family, options, words):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8) if family == "qwen3_moe" else {}
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        models.config_from_hf(dict(TINY, model_type=family, num_attention_heads=4) | experts | options)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "option, words",
    [
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type .*axial"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type .*mrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act .*gelu"),
        ({"attention_dropout": 0.1}, "attention_dropout .*0.1"),
        ({"is_causal": False}, "is_causal must be True, got False"),
        ({"quantization_config": {"quant_method": "gptq", "modules_to_not_convert": ["lm_head"] * 999}},
         "weights must not be quantised, got quantization_config .{200}, by which .*; use the original checkpoint$"),
        ({"compression_config": {"format": "pack-quantized"}}, "quantised, got compression_config .*pack-quantized"),
    ],
)  # fmt: skip
def test_options_that_are_not_implemented_are_refused_by_name(family, option, words, tmp_path):
    least = dict(TINY, model_type=family, num_attention_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(least | option))
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: .*{words}"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "option, words",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type of phi3 .*linear"),
        ({"resid_pdrop": 0.1}, "resid_pdrop .*0.1"),
        ({"embd_pdrop": 0.1}, "embd_pdrop .*0.1"),
    ],
)
def test_options_of_phi3_that_are_not_implemented_are_refused(option, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(dict(TINY, model_type="phi3", num_attention_heads=4) | option)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize(
    "option, words",
    [
        ({"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false, got True"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a finite number above 0, or null, got 0"),
        ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping must be a finite number above 0, or null, got '50'"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a finite number above 0, got -1"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0, got None"),
    ],
)
def test_options_of_gemma_that_are_not_implemented_are_refused(family, option, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(dict(TINY, model_type=family, num_attention_heads=4) | option)


def test_options_of_gemma3_that_are_not_implemented_are_refused():
    least = dict(TINY, model_type="gemma3_text", num_attention_heads=4)
    for option, words in (
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None, got 50.0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=f"config.json: {words}"):
            models.config_from_hf(least | option)
    with pytest.raises(ValueError, match="config.json: gemma3_text needs hidden_size, got none"):
        models.config_from_hf({name: value for name, value in least.items() if name != "hidden_size"})


SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", *["full_attention"] * 2]}
SIZES = "per_layer_config must have the same head_dim and num_key_value_heads for each layer of full_attention"


@pytest.mark.parametrize(
    "option, words",
    [
        ({"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be false, got 'all'"),
        ({"sliding_window": None}, "gemma4_text needs sliding_window, got None"),
        ({"rope_theta": 20.0}, "rope_theta must be None, got 20.0"),
        ({"global_head_dim": 7}, "global_head_dim must be even and above 0, got 7"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_attention_heads 4 must be a multiple of num_global_key_value_heads, got 3",
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers must leave a layer of each type .* got 3 of 3 layers"),
        (SHARED, "num_kv_shared_layers must leave a layer of each type .* with no full_attention"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, SIZES),
        ({"per_layer_config": {"2": {"num_attention_heads": 8}}}, SIZES),
        ({"per_layer_config": [8]}, "per_layer_config must be options by layer, or null"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "gemma4_text needs moe_intermediate_size"),
    ],
)
def test_impossible_options_of_gemma4_are_refused(option, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(dict(TINY, model_type="gemma4_text", num_attention_heads=4) | option)


def test_keys_of_layers_that_use_those_of_others_are_not_read(tmp_path):
    """Checkpoints have them; other tensors that the model lacks are refused as ever."""
    reference("gemma4_text small").save_pretrained(tmp_path)
    config, params = hf.load(tmp_path)
    stored = {name: np.array(x) for name, x in safetensors.read(tmp_path).items()}
    at = "model.layers.4.self_attn."
    one = np.ones(3, np.float32)
    _, again = hf.from_tensors(config, stored | {f"{at}k_proj.weight": one, f"{at}k_norm.weight": one}, "here")
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    with pytest.raises(ValueError, match="here: .*model.layers.2.self_attn.k_proj.bias"):
        hf.from_tensors(config, stored | {"model.layers.2.self_attn.k_proj.bias": one}, "here")


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_gemmas_scale_of_embeddings_is_rounded_to_the_compute_dtype(name):
    model = reference(name).bfloat16()
    config, params = torch_dicts.from_state_dict(models.config_from_hf(model.config.to_dict()), model.state_dict())
    got_BTD = models.FAMILIES[name].embed(params, tokens(), config, jnp.bfloat16)
    with torch.no_grad():
        wanted = model.model.embed_tokens(torch.from_numpy(tokens())).float().numpy()
    assert np.array_equal(np.asarray(got_BTD, np.float32), wanted)


LEAST = dict(
    vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=2, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    shared_expert_intermediate_size=8, pad_token_id=None,
)  # fmt: skip


EIGHT = dict(n_routed_experts=8, num_local_experts=8, num_experts=8)
LATENT = dict(num_key_value_heads=8, n_routed_experts=32, num_local_experts=32, num_experts=32)
LEAST_OF: dict[str, dict] = {
    "glm4_moe": EIGHT, "gpt_oss": EIGHT, "minimax_m2": EIGHT, "deepseek_v2": LATENT, "deepseek_v3": LATENT,
    "nemotron_h": dict(num_hidden_layers=4),
}  # fmt: skip


@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name != "kimi_k2"])
def test_a_family_has_the_defaults_of_transformers(family):
    """A config.json that leaves out what it may means what it means there."""
    least = LEAST | LEAST_OF.get(family, {})
    ours = models.config_from_hf(least | {"model_type": family})
    theirs = models.config_from_hf(transformers.AutoConfig.for_model(family, **least).to_dict())
    ignored = dict(source="", eos=(), prefix="")
    assert dataclasses.replace(ours, **ignored) == dataclasses.replace(theirs, **ignored)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_size_that_is_missing_is_named(family):
    least = LEAST | LEAST_OF.get(family.replace("kimi_k2", "deepseek_v3"), {}) | {"model_type": family}
    names = ["vocab_size", "hidden_size"]
    if family != "nemotron_h":  # whose layers are those of a pattern, with attention in few of them, or in none
        names += ["num_hidden_layers", "num_attention_heads"]
    for name in names:
        with pytest.raises(ValueError, match=f"config.json: .*{name}"):
            models.config_from_hf({option: value for option, value in least.items() if option != name})


def test_kimi_k2_is_read_as_deepseek_v3_and_written_under_its_own_name(tmp_path):
    """transformers knows no kimi_k2."""
    reference("deepseek_v3").save_pretrained(tmp_path / "a")
    config, params = hf.load(tmp_path / "a")
    path = tmp_path / "a/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    kimi, same = hf.load(tmp_path / "a")
    assert dataclasses.replace(kimi, family=config.family, source=config.source) == config
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
    hf.save(tmp_path / "b", kimi, params)
    written = json.loads((tmp_path / "b/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])


@pytest.mark.parametrize(
    "name, option, words",
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must be 4, got 2"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group must be at most n_group 3, got 4"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank must be a whole number above 0, got None"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, got 5"),
        ("deepseek_v3", {"qk_rope_head_dim": 2**31}, "qk_rope_head_dim must be a whole number of 1 to 10,000, got 21"),
        ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be a whole number of 0 to"),
        ("llama4_text", {"mtp_num_hidden_layers": "x"}, "mtp_num_hidden_layers must be a whole number of 0 to 10,000"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
         ".* that rope_type linear does not use, got mscale_all_dim 1.0"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim must be 6, got 8"),
        ("deepseek_v3", {"moe_intermediate_size": None}, "deepseek_v3 needs moe_intermediate_size, got None"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method must be greedy or group_limited_greedy, got 'best'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False, got True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias must be False, got True"),
        ("llama4_text", {"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0, got 0.1"),
        ("llama4_text", {"attention_chunk_size": None}, "chunked_attention needs an attention_chunk_size"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 0 or 1 for each of 3 layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types must be chunked_attention or full"),
        ("llama4_text", {"moe_layers": [3]}, "moe_layers must be among the 3 layers, got .3."),
    ],
)  # fmt: skip
def test_options_of_large_mixtures_that_are_not_implemented_are_refused(name, option, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(TINY | CASES[name] | {"model_type": name} | option)


MIXTURES = dict(
    num_hidden_layers=4, hidden_size=48, vocab_size=61, tie_word_embeddings=False, attention_dropout=0.0,
    num_attention_heads=8, num_key_value_heads=2, num_experts_per_tok=2, head_dim=16, hidden_act="silu",
    pad_token_id=None,
)  # fmt: skip
PUBLISHED: dict[str, dict] = {  # options as checkpoints on the hub spell them; sizes are smaller
    "glm4_moe": dict(
        attention_bias=True, eos_token_id=[11, 13], partial_rotary_factor=0.5, intermediate_size=40,
        moe_intermediate_size=24, norm_topk_prob=True, n_group=1, topk_group=1, n_routed_experts=8, n_shared_experts=1,
        routed_scaling_factor=2.5, first_k_dense_replace=3, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
        num_nextn_predict_layers=1, use_qk_norm=True, max_position_embeddings=131072,
    ),
    "gpt_oss": dict(
        attention_bias=True, eos_token_id=2, experts_per_token=2, initial_context_length=4096, intermediate_size=40,
        layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=131072, num_local_experts=8,
        rms_norm_eps=1e-5, rope_theta=150000, sliding_window=128, swiglu_limit=7.0,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    ),
    "minimax_m2": dict(
        attn_type_list=[1] * 4, intermediate_size=40, max_position_embeddings=196608, num_local_experts=8,
        qk_norm_type="per_layer", rms_norm_eps=1e-6, rope_theta=5000000, rotary_dim=8, router_jitter_noise=0.0,
        scoring_func="sigmoid", shared_intermediate_size=0, use_qk_norm=True, use_routing_bias=True, use_mtp=True,
    ),
    "glm4": dict(
        attention_bias=True, eos_token_id=[11, 13], intermediate_size=40, max_position_embeddings=32768,
        partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=10000.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_mean_what_they_mean_to_transformers(family):
    published = MIXTURES | PUBLISHED[family]
    ours = models.config_from_hf(published | {"model_type": family})
    theirs = models.config_from_hf(transformers.AutoConfig.for_model(family, **published).to_dict())
    ignored = dict(source="", eos=())
    assert dataclasses.replace(ours, **ignored) == dataclasses.replace(theirs, **ignored)
    assert ours.rope.partial == (None if family == "gpt_oss" else 0.5)


def test_queries_of_ministral3_grow_beyond_the_context_that_transformers_takes():
    """The model's own original context comes before that of its rope, for both."""
    options = TINY | CASES["ministral3"] | {"original_max_position_embeddings": 32}
    ours = models.config_from_hf(options | {"model_type": "ministral3"})
    theirs = models.config_from_hf(transformers.AutoConfig.for_model("ministral3", **options).to_dict())
    assert ours.records == theirs.records
    assert {record.growth.length for record in ours.records} == {32}


MIXTURE = dict(TINY, model_type="mixtral", num_attention_heads=8, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    "option, words",
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_local_experts 4, got 5"),
        ({"num_local_experts": None}, "mixtral needs num_local_experts, got None"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, or null, got 0"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0, got 0.1"),
    ],
)
def test_impossible_mixtures_are_refused(option, words):
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        models.config_from_hf(MIXTURE | option)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe_text"])
def test_the_names_of_modules_are_read(name, tmp_path):
    """Published checkpoints of Qwen3.5-MoE have them: all experts of a layer in a tensor."""
    model = reference(name)
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    model.save_pretrained(tmp_path)
    config, params = hf.load(tmp_path)
    same = torch_dicts.from_state_dict(config, model.state_dict())[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))


@pytest.mark.parametrize(
    "family, option, words",
    [
        ("gpt_oss", {"rope_parameters": {}}, "rope_parameters must have options, or be null, got {}"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("gpt_oss", {"num_local_experts": None}, "gpt_oss needs num_local_experts, got None"),
        ("glm4_moe", {"n_shared_experts": None}, "n_shared_experts must be at least 1, got None"),
        ("glm4_moe", {"n_routed_experts": 1}, "num_experts_per_tok must be at most n_routed_experts 1, got 2"),
        ("glm4_moe", {"topk_group": 2}, "topk_group must be at most n_group 1, got 2"),
        ("glm4_moe", {"n_group": 3}, "n_group must divide n_routed_experts 8 .*, got 3 and 1"),
        ("glm4_moe", {"n_group": 8}, "into groups of 2 or more, .*, got 8 and 1"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3 experts, got 4 and 1"),
        ("glm4_moe", {"routed_scaling_factor": "2"}, "routed_scaling_factor must be a finite number"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size must be 0, got 8"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list must be 1, .*, got \[1, 0, 1\]"),
        *[("qwen3_5_text", {f"linear_{name}": value}, f"linear_{name} must be a whole number above 0, got {value}")
          for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
          for value in (0, None)],
        ("qwen3_5_text", {"full_attention_interval": "4"}, "full_attention_interval must be a whole number above 0"),
        *[(name, {"no_rope_layers": 1}, "no_rope_layers must be a list of 0 or 1, or null, got 1")
          for name in ("smollm3", "llama4_text")],
        *[("granite", {name: value}, f"{name} must be a finite number above 0, got {value}")
          for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
          for value in (0, None, float("nan"))],
        # transformers has these windows, but not with flash attention
        *[("smollm3", {"layer_types": ["sliding_attention"] * 6, **options}, "needs use_sliding_window and a sliding")
          for options in ({"sliding_window": 7}, {"use_sliding_window": True})],
        ("ministral3", {"rope_parameters": "yarn"}, "rope_parameters must be one set of options .*, got 'yarn'"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": float("inf")}},
            "need numbers llama_4_scaling_beta and .*, got inf and 262144",
        ),
        ("mistral", {"sliding_window": 2**31}, "sliding_window must be a whole number below 2.31, or null"),
        ("mixtral", {"sliding_window": 2**31}, "sliding_window must be a whole number below 2.31, or null"),
        ("llama4_text", {"attention_chunk_size": 2**31}, "attention_chunk_size must be a whole number of 1 to 2.31"),
        ("minimax_m2", {"rotary_dim": 256}, "partial_rotary_factor must be .* at most 1, got 2.0"),
    ],
)  # fmt: skip
def test_options_of_one_family_that_are_not_implemented_are_refused(family, option, words):
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        models.config_from_hf(LEAST | dict(model_type=family) | LEAST_OF.get(family, {}) | option)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    "option, words",
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_experts 4, got 5"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be .*, got 0"),
        ({"num_experts": 0}, "num_experts must be .*, got 0"),
    ],
)
def test_impossible_experts_are_refused(family, option, words):
    experts = dict(
        num_experts=4, num_experts_per_tok=4, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_attention_heads=4, model_type=family,
    )  # fmt: skip
    assert models.config_from_hf(TINY | experts).top_k == 4
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        models.config_from_hf(TINY | experts | option)


@pytest.mark.parametrize(
    "kinds, every", [("LLFLLF", 3), ("LLF", 3), ("LFLLFL", None), ("FLFL", None), ("LLLL", None), ("LFLFL", 2)]
)
def test_hybrids_say_where_their_attention_is_as_sglang_reads_it(kinds, every):
    """Its Qwen3-Next places attention in every n-th layer, whatever layer_types says."""
    names = {"L": "linear_attention", "F": "full_attention"}
    layers = {"layer_types": [names[kind] for kind in kinds], "num_hidden_layers": len(kinds)}
    case = {name: value for name, value in CASES["qwen3_next"].items() if name != "full_attention_interval"}
    config = models.config_from_hf({"model_type": "qwen3_next"} | TINY | case | layers)
    assert models.config_to_hf(config).get("full_attention_interval") == every
