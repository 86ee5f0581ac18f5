"""Which code computes attention: the chunked reference, or the kernel of a platform that honours all it is asked."""

import importlib
from dataclasses import dataclass
from typing import Literal

import jax

from . import chunked

Name = Literal["auto", "chunked", "splash", "cudnn", "triton"]


@dataclass(frozen=True)
class Needs:
    """What a call asks for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      dtype: of queries, keys and values.
      length: positions of a row on one device.
      head_dim: size of a head.
      packing: rows may hold several sequences, or padding.
      other_keys: keys are not the queries' own, as where rows are gathered over cp.
      window: most tokens that one sees; None = no limit.
      chunk: queries a chunk, where they are to come in chunks of that size.
      softcap: scores are cap x tanh(score / cap) (arXiv:2408.00118); None = as they are.
      sinks: each head has a learnt logit that no value belongs to (arXiv:2309.17453).
    """

    platform: str
    dtype: str
    length: int
    head_dim: int
    packing: bool = True
    other_keys: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Supports:
    """What a backend honours; the names are those of `Needs`.

    Attributes:
      platforms, dtypes: None = any.
      length: rows must be a multiple of it.
      head_dim: sizes of a head must be a multiple of it,
      most_head_dim: and no more than this.
    """

    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    length: int = 1
    head_dim: int = 1
    most_head_dim: int | None = None
    packing: bool = False
    other_keys: bool = False
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sinks: bool = False


HALF = "bfloat16", "float16"
FLOAT = *HALF, "float32"
# By the file of this folder that has them, in the order in which "auto" looks for one that honours everything.
BACKENDS: dict[str, Supports] = {
    "splash": Supports(("tpu",), length=128, packing=True, window=True),
    "cudnn": Supports(("gpu",), HALF, head_dim=8, most_head_dim=128, window=True),
    "triton": Supports(("gpu",), FLOAT, most_head_dim=256, packing=True, window=True),
    "chunked": Supports(packing=True, other_keys=True, window=True, chunk=True),
}


def refusals(name: str, needs: Needs) -> list[str]:
    """What the backend cannot honour: features with their values, none if it serves."""
    has = BACKENDS[name]
    honoured = {
        "platform": has.platforms is None or needs.platform in has.platforms,
        "dtype": has.dtypes is None or needs.dtype in has.dtypes,
        "length": needs.length % has.length == 0,
        "head_dim": needs.head_dim % has.head_dim == 0 and needs.head_dim <= (has.most_head_dim or needs.head_dim),
        "packing": has.packing or not needs.packing,
        "other_keys": has.other_keys or not needs.other_keys,
        "window": has.window or needs.window is None,
        "chunk": has.chunk or needs.chunk is None,
        "softcap": has.softcap or needs.softcap is None,
        "sinks": has.sinks or not needs.sinks,
    }
    return [f"{feature} {getattr(needs, feature)}" for feature, kept in honoured.items() if not kept]


def choose(name: Name, needs: Needs) -> str:
    """The backend that computes: the named one, or for "auto" the first of BACKENDS that honours everything.

    Raises:
      ValueError: it does not honour something; the message says what does.
    """
    able = [other for other in BACKENDS if not refusals(other, needs)]
    if name == "auto" and able:
        return able[0]
    name = "chunked" if name == "auto" else name
    if name not in able:
        raise ValueError(
            f"attention {name}: {' and '.join(refusals(name, needs))} cannot be honoured; "
            f"{'take ' + ' or '.join(able) if able else 'no backend does'}"
        )
    return name


def causal(
    q_BTNH, k_BSKH, v_BSKH, segment_BT, index_BT, *, backend: Name, packing: bool = True, window: int | None = None,
    chunk: int | None = None, key_segment_BS=None, key_index_BS=None,
):  # fmt: skip
    """`attention.causal` by a backend. Raises as `choose`.

    Args:
      packing: False = each row is one sequence from end to end.
    """
    needs = Needs(
        jax.default_backend(), q_BTNH.dtype.name, q_BTNH.shape[1], q_BTNH.shape[3], packing,
        other_keys=key_index_BS is not None, window=window, chunk=chunk,
    )  # fmt: skip
    name = choose(backend, needs)
    if name == "chunked":
        keys = dict(key_segment_BS=key_segment_BS, key_index_BS=key_index_BS)
        return chunked.causal(q_BTNH, k_BSKH, v_BSKH, segment_BT, index_BT, window=window, chunk=chunk, **keys)
    kernel = importlib.import_module(f".{name}", __package__)  # loaded where it is used
    more = {} if window is None else {"window": window}
    return kernel.causal(q_BTNH, k_BSKH, v_BSKH, segment_BT, **more)


def ring(*rows, backend: Name, **more):
    """`attention.ring`, which works on blocks of the chunked reference.

    Raises:
      ValueError: another backend.
    """
    if backend not in ("auto", "chunked"):
        raise ValueError(f"attention {backend}: ring over cp cannot be honoured; take chunked, or ulysses over cp")
    return chunked.ring(*rows, **more)
