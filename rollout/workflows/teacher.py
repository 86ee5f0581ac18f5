"""Teachers on generation servers: log-probabilities of samples under a frozen model, for distillation.

A teacher is a fleet (`client.connect`) of servers with SGLang's API that serve it throughout the run. They report
log-probabilities at temperature 1, whatever temperature the samples were drawn at. Their key is in KEY. A teacher reads
a sample's `teacher_prompt`, if it has one, in place of the tokens before the first learnt one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import object_path
from ..chat import conversation, template
from ..chat.cross_tokenizer import Pair
from ..errors import ServerError
from ..fleet.fleet import Fleet
from ..processes.printable import one_line
from ..types import Sample

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # before a second attempt; doubles
KEY = "AREAX_TEACHER_KEY"  # environment variable: the key that the servers of teachers require
PADDED = 2  # times the size of a vocabulary that models of the same tokenizer may have
ROUNDING = 0.02  # by which rounded probabilities of the likeliest tokens may exceed 1 in sum


async def score(
    fleet: Fleet, tokens: Sequence[int], top_k: int = 0, vocabulary: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores tokens under a teacher: (logp f32[n], ids i32[n, K], top f32[n, K]).

    These are the log-probability (nats) of each of n tokens given those before it, and the teacher's K likeliest tokens
    in its place with theirs, likeliest first. All are at the token's own index, and 0 for the first token. A value that
    the server leaves out or reports as null is NaN.

    Args:
      top_k: K. The embedded server reports up to 128.
      vocabulary: size of the student's vocabulary, of which the teacher's is PADDED times as large at most.

    Raises:
      ValueError: a server refuses the request (too many tokens for its context, or K too large).
      ServerError: no answer, or one for other tokens; log-probabilities of which the probabilities sum to more than 1,
        or can have no sum of 1 with those of all other tokens; null for a token without K, or at every position.
    """
    url, part = await fleet.read(tokens, top_k=top_k)
    n = len(tokens)
    if [row[1] for row in part.inputs] != [int(t) for t in tokens]:
        raise ServerError(f"{url}/generate: must return log-probabilities of the {n} input tokens, got those of others")
    number = lambda value: np.nan if value is None else value
    logp = np.array([0.0, *(number(row[0]) for row in part.inputs[1:])], np.float32)
    if not top_k and np.isnan(logp).any():
        raise ServerError(
            f"{url}/generate: must return a log-probability of each input token but the first, got null at "
            f"{int(np.isnan(logp).argmax())}"
        )
    ids, top = np.zeros((n, top_k), np.int32), np.zeros((n, top_k), np.float32)
    if top_k:
        counts = {len(row or ()) for row in part.input_top[1:]}
        if len(part.input_top) != n or counts - {top_k}:
            raise ServerError(
                f"{url}/generate: must return the {top_k} likeliest tokens at each of {n} positions, got "
                f"{sorted(counts)} at {len(part.input_top)}; check the size of its vocabulary"
            )
        for i, row in enumerate(part.input_top[1:], 1):
            ids[i], top[i] = [one[1] for one in row], [number(one[0]) for one in row]
        if why := _contradiction(logp[1:], np.array(tokens[1:]), ids[1:], top[1:], vocabulary):
            raise ServerError(f"{url}/generate: {why}; look for a proxy that changes answers")
    return logp, ids, top


def _contradiction(
    logp: np.ndarray, tokens: np.ndarray, ids: np.ndarray, top: np.ndarray, vocabulary: int | None
) -> str:
    """What cannot be of a position's likeliest tokens, beside the token that is there; "" if nothing is."""
    if len(top) and np.isnan(top).any(1).all():
        return "log-probabilities of the likeliest tokens must be numbers, got null at every position"
    mass = np.nansum(np.exp(top), axis=1)
    if (total := mass.max(initial=0)) > 1 + ROUNDING:
        count = top.shape[1]
        return f"probabilities of a position's {count} likeliest tokens must have a sum of at most 1, got {total:.4g}"
    if vocabulary:  # no other token is likelier than the least of those
        most = mass + np.exp(top.min(1)) * max(0, PADDED * vocabulary - top.shape[1])
        if np.nanmin(most, initial=1) < 1 - ROUNDING:
            at = int(np.nanargmin(most))
            return (
                f"probabilities of all {vocabulary} tokens must have a sum of 1, got likeliest ones with a sum of "
                f"{mass[at]:.4g} and a least of {np.exp(top[at].min()):.4g} at {at + 1}"
            )
    if any(len({*row}) < len(row) for row in ids.tolist()):
        return "a position's likeliest tokens must differ, got one twice"
    least = np.where(ids == tokens[:, None], top, np.inf).min(1, initial=np.inf)  # of the token itself, if it is listed
    listed, rest = np.isfinite(least), np.nanmin(top, 1, initial=np.inf)
    apart = np.where(listed, np.abs(logp - least), np.maximum(logp - rest, 0))
    if (apart > ROUNDING).any():
        at = int(np.nanargmax(apart))
        return (
            f"a token must have the log-probability that the list of its position has, at most its least, got "
            f"{logp[at]:.4g} at {at + 1}"
        )
    return ""


def named(teachers: Sequence[str]) -> dict[str, list[str]]:
    """Groups addresses `http://...` or `name=http://...` by name, "" if unnamed; equal names share the load."""
    urls: dict[str, list[str]] = {}
    for text in teachers:
        name, _, url = text.rpartition("=")
        urls.setdefault(name, []).append(url)
    return urls


async def taught(workflow, annotate, generate, row):
    """A workflow that applies `annotate` to the samples of `workflow`; bind both with `functools.partial`."""
    made = await workflow(generate, row)
    samples = [] if made is None else made if isinstance(made, list) else [made]
    return await annotate([s.replace(info={"row": row, **s.info}) for s in samples])


def with_prompt(samples: Sequence[Sample], row: Mapping[str, Any], tokenizer: Any) -> list[Sample]:
    """The samples of a row with the prompt that their teacher reads: their own, or the row's "teacher_prompt", if any.

    Raises:
      ValueError: as `conversation.read_by_teacher`, or as `template.prompted`.
    """
    if row.get("teacher_prompt") is None:
        return [*samples]
    read = tuple(template.prompted(tokenizer, conversation.read_by_teacher(row)).tokens)
    return [s if s.teacher_prompt else s.replace(teacher_prompt=read) for s in samples]


def _placed(x: np.ndarray, sample: Sample) -> np.ndarray:
    """Values of the tokens that the teacher read, at the sample's."""
    if not sample.teacher_prompt:
        return x
    behind = len(x) - len(sample.teacher_prompt)
    return np.concatenate([np.zeros((len(sample.tokens) - behind, *x.shape[1:]), x.dtype), x[len(x) - behind :]])


def _of_spans(
    sample: Sample, pair: Pair, logp: np.ndarray, ids: np.ndarray, top: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `score` returned, at the sample's tokens, as `annotate` has it with a pair of tokenizers."""
    own, theirs = sample.arrays["teacher_span"][1], sample.reading[1]
    here, there = (np.unique(span, return_index=True)[1][int(0 in span) :] for span in (own, theirs))
    n, K = len(own), ids.shape[1]
    logp_n, ids_nK, top_nK = np.zeros(n, np.float32), np.full((n, K), -1, np.int32), np.zeros((n, K), np.float32)
    logp_n[here] = np.bincount(theirs, weights=logp, minlength=len(there) + 1)[1:]
    ids_nK[here] = np.append(pair.to_own, -1)[np.minimum(ids[there], len(pair.to_own))]
    top_nK[here] = top[there]
    return logp_n, ids_nK, top_nK


async def annotate(
    samples: Sequence[Sample], teachers: Mapping[str, Fleet], *, top_k: int = 0, vocabulary: int | None = None,
    attempts: int = 1, pair: Pair | None = None,
) -> list[Sample]:  # fmt: skip
    """Adds the teachers' log-probabilities to the samples as "target" arrays.

    `teacher` f32[n] is the log-probability of each token; with `top_k`, `teacher_ids` i32[n, K] and `teacher_logp`
    f32[n, K] are the teacher's likeliest tokens; of tokens before those that both read, 0. A sample's teacher is
    `info["row"]["teacher"]`, a name in `teachers`; if there is only one teacher, rows need not name it.

    Args:
      vocabulary: size of the student's vocabulary, which must contain all of the teacher's top tokens.
      pair: of tokenizers, if the teachers' is another: samples are those of `pair.read`. `teacher` is then the sum over
        each span, at its first token, and 0 elsewhere; likeliest tokens are those at first tokens of spans, by the
        student's ids, -1 where it has none; elsewhere all are -1.
      attempts: how often a teacher is asked about a sample if it fails; episodes, which call this, are tried again.

    Raises:
      ValueError: a row names no teacher, or an unknown one; a token outside the student's vocabulary; as `score`.
      ServerError: as `score`.
    """

    async def one(sample: Sample) -> Sample:
        row = sample.info.get("row", {})
        if sample.images:
            raise ValueError(f"annotate: teachers read text alone, got a row with images; {object_path.row(row)}")
        name = row.get("teacher")
        if name is None and len(teachers) == 1:
            [name] = teachers
        if name not in teachers:
            raise ValueError(
                f"annotate: a row's 'teacher' must be one of {', '.join(sorted(teachers))}, got {name!r}; "
                f"{object_path.row(row)}"
            )
        for attempt in range(attempts):
            try:
                size = len(pair.to_own) if pair else vocabulary
                found = await score(teachers[name], sample.teacher_tokens.tolist(), top_k, size)
                logp, ids, top = _of_spans(sample, pair, *found) if pair else [_placed(x, sample) for x in found]
                break
            except ValueError as error:
                raise ValueError(f"annotate: {error}; {object_path.row(row)}") from error
            except ServerError as error:
                if attempt == attempts - 1:
                    raise
                log.warning("a teacher is asked again: %s", one_line(error))
                await asyncio.sleep(PAUSE_S * 2**attempt)
        if vocabulary is not None and ids.size and ids.max() >= vocabulary:
            raise ValueError(
                f"annotate: a teacher's tokens must be below the student's vocabulary size {vocabulary}, got id "
                f"{ids.max()}; serve a teacher of the same family"
            )
        arrays = {"teacher": logp} | ({"teacher_ids": ids, "teacher_logp": top} if top_k else {})
        made = {**sample.arrays, **{key: ("target", x) for key, x in arrays.items()}}
        return sample.replace(arrays=made, teacher_prompt=(), reading=())  # which is read now

    tasks = [asyncio.ensure_future(one(sample)) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
