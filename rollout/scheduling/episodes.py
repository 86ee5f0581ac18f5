"""Runs a workflow on rows: episodes and groups, with their ids, seeds and retries."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import re
import struct
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import xxhash

from .. import events, object_path
from ..errors import ServerError, WrongSample
from ..journal.calls import Calls
from ..processes.printable import one_line, shown
from ..rewards.signatures import Regroup, Score
from ..types import SEATS, Generate, Sample, Workflow
from .validation import checked

Check = Callable[[Sample], Sample]
log = logging.getLogger(__name__)

ATTEMPTS = 3  # per episode, if servers fail
PAUSE_S = 1.0  # before the second attempt; doubles
ROWS = 1 << 16  # most rows of one episode: sample = rollout * ROWS + row
AGAIN_S = 10.0  # between warnings of one kind: a dead server fails all episodes in flight
ATOMS = {str, int, float, bool, type(None), bytes}  # of which a copy is the same
NONE: Mapping[int, list[Sample]] = MappingProxyType({})
KINDS = 256  # of warnings that are remembered

_warned: dict[tuple[str, ...], tuple[float, int]] = {}  # kind -> (when one was logged, how many were not since then)


async def rollouts(
    workflow: Workflow,
    generate: Generate,
    rows: Iterable[Mapping[str, Any]],
    *,
    group_size: int = 1,
    max_concurrent: int = 256,
    seed: int | None = None,
    check: Check = checked,
    regroup: Regroup | None = None,
    on_group: Callable[[], None] = lambda: None,
) -> list[list[Sample]]:
    """Samples a group for every row, once and in order, without scheduling; for evaluation.

    Rejected episodes are missing from their row's list. At most `max_concurrent` rows run at a time. With a `seed`
    (needs servers that honour it) the same policy gives the same samples. `check` and `regroup` as in `group`;
    `on_group` is called when a group is done.
    Raises the first error; a ServerError, which names the row, once an episode has failed ATTEMPTS times.
    """
    limit, failed = asyncio.Semaphore(max_concurrent), False

    async def one(prompt: int, row: Mapping[str, Any]) -> list[Sample]:
        nonlocal failed
        try:
            made = await group(
                workflow, generate, row, prompt=prompt, size=group_size, seed=seed, check=check, regroup=regroup
            )
            on_group()
            return made
        except BaseException as error:
            failed = True
            if isinstance(error, ServerError) and (which := object_path.row(row)) not in (said := one_line(error)):
                raise ServerError(f"{said}; {which}") from error
            raise
        finally:
            limit.release()

    tasks: list[asyncio.Task] = []
    try:
        for prompt, row in enumerate(rows):  # one is read when there is room for it
            await limit.acquire()
            if failed:
                break
            tasks.append(asyncio.create_task(one(prompt, row)))
        return await asyncio.gather(*tasks)
    finally:
        await stop(tasks)


async def group(
    workflow: Workflow,
    generate: Generate,
    row: Mapping[str, Any],
    *,
    prompt: int,
    size: int,
    seed: int | None,
    check: Check = checked,
    regroup: Regroup | None = None,
    episode_seats: Collection[int] = (),
    on_retry: Callable[[], None] = lambda: None,
    on_lost: Callable[[int], None] | None = None,
    known: Mapping[int, list[Sample]] = NONE,
    keep: Callable[[int, list[Sample], float], None] | None = None,
    calls: Callable[[int], Calls] | None = None,
) -> list[Sample]:
    """Samples `size` episodes of one row, in order, with their ids: a function of (seed, prompt) and the policy.

    group = prompt = the prompt's ordinal, rollout = prompt * size + episode, sample = rollout * ROWS + row; groups and
    rollouts of further seats are others (`_of_seat`). The rows of a rollout get weights that sum to 1, in proportion to
    those the workflow gave them. Each attempt at an episode
    gets a copy of the row of its own: what it writes there, nobody else sees.

    Args:
      check: a copy of a sample that workflows cannot change; raises ValueError for one that must not be trained on: its
        episode is retried as if its servers had failed.
      regroup: called with the samples of each episode that has some, returns the rewards of these episodes, or None:
        they keep theirs.
      episode_seats: seats that are compared with each other within each episode (hierarchical GRPO): these are a group.
      on_retry: called before an episode is retried.
      on_lost: called with the number of episodes dropped because their servers failed ATTEMPTS times. The group fails
        if fewer than two episodes with samples remain to compare; if this is None, it fails with the first.
      known: episodes that ended before, by index; they are not played again.
      keep: called with an episode's index, its samples and the seconds it took when it has ended.
      calls: where the `generate` calls of an attempt at an episode, by its index, are recorded while it goes on.
    """
    least = min(2, size)
    lost: list[ServerError] = []

    async def episode(index: int) -> list[Sample]:
        if index in known:
            return known[index]
        now = asyncio.get_running_loop().time
        began = now()
        try:
            samples = await _episode(
                workflow, generate, row, prompt=prompt, index=index, seed=seed, check=check, on_retry=on_retry,
                calls=calls,
            )  # fmt: skip
        except ServerError as error:
            lost.append(error)
            if on_lost is None or len(lost) > size - least:
                raise
            _warn(error, "prompt %d continues without episode %d", prompt, index)
            return []
        if keep:
            keep(index, samples, now() - began)
        return samples

    played = await _together([episode(index) for index in range(size)], row)
    if lost and on_lost:
        if sum(map(bool, played)) < least:
            raise lost[0]
        on_lost(len(lost))
    ended = [index for index, samples in enumerate(played) if samples]
    if regroup and ended:
        copies = [[checked(sample) for sample in played[index]] for index in ended]  # what it writes there nobody sees
        if (scores := await regroup(copies)) is not None:
            new = dict(zip(ended, scores, strict=True))
            played = [[_rewarded(sample, new[index]) for sample in samples] for index, samples in enumerate(played)]
    return [
        sample.replace(
            group=_of_seat(
                *((SEATS, prompt * size + index) if sample.seat in episode_seats else (sample.seat, prompt))
            ),
            prompt=prompt,
            rollout=_of_seat(sample.seat, prompt * size + index),
            sample=(prompt * size + index) * ROWS + j,
            weight=sample.weight / sum(other.weight for other in samples if other.seat == sample.seat),
        )
        for index, samples in enumerate(played)
        for j, sample in enumerate(samples)
    ]


def _of_seat(seat: int, number: int) -> int:
    """The id of a seat's group or rollout: seats are compared among themselves, and each has a reward of its own. Seat
    SEATS stands for those that are compared within an episode."""
    return seat << 48 | number


def _rewarded(sample: Sample, score: Score) -> Sample:
    """The sample with its episode's reward at its last token, in place of those that it has."""
    return sample.replace(
        rewards=((len(sample.tokens) - 1, score.value),),
        components={**sample.components, **score.components},
        info={**sample.info, "episode_reward": score.value},
    )


async def _episode(workflow, generate, row, *, prompt, index, seed, check, on_retry, calls) -> list[Sample]:
    """The samples of one episode; its events carry the prompt and the episode's index."""
    begun = asyncio.get_running_loop().time()
    with events.context(prompt=prompt, episode=index):
        for attempt in itertools.count(1):
            turns = itertools.count()  # from 0 in each attempt: a retry draws the same tokens
            own = _recorded(generate, calls(index)) if calls else generate
            try:
                samples = await _played(workflow, _seeded(own, seed, prompt, index, turns), row, check)
                break
            except (ServerError, BaseExceptionGroup) as raised:
                error = _server_error(raised)  # a workflow's TaskGroup raises groups
                if error is None or error is raised and attempt == ATTEMPTS:
                    raise
                if attempt == ATTEMPTS:
                    raise error from raised
                _warn(error, "prompt %d, episode %d, attempt %d", prompt, index, attempt)
                on_retry()
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        events.emit("episode", begun=begun, rows=samples)
    return samples


def _copied(value: Any) -> Any:
    """A copy of a value, as `copy.deepcopy` makes it; of what JSON has in a fraction of the time."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {_copied(name): _copied(one) for name, one in value.items()}
    if kind is list:
        return [*value] if {*map(type, value)} <= ATOMS else [_copied(one) for one in value]
    return copy.deepcopy(value)


def _server_error(error: BaseException) -> ServerError | None:
    """The error, or the first of a group of nothing else; None if there is another kind."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, ServerError) else None
    found = [_server_error(one) for one in error.exceptions]
    return found[0] if all(found) else None


def _warn(error: ServerError, what: str, *args: int) -> None:
    """Logs an error, at most once in AGAIN_S seconds for each kind, with how many more there were.

    Errors of one type from one server are a kind, because their words differ by the request; others by their words.
    """
    said = one_line(error)
    server = re.search(r"https?://[^/\s]+", said)
    now, kind = time.monotonic(), (what, type(error).__name__, server[0] if server else said)
    last, more = _warned.pop(kind, (-math.inf, 0))
    due = now - last >= AGAIN_S
    _warned[kind] = (now, 0) if due else (last, more + 1)
    if len(_warned) > KINDS:
        del _warned[next(iter(_warned))]
    if due:
        log.warning(f"{what}: %s%s", *args, said, f" (and {more} more alike since the last such line)" if more else "")


async def _played(workflow, generate, row, check: Check) -> list[Sample]:
    """The samples of one attempt at an episode, checked.

    Raises:
      ServerError: as the workflow; WrongSample: a sample that `check` refuses.
      ValueError: the workflow returned something else, or ended itself in a way that would end this process in silence.
    """
    try:
        own = _copied(row)
    except (TypeError, RecursionError) as error:
        raise ValueError(
            f"a row must be data, which each episode gets a copy of ({error}); {object_path.row(row)}"
        ) from error
    try:
        result = await workflow(generate, own)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        code = error.code if isinstance(error, SystemExit) else type(error).__name__
        raise ValueError(f"the workflow exited ({code!r:.80}); {object_path.row(row)}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ValueError(
            f"the workflow raised CancelledError, but nobody cancelled it; {object_path.row(row)}"
        ) from error
    return returned(result, row, check)


def returned(result: Any, row: Mapping[str, Any], check: Check = checked) -> list[Sample]:
    """The samples that a workflow returned, checked.

    Raises:
      ValueError: it returned something else.
      WrongSample: a sample that `check` refuses.
    """
    samples = [] if result is None else list.copy(result) if isinstance(result, list) else [result]
    for other in (sample for sample in samples if not isinstance(sample, Sample)):
        raise ValueError(
            f"a workflow must return a Sample, a list of them or None, got {shown(other)}; {object_path.row(row)}"
        )
    if len(samples) > ROWS:  # their ids would be those of the next episode
        raise ValueError(f"a workflow must return at most {ROWS} samples, got {len(samples)}; {object_path.row(row)}")
    try:
        return [check(sample) for sample in samples]
    except ValueError as error:
        raise WrongSample(
            f"the workflow returned a sample that cannot be used: {error}; {object_path.row(row)}"
        ) from error


def one_a_rollout(samples: Sequence[Sample]) -> list[Sample]:
    """The first row of each rollout."""
    return list({sample.rollout: sample for sample in reversed(samples)}.values())[::-1]


def outcome(sample: Sample) -> float:
    """The reward of a row's whole episode, which a per-turn row (`trajectory.samples`) keeps in its info."""
    return sample.info.get("episode_reward", sample.reward)


def _seeded(generate, seed, prompt, index, turns) -> Generate:
    def bound(tokens, *images, **sampling):
        if seed is not None:
            sampling["seed"] = sampling_seed(seed, prompt, index, next(turns))
        return generate(tokens, *images, **sampling)

    return bound


def _recorded(generate, calls: Calls) -> Generate:
    return lambda tokens, *images, **sampling: generate(tokens, *images, **sampling, record=calls.next())


async def _together(coroutines: Sequence[Coroutine], row: Mapping[str, Any]) -> list:
    """The results in order; the first error cancels the others and is raised unchanged.

    Raises ValueError, which names the row, if one cancelled its own task.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ValueError(f"the workflow cancelled its own task; {object_path.row(row)}") from error
    finally:
        await stop(tasks)


async def stop(tasks: Sequence[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sampling_seed(run: int, prompt: int, sample: int, turn: int) -> int:
    """Derives the seed, in 1 .. 2^31 - 1, of one `generate` call; the same in every process."""
    packed = struct.pack("<4q", run, prompt, sample, turn)
    return xxhash.xxh3_64_intdigest(packed) % (2**31 - 1) + 1
