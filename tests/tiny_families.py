"""A tiny config.json of every family, whose sizes tp, fsdp and ep of 2 divide."""

from areax import models

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=6,
    head_dim=6, v_head_dim=14,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
    n_group=2, topk_group=1,
)  # fmt: skip
DELTA = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                     "mrope_section": [2, 1, 1], "mrope_interleaved": True},
)  # fmt: skip
SHARED = dict(shared_expert_intermediate_size=40)
OPTIONS: dict[str, dict] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | dict(attention_bias=True),
    "gemma2": dict(sliding_window=7, tie_word_embeddings=True),
    "gemma3_text": dict(num_hidden_layers=3, sliding_window_pattern=3, sliding_window=7, tie_word_embeddings=True),
    "gemma4_text": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=24,
        sliding_window=7, hidden_size_per_layer_input=12, vocab_size_per_layer_input=72, num_kv_shared_layers=2,
        use_double_wide_mlp=True, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24,
        tie_word_embeddings=True,
    ),
    "glm4": {},
    "glm4_moe": dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, use_qk_norm=True),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=7),
    "granite": dict(attention_bias=True, residual_multiplier=0.6),
    "kimi_k2": LATENT,
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama4_text": dict(
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, intermediate_size_mlp=40,
        interleave_moe_layer_step=2, no_rope_layers=[1, 0], attention_chunk_size=9,
    ),
    "minimax_m2": dict(num_local_experts=8, num_experts_per_tok=2, rotary_dim=6),
    "ministral3": {},
    "mistral": dict(sliding_window=7),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "nemotron_h": dict(
        hybrid_override_pattern="M*E-", num_hidden_layers=4, mamba_num_heads=8, mamba_head_dim=6, n_groups=4,
        ssm_state_size=10, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40, moe_latent_size=16,
    ),
    "olmo2": dict(attention_bias=True),
    "olmo3": dict(num_hidden_layers=4, sliding_window=7),
    "phi3": dict(sliding_window=7, original_max_position_embeddings=4096),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3_5_moe_text": DELTA | EXPERTS | SHARED,
    "qwen3_5_text": DELTA,
    "qwen3_moe": EXPERTS | dict(mlp_only_layers=[1]),
    "qwen3_next": DELTA | EXPERTS | SHARED,
    "seed_oss": {},
    "smollm3": {},
}  # fmt: skip
FAMILIES = tuple(name for name in models.families.FAMILIES if name in OPTIONS)


def hf(name: str, **changes) -> dict:
    """The config.json of a family."""
    return COMMON | {"model_type": name} | OPTIONS[name] | changes


def config(name: str, **changes):
    """The Config of a family."""
    return models.config_from_hf(hf(name, **changes))
