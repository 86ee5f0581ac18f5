"""Whether a run computes the tokens that samples share once: `--trie`."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from areax import models
from areax.adapters.commands.tries import refusal
from areax.adapters.tracking import progress
from areax.core import packing

Trie = Literal["auto", "off"]


def packer(config: Any, *settings: Any) -> Callable:
    """`packing.pack_tries` if `config.trie` is "auto" and the run can have tries, else `packing.pack`.

    If the run cannot, process 0 says why, in one line.

    Args:
      config: options with trie, length, run and mesh.
      settings: the Configs of all models that see the batches.
    """
    if config.trie == "off":
        return packing.pack
    align = math.lcm(*map(models.trie_alignment, settings))
    if reason := refusal(config, settings, align):
        if jax.process_index() == 0:
            progress.say(f"--trie auto: rows without tries, because {reason}")
        return packing.pack
    return functools.partial(packing.pack_tries, align=align)
