"""What a run of reinforcement learning says of its journal when it starts, and which options that belongs to."""

import asyncio
from dataclasses import replace

from areax.adapters.command_line.options import replaced
from areax.recipes import grpo
from areax.recipes.shared import journals
from areax.recipes.shared.rl_options import Saving
from areax.rollout.fleet.push import Push


async def start(config, version, write=None):
    async with journals.opened(config, "run", version, {}, {}) as journal:
        if write:
            await write(journal)


def test_a_run_says_from_what_it_goes_on(tmp_path, capsys):
    async def write(journal):
        for version in range(3):
            journal.close_batch(version, [], {}, []).result()
        journal.begin(7, 3, "row")
        journal.keep(7, 3, "row", 0, [], 1.0)

    def said(version, **given):
        asyncio.run(start(replace(config, **given), version))
        return capsys.readouterr().err.replace(f"{tmp_path}/", "")

    config = grpo.Config(model="model", data="rows.jsonl", reward="rewards.py:score", out=str(tmp_path))
    asyncio.run(start(config, 0, write))
    assert not capsys.readouterr().err, "a new run has nothing to go on from"
    kept = "; finished episodes of later steps: 1 (journal.db)\n"
    again = "it trains {} again, on the batches that were recorded" + kept
    assert said(0) == "grpo resumes from the first weights, since no state was saved; " + again.format("steps 1 to 3")
    assert said(2) == "grpo resumes from the state of step 2; " + again.format("step 3")
    assert said(3) == "grpo resumes from the state of step 3" + kept
    (tmp_path / "config.json").write_text("{}")
    lost = "grpo begins again with step 1: no state was saved, and no recorded batch or episode is usable\n"
    assert said(0, saving=Saving(journal="off")) == lost
    assert said(3, saving=Saving(journal="off")) == "grpo resumes from the state of step 3\n"


def past(config):
    """The versions that a process with these options finds; adds a batch behind them."""

    async def main():
        async with journals.opened(config, "run", 0, {}, {}) as journal:
            found = journal.past.batches
            journal.close_batch(len(found), [], {}, []).result()
            return found

    return asyncio.run(main())


def test_options_of_servers_evaluations_and_the_end_may_change(tmp_path):
    """Also those that need each other, such as --stop-on of a held-out metric."""
    config = grpo.Config("model", "data", "reward", out=str(tmp_path))
    held = replaced(config, heldout=("rows.jsonl",), stop_on=("accuracy>0.9",))
    for i, now in enumerate((config, held, replaced(held, eta=0, stop_on=("rest_s>9",), colocated=True))):
        assert past(now) == range(i if i < 2 else 0)
    for i, now in enumerate((replaced(config, eta=0, steps=3), replaced(config, eta=0, push=Push(tolerance=0))), 1):
        assert past(now) == range(i)
    assert past(replaced(config, eta=0, groups=7)) == range(0)
