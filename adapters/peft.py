"""Loads and saves LoRA adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

PEFT on transformers 5 fuses a layer's experts into two weights, `gate_up_proj` and `down_proj`. Expert adapters are
written per expert, and PEFT fuses them when loading: gate and up become one adapter of twice the rank. Both forms can
be read. Of experts without a gate (Nemotron 3) PEFT does not fuse `up_proj`, which is written fused.

A fused module (`qkv_proj`) has one adapter in PEFT, where its parts have one each here. They are written as one of the
sum of their ranks, with a block-diagonal B; of any other B each part gets its rows, and all of A.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import xxhash

from .. import models
from ..core import param
from ..core.parts import Part
from ..models import lora, wrappers
from ..parallel import rules
from . import hf, safetensors
from .runtime import pattern_match
from .runtime.atomic_dir import replacing

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGEST = float(np.finfo(np.float32).max)
HIGHEST = 2**20  # rank; matrices have none that is higher
LORA_A, LORA_B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EXPERTS = {"expert_gate", "expert_up", "expert_down"}
# Names that PEFT takes for experts and routers anywhere in an MoE model.
AMBIGUOUS = {"gate_proj", "up_proj", "down_proj", "gate", "router"}
# Modules that PEFT does not adapt, by family: fused kernels read their weights past the adapter.
REFUSED = {"nemotron_h": "out_proj"}
# Options that do not change what the tensors compute, or only say where they belong, which the keys do too.
FREE = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


def save(path: str | os.PathLike, config, adapters, spec: lora.Lora, base: str = "") -> Path:
    """Writes a directory for `peft.PeftModel.from_pretrained` on the base; fp32, dropout 0.

    Written atomically, by rename; an existing directory is replaced if it holds adapters. With several processes all
    must call it. A manifest.json beside them, `{bytes, config, tensors: {name: {dtype, shape, xxh3_128}}}`, has the
    xxh3-128 of every tensor and of adapter_config.json: `load` compares them.

    Args:
      config: config of the base model.
      adapters: parameter tree of `lora.table`, jax or numpy arrays.
      base: path or hub name where PEFT finds the base.

    Raises:
      ValueError: the path is a file or another kind of directory, the adapters do not match, or PEFT, which fuses
        experts, cannot represent their targets.
    """
    return _write(path, config, adapters, spec, base, {}, uniform=False)


def write_published(
    root: str | os.PathLike, version: int, config, adapters, spec: lora.Lora, base: str | os.PathLike, base_label: str
) -> Path:
    """`save` to `root/{version}`, as a version of a policy whose base stays on the servers.

    Its manifest.json is `{version, base, bytes, config, tensors: {name: {dtype, shape, xxh3_128}}}`: `base` is the
    label of the published base and `config` the xxh3-128 of adapter_config.json, so a label derived from the manifest's
    hash covers base, adapters and scale. The scale is always written as alpha / rank, also for rslora, and all modules
    have the same rank (`exported_rank`), padded with zeros: servers support no other.

    Args:
      base: the published directory of the base, loaded by servers.
    """
    if version < 0:
        raise ValueError(f"write_published: version must be at least 0, got {version}")
    if spec.dora:
        raise ValueError("write_published: servers have no DoRA adapters by name, got dora; publish the merged model")
    spec = dataclasses.replace(spec, alpha=spec.scale * spec.rank, rslora=False)
    manifest = {"version": version, "base": base_label}
    return _write(Path(root) / str(version), config, adapters, spec, os.fspath(base), manifest, uniform=True)


def _write(path, config, adapters, spec: lora.Lora, base: str, manifest: dict, uniform: bool) -> Path:
    adapter_config = _config_json(config, spec, base, uniform)
    specs, arrays = _fused(config, adapters, spec, uniform)
    if jax.process_index() > 0:
        for _ in arrays:
            pass
        return Path(path)
    with replacing(path, _holds_adapters) as directory:
        entries = {name: safetensors.describe(name, tensor) for name, tensor in specs.items()}
        written = safetensors.write_file(directory / WEIGHTS, entries, arrays)
        text = (json.dumps(adapter_config, indent=2) + "\n").encode()
        safetensors.write_bytes(directory / CONFIG, text)
        sizes = sum(safetensors.size(entry) for entry in written.values())
        manifest |= {"bytes": sizes, "config": xxhash.xxh3_128_hexdigest(text), "tensors": written}
        safetensors.write_bytes(directory / hf.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return Path(path)


def _fused(config, adapters, spec: lora.Lora, uniform: bool):
    """`hf.tensors_of` in PEFT's form: B of a fused module is block-diagonal; with `uniform` all have the same rank."""
    config = wrappers.in_module(config)
    table = _ungated_fused(lora.table(models.table(config), spec))
    modules = _modules(table, config.prefix)
    most = exported_rank(config, spec) if uniform else 0

    def whole(key, x):
        if key.endswith(MAGNITUDE):
            return x
        x = _block_diagonal(x, modules[key].parts.values()) if key in modules and key.endswith(LORA_B) else x
        x = _padded(key, x, most) if uniform else x
        if x.ndim == 2:
            return x
        return x.reshape(-1, x.shape[-1]) if key.endswith(LORA_A) else x.transpose(1, 2, 0).reshape(x.shape[1], -1)

    def described(key, spec):
        if key.endswith(MAGNITUDE):
            return spec
        *_, out, into = spec.shape
        if len(spec.shape) == 3:
            E = spec.shape[0]
            shape = (E * (most or out), into) if key.endswith(LORA_A) else (out, E * (most or into))
            return jax.ShapeDtypeStruct(shape, spec.dtype)
        count = len(modules[key].parts) if key in modules else 1
        shape = (most or out, into) if key.endswith(LORA_A) else (out, most or into * count)
        return jax.ShapeDtypeStruct(shape, spec.dtype)

    specs, arrays = hf.tensors_of(table, config.prefix, adapters, "float32")
    pairs = zip(specs, arrays, strict=True)
    return {key: described(key, spec) for key, spec in specs.items()}, (whole(key, x) for key, x in pairs)


def _ungated_fused(table: param.Table) -> param.Table:
    """The table of adapters with those of a layer's `expert_up` as one tensor where experts have no gate; PEFT wraps
    up_proj first, so that it is the inner module if down_proj has an adapter too."""

    def one(p: param.Param, stack: param.Stack) -> param.Param:
        inner = "base_layer." if "expert_down_a" in stack.params else ""
        return dataclasses.replace(p, keys=tuple(key.replace("{expert}.up_proj.", inner) for key in p.keys))

    def each(stack: param.Stack) -> param.Stack:
        up = {"expert_up_a", "expert_up_b"} if "expert_gate_a" not in stack.params else set()
        return param.Stack(stack.layers, {n: one(p, stack) if n in up else p for n, p in stack.params.items()})

    return dataclasses.replace(table, stacks=tuple(map(each, table.stacks)))


class Fused(NamedTuple):
    """A matrix whose parts are leaves: its shape, and the parts by the leaves' names, in their order."""

    shape: tuple[int, ...]
    parts: dict[str, Part]


def _modules(table: param.Table, prefix: str) -> dict[str, Fused]:
    """The fused matrices of the layers by key."""
    found: dict[str, Fused] = {}
    for leaves in param.by_tensor(table):
        parts = {_name(leaf): leaf.param.part for leaf in leaves if leaf.param.part}
        if parts and len(leaves[0].stored_shape) == 2:
            fused = Fused(leaves[0].stored_shape, dict(sorted(parts.items(), key=lambda item: item[1].start)))
            found |= dict.fromkeys((key for key, *_ in leaves[0].keys(prefix).values()), fused)
    return found


def _block_diagonal(rows: np.ndarray, parts: Collection[Part]) -> np.ndarray:
    """B of a fused module: each part's rows of `rows` [out, rank] in columns of its own, [out, rank x parts]."""
    rank = rows.shape[1]
    whole = np.zeros((len(rows), rank * len(parts)), rows.dtype)
    for i, part in enumerate(parts):
        part.put(whole[:, i * rank : (i + 1) * rank], part.take(rows))
    return whole


def _blocks(b: np.ndarray, parts: Mapping[str, Part], rank: int) -> tuple[str, ...]:
    """Names of the parts whose adapters are the blocks of a B, in turn; () if it is not block-diagonal."""
    count = b.shape[1] // rank
    held = {name: part for name, part in parts.items() if count == len(parts) or part.take(b).any()}
    if b.shape[1] != rank * len(held):
        return ()
    rows = np.zeros((len(b), rank), b.dtype)
    for i, part in enumerate(held.values()):
        part.put(rows, part.take(b[:, i * rank : (i + 1) * rank]))
    return tuple(held) if np.array_equal(_block_diagonal(rows, held.values()), b) else ()


def _split_parts(tensors: Mapping[str, np.ndarray], base: param.Table, prefix: str, rank: int, where: str):
    """Splits adapters of fused modules into those of their parts, as views if possible, with the keys of `_apart`."""
    out = dict(tensors)
    stems = {f"base_model.model.{key.removesuffix('weight')}": of for key, of in _modules(base, prefix).items()}
    stems = {stem: of for stem, of in stems.items() if {f"{stem}{LORA_A}", f"{stem}{LORA_B}"} & out.keys()}
    blocks: dict[str, set[tuple[str, ...]]] = {}  # by module name, those of any layer
    for stem, (shape, parts) in stems.items():
        if missing := [key for key in (f"{stem}{LORA_A}", f"{stem}{LORA_B}") if key not in out]:
            raise ValueError(f"{where}: adapters must cover their targets in full, got {hf.complaint(missing, [])}")
        a, b = out[f"{stem}{LORA_A}"], out[f"{stem}{LORA_B}"]
        if (len(b), a.shape[1]) != shape or len(a) != b.shape[1]:
            raise ValueError(
                f"{where}: {stem}{LORA_A} and {LORA_B} must be [rank, {shape[1]}] and [{shape[0]}, rank] by "
                f"config.json, got {list(a.shape)} and {list(b.shape)}"
            )
        if len(m := out.get(f"{stem}{MAGNITUDE}", b)) != shape[0]:
            raise ValueError(f"{where}: {stem}{MAGNITUDE} must be [{shape[0]}] by config.json, got {list(m.shape)}")
        blocks.setdefault(stem.split(".")[-2], set()).add(_blocks(b, parts, rank))
    for stem, (_, parts) in stems.items():
        a, b, magnitude = out.pop(f"{stem}{LORA_A}"), out.pop(f"{stem}{LORA_B}"), out.pop(f"{stem}{MAGNITUDE}", None)
        held, *others = blocks[stem.split(".")[-2]]
        alike = held and not others and (magnitude is None or len(held) == len(parts))
        for name, part in parts.items():
            if alike and name not in held:
                continue
            cut = slice(held.index(name) * rank, (held.index(name) + 1) * rank) if alike else slice(None)
            out |= {f"{stem}{LORA_A} ({name})": a[cut], f"{stem}{LORA_B} ({name})": part.take(b[:, cut])}
            if magnitude is not None:
                out[f"{stem}{MAGNITUDE} ({name})"] = part.take(magnitude)
    return out


def _apart(table: param.Table) -> param.Table:
    """The table of adapters with those of each part of a fused module as tensors of their own, "... (q)"."""

    def each(name, p):
        keys = tuple(f"{key} ({name[:-2]})" for key in p.keys)
        return dataclasses.replace(p, part=None, keys=keys) if p.part else p

    stacks = (param.Stack(stack.layers, {n: each(n, p) for n, p in stack.params.items()}) for stack in table.stacks)
    return dataclasses.replace(table, stacks=tuple(stacks))


def exported_rank(config, spec: lora.Lora) -> int:
    """The largest rank of a module in PEFT's form: that of a fused one is the sum over its parts."""
    config = wrappers.in_module(config)
    modules = _modules(lora.table(models.table(config), spec), config.prefix)
    return spec.rank * max((len(fused.parts) for fused in modules.values()), default=1)


def verify(path: str | os.PathLike) -> dict | None:
    """Compares a directory of adapters with its manifest.json; returns the manifest, or None without one.

    Raises:
      ValueError: it does not match the manifest, or is not a directory of adapters.
    """
    return _read(_complete(path))[2]


def read_options(path: str | os.PathLike) -> dict:
    """The adapter_config.json of a directory of adapters, compared with its manifest.json, as `verify`."""
    path = _complete(path)
    return _options(path, hf.read_manifest(path, safetensors.read(path / WEIGHTS)))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict, dict | None]:
    """(tensors, options, manifest), each of one reading, which match: the directory may be replaced meanwhile."""
    stored = safetensors.read(path / WEIGHTS)
    manifest = hf.read_manifest(path, stored)
    if manifest is not None:
        with _or_without():
            hf.compare(path, manifest, stored)
    return stored, _options(path, manifest), manifest


def _options(path: Path, manifest: Mapping | None) -> dict:
    text = hf.read_bytes(path / CONFIG)
    if manifest is not None and xxhash.xxh3_128_hexdigest(text) != manifest.get("config"):
        with _or_without():
            raise ValueError(f"{path}: {CONFIG} does not match {hf.MANIFEST}; copy the checkpoint again")
    return hf.json_object(text, path / CONFIG)


@contextlib.contextmanager
def _or_without() -> Iterator[None]:
    """Says what else helps where adapters do not match their manifest."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}, or delete {hf.MANIFEST} if the adapters were changed on purpose") from None


def host_copy(config, adapters, spec: lora.Lora):
    """`hf.host_copy` of adapters, in fp32."""
    return hf.copied(lora.table(models.table(config), spec), adapters, "float32")


def load(path: str | os.PathLike, config, mesh=None):
    """Loads (spec, adapters in fp32) from a directory written by PEFT or `save`, for a base with this config.

    Args:
      mesh: as in `hf.load`.

    Raises:
      ValueError: not a directory of adapters, another content than its manifest.json says, options that are not
        implemented, or by which PEFT would leave out a module that has tensors, ranks that differ between weights, or
        missing, unexpected or misshapen tensors, or numbers that are not finite, by name.
    """
    path, config = _complete(path), wrappers.in_module(config)
    stored, options, _ = _read(path)
    base = models.table(config)
    fused = {"gate_up_proj", *(key.split(".")[-2] for key in _modules(base, config.prefix))}
    _check_options(options, f"{path / CONFIG}", set(map(_pattern, fused)))
    _check_targets(options, stored, config, f"{path / CONFIG}")
    for key, tensor in stored.items():
        kind, axes = ("vector", 1) if key.endswith(MAGNITUDE) else ("matrix", 2)
        if tensor.ndim != axes:
            raise ValueError(f"{path}: {key:.200} must be a {kind}, got {list(tensor.shape)}; copy the adapters again")
        if bad := safetensors.count_nonfinite(tensor):
            raise ValueError(
                f"{path}: {bad} of the {tensor.size} numbers of {key:.200} are not finite; use other adapters"
            )
    rslora, rank, alpha = bool(options.get("use_rslora")), options["r"], float(options["lora_alpha"])
    tensors = _as_in_files(_split_experts(stored, base, str(path)), base, config.prefix)
    tensors = _split_parts(tensors, base, config.prefix, rank, str(path))
    factors = {key: x for key, x in tensors.items() if MAGNITUDE not in key}
    most = max(map(_rank, factors.items()), default=rank)
    if options.get("rank_pattern") and most > rank and most % rank == 0:  # fused and saved by PEFT
        rank, alpha = most, _raised(alpha, most // rank, rslora)
        tensors |= {key: _padded(key, x, rank) for key, x in factors.items()}
    spec = lora.Lora(rank, alpha, ("*",), rslora)
    present = lambda leaf: any(key in tensors for (key, *_) in leaf.keys(config.prefix).values())
    found = {_name(leaf)[:-2] for leaf in param.leaf_list(_apart(lora.table(base, spec))) if present(leaf)}
    names = tuple(name for name in lora.targets(base, spec) if name in found)
    if not names:
        raise ValueError(f"{path / WEIGHTS}: must hold adapters of a {config.family}, got {hf.listed([*tensors])}")
    spec = dataclasses.replace(spec, targets=names, dora=bool(options.get("use_dora")))
    table = _apart(lora.table(base, spec))
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


def _pattern(module: str) -> str:
    """The key of a module in PEFT's rank_pattern."""
    return rf".*\.{module}"


def _complete(path: str | os.PathLike) -> Path:
    path = Path(path)
    for name in (WEIGHTS, CONFIG):
        if not (path / name).is_file():
            raise ValueError(f"{path}: adapters need {WEIGHTS} and {CONFIG}, got no {name}; is it the right directory?")
    return path


def _name(leaf: param.Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _holds_adapters(path: Path) -> bool:
    """Whether a folder holds adapters, or what is left of some that `save` wrote."""
    found = any((path / name).is_file() for name in (CONFIG, WEIGHTS))
    return found or {"tensors", "config"} <= hf.left_manifest(path).keys()


def _config_json(config, spec: lora.Lora, base: str, uniform: bool) -> dict:
    table = models.table(config)
    modules, parameters, experts = _targets(config, table, spec)
    times = {_pattern("gate_up_proj"): 2} if experts else {}  # rank of a module, in ranks of a weight
    if uniform:
        most = exported_rank(config, spec)
        spec = dataclasses.replace(spec, rank=most, alpha=_raised(spec.alpha, most // spec.rank, spec.rslora))
    else:
        fused = _modules(lora.table(table, spec), config.prefix).items()
        times |= {_pattern(key.split(".")[-3]): len(of.parts) for key, of in fused if len(of.parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.prefix and not config.score_head else None,
        "base_model_name_or_path": base or None,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rslora,
        **({"use_dora": True} if spec.dora else {}),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "target_parameters": parameters or None,
        **_only_in_text(config),
        "rank_pattern": {pattern: n * spec.rank for pattern, n in times.items()},
        "alpha_pattern": {pattern: _raised(spec.alpha, n, spec.rslora) for pattern, n in times.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _only_in_text(config) -> dict[str, str]:
    """Keeps PEFT from giving adapters to modules of a wrapper's other parts, which have the same names."""
    if not wrappers.wraps(config):
        return {}
    return {"exclude_modules": rf"(?!{re.escape(wrappers.in_module(config).prefix)}layers\.).*"}


def _targets(config, table: param.Table, spec: lora.Lora) -> tuple[list[str], list[str], bool]:
    """PEFT's target_modules and target_parameters, and whether PEFT fuses gate and up projections."""
    names = set(lora.targets(table, spec))
    experts, gated = names & EXPERTS, _gated(table)
    if gated and experts not in (set(), {"expert_down"}, EXPERTS):
        raise ValueError(
            f"peft: adapters of experts must be of {', '.join(sorted(EXPERTS))}, or only of expert_down, "
            f"got {', '.join(sorted(experts))}; export the merged model instead"
        )
    mixture = "experts" in table.dims
    modules, parameters = set(), set()
    leaves = [leaf for leaf in param.leaf_list(table) if leaf.layers is not None and _name(leaf) in names]
    rearranged = lambda leaf: leaf.param.part and (leaf.param.part.transposed or len(leaf.stored_shape) != 2)
    if bad := sorted({_name(leaf) for leaf in leaves if rearranged(leaf)}):
        raise ValueError(
            f"peft: lora.targets must be matrices [out, in] in checkpoints, got {', '.join(bad)}, which "
            f"{config.family} stores fused or transposed; leave them out"
        )
    for leaf in leaves:
        for *_, key in leaf.keys(config.prefix).values():  # the last is the name in transformers' module
            within = key.removesuffix(".weight").partition("layers.")[2].partition(".")[2]
            last = within.rpartition(".")[2]
            if last == REFUSED.get(config.family):
                raise ValueError(f"peft: lora.targets must not have {_name(leaf)}, {last}, which PEFT refuses to adapt")
            if _name(leaf) in EXPERTS:
                fused = gated and _name(leaf) != "expert_down"
                parameters.add(f"{within.rsplit('.', 2)[0]}.{'gate_up_proj' if fused else last}")
            elif mixture and last in AMBIGUOUS:
                parameters.add(f"{within}.weight")
            else:
                modules.add(last)
    if spec.dora:
        _check_dora(leaves, parameters)
    return sorted(modules), sorted(parameters), experts == EXPERTS


def _check_dora(leaves: Iterable[param.Leaf], parameters: Collection[str]) -> None:
    """Raises ValueError if PEFT cannot represent DoRA of the leaves: its magnitudes are of whole modules."""
    if parameters:
        raise ValueError(
            f"peft: lora.dora must be of modules, got {', '.join(sorted(parameters))}, which PEFT adapts as "
            "parameters, without DoRA; leave them out of lora.targets"
        )
    taken: dict[tuple[str, tuple[int, ...] | None], list[param.Leaf]] = {}
    for leaf in leaves:
        if leaf.param.part:
            taken.setdefault((leaf.param.keys[0], leaf.layers), []).append(leaf)
    for shared in taken.values():
        parts = [leaf.param.part for leaf in shared if leaf.param.part]
        if sum(part.stop - part.start for part in parts) < parts[0].width:
            raise ValueError(
                f"peft: lora.dora must be of all parts of a fused module, got {', '.join(map(_name, shared))} of "
                f"{shared[0].param.keys[0]}; name all in lora.targets, or none"
            )


def _gated(table: param.Table) -> bool:
    """Whether experts have a gate."""
    return any("expert_gate" in stack.params for stack in table.stacks)


def _check_options(options: Mapping, where: str, fused: Collection[str]) -> None:
    """Checks an adapter_config.json; modules that match the patterns `fused` may have a multiple of the rank."""
    if options.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type must be LORA, got {options.get('peft_type')!r:.80}")
    rank, alpha, rslora = options.get("r"), options.get("lora_alpha"), options.get("use_rslora")
    if type(rank) is not int or not 0 < rank <= HIGHEST:
        raise ValueError(f"{where}: r, the rank, must be a whole number above 0, at most {HIGHEST}, got {rank!r:.80}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= LARGEST:
        raise ValueError(f"{where}: lora_alpha must be a number above 0 that float32 holds, got {alpha!r:.80}")
    for name in ("use_rslora", "use_dora"):
        if (value := options.get(name)) is not None and type(value) is not bool:
            raise ValueError(f"{where}: {name} must be true or false, got {value!r:.80}")
    for name, value in options.items():
        if name not in FREE and value and not (name == "bias" and value == "none"):
            raise ValueError(
                f"{where}: {name:.80} is not implemented, got {value!r:.80}; merge these adapters with PEFT"
            )
    if options.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights must be true, false or 'gaussian', got {options['init_lora_weights']!r:.80}; "
            "others may change the base; merge these adapters with PEFT"
        )
    ranks, alphas = options.get("rank_pattern") or {}, options.get("alpha_pattern") or {}
    known = isinstance(ranks, dict) and all(
        name in fused and type(n) is int and n > 0 and n % rank == 0 for name, n in ranks.items()
    )
    if not known or alphas != {name: _raised(alpha, n // rank, bool(rslora)) for name, n in ranks.items()}:
        raise ValueError(
            f"{where}: all weights must have the same rank and alpha, got rank_pattern {ranks!r:.80} and "
            f"alpha_pattern {alphas!r:.80}; merge these adapters with PEFT"
        )


def _check_targets(options: Mapping, keys: Iterable[str], config, where: str) -> None:
    """Raises ValueError if the options leave out a module that has adapters in the file, by the rules of PEFT's
    `check_target_module_exists` and `_inject_parameters`: PEFT would compute another model."""
    modules = _adapted(keys, config)
    targets, excluded, parameters, pattern = (
        options.get(name) or [] for name in ("target_modules", "exclude_modules", "target_parameters", "layers_pattern")
    )
    pattern = [pattern] if isinstance(pattern, str) else pattern
    layers = options.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or []
    for name, value in (
        ("target_modules", [] if isinstance(targets, str) else targets),
        ("exclude_modules", [] if isinstance(excluded, str) else excluded),
        ("target_parameters", parameters),
        ("layers_pattern", pattern),
    ):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{where}: {name} must be names, got {value!r:.80}")
    if not isinstance(layers, list) or not all(type(one) is int for one in layers):
        raise ValueError(f"{where}: layers_to_transform must be numbers of layers, got {layers!r:.80}")
    if bad := [one for one in pattern if not re.fullmatch(r"[\w.]+", one)]:
        raise ValueError(f"{where}: layers_pattern must be names of modules, got {bad[0]!r:.80}")

    def those(name: str, value: str | list[str]) -> set[str]:
        if not isinstance(value, str):
            wanted = set(value)
            return {one for one in modules if one in wanted or any(one[at:] in wanted for at in _starts(one))}
        if value == _only_in_text(config).get(name):
            return {one for one in modules if re.fullmatch(value, one)}
        try:
            return pattern_match.fullmatches(value, sorted(modules))
        except ValueError as error:
            raise ValueError(f"{where}: {name} {error}, got {value!r:.80}; merge these adapters with PEFT") from None

    everything = isinstance(targets, str) and targets.lower() == "all-linear"
    number = re.compile(rf"(?:.*?\.)?(?:{'|'.join(map(re.escape, pattern)) or '[^.]*'})\.(\d+)\.")
    in_layers = {one for one in modules if (at := number.match(one)) and int(at[1]) in layers}
    whole = set() if isinstance(targets, str) else set(targets)  # whole names count in all layers
    of_parameters = _of_parameters(parameters, modules)
    for name, fits in (
        ("target_modules", modules if everything else those("target_modules", targets)),
        ("layers_to_transform", in_layers | whole if layers else modules),
        ("exclude_modules", modules - those("exclude_modules", excluded)),
    ):
        if left := sorted(modules - fits - of_parameters):
            raise ValueError(
                f"{where}: {name} must not leave out modules that have adapters in {WEIGHTS}, got {len(left)}, first "
                f"{left[0]:.120}; use both files as PEFT wrote them"
            )


def _adapted(keys: Iterable[str], config) -> set[str]:
    """The modules that have adapters, under their names in transformers' module."""
    spelt = (names for leaf in param.leaf_list(models.table(config)) for names in leaf.keys(config.prefix).values())
    names = {first.removesuffix(".weight"): last.removesuffix(".weight") for first, last in map(_ends, spelt)}
    found = (re.fullmatch(r"base_model\.model\.(.*?)(?:\.base_layer)*\.lora_[AB]\.weight", key) for key in keys)
    return {names.get(one[1], one[1]) for one in found if one}


def _ends(names: Sequence[str]) -> tuple[str, str]:
    """The first and the last."""
    return names[0], names[-1]


def _starts(module: str) -> Iterable[int]:
    """Where the parts of a module's name begin, but the first."""
    return (at + 1 for at, letter in enumerate(module) if letter == ".")


def _of_parameters(parameters: Iterable[str], modules: Iterable[str]) -> set[str]:
    """The modules whose adapters are those of `target_parameters`: experts together, each expert, or the module that
    has the parameter."""
    found = set()
    for within, _, name in (one.rpartition(".") for one in parameters):
        each = "gate_proj|up_proj" if name == "gate_up_proj" else re.escape(name)
        of = re.compile(rf"(?:.*\.)?{re.escape(within or 'experts')}(?:\.\d+\.(?:{each}))?")
        found |= {module for module in modules if of.fullmatch(module)}
    return found


def _as_in_files(tensors: Mapping[str, np.ndarray], base: param.Table, prefix: str) -> dict[str, np.ndarray]:
    """The adapters under the names of the base's weights in files: PEFT saves those of transformers' modules."""
    stem = lambda key: f"base_model.model.{key.removesuffix('weight')}"
    spelt = (keys for leaf in param.leaf_list(base) for keys in leaf.keys(prefix).values())
    written = {stem(other): stem(first) for first, *others in spelt for other in others}
    parts = ((key.partition("lora_"), x) for key, x in tensors.items())
    return {f"{written.get(head, head)}{lora}{rest}": x for (head, lora, rest), x in parts}


def _split_experts(tensors: Mapping[str, np.ndarray], base: param.Table, where: str) -> dict[str, np.ndarray]:
    """Splits fused expert adapters into one per expert, as views. Fused ones are A [experts x rank, in], shared by gate
    and up, and B [out, rank x experts]; their keys do not name the projection, but their shapes identify it, unless
    experts without a gate are square: then the inner module is up_proj, and the outer down_proj."""
    out, dims, gated = dict(tensors), base.dims, _gated(base)
    for key, a in tensors.items() if "experts" in dims else ():
        stem = key.removesuffix("lora_A.weight")
        at = stem.removesuffix("base_layer.")
        if stem == key or not at.endswith(".experts.") or f"{stem}lora_B.weight" not in tensors:
            continue
        b, E, D, F = tensors[f"{stem}lora_B.weight"], dims["experts"], dims["expert_embed"], dims["expert_ffn"]
        if not gated and D == F and at == stem and f"{stem}base_layer.lora_A.weight" not in tensors:
            raise ValueError(
                f"{where}: adapters of experts with as many inputs as hidden units must be of up_proj and down_proj, "
                f"got one of the two, {stem}; merge these adapters with PEFT"
            )
        halves = {(2 * F, D): {"gate_proj": slice(F), "up_proj": slice(F, None)}}
        up = halves if gated else {(F, D): {"up_proj": slice(None)}}
        down = {(D, F): {"down_proj": slice(None)}}
        rows = down | up if at != stem else up | down
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
    return item[1].shape[-2 if LORA_A in item[0] else -1]


def _padded(key: str, x: np.ndarray, rank: int) -> np.ndarray:
    """Zero-pads an adapter to a larger rank, which does not change its product."""
    more = rank - _rank((key, x))
    return np.pad(x, [*[(0, 0)] * (x.ndim - 2), *(((0, more), (0, 0)) if LORA_A in key else ((0, 0), (0, more)))])


def _raised(alpha: float, times: int, rslora: bool) -> float:
    """The alpha that gives the same scale at `times` the rank."""
    return alpha * (math.sqrt(times) if rslora else times)
