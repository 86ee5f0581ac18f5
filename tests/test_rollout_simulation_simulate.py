"""Simulated runs whose results can be computed by hand, and properties that hold for all of them."""

import asyncio
import collections
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from areax.adapters import cli
from areax.rollout import client, loop
from areax.rollout.scheduling import executor
from areax.rollout.servers.server import Server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.simulation import clock, server, simulate
from areax.rollout.simulation.server import Rates
from areax.rollout.types import sampled

# Every request generates 100 tokens at 0.01 s each; only training takes time besides, 1600 tokens a batch.
EVEN = simulate.Config(
    servers=1, server=Rates(slots=16, step_s=0.01, request_s=0.0, read_tokens_s=1e9, load_s=0.0), publish_s=0.0,
    groups=4, group_size=4, prompt=1, new=100.0, cv=0.0, steps=9, train_tokens_s=1616.0, max_concurrent=64,
)  # fmt: skip


def test_step_times_add_up_without_overlap():
    one = simulate.simulate(EVEN, 0)
    assert one.step_s == pytest.approx(1.0 + 1.0, rel=1e-3)  # generation, then training
    assert one.idle == pytest.approx(0.5, abs=1e-3) and one.busy == pytest.approx(0.5, abs=1e-3)
    assert one.tokens_s == pytest.approx(1600 / 2.0, rel=1e-3) and one.staleness == {0: 4 * 6}
    slow = dataclasses.replace(EVEN, publish_s=0.5, server=dataclasses.replace(EVEN.server, load_s=0.25))
    assert simulate.simulate(slow, 0).step_s == pytest.approx(2.75, rel=1e-3)


def test_steps_overlap_if_samples_may_be_stale():
    one = simulate.simulate(EVEN, 1)
    # a request interrupted by a push loses its current token: up to one step of 0.01 s
    assert one.step_s == pytest.approx(1.0, abs=0.011) and one.idle < 0.011 and one.busy > 0.98
    assert one.staleness == {1: 4 * 6}
    # half the slots: a batch takes the server 2 s, half of which the trainer waits
    half = dataclasses.replace(EVEN, server=dataclasses.replace(EVEN.server, slots=8))
    assert simulate.simulate(half, 1).step_s == pytest.approx(2.0, abs=0.03)
    # a second server compensates
    assert simulate.simulate(dataclasses.replace(half, servers=2), 1).step_s == pytest.approx(1.0, abs=0.011)


@pytest.mark.parametrize("eta, step_s", [(0, 1.0 + 0.4), (1, 1.0)])  # at eta = 0 only training adds to the step
def test_servers_generate_while_the_trainer_trains_saves_and_evaluates(eta, step_s):
    """A batch takes 1 s to generate, 0.4 s to train on and 0.6 s to save; 5 held-out rows take 0.5 s on free slots."""
    G, steps, marks, answers = 4, 8, [], []

    async def workflow(generate, row):
        done = await generate([row["i"]], max_new_tokens=row.get("tokens", 100))
        return sampled([row["i"]], done, temperature=1.0)

    async def main():
        speed = Rates(slots=G + 5, step_s=0.01, request_s=0.0, read_tokens_s=1e9, load_s=0.0)
        network = clock.Network({"http://0": server.Server(speed)})
        fleet = client.assemble([Server(SGLang("http://0", network), ["default"])], timeout_s=math.inf)
        now = asyncio.get_running_loop().time
        heldout = [{"i": i, "tokens": 50} for i in range(5)]

        async def evaluate(v):
            answers.append(await executor.rollouts(workflow, fleet.generate, heldout))

        prompts = executor.Prompts([{"i": i} for i in range(100)])
        async with executor.Executor(
            workflow, fleet.generate, prompts, group_size=1, groups_per_batch=G, eta=eta, max_concurrent=G, seed=None,
        ) as rollout:  # fmt: skip
            await loop.run(
                rollout.batch, lambda groups: clock.spend(0.4), None, lambda v, at: clock.spend(0.6), evaluate,
                eta=eta, steps=steps, admit=rollout.admit, cursor=rollout.cursor, save_every=1, evaluate_every=1,
                on_step=lambda v, result, seconds: marks.append(now()),
            )  # fmt: skip
        await fleet.close()

    clock.run(main())
    assert (marks[-1] - marks[1]) / (steps - 2) == pytest.approx(step_s, abs=0.011)
    assert len(answers) == steps + 1 and all(len(samples[0].tokens) == 51 for rows in answers for samples in rows)


# Answers of up to 32k tokens with a heavy tail on 16 servers, in units of 128 tokens; every request has a slot.
TAIL = simulate.Config(
    servers=16, server=Rates(slots=64, step_s=1.28, request_s=0.0, read_tokens_s=1e12, load_s=0.0), publish_s=0.0,
    groups=16, group_size=16, prompt=1, new=62.5, cv=1.0, longest=256, steps=9, train_tokens_s=150.0,
    max_concurrent=48,
)  # fmt: skip


def by_hand(config, eta):
    """The run group by group: (seconds per step, trainer idle, slots busy, {staleness: groups}, share of answers over
    several versions), counted as in an `Outcome`. A push takes no time and interrupts nothing.

    A group starts while fewer than max_concurrent run and at most (eta + version + 1) * groups are consumed, finished
    or running. A batch takes the oldest, once those left over can still be taken in time.
    """
    G, S, token_s = config.groups, config.group_size, config.server.step_s
    group_L = simulate.lengths(config, (config.steps + eta + 2) * G * S).reshape(-1, S)
    now, version, batch, began, free = 0.0, 0, 0, 0, True  # free: the trainer trains nothing
    running, ready = {}, {}  # group: (version, start, end)
    pushes, ends, taken, trains, spent = [0.0], [], [], 0.0, []

    def closes():
        order = sorted(ready, key=lambda g: (ready[g][0], g))
        left = [own[0] for g, own in {**running, **ready}.items() if g not in order[:G]]
        in_time = all(sum(v <= batch - eta + k for v in left) <= k * G for k in range(eta)) and (eta or not left)
        return order[:G] if len(order) >= G and in_time else None

    while len(ends) < config.steps:
        while len(running) < config.max_concurrent and batch * G + len(ready) + len(running) < (eta + version + 1) * G:
            running[began] = version, now, now + token_s * group_L[began].max()
            began += 1
        if free and (chosen := closes()):
            free, trains = False, now + (group_L[chosen] + config.prompt).sum() / config.train_tokens_s
            taken.append([(g, *ready.pop(g)) for g in chosen])
            spent.append(trains - now)
            batch += 1
            continue
        now = min([end for _, _, end in running.values()] + ([] if free else [trains]))
        ready |= {g: running.pop(g) for g in [g for g, own in running.items() if own[2] <= now]}
        if not free and trains <= now:
            free, version = True, version + 1
            ends.append(now)
            pushes.append(now)
    skip = config.steps // 3
    seconds, used = ends[-1] - ends[skip - 1], 0.0
    for g in range(began):
        start = (running | ready | {g: own for part in taken for g, *own in part})[g][1]
        stop = np.minimum(start + token_s * group_L[g], ends[-1])
        used += np.maximum(stop - np.maximum(start, ends[skip - 1]), 0).sum()
    ages, spans = collections.Counter(), []
    for at, part in list(enumerate(taken))[skip:]:
        for g, own, start, _ in part:
            ages[at - own] += 1
            spans += [any(start < push < start + token_s * n for push in pushes) for n in group_L[g]]
    busy = used / seconds / (config.servers * config.server.slots)
    return seconds / (config.steps - skip), 1 - sum(spent[skip:]) / seconds, busy, dict(ages), np.mean(spans)


@pytest.mark.sweep
@pytest.mark.parametrize("eta", [0, 2])
def test_long_answers_wait_and_age_as_by_hand(eta):
    """A push costs the real controller's requests their current token: up to 1.3 s of the 160 s of a step."""
    one = simulate.simulate(TAIL, eta)
    step_s, idle, busy, ages, spanning = by_hand(TAIL, eta)
    assert one.step_s == pytest.approx(step_s, rel=0.01) and one.idle == pytest.approx(idle, abs=0.01)
    assert one.busy == pytest.approx(busy, rel=0.01) and one.spanning == pytest.approx(spanning, abs=0.02)
    assert one.staleness == ages and max(ages) == eta
    if eta == 0:  # in closed form: a batch takes as long as its longest answer, and then its training
        batch_L = simulate.lengths(TAIL, TAIL.steps * 256).reshape(TAIL.steps, 256)[TAIL.steps // 3 :]
        waits = 1.28 * batch_L.max(1) + (batch_L + 1).sum(1) / 150
        assert one.step_s == pytest.approx(waits.mean(), rel=1e-3) and one.spanning == 0
        assert one.busy == pytest.approx(1.28 * batch_L.sum() / (16 * 64 * waits.sum()), rel=1e-3)
        # While it generates, a slot with an answer of mean length idles for 1 - mean / max.
        idle_L = 1 - batch_L.mean(1) / batch_L.max(1)
        assert 0.6 < idle_L.min() and 1 - one.busy * 4 * waits.sum() / (1.28 * batch_L.max(1).sum()) == pytest.approx(
            np.average(idle_L, weights=batch_L.max(1)), abs=2e-3
        )


@pytest.mark.slow
def test_the_best_setting_is_the_least_eta_that_is_about_as_fast_as_any():
    config = dataclasses.replace(EVEN, eta=(0, 1, 2, 4), cv=1.0, steps=30, max_concurrent=8)
    outcomes = [simulate.simulate(*setting) for setting in simulate.settings(config)]
    times = [one.step_s for one in outcomes]
    assert all(b < 1.02 * a for a, b in zip(times, times[1:], strict=False)) and times[0] > 1.3 * times[-1]
    chosen = simulate.best(outcomes)
    assert chosen.step_s <= 1.02 * min(times)
    assert all(one.step_s > 1.02 * min(times) for one in outcomes if one.eta < chosen.eta)
    for one in outcomes:
        assert max(one.staleness) <= one.eta and 0 <= one.idle <= 1 and 0 <= one.busy <= 1
        assert sum(one.staleness.values()) == 20 * config.groups


def test_interrupting_requests_fills_slots_that_draining_leaves_empty():
    config = dataclasses.replace(EVEN, cv=1.0, steps=12)
    interrupted, drained = (
        simulate.simulate(dataclasses.replace(config, push=push), 2) for push in ("retract", "drain")
    )
    assert interrupted.step_s < 0.9 * drained.step_s and interrupted.busy > drained.busy


@pytest.mark.slow
def test_oversampling_is_faster_if_generation_waits_for_the_slowest():
    """The same prompts are trained on, except for stopped ones that still wait for a batch."""
    config = dataclasses.replace(EVEN, cv=1.0, steps=18, groups=8, oversample=(0, 2, 4))
    assert [(eta, more) for _, eta, more in simulate.settings(dataclasses.replace(config, eta=(0, 1)))] == [
        (0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)
    ]  # fmt: skip
    plain, some, many = (simulate.simulate(config, 0, more) for more in config.oversample)
    assert some.step_s < 0.9 * plain.step_s and many.step_s < 0.95 * plain.step_s
    assert plain.stopped == 0 < some.stopped < many.stopped < 4
    assert plain.length_bias == pytest.approx(0, abs=1e-9) and set(some.staleness) == {0}


def test_lengths_have_the_requested_mean_and_spread():
    drawn = simulate.lengths(simulate.Config(new=500.0, cv=1.5, longest=10**9), 400_000)
    assert drawn.mean() == pytest.approx(500, rel=0.01) and drawn.std() / drawn.mean() == pytest.approx(1.5, rel=0.03)
    assert np.array_equal(drawn[:10], simulate.lengths(simulate.Config(new=500.0, cv=1.5, longest=10**9), 400_000)[:10])
    assert simulate.lengths(simulate.Config(cv=2.0, longest=50), 1000).max() == 50


def test_every_split_of_the_devices_is_tried():
    config = simulate.Config(devices=9, server_devices=2, eta=(1,))
    assert [(c.servers, c.trainers) for c, *_ in simulate.settings(config)] == [(1, 7), (2, 5), (3, 3), (4, 1)]


def test_the_command_line(capsys):
    options = "--steps 6 --groups 2 --group-size 2 --new 20 --eta 0 1 --devices 3 --server.slots 8"
    assert cli.main(["simulate", *options.split()]) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 1 + 4 + 1 and table.count("<- best") == 1
    assert cli.main(["simulate", *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["outcomes"]) == 4 and found["best"] in found["outcomes"]
    step_s = simulate.simulate(simulate.settings(simulate.Config(
        steps=6, groups=2, group_size=2, new=20.0, eta=(0, 1), devices=3, server=Rates(slots=8)
    ))[0][0], 0).step_s  # fmt: skip
    assert found["outcomes"][0]["step_s"] == pytest.approx(step_s)


@pytest.mark.parametrize(
    "which", [pytest.param(i, marks=pytest.mark.docs if i < 2 else pytest.mark.wide) for i in range(4)]
)  # the last two take a minute each
def test_the_guide_shows_what_it_prints(capsys, which):
    page = (Path(__file__).parents[1] / "docs/simulate.md").read_text()
    command, shown = re.findall(r"\$ areax (simulate .*)\n((?:.*\n)*?)```", page)[which]
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    "options, words",
    [
        ("--eta -1", "--eta must name one or more numbers from 0 on"),
        ("--oversample 0 33", "--oversample must name one or more numbers from 0 to --groups 32, got (0, 33)"),
        ("--steps 2", "--steps must be at least 3, got 2"),
        ("--train-tokens-s 0", "--train-tokens-s must be above 0"),
        ("--devices 2 --server-devices 2", "--devices must be more than --server-devices 2"),
        (f"--devices {10**11}", f"--devices {10**11} must be at most 10000 splits times --eta times --oversample"),
        (f"--servers {10**9}", f"--servers {10**9} must be at most 100000 servers"),
        (f"--groups {10**9}", f"--steps 24 of --groups {10**9} must be at most 1073741824 episodes and tokens"),
        ("--server.slots 0", "slots must be at least 1, got 0"),
    ],
)
def test_bad_input_gives_a_one_line_error(capsys, options, words):
    assert cli.main(["simulate", *options.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
