"""Computes log-probabilities of a fixed prompt, to compare with the servers' (rollout/weights/verify.py)."""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from areax import models
from areax.core import packing, step
from areax.models import lora
from areax.parallel import batches
from areax.parallel.mesh import BATCH
from areax.recipes.shared import learner
from areax.rollout.chat import images, template
from areax.rollout.errors import ServerError
from areax.rollout.fleet import canary
from areax.rollout.servers.server import Server
from areax.rollout.types import Sample

log = logging.getLogger(__name__)

ENOUGH, TOKENS = 64, 256  # a first prompt of so many tokens is not added to; largest length of the probe
CANARIES, ROWS = 4, 64  # how many prompts, which are TOKENS long; rows from whose prompts they are made


class Canaries(NamedTuple):
    """The prompts of canaries, token ids that all have one length, and `types.Probe.dtype` of them."""

    prompts: tuple[tuple[int, ...], ...]
    dtype: str


NO_CANARIES = Canaries((), "BF16")


def prompt(tokens, rows: Sequence[dict], length: int) -> tuple[int, ...]:
    """The first prompt, with those behind it while it has not ENOUGH tokens; () where rows have no clear prompt,
    images, or one token. For the length of a whole prompt servers compile in any case.
    """
    ids: list[int] = []
    for row in rows:
        if images.of_row(row) or len(ids) >= ENOUGH:
            break
        try:
            ids += template.prompt(tokens, row)
        except ValueError:  # its workflow reads the row in a way of its own
            break
    ids = ids[: min(TOKENS, length)]
    return tuple(ids) if len(ids) > 1 else ()


def canaries(tokens, rows: Sequence[dict], length: int, dtype: str) -> Canaries:
    """Prompts of the first rows that have clear ones, each continued by those behind it; none where there are no such
    rows.

    Args:
      length: most tokens of a sequence, of which servers sample some.
      dtype: of the trainer and of what servers get, as `publishing.rounding` says.
    """
    found: list[list[int]] = []
    for row in itertools.islice(rows, ROWS):
        with contextlib.suppress(ValueError):  # its workflow reads the row in a way of its own
            found += [template.prompt(tokens, row)] if not images.of_row(row) else []
    of = [tuple(itertools.chain(*found[i:], *found[:i]))[: min(TOKENS, length - canary.NEW)] for i in range(len(found))]
    prompts = tuple(ids for ids in dict.fromkeys(of) if len(ids) > 1)[:CANARIES]
    return Canaries(prompts, dtype)


@contextlib.asynccontextmanager
async def ahead(known: Callable[[Sequence[int]], object], *prompts: Sequence[int]) -> AsyncIterator[None]:
    """Calls `known`, of `make`, in a thread during the block, in which servers start: its programs are then compiled.
    It is not called for () or twice for one length."""
    each = [ids for ids in {len(ids): ids for ids in prompts}.values() if ids]
    if not each:
        yield
        return
    computing = asyncio.create_task(asyncio.to_thread(lambda: [*map(known, each)]))
    try:
        yield
    finally:
        await computing


def make(policy: learner.Learner, run: models.Run, mesh: jax.sharding.Mesh) -> Callable[[Sequence[int]], list[float]]:
    """Makes f(ids) -> log-probability of each token but the first under the current weights, at temperature 1.

    All processes of the job must call f together.
    """
    score = functools.partial(models.score, config=policy.written, run=learner.computed(run), temperature=1.0)
    scores = step.make_scores(lora.over_base(score, policy.adapters) if policy.adapters else score)
    rows, cp = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape["cp"]

    def known(ids: Sequence[int]) -> list[float]:
        n = len(ids)
        none = np.zeros(n)
        sample = Sample(np.array(ids), np.arange(n) > 0, none, np.full(n, -1), none)
        batch = packing.pack([sample], -(-n // (8 * cp)) * 8 * cp, rows=rows)
        with jax.set_mesh(mesh):
            base = policy.frozen[:1] if policy.adapters else ()
            logp_MBT = scores(policy.state.params, batches.batch(batch, mesh), *base).logp_BT
            [logp_T] = packing.unpack(batches.host(logp_MBT), batch, [sample])
        return logp_T[1:].tolist()

    return known


async def compare_templates(servers: Sequence[Server], tokens, variables: Mapping[str, Any]) -> None:
    """Names servers that render a conversation otherwise than the trainer, of those that tokenise one (areax, vLLM).

    Rollouts send token ids, which the trainer's template made; who chats with such a server gets other answers.

    Args:
      variables: of the chat template, as `--chat-template-kwargs`.
    """
    wanted: list[int] = []
    with contextlib.suppress(ValueError):  # there is no template, or it refuses this conversation
        wanted = template.prompt(tokens, {"messages": [template.ASKED]})
    body = {"messages": [template.ASKED], "add_generation_prompt": True, "chat_template_kwargs": dict(variables)}

    async def compare(server: Server) -> None:
        with contextlib.suppress(ValueError, ServerError):  # it has no such route, or no tokenizer
            told = (await server.api.call("POST", "/tokenize", body, timeout_s=20.0)).get("tokens")
            if wanted and told != wanted:
                log.warning(
                    "%s: its chat template makes other tokens of a conversation than the trainer's, %s instead of %s; "
                    "rollouts, which send ids, have the trainer's", server.url, str(told)[:80], str(wanted)[:80],
                )  # fmt: skip

    await asyncio.gather(*map(compare, servers))
