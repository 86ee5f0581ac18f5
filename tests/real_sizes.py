"""Models of real widths and vocabularies with few layers, and the runs of them that plans are held against."""

COMMON = dict(torch_dtype="bfloat16", max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6)
LINEAR, FULL = "linear_attention", "full_attention"
TEXT = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
MODELS: dict[str, dict] = {
    # Qwen3-0.6B, whole
    "qwen3-0.6b": COMMON | dict(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    # Qwen3-8B
    "qwen3-8b": COMMON | dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
    # Gemma 3 1B
    "gemma3": COMMON | dict(
        model_type="gemma3_text", hidden_size=1152, intermediate_size=6912, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, vocab_size=262144, tie_word_embeddings=True, query_pre_attn_scalar=256,
        sliding_window_pattern=6, sliding_window=512,
    ),
    # GPT-OSS 20B
    "gpt_oss": COMMON | dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=4, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, vocab_size=201088, tie_word_embeddings=False, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128,
    ),
    # Qwen3-30B-A3B
    "qwen3_moe": COMMON | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    # Mixtral 8x7B
    "mixtral": COMMON | dict(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=False, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None,
    ),
    # Moonlight 16B-A3B
    "deepseek_v3": COMMON | dict(
        model_type="deepseek_v3", hidden_size=2048, intermediate_size=11264, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, vocab_size=163840, tie_word_embeddings=False, q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64,
        num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, n_group=1,
        topk_group=1,
    ),
    # Qwen3-Next 80B-A3B, a quarter of its experts
    "qwen3_next": COMMON | dict(
        model_type="qwen3_next", hidden_size=2048, intermediate_size=5120, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, vocab_size=151936, tie_word_embeddings=False,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL], linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=128, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    # Nemotron 3 Nano 30B-A3B, half of its experts
    "nemotron_h": COMMON | dict(
        model_type="nemotron_h", hidden_size=2688, intermediate_size=1856, num_hidden_layers=6,
        hybrid_override_pattern="MEM*ME", num_attention_heads=32, num_key_value_heads=2, head_dim=128,
        vocab_size=131072, tie_word_embeddings=False, mamba_num_heads=64, mamba_head_dim=64, n_groups=8,
        ssm_state_size=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, layer_norm_epsilon=1e-5, chunk_size=128,
    ),
    # Qwen3-VL-2B
    "qwen3_vl": dict(
        model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"], tie_word_embeddings=True,
        torch_dtype="bfloat16", image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
        vision_end_token_id=151653,
        text_config=COMMON | TEXT | dict(
            model_type="qwen3_vl_text",
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                             "mrope_interleaved": True},
        ),
        vision_config=dict(
            model_type="qwen3_vl", depth=4, hidden_size=1024, intermediate_size=4096, num_heads=16, in_channels=3,
            patch_size=16, temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=2048,
            num_position_embeddings=2304, deepstack_visual_indexes=[1, 2, 3], hidden_act="gelu_pytorch_tanh",
        ),
    ),
}  # fmt: skip


def config(model: str, layers: int = 0) -> dict:
    """The config.json of a model, with another number of layers if one is given."""
    return MODELS[model] | (dict(num_hidden_layers=layers) if layers else {})


SIXTEEN = "--groups 4 --group-size 4 --minibatches 1 --length 4096 --rows 4"
SPREAD = "--groups 8 --group-size 4 --minibatches 1 --length 4096 --rows 8 --mesh.fsdp 8"
ONE, EIGHT = "--length 4096 --rows 4 --batch 16", "--length 4096 --rows 8 --mesh.fsdp 8 --batch 32"
LARGE, HALF = "--length 4096 --rows 1 --batch 4", "--length 4096 --rows 4 --mesh.fsdp 4 --batch 16"
# (model, layers or 0 for all, chip, recipe, its options); of the first ones a change of the planner should try all.
CORE: list[tuple[str, int, str, str, str]] = [
    ("qwen3-0.6b", 0, "h100", "sft", ONE),
    ("qwen3-0.6b", 0, "h100", "sft", EIGHT),
    ("qwen3-0.6b", 0, "h100", "sft", ONE + " --run.remat dots"),
    ("qwen3-8b", 0, "h100", "sft", ONE),
    ("qwen3-8b", 0, "h100", "grpo", SPREAD + " --objective.kl.coef 0.01"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --lora.rank 16"),
    ("qwen3-8b", 0, "h100", "sft", "--length 4096 --rows 8 --mesh.fsdp 4 --mesh.tp 2 --batch 32"),
    ("gemma3", 0, "h100", "sft", ONE),
]
WIDE = [
    # dense: microbatches, meshes, recipes
    ("qwen3-0.6b", 0, "h100", "sft", "--length 4096 --rows 4 --batch 4"),
    ("qwen3-0.6b", 0, "h100", "sft", "--length 4096 --rows 8 --mesh.fsdp 8 --batch 8"),
    ("qwen3-0.6b", 0, "h100", "grpo", SIXTEEN),
    ("qwen3-0.6b", 0, "h100", "grpo", SPREAD),
    ("qwen3-0.6b", 14, "h100", "sft", ONE),
    ("qwen3-0.6b", 0, "h100", "ppo", SIXTEEN),
    ("qwen3-0.6b", 0, "h100", "dpo", "--length 4096 --rows 4 --batch 8"),
    ("qwen3-0.6b", 0, "h100", "sft", "--length 4096 --rows 4 --mesh.tp 2 --batch 16"),
    ("qwen3-8b", 0, "h100", "sft", "--length 4096 --rows 4 --batch 4"),
    ("qwen3-8b", 0, "h100", "sft", EIGHT),
    ("qwen3-8b", 0, "h100", "sft", "--length 4096 --rows 8 --mesh.fsdp 8 --batch 8"),
    ("qwen3-8b", 0, "h100", "sft", "--length 8192 --rows 4 --mesh.fsdp 4 --mesh.cp 2 --batch 16"),
    ("qwen3-8b", 0, "h100", "sft", "--length 8192 --rows 4 --mesh.fsdp 4 --mesh.cp 2 --batch 16 --run.cp ulysses"),
    ("qwen3-8b", 0, "h100", "sft", "--length 8192 --rows 4 --mesh.fsdp 4 --mesh.cp 2 --batch 16 --run.cp ring"),
    ("qwen3-8b", 0, "h100", "sft", "--length 4096 --rows 4 --mesh.tp 4 --batch 16"),
    ("qwen3-8b", 8, "h100", "sft", ONE),
    ("qwen3-8b", 8, "h100", "sft", EIGHT),
    ("qwen3-8b", 0, "h100", "sft", "--length 16384 --rows 1 --batch 4"),
    ("qwen3-8b", 0, "h100", "grpo", SIXTEEN),
    ("qwen3-8b", 0, "h100", "ppo", SPREAD),
    ("qwen3-8b", 0, "h100", "dpo", HALF),
    # dense: options
    ("qwen3-8b", 0, "h100", "sft", EIGHT + " --lora.rank 16"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --lora.rank 16 --lora.base int8"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --run.remat dots"),
    ("qwen3-8b", 0, "h100", "sft", EIGHT + " --run.remat dots"),
    ("qwen3-8b", 0, "h100", "sft", LARGE + " --run.remat none"),
    ("qwen3-8b", 0, "h100", "sft", EIGHT + " --run.remat none"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --run.remat offload"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --optim.state bfloat16"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --optim.weights bfloat16 --optim.state float8 --optim.gradients bfloat16"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --optim.offload"),
    ("qwen3-8b", 0, "h100", "sft", EIGHT + " --optim.offload"),
    ("qwen3-8b", 0, "h100", "sft", ONE + " --run.head-chunk 512"),
    ("qwen3-8b", 0, "h100", "sft", LARGE + " --run.dtype float32"),
    ("qwen3-8b", 0, "h100", "grpo", SIXTEEN + " --sample-tokens 1024 --sampling.max-new-tokens 256"),
    # families
    ("gemma3", 0, "h100", "sft", EIGHT),
    ("gemma3", 0, "h100", "grpo", SIXTEEN + " --objective.kl.coef 0.01"),
    ("gpt_oss", 2, "h100", "sft", LARGE),
    ("gpt_oss", 0, "h100", "sft", EIGHT),
    ("gpt_oss", 0, "h100", "grpo", SPREAD),
    ("qwen3_moe", 2, "h100", "sft", LARGE),
    ("qwen3_moe", 0, "h100", "sft", EIGHT),
    ("qwen3_moe", 0, "h100", "sft", "--length 4096 --rows 8 --mesh.fsdp 2 --mesh.ep 4 --batch 32"),
    ("qwen3_moe", 0, "h100", "sft",
     "--length 4096 --rows 8 --mesh.fsdp 2 --mesh.ep 4 --batch 32 --run.dispatch all_to_all"),
    ("mixtral", 2, "h100", "sft", HALF),
    ("mixtral", 2, "h100", "grpo", SPREAD),
    ("deepseek_v3", 2, "h100", "sft", LARGE),
    ("deepseek_v3", 0, "h100", "sft", EIGHT),
    ("deepseek_v3", 0, "h100", "grpo", SPREAD),
    ("qwen3_next", 0, "h100", "sft", LARGE),
    ("qwen3_next", 0, "h100", "sft", EIGHT),
    ("nemotron_h", 0, "h100", "sft", LARGE),
    ("nemotron_h", 0, "h100", "sft", EIGHT),
    ("qwen3_vl", 0, "h100", "sft", ONE + " --vision trained"),
    ("qwen3_vl", 0, "h100", "sft", ONE + " --vision frozen"),
    ("qwen3_vl", 0, "h100", "sft", EIGHT + " --vision trained"),
    # as many rows as a plan has room for
    ("qwen3-8b", 0, "h100", "sft", "--length 4096 --rows 128 --mesh.fsdp 8 --batch 256"),
    ("qwen3-0.6b", 0, "h100", "sft", "--length 4096 --rows 16 --batch 32"),
    ("qwen3_moe", 0, "h100", "sft", "--length 4096 --rows 64 --mesh.fsdp 8 --batch 128"),
    # other chips
    ("qwen3-8b", 0, "a100", "sft", EIGHT),
    ("qwen3-8b", 0, "b200", "sft", ONE),
    ("qwen3-0.6b", 0, "v5e", "sft", "--length 4096 --rows 4 --mesh.fsdp 4 --batch 16"),
    ("qwen3-0.6b", 0, "v6e", "sft", "--length 4096 --rows 1 --batch 4"),
    ("qwen3-8b", 0, "v5p", "sft", HALF),
    ("gemma3", 0, "v5p", "sft", HALF),
    ("qwen3-0.6b", 0, "v5p", "sft", "--length 4096 --rows 4 --batch 4"),
    ("qwen3-8b", 0, "v5p", "sft", HALF + " --lora.rank 16"),
    ("qwen3_moe", 0, "v5p", "sft", EIGHT),
    ("qwen3-0.6b", 0, "v6e", "grpo", SIXTEEN),
]  # fmt: skip
