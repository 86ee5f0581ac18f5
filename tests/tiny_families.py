"""A tiny config.json of every family, whose heads, experts and widths meshes of eight devices divide."""

from areax import models

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=False, max_position_embeddings=4096,
    pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, initializer_range=0.3)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2, initializer_range=0.3)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, initializer_range=0.3)
LATENT = ROUTED | dict(
    num_key_value_heads=8, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6,
    head_dim=6, v_head_dim=12, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
)  # fmt: skip
DELTA = dict(
    tie_word_embeddings=True,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=12, linear_value_head_dim=10,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                     "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    rms_norm_eps=1e-2,  # small heads are small at times, and their norms would multiply rounding
)  # fmt: skip
SHARED = dict(shared_expert_intermediate_size=40)
OPTIONS: dict[str, dict] = {
    "deepseek_v2": LATENT | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": LATENT | dict(attention_bias=True),
    "gemma2": dict(
        query_pre_attn_scalar=9, sliding_window=7, attn_logit_softcapping=6.0, final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": dict(
        query_pre_attn_scalar=9, sliding_window_pattern=2, sliding_window=7,
        tie_word_embeddings=True,
    ),
    "gemma4_text": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=4, global_head_dim=8,
        sliding_window=7, hidden_size_per_layer_input=12, vocab_size_per_layer_input=72, num_kv_shared_layers=2,
        use_double_wide_mlp=True, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24,
        tie_word_embeddings=True, rms_norm_eps=1e-2,  # as in DELTA
    ),
    "glm4": dict(attention_bias=True),
    "glm4_moe": ROUTED | dict(n_group=4, topk_group=2, use_qk_norm=True),
    "gpt_oss": LOCAL | dict(sliding_window=7, swiglu_limit=1.0),
    "granite": dict(
        attention_bias=True, embedding_multiplier=1.7, attention_multiplier=0.21, residual_multiplier=0.6,
        logits_scaling=0.8,
    ),
    "kimi_k2": LATENT,
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama4_text": LOCAL | dict(
        intermediate_size=24, intermediate_size_mlp=40, interleave_moe_layer_step=2, no_rope_layers=[1, 0],
        attention_chunk_size=9, floor_scale=7, attn_scale=0.3,
    ),
    "minimax_m2": LOCAL | dict(rotary_dim=6),
    "ministral3": dict(
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                         "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    ),
    "mistral": dict(sliding_window=7),
    "mixtral": LOCAL | dict(sliding_window=7),
    "nemotron_h": ROUTED | dict(
        hybrid_override_pattern="M*E-", num_hidden_layers=4, mamba_num_heads=16, mamba_head_dim=6, n_groups=8,
        ssm_state_size=10, use_bias=True, mlp_bias=True, layer_norm_epsilon=1e-2,
        moe_shared_expert_intermediate_size=40, moe_latent_size=16, initializer_range=0.2,
    ),
    "olmo2": dict(attention_bias=True, tie_word_embeddings=True),
    "olmo3": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=7),
    "phi3": dict(
        head_dim=4, sliding_window=7, original_max_position_embeddings=20,  # transformers needs hidden_size / heads
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e2, "partial_rotary_factor": 1.0, "factor": 4.0,
                         "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]},
    ),
    "qwen2": {},
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3_5_moe_text": DELTA | EXPERTS | SHARED | dict(initializer_range=0.2),
    "qwen3_5_text": DELTA,
    "qwen3_moe": EXPERTS | dict(mlp_only_layers=[0], norm_topk_prob=True),
    "qwen3_next": DELTA | EXPERTS | SHARED | dict(mlp_only_layers=[1], initializer_range=0.2),
    "seed_oss": dict(attention_out_bias=True),
    "smollm3": dict(no_rope_layers=[0, 1]),
}  # fmt: skip
FAMILIES = tuple(name for name in models.families.FAMILIES if name in OPTIONS)


def hf(name: str, **changes) -> dict:
    """The config.json of a family."""
    return COMMON | {"model_type": name} | OPTIONS[name] | changes


def config(name: str, **changes):
    """The Config of a family."""
    return models.config_from_hf(hf(name, **changes))
