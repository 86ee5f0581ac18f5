"""The model families. Each is a module with `config`, `to_hf`, `table`, `embed` and `block`."""

from . import (
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)

# config.json's model_type -> module
FAMILIES = {
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "llama": llama,
    "minimax_m2": minimax_m2,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}
