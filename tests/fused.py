"""A made-up family whose checkpoints fuse weights in every way that families do; it is only read and written."""

import types

import numpy as np
from jax.nn.initializers import normal

from areax.core.param import Param, Stack, Table
from areax.core.parts import split
from areax.models import dense

D, F, E = 16, 12, 3  # model width, experts' width, experts
HF = dict(
    model_type="fused", vocab_size=32, hidden_size=D, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, eos_token_id=3,
)  # fmt: skip
# What each layer of a checkpoint has: shape by name.
STORED = {
    "input_layernorm.weight": (D,),
    "qkv_proj.weight": (24 + 12 + 12, D),
    "gate_up_proj.weight": (2 * 20, D),
    "q_proj.weight": (4 * 2 * 6, D),
    "in_proj_qkvz.weight": (4 * (3 + 3 + 6 + 6), D),
    "experts.gate_up_proj": (E, D, 2 * F),
    "experts.gate_up_proj_bias": (E, 2 * F),
    "experts.down_proj": (E, F, D),
    "halves.gate_up_proj": (E, D, 2 * F),
    "conv1d.weight": (12 + 12 + 24, 1, 6),
    "A_log": (24,),
    "dt.weight": (2 * 12,),
}
WIDE = ("A_log", "dt.weight")  # float32 whatever the model's dtype


def layer() -> dict[str, Param]:
    """The weights of a layer, the parts of a tensor not in its order."""
    made = {}

    def one(name, axes, key, part=None):
        made[name] = Param(axes, (dense.AT + key,), normal(0.02), "float32" if key in WIDE else None, part=part)

    def fused(key, parts, weights):
        for (name, axes), part in reversed([*zip(weights.items(), parts, strict=True)]):
            one(name, axes, key, part)

    heads, kv_heads, experts = "heads embed", "kv_heads embed", "experts expert_ffn expert_embed"
    one("norm1", "embed", "input_layernorm.weight")
    fused("qkv_proj.weight", split(24, 12, 12), dict(q=heads, k=kv_heads, v=kv_heads))
    fused("gate_up_proj.weight", split(20, 20), dict(gate="ffn embed", up="ffn embed"))
    fused("q_proj.weight", split(6, 6), dict(query=heads, sigmoid=heads))
    fused("in_proj_qkvz.weight", split(3, 3, 6, 6), dict(hq=kv_heads, hk=kv_heads, hv=heads, hz=heads))
    fused("experts.gate_up_proj", split(1, 1, axis=1, transposed=True), dict(expert_gate=experts, expert_up=experts))
    fused(
        "experts.gate_up_proj_bias", split(1, 1, axis=1), dict.fromkeys(("gate_bias", "up_bias"), "experts expert_ffn")
    )
    fused("experts.down_proj", split(D, axis=1, transposed=True), dict(expert_down="experts expert_embed expert_ffn"))
    fused("halves.gate_up_proj", split(F, F, axis=1, transposed=True), dict(half_gate=experts, half_up=experts))
    fused("conv1d.weight", split(12, 12, 24, dropped=1), dict(cq="kv_heads head", ck="kv_heads head", cv="heads head"))
    one("decay", "heads", "A_log")
    fused("dt.weight", split(12, 12), dict(fast="kv_heads", slow="kv_heads"))
    return made


def by_hand(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a layer, given its tensors."""
    qkv, gate_up, heads = x["qkv_proj.weight"], x["gate_up_proj.weight"], x["q_proj.weight"].reshape(4, 2, 6, D)
    groups, conv = x["in_proj_qkvz.weight"].reshape(4, 18, D), x["conv1d.weight"][:, 0]
    rows = lambda x: x.reshape(-1, D)
    return {
        "norm1": x["input_layernorm.weight"],
        "q": qkv[:24], "k": qkv[24:36], "v": qkv[36:],
        "gate": gate_up[:20], "up": gate_up[20:],
        "query": rows(heads[:, 0]), "sigmoid": rows(heads[:, 1]),
        "hq": rows(groups[:, :3]), "hk": rows(groups[:, 3:6]), "hv": rows(groups[:, 6:12]), "hz": rows(groups[:, 12:]),
        "expert_gate": x["experts.gate_up_proj"][..., ::2].transpose(0, 2, 1),
        "expert_up": x["experts.gate_up_proj"][..., 1::2].transpose(0, 2, 1),
        "gate_bias": x["experts.gate_up_proj_bias"][:, ::2], "up_bias": x["experts.gate_up_proj_bias"][:, 1::2],
        "expert_down": x["experts.down_proj"].transpose(0, 2, 1),
        "half_gate": x["halves.gate_up_proj"][..., :F].transpose(0, 2, 1),
        "half_up": x["halves.gate_up_proj"][..., F:].transpose(0, 2, 1),
        "cq": conv[:12], "ck": conv[12:24], "cv": conv[24:],
        "decay": x["A_log"], "fast": x["dt.weight"][:12], "slow": x["dt.weight"][12:],
    }  # fmt: skip


def table(config) -> Table:
    plain, block = dense.table(config), layer()
    dims = {"expert_embed": D, "expert_ffn": F, "experts": E, **plain.dims}
    return Table(plain.top, (Stack((0,), block), Stack((1, 2), block)), dims)


FAMILY = types.SimpleNamespace(config=lambda hf: dense.config(hf, "fused"), to_hf=lambda config: dense.to_hf(config) | {
    "architectures": ["FusedForCausalLM"]}, table=table)  # fmt: skip


def tensors(dtype="float32") -> dict[str, np.ndarray]:
    """A random checkpoint."""
    rng = np.random.default_rng(0)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in STORED.items()}
    shapes |= {"model.embed_tokens.weight": (32, D), "model.norm.weight": (D,), "lm_head.weight": (32, D)}
    wide = lambda name: name.endswith(WIDE)
    return {name: rng.normal(size=shape).astype("float32" if wide(name) else dtype) for name, shape in shapes.items()}
