"""How `areax convert` writes a checkpoint, where its readers leave a choice."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ... import models
from ...models import wrappers
from .. import gguf, hf, peft, safetensors
from ..tracking import progress

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB (10^9) or 5GiB (2^30)."""
    found = SIZE.fullmatch(text.strip())
    number, unit, binary = found.groups() if found else ("0", "", "")
    size = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    if not 1 <= size < math.inf:
        raise ValueError(f"convert: --shard-size must be a size such as 5GB or 500MB, got {text!r:.80}; name another")
    return int(size)


@dataclass(frozen=True)
class Files:
    """Options of what is written.

    Attributes:
      dtype: dtype of the tensors; None = the source's.
      shard_size: most bytes of a file, such as 5GB or 500MB; a larger tensor has its own.
      experts: "fused" writes the experts of a layer as two tensors, as they are in transformers 5 (`hf.save`).
      gguf: writes a GGUF file of this kind instead, one of `gguf.KINDS`.
      embeddings: "untied" writes tied embeddings a second time, as the output head, and says in config.json that they
        are not tied; "tied" leaves out a head that is equal to them; None = as the source.
    """

    dtype: str | None = None
    shard_size: str = "5GB"
    experts: Literal["apart", "fused"] = "apart"
    embeddings: Literal["tied", "untied"] | None = None
    gguf: str | None = None

    def __post_init__(self):
        parse_size(self.shard_size)
        if self.gguf not in (None, *gguf.KINDS):
            raise ValueError(f"convert: --gguf must be one of {', '.join(gguf.KINDS)}, got {self.gguf!r:.80}")
        if self.gguf and dataclasses.replace(self, gguf=None) != AS_SOURCE:
            raise ValueError(f"convert: --gguf decides how weights are stored, got {self}; leave the others out")

    def __str__(self):
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items()) or "none"

    def save(self, path: str | os.PathLike, config, params, **more) -> Path:
        """`hf.save` with these options; `more` are others of it."""
        if self.gguf:
            return self._gguf(self.gguf, Path(path), config, params, **more)
        config, params = self._embeddings(config, params)
        fused = self.experts == "fused"
        return hf.save(
            path, config, params, self.dtype, shard_bytes=parse_size(self.shard_size), fused_experts=fused, **more
        )

    def _gguf(self, kind: str, path: Path, config, params, base=None, tokenizer=None) -> Path:
        if config.score_head:
            raise ValueError("convert: llama.cpp has no score heads; leave --gguf out")
        if left := [*config.rest.names] if config.rest else []:
            progress.say(f"{path}: the text model alone, without {len(left)} tensors such as {left[0]}")
        config = models.text_only(config)
        tokenizer = tokenizer or (hf.tokenizer_in(Path(base)) if base else None)
        if tokenizer is None:
            raise ValueError(f"convert: --gguf needs a tokenizer, got none in {base}")
        config = hf.with_ends(config, tokenizer)
        specs, arrays = hf.to_tensors(config, params, np.dtype(np.float32))
        for line in gguf.write(path, kind, models.config_to_hf(config), config, specs, arrays, tokenizer):
            progress.say(f"{path}: {line}")
        return path

    def _embeddings(self, config, params):
        if self.embeddings is None or config.tied == (self.embeddings == "tied"):
            return config, params
        changed = dataclasses.replace(config, tied=not config.tied)
        if self.embeddings == "untied":
            if "head" not in models.table(changed).top:
                raise ValueError(f"convert: a {config.family} always ties embeddings; leave out --embeddings untied")
            return changed, params | {"head": params["embed"]}
        if "head" not in params or not hf.equal(*(_array(params[name]) for name in ("embed", "head"))):
            raise ValueError(
                f"convert: --embeddings tied needs a {wrappers.head(config)} that equals the embeddings, got another; "
                "leave it out"
            )
        return changed, {name: x for name, x in params.items() if name != "head"}


AS_SOURCE = Files()


def _array(x) -> np.ndarray:
    return np.asarray(x.read() if isinstance(x, hf.Deferred) else x)


def check_new(destination: str | os.PathLike, directory: bool = True) -> None:
    """Raises ValueError if something is at the destination; for a directory it may be an empty one."""
    target = Path(destination)
    if os.path.lexists(target) and not (directory and target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"convert: {destination} already exists; choose another destination, or remove it first")


def report(source: str | os.PathLike, path: Path) -> dict:
    """What `areax convert` says of the checkpoint, the adapters or the GGUF file that it wrote."""
    if path.is_file():
        family, kinds, size = gguf.summary(path)
        return {"source": os.fspath(source), "path": os.fspath(path), "family": family, "dtypes": sorted(kinds)} | {
            "tensors": sum(kinds.values()), "bytes": size,
        }  # fmt: skip
    adapters = (path / peft.CONFIG).is_file()
    tensors = safetensors.read(path / peft.WEIGHTS if adapters else path)
    return {
        "source": os.fspath(source),
        "path": os.fspath(path),
        "family": "adapters" if adapters else hf.read_config(path).family,
        "dtypes": sorted({x.dtype.name for x in tensors.values()}),
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors.values()),
    }
