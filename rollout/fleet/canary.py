"""Canaries: prompts that servers score every few versions, to find one that computes otherwise than the trainer.

The probe of a push proves with one prompt that a server has loaded a version (weights/verify.py). A canary has more and
longer prompts, while the server serves, and compares twice: the log-probabilities that it computes for given tokens
with the trainer's; and those that it reports for tokens that it samples in the ordinary way, over its prefix cache,
with those that it computes for them without. Keys and values of other weights in that cache show nowhere else.

A server that drifts gets no requests until one of these helps, each followed by another comparison (health.py): its
prefix cache is flushed; it loads all weights of the newest version, of adapters also those below; it is restarted, if
this run started it. Else it is dead for this run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import events
from ..errors import ServerError
from ..processes.turns import turn
from ..servers.image_tokens import TokensPrompt
from ..servers.server import Server
from ..servers.types import Probe, Published
from ..weights import lora, verify
from .attempt import ask
from .fleet import Fleet

log = logging.getLogger(__name__)

NEW = 8  # tokens that a server samples after each prompt
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": NEW, "min_new_tokens": 0,
    "ignore_eos": True,
}  # fmt: skip
SCORE_S = 60.0  # for the answers
GROWTH = 5.0  # times its first differences that a server may reach
# By the coarsest dtype: the difference that is within its rounding, whatever the first one was; and the largest that a
# server may have. ROUNDED: weights are rounded for servers and not for the trainer, which the first version, as it is
# read from files, does not show.
ROUNDED = "rounded"
ROUNDING = {"F32": (0.001, 0.008), "F16": (0.004, 0.03), "BF16": (0.03, 0.2), ROUNDED: (0.1, 0.2)}


def coarsest(*dtypes: str) -> str:
    """The coarsest of these dtypes, named as in computations or files, as files name it."""
    order = [*ROUNDING]
    return max((verify.STORED.get(name, name if name in ROUNDING else "BF16") for name in dtypes), key=order.index)


class Drift(ServerError):
    """A server's log-probabilities are beyond their limits."""


class Difference(NamedTuple):
    """Where a token's log-probabilities differ: by how much, in nats; which prompt and position; its id; the server's
    and the one that it should be."""

    nats: float
    prompt: int
    position: int
    token: int
    theirs: float
    wanted: float


class Differences(NamedTuple):
    """Mean absolute differences of a server, in nats per token.

    Attributes:
      trainer: of what it computes for the prompts from what the trainer does.
      cache: of what it reports for tokens that it samples, over its prefix cache, from what it computes for them.
      size: 1 + the mean |log-probability| of the prompts, with which rounding grows.
      worst: the token with the largest.
    """

    trainer: float
    cache: float
    size: float
    worst: Difference


async def check(fleet: Fleet) -> None:
    """Compares the healthy servers if the newest version has canaries, and takes those that drift out of traffic. One
    that does not answer, or has no or another version, is left to the next time."""
    weights = fleet.published
    if weights and weights.canaries:
        await asyncio.gather(*(_check(fleet, server, weights) for server in fleet.healthy))


async def _check(fleet: Fleet, server: Server, weights: Published) -> None:
    await turn()
    try:
        await fleet.on(server, prove(server, weights))
    except Drift as error:
        server.drifts = True
        fleet.counts["drifted"] += 1
        if server.state == "healthy":
            fleet.fail(server, "stale", str(error))
    except (ServerError, ValueError) as error:
        log.warning("a canary was not compared: %s", error)


async def prove(server: Server, weights: Published, after: str = "") -> bool:
    """Compares a server with the trainer; returns whether it had the version all the while, else nothing is known.

    Args:
      after: what was done because it drifted: "flush", "load" or "restart"; for the log.

    Raises:
      Drift: it is beyond its limits.
      ServerError, ValueError: it did not answer, or refused.
    """
    begun = events.now()
    found = await _differences(server, weights)
    if found is None:
        return False
    known = weights.canaries[0]
    limits = _limits(server, known, found.size)
    drifts = not (found.trainer <= limits[0] and found.cache <= limits[1])
    events.emit(
        "canary", begun=begun, url=server.url, label=weights.label, after=after, drifts=drifts, trainer=found.trainer,
        cache=found.cache, limits=limits, worst=found.worst._asdict(),
    )  # fmt: skip
    then = f" after a {after}" if after else ""
    coarse = coarsest(known.dtype, _dtype(server))
    if drifts:
        one, of = found.worst, "weights rounded" if coarse == ROUNDED else coarse
        raise Drift(
            f"{server.url}: canary{then}: version {weights.label} must be within {limits[0]:.2g} nats per token of the "
            f"trainer ({of}) and {limits[1]:.2g} over the prefix cache ({coarsest(_dtype(server))}), got "
            f"{found.trainer:.3g} and {found.cache:.3g}; worst: "
            f"token {one.token} at {one.position} of prompt {one.prompt}, {one.theirs:.4g} instead of {one.wanted:.4g}"
        )
    if server.first is None:
        server.first = found[:3]
        if coarse != known.dtype:
            log.warning(
                "%s: computes in %s, the trainer in %s: %.2g nats per token apart", server.url, coarse, known.dtype,
                found.trainer,
            )  # fmt: skip
    if server.drifts:
        server.drifts = False
        log.warning("%s: canary%s: version %s is the trainer's again", server.url, then, weights.label)
    return True


def _limits(server: Server, known: Probe, size: float) -> tuple[float, float]:
    """The largest differences (from the trainer, over the cache) that count as rounding.

    The first ones of a server are compared with what its dtype allows, later ones with GROWTH times these, because how
    far two programs round apart depends on both and on the model, but hardly on the version.
    """

    def limit(dtype: str, i: int) -> float:
        least, most = ROUNDING[dtype]
        grown = max(least, GROWTH * server.first[i] * size / server.first[2]) if server.first else most
        return min(grown, most, known.tolerance)

    own = coarsest(_dtype(server))
    return limit(coarsest(known.dtype, own), 0), limit(own, 1)


def _dtype(server: Server) -> str:
    """The dtype in which a server says that it computes; "" = unknown, or its weights are quantised."""
    dtype, quantised, *_ = json.loads(server.layout or "[null, null]")
    return str(dtype) if str(quantised) == "None" else ""


async def _differences(server: Server, weights: Published) -> Differences | None:
    """None if the server had another version, or got it anew meanwhile."""
    label, pauses = server.label, server.pauses
    if label != weights.label:
        return None
    try:
        async with asyncio.timeout(SCORE_S):
            scores = await asyncio.gather(*(_score(server, probe.tokens) for probe in weights.canaries))
    except TimeoutError:
        raise ServerError(f"{server.url}: scores no canary in {SCORE_S:g} s") from None
    if (server.label, server.pauses) != (label, pauses) or {x for one in scores for x in one[3]} != {label}:
        return None
    of_prompts, of_sampled = list[Difference](), list[Difference]()
    for i, ((ids, computed, reported, _), known) in enumerate(zip(scores, weights.canaries, strict=True)):
        cut = len(known.logp)
        rows = [*zip(computed[:cut], known.logp, strict=True), *zip(reported, computed[cut:], strict=True)]
        made = [Difference(abs(a - b), i, t + 1, ids[t + 1], a, b) for t, (a, b) in enumerate(rows)]
        of_prompts += made[:cut]
        of_sampled += made[cut:]
    mean = lambda values: sum(values) / len(values)
    return Differences(
        mean([x.nats for x in of_prompts]), mean([x.nats for x in of_sampled]),
        1 + mean([-x.wanted for x in of_prompts]), max(of_prompts + of_sampled),
    )  # fmt: skip


async def _score(server: Server, tokens: Sequence[int]) -> tuple[Sequence[int], list[float], list[float], list[str]]:
    """(prompt and sampled tokens, log-probabilities computed for all but the first, those reported for the sampled,
    labels of these)."""
    adapter = lora.choose(server, "")
    with lora.using(server, adapter):
        sent: Any = TokensPrompt(tuple(tokens))
        part = lora.stamped(server, adapter, await ask(sent, SAMPLING, 0, None, None, None, 1, server, adapter))
        whole = (*tokens, *part.tokens)
        read = await server.api.read(whole, adapter=adapter, cache_key=server.label)
    return whole, verify.of_prompt(server, read, len(whole)), part.logp, part.labels
