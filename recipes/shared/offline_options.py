"""The options that sft, distill and preference share; their Configs inherit them and state what differs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from areax import models
from areax.adapters.command_line import typed
from areax.adapters.command_line.options import JSON, json_object
from areax.adapters.tracking.sinks import Sinks
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes.shared import profiling, ranges, stop_on
from areax.recipes.shared.microbatch import Rows
from areax.recipes.shared.packer import Trie
from areax.recipes.shared.rows import Bad
from areax.recipes.shared.vision import Vision


@dataclass(frozen=True)
class Options:
    """Options of training on given rows. A Config may override a field's default and its help text.

    Attributes:
      model: Hugging Face directory, GGUF file or hub name: weights, config.json and tokenizer.
      data: rows to train on: a JSONL or Parquet file, a folder, or a data set on the hub; or NAME=ROWS:WEIGHT,NAME=...
      out: the run's directory: checkpoint in `model/` (with `optim.ema` the averaged weights), adapters in `adapter/`,
        state, metrics, report.
      row: function from records to rows: `module:function` or `file.py:function`, which returns None to leave a record
        out; "" = records are rows, or of a usual format that their fields tell (docs/add-a-data-set.md).
      chat_template_kwargs: variables of the chat template, a JSON object such as {"enable_thinking": false}.
      limit: records of `data` to read, and to fetch from the hub; 0 = all.
      bad_rows: "stop" ends the run at the first row that cannot be used, before anything starts; "skip" leaves such
        rows out and prints how many.
      init: "random" starts from new weights; the directory then needs only config.json and tokenizer.
      heldout: rows to evaluate the loss on, never trained on; "" = none.
      steps: optimiser steps; also the length of the learning rate's schedule unless that has its own.
      batch: rows per optimiser step.
      length: longest sequence; also tokens per packed row.
      too_long: what to do with rows longer than `length`: "refuse" ends the run at the first, "drop" leaves them out
        and prints how many.
      rows: most packed rows per microbatch; "auto" = as many as fit the devices by the plan and make a step faster, 8
        on a CPU. A batch that fewer or shorter rows hold takes those.
      trie: "auto" = tokens that samples share, such as a prompt, are computed once, where that saves at least a fifth
        of all (docs/memory.md); "off" = once per sample.
      vision: the vision tower of a model that reads images, "trained" or "frozen"; "auto" = frozen, and loaded only if
        rows have images.
      lora: trains adapters instead of all weights, which then keep the checkpoint's dtype; rank 0 = all weights.
      balance: load balancing of mixture-of-experts models; `load` costs one more forward pass per step.
      mesh: devices along each axis; fewer than there are = the first ones.
      stop_on: ends the run in order once a metric says so: "METRIC>VALUE", also >=, < and <=, and with @N for N lines
        in a row that have it; or at the first `alarm` (docs/metrics.md). Quotes keep the shell from it.
      save_every: steps between checkpoints; 0 = only by time and at the end.
      save_minutes: minutes after the last checkpoint when another is saved in any case; 0 = off.
      evaluate_every: steps between evaluations; 0 = only at the end.
      track: where else metrics go: TensorBoard, wandb, trackio, MLflow, SwanLab, Prometheus.
      profile: steps to trace with jax.profiler, one as 5 or a range as 5:8, both ends included; the trace is in
        `profile/` in the run's directory (docs/metrics.md); "" = none.
      seed: random seed of new weights and row order.
    """

    model: str
    data: str
    out: str = ""
    row: str = ""
    chat_template_kwargs: Annotated[str, JSON] = ""
    limit: int = 0
    bad_rows: Bad = "stop"
    init: Literal["checkpoint", "random"] = "checkpoint"
    heldout: str = ""
    steps: int = 100
    batch: int = 64
    length: int = 1024
    too_long: Literal["refuse", "drop"] = "refuse"
    rows: Rows = "auto"
    trie: Trie = "auto"
    optim: Optimizer = Optimizer(lr=1e-5, warmup=10)
    vision: Vision = "auto"
    lora: Lora = Lora()
    balance: Balance = Balance()
    run: models.Run = models.Run()
    mesh: Layout = Layout()
    stop_on: tuple[str, ...] = ()
    save_every: int = 0
    save_minutes: float = 30.0
    evaluate_every: int = 0
    track: Sinks = Sinks()
    profile: str = ""
    seed: int = 0

    def __post_init__(self):
        typed.check(self)
        least = dict(steps=0, batch=1, length=2, rows=1, limit=0, save_every=0, evaluate_every=0, seed=0)
        for reason in (
            *ranges.integers(self, **least),
            *ranges.samples(f"--batch {self.batch}", self.batch),
            *ranges.finite(self, "save_minutes"),
            *ranges.schedule(self.optim, self.steps),
            *ranges.moved_bias(self.balance, self.lora),
            *ranges.narrow_adapters(self.optim, self.lora),
            *ranges.towers(self.vision, self.optim, self.lora),
            *stop_on.offline_conflicts(self),
        ):
            raise ValueError(reason)
        json_object("--chat-template-kwargs", self.chat_template_kwargs)
        profiling.chosen(self.profile, self.steps)
        if self.evaluate_every and not self.heldout:
            raise ValueError(f"--evaluate-every {self.evaluate_every} needs --heldout, rows to evaluate on, got none")
