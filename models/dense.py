"""Dense decoder with grouped-query attention and a gated MLP, shared by Llama-like families.

Biases and norms (before attention and MLP, after them, of queries and keys) are applied if the weights exist, so a
family is defined by its table, the records of its layers and a few constants.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal, ones, zeros

from ..core import param
from ..core.param import Param, Stack, Table
from ..core.parts import Part, split
from ..parallel import vocab
from . import config_json
from .attention.pattern import Pattern
from .layer import Attention, Growth, Layer, Mixer, attention
from .layers import blocked, score_head
from .layers import rope as rotary
from .layers.blocked import Blocked
from .layers.linear import linear, linears
from .layers.mlp import SILU, Activation, gated_mlp
from .layers.norm import rms_norm
from .layers.score_head import ScoreHead
from .vision.tower import Tower
from .wrappers import Rest

ROPE = rotary.Rope()  # of families that state no other
LARGEST_HEAD = 10_000  # there is a frequency for every second entry, made before a single weight is compared


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a model; `source` is the config.json that it was read from, a wrapper's as a whole.

    Attributes:
      family: Hugging Face's model_type.
      context: maximum sequence length, in tokens.
      init_std: standard deviation of newly initialised matrices.
      prefix: prefix of the checkpoint's keys, "model." except in bare backbones and wrappers.
      score_head: the model's head of scores; None = it has none.
      output_head: the model predicts tokens; False = a classifier whose checkpoint has no `lm_head`.
      records: what each layer does with its tokens.
      activation: activation of MLPs and experts.
      norm_offset: added to the weights of norms (1 in families whose norms are stored around 0).
      embed_scale, residual_scale, logit_scale: factors of the embeddings, of what each half of a layer adds to the
        residual stream, and of the logits.
      logit_softcap: logits are cap x tanh(logit / cap) (arXiv:2408.00118); None = off.
      rest: tensors of the checkpoint that the model does not use, which exports get from it; None = there are none, or
        no checkpoint was read.
      vision: the vision tower, whose weights are `params["vision"]` (`vision.with_vision`); None = text alone.
      mtp: the layer for multi-token prediction is part of the model, `params["mtp"]` (`mtp.with_mtp`).
    """

    family: str
    vocab: int
    embed: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    context: int = 32768
    init_std: float = 0.02
    eos: tuple[int, ...] = ()
    prefix: str = "model."
    score_head: ScoreHead | None = None
    output_head: bool = True
    records: tuple[Layer, ...] = ()
    activation: Activation = SILU
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    source: str = "{}"
    rest: Rest | None = field(default=None, compare=False)
    vision: Tower | None = None
    mtp: bool = False

    @property
    def rope(self) -> rotary.Rope:
        """The rotary embedding of all layers that have one."""
        [rope] = self.ropes
        return rope

    @property
    def ropes(self) -> set[rotary.Rope]:
        """The rotary embeddings of the layers."""
        return {record.rope for record in self.records if isinstance(record, Attention) and record.rope}


def config(
    hf: dict, family: str, *, patterns: Pattern | Sequence[Pattern] = (), rope: rotary.Rope = ROPE,
    ropes: Sequence[rotary.Rope | None] = (), growth: Growth | None = None, **differences,
) -> Config:  # fmt: skip
    """Reads a config.json; `differences` override fields that a family derives differently.

    Args:
      patterns: each layer's attention pattern, or one for all; none = full attention everywhere.
      rope: what the family does where config.json is silent about rotary embeddings.
      growth: of queries, in all layers.
      ropes: each layer's rotary embedding, None for a layer without; none = that of config.json everywhere.

    Raises:
      ValueError: an option is missing or not implemented; names it and its value.
    """
    if "activation" not in differences:
        refuse(hf, "hidden_act", "silu", default="silu")
    refuse(hf, "attention_dropout", 0.0, default=0.0)
    refuse(hf, "pretraining_tp", 1, default=1)
    refuse(hf, "is_causal", True, default=True)
    config_json.quantisation(hf)  # raises if it is not implemented
    kinds = hf.get("layer_types") or []
    if not patterns and (hf.get("use_sliding_window") or any(kind != FULL for kind in kinds)):
        raise ValueError(
            f"config.json: sliding windows are not implemented for {family}, got use_sliding_window "
            f"{hf.get('use_sliding_window')} and layer_types {sorted(set(kinds))}"
        )
    need(hf, family)
    if (hf.get("pad_token_id") or 0) >= hf["vocab_size"]:  # areax needs none, but transformers could not load an export
        raise ValueError(
            f"config.json: pad_token_id must be below vocab_size {hf['vocab_size']}, or null, got {hf['pad_token_id']}"
        )
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
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=hf.get("tie_word_embeddings", False),
        context=hf.get("max_position_embeddings", 32768),
        init_std=hf.get("initializer_range", 0.02),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        score_head=score_head.stated(hf),
        source=json.dumps(hf),
    )  # fmt: skip
    fields |= differences
    if not 2 <= fields["head_dim"] <= LARGEST_HEAD or fields["head_dim"] % 2:
        raise ValueError(
            f"config.json: head_dim must be even, above 0 and at most {LARGEST_HEAD}, got {fields['head_dim']}"
        )
    patterns = patterns or Pattern()
    patterns = [patterns] * fields["layers"] if isinstance(patterns, Pattern) else patterns
    ropes = ropes or [rotary.from_hf(hf, rope)] * fields["layers"]
    for each in set(ropes) - {None}:
        rotary.frequencies(each, fields["head_dim"])  # raises if they do not fit
    sizes = fields["heads"], fields["kv_heads"], fields["head_dim"]
    records = tuple(attention(*sizes, *each, growth) for each in zip(ropes, patterns, strict=True))
    return Config(**fields, records=records)


FULL, SLIDING = "full_attention", "sliding_attention"  # values in layer_types


def layer_types(hf: dict, default: Callable[[int], str], types: tuple[str, str] = (FULL, SLIDING)) -> list[str]:
    """The type of each layer: layer_types, else by the layer's index.

    Raises:
      ValueError: layer_types are not one of the two types for each layer.
    """
    count = hf.get("num_hidden_layers") or 0
    kinds = hf.get("layer_types") or [default(i) for i in range(count)]
    if len(kinds) != count or set(kinds) - set(types):
        raise ValueError(
            f"config.json: layer_types must be {' or '.join(types)} for each of {count} layers, "
            f"got {len(kinds)} of {sorted(set(kinds))}"
        )
    return kinds


def by_type(kinds: Sequence[str], patterns: Mapping[str, Pattern], ropes: Mapping[str, rotary.Rope]) -> dict:
    """`patterns` and `ropes` for `config` of layers with these types."""
    return dict(patterns=[patterns[kind] for kind in kinds], ropes=[ropes[kind] for kind in kinds])


def window(hf: dict, default: int | None = None) -> int | None:
    """sliding_window, in tokens, the token itself included; None = no limit.

    Raises:
      ValueError: it is below 1.
    """
    size = hf.get("sliding_window", default)
    if size is not None and size < 1:
        raise ValueError(f"config.json: sliding_window must be at least 1, or null, got {size}")
    return size


def windows(hf: dict) -> list[Pattern]:
    """The layers' patterns in Qwen2 and Qwen3: by layer_types, else windows in all layers from max_window_layers on.

    Raises:
      ValueError: layer_types are not one of the two kinds per layer, or sliding layers have no window.
    """
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    kinds = layer_types(hf, lambda i: SLIDING if window is not None and i >= first else FULL)
    if SLIDING in kinds and (window is None or window < 1):
        raise ValueError(
            "config.json: sliding windows need use_sliding_window and a sliding_window of at least 1, "
            f"got {hf.get('use_sliding_window')} and {hf.get('sliding_window')}"
        )
    return [Pattern(window=window) if kind == SLIDING else Pattern() for kind in kinds]


def windows_to_hf(config: Config) -> dict:
    """The options that `windows` reads."""
    windows = [record.pattern.window for record in config.records if isinstance(record, Attention)]
    if not any(windows):
        return {}
    first = next(i for i, window in enumerate(windows) if window)
    return {
        "use_sliding_window": True,
        "sliding_window": windows[first],
        "max_window_layers": first,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def need(hf: dict, family: str):
    """Raises ValueError unless the sizes that no family has a default for are there."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in hf:
            raise ValueError(f"config.json: {family} needs {name}, got none")


def refuse(hf: dict, name: str, only, *, default):
    """Raises ValueError unless the option has the only implemented value."""
    if hf.get(name, default) != only:
        raise ValueError(f"config.json: {name} must be {only!r}, got {hf[name]!r:.200}, which is not implemented")


def to_hf(config: Config) -> dict:
    """The config.json of a model, with a rope that all layers share in the old and new spelling; other options of the
    source are kept."""
    eos, source = list(config.eos), json.loads(config.source)
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
        **({"hidden_act": "silu"} if config.activation == SILU else {}),
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        **(rotary.to_hf(config.rope, source) if len(config.ropes) == 1 else {}),
    }


AT = "{prefix}layers.{layer}."  # prefix of a layer's checkpoint keys


def inits(config: Config):
    """Initialisers of (matrices, output projections), the latter scaled by (2 layers)^-1/2 (GPT-2)."""
    return normal(config.init_std), normal(config.init_std * (2 * config.layers) ** -0.5)


# Norms of a layer: axis and name in checkpoints. `norm1` and `norm2` stand before attention and MLP, the others after
# them; queries and keys are normalised a head at a time, or all heads at once.
BEFORE = {"norm1": ("embed", "input_layernorm"), "norm2": ("embed", "post_attention_layernorm")}
AFTER = {"norm1_after": ("embed", "post_attention_layernorm"), "norm2_after": ("embed", "post_feedforward_layernorm")}
QK_HEAD = {"q_norm": ("head", "self_attn.q_norm"), "k_norm": ("head", "self_attn.k_norm")}
QK_ALL = {"q_norm": ("heads", "self_attn.q_norm"), "k_norm": ("kv_heads", "self_attn.k_norm")}


def table(config: Config, norms: Mapping[str, tuple[str, str]] = BEFORE) -> Table:
    """The parameter table of a dense decoder with these norms, stacked by the layers' records."""
    std, out = inits(config)
    start = zeros if config.norm_offset else ones

    def weight(axes, name, init=std):
        return Param(axes, (f"{AT}{name}.weight",), init)

    def bias(axes, name):
        return Param(axes, (f"{AT}{name}.bias",), zeros)

    # fmt: off
    block = {
        "q": weight("heads embed", "self_attn.q_proj"),
        "k": weight("kv_heads embed", "self_attn.k_proj"),
        "v": weight("kv_heads embed", "self_attn.v_proj"),
        "o": weight("embed heads", "self_attn.o_proj", out),
        "gate": weight("ffn embed", "mlp.gate_proj"),
        "up": weight("ffn embed", "mlp.up_proj"),
        "down": weight("embed ffn", "mlp.down_proj", out),
    }
    block |= {name: weight(axis, key, start) for name, (axis, key) in norms.items()}
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
        "norm": Param("embed", ("{prefix}norm.weight",), start),
    }
    if config.output_head and not config.tied:
        top["head"] = Param("vocab embed", ("lm_head.weight",), std)
    scores, sizes = score_head.params(config.score_head, config.init_std) if config.score_head else ({}, {})
    # fmt: on
    dims = {
        "vocab": config.vocab,
        "embed": config.embed,
        "ffn": config.ffn,
        "head": config.head_dim,
        "one": 1,
        "heads": config.heads * config.head_dim,
        "kv_heads": config.kv_heads * config.head_dim,
        "query_heads": config.heads,
        "score_hidden": config.embed,
    }  # fmt: skip
    stacks = tuple(Stack(layers, block) for layers in param.stacks(config.records))
    return Table(top | scores, stacks, dims | sizes)


def fuse(plain: Table, fused: Mapping[str, Sequence[str]]) -> Table:
    """The table with some weights side by side in one tensor of the checkpoint: {name of the tensor: weights}."""
    moved: dict[str, tuple[str, Part]] = {}
    for key, names in fused.items():
        sizes = [plain.dims[plain.stacks[0].params[name].axes.split()[0]] for name in names]
        for name, part in zip(names, split(*sizes), strict=True):
            moved[name] = f"{AT}{key}.weight", part

    def place(name: str, p: Param) -> Param:
        return replace(p, keys=moved[name][:1], part=moved[name][1]) if name in moved else p

    def placed(stack: Stack) -> Stack:
        return Stack(stack.layers, {name: place(name, p) for name, p in stack.params.items()})

    return replace(plain, stacks=tuple(map(placed, plain.stacks)))


def mlp(h_BTD, w, config: Config, routing=None):
    """The gated MLP as the second half of a layer: (out_BTD, {}); MoE layers report statistics instead of {}."""
    return gated_mlp(h_BTD, w, config.activation), {}


def attention_of_heads(h_BTD, w, mixer: Mixer, config: Config):
    """Grouped-query attention, [B, T, N, V]: what the first half of a layer multiplies with `o`."""
    sinks = (w["sinks"],) if "sinks" in w else ()
    return mixer.attend(*queries_keys_values(h_BTD, w, mixer, config), *sinks)


def block(x_BTD, w, mixer: Mixer, config: Config, routing=None, mlp=mlp, attend=attention_of_heads):
    """One decoder layer: (x_BTD, its statistics by name); `routing`, a `moe.Routing`, is used by MoE layers."""

    def norm(x, name):
        return rms_norm(x, w[name], config.norm_eps, config.norm_offset) if name in w else x

    h_BTD = norm(x_BTD, "norm1")
    a_BTNV = attend(h_BTD, w, mixer, config)
    out_BTD = checkpoint_name(linear(flat(a_BTNV), w["o"], w.get("o_bias")), "attention_out")
    x_BTD = add(x_BTD, norm(out_BTD, "norm1_after"), config)
    out_BTD, report = mlp(norm(x_BTD, "norm2"), w, config, routing=routing)
    return add(x_BTD, norm(out_BTD, "norm2_after"), config), report


def queries_keys_values(h_BTD, w, mixer: Mixer, config: Config):
    """(q_BTNH, k_BTKH, v_BTKV) of a layer's attention, normalised and rotated.

    Norms of queries and keys have the size of a head, or of all heads at once (OLMo 2, arXiv:2501.00656).
    """
    layer = mixer.layer

    def heads(x, count, size):
        return checkpoint_name(x, "qkv").reshape(*x.shape[:2], count, size)

    def place(x, name):
        if name in w:
            whole = flat(x) if w[name].shape[-1] > x.shape[-1] else x
            x = rms_norm(whole, w[name], config.norm_eps, config.norm_offset).reshape(x.shape)
        return mixer.rotate(x)

    q, k, v = linears(h_BTD, w, ("q", "k", "v"))
    q_BTNH = mixer.grow(place(heads(q, layer.heads, layer.key_dim), "q_norm"))
    k_BTKH = place(heads(k, layer.kv_heads, layer.key_dim), "k_norm")
    return q_BTNH, k_BTKH, heads(v, layer.kv_heads, layer.value_dim)


def flat(x_BTNH):
    """Merges heads, [B, T, N x H]."""
    return x_BTNH.reshape(*x_BTNH.shape[:2], -1)


def add(x_BTD, out_BTD, config: Config):
    """Adds what half a layer computed to the residual stream."""
    return x_BTD + (out_BTD if config.residual_scale == 1 else out_BTD * config.residual_scale)


def embed(params, token_BT, config: Config, dtype):
    """Token embeddings, in the compute dtype; so is their scale, as in transformers."""
    table = params["embed"] if "embed" in params else params["head"]  # of an engine, one for both
    read = blocked.rows if isinstance(table, Blocked) else vocab.take
    x_BTD = read(table, token_BT, dtype)
    return x_BTD if config.embed_scale == 1 else x_BTD * jnp.asarray(config.embed_scale, dtype)
