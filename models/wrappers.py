"""Wrappers: models of several parts, such as a vision tower and a language model, of which areax trains the text model.

A wrapper's config.json has the text model's as `text_config`, and its checkpoint the text model's weights under a
prefix. The tensors of the other parts are not read, and copied to exports; so are those of layers that predict further
tokens (MTP), in any family, with which the engine drafts (`mtp`).
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.param import Param, Stack, Table
from ..core.parts import Part

IN_LANGUAGE_MODEL, HEAD = "language_model.model.", "lm_head.weight"
# Families whose checkpoints have tensors "mtp.*"; others have layers behind the model's own (num_nextn_predict_layers).
WITH_MTP = ("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
COPIES = "embed_tokens.", "shared_head.head."  # which such a layer has of the model's embeddings and head
# What the whole states for the text model, too, before that itself, as transformers resolves them.
SHARED = (
    "architectures", "bos_token_id", "compression_config", "dtype", "eos_token_id", "id2label", "label2id",
    "num_labels", "pad_token_id", "quantization_config", "torch_dtype",
)  # fmt: skip
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True)
class Wrapper:
    """One kind of wrapper.

    Attributes:
      texts: model_type of the text model -> the family that computes it, the first where config.json has none; none =
        any family, under its own name.
      prefix: prefix of the text model's keys in checkpoints.
      module: that of its keys in transformers' module.
      others: what the keys of other parts begin with, behind an optional "model.".
      tied: tie_word_embeddings where config.json is silent.
      defaults: of options of text_config that the family requires, or has other defaults of.
      fused: checkpoints have the experts of a layer as two tensors, transposed, and the family has one for each expert.
    """

    texts: Mapping[str, str]
    prefix: str
    module: str
    others: tuple[str, ...]
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False


_LLAVA = (IN_LANGUAGE_MODEL, "model.language_model.", ("vision_tower.", "multi_modal_projector."))
_QWEN = ("model.language_model.", "model.language_model.", ("visual.",))
WRAPPERS = {
    "gemma3": Wrapper(
        {"gemma3_text": "gemma3_text"}, *_LLAVA, tied=True,
        defaults={
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "gemma4": Wrapper(
        {"gemma4_text": "gemma4_text"}, "model.language_model.", "model.language_model.",
        ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."), tied=True,
    ),
    "internvl": Wrapper({}, *_LLAVA, tied=True),
    "llama4": Wrapper(
        {"llama4_text": "llama4_text"}, IN_LANGUAGE_MODEL, IN_LANGUAGE_MODEL,
        ("vision_model.", "multi_modal_projector."),
    ),
    "llava": Wrapper({}, *_LLAVA),
    "mistral3": Wrapper({"mistral": "mistral", "ministral3": "ministral3"}, *_LLAVA, tied=True),
    "qwen2_5_vl": Wrapper(
        {"qwen2_5_vl_text": "qwen2"}, "model.", "model.language_model.", ("visual.",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "qwen3_5": Wrapper({"qwen3_5_text": "qwen3_5_text"}, *_QWEN),
    "qwen3_5_moe": Wrapper({"qwen3_5_moe_text": "qwen3_5_moe_text"}, *_QWEN),
    "qwen3_vl": Wrapper(
        {"qwen3_vl_text": "qwen3"}, *_QWEN, defaults={"max_position_embeddings": 128000, "rope_theta": 5e5}
    ),
    "qwen3_vl_moe": Wrapper(
        {"qwen3_vl_moe_text": "qwen3_moe"}, *_QWEN, fused=True,
        defaults={"max_position_embeddings": 128000, "rope_theta": 5e5, "norm_topk_prob": True},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rest:
    """The tensors of a checkpoint that the model does not use: their names, and the folder that has them ("" where
    they did not come from one)."""

    folder: str
    names: tuple[str, ...]


def of(hf: Mapping) -> Wrapper | None:
    """The kind of wrapper of a config.json; None for a text model."""
    return WRAPPERS.get(hf["model_type"]) if isinstance(hf.get("model_type"), str) else None


def text(hf: dict) -> dict:
    """The text model's config.json: `hf` itself, or what a wrapper says about its text model.

    Raises:
      ValueError: a wrapper has no text_config, or one of another model.
    """
    wrapper = of(hf)
    if wrapper is None:
        return hf
    inner = text_options(hf)
    if not isinstance(inner, dict):
        raise ValueError(f"config.json: {hf['model_type']} needs text_config, the text model's options, got {inner!r}")
    name = inner.get("model_type", next(iter(wrapper.texts), None))
    if not isinstance(name, str) or (wrapper.texts and name not in wrapper.texts):
        raise ValueError(
            f"config.json: model_type of the text_config of {hf['model_type']} must be "
            f"{' or '.join(wrapper.texts) or 'one of a text model'}, got {name!r:.80}"
        )
    shared = {key: hf[key] for key in SHARED if hf.get(key) is not None}
    tied = {"tie_word_embeddings": hf.get("tie_word_embeddings", inner.get("tie_word_embeddings", wrapper.tied))}
    found = {**wrapper.defaults, **inner, **shared, **tied, "model_type": wrapper.texts.get(name, name)}
    if wrapper.texts.get(name, name) != name:  # text has equal positions on all three axes, which is plain rope
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(found.get(key), dict):
                plain = {k: v for k, v in found[key].items() if not k.startswith("mrope_")}
                found[key] = {k: "default" if v == "mrope" else v for k, v in plain.items()}
    return found


def text_options(hf: Mapping) -> Any:
    """The text_config of a wrapper as it is; files of Qwen2.5-VL by transformers 4 have its options beside
    `vision_config`."""
    if hf["model_type"] != "qwen2_5_vl" or "text_config" in hf:
        return hf.get("text_config")
    return {key: value for key, value in hf.items() if key not in ("model_type", "vision_config")}


def wraps(config) -> bool:
    """Whether a Config is of a text model within a wrapper."""
    return of(json.loads(config.source)) is not None


def wrapped(config, hf: dict):
    """The Config of a text model as part of the wrapper `hf`."""
    wrapper = of(hf)
    return config if wrapper is None else dataclasses.replace(config, prefix=wrapper.prefix, source=json.dumps(hf))


def text_only(config):
    """The Config of a wrapper's text model as a model of its own, whose exports have no other parts."""
    source = json.loads(config.source)
    if of(source) is None:
        return config
    return dataclasses.replace(config, prefix="model.", source=json.dumps(text(source)), rest=None, vision=None)


def to_hf(config, made: dict) -> dict:
    """A wrapper's config.json with that of its text model, `made`, in it."""
    hf = json.loads(config.source)
    inner = text_options(hf)
    stated = {*inner, "eos_token_id"} - {"architectures"}
    made = {key: value for key, value in made.items() if key not in SHARED or key in stated}
    made["model_type"] = inner.get("model_type", next(iter(WRAPPERS[hf["model_type"]].texts), config.family))
    if made["model_type"] != config.family:
        made = {key: value for key, value in made.items() if key not in ROPE}
        made |= {key: inner[key] for key in ROPE if key in inner}
    hf["tie_word_embeddings"] = config.tied
    if "eos_token_id" in hf:
        hf["eos_token_id"] = made["eos_token_id"]
    if "text_config" not in hf:
        return {**hf, **made, "model_type": hf["model_type"]}
    return hf | {"text_config": {**inner, **made}}


def states_tying(config) -> bool:
    """Whether a config.json says if embeddings and head are tied; that of a wrapper may leave it to its class."""
    hf = json.loads(config.source)
    return of(hf) is None or any("tie_word_embeddings" in part for part in (hf, text_options(hf)))


def prefixes(config) -> tuple[str, ...]:
    """What the keys of a checkpoint may begin with, the usual one first."""
    wrapper = of(json.loads(config.source))
    return ("model.", "") if wrapper is None else (wrapper.prefix, wrapper.module)


def head(config) -> str:
    """The key of the output head, which a wrapper may keep beside the text model."""
    return f"language_model.{HEAD}" if config.prefix == IN_LANGUAGE_MODEL else HEAD


def in_module(config):
    """The Config with the prefix of keys in transformers' module."""
    wrapper = of(json.loads(config.source))
    return config if wrapper is None else dataclasses.replace(config, prefix=wrapper.module)


def of_module(config) -> bool:
    """Whether keys are those in transformers' module."""
    wrapper = of(json.loads(config.source))
    return wrapper is not None and config.prefix == wrapper.module


def with_rest(table: Table, config) -> Table:
    """A family's table for a checkpoint with this config: the head's key, and the keys that the model does not use."""
    source = json.loads(config.source)
    wrapper, top = of(source), dict(table.top)
    rest = _predicting(config, text(source))
    if wrapper:
        others = () if config.vision else wrapper.others  # those with a tower that is implemented have no others
        rest += [f"{start}{other}" for other in others for start in ("", "model.")]
        if "head" in top:
            top["head"] = dataclasses.replace(top["head"], keys=(head(config),))
        if wrapper.fused:
            table = with_fused_experts(table, transposed=True)
    return dataclasses.replace(table, top=top, unused=(*table.unused, *rest))


def _predicting(config, hf: Mapping) -> list[str]:
    """What the keys of layers that predict further tokens begin with, but those of `Config.mtp`, which is used."""
    behind, apart = (hf.get(name) or 0 for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    found = [f"{config.prefix}layers.{i}." for i in range(config.layers, config.layers + behind)]
    if not config.mtp:
        return [*found, *(["mtp."] if config.family in WITH_MTP else [])]
    if config.family in WITH_MTP:
        return [*found, *(f"mtp.layers.{i}." for i in range(1, apart))]
    return [*(f"{found[0]}{name}" for name in COPIES), *found[1:]]


def with_fused_experts(table: Table, transposed: bool = False) -> Table:
    """The table with tensors of all experts of a layer, as transformers' modules name them, in place of one for each.

    They are `experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj` [E, D, F]; without a gate, `experts.up_proj`.

    Args:
      transposed: they are [E, D, 2 F] and [E, F, D].
    """

    def one(name: str, p: Param, gated: bool) -> Param:
        at, found, module = p.keys[-1].partition("{expert}.")
        if not found:
            return p
        rows = table.dims[p.axes.split()[1]]
        if gated and name in ("expert_gate", "expert_up"):
            start = 0 if name == "expert_gate" else rows
            part = Part(2 * rows, start, start + rows, axis=1, transposed=transposed)
            return dataclasses.replace(p, keys=(f"{at}gate_up_proj",), part=part)
        part = Part(rows, 0, rows, axis=1, transposed=True) if transposed else None
        return dataclasses.replace(p, keys=(at + module.removesuffix(".weight"),), part=part)

    def each(stack: Stack) -> Stack:
        gated = "expert_gate" in stack.params
        return Stack(stack.layers, {name: one(name, p, gated) for name, p in stack.params.items()})

    return dataclasses.replace(table, stacks=tuple(map(each, table.stacks)))


def in_modules(table: Table, config) -> Table:
    """The table of a model with the experts of a layer as tensors of all, as transformers' modules have them."""
    wrapper = of(json.loads(config.source))
    if not (wrapper and wrapper.fused):
        return with_fused_experts(table)
    plain = lambda p: dataclasses.replace(p, part=dataclasses.replace(p.part, transposed=False)) if p.part else p
    stacks = (Stack(stack.layers, {name: plain(p) for name, p in stack.params.items()}) for stack in table.stacks)
    return dataclasses.replace(table, stacks=tuple(stacks))
