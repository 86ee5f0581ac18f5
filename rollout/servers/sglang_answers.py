"""Reads SGLang's answers: a field that is missing, of another type or out of range becomes a ServerError.

What a server samples is trained on, so a value that cannot be right must not reach the trainer as another one.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from ..errors import ServerError
from ..types import LARGEST_LOGP, LEAST_LOGP, Finish
from .concurrency import Report
from .labels import per_token
from .types import Part

# What reading an answer of another form raises.
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
BULKY = (
    "input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs", "weight_versions",
    "routed_experts",
)  # fmt: skip
FINISHES = tuple(finish for finish in get_args(Finish) if finish != "error")  # which is a sample's alone
RESERVED = 512  # tokens of the context that servers may keep free, such as pages
ADAPTERS = 2  # newest adapters that stay loaded on a server, in addition to those in use


def part(answer: Mapping[str, Any], experts_per_token: int, generated: bool, vocabulary: int) -> Part:
    """The answer to a request for one completion.

    Args:
      experts_per_token: of the model, if the experts of each token were asked for.
      generated: whether tokens were asked for.
      vocabulary: number of tokens of the model; 0 = unknown.

    Raises:
      ServerError: a value that is out of range, in words.
      MALFORMED: a field is missing, or of another type.
    """
    meta = answer["meta_info"]
    tokens = ids(answer["output_ids"], vocabulary)
    # SGLang may return an output log-probability without a token for a prompt that was prefilled in a decoding batch.
    rows = meta["output_token_logprobs"] if generated else []
    if [row[1] for row in rows] != tokens:
        raise ServerError(f"logprobs of {len(rows)} tokens do not belong to the {len(tokens)} ids")
    if tokens and "weight_versions" not in meta:
        raise ServerError(
            "the answer has no weight_versions, so the weights that sampled a token are unknown; "
            "use a server that reports them (SGLang 0.5.23 does)"
        )
    finish = meta["finish_reason"]["type"]
    if finish not in FINISHES:
        raise ServerError(f"the finish must be one of {', '.join(FINISHES)}, got {meta['finish_reason']!r:.200}")
    return Part(
        tokens=tokens,
        logp=[logprob(row[0]) for row in rows],
        labels=per_token(meta.get("weight_versions", ()), len(tokens)),
        finish=finish,
        text=_text(answer.get("text")),
        info={
            **{key: value for key, value in meta.items() if key not in BULKY},
            "cached_tokens": positive(meta, "cached_tokens"),
        },
        routed=_routed(meta, experts_per_token, len(tokens)),
        inputs=[_scored(row, vocabulary) for row in meta.get("input_token_logprobs") or ()],
        input_top=[
            [_scored(one, vocabulary) for one in row or ()] for row in meta.get("input_top_logprobs") or ()
        ],
        adapter=_text(meta.get("lora_path")),
        preemptions=positive(meta, "num_retractions"),
    )  # fmt: skip


def wrong_end(part: Part, sampling: Mapping[str, Any], prompt: int, context: int) -> str:
    """Why an answer cannot end as it says it does; "" if it can.

    Args:
      sampling: of the request.
      prompt: its tokens.
      context: tokens of the server's longest sequence; 0 = unknown.
    """
    asked = sampling.get("max_new_tokens", 0)
    if asked == 0 and "max_new_tokens" in sampling:
        return ""
    stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids", ())  # SGLang drops both
    if after := set(stops).intersection(part.tokens[:-1]):
        return f"an answer must end at the first stop token, got tokens after {min(after)}"
    if part.finish == "abort":
        return ""
    if not part.tokens:
        return f"an answer must have a token or more, got none, and the finish {part.finish}"
    if part.finish == "length" and len(part.tokens) < asked and 0 < prompt + len(part.tokens) < context - RESERVED:
        return f"an answer cut off at its length must have the {asked} tokens asked for, got {len(part.tokens)}"
    if part.finish == "stop":
        matched, last = part.info["finish_reason"].get("matched"), part.tokens[-1]
        by_text = any(sampling.get(name) for name in ("stop", "json_schema", "regex", "ebnf"))
        ended = last in stops or not stops if matched is None else last == matched  # or a token of the model's own
        if not (ended or by_text):
            return f"an answer that stops must end in the stop token, {matched or sorted(stops)}, got {last}"
    return ""


def ids(tokens: Any, vocabulary: int) -> list[int]:
    """A list of token ids; raises ServerError unless each is a whole number in [0, vocabulary), 0 = any."""
    if not isinstance(tokens, list):
        raise ServerError(f"output_ids must be a list of token ids, got {tokens!r:.80}")
    for token in tokens:
        _id(token, vocabulary)
    return tokens


def _id(token: Any, vocabulary: int) -> int:
    if type(token) is not int or not 0 <= token < (vocabulary or 2**31):
        below = f"below the vocabulary size {vocabulary}" if vocabulary else "below 2^31"
        raise ServerError(f"a token id must be a whole number from 0 on, {below}, got {token!r:.80}")
    return token


def logprob(value: Any) -> float:
    """A log-probability in nats; raises ServerError unless it is a number from LEAST_LOGP to 0, up to rounding."""
    if type(value) not in (int, float) or not LEAST_LOGP <= value <= LARGEST_LOGP:
        raise ServerError(f"a log-probability must be a number from {LEAST_LOGP:g} to 0, got {value!r:.80}")
    return float(value)


def _scored(row: Sequence, vocabulary: int) -> list:
    """[log-probability or None, id, text] of a token of the prompt."""
    return [None if row[0] is None else logprob(row[0]), _id(row[1], vocabulary), *row[2:]]


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ServerError(f"a text must be a string, got {value!r:.80}")
    return value or ""


def _routed(meta: Mapping[str, Any], experts_per_token: int, new: int) -> np.ndarray | None:
    """The experts, i32[read, layers, experts a token], which SGLang sends in base64 without their shape."""
    if not (experts_per_token and meta.get("routed_experts")):
        return None
    read = meta["prompt_tokens"] + new - 1
    sent = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), np.int32)
    if not read or len(sent) % (read * experts_per_token):
        raise ServerError(
            f"routed experts must be {experts_per_token} per layer for {read} tokens, got {len(sent)} in all; the "
            "server has another model"
        )
    if len(sent) and sent.min() < 0:
        raise ServerError(f"routed experts must be numbers from 0 on, got {sent.min()}")
    return sent.reshape(read, -1, experts_per_token)


def described(error: Exception) -> str:
    """An error of MALFORMED in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def checksums(answer: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """Checksums by tensor name of each rank; raises ServerError, which names `where`, for anything else, or none."""
    try:
        ranks = [{str(name): str(x) for name, x in rank["checksums"].items()} for rank in answer["ranks"]]
    except MALFORMED as error:
        raise ServerError(f"{where}: not a list of checksums ({described(error)})") from error
    if not ranks or not all(ranks):
        raise ServerError(f"{where}: not a list of checksums (none of {'a rank' if ranks else 'any rank'})")
    return ranks


def load_report(answer: Mapping[str, Any]) -> Report | None:
    """The load summed over replicas; None for an answer of another form."""
    try:
        names = "num_running_reqs", "num_waiting_reqs", "token_usage"
        running, waiting, usage = zip(*([float(load[name]) for name in names] for load in answer["loads"]), strict=True)
        return Report(int(sum(running)), int(sum(waiting)), max(usage)) if np.isfinite(usage).all() else None
    except MALFORMED:
        return None


def adapter_refusal(info: Mapping[str, Any], rank: int, modules: Collection[str]) -> str:
    """Why a server with this /server_info loads no adapters of this rank on these modules; "" if it does."""
    if info.get("enable_lora") is not True:
        return "serves no adapters (SGLang: --enable-lora)"
    most, room = positive(info, "max_lora_rank"), info.get("max_loaded_loras")
    targets = [str(name) for name in _list(info, "lora_target_modules")]
    if most and most < rank:
        return f"supports adapters of rank {most} at most, not {rank} (SGLang: --max-lora-rank)"
    missing = sorted(set(modules) - set(targets))
    if "all" not in targets and missing:
        return f"supports no adapters of {', '.join(missing)} (SGLang: --lora-target-modules)"
    if isinstance(room, int) and room <= ADAPTERS:
        return f"keeps {room} adapters at most, and a push needs {ADAPTERS + 1} (SGLang: --max-loaded-loras)"
    if info.get("dp_size", 1) != 1:
        return "has several replicas (--dp-size), on which SGLang loads no adapters; start a server for each"
    return ""


def positive(info: Mapping[str, Any], name: str) -> int:
    """The field if it is a whole number above 0, else 0."""
    value = info.get(name)
    return value if type(value) is int and value > 0 else 0


def context(info: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence, by /server_info; 0 = unknown."""
    # SGLang's context_length is null if it is the model's; max_req_input_len is then a few tokens below the limit.
    limit = positive(info, "context_length") or positive(info, "max_req_input_len")
    return min(filter(None, (limit, positive(info, "max_total_num_tokens"))), default=0)


def slots(info: Mapping[str, Any]) -> int:
    """Sequences generated at a time, by /server_info; 0 = unknown."""
    each = sum(positive(state, "effective_max_running_requests_per_dp") for state in states(info))
    # In SGLang max_running_requests is an option, in the embedded server the actual limit.
    return each or positive(info, "max_running_requests")


def states(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The replicas' own reports in /server_info."""
    return [state for state in _list(info, "internal_states") if isinstance(state, Mapping)]


def _list(info: Mapping[str, Any], name: str) -> list:
    value = info.get(name)
    return value if isinstance(value, list) else []
