"""Runs that are killed at any record of their journal and go on from it, on a virtual clock: executor, journal and
training loop are the real ones."""

import asyncio
import contextlib
import json
import shutil
import threading
from collections import defaultdict
from concurrent.futures import Future

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rollout_scheduling_executor import lognormal, uniform

from areax.rollout import loop
from areax.rollout.errors import ServerError
from areax.rollout.journal import codec, store
from areax.rollout.scheduling import episodes
from areax.rollout.scheduling.curriculum import Adaptive, Curriculum, Prompts
from areax.rollout.scheduling.executor import Executor
from areax.rollout.scheduling.resumed import Resumed
from areax.rollout.simulation import clock
from areax.rollout.types import Completion, sampled

G, SIZE, STEPS, SAVED = 2, 2, 9, 3
ROWS = [{"id": i} for i in range(17)]
IDENTITY = {"run": "r", "options": "o"}


class AtOnce(contextlib.AbstractContextManager):
    """A thread pool without threads, for which a virtual clock does not wait."""

    def __exit__(self, *_):
        pass

    def submit(self, work, *args):
        done = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Run:
    """A run, with what its processes leave: states, a journal, and what they said.

    Attributes:
      states: {version: cursor}; trained: {version: its batch}; said: what was generated and kept, in order.
    """

    def __init__(
        self, folder, *, eta, salt=0, oversample=0, adaptive=False, accept=0.0, none=0.0, fail=0.0, most=9, soon=False
    ):  # fmt: skip
        """`soon`: episodes are recorded soon after they end, as in a run, else at once."""
        self.soon = soon
        self.folder, self.eta, self.salt, self.oversample, self.most = folder, eta, salt, oversample, most
        self.adaptive, self.accept, self.none, self.fail = adaptive, accept, none, fail
        self.states, self.trained, self.said, self.handed = {}, {}, [], {}
        self.stopped, self.processes = set(), 0
        folder.mkdir()

    def process(self, death=0, older=False):
        """Goes on until its record `death`; 0 = to the end. Returns whether it ended.

        Args:
          older: from the state before the newest, as if that were damaged.
        """
        self.processes += 1
        kept = sorted(self.states)[: -1 if older else None]
        self.states = {v: self.states[v] for v in kept}
        start = max(kept, default=0)
        self.trained = {v: self.trained[v] for v in range(start)}
        dead, folder = False, self.folder / f"{self.processes}"
        shutil.copytree(self.folder / "now", folder) if (self.folder / "now").exists() else folder.mkdir()
        written, count = store.Journal._written, 0

        def counted(journal, write):
            nonlocal count, dead
            count += 1
            if dead:  # what follows is only how its tasks end
                return AtOnce().submit(lambda: None)
            dead = count == death
            if not (dead and death % 2):
                written(journal, write)
            if dead:  # what it leaves
                shutil.rmtree(self.folder / "now", ignore_errors=True)
                shutil.copytree(folder, self.folder / "now")
                self.main.cancel()
            return AtOnce().submit(lambda: None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "ThreadPoolExecutor", lambda *_: AtOnce())
            patch.setattr(store.Journal, "_written", counted)
            patch.setattr(episodes, "PAUSE_S", 0.1)
            try:
                clock.run(self._train(folder, start, lambda: dead))
            except asyncio.CancelledError:
                return False
        return True

    async def _train(self, folder, start, dead):
        self.main = asyncio.current_task()
        version, attempts = -1, defaultdict(int)

        async def generate(tokens, *, seed, **sampling):
            begun = version
            attempts[seed] += 1
            await asyncio.sleep(lognormal(self.salt, seed, begun, self.processes if self.eta else 0))
            if uniform(self.salt, seed, attempts[seed], self.processes) < self.fail:
                raise ServerError("server is gone")
            word = int(1e6 * uniform(self.salt, seed, begun))
            return Completion([word, word], [-1.0, -2.0], [begun, version], "stop")

        async def workflow(generate, row):
            done = await generate([1, 2])
            seen = uniform(done.tokens[0])
            info = {"row": row["id"], "pair": (1, 2)}
            return sampled([1, 2], done, temperature=1.0, reward=seen, info=info) if seen >= self.none else None

        def publish(v):
            async def push():
                nonlocal version
                await asyncio.sleep(0.7)
                version = v

            return push

        cursor = self.states.get(start)
        async with store.opened(folder, start, IDENTITY) as journal:
            keep = journal.keep

            def told(prompt, admitted, row, episode, samples, seconds, **more):
                dead() or self.said.append(("generated", prompt, episode))
                keep(prompt, admitted, row, episode, samples, seconds, **more)
                if not self.soon:
                    journal.flush()
                    dead() or self.said.append(("kept", prompt, episode))

            journal.keep = told
            prompts = Adaptive(ROWS, Curriculum(order="success")) if self.adaptive else Prompts(ROWS)
            async with Executor(
                workflow, generate, prompts, group_size=SIZE, groups_per_batch=G, eta=self.eta,
                max_concurrent=self.most, oversample=self.oversample, seed=self.salt, batches=STEPS, journal=journal,
                cursor=journal.past.cursor or cursor,
                accept=lambda samples: uniform(self.salt, "accept", samples[0].prompt) >= self.accept,
            ) as ex:  # fmt: skip
                batches = Resumed(journal, ex, cursor)

                async def next_groups(v):
                    groups = [[plain(s) for s in group] for group in await batches.batch(v)]
                    self.stopped |= {*ex.cursor()["stopped"]}
                    if not dead():
                        if v in journal.past.batches:  # a process may have died just before it was handed out
                            assert groups == self.handed.get(v, groups)
                        self.handed[v] = groups
                    return v, groups

                def update(batch):
                    clock.spend(1.0)
                    if not dead():
                        self.trained[batch[0]] = batch[1]

                def save(v, position):
                    if not dead():
                        self.states[v] = json.loads(json.dumps(position))

                await loop.run(
                    next_groups, update, publish, save, eta=self.eta, steps=STEPS, start=start, admit=batches.admit,
                    cursor=batches.cursor, save_every=SAVED,
                )  # fmt: skip

    def check(self):
        """Every batch is whole, no prompt is in two, none is too old, and no kept episode was made again."""
        assert sorted(self.trained) == [*range(STEPS)]
        seen = []
        for v, groups in self.trained.items():
            assert len(groups) == G
            for group in groups:
                assert all(0 <= v - s["info"]["admitted"] <= self.eta for s in group)
                assert all(
                    s["info"]["admitted"] <= version <= v for s in group for version in s["version"] if version >= 0
                )
                assert len({s["info"]["row"] for s in group}) == 1 and group[0]["info"]["pair"] == (1, 2)
                seen.append(group[0]["prompt"])
        assert len(set(seen)) == len(seen)
        kept = set()
        for what, *name in self.said:
            assert what == "kept" or tuple(name) not in kept or name[0] in self.stopped
            kept.add(tuple(name)) if what == "kept" else None
        return seen


def plain(sample):
    fields = {name: getattr(sample, name) for name in ("prompt", "rollout", "rewards", "info", "weight", "sample")}
    return {**fields, "tokens": sample.tokens.tolist(), "version": sample.version.tolist()}


def killed(run, deaths, older=()):
    for i, death in enumerate(deaths):
        if run.process(death, older=i in older and len(run.states) > 1):
            return run
    assert run.process()
    return run


schedules = dict(
    salt=st.integers(0, 10**6), deaths=st.lists(st.integers(1, 30), max_size=12), older=st.sets(st.integers(0, 11)),
    accept=st.sampled_from([0.0, 0.5]), none=st.sampled_from([0.0, 0.3]), adaptive=st.booleans(), soon=st.booleans(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25)
@given(**schedules)
def test_at_eta_0_a_killed_run_is_the_run_that_was_not(tmp_path_factory, deaths, older, **options):
    path = tmp_path_factory.mktemp("runs")
    whole = killed(Run(path / "whole", eta=0, **options), [])
    other = killed(Run(path / "killed", eta=0, **options), deaths, older)
    other.check()
    assert other.trained == whole.trained and other.states[STEPS] == whole.states[STEPS]


NONE = dict(older=set(), accept=0.0, none=0.0, fail=0.0, adaptive=False, soon=False)


@pytest.mark.slow
@settings(max_examples=60)
@example(**NONE | dict(eta=0, oversample=2, most=3, salt=1, deaths=[10]))  # a surplus for a batch that has closed
@example(**NONE | dict(eta=0, oversample=0, most=1, salt=48660, deaths=[4], fail=0.2))  # a group failed, another began
@example(**NONE | dict(eta=1, oversample=1, most=5, salt=1, deaths=[2, 4, 22], accept=0.5, adaptive=True))  # draws
@given(
    eta=st.integers(0, 4), oversample=st.integers(0, G), fail=st.sampled_from([0.0, 0.2]), most=st.integers(1, 9),
    **schedules,
)  # fmt: skip
def test_at_any_eta_a_killed_run_consumes_each_prompt_once_and_in_time(
    tmp_path_factory, eta, oversample, fail, most, deaths, older, **options
):
    more = dict(eta=eta, oversample=oversample, fail=fail, most=most)
    run = killed(Run(tmp_path_factory.mktemp("runs") / "run", **more, **options), deaths, older)
    seen, last = run.check(), run.states[STEPS]
    counts = last["counts"]
    ended = len(seen) + counts["rejected"] + counts["refused"] + counts["failed"]
    assert last["next"] == ended + len({*last["open"], *last["stopped"]})  # none is skipped


def test_prompts_whose_record_is_lost_are_drawn_in_their_order(tmp_path):
    """A group that began last is the only one on the record; another's end is of a row that is not drawn now."""

    async def main():
        order = lambda: Adaptive(ROWS[:5], Curriculum(order="success"))
        whole = order()
        rows = [whole[prompt] for prompt in range(4)]
        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            journal.begin(2, 0, codec.mark(rows[2]))
            journal.decline(3, 0, codec.mark({"id": "another"}), "refused", 0.25)

        async def workflow(generate, row):
            return sampled([1, 2], await generate([1, 2]), temperature=1.0, reward=1.0, info=row)

        async def generate(tokens, **sampling):
            return Completion([1], [-1.0], [0], "stop")

        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            assert {*journal.past.begun} == {2, 3}
            options = dict(group_size=1, groups_per_batch=4, eta=0, max_concurrent=4, journal=journal)
            async with Executor(workflow, generate, order(), **options) as ex:
                ex.admit(0)
                groups = await ex.batch(0)
                assert [group[0].prompt for group in groups] == [0, 1, 2, 3] and ex.counts["refused"] == 0
                assert [group[0].info["id"] for group in groups] == [row["id"] for row in rows]

    asyncio.run(main())


def test_a_batch_is_handed_out_while_it_is_recorded(tmp_path):
    async def instant(generate, row):
        return sampled([1, 2], Completion([3], [-1.0], [0], "stop"), temperature=1.0, reward=1.0)

    async def work():
        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            of = {"group_size": 1, "groups_per_batch": 1, "eta": 0, "max_concurrent": 1, "journal": journal}
            async with Executor(instant, None, Prompts(ROWS), **of) as ex:
                free = threading.Event()
                journal._pool.submit(free.wait)  # as a slow disk
                ex.admit(0)
                await ex.batch(0)
                waiting = asyncio.create_task(asyncio.to_thread(ex.recorded))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                free.set()
                await waiting
                assert (await journal.read(0)).cursor == ex.cursor()

    asyncio.run(work())
