"""Adapters in and out in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

PEFT on transformers 5 keeps a layer's experts in two fused weights, `gate_up_proj` and `down_proj`. Adapters of experts
are written expert by expert, which PEFT fuses as it loads: gate and up become one adapter of twice the rank. Both forms
are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
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
FUSED = r".*\.gate_up_proj"  # how PEFT spells, among the patterns of ranks, what holds gate and up of all experts
EXPERTS = {"expert_gate", "expert_up", "expert_down"}
# Names that PEFT takes for those of experts and routers wherever they stand in a model that has any.
AMBIGUOUS = {"gate_proj", "up_proj", "down_proj", "gate"}
# Options that leave what the tensors do as it is, or that only say where they belong, which their keys say too.
FREE = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "use_rslora", "lora_dropout", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


def save(path: str | os.PathLike, config, adapters, spec: lora.Lora, base: str = "") -> Path:
    """Writes a directory that `peft.PeftModel.from_pretrained` loads onto the base; fp32, dropout 0.

    It appears complete, by rename; one that is there is replaced if it holds adapters. Several processes all call it.

    Args:
      config: of the base.
      adapters: a tree of `lora.table`, jax or numpy.
      base: path or hub name of the base, for PEFT to find it.

    Raises:
      ValueError: the path is a file or another kind of directory; adapters that do not fit; experts of which PEFT,
        which fuses them, cannot hold the targets.
    """
    return _write(path, config, adapters, spec, base)


def write_published(
    root: str | os.PathLike, version: int, config, adapters, spec: lora.Lora, base: str | os.PathLike, base_label: str
) -> Path:
    """`save` as version `version` of a policy whose base stays on the servers: the directory `root/{version}`.

    Its manifest.json is `{version, base, bytes, config, tensors: {name: {dtype, shape, xxh3_128}}}`: `base` the label
    of the published base and `config` the xxh3-128 of adapter_config.json, so that a label made of the manifest's hash
    covers the base, the adapters and their scale. The scale is written as alpha / rank whatever `spec` says: servers
    know no other.

    Args:
      base: the published directory of the base, for servers to load.
    """
    if version < 0:
        raise ValueError(f"write_published: version must be a number from 0 on, got {version}")
    spec = dataclasses.replace(spec, alpha=spec.scale * spec.rank, rslora=False)
    manifest = {"version": version, "base": base_label}
    return _write(Path(root) / str(version), config, adapters, spec, os.fspath(base), manifest)


def _write(path, config, adapters, spec: lora.Lora, base: str, manifest: dict | None = None) -> Path:
    whole = models.table(config)
    about = _config_json(config, whole, spec, base)
    specs, arrays = hf.tensors_of(lora.table(whole, spec), config.prefix, adapters, "float32")
    if jax.process_index() > 0:
        for _ in arrays:
            pass
        return Path(path)
    with replacing(path, _holds_adapters) as directory:
        entries = {name: safetensors.describe(name, its) for name, its in specs.items()}
        written = safetensors.write_file(directory / WEIGHTS, entries, arrays)
        text = (json.dumps(about, indent=2) + "\n").encode()
        safetensors.write_bytes(directory / CONFIG, text)
        if manifest is not None:
            sizes = sum(safetensors.size(entry) for entry in written.values())
            manifest |= {"bytes": sizes, "config": xxhash.xxh3_128_hexdigest(text), "tensors": written}
            safetensors.write_bytes(directory / hf.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return Path(path)


def verify(path: str | os.PathLike) -> dict | None:
    """Compares a directory of adapters with its manifest.json; returns the manifest, or None without one.

    Raises:
      ValueError: it is not what the manifest says, or no such directory.
    """
    path = _complete(path)
    if not (path / hf.MANIFEST).is_file():
        return None
    manifest = hf.read_json(path / hf.MANIFEST)
    hf.compare(path, manifest, safetensors.read(path / WEIGHTS))
    if xxhash.xxh3_128_hexdigest((path / CONFIG).read_bytes()) != manifest.get("config"):
        raise ValueError(f"{path}: {CONFIG} is not what {hf.MANIFEST} says; copy the adapters again")
    return manifest


def host_copy(config, adapters, spec: lora.Lora):
    """As `hf.host_copy`, in fp32."""
    return hf.copied(lora.table(models.table(config), spec), adapters, "float32")


def load(path: str | os.PathLike, config, mesh=None):
    """(spec, adapters in fp32) of a directory that PEFT or `save` wrote, for the base of this config.

    Args:
      mesh: as in `hf.load`.

    Raises:
      ValueError: not such a directory, options that are not implemented, ranks that differ between weights, tensors
        that are missing, unexpected or misshapen, by name.
    """
    path = _complete(path)
    about = hf.read_json(path / CONFIG)
    _check_options(about, f"{path / CONFIG}")
    whole = models.table(config)
    tensors = _one_by_one(safetensors.read(path / WEIGHTS), whole.dims)
    rslora, rank, alpha = bool(about.get("use_rslora")), about["r"], float(about["lora_alpha"])
    if about.get("rank_pattern") and max(map(_rank, tensors.items())) == 2 * rank:  # fused by PEFT, and saved again
        rank, alpha = 2 * rank, _doubled(alpha, rslora)
        tensors = {key: _padded(key, x, rank) for key, x in tensors.items()}
    spec = lora.Lora(rank, alpha, ("*",), rslora)
    present = lambda leaf: any(key in tensors for (key, *_) in leaf.keys(config.prefix).values())
    found = {_name(leaf)[:-2] for leaf in param.leaf_list(lora.table(whole, spec)) if present(leaf)}
    names = tuple(name for name in lora.targets(whole, spec) if name in found)
    if not names:
        raise ValueError(f"{path / WEIGHTS}: must hold adapters of a {config.family}, got {', '.join([*tensors][:3])}")
    spec = dataclasses.replace(spec, targets=names)
    table = lora.table(whole, spec)
    keys = {leaf.path: [key for (key, *_) in leaf.keys(config.prefix).values()] for leaf in param.leaf_list(table)}
    used = [key for its in keys.values() for key in its]
    missing, unexpected = [key for key in used if key not in tensors], sorted(tensors.keys() - set(used))
    if missing or unexpected:
        raise ValueError(f"{path}: adapters must be those of whole targets, {hf.complaint(missing, unexpected)}")
    for leaf in param.leaf_list(table):
        for key in keys[leaf.path]:
            hf.check_tensor(key, tensors[key], leaf, str(path))
    shardings = () if mesh is None else (rules.of_params(table, mesh),)
    read = lambda leaf, *on: hf.place(leaf, [tensors[key] for key in keys[leaf.path]], "float32", *on)
    return spec, param.tree_map(read, table, *shardings)


def modules(config, spec: lora.Lora) -> list[str]:
    """The modules of the targets, as servers and PEFT name them: "q_proj"."""
    return _targets(config, models.table(config), spec)[0]


def _complete(path: str | os.PathLike) -> Path:
    path = Path(path)
    for name in (WEIGHTS, CONFIG):
        if not (path / name).is_file():
            raise ValueError(f"{path}: adapters need {WEIGHTS} and {CONFIG}, got no {name}; is it another directory?")
    return path


def _name(leaf: param.Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _holds_adapters(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _config_json(config, whole: param.Table, spec: lora.Lora, base: str) -> dict:
    modules, parameters, ranks = _targets(config, whole, spec)
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


def _targets(config, whole: param.Table, spec: lora.Lora) -> tuple[list[str], list[str], bool]:
    """Names of modules and of parameters by which PEFT finds the targets, and whether gate and up get fused."""
    names = set(lora.targets(whole, spec))
    experts = names & EXPERTS
    if experts not in (set(), {"expert_down"}, EXPERTS):
        raise ValueError(
            f"peft: adapters of experts must be of {', '.join(sorted(EXPERTS))}, or of expert_down alone, "
            f"got {', '.join(sorted(experts))}; export the merged model instead"
        )
    mixture = "experts" in whole.dims
    modules, parameters = set(), set()
    for leaf in param.leaf_list(whole):
        if leaf.layers is None or _name(leaf) not in names:
            continue
        for key, *_ in leaf.keys(config.prefix).values():
            within = key.removesuffix(".weight").partition("layers.")[2].partition(".")[2]
            last = within.rpartition(".")[2]
            if _name(leaf) in EXPERTS:
                parameters.add(f"mlp.experts.{'down_proj' if last == 'down_proj' else 'gate_up_proj'}")
            elif mixture and last in AMBIGUOUS:
                parameters.add(f"{within}.weight")
            else:
                modules.add(last)
    return sorted(modules), sorted(parameters), experts == EXPERTS


def _check_options(about: Mapping, where: str) -> None:
    if about.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type must be LORA, got {about.get('peft_type')!r}")
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{where}: needs a rank r of at least 1 and a number lora_alpha, got {rank!r} and {alpha!r}")
    for name, value in about.items():
        if name not in FREE and value and not (name == "bias" and value == "none"):
            raise ValueError(f"{where}: {name} is not implemented, got {value!r}; merge these adapters with PEFT")
    if about.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights must be true, false or 'gaussian', got {about['init_lora_weights']!r}; others "
            "may change the base; merge these adapters with PEFT"
        )
    patterns = about.get("rank_pattern") or {}, about.get("alpha_pattern") or {}
    fused = {FUSED: 2 * rank}, {FUSED: _doubled(alpha, bool(about.get("use_rslora")))}
    if patterns not in (({}, {}), fused):
        raise ValueError(
            f"{where}: all weights must have the same rank and alpha, got rank_pattern {patterns[0]} and alpha_pattern "
            f"{patterns[1]}; merge these adapters with PEFT"
        )


def _one_by_one(tensors: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The same with experts apart, as views. Fused ones are A [experts x rank, in], which gate and up share, and
    B [out, rank x experts]; their keys say no more than that a layer has one or two, but shapes tell which is which."""
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
    """Of a tensor by its key."""
    return item[1].shape[0 if item[0].endswith("lora_A.weight") else -1]


def _padded(key: str, x: np.ndarray, rank: int) -> np.ndarray:
    """With zeros up to a larger rank, which change nothing."""
    more = rank - _rank((key, x))
    return np.pad(x, ((0, more), (0, 0)) if key.endswith("lora_A.weight") else ((0, 0), (0, more)))


def _doubled(alpha: float, rslora: bool) -> float:
    """The alpha that keeps the scale at twice the rank."""
    return alpha * (math.sqrt(2) if rslora else 2)
