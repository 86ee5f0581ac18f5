"""Supervised fine-tuning: demonstrations -> packed batches -> a Hugging Face checkpoint.

With `lora.rank` adapters train over weights that stay as they are, and are written in PEFT's format besides.
Run it again with the same `out` and it goes on where it stopped.
"""

import functools
import time
from dataclasses import dataclass
from typing import Literal

from areax import models
from areax.adapters import tokenizer
from areax.adapters.data import chat_sft
from areax.adapters.tracking.sinks import Sinks
from areax.core import losses
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes.shared import common, learner, offline

FIRST_OPTIONS = (
    "model", "data", "out", "heldout", "learn", "steps", "batch", "length", "too_long", "rows", "optim.lr", "lora.rank",
    "run.dtype", "run.remat", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Supervised fine-tuning.

    Attributes:
      model: Hugging Face directory with weights and tokenizer.
      data: rows with "prompt" (or "messages") and "completion", or with "messages" of which the last is the
        assistant's: a JSONL or Parquet file, a folder, or a hub name.
      row: `module:function` or `file.py:function` that turns a record of the data into a row, or None to leave it out;
        `areax.adapters.data.formats:auto` reads the usual formats; "" = records are rows.
      limit: records of `data` to read; 0 = all. Of a data set on the hub no more are then fetched.
      out: the run's directory: checkpoint in `model/` (with `optim.ema` the averaged weights), adapters in `adapter/`,
        state, metrics, report.
      learn: "last" = what the assistant says last, "all" = each of its turns, by the chat template's generation blocks,
        or of a template without any by what each turn adds.
      init: "random" starts from new weights; the directory then needs config.json and tokenizer alone.
      heldout: rows whose loss is reported, never trained on; "" = none.
      steps: optimiser steps; also the length of the learning rate's schedule unless that has its own.
      batch: rows a step.
      length: longest sequence, and tokens of a packed row.
      too_long: what becomes of rows longer than that: "refuse" ends the run when one comes, "drop" leaves them out of
        data and held-out rows, and says how many.
      rows: packed rows of a microbatch.
      lora: adapters to train in place of all weights, which then stay in the checkpoint's dtype; rank 0 = none.
      balance: terms that keep the experts of a mixture evenly used; `load` costs one more forward pass a step.
      mesh: devices along each axis; all of them together must be the machine's, or one.
      save_every: in steps; 0 = at the end alone.
      evaluate_every: in steps; 0 = at the end alone.
      track: where else the numbers of metrics.jsonl go: TensorBoard, wandb, Prometheus.
      seed: of new weights and of the order of the rows.
    """

    model: str
    data: str
    out: str = "runs/sft"
    row: str = ""
    limit: int = 0
    learn: chat_sft.Learn = "last"
    init: Literal["checkpoint", "random"] = "checkpoint"
    heldout: str = ""
    steps: int = 100
    batch: int = 64
    length: int = 1024
    too_long: Literal["refuse", "drop"] = "refuse"
    rows: int = 8
    optim: Optimizer = Optimizer(lr=1e-5, warmup=10)
    lora: Lora = Lora()
    balance: Balance = Balance()
    run: models.Run = models.Run()
    mesh: Layout = Layout()
    save_every: int = 0
    evaluate_every: int = 0
    track: Sinks = Sinks()
    seed: int = 0


def main(config: Config) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "seconds", ...}.

    Of several processes each trains on its part of every batch; the first alone writes, the others return {}.
    """
    return offline.run(train, config)


def train(config: Config, quiet: bool = False) -> dict:
    """The run itself, the same in every process; `quiet` keeps its reports from being shown and written."""
    began = time.monotonic()
    tokens = tokenizer.load(config.model)
    sample = offline.demonstrations(tokens, config.learn)
    samples = lambda rows: [sample(row).replace(rollout=i, group=i) for i, row in enumerate(rows)]
    rows, heldout = (offline.fitting(config, some, samples, quiet) for some in offline.read(config, quiet))
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = common.open_model(config.model, config.init, config.seed, mesh, learner.dtype(config.lora))
    score = functools.partial(models.score, config=settings, run=learner.computed(config.run))
    own = learner.make(
        settings, params, score, losses.SFT(), config.optim, mesh, updates=config.steps, balance=config.balance,
        adapters=config.lora, seed=config.seed,
    )  # fmt: skip
    return offline.fit(
        "sft", config, mesh, own, rows, heldout, samples=samples, tokens=tokens, began=began, quiet=quiet,
    )  # fmt: skip
