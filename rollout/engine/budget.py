"""The memory of a device that an engine's caches may have."""

import contextlib
import functools
import math

import jax
import numpy as np

from ... import models
from ...core import param
from ...models import mtp, paging
from ...parallel import rules
from ...parallel.multihost import processes
from ..processes import memory

USABLE = 0.9  # of a device's memory that weights leave
MB = 1 << 20


def for_caches(
    config, params, kv_dtype: np.dtype, slots: int, context: int, page: int, steps: int, draft: int,
    on: jax.sharding.Mesh,
) -> float | None:  # fmt: skip
    """The bytes that there are for caches on each device; None = as much as all slots may need.

    Leaves room for the next version of the weights beside those in use, unless no sequence would fit then. Processes of
    a job agree on the least.

    Args:
      kv_dtype: of keys and values.

    Raises:
      ValueError: the device has not enough for one sequence.
    """
    predicts, dtype = draft > 1 and "mtp" in params, np.dtype(params["embed"].dtype)
    kinds = paging.kinds(mtp.records(config, predicts), context, page, kv_dtype.itemsize, on.shape.get("tp", 1))
    own = lambda x, split: math.prod(split.shard_shape(x.shape)) * x.dtype.itemsize
    weights = 0
    for table in (models.table(config), *([mtp.table(config)] if predicts else [])):
        split = rules.of_params(table, on, rules.GENERATING)
        weights += sum(jax.tree.leaves(jax.tree.map(own, param.abstract(table, dtype), split)))
    states = slots * draft * sum(kind.bytes for kind in kinds if kind.states) if draft > 1 else 0  # after each draft
    device = memory.of_devices([on.local_devices[0]])
    if on.is_multi_process and device < math.inf:
        device = MB * processes.least(int(device // MB))
    counts = functools.partial(paging.counts, kinds, slots, context, page, steps * draft)

    def beside(versions: int) -> float | None:
        there = USABLE * (device - versions * weights - states)
        if paging.size_of(kinds, counts(None), slots) <= there:
            return None
        counts(there)
        return there

    with contextlib.suppress(ValueError):
        return beside(2)
    return beside(1)
