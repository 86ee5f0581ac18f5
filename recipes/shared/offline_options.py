"""The options that sft, distill and preference share; their Configs inherit them and state what differs."""

from dataclasses import dataclass
from typing import Literal

from areax import models
from areax.adapters.tracking.sinks import Sinks
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout


@dataclass(frozen=True)
class Options:
    """Training on given rows. A Config that inherits this may give a field another default, or another help text.

    Attributes:
      model: Hugging Face directory with weights and tokenizer.
      data: rows to train on: a JSONL or Parquet file, a folder, or a hub name.
      out: the run's directory: checkpoint in `model/` (with `optim.ema` the averaged weights), adapters in `adapter/`,
        state, metrics, report.
      row: `module:function` or `file.py:function` that turns a record of the data into a row, or None to leave it out;
        `areax.adapters.data.formats:auto` reads the usual formats; "" = records are rows.
      limit: records of `data` to read; 0 = all. Of a data set on the hub no more are then fetched.
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
    out: str = ""
    row: str = ""
    limit: int = 0
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
