"""The programs of a run of `areax train grpo` on a model of `family_sizes`, and what a compiler makes of them."""

import json

import family_sizes

from areax.adapters.command_line import options
from areax.adapters.commands import jobs, programs
from areax.models import Run
from areax.parallel.planner.chips import CHIPS
from areax.recipes import grpo

# Names of a plan's programs.
PARTS = {"train": "policy's step", "score": "policy's scores", "decode": "decoding", "prefill": "prefill"}
ROWS, LENGTH = 4, 2048


def asked(family: str, chip: str, folder) -> dict[str, programs.Program]:
    """{part of `PARTS`: Program} of a run on one chip, whose config.json goes to the folder."""
    (folder / "config.json").write_text(json.dumps({"model_type": family} | family_sizes.MODELS[family][1]))
    given = options.flat(grpo.Config(str(folder), "", ""))
    given.rows, given.length, given.groups, given.group_size = ROWS, LENGTH, 4, 4
    given.run = Run(dtype="bfloat16")
    made = jobs.made(given, CHIPS[chip])
    known = programs.programs(given, made, CHIPS[chip])
    return {part: known[name] for part, name in PARTS.items()}
