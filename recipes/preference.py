"""Preference learning: pairs of completions, or single ones labelled good or bad -> a Hugging Face checkpoint.

DPO, IPO, SimPO, CPO, ORPO, KTO and BCO train a policy, RewardModel a scalar head that scores completions. Running it
again with the same `out` resumes the run.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from areax import models
from areax.adapters.data import images
from areax.core import losses, preference
from areax.core.optim import Optimizer
from areax.recipes.shared import common, learner, notebook, offline, offline_options, resume, score_head
from areax.rollout.types import Sample

Objective = losses.Preference | losses.KTO | losses.BCO | losses.RewardModel
SINGLE = losses.KTO, losses.BCO  # objectives on single completions


FIRST_OPTIONS = (
    "model", "data", "out", "heldout", "row", "steps", "batch", "length", "too_long", "rows", "optim.lr", "lora.rank",
    "run.dtype", "run.remat", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config(offline_options.Options):
    """Preference learning: DPO, IPO, SimPO, CPO, ORPO, KTO, BCO, reward models.

    Attributes:
      model: Hugging Face directory, GGUF file or hub name: weights, config.json and tokenizer; also the reference
        model, if any.
      data: rows with "prompt" (or "messages"), "chosen" and "rejected"; for KTO and BCO with "completion" and a
        boolean "label". A JSONL or Parquet file, a folder, or a data set on the hub.
      out: the run's directory: checkpoint in `model/`, adapters in `adapter/`, state, metrics; "" = runs/ and the
        objective's name.
      heldout: rows to evaluate loss and accuracy on, never trained on; "" = none.
      batch: rows per optimiser step; each has two sequences, in BCO one.
      too_long: what to do with rows longer than `length`: "refuse" ends the run at the first, "drop" leaves them out
        and prints how many. KTO also pairs each completion with the prompt of another row.
      lora: trains adapters instead of all weights, with the base model as the reference; rank 0 = all weights. Not for
        reward models, whose new head must train.
    """

    batch: int = 32
    objective: Objective = losses.DPO()
    optim: Optimizer = Optimizer(lr=1e-6, warmup=10)

    def __post_init__(self):
        super().__post_init__()
        if self.lora.rank and isinstance(self.objective, losses.RewardModel):
            raise ValueError(f"--lora.rank must be 0 for a reward model, whose head trains, got {self.lora.rank}")
        if self.batch < 2 and isinstance(self.objective, losses.KTO):
            raise ValueError(f"--batch must be at least 2, KTO compares a row with others, got {self.batch}")


def main(config: Config, rows: Any = None) -> dict:
    """Trains, writes `out`/model, and returns {"checkpoint", "steps", "loss", "preference_accuracy", "seconds", ...}.

    In a job of several processes each trains on its part of every batch; only process 0 writes, the others return {}.

    Args:
      rows: what to train on instead of `config.data`, as `sources.opened`.
    """
    return offline.run(
        functools.partial(train, given=rows), replace(config, out=config.out or f"runs/{config.objective.name.lower()}")
    )


async def run(config: Config, rows: Any = None) -> dict:
    """`main` where an event loop is running, as in a notebook; cancelled, it stops as after Ctrl-C."""
    return await notebook.run_in_thread(functools.partial(main, rows=rows), config)


def train(config: Config, quiet: bool = False, given: Any = None) -> dict:
    """Runs the training, the same in every process; `quiet` ones neither print nor write."""
    began, plain = time.monotonic(), config.objective
    tokens = common.open_tokenizer(config.model, config.chat_template_kwargs)
    sample = offline.Demonstrations(tokens, "last", images.of_model(config.model))
    samples = functools.partial(pairs, sample.of, plain)
    ahead = functools.partial(sample.ahead, names=completions(plain))
    config, prompts, heldout = offline.read(
        config, samples, quiet, ahead=ahead, check=lambda row: check(row, plain), given=given
    )  # fmt: skip
    if (summary := resume.finished("preference", config, None if quiet else prompts)) is not None:
        return summary
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = open_model(config, tokens, mesh)
    run = learner.computed(config.run)
    score = functools.partial(models.score, config=settings, run=run, learnt_only=True)
    own = learner.make(
        settings, params, score, plain, config.optim, mesh, updates=config.steps, dtype=run.dtype,
        balance=config.balance, adapters=config.lora, seed=config.seed,
    )  # fmt: skip
    beside: Callable = lambda batch: batch
    if plain.needs_reference:
        reference, scores = learner.reference(own, params, score, run.dtype)
        beside = lambda batch: batch.replace(ref_BT=jax.block_until_ready(scores(reference, batch).logp_BT))
    return offline.fit(
        "preference", config, mesh, own, prompts, heldout, samples=samples, beside=beside, tokens=tokens, began=began,
        frozen=plain.needs_reference, quiet=quiet,
    )  # fmt: skip


def completions(objective: Objective) -> tuple[str, ...]:
    """The fields of a row's completions."""
    return ("completion",) if isinstance(objective, SINGLE) else ("chosen", "rejected")


def check(row: dict, objective: Objective) -> None:
    """Raises ValueError for a row that lacks what the objective needs."""
    single, fields = isinstance(objective, SINGLE), f"got the fields {sorted(row)}"
    if not (isinstance(row.get("prompt"), str) or row.get("messages")):
        raise ValueError(f"{objective.name}: every row needs a 'prompt' or 'messages', {fields}")
    for name in completions(objective):
        offline.completion(objective.name, row, name)
    if single and not (isinstance(row.get("label"), bool | int) and row["label"] in (0, 1)):
        raise ValueError(
            f"{objective.name}: every row needs a 'label' true or false, got {row.get('label')!r}; {fields}"
        )
    if getattr(objective, "margin", False):
        margin = row.get("margin")
        if not (isinstance(margin, float | int) and math.isfinite(margin)):
            raise ValueError(f"{objective.name}: every row needs a number 'margin', got {margin!r}; {fields}")


def pairs(sample: Callable[[dict, Any], Sample], objective: Objective, rows: list[dict]) -> list[Sample]:
    """Makes a batch's samples: chosen and rejected of each row, with the margin as the chosen one's reward.

    For KTO and BCO: each row's completion, and for KTO's baseline its prompt with the completion of the previous row
    (cyclic).
    """
    if isinstance(objective, SINGLE):
        paired = isinstance(objective, losses.KTO) and len(rows) > 1
        others = [rows[i - 1]["completion"] for i in range(len(rows))] if paired else []
        made = [sample(row, row["completion"]).replace(label=float(row["label"])) for row in rows]
        made += [
            sample(row, other).replace(label=float(preference.BASELINE))
            for row, other in zip(rows, others, strict=False)
        ]
    else:
        made = []
        for i, row in enumerate(rows):
            chosen, rejected = (sample(row, row[name]).replace(pair=i) for name in ("chosen", "rejected"))
            reward = (len(chosen.tokens) - 1, float(row.get("margin") or 0))
            made += [chosen.replace(label=1.0, rewards=(reward,)), rejected.replace(label=0.0)]
    return [s.replace(rollout=i, group=i) for i, s in enumerate(made)]


def open_model(config: Config, tokens, mesh: jax.sharding.Mesh):
    """(config, weights) to start from; a reward model gets a score head, new if it has none, and no output head."""
    if isinstance(config.objective, losses.RewardModel):
        return score_head.open_model(config, score_head.SCALAR, tokens, mesh)
    made = common.open_model(config.model, config.init, config.seed, mesh, learner.dtype(config.lora), config.vision)
    common.say_added_ends(config.model, made[0], tokens)
    return made
