"""Checkpoints of torch.distributed.checkpoint, as trainers with FSDP2 write them, as tensors by Hugging Face's keys."""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import dataclass, field
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


def is_dcp(path: str | os.PathLike) -> bool:
    """Whether a folder is such a checkpoint."""
    return (Path(path) / METADATA).is_file()


@dataclass
class Reader:
    """Reads tensors of a checkpoint one at a time, keeping the last, of which experts are parts."""

    path: Path
    last: tuple[str, np.ndarray] = field(default=("", np.empty(0)))

    def read(self, name: str, meta: Any) -> np.ndarray:
        """A tensor by its name in the checkpoint."""
        import torch
        from torch.distributed import checkpoint

        if self.last[0] != name:
            into = {name: torch.empty(meta.size, dtype=meta.properties.dtype)}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads everything
                checkpoint.load(into, checkpoint_id=self.path, no_dist=True)
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
    found = _index(path / METADATA)
    stored = {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}
    start, reader = _start(config, stored, path), Reader(path)
    dtype = lambda meta: torch_adapter.to_numpy(torch.empty(0, dtype=meta.properties.dtype)).dtype
    tensors: Any = {
        name.removeprefix(start): Stored(reader, name, meta, tuple(meta.size), dtype(meta))
        for name, meta in stored.items()
        if name.startswith(start) and not name.removeprefix(start).startswith("optim")
    }
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
        f"{', '.join([*names][:3]) or 'none'}; convert it with the library that wrote it"
    )


class _Safe(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in NAMES:
            return super().find_class(module, name)
        if module in ("torch", METADATA_OF) and "." not in name:
            value = super().find_class(module, name)
            own = isinstance(value, type) and value.__module__ == METADATA_OF
            if own or isinstance(value, torch.dtype | torch.layout):
                return value
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _index(file: Path) -> dict[str, Any]:
    """{name: metadata} of an index; ValueError if it is none, or reading it could run a program."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open(file, "rb") as source:
            found = _Safe(source).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise ValueError(f"{file}: must be an index of torch.distributed.checkpoint, got another: {error}") from error
    return found.state_dict_metadata
