"""Bodies of requests to what they ask for, and results to bytes; what is malformed raises ValueError, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from . import losses
from .schema import FLOAT32, INT64, MESSAGES

PROTOBUF = "application/x-protobuf"
LARGEST = 2**63 - 1  # of whole numbers; copies of a sampling client begin at a random multiple of 10^9
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")  # of what is saved
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
NO_TOKEN, NO_LOGP = 0, -99999.0  # empty places of the likeliest tokens


@dataclass(frozen=True)
class Datum:
    """A row to learn from: position i of `tokens` predicts `inputs["target_tokens"][i]`.

    Attributes:
      tokens: i32[n].
      inputs: i32[n] `target_tokens`, and f32[n] what the loss needs.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Pass:
    """A forward_backward request; forward alone with `forward_only`."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


# -- passes ------------------------------------------------------------------------------------------


def read_pass(body: bytes, vocab: int, context: int) -> Pass:
    """Parses and checks a ForwardBackwardRequest.

    Args:
      vocab, context: tokens of the model, and most tokens of a datum.

    Raises:
      ValueError: it is malformed, or cannot be computed.
    """
    message = _parsed(body)
    name = message.loss_fn
    loss = losses.loss(name)
    given = {key: _number(value) for key, value in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
    options = losses.options(name, given)
    if not message.data:
        raise ValueError("data must have at least one datum, got none")
    data = [_datum(each, f"data[{i}]", loss, vocab, context) for i, each in enumerate(message.data)]
    if len({frozenset(datum.inputs) for datum in data}) > 1:
        raise ValueError("data: all must have the same loss_fn_inputs, got weights in some alone")
    return Pass(message.model_id, message.seq_id, data, name, options, message.forward_only)


def read_pass_order(body: bytes) -> tuple[str, int]:
    """(model_id, seq_id) of a ForwardBackwardRequest whose rest may be wrong. Raises ValueError if they are missing."""
    message = _parsed(body)
    if not message.model_id or message.seq_id < 1:
        raise ValueError(f"model_id and seq_id, from 1, are needed, got {message.model_id!r:.80} and {message.seq_id}")
    return message.model_id, message.seq_id


def _parsed(body: bytes) -> Any:
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError:
        raise ValueError("the body must be a ForwardBackwardRequest in protobuf") from None


def _number(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value") or "number")


def _datum(message: Any, where: str, loss: losses.Loss, vocab: int, context: int) -> Datum:
    chunks = [chunk.WhichOneof("value") for chunk in message.model_input]
    if other := set(chunks) - {"encoded_text"}:
        raise ValueError(f"{where}.model_input must be chunks of text for this model, got {sorted(map(str, other))[0]}")
    tokens = _array(b"".join(chunk.encoded_text.tokens for chunk in message.model_input), "<i4", f"{where}.model_input")
    if not 0 < len(tokens) <= context:
        raise ValueError(f"{where}.model_input must have from 1 to {context} tokens, got {len(tokens)}")
    given = {name: _tensor(tensor, f"{where}.{name}") for name, tensor in message.loss_fn_inputs.items()}
    needed = "target_tokens", *loss.needs
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{where}.loss_fn_inputs must have {', '.join(needed)}, got no {missing[0]}")
    inputs = {name: given[name] for name in (*needed, *loss.takes) if name in given}
    for name, x in inputs.items():
        if x.shape != tokens.shape:
            raise ValueError(
                f"{where}.{name} must have one number for each of the {len(tokens)} tokens, got {list(x.shape)}"
            )
        if name == "target_tokens" and x.dtype.kind != "i":
            raise ValueError(f"{where}.{name} must be int64, got {x.dtype}")
        if not np.isfinite(x).all():
            raise ValueError(f"{where}.{name} must be finite numbers")
    for name, ids in (("model_input", tokens), ("target_tokens", inputs["target_tokens"])):
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"{where}.{name} must be token ids from 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
    kind = lambda name: np.int32 if name == "target_tokens" else np.float32
    return Datum(tokens.astype(np.int32), {name: x.astype(kind(name)) for name, x in inputs.items()})


def _tensor(message: Any, where: str) -> np.ndarray:
    if message.WhichOneof("value") != "dense":
        raise ValueError(f"{where} must be a dense tensor, one number a token; several targets a token are not served")
    if message.dtype not in DTYPES:
        raise ValueError(f"{where} must be float32 or int64, got dtype {message.dtype}")
    x = _array(message.dense, DTYPES[message.dtype], where)
    shape = [*message.shape] or [len(x)]
    if len(shape) != 1 or shape[0] != len(x):
        raise ValueError(f"{where} must be one number a token, of its shape, got shape {shape[:4]} of {len(x)} numbers")
    return x


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{where} must be whole numbers of {np.dtype(dtype).itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def pass_result(of_data: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: arrays by name, of all data in order."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, rows in of_data.items():
        record.num_datums = len(rows)
        field = record.fields[name]
        field.dtype, field.data = FLOAT32, np.concatenate(rows).astype("<f4").tobytes()
        field.offsets = np.cumsum([0, *(4 * len(row) for row in rows)]).astype("<i8").tobytes()  # in bytes
    return message.SerializeToString()


# -- samples -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """A generated sequence; `top` are the likeliest tokens of each position, (log-probability, id), if asked for."""

    tokens: list[int]
    logp: list[float]
    length: bool
    top: list[list[tuple[float, int]]] | None = None


def sample_result(
    sequences: Sequence[Sampled], prompt_logp: Sequence[float | None] | None = None,
    prompt_top: Sequence[Sequence[tuple[float, int]] | None] | None = None, cached: int = 0, k: int = 0,
    prompt_k: int = 0,
) -> bytes:  # fmt: skip
    """A SampleResponse; None = not asked for. A log-probability of the prompt that is None becomes NaN."""
    message = MESSAGES["SampleResponse"](prompt_cache_hit_tokens=cached)
    for each in sequences:
        one = message.sequences.add(stop_reason=int(each.length))
        one.tokens = np.array(each.tokens, "<i4").tobytes()
        one.logprobs = np.array(each.logp, "<f4").tobytes()
        if each.top is not None:
            _put_top(one.topk_sampled_logprobs, each.top, k)
    if prompt_logp is not None:
        message.prompt_logprobs = np.array([np.nan if p is None else p for p in prompt_logp], "<f4").tobytes()
    if prompt_top is not None:
        _put_top(message.topk_prompt_logprobs, prompt_top, prompt_k)
    return message.SerializeToString()


def _put_top(message: Any, rows: Sequence[Sequence[tuple[float, int]] | None], k: int) -> None:
    ids, logp = np.full((len(rows), k), NO_TOKEN, "<i4"), np.full((len(rows), k), NO_LOGP, "<f4")
    for i, row in enumerate(rows):
        for j, (value, token) in enumerate((row or ())[:k]):
            ids[i, j], logp[i, j] = token, value
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), logp.tobytes(), k, len(rows)


# -- fields of JSON ----------------------------------------------------------------------------------


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r:.80}")
    return value


def whole(body: Mapping[str, Any], name: str, default: int | None = None, least: int = 0, most: int = LARGEST) -> int:
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r:.80}")
    return value


def number(body: Mapping[str, Any], name: str, default: float, least: float = 0.0, most: float = 3e38) -> float:
    """A number; null is none, as clients write NaN and infinity so."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        got = "null, as which clients send NaN and infinity" if value is None else f"{value!r:.80}"
        raise ValueError(f"{name} must be a number from {least:.9g} to {most:.9g}, got {got}")
    return float(value)


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.80}")
    return value


def table(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r:.80}")
    return value


def saved_name(body: Mapping[str, Any], name: str = "path") -> str:
    """The name under which something is saved, a part of its path."""
    value = text(body, name)
    if not NAME.fullmatch(value):
        raise ValueError(f"{name} must be letters, digits, '_', '-' and '.', at most 200, got {value!r:.80}")
    return value


def tokens(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The token ids of a ModelInput."""
    chunks = table(body, name).get("chunks")
    if not isinstance(chunks, list) or not chunks:
        raise ValueError(f"{name} must have chunks, got {chunks!r:.80}")
    ids: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise ValueError(f"{name} must be chunks of text for this model, got {chunk!r:.80}")
        if not isinstance(chunk.get("tokens"), list):
            raise ValueError(f"{name}: a chunk must have tokens, got {chunk.get('tokens')!r:.80}")
        ids += chunk["tokens"]
    return tuple(ids)
