"""Models for the benchmarks, and their minimum FLOPs."""

import json
import sys
from pathlib import Path

import numpy as np
import real

HF = {  # config.json, by name
    "S": dict(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=384, vocab_size=512,
    ),
    "M": dict(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=1536, vocab_size=8192,
    ),
    "MoE": dict(
        model_type="qwen3_moe", hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=256,
        norm_topk_prob=True, vocab_size=1024,
    ),
    # Only for files: 268 million weights, 1.07 GB in fp32.
    "1GB": dict(
        hidden_size=1024, num_hidden_layers=17, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        intermediate_size=3072, vocab_size=47104,
    ),
}  # fmt: skip
REAL = dict(
    model_type="llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, intermediate_size=1536, vocab_size=49152, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
)  # fmt: skip
HF |= dict.fromkeys(real.KINDS, REAL)
COMMON = dict(
    model_type="qwen3", tie_word_embeddings=True, max_position_embeddings=2048, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.02, dtype="float32",
)  # fmt: skip


def config(name: str) -> dict:
    """The config.json of a model."""
    return {**COMMON, **HF[name]}


def matmul_weights(name: str) -> int:
    """Active weights per token in matmuls, including the head."""
    c = HF[name]
    heads = 2 * (c["num_attention_heads"] + c["num_key_value_heads"]) * c["head_dim"]
    mlp = 3 * c["intermediate_size"]
    if "num_experts" in c:  # the router and the token's experts
        mlp = c["num_experts"] + 3 * c["num_experts_per_tok"] * c["moe_intermediate_size"]
    layer = c["hidden_size"] * (heads + mlp)
    return c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]


def flops(name: str, lengths, *, backward: bool) -> float:
    """FLOPs of a forward pass over sequences of these lengths, causal attention counted as half a square; with the
    backward pass three times that."""
    c = HF[name]
    attention = 2 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"]
    return (3 if backward else 1) * sum(2 * matmul_weights(name) * n + attention * n * n for n in lengths)


def tokens(name: str, folder: str, rows: int, length: int) -> np.ndarray:
    """Token ids [rows, length], the same for all sides: drawn; those of texts for a real model."""
    if name in real.KINDS:
        ids = json.loads(Path(folder, "tokens.json").read_text())
        return np.array(ids[: rows * length]).reshape(rows, length)
    return np.random.default_rng(0).integers(0, HF[name]["vocab_size"], (rows, length))


def lognormal(count: int, *, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """`count` lognormal lengths in random order, with this sigma of the logarithm; `mean` is before clipping."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 2, longest).astype(int).tolist()


def main(name: str, folder: str) -> None:
    """Writes a model to a Hugging Face directory, loaded by both sides; with random weights unless it is a real one."""
    if name in real.KINDS:
        return real.write(name, folder)
    import jax

    from areax import models
    from areax.adapters import hf
    from areax.core import param

    c = models.config_from_hf(config(name))
    hf.save(folder, c, param.init(jax.random.key(0), models.table(c)))


if __name__ == "__main__":
    main(*sys.argv[1:])
