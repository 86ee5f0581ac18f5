"""A model of each family at the sizes of a published one, with as few layers as have one of each kind."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _of(vocab: int, embed: int, ffn: int, heads: int, kv_heads: int, layers: int = 2, **others) -> dict:
    sizes = dict(vocab_size=vocab, hidden_size=embed, intermediate_size=ffn, num_attention_heads=heads)
    sizes |= dict(num_key_value_heads=kv_heads, num_hidden_layers=layers, max_position_embeddings=32768)
    return sizes | {"dtype": "bfloat16"} | others


DELTA = dict(
    layer_types=[LINEAR, FULL], linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, head_dim=256,
)  # fmt: skip
V3 = dict(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1, rope_parameters=YARN,
)  # fmt: skip
GRANITE = dict(embedding_multiplier=12.0, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0)
# model_type -> (the published model, its config.json)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama 3.1 8B", _of(128256, 4096, 14336, 32, 8, rope_parameters=LLAMA3)),
    "mistral": ("Mistral 7B", _of(32000, 4096, 14336, 32, 8, head_dim=128, sliding_window=4096)),
    "ministral3": ("Ministral 3 8B", _of(131072, 4096, 14336, 32, 8, head_dim=128)),
    "mixtral": ("Mixtral 8x7B", _of(32000, 4096, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2": ("Qwen2.5-7B", _of(152064, 3584, 18944, 28, 4)),
    "qwen2_moe": ("Qwen1.5-MoE-A2.7B", _of(
        151936, 2048, 5632, 16, 16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4,
    )),
    "qwen3": ("Qwen3-8B", _of(151936, 4096, 12288, 32, 8, head_dim=128)),
    "qwen3_moe": ("Qwen3-30B-A3B", _of(
        151936, 2048, 6144, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True,
    )),
    "qwen3_5_text": ("Qwen3.5-9B", _of(248320, 4096, 12288, 16, 4, **DELTA)),
    "qwen3_5_moe_text": ("Qwen3.5-35B-A3B", _of(
        248320, 2048, 512, 16, 2, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256,
        num_experts_per_tok=8, **DELTA,
    )),
    "qwen3_next": ("Qwen3-Next-80B-A3B", _of(
        151936, 2048, 5120, 16, 2, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
        num_experts_per_tok=10, **DELTA,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )),
    "nemotron_h": ("Nemotron 3 Nano 30B-A3B", _of(
        131072, 2688, 1856, 32, 2, 4, hybrid_override_pattern="ME*-", head_dim=128, mamba_num_heads=64,
        mamba_head_dim=64, n_groups=8, ssm_state_size=128, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )),
    "gemma2": ("Gemma 2 9B", _of(256000, 3584, 14336, 16, 8, head_dim=256)),
    "gemma3_text": ("Gemma 3 4B", _of(
        262208, 2560, 10240, 8, 4, head_dim=256, sliding_window=1024, layer_types=[SLIDING, FULL],
    )),
    "gemma4_text": ("Gemma 4 E2B", _of(
        262144, 1536, 6144, 8, 1, 4, head_dim=256, global_head_dim=512, sliding_window=512,
        layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2, use_double_wide_mlp=True,
    )),
    "phi3": ("Phi-3-mini-4k", _of(32064, 3072, 8192, 32, 32, sliding_window=2047, max_position_embeddings=4096)),
    "smollm3": ("SmolLM3-3B", _of(128256, 2048, 11008, 16, 4, no_rope_layers=[1, 0])),
    "olmo2": ("OLMo 2 7B", _of(100352, 4096, 11008, 32, 32)),
    "olmo3": ("OLMo 3 7B", _of(100278, 4096, 11008, 32, 32, layer_types=[SLIDING, FULL], sliding_window=4096)),
    "seed_oss": ("Seed-OSS-36B", _of(155136, 5120, 27648, 80, 8, head_dim=128)),
    "granite": ("Granite 3.3 8B", _of(49159, 4096, 12800, 32, 8, tie_word_embeddings=True, **GRANITE)),
    "glm4": ("GLM-4-9B-0414", _of(151552, 4096, 13696, 32, 2, head_dim=128)),
    "glm4_moe": ("GLM-4.5-Air", _of(
        151552, 4096, 10944, 96, 8, head_dim=128, attention_bias=True, moe_intermediate_size=1408,
        n_routed_experts=128, num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.0,
    )),
    "minimax_m2": ("MiniMax-M2", _of(
        200064, 3072, 1536, 48, 8, head_dim=128, rotary_dim=64, num_local_experts=256, num_experts_per_tok=8,
    )),
    "gpt_oss": ("GPT-OSS 20B", _of(
        201088, 2880, 2880, 64, 8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        layer_types=[SLIDING, FULL],
    )),
    "deepseek_v2": ("DeepSeek-V2-Lite", _of(
        102400, 2048, 10944, 16, 16, **V3 | dict(
            q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6,
            n_shared_experts=2, topk_method="greedy",
        ),
    )),
    "deepseek_v3": ("DeepSeek-V3", _of(129280, 7168, 18432, 128, 128, n_routed_experts=256, **V3)),
    "kimi_k2": ("Kimi K2", _of(
        163840, 7168, 18432, 64, 64, n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827, **V3,
    )),
    "llama4_text": ("Llama 4 Scout", _of(
        202048, 5120, 8192, 40, 8, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, no_rope_layers=[1, 0],
    )),
}  # fmt: skip
