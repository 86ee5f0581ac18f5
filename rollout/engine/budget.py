"""How many pages an engine has on its devices."""

import contextlib
import functools
import math

import jax
import numpy as np

from ... import models
from ...core import param
from ...models import mtp, paging
from ...models.paging import Kind
from ...parallel import rules
from ...parallel.multihost import processes
from ..processes import memory
from .options import Options

USABLE = 0.9  # of a device's memory that weights leave
MB = 1 << 20


def pages(
    config, dtype, options: Options, on: jax.sharding.Mesh, predicts: bool = False, device: float | None = None
) -> tuple[list[Kind], list[int]]:
    """The kinds of a model's pages, and the number of each on each device.

    There are as many as all slots may need, or as fit into `options.memory`, or into what weights leave of a device:
    with room for the next version of them beside those in use, unless no sequence would fit then. Processes of a job
    agree on the least.

    Args:
      dtype: of the weights.
      predicts: drafts are made by the model's layer for multi-token prediction.
      device: bytes of a device; None = as it says.

    Raises:
      ValueError: the memory does not suffice for one sequence.
    """
    dtype, slots = np.dtype(dtype), options.slots
    itemsize = paging.kv_dtype(dtype, options.kv_cache_dtype).itemsize
    records = mtp.records(config, predicts)
    kinds = paging.kinds(records, options.context, options.page, itemsize, on.shape.get("tp", 1))
    ahead = options.steps * options.draft
    counts = functools.partial(paging.counts, kinds, slots, options.context, options.page, ahead)
    if options.memory:
        return kinds, counts(round(options.memory * 1e9))  # so that bytes / 1e9 are again these bytes
    own = lambda x, split: math.prod(split.shard_shape(x.shape)) * x.dtype.itemsize
    weights = 0
    for table in (models.table(config), *([mtp.table(config)] if predicts else [])):
        split = rules.of_params(table, on, rules.GENERATING)
        weights += sum(jax.tree.leaves(jax.tree.map(own, param.abstract(table, dtype), split)))
    drafted = slots * options.draft if options.draft > 1 else 0
    states = drafted * sum(kind.bytes for kind in kinds if kind.states)  # after each draft
    if device is None:
        device = memory.of_devices([on.local_devices[0]])
        if on.is_multi_process and device < math.inf:
            device = MB * processes.least(int(device // MB))

    beside = lambda versions: counts(USABLE * (device - versions * weights - states))
    with contextlib.suppress(ValueError):
        return kinds, beside(2)
    return kinds, beside(1)
