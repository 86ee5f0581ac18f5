"""What the options of a config.json may be, checked first, and how its weights are quantised; the options of rope are
read and checked in layers/rope.py."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = "float32", "bfloat16", "float16", "float64"  # of weights in a checkpoint


def _size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 40


def _few(value: Any) -> bool:
    return _size(value) and value <= 10_000


def _at_most_few(value: Any) -> bool:
    return _count(value) and value <= 10_000


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _token(value: Any) -> bool:
    return _count(value) and value < 1 << 31


def _position(value: Any) -> bool:
    return type(value) is int and value < 1 << 31


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str


def _list_of(one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(one, value))


def _names(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= 10_000 and all(map(_text, value.values()))


def _options(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())


KINDS = (  # what an option must be, whether a value is that, the options
    ("a whole number above 0", _size, (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings",
        "shared_expert_intermediate_size", "num_experts_per_tok", "decoder_sparse_step", "kv_lora_rank",
        "qk_nope_head_dim", "v_head_dim", "intermediate_size_mlp", "floor_scale",
        "interleave_moe_layer_step", "no_rope_layer_interval", "sliding_window_pattern",
        "vocab_size_per_layer_input", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
        "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim", "n_groups",
        "mamba_n_groups", "ssm_state_size", "conv_kernel", "mamba_d_conv", "moe_shared_expert_intermediate_size",
    )),
    # There are Python objects for each, made before a single weight is compared.
    ("a whole number of 1 to 10,000", _few, ("num_hidden_layers", "qk_rope_head_dim")),
    ("a whole number above 0, or null", lambda value: value is None or _size(value), (
        "num_key_value_heads", "head_dim", "rotary_dim", "q_lora_rank", "moe_intermediate_size", "top_k_experts",
        "num_global_key_value_heads", "full_attention_interval", "moe_latent_size",
    )),
    ("a whole number of 1 to 10,000, or null", lambda value: value is None or _few(value), (
        "num_labels",
        "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "n_group", "topk_group",
    )),
    ("a whole number of at least 0", _count, ("max_window_layers", "first_k_dense_replace")),
    ("a whole number of 0 to 10,000, or null", lambda value: value is None or _at_most_few(value), (
        "num_nextn_predict_layers", "mtp_num_hidden_layers",
    )),
    ("a whole number of at least 0, or null", lambda value: value is None or _count(value), (
        "hidden_size_per_layer_input", "num_kv_shared_layers",
    )),
    ("a whole number or null", lambda value: value is None or type(value) is int, ("pad_token_id",)),
    # Positions, which are i32, are compared with these two.
    ("a whole number below 2^31, or null", lambda value: value is None or _position(value), ("sliding_window",)),
    ("a whole number of 1 to 2^31 - 1, or null", lambda value: value is None or (_size(value) and _position(value)), (
        "attention_chunk_size",
    )),
    ("a finite number above 0", lambda value: _number(value) and value > 0, (
        "query_pre_attn_scalar", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
        "logits_scaling", "time_step_max", "time_step_floor", "mamba_dt_max", "mamba_dt_init_floor",
    )),
    ("a finite number above 0, or null", lambda value: value is None or (_number(value) and value > 0), (
        "attn_logit_softcapping", "final_logit_softcapping",
    )),
    ("a finite number of at least 0", _number, (
        "rms_norm_eps", "initializer_range", "routed_scaling_factor", "swiglu_limit", "swiglu_alpha", "attn_scale",
        "layer_norm_epsilon", "time_step_min", "mamba_dt_min",
    )),
    ("true, false or null", lambda value: value is None or _flag(value), (
        "tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob",
        "use_qk_norm", "rope_interleave", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp",
        "use_bias", "use_conv_bias", "mamba_conv_bias", "token_classification_bias",
    )),
    ("a list of texts, or null", lambda value: value is None or _list_of(_text)(value), (
        "architectures", "layer_types", "layers_block_type",
    )),
    ("a text, or null", lambda value: value is None or _text(value), ("hybrid_override_pattern", "problem_type")),
    ("a list of layers, or null", lambda value: value is None or _list_of(_count)(value), (
        "mlp_only_layers", "moe_layers", "attn_type_list",
    )),
    ("a list of 0 or 1, or null", lambda value: value is None or _list_of(_count)(value), ("no_rope_layers",)),
    ("texts by label, or null", lambda value: value is None or _names(value), ("id2label",)),
    ("options by layer, or null", lambda value: value is None or _options(value), ("per_layer_config",)),
    ("a token's id, a list of them, or null", lambda value: value is None or _token(value) or _list_of(_token)(value), (
        "eos_token_id",
    )),
    (f"one of {', '.join(DTYPES)}, or null", lambda value: value is None or value in DTYPES, ("dtype", "torch_dtype")),
    ("options, or null", lambda value: value is None or isinstance(value, dict), ("text_config", "vision_config")),
)  # fmt: skip


def check(options: Mapping[str, Any], file: str) -> None:
    """Raises ValueError, beginning with the name `file`, if a known option has a value of another kind."""
    for what, holds, names in KINDS:
        for name in names:
            if name in options and not holds(options[name]):
                raise ValueError(f"{file}: {name} must be {what}, got {options[name]!r:.80}")


@dataclass(frozen=True)
class Quantisation:
    """How quantised weights are stored.

    Attributes:
      method: "fp8", or "mxfp4" (OCP Microscaling Formats 1.0).
      block: the rows and columns that share a scale in FP8; no columns = all of a row, None = all of a matrix.
      scale: how the names of FP8's scales end, after that of the weight.
      activations: how those of the scales of a matrix's inputs end.
    """

    method: str
    block: tuple[int, int | None] | None = None
    scale: str = "_scale_inv"
    activations: str = "activation_scale"


def quantisation(hf: Mapping[str, Any]) -> Quantisation | None:
    """The Quantisation of a config.json, None if its weights are not quantised.

    Raises:
      ValueError: weights are stored in a way that is not implemented; names it.
    """
    found = hf.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method == "compressed-tensors" and (scheme := _compressed(found)):
        return scheme
    for name in ("compression_config", *(["quantization_config"] if method not in ("fp8", "mxfp4") else [])):
        if hf.get(name):
            raise ValueError(
                f"config.json: weights must not be quantised, got {name} {hf[name]!r:.200}, by which they were rounded "
                "and packed for inference, so that no exact ones are there to train; use the original checkpoint"
            )
    if method == "mxfp4" and hf.get("model_type") != "gpt_oss":
        raise ValueError(f"config.json: weights in MXFP4 are read for gpt_oss alone, got {hf.get('model_type')!r:.80}")
    return _fp8(found) if method == "fp8" else Quantisation(method) if method else None


def _fp8(found: Mapping[str, Any]) -> Quantisation:
    for name, only in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if found.get(name, only) != only:
            raise ValueError(
                f"config.json: {name} of weights in FP8 must be {only!r}, got {found[name]!r:.80}; use the original "
                "checkpoint"
            )
    block = found.get("weight_block_size", (128, 128))
    if block is None:
        return Quantisation("fp8")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(map(_size, block))):
        raise ValueError(
            f"config.json: weight_block_size must be two whole numbers above 0, or null, got {block!r:.80}"
        )
    return Quantisation("fp8", tuple(block))


def _compressed(found: Mapping[str, Any]) -> Quantisation | None:
    """The Quantisation of FP8 by compressed-tensors, None if it is another of its formats."""
    groups = found.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    parts = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    known = found.get("format") in ("float-quantized", "naive-quantized") and not found.get("kv_cache_scheme")
    if not known or len(parts) != 1 or not isinstance(parts[0], dict):
        return None
    weights = parts[0]
    blocks: dict[Any, Any] = {"channel": (1, None), "tensor": None}
    if weights.get("strategy") == "block":
        blocks["block"] = _fp8({"weight_block_size": weights.get("block_structure", ())}).block
    wanted = {"type": "float", "num_bits": 8, "symmetric": True}
    if weights.get("strategy") not in list(blocks) or any(weights.get(name) != value for name, value in wanted.items()):
        return None
    return Quantisation("fp8", blocks[weights["strategy"]], "_scale", "input_scale")
