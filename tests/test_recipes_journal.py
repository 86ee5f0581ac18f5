"""The journal of a run: what a killed process has recorded is neither made again nor changed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import kill_at_records
import numpy as np
import pytest
import servers
import test_recipes_grpo as runs
import tiny

from areax.adapters.tracking import run_dir
from areax.recipes import grpo
from areax.rollout.tasks import arithmetic

SAME = {"step", "kind", "reward", "loss", "grad_norm", "entropy", "kl", "samples", "length", "staleness_max", "ratio"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    (path / "rewards.py").write_text("def score(text, row):\n    return sum(c.isdigit() for c in text) / 4\n")
    with servers.embedded(path / "model", slots=8, context=64) as remote:
        (path / "url").write_text(remote.url)
        yield path


def config(place, out):
    return runs.config(Path(place), out, steps=12, groups=2, save_every=5, samples_every=0)


@pytest.mark.long
def test_a_run_killed_at_50_records_is_the_run_that_was_not(place):
    grpo.main(config(place, "whole"))
    chance = random.Random(0)
    job = {
        "module": "test_recipes_journal", "function": "config", "arguments": [str(place), "killed"],
        "deaths": [chance.randint(1, 12) for _ in range(50)], "log": str(place / "log"),
    }  # fmt: skip
    (place / "job.json").write_text(json.dumps(job))
    subprocess.run([sys.executable, kill_at_records.__file__, str(place / "job.json")], check=True)
    for a, b in zip(runs.leaves(place / "whole/model"), runs.leaves(place / "killed/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    whole, killed = ([*run_dir.read_lines(place / run / "metrics.jsonl")] for run in ("whole", "killed"))
    for one, other in zip(whole, killed, strict=True):
        assert {name: one[name] for name in SAME & one.keys()} == {name: other[name] for name in SAME & other.keys()}
    said = [line.split() for line in (place / "log").read_text().splitlines()]
    assert [what for what, _ in said].count("process") > 15
    kept = set()
    for what, name in said:
        assert not (what == "generated" and name in kept), f"{name} was generated again"
        kept |= {name} if what == "kept" else set()
    assert len(kept) == 12 * 2 * 4
