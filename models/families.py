"""The model families. Each is a module with `config`, `to_hf`, `table`, `embed` and `block`."""

from . import llama, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe

# config.json's model_type -> module
FAMILIES = {
    "llama": llama,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
