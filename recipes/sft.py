"""Supervised fine-tuning: demonstrations -> packed batches -> a Hugging Face checkpoint.

With `lora.rank` only adapters train, and are also written in PEFT's format. Running it again with the same `out`
resumes the run.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

from areax import models
from areax.adapters.data import chat_sft, images
from areax.core import losses, mtp
from areax.core.mtp import MTP
from areax.recipes.shared import common, learner, notebook, offline, offline_options, ranges, resume

FIRST_OPTIONS = (
    "model", "data", "out", "heldout", "learn", "steps", "batch", "length", "too_long", "rows", "optim.lr", "lora.rank",
    "run.dtype", "run.remat", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config(offline_options.Options):
    """Supervised fine-tuning.

    Attributes:
      data: rows with "prompt" and "completion", or with "messages"; these are the prompt if there is a "completion",
        and else end with the assistant's turn. A JSONL or Parquet file, a folder, or a data set on the hub.
      learn: turns of the assistant to train on: the "last", or "all" (by the chat template's generation blocks, or by
        what each turn adds if it has none).
      mtp: trains the layer for multi-token prediction, with which engines draft.
    """

    out: str = "runs/sft"
    learn: chat_sft.Learn = "last"
    mtp: MTP = MTP()

    def __post_init__(self):
        super().__post_init__()
        for reason in ranges.drafting(self.mtp, self.optim, self.lora):
            raise ValueError(reason)


def main(config: Config, rows: Any = None) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "seconds", ...}.

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
    began = time.monotonic()
    tokens = common.open_tokenizer(config.model, config.chat_template_kwargs)
    sample = offline.Demonstrations(tokens, config.learn, images.of_model(config.model))
    samples = lambda rows: [sample(row).replace(rollout=i, group=i) for i, row in enumerate(rows)]
    config, prompts, heldout = offline.read(config, samples, quiet, ahead=sample.ahead, given=given)
    if (summary := resume.finished("sft", config, None if quiet else prompts)) is not None:
        return summary
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = common.open_model(
        config.model, config.init, config.seed, mesh, learner.dtype(config.lora), config.vision, bool(config.mtp.coef)
    )
    common.say_added_ends(config.model, settings, tokens)
    run = learner.computed(config.run)
    score = functools.partial(models.score, config=settings, run=run, learnt_only=True)
    drafting = functools.partial(score, drafts=config.mtp.trunk) if config.mtp.coef else score
    own = learner.make(
        settings, params, drafting, mtp.wrap(losses.SFT(), config.mtp), config.optim, mesh, updates=config.steps,
        dtype=run.dtype, balance=config.balance, adapters=config.lora, plain=score, seed=config.seed,
    )  # fmt: skip
    return offline.fit(
        "sft", config, mesh, own, prompts, heldout, samples=samples, tokens=tokens, began=began, quiet=quiet,
    )  # fmt: skip
