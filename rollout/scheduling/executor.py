"""The executor: admits prompts and forms batches with staleness at most eta, without discarding groups.

A group is the episodes of one prompt. Counting in groups, G per batch, a prompt is admitted while

    min(max_concurrent - running, (eta + v + 1) * G - (accepted + running)) > 0

where v is the version that all servers have admitted (the gate of AReaL, arXiv:2505.24298). Batch v takes the G oldest
finished groups, and closes only when the remaining ones can still be consumed in time: for k = 0 .. eta - 1, at most
k * G groups admitted at a version <= v - eta + k remain, running or finished. Then no group is consumed more than eta
versions after its admission: the gate establishes this for every batch when a group is admitted, closing batch v
preserves it for v + 1, and once nothing is running batch v can close. The gate alone does not guarantee the bound,
because faster groups overtake a slow one while it ages; nor does waiting only for groups that are due now (k = 0),
because several slow groups may become due together.

Oversampling by n groups admits n more. Batch v then closes even if up to n groups remain that no later batch could
take in time (admitted at a version <= v - eta; at eta = 0 all that remain), which are stopped, and even if up to n more
than k * G remain at every k >= 1. So a batch does not wait for its slowest groups. These are not lost: once there is a
full batch of them they are rerun and waited for, without oversampling, so that about every G / n batches there is a
long one (tail batching, arXiv:2509.21009). The bound still holds, because at most n groups are due beyond what a batch
can take. This is meant for eta = 0, where the slowest group blocks everything. With a larger eta, which already hides
most of that, it is equally correct but gains less, or costs more than it gains (docs/simulate.md).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from .. import events
from ..errors import ServerError
from ..journal import codec
from ..journal.calls import Calls
from ..journal.store import Begun, Journal
from ..processes.printable import one_line
from ..rewards.signatures import Regroup
from ..types import Generate, Sample, Workflow
from . import length_bias
from .curriculum import Adaptive, EasyFirst, success
from .curriculum import Prompts as Prompts
from .episodes import group, outcome, stop
from .episodes import rollouts as rollouts  # the same episodes without scheduling
from .mixture import Mixture
from .stream import Stream
from .validation import CheckImages, checked, forms, like_first

log = logging.getLogger(__name__)

AT_ONCE = 8  # episodes begun in one turn of the loop
GIVEN_UP = 8  # consecutive groups lost to failing servers (or a whole batch, if that is more) that end the run
REFUSED_BATCHES = 64  # consecutive batches' worth of groups, all refused, that end the run


class Executor:
    """Runs a workflow over prompts and returns batches; use with `async with`, and admit a version to begin.

    Attributes:
      counts: groups: accepted (v * G of them consumed), running, rejected (the workflow gave no sample), refused (by
        `accept`), failed (their servers failed, or their samples were wrong, ATTEMPTS times), stopped (surplus of a
        batch, to be rerun), dropped (running or finished when the executor closed); episodes: `retries`, and `lost`
        (left out of their group).
    """

    def __init__(
        self,
        workflow: Workflow,
        generate: Generate,
        prompts: Prompts | EasyFirst | Adaptive | Mixture | Stream,
        *,
        group_size: int,
        groups_per_batch: int,
        eta: int,
        max_concurrent: int,
        oversample: int = 0,
        seed: int | None = 0,
        accept: Callable[[list[Sample]], bool] | None = None,
        regroup: Regroup | None = None,
        baseline: Workflow | None = None,
        batches: int | None = None,
        cursor: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
        experts: int | None = None,
        check_images: CheckImages | None = None,
        episode_seats: Collection[int] = (),
        journal: Journal | None = None,
    ):
        """
        Args:
          generate: as `Fleet.generate`; every call gets its own `seed`, unless `seed` is None.
          prompts: the rows by ordinal. When a batch closes, an adaptive order observes its groups and those left out
            since the previous batch, in the order of their prompts.
          group_size: episodes per prompt.
          groups_per_batch: G; each group has at least one sample.
          eta: most versions between the admission of a group and the batch that takes it; 0 = synchronous.
          max_concurrent: most groups that run at a time.
          oversample: groups beyond what the batches need; at most groups_per_batch. Batches then consist of the groups
            that finish first.
          seed: the run's seed; None for servers that do not honour seeds.
          accept: whether a finished group may be trained on; a refused group is replaced by another prompt.
          regroup: of a group that is complete the rewards, as in `episodes.group`; before `accept`.
          baseline: an additional episode per prompt, not trained on (it may decode greedily). Its reward becomes the
            component "greedy" of each sample of the group, NaN if the episode was rejected.
          batches: of the whole run, if known: nothing is generated beyond them.
          cursor: the position of an earlier run to resume; its open prompts come first.
          vocabulary: number of the policy's tokens, which samples must stay within; None = unknown.
          experts: number of its experts in a layer, likewise.
          check_images: checks the images of samples, as `validation.checked` has it.
          episode_seats: as in `episodes.group`.
          journal: where episodes, the calls of those that go on, and batches are kept, and which has those of a former
            process.
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
        self.regroup, self.batches, self.oversample = regroup, batches, oversample
        self.vocabulary, self.experts, self.check_images = vocabulary, experts, check_images
        self.journal, self.episode_seats = journal, episode_seats
        self._version: int | None = None  # admitted by all servers
        self._forms: dict[str, str] | None = None  # of the first sample
        self._next = self._batch = 0  # the first prompt never admitted; the batch to close next
        self._open: deque[int] = deque()  # prompts to admit before `_next`
        self._deferred: list[int] = []  # stopped prompts, until there are G of them
        self._retrying: set[int] = set()  # stopped prompts that are open or running again; not stopped a second time
        self._ending: set[asyncio.Task] = set()  # of stopped groups
        self._running: dict[int, tuple[int, asyncio.Task]] = {}  # prompt: (version, task), oldest first
        self._ready: dict[int, tuple[int, list[Sample], float]] = {}  # prompt: (version, samples, length)
        self._adaptive = prompts if isinstance(prompts, Adaptive) else None
        self._forgotten: list[int] = []  # prompts whose recorded episodes no batch will take
        self._left_out: dict[int, float] = {}  # prompt: success, of ended groups that no batch will take
        self._changed = asyncio.Event()
        self._filling = False  # more prompts will be admitted in the next turn of the loop
        self._closed = False
        self._error: BaseException | None = None
        self._refused = self._failed = self._unscored = 0  # consecutive; of those refused without a reward
        self._total = dict(rejected=0, refused=0, failed=0, stopped=0, dropped=0, retries=0, lost=0)
        self._lengths = length_bias.Lengths(groups_per_batch)
        if cursor is not None:
            self._resume(cursor)
        # Behind its tokens a call goes on with other rounding, where to generate it again gives the same bits.
        self._continues = eta > 0 or seed is None
        self._recording: Future[None] | None = None  # of the last batch
        self._recorded = self._recalled(journal.past.begun) if journal else {}

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    @property
    def counts(self) -> dict[str, int]:
        accepted = self._batch * self.groups_per_batch + len(self._ready)
        return {"accepted": accepted, "running": len(self._running), **self._total}

    def admit(self, v: int) -> None:
        """Declares that all servers sample with version v from now on, and admits prompts, now and as groups end."""
        if self._version is not None and v < self._version:
            raise ValueError(f"Executor: versions must not decrease, got {v} after {self._version}")
        self._version = v
        self._fill()

    async def batch(self, v: int) -> list[list[Sample]]:
        """Returns the G groups of batch v = 0, 1, ... once it closes, ordered by prompt, their samples by episode.

        Raises:
          The error of a workflow, of `accept` or of the data, at once; ServerError if many consecutive groups
          were lost to failing servers; ValueError if the workflow or `accept` refuses everything.
        """
        if v != self._batch:
            raise ValueError(f"Executor: the next batch is {self._batch}, got {v}")
        if v == self.batches:
            raise ValueError(f"Executor: the run ends with batch {v - 1}, got {v}")
        while True:
            if self._error:
                raise self._error
            if not self._recorded and len(self._ready) >= self.groups_per_batch and (groups := self._close(v)):
                if self.journal:
                    ended = [*groups, *self._forgotten]
                    self._forgotten.clear()
                    self._recording = self.journal.close_batch(v, [*groups.values()], self.cursor(), ended)
                return [*groups.values()]
            self._changed.clear()
            await self._changed.wait()

    def _close(self, v: int) -> dict[int, list[Sample]] | None:
        """The groups of batch v by prompt, which is thereby closed; None while it must wait."""
        if not self._in_time(v):
            return None
        order = sorted(self._ready, key=lambda prompt: (self._ready[prompt][0], prompt not in self._retrying, prompt))
        oldest, left = sorted(order[: self.groups_per_batch]), order[self.groups_per_batch :]
        late = self._late(v, left)
        if self._retrying & set(late) and v + 1 != self.batches:
            return None
        self._batch += 1
        self._lengths.train(self._ready[prompt][2] for prompt in oldest)
        groups = {prompt: self._ready.pop(prompt)[1] for prompt in oldest}
        self._retrying -= groups.keys()
        if self.oversample:
            self._stop(late)
        self._observe(groups)
        events.emit("batch", version=v, prompts=oldest)
        return groups

    def recorded(self) -> None:
        """Blocks until the batch handed out last is in the journal; for another thread than the loop's."""
        if self._recording:
            self._recording.result()

    def lengths(self) -> dict[str, float]:
        """The length of started groups, and the bias of those in batches (`length_bias.Lengths.report`)."""
        return self._lengths.report(asyncio.get_running_loop().time())

    def cursor(self) -> dict[str, Any]:
        """The run's position after the batches handed out, as JSON; `Executor(cursor=...)` resumes from it."""
        epoch, index = divmod(self._next, self.prompts.size or self._next + 1)  # of a stream unknown
        retrying = sorted(self._retrying)
        stopped = [*retrying, *self._deferred]
        opened = sorted({*self._open, *self._running, *self._ready, *self._recorded} - self._retrying)
        return {
            "batch": self._batch,
            "next": self._next,
            "epoch": epoch,
            "index": index,
            "open": opened,
            "stopped": stopped,
            "retrying": retrying,
            "counts": dict(self._total),
            "data": self._identity(),
            **({"curriculum": self._adaptive.state(sorted([*opened, *stopped]))} if self._adaptive else {}),
        }

    async def close(self) -> None:
        """Cancels running groups and waits until they end; drops all groups and reopens their prompts in the cursor."""
        dropped = sorted([*self._running, *self._ready])
        tasks = [*(task for _, task in self._running.values()), *self._ending]
        self._closed = True
        self._running.clear()
        self._ready.clear()
        self._open.extendleft(reversed(dropped))
        self._total["dropped"] += len(dropped)
        await stop(tasks)

    def _identity(self) -> dict[str, Any]:
        return {"rows": self.prompts.size, "order": self.prompts.order}

    def _resume(self, cursor: Mapping[str, Any]) -> None:
        now, then = self._identity(), cursor["data"]
        for name in now:
            if now[name] != then[name]:
                raise ValueError(
                    f"Executor: the run must be resumed with the same data, {name} {then[name]}, got {now[name]}; "
                    "give the same rows and shuffle seed, or start a new run"
                )
        self._batch, self._next = cursor["batch"], cursor["next"]
        self._open.extend(cursor["open"])
        self._retrying.update(retrying := cursor.get("retrying", ()))
        self._open.extendleft(reversed(retrying))
        self._deferred.extend(prompt for prompt in cursor.get("stopped", ()) if prompt not in self._retrying)
        self._reopen()
        self._total.update(cursor["counts"])
        if self._adaptive:
            self._adaptive.restore(cursor["curriculum"])

    def _recalled(self, begun: Mapping[int, Begun]) -> dict[int, Begun]:
        """The groups that a former process had begun behind the cursor, in their order, without what is of no use:
        groups that no batch can take in time, and episodes of versions that are not made yet, and may become others."""
        v = self._batch
        use = {
            prompt: one
            for prompt, one in sorted(begun.items(), key=lambda entry: (entry[1].version, entry[0]))
            if v - self.eta <= one.version <= v and (prompt in self._open or prompt >= self._next)
        }
        self._forgotten += begun.keys() - use.keys()
        after = range(self._next, max([self._next - 1, *use]) + 1)
        self._next = after.stop
        if self._adaptive:  # in the order in which they began, though records of some may be lost
            for prompt in sorted({*self._open, *after, *use}):
                self._adaptive.draw(prompt)
        self._open = deque(prompt for prompt in (*self._open, *after) if prompt not in use)
        made = lambda samples: all(sample.version.max() <= v for sample in samples)
        of = lambda one: {place: call.until(v) for place, call in one.calls.items()}
        recalled = {
            prompt: one._replace(
                episodes={i: samples for i, samples in one.episodes.items() if made(samples)},
                calls={place: call for place, call in of(one).items() if self._continues or call.made.finish},
            )
            for prompt, one in use.items()
        }
        known = (s for one in recalled.values() for samples in one.episodes.values() for s in samples)
        self._forms = next(map(forms, known), None)
        return recalled

    def _observe(self, groups: Mapping[int, list[Sample]]) -> None:
        """Updates the curriculum with a batch and the groups left out so far, by prompt: the order of ending varies."""
        left_out, self._left_out = self._left_out, {}
        if self._adaptive:
            rates = left_out | {prompt: success(samples) for prompt, samples in groups.items()}
            for prompt in sorted(rates):
                self._adaptive.observe(prompt, rates[prompt])

    def _in_time(self, v: int) -> bool:
        """Whether the batches after v can consume in time all groups that batch v does not, except for up to
        `oversample` groups, which are then stopped."""
        remaining = Counter(version for version, _ in self._running.values())
        ready, free = Counter(version for version, *_ in self._ready.values()), self.groups_per_batch
        for version in sorted(ready):  # the batch takes the oldest
            remaining[version] += max(0, ready[version] - free)
            free -= min(free, ready[version])
        late = sum(n for version, n in remaining.items() if self._is_late(v, version))
        due = lambda end: sum(n for one, n in remaining.items() if one <= end and not self._is_late(v, one))
        return late <= self.oversample and all(
            due(v - self.eta + k) <= k * self.groups_per_batch + self.oversample for k in range(1, self.eta)
        )

    def _is_late(self, v: int, version: int) -> bool:
        """Whether no batch after v can take a group of this version."""
        return version <= v - self.eta or v + 1 == self.batches

    def _late(self, v: int, left: Sequence[int]) -> list[int]:
        """The prompts of the running groups and the finished ones `left` that no batch after v can take."""
        running = (prompt for prompt, (version, _) in self._running.items() if self._is_late(v, version))
        return sorted([*running, *(prompt for prompt in left if self._is_late(v, self._ready[prompt][0]))])

    def _stop(self, prompts: Sequence[int]) -> None:
        """Stops these groups and defers their prompts until there is a batch of them."""
        now = asyncio.get_running_loop().time()
        for prompt in prompts:
            version, task = self._running.pop(prompt, (None, None))
            if task is None:
                version, *_ = self._ready.pop(prompt)
            else:
                task.cancel()
                self._ending.add(task)
            self._lengths.stop(prompt, now)
            events.emit("group", prompt=prompt, admitted=version, outcome="stopped")
        self._total["stopped"] += len(prompts)
        self._forgotten += prompts
        self._retrying -= set(prompts)
        self._deferred += prompts
        self._reopen()

    def _reopen(self) -> None:
        """Reopens a batch of deferred prompts, if there are enough and none is being retried already."""
        ready = self.groups_per_batch if self.oversample else len(self._deferred)
        if ready <= len(self._deferred) and not self._retrying:
            prompts, self._deferred = self._deferred[:ready], self._deferred[ready:]
            self._retrying.update(prompts)
            self._open.extendleft(reversed(prompts))

    def _room(self, v: int) -> int:
        """The number of prompts that may be admitted while all servers have version v."""
        if self._batch > v + self.eta:  # even the next batch would come too late for a surplus
            return 0
        running = len(self._running)
        accepted = self._batch * self.groups_per_batch + len(self._ready)
        allowed = self.eta + v + 1
        if self.batches is not None:
            allowed = min(allowed, self.batches)
        most = allowed * self.groups_per_batch + max(0, self.oversample - len(self._retrying))
        return min(self.max_concurrent - running, most - (accepted + running))

    def _fill(self) -> None:
        """Admits prompts while there is room, a few in a turn of the loop: answers that arrive need turns, too."""
        if self._filling or self._version is None:
            return
        for _ in range(max(1, AT_ONCE // self.group_size)):
            if self._closed or self._error or not self._begin(self._version):
                return
        self._filling = True
        asyncio.get_running_loop().call_soon(self._fill_on)

    def _fill_on(self) -> None:
        self._filling = False
        self._fill()

    def _begin(self, v: int) -> bool:
        """Starts a group that a former process had begun, admitted at its version then, for which it may have to wait;
        once there is none, that of the next prompt, if there is room. Returns whether it has."""
        if self._recorded:
            prompt, begun = next(iter(self._recorded.items()))
            if begun.version > v:
                return False
            del self._recorded[prompt]
            self._changed.set()  # a batch may have waited for it alone
        elif self._room(v) <= 0:
            return False
        else:
            prompt, begun = self._open.popleft() if self._open else self._next, Begun(v, "", {}, {})
            self._next += prompt == self._next
        if self._adaptive:  # now, since batches that close before the task runs are observed
            self._adaptive.draw(prompt)
        if begun.declined and (not self._adaptive or codec.mark(self._adaptive[prompt]) == begun.row):
            self._decline(prompt, *begun.declined)
            return True
        task = asyncio.create_task(self._group(prompt, begun))
        self._running[prompt] = (begun.version, task)
        self._lengths.begin(prompt, asyncio.get_running_loop().time())
        task.add_done_callback(functools.partial(self._finish, prompt))
        return True

    async def _group(self, prompt: int, begun: Begun) -> tuple[list[Sample], bool]:
        """The samples of a prompt's group, and whether they may be trained on."""
        row = self.prompts[prompt]
        if not self.journal:
            return await self._sampled(prompt, row, begun)
        mark = codec.mark(row)
        if begun.episodes and mark != begun.row:
            log.warning("prompt %d: has another row now, its episodes in the journal are generated again", prompt)
            begun = begun._replace(episodes={})
        of = prompt, begun.version, mark
        self.journal.begin(*of)
        keep = functools.partial(self.journal.keep, *of, exact=self.regroup is not None)
        calls = functools.partial(Calls, self.journal, prompt, begun.version, begun.calls, self._continues)
        try:
            samples, accepted = await self._sampled(prompt, row, begun, keep, calls)
        except ServerError:
            self.journal.decline(*of, "failed", float("nan"))
            raise
        if not accepted:
            self.journal.decline(*of, _declined(samples), success(samples))
        return samples, accepted

    async def _sampled(
        self,
        prompt: int,
        row: Mapping[str, Any],
        begun: Begun,
        keep: Callable[[int, list[Sample], float], None] | None = None,
        calls: Callable[[int], Calls] | None = None,
    ) -> tuple[list[Sample], bool]:
        """As `_group`; `keep` and `calls` record episodes as in `episodes.group`."""
        samples = await group(
            self.workflow,
            functools.partial(_undistorted, self.generate),
            row,
            prompt=prompt,
            size=self.group_size,
            seed=self.seed,
            check=functools.partial(self._alike, oldest=begun.version),
            regroup=self.regroup,
            episode_seats=self.episode_seats,
            on_retry=functools.partial(self._count, "retries", 1),
            on_lost=functools.partial(self._count, "lost"),
            known=begun.episodes,
            keep=keep,
            calls=calls,
        )
        if not samples or (self.accept is not None and not self.accept(samples)):
            return samples, False
        if self.baseline:
            greedy = begun.episodes.get(self.group_size)  # it is recorded behind the group's own
            if greedy is None:
                now = asyncio.get_running_loop().time
                began = now()
                [greedy] = await rollouts(
                    self.baseline, self.generate, [row], check=self._checked, regroup=self.regroup
                )
                if keep:
                    keep(self.group_size, greedy, now() - began)
            value = greedy[0].reward if greedy else float("nan")
            samples = [s.replace(components={**s.components, "greedy": value}) for s in samples]
        return [s.replace(info={**s.info, "admitted": begun.version}) for s in samples], True

    def _checked(self, sample: Sample, oldest: int = 0) -> Sample:
        """A sample that may be trained on; servers may have the version that is being pushed already."""
        newest = None if self._version is None else self._version + 1
        return checked(
            sample, vocabulary=self.vocabulary, newest=newest, oldest=oldest, experts=self.experts,
            check_images=self.check_images,
        )  # fmt: skip

    def _alike(self, sample: Sample, oldest: int) -> Sample:
        """As `_checked`, with the arrays of the run's first sample: batches have the same for all."""
        made = self._checked(sample, oldest)
        self._forms = forms(made) if self._forms is None else self._forms
        return like_first(made, self._forms)

    def _count(self, what: str, number: int) -> None:
        self._total[what] += number

    def _decline(self, prompt: int, outcome: str, rate: float) -> None:
        """Counts a group that ended with this success, and that no batch will take."""
        self._total[outcome] += 1
        self._retrying.discard(prompt)
        self._forgotten.append(prompt)
        self._left_out[prompt] = rate

    def _finish(self, prompt: int, task: asyncio.Task) -> None:
        self._ending.discard(task)
        running = self._running.get(prompt)
        if running is None or running[1] is not task:  # closed, or stopped and perhaps restarted
            task.cancelled() or task.exception()
            return
        del self._running[prompt]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        samples, accepted = ([], False) if error is not None else task.result()
        end = "accepted" if accepted else _declined(samples) if error is None else "failed"
        events.emit("group", prompt=prompt, admitted=running[0], outcome=end)
        length = _length(samples) if samples else 0.0
        self._lengths.end(prompt, asyncio.get_running_loop().time(), length if samples else None)
        if accepted:
            self._ready[prompt] = samples[0].info["admitted"], samples, length
            self._failed = self._refused = self._unscored = 0
        elif error is None:
            self._decline(prompt, end, success(samples))
            self._refused += 1
            self._unscored += bool(samples) and all(x != x for x in map(outcome, samples))
            if self._refused >= REFUSED_BATCHES * self.groups_per_batch:
                self._error = ValueError(
                    f"Executor: {self._refused} groups in a row were refused by the workflow or by accept, "
                    f"{self._unscored} of them without any reward; check whether the reward fails or answers null, or "
                    "the task is solved already, or out of reach"
                )
        elif isinstance(error, ServerError):
            said = one_line(error)
            log.warning("prompt %d: the group failed: %s", prompt, said)
            self._decline(prompt, end, float("nan"))
            self._failed += 1
            if self._failed >= max(GIVEN_UP, self.groups_per_batch):
                self._error = ServerError(f"Executor: {self._failed} groups in a row failed; the last with: {said}")
        else:
            self._error = self._error or error
            self._open.appendleft(prompt)  # in the cursor: it runs again after a resume
        self._fill()
        self._changed.set()


def _declined(samples: Sequence[Sample]) -> str:
    return "refused" if samples else "rejected"


def _length(samples: Sequence[Sample]) -> float:
    """The mean number of sampled tokens per episode of a group."""
    return sum(np.count_nonzero(s.mask) for s in samples) / len({s.rollout for s in samples})


def _undistorted(generate, tokens, *images, **sampling):
    """Calls `generate`; refuses options under which log-probabilities would not be those of the policy, and filters
    whose mask is not recorded."""
    filters = {} if sampling.get("sampling_mask") else {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    neutral = filters | {
        "min_new_tokens": 0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": None, "json_schema": "", "regex": "", "ebnf": "",
    }  # fmt: skip
    for name, value in neutral.items():
        if sampling.get(name, value) not in (value, {}):
            raise ValueError(
                f"training needs samples from the full distribution, got {name}={sampling[name]}; set it to {value!r}"
                f"{', or sampling_mask to True' if name in filters else ''}"
            )
    if not sampling.get("temperature", 1.0) > 0:
        raise ValueError(
            f"training needs a temperature above 0, got {sampling['temperature']}; greedy decoding does not explore"
        )
    return generate(tokens, *images, **sampling)
