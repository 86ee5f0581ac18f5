"""What each family's tensors and options are called in GGUF, and what llama.cpp takes for granted of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}  # behind the prefix "model."
HEAD = "output"  # lm_head
FREQUENCIES = "rope_freqs"  # divisors of the rotary frequencies of Llama 3
ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
ROUTER = "ffn_gate_inp"
EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS |= {ROUTER: "mlp.gate"}
SHARED = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED_GATE = "ffn_gate_inp_shexp"  # a vector there, [1, width] here
MIXTRAL = {
    ROUTER: "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}  # fmt: skip
GEMMA = ATTENTION | MLP | AFTER | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}

# Option of config.json -> key behind the architecture's name.
SIZES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True)
class Family:
    """A family as llama.cpp knows it.

    Attributes:
      model_type, architecture: names in config.json.
      gguf: general.architecture of its files.
      layer: tensor of a block -> Hugging Face's within a layer, {} = the number of an expert.
      options: further options of config.json -> key.
      fixed: options that files do not state, and the only value that llama.cpp computes.
      turned: rows of queries and keys are in pairs, since llama.cpp rotates 2i with 2i + 1 there.
      norm_offset: norms are stored larger by this.
      period: one layer in so many has full attention, the others the window that files state; None = no windows.
      full_width: heads of queries are as wide together as the embeddings.
    """

    model_type: str
    architecture: str
    gguf: str
    layer: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(ATTENTION | MLP | BEFORE))
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    turned: bool = False
    norm_offset: float = 0.0
    period: int | None = None
    full_width: bool = False

    @property
    def sparse(self) -> bool:
        return "expert_count" in self.options.values()


FAMILIES = (  # of two with the same name in files and as many experts, the first is read
    Family("llama", "LlamaForCausalLM", "llama", turned=True),
    Family("mistral", "MistralForCausalLM", "llama", turned=True),
    Family(
        "mixtral", "MixtralForCausalLM", "llama", ATTENTION | BEFORE | MIXTRAL,
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}, {"sliding_window": None},
        turned=True,
    ),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", full_width=True),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe",
        ATTENTION | BEFORE | EXPERTS | SHARED | {SHARED_GATE: "mlp.shared_expert_gate"},
        QWEN_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        ALL_SPARSE | {"norm_topk_prob": False}, full_width=True,
    ),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", ATTENTION | MLP | BEFORE | QK_NORMS, fixed={"attention_bias": False}),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe", ATTENTION | BEFORE | QK_NORMS | EXPERTS, QWEN_EXPERTS,
        ALL_SPARSE | {"norm_topk_prob": True, "attention_bias": False},
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", "gemma2", GEMMA,
        {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        {"attention_bias": False}, norm_offset=1.0, period=2,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", "gemma3", GEMMA | QK_NORMS,
        {"final_logit_softcapping": "final_logit_softcapping"}, {"attention_bias": False}, norm_offset=1.0, period=6,
    ),
    Family(
        "granite", "GraniteForCausalLM", "granite", options={
            "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
        }, fixed={"attention_bias": False, "mlp_bias": False}, turned=True,
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", "olmo2", ATTENTION | MLP | AFTER | QK_NORMS, fixed={"attention_bias": False},
        full_width=True,
    ),
    Family("smollm3", "SmolLM3ForCausalLM", "smollm3", turned=True, fixed={"attention_bias": False, "mlp_bias": False}),
)  # fmt: skip
BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def of_file(architecture: Any, experts: Any, where: str) -> Family:
    """The family that a file holds; ValueError, beginning with `where`, if areax does not have it."""
    named = [family for family in FAMILIES if family.gguf == architecture]
    fitting = [family for family in named if family.sparse == bool(experts)]
    if not fitting:
        known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES))
        got = f"{architecture!r:.80}" + (f" with {experts} experts" if named else "")
        raise ValueError(f"{where}: general.architecture must be one of {known}, got {got}")
    return fitting[0]


def of_model(model_type: str) -> Family:
    """The family of a config.json; ValueError if files of it are not written."""
    found = {family.model_type: family for family in FAMILIES}
    if model_type not in found:
        raise ValueError(f"convert: --gguf writes models of {', '.join(found)}, got {model_type}; leave --gguf out")
    return found[model_type]


def from_gguf(family: Family, name: str) -> str | None:
    """Hugging Face's name of a tensor, {} in place of an expert's number; None if the family has no such tensor."""
    stem, _, end = name.rpartition(".")
    if stem in TOP and end == "weight":
        return f"model.{TOP[stem]}.weight"
    if name == f"{HEAD}.weight":
        return "lm_head.weight"
    found = BLOCK.fullmatch(name)
    inner = family.layer.get(found[2]) if found else None
    return f"model.layers.{found[1]}.{inner}.{found[3]}" if found and inner else None


def to_gguf(family: Family, name: str) -> tuple[str, str, int | None]:
    """(name of a tensor of Hugging Face, its place in a block or "", the number of the expert that it is of)."""
    if name == "lm_head.weight":
        return f"{HEAD}.weight", HEAD, None
    for there, here in TOP.items():
        if name == f"model.{here}.weight":
            return f"{there}.weight", there, None
    found = LAYER.fullmatch(name)
    if found:
        expert = re.search(r"\.experts\.(\d+)\.", found[2])
        inner = re.sub(r"\.experts\.\d+\.", ".experts.{}.", found[2])
        for there, here in family.layer.items():
            if here == inner:
                return f"blk.{found[1]}.{there}.{found[3]}", there, int(expert[1]) if expert else None
    raise ValueError(f"convert: llama.cpp has no tensor for {name} in {family.model_type}; leave --gguf out")
