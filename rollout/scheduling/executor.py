"""Which prompts are generated when, and which groups make a batch: staleness bounded by eta, nothing thrown away.

A group is the episodes of one prompt. Counting in groups, G to a batch, a prompt is admitted while

    min(max_concurrent - running, (eta + v + 1) * G - (accepted + running)) > 0

where v is the version that all servers have admitted (the gate of AReaL, arXiv:2505.24298). Batch v takes the G oldest
finished groups, and closes only when what it leaves can still be consumed in time: for k = 0 .. eta - 1, at most k * G
groups that were admitted at a version <= v - eta + k are left, running or finished. Then no group is consumed more
than eta versions after its admission: the gate says so of every batch when a group is admitted, closing batch v
passes it on to v + 1, and once nothing runs any more batch v can close. The gate alone does not keep the bound,
because a slow group is overtaken and ages; nor does waiting for those alone that are due now (k = 0), because
several slow groups may fall due together.

Oversampling by n groups admits n more. Batch v then closes though up to n groups are left that no later batch could
take in time (admitted at a version <= v - eta; at eta = 0 all that are left), which are stopped; and though there are
up to n more than k * G at every k >= 1. So a batch does not wait for its slowest groups. Nor are these lost: once a
batch of them has gathered they are run again and waited for, without any beyond them, so that about every G / n batches
there is a long one (tail batching, arXiv:2509.21009). The bound holds as before, for never more than n groups are due
beyond what a batch can take. All this is for eta = 0, where the slowest group holds up everybody. With a larger eta,
which hides most of that already, it is as right, and gains less, or costs more than it gains (docs/simulate.md).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import events
from ..errors import ServerError
from ..types import Generate, Sample, Workflow
from . import length_bias
from .curriculum import Adaptive, EasyFirst, success
from .curriculum import Prompts as Prompts
from .episodes import group, stop
from .episodes import rollouts as rollouts  # the same episodes, where nothing is scheduled

log = logging.getLogger(__name__)

GIVEN_UP = 8  # groups in a row lost to failing servers, or a whole batch if that is more, end the run
REFUSED_BATCHES = 64  # as many groups refused in a row, without one accepted, end the run


class Executor:
    """Runs a workflow over prompts and hands out batches; `async with`, and a version must be admitted to begin.

    Attributes:
      counts: groups: accepted (v * G of them consumed), running, rejected (the workflow gave no sample), refused (by
        `accept`), failed (their servers failed ATTEMPTS times), stopped (surplus of a batch; to be run again), dropped
        (stopped or left over when the executor closed); of episodes: `retries`, and those `lost` without which their
        group goes on.
    """

    def __init__(
        self,
        workflow: Workflow,
        generate: Generate,
        prompts: Prompts | EasyFirst | Adaptive,
        *,
        group_size: int,
        groups_per_batch: int,
        eta: int,
        max_concurrent: int,
        oversample: int = 0,
        seed: int | None = 0,
        accept: Callable[[list[Sample]], bool] | None = None,
        baseline: Workflow | None = None,
        batches: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ):
        """
        Args:
          generate: as `Fleet.generate`; called with a `seed` of its own for every call, unless `seed` is None.
          prompts: the rows by their ordinal. When a batch closes, an adaptive order is told how its groups did and
            those left out since the batch before, in the order of their prompts.
          group_size: episodes a prompt.
          groups_per_batch: G; each has at least one sample.
          eta: most versions between the admission of a group and the batch that takes it; 0 = synchronous.
          max_concurrent: most groups that run at a time.
          oversample: groups beyond what the batches need; at most groups_per_batch. Which groups make a batch then
            depends on which end first.
          seed: of the run; None for servers that honour no seed.
          accept: whether a finished group may be trained on; another prompt takes the place of a refused one.
          baseline: one more episode a prompt, that is not trained on: its reward comes with each sample of the group as
            the component "greedy", NaN where it was rejected. It may decode greedily.
          batches: of the whole run, if known: nothing is generated for those behind.
          cursor: where a former run stood: prompts that were open then come first.
        """
        for name, value, least in (
            ("group_size", group_size, 1),
            ("groups_per_batch", groups_per_batch, 1),
            ("eta", eta, 0),
            ("max_concurrent", max_concurrent, 1),
            ("oversample", oversample, 0),
        ):
            if value < least:
                raise ValueError(f"Executor: {name} must be at least {least}, got {value}")
        if oversample > groups_per_batch:
            raise ValueError(
                f"Executor: oversample must be at most groups_per_batch {groups_per_batch}, got {oversample}"
            )
        self.workflow, self.generate, self.prompts = workflow, generate, prompts
        self.group_size, self.groups_per_batch, self.eta = group_size, groups_per_batch, eta
        self.max_concurrent, self.seed, self.accept, self.baseline = max_concurrent, seed, accept, baseline
        self.batches, self.oversample = batches, oversample
        self._version: int | None = None  # admitted by all servers
        self._next = self._batch = 0  # the first prompt never admitted; the batch to close next
        self._open: deque[int] = deque()  # prompts to admit before `_next`
        self._aside: list[int] = []  # prompts that were stopped, until there are G of them
        self._again: set[int] = set()  # those that are open or run again; they are not stopped a second time
        self._ending: set[asyncio.Task] = set()  # of groups that were stopped
        self._running: dict[int, tuple[int, asyncio.Task]] = {}  # prompt: (version, task), oldest first
        self._ready: dict[int, tuple[int, list[Sample]]] = {}  # prompt: (version, samples)
        self._adaptive = prompts if isinstance(prompts, Adaptive) else None
        self._left_out: dict[int, float] = {}  # prompt: success, of groups that ended and no batch will take
        self._changed = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._refused = self._failed = 0  # in a row
        self._total = dict(rejected=0, refused=0, failed=0, stopped=0, dropped=0, retries=0, lost=0)
        self._lengths = length_bias.Lengths(groups_per_batch)
        if cursor is not None:
            self._resume(cursor)

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    @property
    def counts(self) -> dict[str, int]:
        accepted = self._batch * self.groups_per_batch + len(self._ready)
        return {"accepted": accepted, "running": len(self._running), **self._total}

    def admit(self, v: int) -> None:
        """All servers sample with version v from now on; prompts are admitted at once and whenever a group ends."""
        if self._version is not None and v < self._version:
            raise ValueError(f"Executor: versions must not go back, got {v} after {self._version}")
        self._version = v
        self._fill()

    async def batch(self, v: int) -> list[list[Sample]]:
        """The G groups of batch v = 0, 1, ... in the order of their prompts, samples in theirs, once it closes.

        Raises:
          The error of a workflow, of `accept` or of the data, at once; ServerError when many groups in a
          row were lost to failing servers; ValueError when the workflow or `accept` refuses everything.
        """
        if v != self._batch:
            raise ValueError(f"Executor: the next batch is {self._batch}, got {v}")
        if v == self.batches:
            raise ValueError(f"Executor: the run ends with batch {v - 1}, got {v}")
        while True:
            if self._error:
                raise self._error
            order = sorted(self._ready, key=lambda prompt: (self._ready[prompt][0], prompt not in self._again, prompt))
            oldest, left = sorted(order[: self.groups_per_batch]), order[self.groups_per_batch :]
            if len(oldest) == self.groups_per_batch and self._in_time(v, left):
                self._batch += 1
                groups = {prompt: self._ready.pop(prompt)[1] for prompt in oldest}
                self._again -= groups.keys()
                if self.oversample:
                    self._stop(self._late(v, left))
                self._tell(groups)
                self._lengths.train(map(_length, groups.values()))
                events.note("batch", version=v, prompts=oldest)
                return list(groups.values())
            self._changed.clear()
            await self._changed.wait()

    def lengths(self) -> dict[str, float]:
        """How long groups are that were begun, and how much longer those that batches took (`survival.Lengths`)."""
        return self._lengths.report(asyncio.get_running_loop().time())

    def cursor(self) -> dict[str, Any]:
        """Where the run stands after the batches handed out, as JSON; `Executor(cursor=...)` goes on from there."""
        epoch, index = divmod(self._next, len(self.prompts.rows))
        stopped = sorted([*self._aside, *self._again])
        opened = sorted({*self._open, *self._running, *self._ready} - self._again)
        return {
            "batch": self._batch,
            "next": self._next,
            "epoch": epoch,
            "index": index,
            "open": opened,
            "stopped": stopped,
            "counts": dict(self._total),
            "data": self._identity(),
            **({"curriculum": self._adaptive.state(sorted([*opened, *stopped]))} if self._adaptive else {}),
        }

    async def close(self) -> None:
        """Cancels what runs and waits for its end; groups in hand are dropped, and open again in the cursor."""
        dropped = sorted([*self._running, *self._ready])
        tasks = [*(task for _, task in self._running.values()), *self._ending]
        self._closed = True
        self._running.clear()
        self._ready.clear()
        self._open.extendleft(reversed(dropped))
        self._total["dropped"] += len(dropped)
        await stop(tasks)

    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self.prompts.rows), "order": self.prompts.order}

    def _resume(self, cursor: Mapping[str, Any]) -> None:
        now, then = self._identity(), cursor["data"]
        for name in now:
            if now[name] != then[name]:
                raise ValueError(
                    f"Executor: the data of the run to resume had {name} {then[name]}, got {now[name]}; "
                    "resume with the same rows and shuffle seed, or start a new run"
                )
        self._batch, self._next = cursor["batch"], cursor["next"]
        self._open.extend(cursor["open"])
        self._aside.extend(cursor.get("stopped", ()))
        self._reopen()
        self._total.update(cursor["counts"])
        if self._adaptive:
            self._adaptive.restore(cursor["curriculum"])

    def _tell(self, groups: Mapping[int, list[Sample]]) -> None:
        """Tells how the groups of a batch did, and those left out so far: not in the order in which they ended."""
        told = self._left_out | {prompt: success(samples) for prompt, samples in groups.items()}
        self._left_out = {}
        if self._adaptive:
            for prompt in sorted(told):
                self._adaptive.observe(prompt, told[prompt])

    def _in_time(self, v: int, left: Sequence[int]) -> bool:
        """Whether the batches behind v can consume in time what runs and what is `left` of the finished groups, but for
        `oversample` of them that are to be stopped."""
        late = self._late(v, left)
        if len(late) > self.oversample or (self._again & set(late) and v + 1 != self.batches):
            return False
        versions = [version for prompt, version in self._behind(left).items() if prompt not in late]
        return all(
            sum(version <= v - self.eta + k for version in versions) <= k * self.groups_per_batch + self.oversample
            for k in range(1, self.eta)
        )

    def _behind(self, left: Sequence[int]) -> dict[int, int]:
        """{prompt: version} of what runs and of what is `left` of the finished groups."""
        return {prompt: version for prompt, (version, _) in self._running.items()} | {
            prompt: self._ready[prompt][0] for prompt in left
        }

    def _late(self, v: int, left: Sequence[int]) -> list[int]:
        """The prompts of those that no batch behind v can take."""
        behind = self._behind(left)
        return [prompt for prompt in sorted(behind) if behind[prompt] <= v - self.eta or v + 1 == self.batches]

    def _stop(self, prompts: Sequence[int]) -> None:
        """Ends these groups, whose prompts are set aside until there is a batch of them."""
        now = asyncio.get_running_loop().time()
        for prompt in prompts:
            version, task = self._running.pop(prompt, (None, None))
            if task is None:
                version, _ = self._ready.pop(prompt)
            else:
                task.cancel()
                self._ending.add(task)
            self._lengths.stop(prompt, now)
            events.note("group", prompt=prompt, admitted=version, outcome="stopped")
        self._total["stopped"] += len(prompts)
        self._again -= set(prompts)
        self._aside += prompts
        self._reopen()

    def _reopen(self) -> None:
        """Opens the prompts of a batch that were stopped, if there are so many and none of them runs again already."""
        ready = self.groups_per_batch if self.oversample else len(self._aside)
        if ready <= len(self._aside) and not self._again:
            again, self._aside = self._aside[:ready], self._aside[ready:]
            self._again.update(again)
            self._open.extendleft(reversed(again))

    def _room(self, v: int) -> int:
        """How many prompts may be admitted while all servers have version v."""
        running = len(self._running)
        accepted = self._batch * self.groups_per_batch + len(self._ready)
        allowed = self.eta + v + 1
        if self.batches is not None:
            allowed = min(allowed, self.batches)
        most = allowed * self.groups_per_batch + max(0, self.oversample - len(self._again))
        return min(self.max_concurrent - running, most - (accepted + running))

    def _fill(self) -> None:
        v = self._version
        while v is not None and not self._closed and not self._error and self._room(v) > 0:
            if self._open:
                prompt = self._open.popleft()
            else:
                prompt, self._next = self._next, self._next + 1
            task = asyncio.create_task(self._group(prompt, v))
            self._running[prompt] = (v, task)
            self._lengths.begin(prompt, asyncio.get_running_loop().time())
            task.add_done_callback(functools.partial(self._finish, prompt))

    async def _group(self, prompt: int, version: int) -> tuple[list[Sample], bool]:
        """Its samples, and whether they may be trained on."""
        samples = await group(
            self.workflow,
            functools.partial(_whole, self.generate),
            self.prompts[prompt],
            prompt=prompt,
            size=self.group_size,
            seed=self.seed,
            on_retry=functools.partial(self._count, "retries", 1),
            on_lost=functools.partial(self._count, "lost"),
        )
        if not samples or (self.accept is not None and not self.accept(samples)):
            return samples, False
        if self.baseline:
            [beside] = await rollouts(self.baseline, self.generate, [self.prompts[prompt]])
            value = beside[0].reward if beside else float("nan")
            samples = [s.replace(components={**s.components, "greedy": value}) for s in samples]
        return [s.replace(info={**s.info, "admitted": version}) for s in samples], True

    def _count(self, what: str, number: int) -> None:
        self._total[what] += number

    def _finish(self, prompt: int, task: asyncio.Task) -> None:
        self._ending.discard(task)
        running = self._running.get(prompt)
        if running is None or running[1] is not task:  # closed, or stopped, and maybe begun anew
            task.cancelled() or task.exception()
            return
        del self._running[prompt]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        samples, accepted = ([], False) if error is not None else task.result()
        declined = "refused" if samples else "rejected"
        outcome = "accepted" if accepted else declined if error is None else "failed"
        events.note("group", prompt=prompt, admitted=running[0], outcome=outcome)
        tokens = _length(samples) if samples else None
        self._lengths.end(prompt, asyncio.get_running_loop().time(), tokens)
        if not accepted:
            self._again.discard(prompt)
            self._left_out[prompt] = success(samples)
        if accepted:
            self._ready[prompt] = samples[0].info["admitted"], samples
            self._failed = self._refused = 0
        elif error is None:
            self._total[declined] += 1
            self._refused += 1
            if self._refused >= REFUSED_BATCHES * self.groups_per_batch:
                self._error = ValueError(
                    f"Executor: {self._refused} groups in a row were refused by the workflow or by accept; "
                    "is the task solved, or out of reach?"
                )
        elif isinstance(error, ServerError):
            log.warning("prompt %d is given up: %s", prompt, error)
            self._total["failed"] += 1
            self._failed += 1
            if self._failed >= max(GIVEN_UP, self.groups_per_batch):
                self._error = ServerError(
                    f"Executor: {self._failed} prompts in a row were given up; the last failed with: {error}"
                )
        else:
            self._error = self._error or error
        self._fill()
        self._changed.set()


def _length(samples: Sequence[Sample]) -> float:
    """Tokens that an episode of the group sampled, in the mean."""
    return sum(int(s.mask.sum()) for s in samples) / len({s.rollout for s in samples})


def _whole(generate, tokens, **sampling):
    """`generate`, unless its log-probabilities would not be those of the policy."""
    whole_by = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "json_schema": ""}
    for name, whole in whole_by.items():
        if sampling.get(name, whole) != whole:
            raise ValueError(
                f"training needs samples of the whole distribution, got {name}={sampling[name]}; set it to {whole!r}"
            )
    if not sampling.get("temperature", 1.0) > 0:
        raise ValueError(
            f"training needs a temperature above 0, got {sampling['temperature']}; greedy decoding explores nothing"
        )
    return generate(tokens, **sampling)
