"""Whether a run computes the tokens that samples share once: `--trie`."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from areax import models
from areax.adapters.commands.tries import refusal
from areax.adapters.tracking import progress
from areax.core import packing
from areax.parallel.mesh import BATCH

Trie = Literal["auto", "off"]


def packer(config: Any, *settings: Any) -> Callable:
    """`packing.pack_tries` if `config.trie` is "auto" and the run can have tries, else `packing.pack`. Where tries fill
    only some rows of a microbatch, it has no others.

    If other options are the reason, process 0 names them, in one line. Models that read images have no tries.

    Args:
      config: options with trie, length, run and mesh.
      settings: the Configs of all models that see the batches.
    """
    if config.trie == "off" or any(each.vision for each in settings):
        return packing.pack
    align = math.lcm(*map(models.trie_alignment, settings))
    apart = sorted({length for each in settings for length in models.trie_lengths(each)})
    if reason := refusal(config, settings, align):
        if jax.process_index() == 0:
            progress.say(f"--trie auto has no effect: {reason}")
        return packing.pack
    devices = math.prod(getattr(config.mesh, axis) for axis in BATCH)

    def pack(*args, **options):
        batch = packing.pack_tries(*args, align=align, apart=apart, **options)
        return batch if batch.trie is None else packing.without_empty_rows(batch, devices)

    return pack
