"""Checkpoints of torch.distributed.checkpoint, as trainers with FSDP2 write them, as tensors by Hugging Face's keys."""

from __future__ import annotations

import enum
import math
import os
import pickle
import struct
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import models
from ...models import wrappers
from .. import hf, safetensors
from .. import torch as torch_adapter

METADATA = ".metadata"
# What a checkpoint's index, a pickle, is made of, beside dtypes and the classes of METADATA_OF; anything else could run
# a program when it is read.
METADATA_OF = "torch.distributed.checkpoint.metadata"
NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch", "device"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
    ("builtins", "set"),
}  # fmt: skip
# What a damaged pickle raises.
DAMAGED = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    RuntimeError, TypeError, ValueError, struct.error,
)  # fmt: skip


def is_dcp(path: str | os.PathLike) -> bool:
    """Whether a folder is such a checkpoint."""
    return (Path(path) / METADATA).is_file()


@dataclass
class Reader:
    """Reads tensors of a checkpoint one at a time, keeping the last, of which experts are parts.

    Attributes:
      index: the checkpoint's, already checked: torch would unpickle it, and other files, without a look.
    """

    path: Path
    index: Any
    last: tuple[str, np.ndarray] = field(default=("", np.empty(0)))

    def read(self, name: str, meta: Any) -> np.ndarray:
        """A tensor by its name in the checkpoint."""
        import torch
        from torch.distributed import checkpoint

        index = self.index

        class Checked(checkpoint.FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return index

        if self.last[0] != name:
            into = {name: torch.full(meta.size, math.nan, dtype=meta.properties.dtype)}  # found if it is not filled
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads everything
                    checkpoint.load(into, storage_reader=Checked(self.path), no_dist=True)
            except checkpoint.api.CheckpointException as error:
                first = next(iter(error.failures.values()))[0]
                raise ValueError(
                    f"{self.path}: {name} cannot be read: {' '.join(str(first).split())[:200]}; use another checkpoint"
                ) from error
            self.last = name, torch_adapter.to_numpy(into[name])
            if count := safetensors.count_nonfinite(self.last[1]):
                raise ValueError(
                    f"{self.path}: {count} of the {self.last[1].size} numbers of {name} are not finite; use another "
                    "checkpoint"
                )
        return self.last[1]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint, or rows of one of its experts, that is read when it is indexed."""

    reader: Reader
    name: str
    meta: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    part: tuple[int, slice] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, cut) -> np.ndarray:
        whole = self.reader.read(self.name, self.meta)
        return (whole if self.part is None else whole[self.part])[cut]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def expert(self, e: int, rows: slice) -> Stored:
        """Rows of the matrix e, still to be read."""
        shape = (rows.stop - rows.start, self.shape[2])
        return Stored(self.reader, self.name, self.meta, shape, self.dtype, (e, rows))


def opened(path: str | os.PathLike, base: str | os.PathLike):
    """(config, params) of a checkpoint as `hf.mapped` in the dtype of its tensors, for the model in the folder `base`.

    Names may be those of the module within others ("model.", "state.model."); optimisers' tensors are left out.

    Raises:
      ValueError: torch is missing, the index is damaged or could run a program, or the tensors are not the model's.
    """
    try:
        import torch
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    except ImportError as error:
        raise ValueError(f"convert: {path} needs PyTorch ({error}); install areax[torch]") from error
    path, config = Path(path), hf.read_config(base)
    index = _index(path)
    entries = index.state_dict_metadata.items()
    stored = {name: meta for name, meta in entries if isinstance(meta, TensorStorageMetadata)}
    start, reader = _start(config, stored, path), Reader(path, index)
    tensors: Any = {}
    for name, meta in stored.items():
        if name.startswith(start) and not (key := name.removeprefix(start)).startswith("optim"):
            dtype = getattr(getattr(meta, "properties", None), "dtype", None)
            if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(f"{path}: tensors must be of floats of 16 bits or more, got {name}: {dtype}")
            tensors[key] = Stored(
                reader, name, meta, tuple(meta.size), torch_adapter.to_numpy(torch.empty(0, dtype=dtype)).dtype
            )
    config, params = hf.mapped_tensors(config, tensors, str(path), None)
    if config.rest and config.rest.names:
        raise ValueError(
            f"{path}: tensors that the text model does not use cannot be converted, got {config.rest.names[0]} and "
            f"{len(config.rest.names) - 1} more; save the model with save_pretrained"
        )
    return config, params


def _start(config, names, path: Path) -> str:
    """What the names of the model's tensors begin with before Hugging Face's, from that of the embeddings."""
    [*spelt] = models.table(config).top["embed"].keys
    for prefix in wrappers.prefixes(config):
        for key in (one.format(prefix=prefix) for one in spelt):
            for name in names:
                if name == key or (name.endswith(f".{key}") and not name.startswith("optim")):
                    return name.removesuffix(key)
    raise ValueError(
        f"{path}: tensors must have Hugging Face's names, as FSDP2 trainers save them, got "
        f"{', '.join(f'{name:.80}' for name in [*names][:3]) or 'none'}; convert it with the library that wrote it"
    )


def _member(enumeration: Any, name: Any) -> Any:
    """A member of an enumeration of METADATA_OF, which early releases of Python 3.11 pickle as a call of `getattr`."""
    own = isinstance(enumeration, enum.EnumMeta) and enumeration.__module__ == METADATA_OF
    if own and type(name) is str and name in enumeration.__members__:
        return enumeration.__members__[name]
    raise pickle.UnpicklingError(f"it asks for {_shown(name)} of {_shown(enumeration)}")


def _shown(value: Any) -> str:
    """A value in at most 80 characters: of what may hold itself a billion times only the type."""
    holds = type(value) in (tuple, list, dict, set, frozenset, OrderedDict) or is_dataclass(type(value))
    return f"a {type(value).__name__}" if holds else f"{value!r:.80}"


Unpickler: Any = pickle._Unpickler  # written in Python: what sets attributes can be replaced


class _Safe(Unpickler):
    dispatch = dict(Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("builtins", "getattr"):
            return _member
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 pickles paths
        if (module, name) in NAMES:
            return super().find_class(module, name)
        if module in ("torch", METADATA_OF) and "." not in name:
            value = super().find_class(module, name)
            own = isinstance(value, type) and value.__module__ == METADATA_OF
            if own or isinstance(value, torch.dtype | torch.layout):
                return value
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def load_build(self) -> None:
        """Sets attributes of an object: of a record of the index, not of a class, a function or a member."""
        into = self.stack[-2]
        if isinstance(into, enum.Enum) or not is_dataclass(type(into)):
            raise pickle.UnpicklingError(f"it changes {_shown(into)}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _index(path: Path) -> Any:
    """The index of a checkpoint.

    Raises:
      ValueError: it is none, reading it could run a program, or it names files outside the folder.
    """
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    file = path / METADATA
    try:
        with open(file, "rb") as source:
            found = _Safe(source).load()
    except DAMAGED as error:
        raise ValueError(
            f"{file}: must be an index of torch.distributed.checkpoint, got another "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use another checkpoint"
        ) from error
    known = isinstance(found, Metadata) and all(
        isinstance(getattr(found, each, None), dict) for each in ("state_dict_metadata", "storage_data")
    )
    if not known:
        raise ValueError(
            f"{file}: must be an index of torch.distributed.checkpoint, got a {type(found).__name__}; use another "
            "checkpoint"
        )
    for name, meta in found.state_dict_metadata.items():
        sizes = getattr(meta, "size", None) if isinstance(meta, TensorStorageMetadata) else ()
        if type(name) is not str or not isinstance(sizes, tuple) or not all(type(n) is int for n in sizes):
            raise ValueError(f"{file}: tensors must have names and sizes, got {_shown(name)}; use another checkpoint")
    for part in found.storage_data.values():
        name = getattr(part, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name or not os.path.isfile(path / name):
            raise ValueError(f"{file}: parts must be files of the folder, got {_shown(name)}; use another checkpoint")
    return found
