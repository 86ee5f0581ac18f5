"""The model families. Each is a module with `config`, `to_hf`, `table`, `embed` and `block`."""

from . import (
    gemma2,
    gemma3_text,
    gemma4_text,
    granite,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    seed_oss,
    smollm3,
)

# config.json's model_type -> module
FAMILIES = {
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma4_text": gemma4_text,
    "granite": granite,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}
