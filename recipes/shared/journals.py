"""The journal of a reinforcement learning run, and what must be the same for a resumed run to go on from it."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from areax.recipes.shared import resume
from areax.recipes.shared.rl_options import Evaluation, Saving, Serving
from areax.rollout.journal import store
from areax.rollout.journal.store import Journal

ROUNDING = "run.", "mesh."  # options that change the rounding of results alone


@contextlib.asynccontextmanager
async def opened(config: Any, run: str, start: int, known: dict[str, str]) -> AsyncIterator[Journal | None]:
    """Opens the journal of a `grpo.Config`; None with `--journal off`.

    Args:
      run: id of the run.
      start: the version of the state that it goes on from.
      known: `contents.of` what it is made of.
    """
    if config.saving.journal == "off":
        yield None
        return
    own = resume.options(replace(config, out="", serving=Serving(), evaluation=Evaluation(), saving=Saving()))
    options = {name: value for name, value in own.items() if not name.startswith(ROUNDING)}
    identity = {"run": run, "options": _hash(options), "contents": _hash(known)}
    async with store.opened(Path(config.out), start, identity) as journal:
        yield journal


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
