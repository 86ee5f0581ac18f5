"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention, and experts chosen by softmax, in groups or not."""

import dataclasses
import json

from ..core.param import Table
from . import deepseek_v3, dense, mixture
from .deepseek_v3 import Config as Config
from .deepseek_v3 import block as block
from .dense import embed as embed

DEFAULTS = {
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "n_group": None, "topk_group": None,
    "topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 2048,
}  # fmt: skip
METHODS = "greedy", "group_limited_greedy"


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "scoring_func", "softmax", default="softmax")
    dense.refuse(hf, "norm_topk_prob", False, default=False)
    dense.refuse(hf, "mlp_bias", False, default=False)
    if hf["topk_method"] not in METHODS:
        raise ValueError(f"config.json: topk_method must be {' or '.join(METHODS)}, got {hf['topk_method']!r:.80}")
    whole = {} if hf["topk_method"] == METHODS[1] else {"n_group": 1, "topk_group": 1}
    router = dataclasses.replace(
        mixture.sigmoid_router(hf | whole), score="softmax", group_score="max", normalise=False, eps=0.0
    )
    return deepseek_v3.latent(hf, "deepseek_v2", router, pairs=True)


def to_hf(config: Config) -> dict:
    """The config.json."""
    method = (DEFAULTS | json.loads(config.source))["topk_method"]
    fixed = {"scoring_func": "softmax", "topk_method": method}
    return deepseek_v3.to_hf(config) | fixed | {"architectures": ["DeepseekV2ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    return deepseek_v3.latent_table(config, {})
