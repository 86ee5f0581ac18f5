"""A model as a GGUF file."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import safetensors
from . import families, options, reading, tokenizer_metadata
from .container import library
from .families import FREQUENCIES, HEAD, ROUTER, SHARED_GATE, Family

KINDS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
BLOCK = 32  # numbers of a row that are quantised together
LARGEST = float(np.finfo(np.float16).max)


def write(
    path: str | os.PathLike, kind: str, hf: Mapping[str, Any], settings: Any, specs: Mapping[str, Any],
    arrays: Iterable[np.ndarray], tokenizer: Any,
) -> list[str]:  # fmt: skip
    """Writes a GGUF file, atomically and one tensor at a time; of experts, which are one tensor there, a layer's
    matrices of one kind at a time.

    Vectors and routers are written in float32. Of a quantised model, rows that are no multiple of 32 are in float16,
    and with q4_0 the output head, or the embeddings if they are tied, in q8_0.

    Args:
      kind: one of KINDS.
      hf: config.json as `models.config_to_hf` writes it, `settings` its Config.
      specs: shape of each tensor by Hugging Face's name, in the order of `arrays`.
      tokenizer: of transformers.

    Returns:
      What llama.cpp will do differently, a line each.

    Raises:
      ValueError: llama.cpp does not know the family, an option or the tokenizer; or a number is too large for float16.
    """
    path, gguf = Path(path), library()
    family = families.of_model(settings.family)
    values = {f"{family.gguf}.{key}": value for key, value in options.metadata(hf, settings, family).items()}
    tokens, warnings = tokenizer_metadata.metadata(tokenizer, settings.vocab, settings.eos)
    divisors = options.frequencies(settings)
    places = _places(family, specs, kind, settings.tied)
    writer = gguf.GGUFWriter(None, family.gguf)
    general = {"general.type": "model", "general.name": path.stem, "general.quantization_version": 2}
    general["general.file_type"] = int(gguf.LlamaFileType[KINDS[kind]])
    for key, value in (general | values | tokens).items():
        _add(writer, key, value)
    if divisors is not None:
        places = {f"{FREQUENCIES}.weight": (divisors.shape, "F32")} | places
    for name, (shape, type_) in places.items():
        row = gguf.quants.quant_shape_to_byte_shape(shape, gguf.GGMLQuantizationType[type_])
        writer.add_tensor_info(name, row, np.dtype(np.uint8), int(np.prod(row)), gguf.GGMLQuantizationType[type_])
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path) as temporary, safetensors.named(path):
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            [file] = writer.fout
            first = [] if divisors is None else [(f"{FREQUENCIES}.weight", divisors)]
            for name, x in itertools.chain(first, _joined(family, specs, arrays, settings)):
                writer.write_padding(file, file.tell())  # the library's own writer of tensors hides what went wrong
                file.write(_encoded(gguf, name, x, places[name][1]))
            writer.write_padding(file, file.tell())
            file.flush()
            os.fsync(file.fileno())
        finally:
            writer.close()
        os.replace(temporary, path)
    return warnings


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that no other process writes, removed at the end; what a process that was killed
    left in it is written over."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"convert: another process is writing {path}; choose another destination") from None
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _places(family: Family, specs: Mapping[str, Any], kind: str, tied: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name in the file: (shape, type)} in the order in which they are written."""
    out: dict[str, tuple[tuple[int, ...], str]] = {}
    counts: dict[str, int] = {}
    for name, spec in specs.items():
        there, place, expert = families.to_gguf(family, name)
        counts[there] = counts.get(there, 0) + 1
        shape = tuple(spec.shape)
        if place == SHARED_GATE:
            shape = shape[-1:]
        head = place == HEAD or (tied and place == "token_embd")
        type_ = "Q8_0" if kind == "q4_0" and head else kind.upper()
        if len(shape) < 2 or place == ROUTER:
            type_ = "F32"
        elif type_.startswith("Q") and shape[-1] % BLOCK:
            type_ = "F16"
        out[there] = (shape if expert is None else (counts[there], *shape), type_)
    return out


def _joined(
    family: Family, specs: Mapping[str, Any], arrays: Iterable[np.ndarray], settings: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, f32 array as llama.cpp has it), experts stacked."""
    named = ((*families.to_gguf(family, name), x) for name, x in zip(specs, arrays, strict=True))
    for there, group in itertools.groupby(named, key=lambda one: one[0]):
        parts = []
        for _, place, expert, x in group:  # noqa: B007
            x = np.asarray(x).astype(np.float32, copy=False)
            if family.turned and place in ("attn_q", "attn_k"):
                x = reading.pairs(x, settings.heads if place == "attn_q" else settings.kv_heads)
            elif family.norm_offset and there.endswith("norm.weight"):
                x = x + np.float32(family.norm_offset)
            elif place == SHARED_GATE:
                x = x.reshape(-1)
            parts.append(x)
        yield there, parts[0] if expert is None else np.stack(parts)


def _encoded(gguf: Any, name: str, x: np.ndarray, type_: str) -> memoryview:
    """The bytes of an array in a type."""
    if type_ == "BF16":
        return safetensors.raw(x.astype(ml_dtypes.bfloat16))
    if type_ != "F32" and (largest := float(np.abs(x).max())) > LARGEST:
        raise ValueError(f"convert: {name} has {largest:.3g}, more than float16 holds; use --gguf bf16")
    return safetensors.raw(gguf.quants.quantize(np.ascontiguousarray(x), gguf.GGMLQuantizationType[type_]))


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
