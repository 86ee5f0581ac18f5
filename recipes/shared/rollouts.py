"""Episodes of reinforcement learning: a workflow with its reward, its teachers, and checks of what it samples."""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areax.adapters.command_line.options import json_object
from areax.core.advantages import optimal_value
from areax.recipes.shared import evaluation, rows, teachers
from areax.recipes.shared.rl_options import Rewards, Rollout, Serving, Training
from areax.rollout import client, events, object_path, rewards
from areax.rollout.chat import images, observations, states
from areax.rollout.chat.cross_tokenizer import Pair
from areax.rollout.engine.request import KEPT, TOP
from areax.rollout.errors import ServerError
from areax.rollout.journal.store import Journal
from areax.rollout.rewards.signatures import Regroup
from areax.rollout.scheduling import episodes, executor
from areax.rollout.scheduling.executor import Executor
from areax.rollout.scheduling.validation import CheckImages
from areax.rollout.types import Generate, Sample, Sampling, Workflow
from areax.rollout.workflows import resolve, teacher
from areax.rollout.workflows.regroup import of

log = logging.getLogger(__name__)

TOO_LONG = 16  # consecutive rows that do not fit end the run


@dataclass(frozen=True)
class Episodes:
    """The workflows of a run.

    Attributes:
      train: samples that are trained on.
      greedy: the same at temperature 0, for evaluation and as a baseline; `train` where neither is wanted.
      sampled: sampled as in training but not trained on, for evaluation; `greedy` where one completion is enough.
      rewards: the pool of reward workers, for its counts.
      regroup: what gives the rewards of a group that is complete, if the workflow has that.
    """

    train: Workflow
    greedy: Workflow
    sampled: Workflow
    rewards: rewards.Pool
    regroup: Regroup | None = None


def check_keys(serving: Serving, training: Training) -> None:
    """Raises ValueError if a server, a stager or a teacher refuses its key, before anything is loaded."""
    asyncio.run(client.check_keys(serving.servers, serving.stagers))
    asked = itertools.chain(*teacher.named(training.teachers).values())
    asyncio.run(client.check_keys(asked, key_variable=teacher.KEY))


def check_reported(sampling: Sampling, vocabulary: int, own: bool) -> None:
    """Raises ValueError if servers cannot report so many tokens at a place.

    Args:
      own: servers are started here; how many others report is not known.
    """
    masked = sampling.top_k if sampling.sampling_mask else 0
    rules = [("top-logprobs", sampling.top_logprobs, vocabulary, "the tokens of the model's vocabulary")]
    if own:
        ours = "the most that servers started here report"
        rules += [("top-logprobs", sampling.top_logprobs, TOP, ours), ("top-k", masked, KEPT, f"{ours} in a mask")]
    for option, asked, most, what in rules:
        if asked > most:
            raise ValueError(f"--sampling.{option} must be at most {most}, {what}, got {asked}")


@contextlib.asynccontextmanager
async def opened(
    reward: str, options: Rewards, rollout: Rollout, training: Training, tokens,
    processor: images.Processor | None = None, *, vocabulary: int, greedy: bool, sampled: bool = False,
) -> AsyncIterator[Episodes]:  # fmt: skip
    """Sets up the run's episodes, with reward workers and teacher connections, which are closed at the end.

    Args:
      reward: `module:function` or `file.py:function`.
      processor: of a model that reads images; None = text alone.
      vocabulary: size of the policy's vocabulary.
      greedy, sampled: whether these workflows are needed.
    """
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        pool = await enter(
            rewards.pool(
                reward, workers=options.reward_workers, timeout_s=options.reward_timeout_s,
                failed=options.reward_failed, environment=options.reward_environment,
            )
        )  # fmt: skip
        bind = functools.partial(
            resolve.bind, rollout.workflow, tokenizer=tokens, processor=processor, reward=pool, agent=rollout.agent,
            options=json_object("--workflow-options", rollout.workflow_options),
        )  # fmt: skip
        bound = await enter(bind(sampling=rollout.sampling))
        pair = teachers.pair(training, tokens) if training.taught else None
        train = fitting(bound, training.length, rollout, tokens if training.taught else None, pair)
        if training.objective.observation.coef:
            train = functools.partial(observations.marked, train)
        if rollout.episode_timeout_s:
            train = functools.partial(timed, train, rollout.episode_timeout_s)
        if training.teachers:
            fleets = await enter(teachers.connected(training.teachers, pair.tokenizer if pair else tokens, bool(pair)))
            top_k = training.distill.top_k if training.distill_coef else 0
            annotate = functools.partial(
                teacher.annotate, teachers=fleets, top_k=top_k, vocabulary=vocabulary, pair=pair
            )
            train = functools.partial(teacher.taught, train, annotate)
        if training.objective.advantage.mean == "optimal_value":
            train = functools.partial(valued, train, training.objective.advantage.value_temperature)
        if training.objective.advantage.state_coef:
            train = functools.partial(states.marked, train)
        plain = replace(rollout.sampling, routed_experts=False, sampling_mask=False, top_logprobs=0)
        cold = await enter(bind(sampling=replace(plain, temperature=0.0))) if greedy else train
        warm = await enter(bind(sampling=plain)) if sampled else cold
        yield Episodes(train, cold, warm, pool, of(bound))


def fitting(
    episode: Workflow, length: int, rollout: Rollout, tokenizer: Any = None, pair: Pair | None = None
) -> Workflow:
    """Wraps an episode to leave out samples longer than a packed row, which are counted and logged.

    The workflow raises as `episodes.returned`, and ValueError after TOO_LONG consecutive samples that do not fit, and
    for samples at a temperature other than `rollout.sampling.temperature`.

    Args:
      tokenizer: of a run with a teacher, which reads the "teacher_prompt" of rows (`teacher.with_prompt`); None = none
        reads that of samples, which lose it.
      pair: of tokenizers, if the teacher's is another.
    """
    too_long: list[int] = []

    async def fits(generate, row):
        samples = episodes.returned(await episode(generate, row), row)
        if tokenizer is None:
            samples = [s.replace(teacher_prompt=()) if s.teacher_prompt else s for s in samples]
        elif pair is None:
            samples = teacher.with_prompt(samples, row, tokenizer)
        else:
            samples = pair.read(samples, row)
        sizes = [max(len(s.tokens), len(s.teacher_tokens)) for s in samples]
        kept = [s for s, n in zip(samples, sizes, strict=True) if n <= length]
        for n in (n for n in sizes if n > length):
            too_long.append(n)
            events.emit("left_out", tokens=n)
            log.warning("a row of %d tokens is left out: longer than --length; %s", n, object_path.row(row))
        if kept:
            too_long.clear()
        if len(too_long) >= TOO_LONG:
            raise ValueError(
                f"samples must fit in a row of {length} tokens, got {TOO_LONG} in a row that do not, of up to "
                f"{max(too_long)}; raise --length, or lower --sampling.max-new-tokens or --max-prompt"
            )
        for s in kept:
            if np.float32(s.temperature) != np.float32(rollout.sampling.temperature):
                raise ValueError(
                    f"--workflow {rollout.workflow}: must sample at --sampling.temperature "
                    f"{rollout.sampling.temperature:g}, at which the trainer computes, got {s.temperature!s:.80}"
                )
        return kept or None

    return fits


async def valued(episode: Workflow, temperature: float, generate: Generate, row: Mapping[str, Any]) -> list[Sample]:
    """An episode's samples with the component "optimal_value", of the row's "reference_rewards"."""
    try:
        value = optimal_value(rows.reference_rewards(row), temperature)
    except ValueError as error:
        raise ValueError(f"{error}; {object_path.row(row)}") from error
    samples = episodes.returned(await episode(generate, row), row)
    return [s.replace(components={**s.components, "optimal_value": value}) for s in samples]


async def timed(episode: Workflow, seconds: float, generate: Generate, row: Mapping[str, Any]):
    """Plays an episode for at most so many seconds: what it generates then ends, and further requests are refused."""
    clock = asyncio.get_running_loop().time
    until, begun = clock() + seconds, False

    async def within(tokens, *images, **sampling):
        nonlocal begun
        if begun and clock() >= until:
            raise ValueError(f"the episode's --episode-timeout-s {seconds:g} are over")
        begun = True
        return await generate(tokens, *images, **sampling, until=until)

    return await episode(within, row)


def scheduler(
    own: Episodes, generate, prompts, rollout: Rollout, objective, *, steps: int, seed: int | None, cursor,
    vocabulary: int, experts: int | None, check_images: CheckImages | None = None, journal: Journal | None = None,
) -> Executor:  # fmt: skip
    """Makes the executor that runs these episodes and returns the batches of `steps` updates, from `cursor` on, or the
    later position that the journal has."""
    cursor = journal and journal.past.cursor or cursor
    return executor.Executor(
        own.train, generate, prompts,
        group_size=rollout.group_size, groups_per_batch=rollout.groups, eta=rollout.eta,
        max_concurrent=rollout.max_concurrent, oversample=rollout.oversample, seed=seed, batches=steps, cursor=cursor,
        vocabulary=vocabulary, experts=experts, check_images=check_images, episode_seats=rollout.episode_seats,
        accept=varied if objective.shaping.dynamic_sampling else None, regroup=own.regroup,
        baseline=own.greedy if objective.advantage.mean == "greedy" else None, journal=journal,
    )  # fmt: skip


async def evaluate(
    episode: Workflow, generate: Generate, sets: dict[str, Sequence[dict]], *, samples: int, max_concurrent: int,
    seed: int | None, on_group: Callable[[], None], regroup: Regroup | None = None,
) -> tuple[dict[str, dict], list[list[Sample]]]:  # fmt: skip
    """({name: `evaluation.summary`} of held-out sets, groups), `samples` episodes of each row, which are a group.

    Args:
      on_group: called when a group is done.
      regroup: of `Episodes`.
    """
    with events.context(of="evaluation"):
        try:
            groups = await executor.rollouts(
                episode,
                generate,
                itertools.chain(*sets.values()),
                group_size=samples,
                max_concurrent=max_concurrent,
                seed=seed,
                regroup=regroup,
                on_group=on_group,
            )
        except ServerError as error:
            raise ServerError(f"the evaluation of {', '.join(sets)} failed: {error}") from error
    left = iter(groups)
    made = {name: evaluation.summary(list(itertools.islice(left, len(own))), samples) for name, own in sets.items()}
    return made, groups


def varied(samples: list[Sample]) -> bool:
    """Whether the rewards of a group differ, unscorable ones left out: a group without variance has no gradient. Of
    several seats one is enough."""
    values = {(s.group, np.float32(episodes.outcome(s))) for s in samples}
    scored = [group for group, value in values if not np.isnan(value)]
    return len(scored) > len({*scored})
