"""Ranges of numbers among a recipe's options."""

import math
from collections.abc import Iterator
from typing import Any

from areax.core.balance import Balance
from areax.core.mtp import MTP
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.rollout.processes import memory

MOST = (1 << 63) - 1  # the largest integer that JAX and the servers take
SAMPLE = 20_000  # bytes that an episode needs at least: its task, its request, its tokens


def integers(options: Any, **least: int) -> Iterator[str]:
    """Why integers among a dataclass's options are out of range, one sentence each.

    Args:
      least: {option: its smallest value}; "auto" instead of an integer is in range.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value == "auto":
            continue
        if not smallest <= value <= MOST:
            rule = f"at least {smallest}" if value < smallest else f"at most {MOST}"
            yield f"--{name.replace('_', '-')} must be {rule}, got {value}"


def samples(options: str, count: int) -> Iterator[str]:
    """Why options that make a machine hold `count` samples at a time are out of range, if they are."""
    yield from memory.lacking(options, count * SAMPLE)


def finite(options: Any, *names: str) -> Iterator[str]:
    """Why numbers among a dataclass's options are negative or not finite, one sentence each."""
    for name in names:
        if not 0 <= getattr(options, name) < math.inf:
            yield f"--{name.replace('_', '-')} must be at least 0 and finite, got {getattr(options, name)}"


def schedule(optim: Optimizer, updates: int) -> Iterator[str]:
    """Why the learning rate of a run of `updates` optimiser steps cannot follow its schedule, one sentence each."""
    if optim.steps and optim.schedule == "constant":
        yield f"--optim.steps is the length of a cosine or linear --optim.schedule, got {optim.steps} with constant"
    steps = optim.steps or updates
    if updates and optim.schedule != "constant" and steps <= optim.warmup:
        yield (
            f"--optim.warmup must be below the {steps} optimiser steps of a {optim.schedule} schedule, got "
            f"{optim.warmup}"
        )


def narrow_adapters(optim: Optimizer, lora: Lora) -> Iterator[str]:
    """Why an optimiser that saves memory on weights cannot train adapters, which have little."""
    if lora.rank and optim.offload:
        yield (
            f"--optim.offload is for training all weights: those of --lora.rank {lora.rank} and their moments are "
            "small; leave it out"
        )
    for name in ("weights", "gradients"):
        if lora.rank and (value := getattr(optim, name)) != "float32":
            yield (
                f"--optim.{name} {value} is for training all weights: those of --lora.rank {lora.rank} stay in fp32; "
                "leave it out"
            )


def towers(vision: str, optim: Optimizer, lora: Lora) -> Iterator[str]:
    """Why a vision tower cannot train, one sentence each."""
    if vision == "trained" and lora.rank:
        yield (
            f"--vision trained trains all of the tower, and --lora.rank {lora.rank} adapters of the text model alone; "
            "leave out one of them"
        )
    if optim.vision_lr and vision != "trained":
        yield f"--optim.vision-lr {optim.vision_lr:g} is for a tower in training, --vision trained, got {vision}"


def drafting(mtp: MTP, optim: Optimizer, lora: Lora) -> Iterator[str]:
    """Why the layer for multi-token prediction cannot train, one sentence each."""
    if mtp.coef and lora.rank:
        yield (
            f"--mtp.coef {mtp.coef:g} trains a whole layer, and --lora.rank {lora.rank} adapters of the others alone; "
            "leave out one of them"
        )
    if mtp.coef and optim.offload:
        yield f"--mtp.coef {mtp.coef:g} clips a layer by itself, which --optim.offload does not; leave out one of them"
    if optim.mtp_lr and not mtp.coef:
        yield f"--optim.mtp-lr {optim.mtp_lr:g} is for a layer in training, --mtp.coef above 0, got {mtp.coef:g}"


def moved_bias(balance: Balance, lora: Lora) -> Iterator[str]:
    """Why the router's bias cannot move, if it is under adapters: it is a weight of the base, and in no adapter's file.

    DeepSeek-V3 too ended its pre-training with a bias at rest (arXiv:2412.19437).
    """
    if balance.bias and lora.rank:
        yield (
            f"--balance.bias {balance.bias:g} would move a weight under the adapters, which stay fixed with "
            f"--lora.rank {lora.rank}; leave out one of them"
        )


def average_teacher(options: Any) -> Iterator[str]:
    """Why the average of the weights cannot be the teacher: there is none, or no --self-distillation."""
    if options.average_teacher and not (options.self_distillation and options.optim.ema):
        yield (
            "--average-teacher needs --self-distillation and --optim.ema, the decay of the average (0.95 in SDPO), got "
            f"{'' if options.self_distillation else 'no --self-distillation, '}--optim.ema {options.optim.ema:g}"
        )
