"""The model families. Each is a module with `config`, `to_hf`, `table`, `embed` and `block`."""

from . import llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe

# config.json's model_type -> module
FAMILIES = {
    "llama": llama,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
