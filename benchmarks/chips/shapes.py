"""config.json of the measured models: real ones, with fewer layers where all would not fit, and tiny ones for tests."""

QWEN = dict(
    model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=40960, torch_dtype="bfloat16", tie_word_embeddings=True,
)  # fmt: skip
TINY = QWEN | dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
LARGE = QWEN | dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=False,
)  # fmt: skip
SHAPES = {
    "Qwen3-0.6B": QWEN | dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    ),
    "Qwen3-8B": LARGE,
    "Qwen3-8B-4-layers": LARGE | dict(num_hidden_layers=4),
    "Qwen3-30B-A3B-2-layers": QWEN | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "tiny": TINY,
    "tiny-moe": TINY | dict(
        model_type="qwen3_moe", moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    ),
}  # fmt: skip


def hf(shape: str, length: int) -> dict:
    """The config.json of a shape with room for at least `length` positions."""
    settings = SHAPES[shape]
    return settings | {"max_position_embeddings": max(length, settings["max_position_embeddings"])}
