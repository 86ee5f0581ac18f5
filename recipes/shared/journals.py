"""The journal of a reinforcement learning run, and what must be the same for a resumed run to go on from it."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import xxhash

from areax.adapters.tracking import progress, run_dir
from areax.recipes.shared import resume
from areax.recipes.shared.rl_options import Evaluation, Saving, Serving
from areax.rollout.journal import store
from areax.rollout.journal.store import Journal

FREE = "out", "steps", "stop-on", "max-concurrent", "reward-workers", "rows"  # options on which no episode depends
FREE_GROUPS = Serving(), Evaluation(), Saving()  # and groups of them
ROUNDING = "run.", "mesh."  # beginnings of those that change the rounding of results alone
MOVED = "model", "teacher", "critic.model", "reward", "workflow", "row", "env", "data"  # whose contents count


@contextlib.asynccontextmanager
async def opened(config: Any, run: str, start: int, known: dict[str, str], data: Any) -> AsyncIterator[Journal | None]:
    """Opens the journal of a `grpo.Config`; None with `--journal off`, which leaves nothing there for later processes
    to take for this one's. A run that goes on says from what.

    Args:
      run: id of the run.
      start: the version of the state that it goes on from.
      known: `contents.of` what it is made of.
      data: `sources.identity` of its rows.
    """
    out, off = Path(config.out), config.saving.journal == "off"
    if off and not (out / store.FILE).exists():
        _say(out, start, None)
        yield None
        return
    own = resume.options(config)
    own |= {name: str(own[name]).rpartition("/")[2] for name in MOVED}
    free = {*FREE, *(name for group in FREE_GROUPS for name in resume.options(group))}
    options = {name: value for name, value in own.items() if not (name in free or name.startswith(ROUNDING))}
    content = {name: value for name, value in known.items() if not name.startswith("--")}
    identity = {
        "run": run,
        "options": "none" if off else _hash(options),
        "contents": _hash(content),
        "rows": _hash(data),
    }
    async with store.opened(out, start, identity) as journal:
        _say(out, start, None if off else journal)
        yield None if off else journal


def _say(out: Path, start: int, journal: Journal | None) -> None:
    """Says from what a run goes on; nothing of a new one."""
    again, begun = (journal.past.batches, journal.past.begun) if journal else (range(0), {})
    made = sum(len(group.episodes) for group in begun.values())
    if not (start or again or made):
        if (out / run_dir.CONFIG).exists():  # of a former process
            progress.say(
                "grpo begins again with step 1: no state was saved, and no recorded batch or episode is usable"
            )
        return
    parts = [f"the state of step {start}" if start else "the first weights, since no state was saved"]
    if again:
        steps = f"step {again.stop}" if len(again) == 1 else f"steps {again.start + 1} to {again.stop}"
        parts.append(f"it trains {steps} again, on the batches that were recorded")
    if made:
        parts.append(f"finished episodes of later steps: {made}")
    source = f" ({journal.path})" if journal and (again or made) else ""
    progress.say(f"grpo resumes from {'; '.join(parts)}{source}")


def _hash(values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
