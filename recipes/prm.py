"""Process reward models: completions whose steps have labels -> a classifier that judges each step.

The checkpoint opens in transformers as AutoModelForTokenClassification. Running it again with the same `out` resumes
the run.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from areax import models
from areax.adapters import tokenizer
from areax.core import losses
from areax.core.process_reward import LABEL
from areax.recipes.shared import common, learner, notebook, offline, offline_options, resume, score_head
from areax.rollout.types import Sample, demonstration

FIRST_OPTIONS = (
    "model", "data", "out", "heldout", "row", "separator", "steps", "batch", "length", "too_long", "rows", "optim.lr",
    "run.dtype", "run.remat", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config(offline_options.Options):
    """Process reward models.

    Attributes:
      model: Hugging Face directory, GGUF file or hub name: weights, config.json and tokenizer; a score head with other
        labels is refused.
      data: rows of a prompt, its steps and their labels: "prompt" (or "messages"), "completions", a list of texts, and
        "labels", one for each: true or false, a number, or null for a step without one. A JSONL or Parquet file, a
        folder, or a data set on the hub.
      heldout: rows to evaluate loss and accuracy on, never trained on; "" = none.
      separator: text behind each step; the model judges the step at its last token (TRL's step_separator).
      lora: rank must be 0: the new head must train.
    """

    out: str = "runs/prm"
    separator: str = "\n\n"
    objective: losses.ProcessReward = losses.ProcessReward()

    def __post_init__(self):
        super().__post_init__()
        if self.lora.rank:
            raise ValueError(f"--lora.rank must be 0 for a reward model, whose head trains, got {self.lora.rank}")
        if not self.separator:
            raise ValueError("--separator must not be empty: the model judges a step at its last token")


def main(config: Config, rows: Any = None) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "step_accuracy", "seconds", ...}.

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
    began, head = time.monotonic(), models.ScoreHead(config.objective.labels, bias=True)
    tokens = common.open_tokenizer(config.model, config.chat_template_kwargs)
    one = functools.partial(sample, tokens, separator=config.separator)
    samples = lambda rows: [one(row).replace(rollout=i, group=i) for i, row in enumerate(rows)]
    labelled = functools.partial(check, labels=head.labels)
    config, prompts, heldout = offline.read(
        config, samples, quiet, ahead=lambda rows: None, check=labelled, given=given
    )
    if (summary := resume.finished("prm", config, None if quiet else prompts)) is not None:
        return summary
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = score_head.open_model(config, head, tokens, mesh)
    run = learner.computed(config.run)
    score = functools.partial(models.classify, config=settings, run=run)
    own = learner.make(
        settings, params, score, config.objective, config.optim, mesh, updates=config.steps, dtype=run.dtype,
        balance=config.balance, seed=config.seed,
    )  # fmt: skip
    return offline.fit(
        "prm", config, mesh, own, prompts, heldout, samples=samples, tokens=tokens, began=began, quiet=quiet,
    )  # fmt: skip


def check(row: dict, labels: int) -> None:
    """Raises ValueError for a row without steps and their labels."""
    steps, given, fields = row.get("completions"), row.get("labels"), f"got the fields {sorted(row)}"
    if not (isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps)):
        raise ValueError(f"prm: every row needs 'completions', a list of steps, {fields}; --row can make it")
    if not (isinstance(given, list) and len(given) == len(steps)):
        shown = len(given) if isinstance(given, list) else repr(given)
        raise ValueError(f"prm: every row needs 'labels', one for each of {len(steps)} steps, got {shown}")
    for label in given:
        if not (label is None or isinstance(label, int) and 0 <= label < labels):
            raise ValueError(
                f"prm: labels must be true, false, 0 to {labels - 1}, or null for a step without, got {label!r:.80}"
            )
    if not any(label is not None for label in given):
        raise ValueError("prm: a row needs a label for one of its steps, got null for all")


def sample(tokens, row: dict, separator: str) -> Sample:
    """The row's prompt and its steps, each with its label at its last token, the last of the separator behind it."""
    ids, ends = tokenizer.stepwise(tokens, row, row["completions"], separator)
    label = np.zeros(len(ids), np.int32)
    label[ends] = [0 if given is None else int(given) + 1 for given in row["labels"]]
    return demonstration(ids, (label > 0).tolist(), arrays={LABEL: ("input", label)})
