"""Worlds in worker processes: as in the trainer's own, but that their ends are not the trainer's."""

import asyncio
import itertools
import logging
import math
import os
import subprocess
import time
from pathlib import Path

import pytest
from fidelity import SAMPLING, Policy, exact
from gateways import TOKENS

from areax.rollout.errors import ServerError
from areax.rollout.workflows import environment_rows, environments, workflow_context

FILE = Path(__file__).with_name("worker_worlds.py")


def episodes(*said, world="Breaks", rows=None, **options):
    """Samples of an episode for each list of answers, which share what a run's episodes do."""

    async def run():
        async with workflow_context.opened() as shared:
            for texts, row in zip(said, rows or itertools.repeat({}), strict=False):
                play = lambda generate, row: environments.play(
                    generate, row, tokenizer=TOKENS, sampling=SAMPLING, world=f"{FILE}:{world}", **options
                )
                policy = Policy(*texts)
                samples = await workflow_context.within(shared, play)(policy, row)
                yield policy, samples

    async def all_of():
        return [one async for one in run()]

    return asyncio.run(all_of())


def test_a_world_in_a_worker_is_the_one_in_the_trainer(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("SHARED", "yes")
    found = {}
    for workers in (0, 1):
        given = dict(workers=workers, environment=["SHARED"]) if workers else {}
        [(policy, samples)] = episodes(["1", "2", "5"], world="Count", options={"start": 1}, **given)
        assert exact(policy, samples)
        [sample] = samples
        told = policy.heard[0].rpartition("user\n")[2].split()
        found[workers] = [x for _, x in sample.rewards], sample.components, told[3][0], len(policy.said)
        assert (told[0] == str(os.getpid())) == (not workers)
        assert told[1:3] == (["None", "yes"] if workers else ["s3cret", "yes"])
    assert found[0] == found[1] and found[0][0] == [2.0, 4.0]


def test_seats_of_a_world_in_a_worker():
    [(policy, samples)] = episodes(["a", "b"], world="Two", workers=1)
    assert exact(policy, samples) and [s.reward for s in samples] == [1.0, 2.0]


def test_a_dead_worker_costs_its_episode_and_is_replaced(caplog):
    told = episodes(["die"], ["fine"], workers=1)
    assert [s[0].reward for _, s in told if not math.isnan(s[0].reward)] == [1.0]
    assert math.isnan(told[0][1][0].reward) and "its process ended; see its output" in caplog.text
    pids = [policy.heard[0].rpartition("user\n")[2].split()[0] for policy, _ in told]
    assert len({*pids}) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_that_hangs_gets_no_more_worlds(caplog):
    began = time.monotonic()
    told = episodes(["hang"], ["fine"], ["fine"], workers=1, step_timeout_s=1.5)
    pids = [policy.heard[0].rpartition("user\n")[2].split()[0] for policy, _ in told]
    assert pids[0] != pids[1] == pids[2] and time.monotonic() - began < 30
    assert math.isnan(told[0][1][0].reward) and "step must return within step_timeout_s, 1.5 s" in caplog.text


@pytest.mark.parametrize(
    "said, why", [("raise", "ValueError: broken here (worker_worlds.py:"), ("set", "must be JSON")]
)
def test_what_a_world_raises_is_a_line(said, why, caplog):
    [(_, [sample])] = episodes([said], workers=1)
    assert math.isnan(sample.reward) and why in caplog.text
    [line] = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "\n" not in line and "Traceback" not in line


def test_errors_of_servers_stay_those():
    with pytest.raises(ServerError, match="http://other: 503"):
        episodes(["busy"], workers=1)


def test_output_and_forks_do_not_reach_the_answers():
    told = episodes(["print"], ["fork"], ["fine"], workers=1)
    assert [s[0].reward for _, s in told] == [1.0, 1.0, 1.0]
    assert len({policy.heard[0].rpartition("user\n")[2].split()[0] for policy, _ in told}) == 1


def test_rows_are_read_in_a_process(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    found = environment_rows.describe(f"{FILE}:Rows", "eval", {"start": 1}, ())
    assert found.steps and [(row["split"], row["n"]) for row in found.rows] == [("eval", 1), ("eval", 2)]
    assert found.rows[0]["pid"] != os.getpid()
    endless = environment_rows.describe(f"{FILE}:Endless", "train", {"start": 5}, ()).rows
    for _ in range(2):
        assert [row["n"] for row in itertools.islice(endless, 3)] == [5, 6, 7]
    assert environment_rows.describe(f"{FILE}:Tools", "train", {}, ()) == (False, None)
    assert environment_rows.describe(f"{FILE}:Count", "train", {"whatever": 1}, ()) == (True, None)
    for world, options, why in (
        ("Rows", {"other": 1}, "unexpected keyword argument 'other'"), ("None_", {}, "there is no 'None_'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            environment_rows.describe(f"{FILE}:{world}", "train", options, ())
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "environment_rows import write" not in running


def test_options_of_workers_are_checked():
    for given, why in (
        (dict(workers=-1), "workers must be a number of at least 0, got -1"),
        (dict(workers=True), "workers must be a number"),
        (dict(environment=["HOME"]), "environment is for workers"),
        (dict(workers=1, environment="HOME"), "must be a list of names"),
        (dict(workers=1, environment=["NOT_SET_ANYWHERE"]), "must name variables that are set"),
    ):
        with pytest.raises(ValueError, match=why):
            episodes(["x"], **given)


def test_a_world_is_checked_in_a_worker():
    check = lambda world: asyncio.run(environments.check(f"{FILE}:{world}", {}, tokenizer=TOKENS, workers=4))
    check("Count")
    with pytest.raises(ValueError, match="cannot begin: .*there is no 'Missing'"):
        check("Missing")
