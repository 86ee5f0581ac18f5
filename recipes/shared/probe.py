"""Computes log-probabilities of a fixed prompt, to compare with the servers' (rollout/weights/verify.py)."""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Sequence

import jax
import numpy as np

from areax import models
from areax.core import packing, step
from areax.models import lora
from areax.parallel import batches
from areax.parallel.mesh import BATCH
from areax.recipes.shared import learner
from areax.rollout.chat import images, template
from areax.rollout.types import Sample

ENOUGH, TOKENS = 64, 256  # a first prompt of so many tokens is not added to; largest length of the probe


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


@contextlib.asynccontextmanager
async def ahead(known: Callable[[Sequence[int]], object], ids: Sequence[int]) -> AsyncIterator[None]:
    """Calls `known`, of `make`, in a thread during the block, in which servers start: its program is then compiled.
    Without `ids` it does nothing."""
    if not ids:
        yield
        return
    computing = asyncio.create_task(asyncio.to_thread(known, ids))
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
