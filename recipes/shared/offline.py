"""Training on given rows, for sft, distill and preference: samples from rows, and the training loop.

A run writes its state, metrics, checkpoint and summary to `config.out`, and resumes from there.
"""

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areax.adapters import hf, orbax
from areax.adapters.command_line.options import flat
from areax.adapters.data import chat_sft
from areax.adapters.data.images import Processor
from areax.adapters.runtime import blas, compile_cache, compile_time, hub
from areax.adapters.tracking import progress, run_dir, sinks
from areax.core import metrics, packing, step
from areax.core.batch import Batch
from areax.parallel import batches
from areax.parallel.multihost import agreement, processes
from areax.recipes.shared import (
    common,
    contents,
    ending,
    learner,
    many_rows,
    microbatch,
    not_finite,
    notebook,
    packer,
    profiling,
    resume,
    rows,
    sources,
    terminal,
    vision,
)
from areax.recipes.shared.giving_up import GivingUp
from areax.recipes.shared.learner import Learner, train_step
from areax.recipes.shared.stop_on import StopOn
from areax.rollout.chat import conversation, images
from areax.rollout.scheduling.mixture import Mixture
from areax.rollout.types import Sample

KEPT = 1 << 16  # samples, by the text of their rows


class Demonstrations:
    """f(row) -> a sample that trains on the assistant's turns; repeated rows are tokenised once, except those with
    images, which are read each time."""

    def __init__(self, tokens, learn: chat_sft.Learn, processor: Processor | None = None):
        """
        Args:
          processor: of a model that reads images; None = rows with images are refused.
        """
        self._make = functools.partial(
            chat_sft.samples, tokens, learn=learn, processor=processor and processor.as_given()
        )
        self._made: dict[str, Sample | ValueError] = {}  # the last ones, by the text of their rows

    def __call__(self, row: dict) -> Sample:
        _check_learnt(row)
        if images.of_row(row):
            [made] = self._make([row])
        else:
            if (text := _text(row)) not in self._made:
                self._keep([text])
            made = self._made[text]
        if isinstance(made, ValueError):
            raise made
        return made

    def of(self, row: dict, completion: Any) -> Sample:
        """A sample that trains on this completion of the row's prompt, a text or a message."""
        return self({**row, "completion": completion})

    def ahead(self, rows: list[dict], names: Sequence[str] = ("completion",)) -> None:
        """Tokenises many rows at once, for the calls that follow.

        Args:
          names: fields of completions, of which each makes a sample.
        """
        given = ({**row, "completion": row.get(name)} for row in rows if not images.of_row(row) for name in names)
        texts = (conversation.tried(_text, row) for row in given)  # a bad row's own call raises
        self._keep([*dict.fromkeys(text for text in texts if isinstance(text, str) and text not in self._made)])

    def _keep(self, texts: Sequence[str]) -> None:
        self._made |= zip(texts, self._make([*map(json.loads, texts)]), strict=True)
        for text in [*itertools.islice(self._made, max(len(self._made) - KEPT, 0))]:
            del self._made[text]


def _check_learnt(row: dict) -> None:
    if row.get("completion") is None and not row.get("messages"):
        raise ValueError(f"a demonstration needs a completion, got the fields {sorted(row)}; --row can make it")


def _text(row: dict) -> str:
    """What the row's sample depends on, as JSON."""
    _check_learnt(row)
    return conversation.json_text("a row", {**conversation.prompt_fields(row), "completion": row.get("completion")})


def run(train: Callable, config) -> dict:
    """Runs `train(config, quiet=)` in every process of the job; returns its summary in process 0, {} in the others."""
    notebook.refuse_running_loop(config)
    common.keep_memory()
    common.take_devices()
    blas.one_thread()
    compile_cache.keep()
    compile_time.measure()
    with processes.job() as index:
        if index == 0:
            sinks.check(config.track)
        summary = train(config, quiet=index > 0)
    return {} if index else summary


def read(
    config,
    samples: Callable[[list[dict]], list[Sample]],
    quiet: bool = False,
    *,
    ahead: Callable[[list[dict]], None],
    check: Callable = lambda row: None,
    given: Any = None,
) -> tuple[Any, sources.Order, Sequence[dict]]:
    """Reads the rows of `config.data` and `config.heldout`, and makes each one's samples once: they must fit in
    `config.length` tokens, or are left out if `config.too_long` is "drop".

    Returns `config` with `vision` as the rows decide, and the rows.

    All processes of a job must have the same.

    Args:
      samples: f(rows) -> their samples.
      ahead: does a part of `samples` for many rows at once, before they are checked one after the other.
      check: raises ValueError for a row that lacks what the objective needs.
      given: rows instead of those of `config.data`, as `sources.opened`.
    """
    common.check_directory("--out", config.out)
    common.check_microbatch(config.model, config.rows, config.length)
    common.check_balance(config.model, config.balance)
    vocabulary = hf.read_config(hub.folder(config.model)).vocab
    seen = False  # images

    def fits(row: dict) -> str | None:
        nonlocal seen
        check(row)
        made = samples([row])
        seen = seen or any(sample.images for sample in made)
        for sample in made:
            rows.check_vocabulary(sample.tokens, vocabulary)
            if not sample.reading:  # of another tokenizer
                rows.check_vocabulary(sample.teacher_tokens, vocabulary)
        n = max(max(len(sample.tokens), len(sample.teacher_tokens)) for sample in made)
        pair = sum(len(sample.tokens) for sample in made if sample.pair >= 0)
        if n <= config.length < pair and config.rows == 1:
            raise ValueError(
                f"both sequences of a pair must fit in --rows 1 of --length {config.length} tokens, got {pair}; raise "
                "--rows"
            )
        if n <= config.length:
            return None
        if config.too_long == "refuse":
            raise ValueError(f"a row must fit in --length {config.length} tokens, got {n}; or use --too-long drop")
        return f"longer than --length {config.length}"

    checked = rows.Prepared(fits, ahead)
    train = sources.opened(
        config.data, given, config.row, config.limit, check=checked, bad=config.bad_rows, recognise=True,
        seed=config.seed, quiet=quiet,
    )  # fmt: skip
    heldout = many_rows.every(
        config.heldout, config.row, check=checked, bad=config.bad_rows, recognise=True, quiet=quiet
    ) if config.heldout else []  # fmt: skip
    agreement.same(
        "options and rows", **vars(flat(config)), data_rows=sources.sampled(train),
        heldout_rows=sources.some(heldout),
    )  # fmt: skip
    return replace(config, vision=vision.decided(config.vision, seen)), train, heldout


def completion(recipe: str, row: dict, name: str = "completion") -> Any:
    """The row's completion, in the field `name`: a text, a message of the assistant, or a list of one."""
    if isinstance(row.get(name), str | dict) or (isinstance(row.get(name), list) and len(row[name]) == 1):
        return row[name]
    lists = "areax.adapters.data.formats:" + ("conversational" if name == "completion" else "preference")
    made = f"--row {lists} reads lists of messages" if isinstance(row.get(name), list) else "--row can make it"
    raise ValueError(f"{recipe}: every row needs a text {name!r}, got the fields {sorted(row)}; {made}")


def fit(
    kind: str,
    config,
    mesh: jax.sharding.Mesh,
    own: Learner,
    prompts: sources.Order,
    heldout: Sequence[dict],
    *,
    samples: Callable,
    beside: Callable = lambda batch: batch,
    tokens,
    began: float,
    teachers: Sequence = (),
    frozen: bool = False,
    quiet: bool = False,
) -> dict:
    """Trains for `config.steps` batches of `config.batch` rows; returns the content of `out`/summary.json.

    All processes of a job call it with the same arguments; `quiet` ones neither print nor write.

    Args:
      kind: the recipe, `kind` of the lines in metrics.jsonl; a state of another recipe is refused.
      config: model, out, steps, batch, length, rows, trie, run, mesh, save_every, save_minutes, evaluate_every, track
        and seed are read.
      prompts: the rows to train on by ordinal.
      samples: f(rows) -> the samples of a batch.
      beside: f(batch) -> the batch with what its objective needs from other models, such as reference scores.
      began: `time.monotonic()` at the start of the run, for the summary's seconds.
      teachers: the Configs of further models that see the batches.
      frozen: whether `beside` uses weights of --model, such as a reference's.
    """
    out = Path(config.out)
    limit: microbatch.Limit | None = None  # of a microbatch, once samples are there
    reading = vision.reader(config.model, own.settings, learner.computed(config.run).dtype, mesh)
    packed_as = packer.make(config, own.settings, *teachers)

    def pack(made: Sequence[Sample]) -> Batch:
        nonlocal limit
        mean = -(-sum(len(sample.tokens) for sample in made) // len(made))
        limit = limit or microbatch.Limit(microbatch.rows(config, mean))
        [batch] = vision.attach(reading, [packed_as(made, limit.rows)], [vision.of(made)])
        return batch

    prepare, loss = jax.jit(own.objective.prepare), step.make_loss(own.score, own.objective)

    with (
        ending.stop_signal() as stop, jax.set_mesh(mesh), common.run_directory(config.out),
        orbax.open_store(out / "state") as store,
    ):  # fmt: skip
        known = contents.same(config, tokens, frozen=frozen or bool(own.adapters or own.tower), quiet=quiet)
        start = store.latest or 0
        if start:
            with resume.restoring(config):
                own.state, cursor = store.restore(own.state)
            if (made := (cursor or {}).get("recipe", kind)) != kind:
                raise ValueError(
                    f"--out {config.out}: holds a run of {made}, which {kind} cannot go on with; name another directory"
                )
            if "data" in (cursor or {}):
                sources.check_same(prompts, cursor["data"], config.data)
        giving_up = GivingUp.restored(cursor if start else None)
        position = {"recipe": kind, "data": sources.identity(prompts), "contents": known}
        done = start

        def save():
            if done > (store.latest or 0):  # the last step may have been saved already
                store.save(done, own.state, position | giving_up.kept)

        complete = common.complete(config, start, quiet)
        with (
            run_dir.open_run(out, keep={kind: start}, quiet=quiet) as run,
            sinks.following(out, config.track, quiet=quiet),
            progress.steps(kind, config.steps, start=start, quiet=quiet, now=compile_time.clock) as tick,
            profiling.steps(kind, config.profile, config.out, config.steps, start=start) as traced,
        ):
            if not complete and not quiet:
                resume.write_options(config, start, tokens)
            last = {} if quiet else run_dir.logged(out, kind, start)
            stop_on = StopOn(() if quiet else config.stop_on, stop.ask, start, config.steps)
            said = terminal.Terminal(kind, stop_on, None if quiet else out)
            pending: tuple | None = None  # the newest step, whose metrics may still be computed
            looked = False  # whether a number that is not finite was looked for

            def report(trace: bool = True):
                nonlocal pending, looked
                if pending:
                    (i, values, count, learnt, more, read, made), pending = pending, None
                    if trace and not looked and not_finite.seen(values):
                        looked = True
                        raw = beside(batches.batch(read, mesh))
                        if origin := not_finite.find(values, own, [raw], [learner.prepared(own, raw)]):
                            rows_of = range((i - 1) * config.batch, i * config.batch)
                            said.say_not_finite(i, origin.said([made], tokens, rows_of))
                    last.clear()
                    last.update(metrics.to_dict(values), learnt_tokens=learnt, **more)
                    tick(i, tokens=count, loss=last["loss"])
                    said.look(i, last)
                    giving_up.see(last)
                    run.log(kind, i, **last)

            def leave():
                report(trace=False)  # another process may have failed
                save()
                store.wait()

            def packed(rows: Any, indices: Sequence[int]) -> tuple[Batch, Sequence[Sample]]:
                """The batch of the rows at these indices, and its samples. If they cannot be read, the state before is
                saved."""
                with processes.failing_together(leave):
                    made = samples([rows[index] for index in indices])
                return pack(made), made

            def evaluate() -> bool:
                """Logs the metrics of the held-out rows. False = a signal ended it, and nothing was logged."""
                report: dict = {}
                with said.counting(f"evaluating {len(heldout)} rows") as count:
                    for i in range(0, len(heldout), config.batch):
                        if processes.anyone(stop.asked)[0]:
                            return False
                        read, _ = packed(heldout, range(i, min(i + config.batch, len(heldout))))
                        batch = beside(batches.batch(read, mesh))
                        seen = learner.scored(own, batch) if own.objective.needs_scores else None
                        new = loss(own.state.params, prepare(batch, seen), *own.beside)
                        report = common.merge(report, new) if report else new
                        jax.block_until_ready(report)  # one at a time: gloo hangs when many wait
                        count(min(config.batch, len(heldout) - i))
                values = {f"heldout_{k}": v for k, v in metrics.to_dict(report).items()}
                last.update(values)
                run.log(kind, done, **values)
                stop_on.see(done, run_dir.numbers(values))
                return True

            saved_at, stopped = time.monotonic(), False
            stop.orderly()
            try:
                for i in range(start, config.steps):
                    giving_up.check_numbers("the weights of --model and --teacher, and rows")
                    ordinals = range(i * config.batch, (i + 1) * config.batch)
                    batch, made = packed(prompts, ordinals)
                    agreement.same(f"rows of step {i + 1}", batch=batch)
                    overdue = bool(config.save_minutes) and time.monotonic() - saved_at >= 60 * config.save_minutes
                    # of several processes each waits here for the step before
                    stopped, overdue = processes.anyone(stop.asked, overdue)
                    if stopped:
                        break
                    counts = int(np.sum(batch.segment_BT > 0)), int(np.sum(batch.mask_BT))
                    with said.step(), traced(i + 1) as computed:
                        ready = learner.prepared(own, beside(batches.batch(batch, mesh)))
                        assert limit is not None  # since the first batch was packed
                        while not microbatch.fits(config, own, ready, limit):
                            batch, made = packed(prompts, ordinals)
                            ready = learner.prepared(own, beside(batches.batch(batch, mesh)))
                        now = computed(train_step(own, ready))
                    report()  # one step behind, so that the host prepares while the device computes
                    more = prompts.shares(ordinals) if isinstance(prompts, Mixture) else {}
                    more["filled"] = packing.filled(batch)
                    if config.trie != "off":
                        more["trie_ratio"] = packing.trie_ratio(batch)
                    done, pending = i + 1, (i + 1, now, *counts, more, batch, made)
                    if config.stop_on:  # which ends the run after the very step
                        report()
                    if heldout and config.evaluate_every and done % config.evaluate_every == 0:
                        report()
                        with compile_time.left_out():
                            evaluate()
                    due = overdue or (config.save_every and done % config.save_every == 0)
                    if due and done < config.steps:
                        report()  # first: a state that is saved has its line, whenever the run is killed
                        save()
                        saved_at = time.monotonic()
                report()
            finally:
                report(trace=False)
            asked, by_rule = processes.anyone(stop.asked, bool(stop_on.summary))
            stopped = stopped or asked
            if not by_rule:
                giving_up.check_numbers("the weights of --model and --teacher, and rows", done)
            if heldout and not stopped:  # a run that goes on evaluates then
                save()
                stopped = not evaluate()
        save()
        checkpoint = learner.export(own, out, tokenizer=tokens, base=config.model)
        summary = {
            "checkpoint": str(checkpoint), "steps": done, "complete": not stopped,
            "seconds": time.monotonic() - began,
            **{k: v for k, v in last.items() if isinstance(v, float)}, **stop_on.summary,
        }  # fmt: skip
        store.wait()  # a summary must not say complete if the state does not fit on the disk
        if not quiet:
            ending.finish(config.out, summary)
    return summary
