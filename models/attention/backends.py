"""Attention backends: chooses the chunked reference or a platform's kernel by what a call needs."""

import importlib
from dataclasses import asdict, dataclass
from typing import Literal

from ...core import hardware
from . import chunked
from . import tree as tries
from .pattern import PLAIN, Pattern

Name = Literal["auto", "chunked", "splash", "cudnn", "triton"]


@dataclass(frozen=True)
class Needs:
    """Features that an attention call needs.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      dtype: dtype of queries, keys and values.
      length: positions of a row on one device.
      head_dim: size of queries and keys.
      value_dim: size of values; None = head_dim.
      packing: rows may hold several sequences, or padding.
      other_keys: keys differ from the queries' tokens, as when rows are gathered over cp.
      ring: positions are sharded, and keys are passed around a ring of devices.
      query_chunk: queries per chunk, if a chunk size is requested.
      window, chunk, scale, softcap, bidirectional: those of the `Pattern`.
      sinks: each head has a learnt logit without a value (attention sinks, arXiv:2508.10925).
      tree: rows hold tries, whose tokens see those on their path from the root.
    """

    platform: str
    dtype: str
    length: int
    head_dim: int
    value_dim: int | None = None
    packing: bool = True
    other_keys: bool = False
    ring: bool = False
    query_chunk: int | None = None
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    bidirectional: bool = False
    sinks: bool = False
    tree: bool = False


@dataclass(frozen=True)
class Supports:
    """Features that a backend supports, named as in `Needs`.

    Attributes:
      platforms, dtypes: None = any.
      length: row length must be a multiple of it.
      head_dim: head size must be a multiple of it.
      most_head_dim: maximum head size, of keys and of values.
      value_dim: values may be of another size than keys.
    """

    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    length: int = 1
    head_dim: int = 1
    most_head_dim: int | None = None
    value_dim: bool = False
    packing: bool = False
    other_keys: bool = False
    ring: bool = False
    query_chunk: bool = False
    window: bool = False
    chunk: bool = False
    scale: bool = False
    softcap: bool = False
    bidirectional: bool = False
    sinks: bool = False
    tree: bool = False


HALF = "bfloat16", "float16"
FLOAT = *HALF, "float32"
# Keyed by file name in this folder, in the order in which "auto" tries them.
BACKENDS: dict[str, Supports] = {
    "splash": Supports(
        ("tpu",), ("bfloat16", "float32"), length=128, value_dim=True, packing=True, other_keys=True, window=True,
        scale=True, softcap=True, bidirectional=True, sinks=True,
    ),
    "cudnn": Supports(("gpu",), HALF, head_dim=8, most_head_dim=128, window=True, scale=True),
    "triton": Supports(
        ("gpu",), FLOAT, most_head_dim=256, value_dim=True, packing=True, other_keys=True, ring=True, window=True,
        chunk=True, scale=True, softcap=True, bidirectional=True, sinks=True, tree=True,
    ),
    "chunked": Supports(
        value_dim=True, packing=True, other_keys=True, ring=True, query_chunk=True, window=True, chunk=True, scale=True,
        softcap=True, bidirectional=True, sinks=True, tree=True,
    ),
}  # fmt: skip


def refusals(name: str, needs: Needs) -> list[str]:
    """Features with their values that the backend does not support; empty if it supports all needs."""
    has = BACKENDS[name]
    value_dim = needs.head_dim if needs.value_dim is None else needs.value_dim
    supported = {
        "platform": has.platforms is None or needs.platform in has.platforms,
        "dtype": has.dtypes is None or needs.dtype in has.dtypes,
        "length": needs.length % has.length == 0,
        "head_dim": needs.head_dim % has.head_dim == 0 and needs.head_dim <= (has.most_head_dim or needs.head_dim),
        "value_dim": value_dim == needs.head_dim or (has.value_dim and value_dim <= (has.most_head_dim or value_dim)),
        "packing": has.packing or not needs.packing,
        "other_keys": has.other_keys or not needs.other_keys,
        "ring": has.ring or not needs.ring,
        "query_chunk": has.query_chunk or needs.query_chunk is None,
        "window": has.window or needs.window is None,
        "chunk": has.chunk or needs.chunk is None,
        "scale": has.scale or needs.scale is None,
        "softcap": has.softcap or needs.softcap is None,
        "bidirectional": has.bidirectional or not needs.bidirectional,
        "sinks": has.sinks or not needs.sinks,
        "tree": has.tree or not needs.tree,
    }
    return [f"{feature} {getattr(needs, feature)}" for feature, ok in supported.items() if not ok]


def choose(name: Name, needs: Needs) -> str:
    """Returns the named backend, or for "auto" the first of BACKENDS that supports all needs.

    Raises:
      ValueError: the backend lacks a feature; the message names backends that have it.
    """
    able = [other for other in BACKENDS if not refusals(other, needs)]
    if name == "auto" and able:
        return able[0]
    name = "chunked" if name == "auto" else name
    if name not in able:
        raise ValueError(
            f"attention {name}: {' and '.join(refusals(name, needs))} not supported; "
            f"{'use ' + ' or '.join(able) if able else 'no backend supports this'}"
        )
    return name


def causal(
    q_BTNH, k_BSKH, v_BSKV, segment_BT, index_BT, sinks_N=None, *, backend: Name, packing: bool = True,
    pattern: Pattern = PLAIN, query_chunk: int | None = None, key_segment_BS=None, key_index_BS=None,
):  # fmt: skip
    """`chunked.causal`, computed by a backend. Raises as `choose`.

    Args:
      packing: False = each row is one sequence without padding.
    """
    needs = Needs(
        hardware.platform(), q_BTNH.dtype.name, q_BTNH.shape[1], q_BTNH.shape[3], v_BSKV.shape[3], packing,
        other_keys=key_index_BS is not None, query_chunk=query_chunk, sinks=sinks_N is not None, **asdict(pattern),
    )  # fmt: skip
    name = choose(backend, needs)
    others = {} if key_index_BS is None else dict(key_segment_BS=key_segment_BS, key_index_BS=key_index_BS)
    if name == "chunked":
        more = dict(pattern=pattern, query_chunk=query_chunk, **others)
        return chunked.causal(q_BTNH, k_BSKH, v_BSKV, segment_BT, index_BT, sinks_N, **more)
    kernel = importlib.import_module(f".{name}", __package__)  # lazy: kernels import platform libraries
    sinks = () if sinks_N is None else (sinks_N,)
    if others:
        others["index_BT"] = index_BT
    return kernel.causal(q_BTNH, k_BSKH, v_BSKV, segment_BT, *sinks, pattern=pattern, **others)


def ring(
    q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N=None, *, axis: str, backend: Name, pattern: Pattern = PLAIN,
    query_chunk: int | None = None,
):  # fmt: skip
    """`chunked.ring`, computed by a backend. Raises as `choose`, and if the pattern is bidirectional."""
    if pattern.bidirectional:
        raise ValueError("attention: a ring of devices is causal, got a bidirectional pattern; use gather or ulysses")
    needs = Needs(
        hardware.platform(), q_BTNH.dtype.name, q_BTNH.shape[1], q_BTNH.shape[3], v_BTKV.shape[3], ring=True,
        query_chunk=query_chunk, sinks=sinks_N is not None, **asdict(pattern),
    )  # fmt: skip
    name = choose(backend, needs)
    rows, how = (q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N), dict(axis=axis, pattern=pattern)
    if name == "chunked":
        return chunked.ring(*rows, query_chunk=query_chunk, **how)
    return importlib.import_module(f".{name}", __package__).ring(*rows, **how)


def tree(
    q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BS, position_BS, sinks_N=None, *, backend: Name,
    pattern: Pattern = PLAIN, query_chunk: int | None = None,
):  # fmt: skip
    """`tree.tree`, computed by a backend. Raises as `choose`, and if the pattern is bidirectional."""
    if pattern.bidirectional:
        raise ValueError("attention: tokens of a trie see only those before them, got a bidirectional pattern")
    needs = Needs(
        hardware.platform(), q_BTNH.dtype.name, q_BTNH.shape[1], q_BTNH.shape[3], v_BSKV.shape[3],
        query_chunk=query_chunk, sinks=sinks_N is not None, tree=True, **asdict(pattern),
    )  # fmt: skip
    name = choose(backend, needs)
    rows = q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BS, position_BS, sinks_N
    if name == "chunked":
        return tries.tree(*rows, pattern=pattern, query_chunk=query_chunk)
    return importlib.import_module(f".{name}", __package__).tree(*rows, pattern=pattern)
