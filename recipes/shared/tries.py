"""Whether a run computes the tokens that samples share once: `--trie`."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from areax import models
from areax.adapters.tracking import progress
from areax.core import packing
from areax.models.attention import backends

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
    if reason := _refusal(config, settings, align):
        if jax.process_index() == 0:
            progress.say(f"--trie auto: rows without tries, because {reason}")
        return packing.pack
    return functools.partial(packing.pack_tries, align=align)


def _refusal(config, settings, align: int) -> str:
    if any(each.vision for each in settings):
        return "rows have images"
    if config.mesh.cp > 1 and config.run.cp == "ring":
        return "--run.cp ring cannot split them; gather and ulysses can"
    if config.mesh.cp > 1 and config.length % align:
        return f"recurrent layers over cp need a --length that is a multiple of {align} for them, got {config.length}"
    if config.run.attention != "auto" and not backends.BACKENDS[config.run.attention].tree:
        able = " and ".join(name for name, has in backends.BACKENDS.items() if has.tree)
        return f"--run.attention {config.run.attention} has none; {able} have"
    return ""
