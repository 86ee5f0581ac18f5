"""Loads and saves Hugging Face checkpoints of every family, driven by the families' parameter tables.

Weights keep Hugging Face's orientation, so loading stacks the tensors of layers into leaves and saving splits them
again; leaves may also be parts of fused tensors (`core.parts`). Leaves are read, and tensors written, one at a time;
there is never a second copy of a model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from .. import models
from ..core import param
from ..core.parts import Part
from ..models import config_json, mtp, wrappers
from ..models.layers import score_head as heads
from ..models.layers.score_head import ScoreHead
from ..parallel import rules
from ..rollout.servers.labels import MANIFEST as MANIFEST
from . import safetensors
from . import tokenizer as tokenizers
from .runtime import passed
from .runtime.atomic_dir import replacing

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
SCALAR = ScoreHead()
HEADS = ("head", "score")  # leaves missing in checkpoints of backbones or of models with another head
# Buffers in old checkpoints that are derived from config.json.
BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
PIECE, LARGE = 1 << 22, 1 << 25  # numbers that a thread reads at once, and that are on the host at once
FLOATS = {np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


# -- loading -------------------------------------------------------------------------------------


def read_config(path: str | os.PathLike):
    """The Config of a checkpoint directory; its stop tokens are those of config.json and generation_config.json, or if
    neither has any, the tokenizer's.

    Raises:
      ValueError: the path is missing or not a directory, config.json is missing or malformed, or the architecture or
        an option is not supported.
    """
    path, generation = Path(path), {}
    if not path.exists():
        raise ValueError(f"{path}: a checkpoint must be a directory that exists (`hf download` fetches one)")
    if not path.is_dir():
        raise ValueError(f"{path}: a checkpoint must be a directory, got a file; name the one that holds config.json")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: a checkpoint needs config.json, got none; is this the right directory?")
    hf = read_json(path / "config.json")
    try:
        config = models.config_from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{path}/{error}") from error
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        config_json.check(generation, f"{path}/generation_config.json")
    return dataclasses.replace(config, eos=_stop_ids(config, generation, path))


def _stop_ids(config, generation: Mapping, path: Path) -> tuple[int, ...]:
    """The tokens that end a completion: those of a model's two files, else those of the tokenizer in its folder.

    SGLang takes the tokenizer's as well; without any no completion would ever end.
    """
    eos = generation.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if named := tuple(dict.fromkeys((*config.eos, *eos))):
        return named
    if not any((path / name).is_file() for name in tokenizers.FILES):
        return ()
    return tuple(id for id in tokenizers.stop_ids(tokenizers.load(path)) if id < config.vocab)


def load(
    path: str | os.PathLike, dtype="float32", mesh=None, init_missing: Sequence[str] = (), vision: bool = False,
    score_head: ScoreHead = SCALAR,
):  # fmt: skip
    """Loads (config, params) of a checkpoint of any family; missing and unexpected tensors are errors.

    With tied embeddings, an `lm_head` is accepted if it equals them. A `score.weight` gives a score head, with labels
    and bias as the architecture in config.json has them, else as they are there; such a model needs no `lm_head`. Keys
    may lack the prefix "model." (backbones). Of a wrapper this is the text model (`models/wrappers.py`). Tensors that
    the model does not use are listed in the config and not read; `save` copies them from `path`.

    Args:
      dtype: dtype of the parameters; None = as stored, in a stack of layers the narrowest that holds all.
      mesh: a Mesh over which weights are sharded according to `parallel.rules`; each device reads only its shard. None
        = the default device.
      init_missing: heads among "score" and "head" that are randomly initialised if the checkpoint lacks them.
      score_head: the score head that is initialised if init_missing has "score" and the checkpoint has none.
      vision: also loads a wrapper's vision tower (`models.with_vision`), `params["vision"]`, so that the model reads
        images.

    Raises:
      ValueError: as `read_config` and `check`; a truncated checkpoint; missing, unexpected or misshapen tensors, by
        name; as `models.with_vision`.
    """
    config, stored = read_config(path), safetensors.read(path)
    config = models.with_vision(config) if vision else config
    config, params = from_tensors(config, stored, str(path), dtype, mesh, init_missing, score_head)
    check(path, stored, skip=config.rest.names if config.rest else ())
    return passed.loaded(config, path), params


def check(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], skip: Collection[str] = ()) -> None:
    """Checks that a checkpoint's tensors match its manifest.json, if it has one, and are finite.

    In a job of several processes each checks its share of the tensors.

    Args:
      skip: names of tensors that are not read.

    Raises:
      ValueError: names the first tensor that does not match, or has numbers that are not finite, and how many.
    """
    skipped = set(skip)
    names = [name for name in tensors if name not in skipped][jax.process_index() :: jax.process_count()]
    path = Path(path)
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if manifest is not None:
        _compare_names(path, manifest, tensors)

    def checked(name: str) -> int:
        if manifest is not None:
            _compare_tensor(path, manifest, name, tensors[name])
        count = safetensors.count_nonfinite(tensors[name])
        safetensors.forget(tensors[name])
        return count

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        counts = dict(zip(names, pool.map(checked, names), strict=True))
    bad = [name for name, count in counts.items() if count]
    if bad:
        others = f" (as in {len(bad) - 1} other tensors)" if bad[1:] else ""
        raise ValueError(
            f"{path}: {counts[bad[0]]} of the {tensors[bad[0]].size} numbers of {bad[0]} are not finite{others}; "
            "use another checkpoint"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """A leaf as lazily read tensors of its layers.

    Attributes:
      tensors: tensors by their index along the leading axes.
      dtype: dtype of the layers that `leaf[i]` returns.
      part: the part of each tensor that the leaf has; None = all of it.
    """

    tensors: Mapping[tuple[int, ...], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype
    part: Part | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: int) -> np.ndarray:
        """Layer i, a view of the file if possible."""
        return self.at((i,)).astype(self.dtype, copy=False)

    def at(self, index: tuple[int, ...]) -> np.ndarray:
        """The leaf's entries of one tensor, or of all below an index, as stored, or dequantised."""
        if index not in self.tensors:
            return np.stack([self.at(at) for at in self.below(index)])
        return self.part.take(self.tensors[index]) if self.part else self.tensors[index][...]

    def below(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The indices of the tensors that begin with an index."""
        return [at for at in self.tensors if at[: len(index)] == index]

    def read(self) -> np.ndarray:
        """All layers, a copy; pages of the files are not kept."""
        host = np.empty(self.shape, self.dtype)
        for index, tensor in self.tensors.items():
            host[index] = self.at(index)
            safetensors.forget(tensor)
        return host


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """A leaf that `save` reads, by `read() -> array`, when it writes it, and does not keep."""

    read: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: np.dtype


def mapped(path: str | os.PathLike, dtype="float32", vision: bool = False):
    """(config, params, verify) of a checkpoint, as strict as `load`, for reading each weight once: files are memory-
    mapped, stacked leaves are `Mapped`, others numpy arrays. `verify()` is the function `verify` on those bytes."""
    config, stored = read_config(path), safetensors.read(path)
    config = models.with_vision(config) if vision else config
    config, params = mapped_tensors(config, stored, str(path), dtype)
    return passed.loaded(config, path), params, functools.partial(_verified, Path(path), stored)


def mapped_tensors(config, tensors: Mapping[str, np.ndarray], where: str, dtype="float32"):
    """(config, params) as `mapped`, from tensors by checkpoint key that are read when they are indexed."""
    config, tree, tensors, keys, _ = _matched(config, tensors, where)
    return config, _views(tree, tensors, keys, dtype)


def mapped_mtp(path: str | os.PathLike, config, dtype="float32"):
    """The weights of `models.mtp` in a checkpoint of this config, as `mapped` gives the model's; None without any.

    Raises:
      ValueError: some are missing or misshapen; names them.
    """
    if not mtp.known(config):
        return None
    table, where = mtp.table(config), str(path)
    tensors, keys = _found(table, passed.opened(config, safetensors.read(path), where), config.prefix)
    names = [key for found in keys.values() for key in found]
    missing = [key for key in names if key not in tensors]
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(
            f"{where}: drafts by multi-token prediction need all of its layer, got {complaint(missing, ())}; complete "
            "it, or serve with --draft 1"
        )
    for leaf in param.leaf_list(table):
        for key in keys[leaf.path]:
            check_tensor(key, tensors[key], leaf, where)
    return _views(param.leaves(table), tensors, keys, dtype)


def _views(tree, tensors: Mapping[str, np.ndarray], keys: Mapping[str, Sequence[str]], dtype):
    """The leaves as `Mapped`, or numpy arrays."""

    def view(leaf):
        held = [tensors[key] for key in keys[leaf.path]]
        wanted = np.dtype(leaf.param.dtype or dtype or _common_dtype(held))
        lazy = Mapped(
            dict(zip(np.ndindex(*leaf.unstacked_shape), held, strict=True)), leaf.shape, wanted, leaf.param.part
        )
        return lazy if leaf.unstacked_shape else lazy.at(()).astype(wanted, copy=False)

    return jax.tree.map(view, tree, is_leaf=lambda x: isinstance(x, param.Leaf))


def loaded_config(
    path: str | os.PathLike, init_missing: Sequence[str] = (), score_head: ScoreHead = SCALAR, vision: bool = False
):
    """The Config that `load` gives, which depends on the tensors that are there; weights are not read."""
    config = models.with_vision(read_config(path)) if vision else read_config(path)
    config, *_ = _matched(config, safetensors.read(path), str(path), init_missing, score_head)
    return passed.loaded(config, path)


@dataclasses.dataclass(frozen=True, eq=False)
class Cast:
    """A leaf on devices, sharded or not, that is read layer by layer as `save` would write it.

    Attributes:
      array: an array, or what `param.plain` makes one.
      saved: dtype that `save` rounds to.
      dtype: dtype that it is read in after that.
    """

    array: Any
    shape: tuple[int, ...]
    saved: np.dtype
    dtype: np.dtype

    def merged(self) -> Cast:
        """The leaf as an array, adapters merged."""
        if not param.composite(self.array):
            return self
        with _own_mesh(self.array):
            return dataclasses.replace(self, array=param.plain(self.array))

    def __getitem__(self, index):
        """Layer i, or the array itself at (): a view if it is in host memory and needs no cast."""
        x = self.array
        if on_host(x):
            return np.asarray(x)[index].astype(self.saved, copy=False).astype(self.dtype, copy=False)
        with _own_mesh(x):
            return _cut(None)(x, index, self.saved).astype(self.dtype)


def cast(config, params, dtype):
    """The parameters as `mapped` in this dtype would give those that `save` has written, without copies: as `Cast`."""
    saved = save_dtype(config, params)
    one = lambda leaf, x: Cast(x, tuple(x.shape), *(np.dtype(leaf.param.dtype or to) for to in (saved, dtype)))
    return param.tree_map(one, models.table(config), params)


def _own_mesh(x):
    """A context with the mesh of an array's own devices."""
    sharding = jax.tree.leaves(x)[0].sharding
    own = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return jax.set_mesh(own if isinstance(own, Mesh) else Mesh(np.array([*sharding.device_set]), ("one",)))


def from_tensors(
    config, tensors: Mapping[str, np.ndarray], where: str, dtype="float32", mesh=None, init_missing=(),
    score_head: ScoreHead = SCALAR,
):  # fmt: skip
    """(config, params) from tensors by checkpoint key, as strict as `load`; error messages start with `where`."""
    config, _, tensors, keys, drawn = _matched(config, tensors, where, init_missing, score_head)
    table = models.table(config)
    shardings = () if mesh is None else (rules.of_params(table, mesh),)

    def fill(leaf, sharding=None):
        if leaf.path in drawn:
            one = param.Table({leaf.path: leaf.param}, (), table.dims)
            return jax.jit(lambda: param.init(jax.random.key(0), one)[leaf.path], out_shardings=sharding)()
        return place(leaf, [tensors[key] for key in keys[leaf.path]], dtype, sharding)

    return config, param.tree_map(fill, table, *shardings)


def _matched(config, tensors: Mapping[str, np.ndarray], where: str, init_missing=(), score_head: ScoreHead = SCALAR):
    """(config, leaves of its table, tensors, keys of each leaf, leaves to initialise); ValueError on mismatch."""
    if not set(init_missing) <= set(HEADS):
        raise ValueError(f"{where}: init_missing may hold {' and '.join(HEADS)}, got {list(init_missing)}")
    tensors = passed.opened(config, tensors, where)
    spelt_as = wrappers.prefixes(config)
    starts = lambda prefix: any(key.startswith((f"{prefix}embed_tokens.", f"{prefix}layers.")) for key in tensors)
    prefix = next(filter(starts, spelt_as), spelt_as[0])
    stated = config.score_head
    scored = stated or heads.found(tensors) or (score_head if "score" in init_missing else None)
    if scored and config.vision:
        raise ValueError(f"{where}: a model with a score head reads no images; load it without its vision tower")
    config = dataclasses.replace(config, prefix=prefix, score_head=scored)
    head, embed = wrappers.head(config), f"{prefix}embed_tokens.weight"
    if not wrappers.states_tying(config) and {head, embed} <= tensors.keys():  # as in transformers, files decide
        config = dataclasses.replace(config, tied=equal(tensors[head], tensors[embed]))
    if head not in tensors and (stated or heads.found(tensors)):
        config = dataclasses.replace(config, output_head=config.tied or "head" in init_missing)
    table = models.table(config)
    rest = tuple(key for key in tensors if table.leaves_out(key))
    tensors = {key: tensor for key, tensor in tensors.items() if not table.leaves_out(key)}
    tree = param.leaves(table)
    tensors, keys = _found(table, tensors, prefix)
    drawn = {name for name in init_missing if name in table.top and keys[name][0] not in tensors}
    if "score" in drawn:
        drawn |= table.top.keys() & set(heads.NAMES)
    needed = dict.fromkeys(key for path, found in keys.items() if path not in drawn for key in found)
    missing = [key for key in needed if key not in tensors]
    used = {key for found in keys.values() for key in found}
    unexpected = [key for key in tensors if key not in used and not BUFFERS.search(key)]
    if config.tied and head in unexpected and not missing:
        _check_tied(head, tensors[head], tensors[keys["embed"][0]], where)
        unexpected.remove(head)
    if missing or unexpected:
        raise ValueError(f"{where}: {complaint(missing, unexpected)}")
    for leaf in param.leaf_list(table):
        for key in keys[leaf.path] if leaf.path not in drawn else ():
            check_tensor(key, tensors[key], leaf, where)
    if drawn or scored:  # a backbone with a head is saved with the prefix
        config = dataclasses.replace(config, prefix=config.prefix or "model.")
    if scored:  # nothing reads images or speculates with a value
        config = models.text_only(config)
    elif rest or wrappers.wraps(config):
        config = dataclasses.replace(config, rest=wrappers.Rest("", rest))
    return config, tree, tensors, keys, drawn


def _found(table: param.Table, tensors: Mapping[str, np.ndarray], prefix: str):
    """(tensors, fused experts split; the keys that each leaf has among them, or the first ones that it may have)."""
    spelt_out = [spelt for leaf in param.leaf_list(table) for spelt in leaf.keys(prefix).values()]
    tensors = _split_experts(tensors, {key for spelt in spelt_out for key in spelt})
    there = lambda spelt: next((key for key in spelt if key in tensors), spelt[0])
    leaves = param.leaf_list(table)
    keys = {leaf.path: [there(spelt) for spelt in leaf.keys(prefix).values()] for leaf in leaves}
    turned = {key: leaf.stored_shape for leaf in leaves if _is_turned(leaf) for key in keys[leaf.path]}
    return _turned_back(tensors, turned), keys


def place(leaf: param.Leaf, tensors: Sequence[np.ndarray], dtype, sharding=None) -> jax.Array:
    """Assembles a leaf's array from its tensors, in the order of its keys; each device reads only its shard, and
    dequantises it piece by piece."""
    stored = dict(zip(np.ndindex(*leaf.unstacked_shape), tensors, strict=True))
    wanted = leaf.param.dtype or dtype or _common_dtype(tensors)
    unstacked, part = len(leaf.unstacked_shape), leaf.param.part

    def read(*cut: slice, alias: bool = False) -> np.ndarray:
        shape = [one.stop - one.start for one in cut]
        host = _empty(shape, np.dtype(wanted), alias)

        def fill(at: tuple[int, ...], piece: tuple[slice, ...]) -> None:
            tensor = stored[tuple(one.start + i for one, i in zip(cut, at, strict=False))]
            there = tuple(
                slice(all_.start + one.start, all_.start + one.stop) for all_, one in zip(rest, piece, strict=True)
            )
            index: tuple[int | slice, ...] = (*at, *piece)
            host[index] = part.take(tensor, there) if part else tensor[there]
            safetensors.forget(tensor)

        rest, pieces = cut[unstacked:], _pieces(shape[unstacked:], PIECE)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda job: fill(*job), itertools.product(np.ndindex(*shape[:unstacked]), pieces)))
        return host

    if sharding is not None:
        shard = functools.cache(lambda *bounds: read(*(slice(*one) for one in bounds)))  # devices may hold the same
        bounds = lambda index: [one.indices(size)[:2] for one, size in zip(index, leaf.shape, strict=True)]
        made = jax.make_array_from_callback(leaf.shape, sharding, lambda index: shard(*bounds(index)))
        return made.block_until_ready()
    first, *others = _pieces(leaf.shape, LARGE)
    if not others:
        return jax.device_put(read(*first)).block_until_ready()
    # One piece at a time: on a CPU the parameters are in the memory that is read into, too.
    array = jax.numpy.zeros(leaf.shape, wanted)
    for piece in (first, *others):
        array = _insert(array.block_until_ready(), read(*piece, alias=True), [one.start for one in piece])
    return array.block_until_ready()


def _empty(shape: Sequence[int], dtype: np.dtype, alias: bool) -> np.ndarray:
    """Memory of numpy, aligned such that JAX may alias it, or such that it has to copy it: aliased memory cannot be
    donated to a step."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 2 * 64, np.uint8)
    start = -memory.ctypes.data % 64 + (0 if alias else dtype.itemsize)
    return memory[start : start + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(array: jax.Array, piece: jax.Array, start: list[int]) -> jax.Array:
    """Overwrites a piece of the array in place; as integers, because XLA copies 16-bit floats one by one on a CPU."""
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(bits(array), bits(piece), start), array.dtype)


def _pieces(shape: Sequence[int], most: int) -> list[tuple[slice, ...]]:
    """Slices that divide an array along its first axes into pieces of up to `most` numbers, or of single rows."""
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    if row > most and len(shape) > 1:
        return [(slice(i, i + 1), *rest) for i in range(shape[0]) for rest in _pieces(shape[1:], most)]
    step, others = max(1, most // max(1, row)), [slice(0, size) for size in shape[1:]]
    return [(slice(at, min(at + step, shape[0])), *others) for at in range(0, shape[0], step)]


def _common_dtype(tensors: Sequence[np.ndarray]) -> np.dtype:
    """The narrowest dtype that holds all; numpy has no rule for bfloat16 beside float16, which only float32 holds."""
    dtypes, halves = {x.dtype for x in tensors}, {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)}
    return np.result_type(*(dtypes - halves | {np.dtype(np.float32)} if halves <= dtypes else dtypes))


def verify(path: str | os.PathLike) -> dict | None:
    """Compares a checkpoint's tensors with its manifest.json; returns the manifest, or None without one.

    Raises:
      ValueError: the tensors do not match the manifest; names the first that differs.
    """
    path = Path(path)
    return _verified(path, safetensors.read(path)) if (path / MANIFEST).is_file() else None


def _verified(path: Path, tensors: Mapping[str, np.ndarray]) -> dict | None:
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_json(path / MANIFEST)
    compare(path, manifest, tensors)
    return manifest


def compare(path: Path, manifest: Mapping, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares tensors with a manifest; raises as `verify`."""
    _compare_names(path, manifest, tensors)
    for name, tensor in tensors.items():
        _compare_tensor(path, manifest, name, tensor)


def _compare_names(path: Path, manifest: Mapping, tensors: Mapping[str, np.ndarray]) -> None:
    wanted = manifest.get("tensors")
    if not isinstance(wanted, dict):
        raise ValueError(f"{path}: manifest.json must list the tensors; copy the checkpoint again")
    if wanted.keys() != tensors.keys():
        names = sorted(wanted.keys() ^ tensors.keys())
        raise ValueError(
            f"{path}: {_listed(names)} only in the manifest or only in the files; copy the checkpoint again"
        )


def _compare_tensor(path: Path, manifest: Mapping, name: str, tensor: np.ndarray) -> None:
    got = {**safetensors.describe(name, tensor), "xxh3_128": safetensors.digest(tensor)}
    if got != manifest["tensors"][name]:
        raise ValueError(f"{path}: {name} does not match manifest.json; copy the checkpoint again")


# -- saving --------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike, config, params, dtype=None, base=None, tokenizer=None, version: int | None = None,
    like: str | os.PathLike | None = None, shard_bytes: int = safetensors.SHARD,
    fused_experts: bool = False,
) -> Path:  # fmt: skip
    """Writes a Hugging Face directory: weights, config.json, generation_config.json, tokenizer, manifest.json.

    Tensors that the model does not use (`config.rest`) and a processor's files are copied from the checkpoint that the
    config was loaded from, bit for bit, to files of their own; the manifest has the tensors' hashes, too.

    The directory is written atomically, by rename; an existing checkpoint is replaced, and kept if anything fails.
    config.json has rope and dtype in the spellings of transformers 4 and 5. manifest.json is `{version, base, bytes,
    tensors: {name: {dtype, shape, xxh3_128}}}`, with base null since all tensors are there. A config without stop
    tokens is written with those of `base`'s generation_config.json, else with the tokenizer's.

    Args:
      params: jax or numpy arrays (`host_copy`); each `param.LoRAWeight` is merged as it is written.
      dtype: dtype of the tensors; None = that of the checkpoint the model came from, else of the parameters.
      base: a checkpoint directory from which tokenizer and generation settings are copied, and the tensors of
        `config.rest` if the one that they were in is gone.
      tokenizer: a transformers tokenizer to save instead.
      version: policy version, for published weights.
      like: a directory on the same disk that was saved with the same `config.rest`: those files become hard links to
        its files.
      shard_bytes: as `safetensors.write`.
      fused_experts: writes the experts of a layer as `experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj`
        [E, D, F], where the family has a tensor for each expert; transformers 5 and `load` read both.

    If parameters are sharded over several processes, all must call it: they gather one tensor at a time, and process 0
    writes; the others return before the directory exists.

    Raises:
      ValueError: the path is a file or another kind of directory, the parameters do not match the config, or the
        checkpoint with the tensors of `config.rest` is gone.
    """
    if base is not None and not Path(base).is_dir():
        raise ValueError(f"save: base must be a checkpoint directory, got {base}")
    dtype, rest = save_dtype(config, params, dtype), passed.tensors(config, base)
    specs, arrays = to_tensors(config, params, dtype, fused_experts)
    if jax.process_index() > 0:
        for _ in arrays:
            pass
        return Path(path)
    with replacing(path, _is_checkpoint) as directory:
        described = safetensors.write(
            directory, specs, arrays, apart=rest, like=_written(like) if rest else None, shard_bytes=shard_bytes
        )
        passed.copy_files(config, base, directory)
        generation: dict = {}
        if base is not None:
            if (Path(base) / "generation_config.json").is_file():
                generation = read_json(Path(base) / "generation_config.json")
            for name in TOKENIZER_FILES if tokenizer is None else ():
                if (Path(base) / name).is_file():
                    shutil.copyfile(Path(base) / name, directory / name)
        if tokenizer is not None:
            tokenizers.save(tokenizer, directory)
        if not config.eos:
            config = dataclasses.replace(config, eos=_stop_ids(config, generation, directory))
        hf = _config_json(config, dtype)
        if config.eos:
            generation["eos_token_id"] = wrappers.text(hf)["eos_token_id"]
        manifest = _manifest(version, described)
        for name, value in (("generation_config.json", generation), ("config.json", hf), (MANIFEST, manifest)):
            safetensors.write_bytes(directory / name, json_bytes(value))
    return Path(path)


def manifest(config, params, dtype=None, version: int | None = None) -> dict:
    """The manifest.json that `save` would write for these parameters alone, without writing anything."""
    specs, arrays = to_tensors(config, params, save_dtype(config, params, dtype))
    pairs = zip(specs.items(), arrays, strict=True)
    hashed = lambda name, spec, x: {**safetensors.describe(name, spec), "xxh3_128": safetensors.digest(x)}
    return _manifest(version, {name: hashed(name, spec, x) for (name, spec), x in pairs})


def _manifest(version: int | None, described: dict[str, dict]) -> dict:
    total = sum(safetensors.size(entry) for entry in described.values())
    return {"version": version, "base": None, "bytes": total, "tensors": described}


def json_bytes(value: dict) -> bytes:
    """Serialises an object as `save` does."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_published(
    root: str | os.PathLike, version: int, config, params, dtype=None, base=None, tokenizer=None, like=None
) -> Path:
    """`save` to `root/{version}`, as a version of a policy."""
    if version < 0:
        raise ValueError(f"write_published: version must be at least 0, got {version}")
    return save(Path(root) / str(version), config, params, dtype, base, tokenizer, version, like)


def host_copy(config, params, dtype=None):
    """Copies the parameters to numpy arrays in the dtype that `save` would write, with each `param.LoRAWeight` merged;
    the originals may be donated afterwards.

    With several processes all must call it, as `save`; process 0 gets the arrays, the others a tree of None.
    """
    return copied(models.table(config), params, save_dtype(config, params, dtype))


def copied(table: param.Table, params, dtype):
    """`host_copy` for any table."""

    def copy(leaf, x):
        host = np.empty(leaf.shape, leaf.param.dtype or dtype) if jax.process_index() == 0 else None
        for index, row in zip(np.ndindex(*leaf.unstacked_shape), _rows(leaf, x, dtype), strict=True):
            if host is not None:
                host[index] = row
        return host

    return param.tree_map(copy, table, params)


def to_tensors(
    config, params, dtype, fused_experts: bool = False
) -> tuple[dict[str, jax.ShapeDtypeStruct], Iterator[np.ndarray]]:
    """(shape and dtype by checkpoint key, iterator over the arrays in that order, fetched lazily).

    Args:
      fused_experts: as `save`.

    Raises:
      ValueError: the parameters do not match the config; names them.
    """
    table = models.table(config)
    return tensors_of(wrappers.with_fused_experts(table) if fused_experts else table, config.prefix, params, dtype)


def tensors_of(table: param.Table, prefix: str, params, dtype, where: str = "save"):
    """`to_tensors` for any table; zeros where no leaf has a part of a tensor."""
    leaves = param.leaf_list(table)
    arrays = tree_leaves_with_path(params, is_leaf=param.composite)
    found = {keystr(path, simple=True, separator="."): x for path, x in arrays}
    paths = [leaf.path for leaf in leaves]
    missing, unexpected = [path for path in paths if path not in found], [path for path in found if path not in paths]
    if missing or unexpected:
        raise ValueError(f"{where}: the parameters must match the config, got {complaint(missing, unexpected)}")
    for leaf in leaves:
        if tuple(found[leaf.path].shape) != leaf.shape:
            raise ValueError(f"{where}: {leaf.path} must be {list(leaf.shape)}, got {list(found[leaf.path].shape)}")
    shared = param.by_tensor(table)
    spec = lambda leaf: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.param.dtype or dtype)
    specs = {spelt[0]: spec(leaf) for leaf, *_ in shared for spelt in leaf.keys(prefix).values()}
    wholes = (_wholes(parts, [found[leaf.path] for leaf in parts], dtype) for parts in shared)
    return specs, itertools.chain.from_iterable(wholes)


def _wholes(leaves: Sequence[param.Leaf], arrays: Sequence, dtype) -> Iterator[np.ndarray]:
    """The tensors that these leaves are the parts of, on the host, one at a time in the order of their keys."""
    rows = [_rows(leaf, x, dtype) for leaf, x in zip(leaves, arrays, strict=True)]
    parts = [leaf.param.part for leaf in leaves if leaf.param.part]
    if not parts:  # nothing holds a tensor while the next is made
        yield from rows[0]
        return
    for row in zip(*rows, strict=True):
        whole = np.zeros(leaves[0].stored_shape, row[0].dtype)
        for part, x in zip(parts, row, strict=True):
            part.put(whole, x)
        yield whole


def save_dtype(config, params, dtype=None) -> np.dtype:
    """The requested dtype, else that of the checkpoint the model came from, else of the parameters."""
    source = wrappers.text(json.loads(config.source))
    name = dtype or source.get("dtype") or source.get("torch_dtype") or jax.tree.leaves(params)[0].dtype
    try:
        known = jax.numpy.dtype(name)
    except TypeError:
        known = None
    if known not in FLOATS:
        raise ValueError(f"save: dtype must be one of {', '.join(sorted(str(d) for d in FLOATS))}, got {name}")
    return known


def on_host(x) -> bool:
    """Whether the array is unsharded in host memory, so that numpy can view it without a copy."""
    return isinstance(x, np.ndarray) or (len(x.devices()) == 1 and next(iter(x.devices())).platform == "cpu")


def _rows(leaf: param.Leaf, x, dtype) -> Iterator[np.ndarray]:
    """The leaf's entries of each tensor on the host, in the order of its keys; views if it is already there."""
    wanted = jax.numpy.dtype(leaf.param.dtype or dtype)
    indices = list(np.ndindex(*leaf.unstacked_shape))
    if isinstance(x, Mapped):
        for index in indices:
            yield x.at(index).astype(wanted, copy=False)
            for at in [index] if index in x.tensors else x.below(index):
                safetensors.forget(x.tensors[at])
        return
    x = param.plain(x.read() if isinstance(x, Deferred) else x)
    if on_host(x):
        host = np.asarray(x)
        yield from (host[index].astype(wanted, copy=False) for index in indices)
        return
    # Cast on the device, one tensor at a time, fetching the next while the last is written.
    ahead = _fetch(x, indices[0], wanted)
    for index in indices[1:]:
        row, ahead = ahead, _fetch(x, index, wanted)
        yield np.asarray(row)
    yield np.asarray(ahead)


def _fetch(x, index: tuple[int, ...], dtype) -> jax.Array:
    row = _cut(None if x.is_fully_addressable else x.sharding.mesh)(x, index, dtype)
    row.copy_to_host_async()
    return row


@functools.cache
def _cut(mesh):
    """Jitted slice of one tensor; on a mesh over several processes the result is replicated."""

    def row(x, index, dtype):
        return x[index].astype(dtype)

    out = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(row, static_argnums=2, out_shardings=out)


def _config_json(config, dtype: np.dtype) -> dict:
    hf = models.config_to_hf(config)
    dtypes = {"dtype": dtype.name, "torch_dtype": dtype.name}
    hf.pop("quantization_config", None)  # tensors are written as floats
    if "text_config" in hf:
        hf["text_config"] = hf["text_config"] | dtypes
        hf["text_config"].pop("quantization_config", None)
    if wrappers.wraps(config):
        return hf | dtypes
    causal = hf["architectures"][0]
    if config.score_head:
        hf |= heads.to_hf(config.score_head, json.loads(config.source), causal)
    elif not config.prefix:
        hf["architectures"] = [causal.replace("ForCausalLM", "Model")]
    return hf | dtypes


# -- shared --------------------------------------------------------------------------------------


def _written(like: str | os.PathLike | None) -> tuple[Path, dict] | None:
    """(directory, tensors of its manifest) of `save`'s `like`."""
    return None if like is None else (Path(like), read_json(Path(like) / MANIFEST)["tensors"])


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one that `save` wrote."""
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return True
    try:
        return "tensors" in read_json(path / MANIFEST)
    except (FileNotFoundError, ValueError):
        return False


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or half-written JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}; copy it again")
    return value


def _check_tied(name: str, head: np.ndarray, embed: np.ndarray, where: str) -> None:
    if not equal(head, embed):
        raise ValueError(
            f"{where}: tie_word_embeddings is true, but {name} differs from the embeddings; "
            "set it to false in config.json if the model has a separate head"
        )


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors are equal, bit by bit."""

    def digest(x) -> str:
        found = safetensors.digest(x)
        safetensors.forget(x)
        return found

    return one.dtype == other.dtype and digest(one) == digest(other)


def _split_experts(tensors: Mapping[str, np.ndarray], fused: Collection[str]) -> Mapping[str, np.ndarray]:
    """Splits fused experts into one tensor per expert, as views of `experts.gate_up_proj` [E, 2 F, D] and
    `experts.down_proj` [E, D, F], except keys that the family reads in this form, `fused`."""
    out = {}
    for key, tensor in tensors.items():
        stem, _, name = key.rpartition(".")
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        size, rest = divmod(tensor.shape[1], len(names)) if len(tensor.shape) == 3 else (0, 1)
        if not stem.endswith(".experts") or key in fused or rest:
            out[key] = tensor
            continue
        expert = getattr(tensor, "expert", None)  # of tensors that are not in memory: without reading it
        for e, (i, part) in itertools.product(range(len(tensor)), enumerate(names)):
            rows = slice(i * size, (i + 1) * size)
            out[f"{stem}.{e}.{part}.weight"] = expert(e, rows) if expert else tensor[e, rows]
    return out


def _is_turned(leaf: param.Leaf) -> bool:
    return leaf.param.part is not None and leaf.param.part.transposed


def _turned_back(tensors: Mapping[str, np.ndarray], stored: Mapping[str, tuple]) -> Mapping[str, np.ndarray]:
    """The tensors with those of these keys and shapes as checkpoints have them, if they are as in transformers'
    modules, whose last two axes are the other way round: then all are, as one tells whose two axes differ."""
    there = {key: tuple(tensors[key].shape) for key in stored if key in tensors}
    if not any(shape != stored[key] and shape == _swapped(stored[key]) for key, shape in there.items()):
        return tensors
    return {key: x.swapaxes(-1, -2) if key in there else x for key, x in tensors.items()}


def _swapped(shape: tuple) -> tuple:
    return (*shape[:-2], shape[-1], shape[-2])


def check_tensor(key: str, tensor: np.ndarray, leaf: param.Leaf, where: str) -> None:
    if tensor.shape != leaf.stored_shape:
        raise ValueError(f"{where}: {key} must be {list(leaf.stored_shape)} by config.json, got {list(tensor.shape)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{where}: {key} must have a float dtype, got {tensor.dtype}; quantised weights not supported")


def complaint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing {_listed(missing)}")
        leaves = {"lm_head.weight": "head", "language_model.lm_head.weight": "head", "score.weight": "score"}
        leaves |= {"score.bias": "score"} if "score.weight" in missing else {}
        if set(missing) <= set(leaves):
            names = tuple(dict.fromkeys(leaves[key] for key in missing))
            parts[-1] += f" (init_missing={names} initialises missing heads randomly)"
    if unexpected:
        parts.append(f"unexpected {_listed(unexpected)}")
    return "; ".join(parts)


def _listed(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
