"""Reads SGLang's answers: a field that is missing, of another type or out of range becomes a ServerError."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ServerError
from .answers import ADAPTERS, FINISHES, MALFORMED, described, ids, logprob, logprobs, positive, text, token_id
from .concurrency import Report
from .labels import per_token
from .types import Part

BULKY = (
    "input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs", "weight_versions",
    "routed_experts", "output_token_sampling_mask", "output_token_sampling_logprobs",
)  # fmt: skip


def part(
    answer: Mapping[str, Any], experts_per_token: int, generated: bool, vocabulary: int, top_k: int = 0, top: int = 0
) -> Part:  # fmt: skip
    """The answer to a request for one completion.

    Args:
      experts_per_token: of the model, if the experts of each token were asked for.
      generated: whether tokens were asked for.
      vocabulary: number of tokens of the model; 0 = unknown.
      top_k: most tokens that each token was drawn from, if they were asked for: log-probabilities are then those among
        them.
      top: number of the likeliest tokens at each place, if they were asked for.

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
    masks = _masks(meta.get("output_token_sampling_mask"), tokens, vocabulary, top_k) if top_k else []
    logp = meta["output_token_sampling_logprobs"] if masks else [row[0] for row in rows]
    if len(logp) != len(tokens):
        raise ServerError(f"sampling log-probabilities of {len(logp)} tokens do not belong to the {len(tokens)} ids")
    finish = meta["finish_reason"]["type"]
    if finish not in FINISHES:
        raise ServerError(f"the finish must be one of {', '.join(FINISHES)}, got {meta['finish_reason']!r:.200}")
    return Part(
        tokens=tokens,
        logp=logprobs(logp),
        labels=per_token(meta.get("weight_versions", ()), len(tokens)),
        finish=finish,
        text=text(answer.get("text")),
        info={
            **{key: value for key, value in meta.items() if key not in BULKY},
            "cached_tokens": positive(meta, "cached_tokens"),
        },
        routed=_routed(meta, experts_per_token, len(tokens)),
        inputs=[_scored(row, vocabulary) for row in meta.get("input_token_logprobs") or ()],
        input_top=[
            [_scored(one, vocabulary) for one in row or ()] for row in meta.get("input_top_logprobs") or ()
        ],
        adapter=text(meta.get("lora_path")),
        preemptions=positive(meta, "num_retractions"),
        masks=masks,
        top=_likeliest(meta.get("output_top_logprobs"), len(tokens), vocabulary, top) if top else (),
    )  # fmt: skip


def unfinished(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event of a stream as the answer to a request that was aborted there, with "" for labels that it lacks; None of
    the last one. Raises one of MALFORMED for an event of another form."""
    meta = event["meta_info"]
    if meta["finish_reason"]:
        return None
    unknown = [{"version": "", "start": 0, "end": len(event["output_ids"])}]
    return {**event, "meta_info": {"weight_versions": unknown, **meta, "finish_reason": {"type": "abort"}}}


def aborted(answer: Mapping[str, Any]) -> bool:
    """Whether a request was aborted; False for an answer of another form."""
    try:
        return answer["meta_info"]["finish_reason"]["type"] == "abort"
    except MALFORMED:
        return False


def _scored(row: Sequence, vocabulary: int) -> list:
    """[log-probability or None, id, text] of a token of the prompt."""
    return [None if row[0] is None else logprob(row[0]), token_id(row[1], vocabulary), *row[2:]]


def _masks(rows: Any, tokens: Sequence[int], vocabulary: int, top_k: int) -> list[np.ndarray]:
    """The ids of the tokens that each token was drawn from, ascending; raises ServerError unless there are at most
    `top_k` with the token among them."""
    if tokens and not isinstance(rows, list):
        raise ServerError(f"sampling masks were asked for, got {rows!r:.80}; use areax serve or SGLang 0.5.23")
    if len(rows or ()) != len(tokens):
        raise ServerError(f"sampling masks of {len(rows or ())} tokens do not belong to the {len(tokens)} ids")
    for token, row in zip(tokens, rows or (), strict=True):
        if token not in ids(row, vocabulary):
            raise ServerError(f"a sampling mask must have the token that was drawn, {token}, got {row!r:.80}")
        if len(row) > top_k:
            raise ServerError(
                f"a sampling mask must have at most top_k {top_k} tokens, got {len(row)}, of which some tie with the "
                "last; use areax serve, which leaves such out, or lower top_p"
            )
    return [np.unique(np.array(row, np.int32)) for row in rows or ()]


def _likeliest(rows: Any, count: int, vocabulary: int, top: int) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probabilities) of the `top` likeliest tokens at each of `count` places; raises ServerError unless there
    are as many."""
    if len(rows or ()) != count:
        raise ServerError(f"likeliest tokens at {count} places were asked for, got those at {len(rows or ())}")
    made = [(ids([one[1] for one in row], vocabulary), logprobs([one[0] for one in row])) for row in rows or ()]
    for own, _ in made:
        if not len(own) == len({*own}) == top:
            raise ServerError(f"the {top} likeliest tokens, which differ, were asked for, got {len(own)}: {own!r:.80}")
    return made


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
