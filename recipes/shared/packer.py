"""How a run packs its samples: shapes of rows, and tokens that samples share (`--trie`)."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from areax import models
from areax.adapters.commands.tries import refusal
from areax.adapters.tracking import progress
from areax.core import fitting, packing, trie_packing
from areax.parallel.mesh import BATCH

Trie = Literal["auto", "off"]


def make(config: Any, *settings: Any) -> Callable:
    """Makes f(samples, rows, components=()) -> Batch: `packing.pack_tries` if `config.trie` is "auto" and the run can
    have tries, else `packing.pack`, in the shape of at most `rows` rows of `config.length` that computes fewest
    positions.

    If other options are the reason for no tries, process 0 names them, in one line. Models that read images have none.

    Args:
      config: options with trie, length, run and mesh.
      settings: the Configs of all models that see the batches.
    """
    align = math.lcm(*map(models.trie_alignment, settings))
    apart = sorted({length for each in settings for length in models.trie_lengths(each)})
    pack: Callable = functools.partial(packing.pack_tries, align=align, apart=apart)
    longest = trie_packing.aligned(config.length, align)
    if config.trie == "off" or any(each.vision for each in settings):
        pack, longest = packing.pack, config.length
    elif reason := refusal(config, settings, align):
        if jax.process_index() == 0:
            progress.say(f"--trie auto has no effect: {reason}")
        pack, longest = packing.pack, config.length
    devices = math.prod(getattr(config.mesh, axis) for axis in BATCH)
    allowed = functools.cache(lambda rows: fitting.shapes(longest, rows, devices, math.lcm(align, config.mesh.cp)))
    return lambda samples, rows, components=(): pack(
        samples, longest, rows=rows, components=components, shapes=allowed(rows)
    )
