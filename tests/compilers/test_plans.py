"""Plans of models of real widths beside what the chips' own compilers need for them."""

import json
import os
from pathlib import Path

import pytest
import real_sizes

from areax.adapters import cli
from areax.adapters.command_line import options as grouped
from areax.adapters.commands import compiled, jobs, plan, programs
from areax.parallel.planner import memory
from areax.parallel.planner.chips import CHIPS

NEAR = 0.1  # of the compiled peak
BELOW = 0.04  # and a plan is not lower by more than half of what `figures.USABLE` leaves
PADDED = 2e-4  # of the arguments, on TPUs, whose tiles have 8 x 128 entries
UNREAD = "index_BT"  # of a single microbatch; attention kernels find out by themselves where sequences begin
TABLE = os.environ.get("AREAX_PLANS_TABLE", "")  # file to which rows of docs/compiled.md are added


def planned(recipe: str, folder: Path, chip: str, options: str, monkeypatch) -> jobs.Planned:
    """What the command plans."""
    given = []
    monkeypatch.setattr(plan, "plan", lambda config, options: given.append(config) or {"fits": True})
    cli.main(["plan", recipe, "--model", str(folder), "--chip", chip, "--json", *options.split()])
    return jobs.made(grouped.flat(given[0]), CHIPS[chip])


@pytest.mark.parametrize(
    "model, layers, chip, recipe, options",
    [*real_sizes.CORE, *(pytest.param(*case, marks=pytest.mark.wide) for case in real_sizes.WIDE)],
)
def test_a_plan_is_near_what_the_compiler_needs(model, layers, chip, recipe, options, tmp_path, monkeypatch):
    """Of the model's step, and of a critic's; the arguments are exact, but for padding on TPUs. With --optim.offload
    the update is not in it."""
    (tmp_path / "config.json").write_text(json.dumps(real_sizes.config(model, layers)))
    made = planned(recipe, tmp_path, chip, options, monkeypatch)
    m, pairs = memory.memory(made.job), []
    for step, formula, job in zip(made.steps, (m, m.critic), (made.job, made.job.critics_step), strict=False):
        found = compiled.check(programs.of_step(step), chip)
        assert not found.problem
        temporary = formula.gradients + formula.saved + formula.logits + formula.working
        pairs.append((formula.arguments + temporary, found.peak_bytes))
        unread = job.microbatches * job.local_tokens * job.reads.get(UNREAD, 0) if job.microbatches == 1 else 0
        if CHIPS[chip].platform == "tpu":
            assert 0 <= found.argument_bytes + unread - formula.arguments <= PADDED * formula.arguments + unread
        else:
            assert formula.arguments - found.argument_bytes in (0, unread)
    if TABLE:
        with Path(TABLE).open("a") as file:
            file.writelines(_row(model, layers, chip, recipe, options, *pair) for pair in pairs)
    for peak, needed in pairs:
        assert -BELOW < peak / needed - 1 < NEAR


def _row(model, layers, chip, recipe, options, peak, needed) -> str:
    """A row of the table in docs/compiled.md."""
    size = f"{model}, {layers} layers" if layers else model
    return (
        f"| {recipe} | {size} | {chip} | `{options}` | {peak / 1e9:.2f} | {needed / 1e9:.2f} | {peak / needed:.2f} |\n"
    )
