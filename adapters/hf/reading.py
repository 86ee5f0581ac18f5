"""Checkpoints to parameters."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from ... import models
from ...core import param
from ...models import mtp as predicting
from ...models.layers.score_head import ScoreHead
from ...parallel import rules
from .. import safetensors
from ..runtime import passed
from .config_files import float_dtype, read_config, with_parts
from .lazy import views
from .manifests import compare_names, compare_tensor, read_manifest, verified
from .matching import SCALAR, check_tensor, complaint, keyed, matched
from .placing import place

WHOLE = 16 << 30  # bytes: fingerprints read checkpoints up to this size completely
PIECES, PIECE = 16, 4096  # how many pieces of a tensor are read of a larger one, and the bytes of each


def load(
    path: str | os.PathLike, dtype="float32", mesh=None, init_missing: Sequence[str] = (), vision: bool = False,
    score_head: ScoreHead = SCALAR, mtp: bool = False,
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
      mtp: also loads the layer for multi-token prediction (`models.with_mtp`), `params["mtp"]`, to train it.

    Raises:
      ValueError: as `read_config` and `check`; an unknown dtype; a truncated checkpoint; missing, unexpected or
        misshapen tensors, by name; as `models.with_vision` and `models.with_mtp`.
    """
    dtype = dtype and float_dtype("load", dtype)
    config, stored = read_config(path), safetensors.read(path)
    config = with_parts(config, vision, mtp)
    config, params = from_tensors(config, stored, str(path), dtype, mesh, init_missing, score_head)
    check(path, stored, skip=config.rest.names if config.rest else ())
    return passed.loaded(config, path), params


def fingerprint(path: str | os.PathLike) -> dict[str, str]:
    """Returns {tensor: dtype, shape and a hash of its bytes} of a checkpoint.

    Of a checkpoint larger than WHOLE, the hash of a large tensor covers PIECES evenly spaced pieces, which include its
    first and last bytes.

    Raises:
      ValueError: as `safetensors.read`.
    """
    tensors = safetensors.read(path)
    whole = sum(x.nbytes for x in tensors.values()) <= WHOLE

    def described(x: np.ndarray) -> str:
        flat = x.reshape(-1).view(np.uint8)
        if not whole and flat.size > PIECES * PIECE:
            starts = np.linspace(0, flat.size - PIECE, PIECES).astype(int)
            flat = np.concatenate([flat[start : start + PIECE] for start in starts])
        digest = safetensors.digest(flat)
        safetensors.forget(x)
        return f"{x.dtype}{list(x.shape)} {digest}"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(described, tensors.values()), strict=True))


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
    manifest = read_manifest(path, tensors)
    if manifest is not None:
        compare_names(path, manifest, tensors)

    def checked(name: str) -> int:
        if manifest is not None:
            compare_tensor(path, manifest, name, tensors[name])
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


def mapped(path: str | os.PathLike, dtype="float32", vision: bool = False):
    """(config, params, verify) of a checkpoint, as strict as `load`, for reading each weight once: files are memory-
    mapped, stacked leaves are `Mapped`, others numpy arrays. `verify()` is the function `verify` on those bytes."""
    config, stored = read_config(path), safetensors.read(path)
    config = models.with_vision(config) if vision else config
    config, params = mapped_tensors(config, stored, str(path), dtype)
    return passed.loaded(config, path), params, functools.partial(verified, Path(path), stored)


def mapped_tensors(config, tensors: Mapping[str, np.ndarray], where: str, dtype="float32"):
    """(config, params) as `mapped`, from tensors by checkpoint key that are read when they are indexed."""
    config, tree, tensors, keys, _ = matched(config, tensors, where)
    return config, views(tree, tensors, keys, dtype)


def mapped_mtp(path: str | os.PathLike, config, dtype="float32"):
    """The weights of `models.mtp` in a checkpoint of this config, as `mapped` gives the model's; None without any.

    Raises:
      ValueError: some are missing or misshapen; names them.
    """
    if not predicting.known(config):
        return None
    table, where = predicting.table(config), str(path)
    tensors, keys = keyed(table, passed.opened(config, safetensors.read(path), where), config.prefix)
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
    return views(param.leaves(table), tensors, keys, dtype)


def from_tensors(
    config, tensors: Mapping[str, np.ndarray], where: str, dtype="float32", mesh=None, init_missing=(),
    score_head: ScoreHead = SCALAR,
):  # fmt: skip
    """(config, params) from tensors by checkpoint key, as strict as `load`; error messages start with `where`."""
    config, _, tensors, keys, drawn = matched(config, tensors, where, init_missing, score_head)
    table = models.table(config)
    shardings = () if mesh is None else (rules.of_params(table, mesh),)

    def fill(leaf, sharding=None):
        if leaf.path in drawn:
            one = param.Table({leaf.path: leaf.param}, (), table.dims)
            return jax.jit(lambda: param.init(jax.random.key(0), one)[leaf.path], out_shardings=sharding)()
        return place(leaf, [tensors[key] for key in keys[leaf.path]], dtype, sharding)

    return config, param.tree_map(fill, table, *shardings)
