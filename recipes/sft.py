"""Supervised fine-tuning: rows with a prompt and a completion -> packed batches -> a Hugging Face checkpoint.

Run it again with the same `out` and it goes on where it stopped.
"""

import functools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from areax import models
from areax.adapters import hf, state, tokenizer, tracker
from areax.core import losses, metrics, packing, step
from areax.core.balance import Balance, wrap
from areax.core.optim import AdamW, adamw
from areax.parallel import place, processes, rules
from areax.parallel.mesh import Layout
from areax.recipes import common
from areax.rollout.executor import Prompts
from areax.rollout.types import Sample, supervised


@dataclass(frozen=True)
class Config:
    """Supervised fine-tuning.

    Attributes:
      model: Hugging Face directory with weights and tokenizer.
      data: rows with "prompt" (or "messages") and "completion": a JSONL or Parquet file, a folder, or a hub name.
      row: `module:function` or `file.py:function` that turns a record of the data into a row; "" = records are rows.
      out: the run's directory: checkpoint in `model/`, state, metrics, report.
      init: "random" starts from new weights; the directory then needs config.json and tokenizer alone.
      heldout: rows whose loss is reported, never trained on; "" = none.
      steps: optimiser steps; also the length of the learning rate's schedule unless that has its own.
      batch: rows a step.
      length: longest sequence, and tokens of a packed row.
      rows: packed rows of a microbatch.
      balance: terms that keep the experts of a mixture evenly used; `load` costs one more forward pass a step.
      mesh: devices along each axis; all of them together must be the machine's, or one.
      save_every: in steps; 0 = at the end alone.
      evaluate_every: in steps; 0 = at the end alone.
      seed: of new weights and of the order of the rows.
    """

    model: str
    data: str
    out: str = "runs/sft"
    row: str = ""
    init: Literal["checkpoint", "random"] = "checkpoint"
    heldout: str = ""
    steps: int = 100
    batch: int = 64
    length: int = 1024
    rows: int = 8
    optim: AdamW = AdamW(lr=1e-5, warmup=10)
    balance: Balance = Balance()
    run: models.Run = models.Run()
    mesh: Layout = Layout()
    save_every: int = 0
    evaluate_every: int = 0
    seed: int = 0


def main(config: Config) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "seconds", ...}.

    Of several processes each trains on its part of every batch; the first alone writes, the others return {}.
    """
    common.keep_memory()
    with processes.job() as index:
        summary = train(config, quiet=index > 0)
    return {} if index else summary


def train(config: Config, quiet: bool = False) -> dict:
    """The run itself, the same in every process; `quiet` keeps its reports from being shown and written."""
    began = time.monotonic()
    tokens = tokenizer.load(config.model)
    rows = common.read_rows(config.data, config.row)
    heldout = common.read_rows(config.heldout, config.row) if config.heldout else []
    processes.same("options and rows", config, rows, heldout)
    prompts = Prompts(rows, seed=config.seed)
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = common.open_model(config.model, config.init, config.seed, mesh)
    table, plain = models.table(settings), losses.SFT()
    objective = wrap(plain, config.balance)
    optimizer = adamw(replace(config.optim, steps=config.optim.steps or config.steps), table)
    score = functools.partial(models.score, config=settings, run=config.run)
    shardings = rules.of_state(optimizer, table, mesh)
    update = step.make_step(score, objective, optimizer, shardings)
    prepare, scores = jax.jit(objective.prepare), step.make_scores(score)
    evaluate, ready = step.make_loss(score, plain), jax.jit(plain.prepare)
    current = step.init(params, optimizer, shardings)
    out = common.out_directory(config.out)
    samples = functools.lru_cache(maxsize=1 << 16)(functools.partial(_sample, tokens))

    def pack(rows) -> packing.Batch:
        picked = [samples(*_texts(row)) for row in rows]
        named = [s.replace(rollout=i, group=i) for i, s in enumerate(picked)]
        return packing.pack(named, config.length, rows=config.rows)

    def heldout_loss(params) -> dict:
        report: dict = {}
        for i in range(0, len(heldout), config.batch):
            batch = pack(heldout[i : i + config.batch])
            jax.block_until_ready(report)  # one at a time: gloo hangs when many wait
            new = evaluate(params, ready(place.batch(batch, mesh)))
            report = common.merge(report, new) if report else new
        return {f"heldout_{k}": v for k, v in metrics.to_dict(report).items()}

    with jax.set_mesh(mesh), state.open_store(out / "state") as store, common.stop_signal() as stop:
        start = store.latest or 0
        if start:
            current, _ = store.restore(current)
        last: dict = {}
        with (
            tracker.open_run(out, config=config, keep={"sft": start}, quiet=quiet) as run,
            tracker.progress("sft", config.steps, start=start, quiet=quiet) as tick,
        ):

            def report(i, pending, learnt):
                values = metrics.to_dict(pending)
                tick(i, tokens=learnt, loss=values["loss"])
                run.log("sft", i, **values)
                last.update(values)

            pending = None
            done = start
            for i in range(start, config.steps):
                batch = pack([prompts[i * config.batch + j] for j in range(config.batch)])
                if processes.anyone(stop.is_set()):  # of several processes each waits here for the step before
                    break
                batch = place.batch(batch, mesh)
                seen = scores(current.params, batch) if objective.needs_scores else None
                current, now = update(current, prepare(batch, seen))
                if pending:  # one step behind, so that the host prepares while the device computes
                    report(*pending)
                done, pending = i + 1, (i + 1, now, int(np.sum(batch.segment_BT > 0)))
                if heldout and config.evaluate_every and done % config.evaluate_every == 0:
                    run.log("sft", done, **heldout_loss(current.params))
                if config.save_every and done % config.save_every == 0 and done < config.steps:
                    store.save(done, current)
            if pending:
                report(*pending)
            if heldout:
                last.update(heldout_loss(current.params))
                run.log("sft", done, **{k: v for k, v in last.items() if k.startswith("heldout")})
        if done > (store.latest or 0):  # the last step may have been saved already
            store.save(done, current)
        checkpoint = hf.save(out / "model", settings, current.params, tokenizer=tokens)
    summary = {
        "checkpoint": str(checkpoint), "steps": done, "complete": done == config.steps,
        "seconds": time.monotonic() - began,
        **{k: v for k, v in last.items() if isinstance(v, float)},
    }  # fmt: skip
    if not quiet:
        tracker.write_json(Path(out) / tracker.SUMMARY, summary)
    return summary


def _texts(row) -> tuple[str, str]:
    """The row as hashable text, so that a prompt seen before is not tokenised again."""
    if "completion" not in row:
        raise ValueError(f"sft: every row needs a 'completion', got the fields {sorted(row)}")
    return json.dumps(row.get("messages") or row.get("prompt")), row["completion"]


def _sample(tokens, prompt: str, completion: str) -> Sample:
    content = json.loads(prompt)
    row = {"prompt": content} if isinstance(content, str) else {"messages": content}
    return supervised(*tokenizer.supervised(tokens, {**row, "completion": completion}))
