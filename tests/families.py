"""A small model of each family, of sizes that meshes of eight devices divide, for suites that go over all families."""

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=True, pad_token_id=None,
)  # fmt: skip
SMALL = {
    "qwen3": COMMON | dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen2": COMMON | dict(model_type="qwen2", tie_word_embeddings=False),
    "qwen3_moe": COMMON
    | dict(
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        initializer_range=0.3,
    ),
    "qwen2_moe": COMMON
    | dict(
        model_type="qwen2_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        initializer_range=0.3,
    ),
    "deepseek_v3": COMMON
    | dict(
        model_type="deepseek_v3",
        num_key_value_heads=8,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=12,
        attention_bias=True,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        initializer_range=0.3,
    ),
    "llama4_text": COMMON
    | dict(
        model_type="llama4_text",
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=9,
        floor_scale=7,
        attn_scale=0.3,
        initializer_range=0.3,
    ),
    "qwen3 window": COMMON | dict(model_type="qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3_5_text": COMMON
    | dict(
        model_type="qwen3_5_text",
        rms_norm_eps=1e-2,  # as in gemma4_text
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    ),
    "olmo2": COMMON | dict(model_type="olmo2", attention_bias=True),
    "gemma2": COMMON
    | dict(
        model_type="gemma2",
        query_pre_attn_scalar=9,
        sliding_window=7,
        attn_logit_softcapping=6.0,
        final_logit_softcapping=8.0,
    ),
    "gemma4_text": COMMON
    | dict(
        model_type="gemma4_text",
        rms_norm_eps=1e-2,  # small heads are small at times, and their norms would multiply rounding
        head_dim=4,
        global_head_dim=8,
        sliding_window=7,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=72,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "llama": COMMON | dict(model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "glm4_moe": COMMON
    | dict(
        model_type="glm4_moe",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
        initializer_range=0.3,
    ),
    "gpt_oss": COMMON
    | dict(
        model_type="gpt_oss",
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=1.0,
        initializer_range=0.3,
    ),
    "minimax_m2": COMMON
    | dict(model_type="minimax_m2", num_local_experts=8, num_experts_per_tok=2, rotary_dim=6, initializer_range=0.3),
    "mistral": COMMON | dict(model_type="mistral", sliding_window=7),
    "ministral3": COMMON
    | dict(
        model_type="ministral3",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "mixtral": COMMON | dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=7),
    "smollm3": COMMON | dict(model_type="smollm3", no_rope_layers=[0, 1]),
    "seed_oss": COMMON | dict(model_type="seed_oss", attention_out_bias=True),
    "granite": COMMON
    | dict(
        model_type="granite",
        embedding_multiplier=1.7,
        attention_multiplier=0.21,
        residual_multiplier=0.6,
        logits_scaling=0.8,
    ),
    "olmo3": COMMON | dict(model_type="olmo3", sliding_window=7, layer_types=["full_attention", "sliding_attention"]),
    "phi3": COMMON | dict(model_type="phi3", sliding_window=7),
    "glm4": COMMON | dict(model_type="glm4", attention_bias=True),
    "gemma3_text": COMMON
    | dict(
        model_type="gemma3_text",
        query_pre_attn_scalar=9,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v2": COMMON
    | dict(
        model_type="deepseek_v2",
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        first_k_dense_replace=1,
        initializer_range=0.3,
    ),
}
