"""The executor under a virtual clock: thousands of rollouts of any duration in a second, without sleeping."""

import asyncio
import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import run, serving, until

from areax.recipes.shared import rollouts as shared_rollouts
from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.rewards import Score
from areax.rollout.scheduling import episodes, length_bias
from areax.rollout.scheduling.curriculum import Adaptive, Curriculum, EasyFirst
from areax.rollout.scheduling.episodes import rollouts, sampling_seed
from areax.rollout.scheduling.executor import AT_ONCE, Executor, Prompts
from areax.rollout.types import Completion, sampled

ROWS = [{"id": i} for i in range(23)]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it; with no timer left it raises instead of hanging."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready:
            live = [timer for timer in self._scheduled if not timer.cancelled()]
            assert live, "deadlock: every task waits and no timer is set"
            self.now = max(self.now, min(timer.when() for timer in live))
        super()._run_once()


def play(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def sleeper(seconds, outcome=lambda row, sample: "stop", reward=lambda row, sample: 0.0):
    """A workflow with one call that takes seconds(seed); its outcome and reward are functions of (row, seed)."""

    async def generate(tokens, *, seed, **sampling):
        await asyncio.sleep(seconds(seed))
        return Completion([seed % 7], [-1.0], [-1], "stop", info={"seed": seed})

    async def workflow(generate, row):
        done = await generate([1, 2])
        end = outcome(row, done.info["seed"])
        if end == "fail":
            raise ServerError("server is gone")
        if end == "none":
            return None
        value = reward(row, done.info["seed"])
        return sampled([1, 2], done, temperature=1.0, reward=value, info={**done.info, "row": row})

    return workflow, generate


def uniform(*key):
    """A number in (0, 1) that is a function of the key."""
    return (xxhash.xxh3_64_intdigest(repr(key).encode()) + 0.5) / 2**64


def lognormal(*key, sigma=1.0):
    return math.exp(sigma * NormalDist().inv_cdf(uniform(*key)))


async def train(ex, first, last, *, update=1.0, push=0.5, eta, each=lambda v, groups: None):
    """The training loop: with eta > 0 the push of v + 1 overlaps with the next step; pushes are serialised."""
    pushing = None

    async def bring(v):
        await asyncio.sleep(push)
        ex.admit(v)

    for v in range(first, last):
        if pushing:
            await pushing
        pushing = asyncio.create_task(bring(v))
        if eta == 0:
            await pushing
        groups = await ex.batch(v)
        each(v, groups)
        await asyncio.sleep(update)
    await pushing


@pytest.mark.sweep
@pytest.mark.parametrize("eta", range(4))
def test_no_group_is_older_than_eta_in_a_thousand_steps(eta):
    G, steps, ages, order = 4, 1000, Counter(), []

    def each(v, groups):
        assert len(groups) == G
        ages.update(v - samples[0].info["admitted"] for samples in groups)
        order.extend(samples[0].prompt for samples in groups)

    async def main():
        workflow, generate = sleeper(lognormal)
        async with Executor(
            workflow,
            generate,
            Prompts(ROWS),
            group_size=1,
            groups_per_batch=G,
            eta=eta,
            max_concurrent=64,
            batches=steps,
        ) as ex:
            await train(ex, 0, steps, eta=eta, each=each)
            assert ex.counts == {name: G * steps if name == "accepted" else 0 for name in ex.counts}

    play(main())
    assert max(ages) <= eta and min(ages) >= 0
    assert eta == 0 or ages[eta] > G * steps / 10  # the bound is reached, not merely kept
    assert sorted(order) == list(range(G * steps))  # every prompt exactly once


@pytest.mark.parametrize(
    "rule",
    [
        lambda ex, v: True,  # the gate only
        lambda ex, v: all(a > v - ex.eta for a, _ in ex._running.values()),  # k = 0 only
    ],
)
def test_weaker_admission_rules_exceed_the_bound(rule):
    """Why batch v waits as it does: these weaker rules look sufficient, but fail if lengths vary a lot."""
    ages = []

    async def main():
        workflow, generate = sleeper(functools.partial(lognormal, sigma=2.0))
        ex = Executor(
            workflow,
            generate,
            Prompts(ROWS),
            group_size=1,
            groups_per_batch=2,
            eta=2,
            max_concurrent=6,
        )
        ex._in_time = functools.partial(rule, ex)
        async with ex:
            await train(
                ex,
                0,
                300,
                update=0.1,
                push=0.1,
                eta=2,
                each=lambda v, groups: ages.extend(v - s[0].info["admitted"] for s in groups),
            )

    play(main())
    assert max(ages) > 2


@settings(max_examples=60)
@given(
    eta=st.integers(0, 3),
    G=st.integers(1, 5),
    group_size=st.integers(1, 3),
    max_concurrent=st.integers(1, 20),
    salt=st.integers(0, 10**6),
    update=st.sampled_from([0.0, 0.3, 5.0]),
    push=st.sampled_from([0.0, 1.0, 8.0]),
    none=st.sampled_from([0.0, 0.5]),
    fail=st.sampled_from([0.0, 0.2]),
    refuse=st.sampled_from([0.0, 0.6]),
    over=st.floats(0.0, 1.0),
)
def test_any_schedule_keeps_the_bound_and_the_counts(
    eta, G, group_size, max_concurrent, salt, update, push, none, fail, refuse, over
):
    oversample = int(over * G)
    attempts = Counter()

    def outcome(row, seed):
        attempts[seed] += 1
        u = uniform(salt, seed, attempts[seed])
        return "fail" if u < fail else "none" if u > 1 - none else "stop"

    def each(v, groups):
        assert len(groups) == G
        for samples in groups:
            assert 0 <= v - samples[0].info["admitted"] <= eta
            assert 1 <= len(samples) <= group_size
            assert [s.rollout for s in samples] == sorted({s.rollout for s in samples})
        prompts = [samples[0].prompt for samples in groups]
        assert prompts == sorted(prompts)
        seen.extend(prompts)

    def check(ex):
        counts = ex.counts
        assert counts["running"] <= max_concurrent
        cursor = ex.cursor()
        ended = sum(counts[name] for name in ("accepted", "running", "rejected", "refused", "failed"))
        waiting = {*cursor["open"], *cursor["stopped"]} - ex._running.keys() - ex._ready.keys()
        assert cursor["next"] == ended + len(waiting)  # a group is in exactly one place
        assert oversample or not counts["stopped"] + len(waiting)
        assert len(waiting) < 2 * G or not oversample  # stopped groups get their turn

    seen = []

    async def main():
        workflow, generate = sleeper(lambda seed: lognormal(salt, seed, sigma=1.5), outcome=outcome)
        async with Executor(
            workflow,
            generate,
            Prompts(ROWS, seed=salt),
            group_size=group_size,
            groups_per_batch=G,
            eta=eta,
            max_concurrent=max_concurrent,
            accept=lambda samples: uniform(salt, -1, samples[0].prompt) >= refuse,
            seed=salt,
            oversample=oversample,
        ) as ex:
            executor_error = None
            try:
                await train(
                    ex,
                    0,
                    12,
                    update=update,
                    push=push,
                    eta=eta,
                    each=lambda v, groups: (each(v, groups), check(ex)),
                )
            except RuntimeError as error:  # with G = 1, giving up G prompts in a row does happen
                executor_error = error
            assert executor_error is None or (fail and "in a row" in str(executor_error))
            total = ex.counts
        closed = ex.counts
        assert closed["running"] == 0
        assert closed["accepted"] == len(seen)  # running and ready groups are dropped ...
        assert closed["dropped"] == total["accepted"] + total["running"] - len(seen)
        open_again = {*ex.cursor()["open"], *ex.cursor()["stopped"]}
        assert len(open_again) >= closed["dropped"] and not open_again & set(seen)  # ... and open again
        assert oversample or len(open_again) == closed["dropped"]

    play(main())
    assert len(set(seen)) == len(seen)


def batches_of(seconds, *, eta=0, steps=4, G=3, group_size=2, accept=None, cursor=None, first=0, prompts=None, **more):
    """The samples of each batch, and the cursor after each."""
    out, cursors = [], []

    async def main():
        workflow, generate = sleeper(seconds, **more)
        async with Executor(
            workflow,
            generate,
            prompts or Prompts(ROWS, seed=5),
            group_size=group_size,
            groups_per_batch=G,
            eta=eta,
            max_concurrent=7,
            seed=11,
            accept=accept,
            cursor=cursor,
        ) as ex:

            def each(v, groups):
                out.append([[(s.prompt, s.rollout, s.info["seed"], s.info["row"]["id"]) for s in g] for g in groups])
                cursors.append(json.loads(json.dumps(ex.cursor())))

            await train(ex, first, steps, eta=eta, each=each)

    play(main())
    return out, cursors


def test_at_eta_0_batches_do_not_depend_on_timing():
    refuse = lambda samples: samples[0].prompt % 3 != 1
    slow = batches_of(lambda seed: 1 + seed % 1000, accept=refuse)
    fast = batches_of(lambda seed: 1 / (1 + seed % 1000), accept=refuse)
    assert slow == fast
    prompts = [group[0][0] for groups in slow[0] for group in groups]
    assert prompts == [p for p in range(100) if p % 3 != 1][:12]


def test_seeds_depend_on_prompt_and_episode_not_on_arrival():
    seeds = {}
    for seconds in (lambda seed: 1.0, lambda seed: seed % 1000, lambda seed: -seed % 999):
        for groups in batches_of(seconds, eta=2)[0]:
            for prompt, rollout, seed, _ in (sample for group in groups for sample in group):
                assert seed == sampling_seed(11, prompt, rollout - 2 * prompt, 0)
                assert seeds.setdefault(rollout, seed) == seed
    assert len(set(seeds.values())) == len(seeds)


def test_sampling_seeds_never_change():
    assert sampling_seed(0, 0, 0, 0) == sampling_seed(0, 0, 0, 0)
    grid = [sampling_seed(r, p, s, t) for r in range(3) for p in range(40) for s in range(8) for t in range(3)]
    assert len(set(grid)) == len(grid) and min(grid) >= 1 and max(grid) < 2**31
    assert [sampling_seed(*key) for key in [(0, 0, 0, 0), (1, 2, 3, 4)]] == [1361057753, 1650742783]


def test_each_turn_of_an_episode_gets_its_own_seed():
    async def generate(tokens, *, seed, **sampling):
        return Completion([seed], [0.0], [0], "stop")

    async def workflow(generate, row):
        tokens = [1]
        for _ in range(3):
            tokens += (await generate(tokens, max_new_tokens=1)).tokens
        return sampled([1], Completion(tokens[1:], [0.0] * 3, [0] * 3, "stop"), temperature=1.0)

    [[sample]] = asyncio.run(rollouts(workflow, generate, [{}], seed=9))
    assert sample.tokens[1:].tolist() == [sampling_seed(9, 0, 0, turn) for turn in range(3)]


@pytest.mark.parametrize("eta", [0, 2])
def test_a_resumed_run_continues_with_the_same_prompts(eta):
    seconds = lambda seed: 0.2 + seed % 5
    straight, cursors = batches_of(seconds, eta=eta, steps=6)
    assert cursors[2]["batch"] == 3 and bool(cursors[2]["open"]) == (eta > 0)
    resumed, _ = batches_of(seconds, eta=eta, steps=6, cursor=cursors[2], first=3)
    if eta == 0:
        assert resumed == straight[3:]
    before = {group[0][0] for groups in straight[:3] for group in groups}
    after = [group[0][0] for groups in resumed for group in groups]
    assert len(set(after)) == len(after) == 9
    assert before.isdisjoint(after)
    assert set(range(18)) == before | set(after) or eta > 0
    assert set(cursors[2]["open"]) <= set(after) or eta == 0  # open prompts come first
    seeds = {s[1]: s[2] for groups in straight for group in groups for s in group}
    for groups in resumed:
        for sample in (sample for group in groups for sample in group):
            assert seeds.get(sample[1], sample[2]) == sample[2]


def test_after_a_resume_the_gate_counts_the_batches_consumed():
    async def main():
        workflow, generate = sleeper(lambda seed: 1.0)
        kwargs = dict(group_size=1, groups_per_batch=4, eta=1, max_concurrent=100)
        cursor = dict(Executor(workflow, generate, Prompts(ROWS), **kwargs).cursor())
        cursor |= {"batch": 10, "next": 47, "open": [39, 44]}
        async with Executor(workflow, generate, Prompts(ROWS), cursor=cursor, **kwargs) as ex:
            assert ex.counts["accepted"] == 40
            ex.admit(10)
            assert ex.counts["running"] == 8  # (1 + 10 + 1) * 4 - 40
            groups = await ex.batch(10)
            assert [samples[0].prompt for samples in groups] == [39, 44, 47, 48]

    play(main())


def test_a_cursor_of_other_data_is_refused():
    workflow, generate = sleeper(lambda seed: 1.0)
    make = lambda prompts, **more: Executor(
        workflow, generate, prompts, group_size=1, groups_per_batch=1, eta=0, max_concurrent=1, **more
    )
    cursor = make(Prompts(ROWS)).cursor()
    with pytest.raises(ValueError, match="same data, rows 23, got 22; give the same rows"):
        make(Prompts(ROWS[1:]), cursor=cursor)
    with pytest.raises(ValueError, match="same data, order 0, got 1"):
        make(Prompts(ROWS, seed=1), cursor=cursor)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        Executor(workflow, generate, Prompts(ROWS), group_size=0, groups_per_batch=1, eta=0, max_concurrent=1)
    with pytest.raises(ValueError, match="at least one row is needed"):
        Prompts([])


async def nothing(tokens, **sampling):
    return Completion([1], [-1.0], [-1], "stop")


def one_batch(workflow, generate=None, *, G=2, group_size=2, **more):
    """The first batch and the counts after it."""

    async def main():
        async with Executor(
            workflow,
            generate or nothing,
            Prompts(ROWS, shuffle=False),
            group_size=group_size,
            groups_per_batch=G,
            eta=0,
            max_concurrent=8,
            **more,
        ) as ex:
            ex.admit(0)
            groups = await ex.batch(0)
            return groups, ex.counts

    return play(main())


async def plain(generate, row):
    return sampled([1], await generate([1]), temperature=1.0, info={"row": row})


def test_a_regroup_that_writes_into_the_samples_it_compares_changes_none():
    async def regroup(grouped):
        for [one] in grouped:
            one.tokens[-1], one.logp[:], one.version[-1], one.mask[:] = 999999, 3.0, 77, True
            object.__setattr__(one, "weight", float("nan"))
        return [Score(1.0)] * len(grouped)

    [[(one, *_)], _], [[(other, *_)], _] = (one_batch(plain, G=1, group_size=2, regroup=how) for how in (None, regroup))
    for name in ("tokens", "logp", "version", "mask", "weight"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert other.reward == 1.0


def test_a_group_is_regrouped_before_it_is_accepted_and_so_is_its_baseline():
    """Episodes without samples are not seen; the others keep their numbers."""
    seen, made = [], Counter()

    async def workflow(generate, row):
        made[row["id"]] += 1
        return None if made[row["id"]] == 1 else await plain(generate, row)

    async def regroup(grouped):
        seen.append([len(samples) for samples in grouped])
        return [Score(float(len(grouped)), {"n": float(n)}) for n, _ in enumerate(grouped)]

    def accept(samples):
        return [s.reward for s in samples] == [2.0, 2.0]

    groups, _ = one_batch(workflow, G=1, group_size=3, regroup=regroup, accept=accept, baseline=plain)
    [samples] = groups
    assert [(s.rollout, s.components) for s in samples] == [
        (1, {"n": 0.0, "greedy": 1.0}),
        (2, {"n": 1.0, "greedy": 1.0}),
    ]
    assert seen == [[1, 1], [1]]


def test_a_failed_episode_is_retried_with_the_same_seed():
    fails = Counter()

    async def generate(tokens, *, seed):
        fails[seed] += 1
        if fails[seed] < episodes.ATTEMPTS:
            raise ServerError("server is gone")
        return Completion([1], [-1.0], [-1], "stop")

    groups, counts = one_batch(plain, generate)
    assert [samples[0].prompt for samples in groups] == [0, 1]
    assert set(fails.values()) == {episodes.ATTEMPTS} and len(fails) == 4
    assert counts["retries"] == 4 * (episodes.ATTEMPTS - 1) and counts["failed"] == 0


def test_a_group_whose_servers_keep_failing_is_replaced():
    async def workflow(generate, row):
        if row["id"] == 1:
            raise ServerError("server is gone")
        return await plain(generate, row)

    groups, counts = one_batch(workflow)
    assert [samples[0].prompt for samples in groups] == [0, 2]
    assert counts == dict(
        accepted=2, running=0, rejected=0, refused=0, failed=1, stopped=0, dropped=0, retries=counts["retries"], lost=0
    )


@pytest.mark.parametrize("size, broken, left", [(4, 1, 3), (4, 2, 2), (4, 3, 0), (2, 1, 0), (1, 1, 0)])
def test_a_group_may_lose_episodes_if_at_least_two_remain(size, broken, left):
    async def workflow(generate, row):
        done = await generate([1])
        if row["id"] == 0 and done.info["episode"] < broken:
            raise ServerError("server is gone")
        return sampled([1], done, temperature=1.0, info={"row": row})

    async def generate(tokens, *, seed):
        episode = next(e for p in range(9) for e in range(size) if sampling_seed(0, p, e, 0) == seed)
        await asyncio.sleep(5.0 * episode)
        return Completion([1], [-1.0], [-1], "stop", info={"episode": episode})

    groups, counts = one_batch(workflow, generate, group_size=size)
    assert [samples[0].prompt for samples in groups] == ([0, 1] if left else [1, 2])
    if left:
        assert [s.rollout for s in groups[0]] == list(range(broken, size))
    assert counts["lost"] == (broken if left else 0) and counts["failed"] == (not left)
    assert counts["retries"] >= (episodes.ATTEMPTS - 1) * min(broken, max(1, size - 1))
    with pytest.raises(RuntimeError, match="server is gone"):  # an evaluation needs all samples
        play(rollouts(workflow, generate, ROWS[:1], group_size=size, seed=0))


def test_a_group_that_lost_an_episode_and_has_one_sample_is_replaced():
    async def workflow(generate, row):
        done = await generate([1])
        if row["id"] == 0 and done.info["episode"] == 0:
            raise ServerError("server is gone")
        return None if row["id"] == 0 and done.info["episode"] == 1 else sampled([1], done, temperature=1.0)

    async def generate(tokens, *, seed):
        episode = next(e for p in range(9) for e in range(3) if sampling_seed(0, p, e, 0) == seed)
        return Completion([1], [-1.0], [-1], "stop", info={"episode": episode})

    groups, counts = one_batch(workflow, generate, group_size=3)
    assert [samples[0].prompt for samples in groups] == [1, 2] and counts["failed"] == 1 and counts["lost"] == 0


def test_the_run_ends_if_all_servers_are_gone():
    async def workflow(generate, row):
        raise ServerError("connection refused")

    with pytest.raises(RuntimeError, match="8 groups in a row failed.* connection refused"):
        one_batch(workflow)


@pytest.mark.parametrize(
    "error",
    [KeyError("answer"), ValueError("too long"), RuntimeError("a bug"), RecursionError("deep"), NotImplementedError()],
)
def test_a_bug_ends_the_run_at_once(error):
    async def workflow(generate, row):
        if row["id"] == 1:
            raise error
        await asyncio.sleep(math.inf if row["id"] == 0 else 1.0)

    with pytest.raises(type(error)):
        one_batch(workflow)


def test_a_row_that_cannot_be_read_ends_the_run_and_stays_open():
    """What the loop then saves takes the prompt again, which --bad-rows skip replaces."""

    class Bad(list):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("rows.jsonl:6: not JSON")
            return super().__getitem__(index)

    async def main():
        prompts = Prompts(Bad(ROWS), shuffle=False)
        async with Executor(
            plain, nothing, prompts, group_size=1, groups_per_batch=3, eta=0, max_concurrent=3
        ) as ex:  # fmt: skip
            ex.admit(0)
            await ex.batch(0)
            ex.admit(1)
            with pytest.raises(ValueError, match="rows.jsonl:6: not JSON"):
                await ex.batch(1)
            await ex.close()
            return ex.cursor()

    cursor = play(main())
    assert (cursor["batch"], cursor["next"], cursor["open"]) == (1, 6, [3, 4, 5])


def test_a_filter_that_raises_ends_the_run():
    with pytest.raises(ZeroDivisionError):
        one_batch(plain, accept=lambda samples: 1 / 0)


def test_refusing_every_group_ends_the_run():
    with pytest.raises(ValueError, match="128 groups in a row were refused"):
        one_batch(plain, accept=lambda samples: False)


def test_a_workflow_must_return_samples():
    async def workflow(generate, row):
        return 1.0

    with pytest.raises(ValueError, match="must return a Sample, .* got 1.0; row id 0"):
        one_batch(workflow)


def test_an_episode_has_no_more_samples_than_there_are_ids(monkeypatch):
    async def workflow(generate, row):
        return [await plain(generate, row)] * 3

    monkeypatch.setattr(episodes, "ROWS", 2)
    with pytest.raises(ValueError, match="a workflow must return at most 2 samples, got 3; row id 0"):
        one_batch(workflow)


def test_rejected_episodes_leave_their_group_and_empty_groups_are_replaced():
    calls = Counter()

    async def workflow(generate, row):
        calls[row["id"]] += 1
        if row["id"] == 0 or (row["id"] == 1 and calls[1] == 1):
            return None
        return await plain(generate, row)

    groups, counts = one_batch(workflow)
    assert [[s.rollout for s in samples] for samples in groups] == [[3], [4, 5]]
    assert counts["rejected"] == 1


def test_rows_of_one_rollout_share_its_id_and_have_a_total_weight_of_one():
    async def workflow(generate, row):
        sample = await plain(generate, row)
        return [sample, sample.replace(weight=3.0)]

    groups, _ = one_batch(workflow)
    samples = groups[1]
    assert [s.rollout for s in samples] == [2, 2, 3, 3]
    assert len({s.sample for group in groups for s in group}) == 8
    assert [s.weight for s in samples] == [0.25, 0.75, 0.25, 0.75]
    assert {s.group for s in samples} == {s.prompt for s in samples} == {1}


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"min_new_tokens": 2}, {"temperature": 0.0}]
)
def test_training_refuses_a_truncated_distribution_and_evaluation_does_not(sampling):
    async def workflow(generate, row):
        return sampled([1], await generate([1], **sampling), temperature=1.0)

    with pytest.raises(ValueError, match=f"training needs .* {next(iter(sampling))}|temperature above 0"):
        one_batch(workflow)

    async def generate(tokens, *, seed, **kwargs):
        return Completion([1], [-1.0], [-1], "stop")

    assert len(asyncio.run(rollouts(workflow, generate, ROWS, seed=0))) == len(ROWS)


def test_without_a_seed_no_seed_is_sent():
    async def generate(tokens, **sampling):
        assert not sampling
        return Completion([1], [-1.0], [-1], "stop")

    assert len(one_batch(plain, generate, seed=None)[0]) == 2


def test_evaluation_keeps_the_order_of_rows_and_its_concurrency_limit():
    busy, most = 0, 0

    async def generate(tokens, *, seed):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(seed % 10)
        busy -= 1
        return Completion([1], [-1.0], [-1], "stop")

    async def workflow(generate, row):
        return None if row["id"] == 3 else await plain(generate, row)

    done = itertools.count()
    out = play(rollouts(workflow, generate, ROWS, group_size=2, max_concurrent=4, seed=0, on_group=lambda: next(done)))
    assert next(done) == len(ROWS)
    assert [samples[0].info["row"]["id"] if samples else None for samples in out] == [
        None if row["id"] == 3 else row["id"] for row in ROWS
    ]
    assert most == 8


def test_closing_cancels_running_episodes():
    ended = []

    async def workflow(generate, row):
        try:
            await asyncio.sleep(math.inf)
        finally:
            await asyncio.sleep(1.0)  # a workflow may need time to clean up
            ended.append(row["id"])

    async def main():
        async with Executor(
            workflow, None, Prompts(ROWS), group_size=2, groups_per_batch=3, eta=1, max_concurrent=5
        ) as ex:
            ex.admit(0)
            await asyncio.sleep(1.0)
        assert len(ended) == 10 and ex.counts["dropped"] == 5 and ex.counts["running"] == 0
        assert ex.cursor()["open"] == [0, 1, 2, 3, 4]

    play(main())


def test_samples_of_a_version_before_the_admission_are_refused():
    """A workflow that returns an episode of another time again."""
    old = sampled([1], Completion([1], [-1.0], [0], "stop"), temperature=1.0)

    async def again(generate, row):
        return old

    async def main():
        async with Executor(
            again, None, Prompts(ROWS), group_size=1, groups_per_batch=1, eta=0, max_concurrent=1
        ) as ex:
            ex.admit(0)
            await ex.batch(0)
            ex.admit(1)
            with pytest.raises(ServerError, match="version must be at least 1, at which the group was admitted, got 0"):
                await ex.batch(1)

    play(main())


class Mute(ServerError):
    def __str__(self):
        raise RuntimeError("no text")


def test_groups_that_fail_without_a_text_end_the_run():
    async def fails(generate, row):
        raise Mute

    async def main():
        async with Executor(
            fails, None, Prompts(ROWS), group_size=1, groups_per_batch=1, eta=0, max_concurrent=1
        ) as ex:
            ex.admit(0)
            with pytest.raises(ServerError, match="8 groups in a row failed; the last with: .its text cannot be read"):
                await ex.batch(0)

    play(main())


def test_batches_and_versions_must_be_in_order():
    async def main():
        async with Executor(
            plain, None, Prompts(ROWS), group_size=1, groups_per_batch=1, eta=0, max_concurrent=1
        ) as ex:
            with pytest.raises(ValueError, match="the next batch is 0, got 1"):
                await ex.batch(1)
            ex.admit(3)
            with pytest.raises(ValueError, match="got 2 after 3"):
                ex.admit(2)

    play(main())


# -- oversampling --------------------------------------------------------------------------------


def oversampled(seconds, *, G, oversample, steps, cursor=None, eta=0, first=0):
    """[(prompts, seconds, cursor) of each batch] where a group takes `seconds(prompt)`, and the counts."""
    out = []

    async def workflow(generate, row):
        await asyncio.sleep(seconds(row["id"]))
        return sampled([1], Completion([1], [-1.0], [-1], "stop"), temperature=1.0)

    async def main():
        now = asyncio.get_running_loop().time
        rows = [{"id": i} for i in range(1000)]
        async with Executor(
            workflow, None, Prompts(rows, shuffle=False), group_size=1, groups_per_batch=G, eta=eta,
            max_concurrent=100, oversample=oversample, cursor=cursor,
        ) as ex:  # fmt: skip
            for v in range(first, first + steps):
                begun = now()
                ex.admit(v)
                groups = await ex.batch(v)
                assert all(samples[0].info["admitted"] >= v - eta for samples in groups)
                out.append(([samples[0].prompt for samples in groups], now() - begun, ex.cursor()))
            return out, ex.counts

    return play(main())


def test_a_batch_is_the_first_groups_to_finish_and_stopped_ones_fill_a_later_batch():
    """By hand: at eta = 0 each batch is the G shortest of G + k groups; G stopped ones make up a long batch."""
    G, k, steps = 6, 2, 12
    seconds = lambda i: 1 + lognormal("batch", i)
    out, counts = oversampled(seconds, G=G, oversample=k, steps=steps)
    fresh, aside, stops = 0, [], 0
    for prompts, took, cursor in out:
        if len(aside) >= G:
            taken, aside = aside[:G], aside[G:]
            left = []
        else:
            begun = sorted(range(fresh, fresh + G + k), key=seconds)
            fresh, taken, left = fresh + G + k, begun[:G], begun[G:]
        assert prompts == sorted(taken) and took == pytest.approx(max(map(seconds, taken)))
        aside, stops = [*aside, *sorted(left)], stops + len(left)
        assert cursor["stopped"] == sorted(aside) and cursor["open"] == [] and cursor["counts"]["stopped"] == stops
    assert counts["stopped"] == stops and counts["dropped"] == 0
    plain, _ = oversampled(seconds, G=G, oversample=0, steps=steps)
    assert sum(took for _, took, _ in out) < 0.85 * sum(took for _, took, _ in plain)


@settings(max_examples=30)
@given(
    G=st.integers(1, 5), over=st.floats(0, 1), eta=st.integers(0, 3), salt=st.integers(0, 999), stop=st.integers(1, 9)
)
def test_a_resumed_run_loses_no_stopped_prompt(G, over, eta, salt, stop):
    args = dict(G=G, oversample=int(over * G), eta=eta)
    seconds = lambda i: lognormal(salt, i, sigma=2.0)
    before, _ = oversampled(seconds, steps=stop, **args)
    cursor = json.loads(json.dumps(before[-1][2]))
    after, _ = oversampled(seconds, steps=10, first=stop, cursor=cursor, **args)
    seen = [prompt for prompts, *_ in (*before, *after) for prompt in prompts]
    assert len(set(seen)) == len(seen)
    last = after[-1][2]
    assert set(seen) | {*last["open"], *last["stopped"]} == set(range(last["next"]))
    without, _ = oversampled(seconds, steps=10, first=stop, cursor=cursor, **{**args, "oversample": 0})
    assert set(cursor["stopped"]) <= {prompt for prompts, *_ in without for prompt in prompts}  # started at once


@pytest.mark.parametrize("eta", [0, 1])
def test_a_filter_with_oversampling_neither_starves_nor_collects_too_many_groups(eta):
    G, k, most = 4, 3, []

    def each(v, ex, groups):
        counts = ex.counts
        most.append(counts["accepted"] + counts["running"] - (v + 1) * G)
        assert len(groups) == G and all(samples[0].prompt % 4 == 1 for samples in groups)

    async def main():
        workflow, generate = sleeper(lognormal)
        async with Executor(
            workflow, generate, Prompts(ROWS), group_size=1, groups_per_batch=G, eta=eta, max_concurrent=100,
            oversample=k, batches=20, accept=lambda samples: samples[0].prompt % 4 == 1,
        ) as ex:  # fmt: skip
            await train(ex, 0, 20, eta=eta, each=lambda v, groups: each(v, ex, groups))
            return ex.counts

    counts = play(main())
    assert max(most) <= eta * G + k and counts["running"] == counts["dropped"] == 0 and counts["accepted"] == 20 * G
    assert counts["refused"] > 2 * 20 * G


def test_stopped_groups_end_before_the_executor_is_closed():
    ended = []

    async def workflow(generate, row):
        try:
            await asyncio.sleep(1.0 if row["id"] < 2 else math.inf)
            return sampled([1], Completion([1], [-1.0], [-1], "stop"), temperature=1.0)
        except asyncio.CancelledError:
            await asyncio.sleep(9.0)  # cleans up
            ended.append(row["id"])
            raise KeyError("while it was stopped") from None

    async def main():
        async with Executor(
            workflow, None, Prompts(ROWS, shuffle=False), group_size=1, groups_per_batch=2, eta=0, max_concurrent=5,
            oversample=2,
        ) as ex:  # fmt: skip
            ex.admit(0)
            await ex.batch(0)
            assert asyncio.get_running_loop().time() == 1.0 and ended == []  # the batch does not wait for that
        assert sorted(ended) == [2, 3] and ex.counts["stopped"] == 2 and ex.counts["dropped"] == 0

    play(main())


def test_oversample_must_lie_between_0_and_the_batch_size():
    for value, words in ((-1, "oversample must be at least 0, got -1"), (5, "at most groups_per_batch 4, got 5")):
        with pytest.raises(ValueError, match=words):
            oversampled(lambda i: 1.0, G=4, oversample=value, steps=1)


# -- lengths -------------------------------------------------------------------------------------


def kaplan_meier(times, died):
    """The textbook mean lifetime: the area under the product-limit curve up to the last death."""
    at, curve, area = 0.0, 1.0, 0.0
    for time in sorted({t for t, d in zip(times, died, strict=True) if d}):
        area, at = area + curve * (time - at), time
        risk = sum(t >= time for t in times)
        curve *= 1 - sum(t == time and d for t, d in zip(times, died, strict=True)) / risk
    return area


@given(data=st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1))
def test_the_mean_is_the_kaplan_meier_estimate(data):
    times, died = [float(t) for t, _ in data], [d for _, d in data]
    ended = [(t, t) for t, d in zip(times, died, strict=True) if d]
    cut = [t for t, d in zip(times, died, strict=True) if not d]
    if not ended:
        assert math.isnan(length_bias.mean(ended, cut))
    else:
        assert length_bias.mean(ended, cut) == pytest.approx(kaplan_meier(times, died))


def test_censored_lengths_are_accounted_for():
    """Exponential lengths of mean 100, censored at random: the completed ones average 50."""
    draw = lambda name, i: -100 * math.log(uniform(name, i))
    pairs = [(draw("length", i), draw("cut", i)) for i in range(4000)]
    ended = [(length / 7, length) for length, cut in pairs if length <= cut]
    assert sum(value for _, value in ended) / len(ended) == pytest.approx(50, rel=0.05)
    assert length_bias.mean(ended, [cut / 7 for length, cut in pairs if length > cut]) == pytest.approx(100, rel=0.06)


@pytest.mark.parametrize("oversample, biased", [(0, False), (4, True)])
def test_oversampling_biases_lengths_and_the_bias_is_reported(oversample, biased):
    length = lambda i: 1 + int(99 * uniform("tokens", i))

    async def workflow(generate, row):
        n = length(row["id"])
        await asyncio.sleep(n)
        return sampled([1], Completion([1] * n, [-1.0] * n, [-1] * n, "stop"), temperature=1.0)

    async def main():
        rows = [{"id": i} for i in range(1000)]
        async with Executor(
            workflow, None, Prompts(rows, shuffle=False), group_size=1, groups_per_batch=16, eta=0, max_concurrent=99,
            oversample=oversample,
        ) as ex:  # fmt: skip
            assert ex.lengths() == {}
            for v in range(3):
                ex.admit(v)
                await ex.batch(v)
            return ex.lengths(), ex.cursor()["next"]

    found, begun = play(main())
    true = sum(map(length, range(begun))) / begun
    assert found["length_begun"] == pytest.approx(true, rel=0.1)
    assert found["length_bias"] < -0.1 if biased else abs(found["length_bias"]) < 1e-9


# -- servers and evaluation -----------------------------------------------------------------------------------


def test_stopped_and_dropped_groups_are_aborted_on_the_servers():
    async def workflow(generate, row):
        done = await generate([row["id"]], max_new_tokens=1 if row["id"] < 2 else 100)
        return sampled([row["id"]], done, temperature=1.0)

    async def main():
        async with serving(step_s=0.01) as a, client.connect([a.url]) as fleet:
            async with Executor(
                workflow, fleet.generate, Prompts(ROWS, shuffle=False), group_size=2, groups_per_batch=2, eta=0,
                max_concurrent=9, oversample=2, seed=None,
            ) as ex:  # fmt: skip
                ex.admit(0)
                assert [samples[0].prompt for samples in await ex.batch(0)] == [0, 1]
                await until(lambda: a.load == 0)  # the two stopped ones were aborted
                assert ex.counts["stopped"] == 2 and fleet.servers[0].load == 0
                ex.admit(1)
                await until(lambda: a.load == 4)
            assert ex.counts["dropped"] == 2 and fleet.servers[0].load == 0 and not fleet.servers[0].running
            await until(lambda: a.load == 0)
            assert len((await fleet.generate([1], max_new_tokens=3)).tokens) == 3

    run(main)


@pytest.mark.parametrize("eta", [0, 2])
def test_an_evaluation_changes_neither_batches_nor_counts(eta):
    def batches(evaluate):
        out, sampling = [], []

        async def main():
            workflow, generate = sleeper(lambda seed: 1 + seed % 7)

            async def greedily(tokens, **chosen):
                sampling.append(chosen)
                return await generate(tokens, seed=0)

            async def greedy(generate, row):
                return sampled([1], await generate([1], temperature=0.0, top_k=1), temperature=1.0)

            async with Executor(
                workflow, generate, Prompts(ROWS, seed=5), group_size=2, groups_per_batch=3, eta=eta, max_concurrent=7
            ) as ex:
                beside = []
                for v in range(6):
                    ex.admit(v)
                    if evaluate:
                        beside.append(asyncio.create_task(rollouts(greedy, greedily, ROWS, max_concurrent=4)))
                    out.append([[(s.rollout, s.info["seed"]) for s in samples] for samples in await ex.batch(v)])
                    out.append((ex.counts, ex.cursor()))
                    await asyncio.sleep(2.0)
                await asyncio.gather(*beside)

        play(main())
        assert all(chosen == {"temperature": 0.0, "top_k": 1} for chosen in sampling) and bool(sampling) == evaluate
        return out

    assert batches(True) == batches(False)


# -- adaptive order ------------------------------------------------------------------------------

MIXED = lambda samples: len({s.reward for s in samples}) > 1  # rewards differ


def right(row, seed):
    """1 if the row is solved: row 0 always is, row 22 hardly ever."""
    return float(uniform("right", seed) > row["id"] / 23)


@pytest.mark.parametrize("field", ["", "id"])
def test_at_eta_0_an_adaptive_order_does_not_depend_on_timing(field):
    """Outcomes, also those of refused groups, are observed when the batch closes, however long groups take."""
    spec = Curriculum(order="success", field=field, memory=0.25)
    play = lambda seconds: batches_of(
        seconds, steps=30, prompts=Adaptive(ROWS, spec, seed=3), accept=MIXED, reward=right
    )
    slow, fast = play(lambda seed: 1 + seed % 1000), play(lambda seed: 1 / (1 + seed % 1000))
    assert slow == fast
    cursors = slow[1]
    assert len(cursors[-1]["curriculum"]["rates"]) == 23 and cursors[-1]["counts"]["refused"] > 10
    assert all(cursor["curriculum"]["drawn"] == [] == cursor["open"] for cursor in cursors)


@pytest.mark.slow
@settings(max_examples=15)
@given(stop=st.integers(1, 11), seed=st.integers(0, 99), field=st.sampled_from(["", "id"]))
def test_a_resumed_adaptive_run_equals_an_uninterrupted_one(stop, seed, field):
    new = lambda: Adaptive(ROWS, Curriculum(order="success", field=field), seed=seed)
    more = dict(steps=12, accept=MIXED, reward=right)
    seconds = lambda seed: 0.2 + seed % 5
    whole, cursors = batches_of(seconds, prompts=new(), **more)
    rest, again = batches_of(seconds, prompts=new(), cursor=cursors[stop - 1], first=stop, **more)
    assert rest == whole[stop:] and again == cursors[stop:]


def test_open_prompts_keep_their_rows_when_a_run_is_resumed():
    new = lambda: Adaptive(ROWS, Curriculum(order="success"), seed=1)
    seconds, more = lambda seed: 0.2 + seed % 5, dict(eta=2, accept=MIXED, reward=right)
    _, cursors = batches_of(seconds, prompts=new(), steps=5, **more)
    rest, _ = batches_of(seconds, prompts=new(), steps=9, cursor=cursors[-1], first=5, **more)
    drawn = dict(cursors[-1]["curriculum"]["drawn"])
    assert sorted(drawn) == cursors[-1]["open"] and len(set(drawn.values())) == len(drawn) > 0
    shown = {sample[0]: sample[3] for groups in rest for group in groups for sample in group}
    assert shown.items() & drawn.items() == {(p, row) for p, row in shown.items() if p in drawn} != set()


def test_a_cursor_of_another_order_is_refused():
    cursor = batches_of(lambda seed: 1.0, steps=1, prompts=Adaptive(ROWS, Curriculum(order="success")))[1][0]
    for prompts in (Prompts(ROWS), Adaptive(ROWS, Curriculum(order="success"), seed=1), EasyFirst(ROWS, "id")):
        with pytest.raises(ValueError, match=r"same data, order \['success', '', 0\], got"):
            batches_of(lambda seed: 1.0, prompts=prompts, cursor=cursor)
    with pytest.raises(ValueError, match="order success needs rewards from 0 to 1, got a mean of -1; row id"):
        batches_of(lambda seed: 1.0, prompts=Adaptive(ROWS, Curriculum(order="success")), reward=lambda *_: -1.0)


@given(size=st.integers(1, 40), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_epoch_shows_every_row_once(size, seed, epoch):
    prompts = Prompts(range(size), seed=seed)
    shown = [prompts[epoch * size + i] for i in range(size)]
    assert sorted(shown) == list(range(size))
    assert shown == [dataclasses.replace(prompts)[epoch * size + i] for i in range(size)]
    assert [Prompts(range(size), shuffle=False)[epoch * size + i] for i in range(size)] == list(range(size))


def test_epochs_differ():
    prompts = Prompts(range(50))
    epochs = [[prompts[e * 50 + i] for i in range(50)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


# -- what workflows do wrong -----------------------------------------------------------------------


def group_of(workflow, rows, size=2):
    _, generate = sleeper(lambda seed: 1.0)
    return play(rollouts(workflow, generate, rows, group_size=size, seed=0))


def test_a_workflow_cannot_change_a_row_for_others():
    seen = []

    async def workflow(generate, row):
        seen.append(json.dumps(row))
        row["messages"].append("more")
        row["answer"] = 7
        return sampled([1], await generate([1]), temperature=1.0)

    rows = [{"messages": ["one"], "answer": 1}]
    group_of(workflow, rows, size=3)
    assert rows == [{"messages": ["one"], "answer": 1}] and set(seen) == {json.dumps(rows[0])}


def test_an_episode_with_a_wrong_sample_is_played_again(caplog):
    calls = itertools.count()

    async def workflow(generate, row):
        sample = sampled([1], await generate([1]), temperature=1.0)
        return sample.replace(weight=float("nan")) if next(calls) == 0 else sample

    [samples] = group_of(workflow, [{"id": "first"}])
    assert len(samples) == 2 and next(calls) == 3
    assert "weight must be above 0 and finite, got nan; row id 'first'" in caplog.text


def test_wrong_samples_again_and_again_end_the_run_with_the_reason():
    async def workflow(generate, row):
        sample = sampled([1], await generate([1]), temperature=1.0)
        return sample.replace(tokens=sample.tokens - 9)

    async def main():
        _, generate = sleeper(lambda seed: 1.0)
        options = dict(group_size=2, groups_per_batch=1, eta=0, max_concurrent=2, vocabulary=50)
        async with Executor(workflow, generate, Prompts(ROWS), **options) as executor:
            executor.admit(0)
            await executor.batch(0)

    with pytest.raises(ServerError, match=r"8 groups in a row failed.*tokens must lie in \[0, vocabulary size 50\)"):
        play(main())


@pytest.mark.parametrize(
    "error, words",
    [
        (SystemExit("no more"), "the workflow exited .'no more'."),
        (GeneratorExit(), "the workflow exited .'GeneratorExit'."),
        (asyncio.CancelledError(), "raised CancelledError"),
        (None, "cancelled its own task"),
    ],
)
def test_a_workflow_that_would_end_the_process_ends_the_run_with_a_reason(error, words):
    async def workflow(generate, row):
        if error is not None:
            raise error
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(ValueError, match=f"{words}.*row id 0"):
        group_of(workflow, ROWS[:1])


def test_a_group_of_server_errors_is_one(monkeypatch):
    """As `asyncio.TaskGroup` raises it in a workflow that asks several times at once."""
    tries = itertools.count()

    async def workflow(generate, row):
        async def asked(n):
            if n < 2:
                raise ServerError("http://one:1/generate: gone")
            return await generate([1])

        n = next(tries)
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(asked(n)) for _ in range(2)]
        return sampled([1], found[0].result(), temperature=1.0)

    monkeypatch.setattr(episodes, "PAUSE_S", 0)
    group_of(workflow, ROWS[:1], size=1)
    assert next(tries) == 3

    async def other(generate, row):
        raise ExceptionGroup("both", [ServerError("gone"), KeyError("x")])

    with pytest.raises(ExceptionGroup):
        group_of(other, ROWS[:1], size=1)


def test_warnings_of_one_kind_are_few(monkeypatch, caplog):
    """Those of a dead server, of which each episode in flight has one at each attempt."""

    async def fails(generate, row):
        raise ServerError(f"{row['why']} (request {next(names)})")

    async def group(why):
        with pytest.raises(ServerError, match=why):
            await episodes.group(fails, None, {"why": why}, prompt=0, size=16, seed=0, on_lost=lambda n: None)

    names = itertools.count()
    monkeypatch.setattr(episodes, "PAUSE_S", 0)
    monkeypatch.setattr(episodes, "_warned", {})
    asyncio.run(group("http://one:1/generate: gone"))
    assert caplog.messages[0] == "prompt 0, episode 0, attempt 1: http://one:1/generate: gone (request 0)"
    assert len(caplog.messages) == 2 and "continues without episode" in caplog.messages[1]
    asyncio.run(group("http://two:1/generate: gone"))
    assert len(caplog.messages) == 4
    monkeypatch.setattr(episodes, "AGAIN_S", 0)
    asyncio.run(group("http://one:1/generate: gone"))
    assert caplog.messages[4].endswith("(and 31 more alike since the last such line)")


def test_a_row_nested_too_deep_is_an_error_in_one_line():
    row = deep = {}
    for _ in range(2000):
        deep["x"] = deep = {}
    with pytest.raises(ValueError, match=r"^a row must be data, .*recursion.*; row nested too deep, with the fields"):
        group_of(plain, [row])


def test_an_evaluation_that_fails_names_the_row(monkeypatch):
    async def workflow(generate, row):
        if row["id"] == 3:
            raise ServerError("the server is gone")
        return await plain(generate, row)

    monkeypatch.setattr(episodes, "PAUSE_S", 0)
    with pytest.raises(ServerError, match="^the server is gone; row id 3$"):
        play(rollouts(workflow, nothing, ROWS[:5], seed=None))
    work = shared_rollouts.evaluate(
        workflow, nothing, {"held": ROWS[:5]}, samples=1, max_concurrent=2, seed=None, on_group=lambda: None
    )
    with pytest.raises(ServerError, match="^the evaluation of held failed: the server is gone; row id 3$"):
        play(work)


def test_a_sample_with_other_arrays_than_the_first_is_replayed(caplog, monkeypatch):
    played = Counter()
    monkeypatch.setattr(episodes, "_warned", {})

    async def workflow(generate, row):
        sample, played[row["id"]] = await plain(generate, row), played[row["id"]] + 1
        odd = row["id"] == 1 and played[1] == 1
        await asyncio.sleep(float(odd))
        return sample.replace(arrays={"x": ("target", np.zeros(2))} if odd else {})

    groups, counts = one_batch(workflow, group_size=1)
    assert [samples[0].prompt for samples in groups] == [0, 1] and counts["retries"] == 1
    assert not any(sample.arrays for samples in groups for sample in samples)
    [said] = caplog.messages
    assert "arrays must be those of the first sample, of which {} differ, got {'x': 'target float'}; row id 1" in said


def test_groups_begin_a_few_in_a_turn_of_the_loop():
    turn, begun = 0, Counter()

    async def workflow(generate, row):
        begun[turn] += 1
        await asyncio.sleep(1.0)
        return sampled([1], Completion([1], [-1.0], [0], "stop"), temperature=1.0)

    async def main():
        nonlocal turn
        rows = Prompts(ROWS, shuffle=False)
        async with Executor(
            workflow, None, rows, group_size=2, groups_per_batch=64, eta=0, max_concurrent=64, seed=None
        ) as executor:
            executor.admit(0)
            while turn < 64:
                await asyncio.sleep(0)
                turn += 1
            assert len(await executor.batch(0)) == 64

    play(main())
    assert begun.total() == 128 and max(begun.values()) <= AT_ONCE
