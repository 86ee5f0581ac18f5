"""Dense pre-norm decoder with grouped-query attention and a gated MLP, shared by Llama-like families.

Biases and query/key norms are applied if the weights exist, so a family is defined by its table.
"""

import itertools
import json
from dataclasses import dataclass

from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal, ones, zeros

from ..core.param import Param, Stack, Table
from ..parallel import vocab
from .layers import rope as rotary
from .layers.linear import linear
from .layers.mlp import gated_mlp
from .layers.norm import rms_norm


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a model; `source` is the config.json that it was read from.

    Attributes:
      family: Hugging Face's model_type.
      context: maximum sequence length, in tokens.
      init_std: standard deviation of newly initialised matrices.
      prefix: prefix of the checkpoint's keys, "model." except in bare backbones.
      value_head: the model has a scalar head, `score.weight`.
      window: sliding window of the layers `window_layers`, in tokens, the token itself included.
    """

    family: str
    vocab: int
    embed: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: rotary.Rope = rotary.Rope()
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    context: int = 32768
    init_std: float = 0.02
    eos: tuple[int, ...] = ()
    prefix: str = "model."
    value_head: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    source: str = "{}"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None = full attention."""
        return tuple(self.window if i in self.window_layers else None for i in range(self.layers))


def config(hf: dict, family: str, **differences) -> Config:
    """Reads a config.json; `differences` override fields that a family derives differently.

    Raises:
      ValueError: an option is missing or not implemented; names it and its value.
    """
    refuse(hf, "hidden_act", "silu", default="silu")
    refuse(hf, "attention_dropout", 0.0, default=0.0)
    refuse(hf, "pretraining_tp", 1, default=1)
    for name in ("quantization_config", "compression_config"):
        if hf.get(name):
            raise ValueError(
                f"config.json: weights must not be quantised, got {name} {hf[name]!r:.200}; use the original checkpoint"
            )
    kinds = hf.get("layer_types") or []
    if "window" not in differences and (hf.get("use_sliding_window") or any(kind != FULL for kind in kinds)):
        raise ValueError(
            f"config.json: sliding windows are not implemented for {family}, got use_sliding_window "
            f"{hf.get('use_sliding_window')} and layer_types {sorted(set(kinds))}"
        )
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in hf:
            raise ValueError(f"config.json: {family} needs {name}, got none")
    heads = hf["num_attention_heads"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )
    eos = hf.get("eos_token_id")
    fields = dict(
        family=family,
        vocab=hf["vocab_size"],
        embed=hf["hidden_size"],
        ffn=hf["intermediate_size"],
        layers=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        rope=rotary.from_hf(hf),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=hf.get("tie_word_embeddings", False),
        context=hf.get("max_position_embeddings", 32768),
        init_std=hf.get("initializer_range", 0.02),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        value_head=any("ForSequenceClassification" in a or "ForTokenClassification" in a
                       for a in hf.get("architectures") or []),
        source=json.dumps(hf),
    )  # fmt: skip
    made = Config(**{**fields, **differences})
    if made.head_dim < 2 or made.head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even and above 0, got {made.head_dim}")
    rotary.frequencies(made.rope, made.head_dim)  # raises if they do not fit
    return made


FULL, SLIDING = "full_attention", "sliding_attention"  # values in layer_types


def windows(hf: dict) -> dict:
    """`window` and `window_layers` of Qwen2 and Qwen3: by layer_types, else all layers from max_window_layers on.

    Raises:
      ValueError: layer_types are not one of the two kinds per layer, or sliding layers have no window.
    """
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    count, kinds = hf.get("num_hidden_layers") or 0, hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", 28) if window is not None else count
        kinds = [SLIDING if i >= first else FULL for i in range(count)]
    if len(kinds) != count or set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"config.json: layer_types must be {FULL} or {SLIDING} for each of {count} layers, "
            f"got {len(kinds)} of {sorted(set(kinds))}"
        )
    if SLIDING in kinds and (window is None or window < 1):
        raise ValueError(
            "config.json: sliding windows need use_sliding_window and a sliding_window of at least 1, "
            f"got {hf.get('use_sliding_window')} and {hf.get('sliding_window')}"
        )
    return dict(window=window, window_layers=tuple(i for i, kind in enumerate(kinds) if kind == SLIDING))


def refuse(hf: dict, name: str, only, *, default):
    """Raises ValueError unless the option has the only implemented value."""
    if hf.get(name, default) != only:
        raise ValueError(f"config.json: {name} must be {only!r}, got {hf[name]!r:.200}, which is not implemented")


def to_hf(config: Config) -> dict:
    """The config.json of a model, with rope in the old and new spelling; other options of the source are kept."""
    eos, source = list(config.eos), json.loads(config.source)
    sliding = {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "max_window_layers": config.windows.index(config.window),
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
    } if config.window_layers else {}  # fmt: skip
    return {
        **source,
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        **rotary.to_hf(config.rope, source),
        **sliding,
    }


AT = "{prefix}layers.{layer}."  # prefix of a layer's checkpoint keys


def inits(config: Config):
    """Initialisers of (matrices, output projections), the latter scaled by (2 layers)^-1/2 (GPT-2)."""
    return normal(config.init_std), normal(config.init_std * (2 * config.layers) ** -0.5)


def table(config: Config, *, qk_norm: bool) -> Table:
    """The parameter table of a dense decoder, one stack per run of layers with the same window."""
    std, out = inits(config)

    def weight(axes, name, init=std):
        return Param(axes, (f"{AT}{name}.weight",), init)

    def bias(axes, name):
        return Param(axes, (f"{AT}{name}.bias",), zeros)

    # fmt: off
    block = {
        "norm1": weight("embed", "input_layernorm", ones),
        "q": weight("heads embed", "self_attn.q_proj"),
        "k": weight("kv_heads embed", "self_attn.k_proj"),
        "v": weight("kv_heads embed", "self_attn.v_proj"),
        "o": weight("embed heads", "self_attn.o_proj", out),
        "norm2": weight("embed", "post_attention_layernorm", ones),
        "gate": weight("ffn embed", "mlp.gate_proj"),
        "up": weight("ffn embed", "mlp.up_proj"),
        "down": weight("embed ffn", "mlp.down_proj", out),
    }
    if qk_norm:
        block |= {"q_norm": weight("head", "self_attn.q_norm", ones),
                  "k_norm": weight("head", "self_attn.k_norm", ones)}
    if config.qkv_bias:
        block |= {"q_bias": bias("heads", "self_attn.q_proj"), "k_bias": bias("kv_heads", "self_attn.k_proj"),
                  "v_bias": bias("kv_heads", "self_attn.v_proj")}
    if config.out_bias:
        block |= {"o_bias": bias("embed", "self_attn.o_proj")}
    if config.mlp_bias:
        block |= {"gate_bias": bias("ffn", "mlp.gate_proj"), "up_bias": bias("ffn", "mlp.up_proj"),
                  "down_bias": bias("embed", "mlp.down_proj")}
    top = {
        "embed": Param("vocab embed", ("{prefix}embed_tokens.weight",), std),
        "norm": Param("embed", ("{prefix}norm.weight",), ones),
    }
    if not config.tied:
        top["head"] = Param("vocab embed", ("lm_head.weight",), std)
    if config.value_head:
        top["score"] = Param("one embed", ("score.weight",), std)
    # fmt: on
    dims = {
        "vocab": config.vocab,
        "embed": config.embed,
        "ffn": config.ffn,
        "head": config.head_dim,
        "one": 1,
        "heads": config.heads * config.head_dim,
        "kv_heads": config.kv_heads * config.head_dim,
    }  # fmt: skip
    runs = itertools.groupby(range(config.layers), lambda i: config.windows[i])
    return Table(top, tuple(Stack(tuple(run), block) for _, run in runs), dims)


def mlp(h_BTD, w, routing=None):
    """The gated MLP as the second half of a layer: (out_BTD, {}); MoE layers report statistics instead of {}."""
    return gated_mlp(h_BTD, w), {}


def block(x_BTD, w, cos_BTP, sin_BTP, attend, config: Config, routing=None, mlp=mlp):
    """One decoder layer: (x_BTD, its statistics by name). `attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH` applies the
    mask, or the KV cache when decoding; `routing`, a `moe.Routing`, is used by MoE layers."""
    B, T, _ = x_BTD.shape

    def heads(name, count):
        x = checkpoint_name(linear(h_BTD, w[name], w.get(f"{name}_bias")), "qkv")
        return x.reshape(B, T, count, config.head_dim)

    def place(x, norm):
        if norm in w:
            x = rms_norm(x, w[norm], config.norm_eps)
        return rotary.rotate(x, cos_BTP, sin_BTP)

    h_BTD = rms_norm(x_BTD, w["norm1"], config.norm_eps)
    q_BTNH = place(heads("q", config.heads), "q_norm")
    k_BTKH = place(heads("k", config.kv_heads), "k_norm")
    a_BTNH = attend(q_BTNH, k_BTKH, heads("v", config.kv_heads))
    x_BTD = x_BTD + checkpoint_name(linear(a_BTNH.reshape(B, T, -1), w["o"], w.get("o_bias")), "attention_out")
    h_BTD = rms_norm(x_BTD, w["norm2"], config.norm_eps)
    out_BTD, report = mlp(h_BTD, w, routing=routing)
    return x_BTD + out_BTD, report


def embed(params, token_BT, dtype):
    """Token embeddings, in the compute dtype."""
    return vocab.take(params["embed"], token_BT).astype(dtype)
