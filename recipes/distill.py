"""Distillation: trains a student on a teacher's next-token distributions, on rows with prompt and completion.

The teacher is a local model, models behind generation servers of which each row names one, or the student itself. It
may read another prompt, one with the answer for example, before the same completion. Run it again with the same `out`
and it goes on where it stopped.
"""

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from areax.adapters.data import images
from areax.core import losses
from areax.models import frozen as teacher
from areax.recipes.shared import common, learner, notebook, offline, offline_options, ranges, resume
from areax.recipes.shared import teachers as shared_teachers
from areax.rollout import client
from areax.rollout.chat import conversation
from areax.rollout.chat.cross_tokenizer import Pair
from areax.rollout.fleet import members
from areax.rollout.types import Sample
from areax.rollout.workflows import teacher as served

ATTEMPTS = 3  # to ask a served teacher about a sample
FIRST_OPTIONS = (
    "model", "data", "teacher", "teachers", "objective.divergence", "out", "heldout", "steps", "batch", "length",
    "rows", "optim.lr", "lora.rank", "run.dtype", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config(offline_options.Options):
    """Distillation.

    Attributes:
      model: the student's directory, GGUF file or hub name: weights, config.json and tokenizer.
      data: rows with prompt and completion: "prompt" (or "messages") and "completion", and "teacher_prompt" if the
        teacher reads another, a text or messages; a JSONL or Parquet file, a folder, or a data set on the hub.
      teacher: a local one's directory, GGUF file or hub name. If its tokenizer is not the student's, both are compared
        where they split a completion alike (docs/distillation.md).
      teachers: instead, addresses of servers with teachers: `http://...`, or `name=http://...` if rows name theirs in
        "teacher"; servers of one name share the load. They need `objective.top_k`. Their key is in AREAX_TEACHER_KEY.
      teacher_tokenizer: directory or hub name of the tokenizer of `teachers`, if it is not the student's.
      self_distillation: instead, the student at its current weights is the teacher, which reads "teacher_prompt".
      average_teacher: with `self_distillation` the teacher has the average of the student's weights that `optim.ema`
        keeps, one more copy of them, instead of the current ones.
      objective: the divergence, its temperature and top-k, and the weight of an SFT term.
      heldout: rows to evaluate on; they are never trained on. "" = none.
      run: how student and local teacher are computed; the teacher's weights are kept in `run.dtype`.
    """

    out: str = "runs/distill"
    teacher: str = ""
    teachers: tuple[str, ...] = ()
    teacher_tokenizer: str = ""
    self_distillation: bool = False
    average_teacher: bool = False
    objective: losses.Distill = losses.Distill(divergence="forward")


def main(config: Config, rows: Any = None) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "divergence", "seconds", ...}.

    In a job of several processes each trains on its part of every batch; only process 0 writes, the others return {}.

    Args:
      rows: what to train on instead of `config.data`, as `sources.opened`.
    """
    return offline.run(functools.partial(train, given=rows), config)


async def run(config: Config, rows: Any = None) -> dict:
    """`main` where an event loop is running, as in a notebook; cancelled, it stops as after Ctrl-C."""
    return await notebook.run_in_thread(functools.partial(main, rows=rows), config)


def train(config: Config, quiet: bool = False, given: Any = None) -> dict:
    """Runs the training, the same in every process; `quiet` ones neither print nor write."""
    check(config)
    asyncio.run(client.check_keys(itertools.chain(*served.named(config.teachers).values()), key_variable=served.KEY))
    began = time.monotonic()
    tokens = common.open_tokenizer(config.model, config.chat_template_kwargs)
    sample = offline.Demonstrations(tokens, "last", images.of_model(config.model))
    pair = shared_teachers.pair(config, tokens, say=not quiet)
    if config.objective.uld_coef and pair is None:
        raise ValueError(
            "distill: --objective.uld-coef compares tokens that only one of two tokenizers has, got a teacher with the "
            "student's; leave it out"
        )

    def samples(rows: list[dict]) -> list[Sample]:
        made = [taught(sample, row, config.self_distillation, pair) for row in rows]
        return [s.replace(rollout=i, group=i) for i, s in enumerate(made)]

    def ahead(rows: list[dict]) -> None:
        told = [row for row in rows if row.get("teacher_prompt") and pair is None]
        sample.ahead([*rows, *map(conversation.read_by_teacher, told)])

    if config.teacher:
        common.check_context(config.teacher, config.length)
    config, prompts, heldout = offline.read(config, samples, quiet, ahead=ahead, given=given)
    if (summary := resume.finished("distill", config, None if quiet else prompts)) is not None:
        return summary
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    if config.teachers and config.vision != "auto":
        raise ValueError("distill: --teachers, servers, get no images, and rows have some; take --teacher, a directory")
    settings, params = common.open_model(
        config.model, config.init, config.seed, mesh, learner.dtype(config.lora), config.vision
    )
    common.say_added_ends(config.model, settings, tokens)
    run = learner.computed(config.run)
    ids = len(pair.to_own) if pair else 0
    local = common.open_teacher(config.teacher, run, mesh, settings.vision, ids) if config.teacher else None
    score = functools.partial(
        teacher.score, objective=config.objective, config=settings,
        teacher_config=settings if config.self_distillation else local and local[0], run=run,
        common_2K=pair.common if pair else None,
    )  # fmt: skip
    own = learner.make(
        settings, params, score, config.objective, config.optim, mesh, updates=config.steps, dtype=run.dtype,
        balance=config.balance,
        adapters=config.lora, frozen=local[1:] if local else (), average=config.average_teacher, seed=config.seed,
    )  # fmt: skip
    with served_teachers(config, tokens, settings.vocab, pair) as annotate:
        return offline.fit(
            "distill", config, mesh, own, prompts, heldout, samples=lambda rows: annotate(samples(rows)), tokens=tokens,
            began=began, teachers=local[:1] if local else (), quiet=quiet,
        )  # fmt: skip


def check(config: Config) -> None:
    """Raises ValueError for options that exclude each other."""
    spec = config.objective
    for url in config.teachers:
        members.check(url.rpartition("=")[2], "--teachers", lists=False)
    if sum(given := [bool(config.teacher), bool(config.teachers), config.self_distillation]) != 1:
        both = "none" if not any(given) else "both" if sum(given) == 2 else "all"
        raise ValueError(
            f"distill: name either --teacher, a directory, or --teachers, servers, or --self-distillation, got {both}"
        )
    for why in ranges.average_teacher(config):
        raise ValueError(f"distill: {why}")
    if config.teacher_tokenizer and not config.teachers:
        raise ValueError(
            f"distill: --teacher-tokenizer is for --teachers, servers, got {config.teacher_tokenizer} without; a "
            "--teacher directory has its own"
        )
    if config.teachers and not spec.top_k:
        raise ValueError(
            "distill: --teachers give the likeliest tokens got --objective.top-k 0; say how many, or take --teacher"
        )
    if config.teachers and spec.temperature != 1:
        raise ValueError(
            "distill: --teachers give log-probabilities at temperature 1, got --objective.temperature "
            f"{spec.temperature:g}; leave it out, or take --teacher"
        )
    if config.teachers and jax.process_count() > 1:
        raise ValueError(
            f"distill: --teachers need a job of one process, got {jax.process_count()}; take --teacher for several"
        )


def taught(sample: offline.Demonstrations, row: dict, needed: bool, pair: Pair | None = None) -> Sample:
    """A row's sample, with what the teacher reads before the same completion if the row has a "teacher_prompt".

    Args:
      needed: the teacher knows no more than the student if it reads the same.
      pair: of tokenizers, if the teacher's is another.

    Raises:
      ValueError: there is none and it is `needed`; or it changes the completion's tokens; or as `Pair.read`.
    """
    completion = offline.completion("distill", row)
    made = sample.of(row, completion).replace(info={"row": row})
    if pair:
        return pair.read([made], row)[0]
    if row.get("teacher_prompt") is None:
        if needed:
            raise ValueError(
                "distill: --self-distillation needs rows with a 'teacher_prompt' that says more than the prompt, got "
                f"the fields {sorted(row)}; --row can make it"
            )
        return made
    if made.images:
        raise ValueError(f"distill: a teacher reads a 'teacher_prompt' as text alone, got {len(made.images)} images")
    theirs = sample.of(conversation.read_by_teacher(row), completion)
    first, before = int(made.mask.argmax()), int(theirs.mask.argmax())
    if theirs.tokens[before:].tolist() != made.tokens[first:].tolist():
        raise ValueError(
            "distill: a completion must be the same tokens behind the prompt and the 'teacher_prompt', got "
            f"{len(made.tokens) - first} and {len(theirs.tokens) - before} tokens; end both prompts alike"
        )
    return made.replace(teacher_prompt=tuple(theirs.tokens[:before].tolist()))


@contextlib.contextmanager
def served_teachers(
    config: Config, tokens, vocabulary: int, pair: Pair | None = None
) -> Iterator[Callable[[list[Sample]], list[Sample]]]:
    """Yields a function that adds the log-probabilities of `config.teachers` to samples; without any, the identity.

    Args:
      tokens, vocabulary: the student's tokenizer and the size of its vocabulary.
      pair: of tokenizers, if the teachers' is another.
    """
    if not config.teachers:
        yield lambda samples: samples
        return
    stack = contextlib.AsyncExitStack()
    connected = shared_teachers.connected(config.teachers, pair.tokenizer if pair else tokens, bool(pair))
    with asyncio.Runner() as runner:
        fleets = runner.run(stack.enter_async_context(connected))

        def annotate(samples: list[Sample]) -> list[Sample]:
            asked = served.annotate(
                samples, fleets, top_k=config.objective.top_k, vocabulary=vocabulary, attempts=ATTEMPTS, pair=pair
            )
            return runner.run(asked)

        try:
            yield annotate
        finally:
            runner.run(stack.aclose())
