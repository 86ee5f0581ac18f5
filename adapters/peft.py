"""Loads and saves LoRA adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

PEFT on transformers 5 fuses a layer's experts into two weights, `gate_up_proj` and `down_proj`. Expert adapters are
written per expert, and PEFT fuses them when loading: gate and up become one adapter of twice the rank. Both forms can
be read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import xxhash

from .. import models
from ..core import param
from ..models import lora
from ..parallel import rules
from . import hf, safetensors
from .atomic_dir import replacing

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FUSED = r".*\.gate_up_proj"  # key of the fused gate and up projections in PEFT's rank_pattern
EXPERTS = {"expert_gate", "expert_up", "expert_down"}
# Names that PEFT takes for experts and routers anywhere in an MoE model.
AMBIGUOUS = {"gate_proj", "up_proj", "down_proj", "gate"}
# Options that do not change what the tensors compute, or only say where they belong, which the keys do too.
FREE = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "use_rslora", "lora_dropout", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


def save(path: str | os.PathLike, config, adapters, spec: lora.Lora, base: str = "") -> Path:
    """Writes a directory for `peft.PeftModel.from_pretrained` on the base; fp32, dropout 0.

    Written atomically, by rename; an existing directory is replaced if it holds adapters. With several processes all
    must call it.

    Args:
      config: config of the base model.
      adapters: parameter tree of `lora.table`, jax or numpy arrays.
      base: path or hub name where PEFT finds the base.

    Raises:
      ValueError: the path is a file or another kind of directory, the adapters do not match, or PEFT, which fuses
        experts, cannot represent their targets.
    """
    return _write(path, config, adapters, spec, base)


def write_published(
    root: str | os.PathLike, version: int, config, adapters, spec: lora.Lora, base: str | os.PathLike, base_label: str
) -> Path:
    """`save` to `root/{version}`, as a version of a policy whose base stays on the servers.

    Its manifest.json is `{version, base, bytes, config, tensors: {name: {dtype, shape, xxh3_128}}}`: `base` is the
    label of the published base and `config` the xxh3-128 of adapter_config.json, so a label derived from the manifest's
    hash covers base, adapters and scale. The scale is always written as alpha / rank, also for rslora: servers support
    no other.

    Args:
      base: the published directory of the base, loaded by servers.
    """
    if version < 0:
        raise ValueError(f"write_published: version must be at least 0, got {version}")
    spec = dataclasses.replace(spec, alpha=spec.scale * spec.rank, rslora=False)
    manifest = {"version": version, "base": base_label}
    return _write(Path(root) / str(version), config, adapters, spec, os.fspath(base), manifest)


def _write(path, config, adapters, spec: lora.Lora, base: str, manifest: dict | None = None) -> Path:
    table = models.table(config)
    adapter_config = _config_json(config, table, spec, base)
    specs, arrays = hf.tensors_of(lora.table(table, spec), config.prefix, adapters, "float32")
    if jax.process_index() > 0:
        for _ in arrays:
            pass
        return Path(path)
    with replacing(path, _holds_adapters) as directory:
        entries = {name: safetensors.describe(name, tensor) for name, tensor in specs.items()}
        written = safetensors.write_file(directory / WEIGHTS, entries, arrays)
        text = (json.dumps(adapter_config, indent=2) + "\n").encode()
        safetensors.write_bytes(directory / CONFIG, text)
        if manifest is not None:
            sizes = sum(safetensors.size(entry) for entry in written.values())
            manifest |= {"bytes": sizes, "config": xxhash.xxh3_128_hexdigest(text), "tensors": written}
            safetensors.write_bytes(directory / hf.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return Path(path)


def verify(path: str | os.PathLike) -> dict | None:
    """Compares a directory of adapters with its manifest.json; returns the manifest, or None without one.

    Raises:
      ValueError: it does not match the manifest, or is not a directory of adapters.
    """
    path = _complete(path)
    if not (path / hf.MANIFEST).is_file():
        return None
    manifest = hf.read_json(path / hf.MANIFEST)
    hf.compare(path, manifest, safetensors.read(path / WEIGHTS))
    if xxhash.xxh3_128_hexdigest((path / CONFIG).read_bytes()) != manifest.get("config"):
        raise ValueError(f"{path}: {CONFIG} does not match {hf.MANIFEST}; copy the adapters again")
    return manifest


def host_copy(config, adapters, spec: lora.Lora):
    """`hf.host_copy` of adapters, in fp32."""
    return hf.copied(lora.table(models.table(config), spec), adapters, "float32")


def load(path: str | os.PathLike, config, mesh=None):
    """Loads (spec, adapters in fp32) from a directory written by PEFT or `save`, for a base with this config.

    Args:
      mesh: as in `hf.load`.

    Raises:
      ValueError: not a directory of adapters, options that are not implemented, ranks that differ between weights, or
        missing, unexpected or misshapen tensors, or numbers that are not finite, by name.
    """
    path = _complete(path)
    options = hf.read_json(path / CONFIG)
    _check_options(options, f"{path / CONFIG}")
    base = models.table(config)
    stored = safetensors.read(path / WEIGHTS)
    for key, tensor in stored.items():
        if tensor.ndim != 2:
            raise ValueError(f"{path}: {key} must be a matrix, got {list(tensor.shape)}; copy the adapters again")
        if bad := safetensors.count_nonfinite(tensor):
            raise ValueError(f"{path}: {bad} of the {tensor.size} numbers of {key} are not finite; use other adapters")
    tensors = _split_experts(stored, base.dims)
    rslora, rank, alpha = bool(options.get("use_rslora")), options["r"], float(options["lora_alpha"])
    if options.get("rank_pattern") and max(map(_rank, tensors.items())) == 2 * rank:  # fused and saved by PEFT
        rank, alpha = 2 * rank, _doubled(alpha, rslora)
        tensors = {key: _padded(key, x, rank) for key, x in tensors.items()}
    spec = lora.Lora(rank, alpha, ("*",), rslora)
    present = lambda leaf: any(key in tensors for (key, *_) in leaf.keys(config.prefix).values())
    found = {_name(leaf)[:-2] for leaf in param.leaf_list(lora.table(base, spec)) if present(leaf)}
    names = tuple(name for name in lora.targets(base, spec) if name in found)
    if not names:
        raise ValueError(f"{path / WEIGHTS}: must hold adapters of a {config.family}, got {', '.join([*tensors][:3])}")
    spec = dataclasses.replace(spec, targets=names)
    table = lora.table(base, spec)
    keys = {leaf.path: [key for (key, *_) in leaf.keys(config.prefix).values()] for leaf in param.leaf_list(table)}
    used = [key for of_leaf in keys.values() for key in of_leaf]
    missing, unexpected = [key for key in used if key not in tensors], sorted(tensors.keys() - set(used))
    if missing or unexpected:
        raise ValueError(f"{path}: adapters must cover their targets in full, got {hf.complaint(missing, unexpected)}")
    for leaf in param.leaf_list(table):
        for key in keys[leaf.path]:
            hf.check_tensor(key, tensors[key], leaf, str(path))
    shardings = () if mesh is None else (rules.of_params(table, mesh),)
    read = lambda leaf, *on: hf.place(leaf, [tensors[key] for key in keys[leaf.path]], "float32", *on)
    return spec, param.tree_map(read, table, *shardings)


def modules(config, spec: lora.Lora) -> list[str]:
    """Module names of the targets as used by servers and PEFT, such as "q_proj"."""
    return _targets(config, models.table(config), spec)[0]


def _complete(path: str | os.PathLike) -> Path:
    path = Path(path)
    for name in (WEIGHTS, CONFIG):
        if not (path / name).is_file():
            raise ValueError(f"{path}: adapters need {WEIGHTS} and {CONFIG}, got no {name}; is it the right directory?")
    return path


def _name(leaf: param.Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _holds_adapters(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _config_json(config, table: param.Table, spec: lora.Lora, base: str) -> dict:
    modules, parameters, ranks = _targets(config, table, spec)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.prefix and not config.value_head else None,
        "base_model_name_or_path": base or None,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rslora,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {FUSED: 2 * spec.rank} if ranks else {},
        "alpha_pattern": {FUSED: _doubled(spec.alpha, spec.rslora)} if ranks else {},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(config, table: param.Table, spec: lora.Lora) -> tuple[list[str], list[str], bool]:
    """PEFT's target_modules and target_parameters, and whether PEFT fuses gate and up projections."""
    names = set(lora.targets(table, spec))
    experts = names & EXPERTS
    if experts not in (set(), {"expert_down"}, EXPERTS):
        raise ValueError(
            f"peft: adapters of experts must be of {', '.join(sorted(EXPERTS))}, or only of expert_down, "
            f"got {', '.join(sorted(experts))}; export the merged model instead"
        )
    mixture = "experts" in table.dims
    modules, parameters = set(), set()
    for leaf in param.leaf_list(table):
        if leaf.layers is None or _name(leaf) not in names:
            continue
        for *_, key in leaf.keys(config.prefix).values():  # the last is the name in transformers' module
            within = key.removesuffix(".weight").partition("layers.")[2].partition(".")[2]
            last = within.rpartition(".")[2]
            if _name(leaf) in EXPERTS:
                parameters.add(f"mlp.experts.{'down_proj' if _name(leaf) == 'expert_down' else 'gate_up_proj'}")
            elif mixture and last in AMBIGUOUS:
                parameters.add(f"{within}.weight")
            else:
                modules.add(last)
    return sorted(modules), sorted(parameters), experts == EXPERTS


def _check_options(options: Mapping, where: str) -> None:
    if options.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type must be LORA, got {options.get('peft_type')!r}")
    rank, alpha, rslora = options.get("r"), options.get("lora_alpha"), options.get("use_rslora")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{where}: r, the rank, must be a whole number above 0, got {rank!r:.80}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= sys.float_info.max:
        raise ValueError(f"{where}: lora_alpha must be a finite number above 0, got {alpha!r:.80}")
    if rslora is not None and type(rslora) is not bool:
        raise ValueError(f"{where}: use_rslora must be true or false, got {rslora!r:.80}")
    for name, value in options.items():
        if name not in FREE and value and not (name == "bias" and value == "none"):
            raise ValueError(f"{where}: {name} is not implemented, got {value!r}; merge these adapters with PEFT")
    if options.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights must be true, false or 'gaussian', got {options['init_lora_weights']!r}; "
            "others may change the base; merge these adapters with PEFT"
        )
    patterns = options.get("rank_pattern") or {}, options.get("alpha_pattern") or {}
    fused = {FUSED: 2 * rank}, {FUSED: _doubled(alpha, bool(rslora))}
    if patterns not in (({}, {}), fused):
        raise ValueError(
            f"{where}: all weights must have the same rank and alpha, got rank_pattern {patterns[0]} and alpha_pattern "
            f"{patterns[1]}; merge these adapters with PEFT"
        )


def _split_experts(tensors: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Splits fused expert adapters into one per expert, as views. Fused ones are A [experts x rank, in], shared by gate
    and up, and B [out, rank x experts]; their keys do not name the projection, but their shapes identify it."""
    out = dict(tensors)
    for key, a in tensors.items() if "experts" in dims else ():
        stem = key.removesuffix("lora_A.weight")
        at = stem.removesuffix("base_layer.")
        if stem == key or not at.endswith(".experts.") or f"{stem}lora_B.weight" not in tensors:
            continue
        b, E, D, F = tensors[f"{stem}lora_B.weight"], dims["experts"], dims["expert_embed"], dims["expert_ffn"]
        rows = {(2 * F, D): {"gate_proj": slice(F), "up_proj": slice(F, None)}, (D, F): {"down_proj": slice(None)}}
        if (len(b), a.shape[1]) not in rows or len(a) % E or len(a) != b.shape[1]:
            continue
        del out[key], out[f"{stem}lora_B.weight"]
        a_ERI, b_EOR = a.reshape(E, -1, a.shape[1]), b.reshape(len(b), -1, E).transpose(2, 0, 1)
        for name, part in rows[len(b), a.shape[1]].items():
            for e in range(E):
                one = f"{at}{e}.{name}."
                out |= {f"{one}lora_A.weight": a_ERI[e], f"{one}lora_B.weight": b_EOR[e, part]}
    return out


def _rank(item: tuple[str, np.ndarray]) -> int:
    """Rank of an adapter, given (key, tensor)."""
    return item[1].shape[0 if item[0].endswith("lora_A.weight") else -1]


def _padded(key: str, x: np.ndarray, rank: int) -> np.ndarray:
    """Zero-pads an adapter to a larger rank, which does not change its product."""
    more = rank - _rank((key, x))
    return np.pad(x, ((0, more), (0, 0)) if key.endswith("lora_A.weight") else ((0, 0), (0, more)))


def _doubled(alpha: float, rslora: bool) -> float:
    """The alpha that gives the same scale at twice the rank."""
    return alpha * (math.sqrt(2) if rslora else 2)
