"""Trained reward models as rewards: put `reward = reward_model.load("runs/rewardmodel/model")` in your own file, or for
a reward of each step `reward = reward_model.steps("runs/prm/model")`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import models
from ..core import packing
from ..models.layers import score_head
from ..rollout.chat import demonstration
from ..rollout.types import supervised
from . import hf, tokenizer
from .runtime import hub

Reward = Callable[[str, Mapping[str, Any]], Any]


def load(path: str | os.PathLike, label: int | str | None = None) -> Reward:
    """Returns f(text, row) -> score of the completion `text` to the row's prompt, at its end of turn, with the chat
    template as in training.

    With one label the reward is its score. With several it is the probability of `label`, as transformers' pipelines
    compute it: the softmax over all, the sigmoid if `problem_type` in config.json is "multi_label_classification"; if
    that is "regression", the score.

    The first call loads the weights, so a process that only looks the reward up holds none. In a process that has not
    used JAX yet, it restricts JAX to the CPU: accelerators belong to the trainer. Each call scores one completion in
    fp32, and compiles once for each power of two of tokens.

    Args:
      path: directory of a reward model or a classifier, or its name on the hub, with its tokenizer.
      label: the label, by its number or its name in id2label; needed if there are several.

    Raises:
      ValueError: there is no checkpoint, it has no score head, or no such label.
    """
    opened, reward_of = _reader(path, label)

    def reward(text: str, row: Mapping[str, Any]) -> float:
        tokens, score = opened()
        end = tokenizer.end_of_turn(tokens)
        # A model may sample what a template leaves out, such as a second thought.
        return reward_of(score(demonstration.encoded(tokens, {**row, "completion": text}, "last", end).ids)[-1])

    return reward


def steps(
    path: str | os.PathLike, *, separator: str = "\n\n", marker: str | None = None, label: int | str | None = None
) -> Reward:
    """Returns f(text, row) -> [(end, reward), ...] of a process reward model: for each step of the completion `text`
    the characters up to its end, and its reward as `load` computes it, read at the step's last token.

    The model reads the prompt by its chat template, then each step followed by `marker`, as `areax train prm` and TRL's
    PRMTrainer train it.

    Args:
      path: as in `load`.
      separator: the text that ends a step of the completion, but for the last one.
      marker: the text behind each step at whose last token the model was trained to judge it: "<extra_0>" of
        Qwen2.5-Math-PRM; None = the separator.
      label: the label of a correct step; None = label 1 of two.

    Raises:
      ValueError: as `load`; separator or marker is empty.
    """
    marker = separator if marker is None else marker
    if not (separator and marker):
        raise ValueError(f"reward_model: separator and marker must not be empty, got {separator!r} and {marker!r}")
    opened, reward_of = _reader(path, label, default=1)

    def reward(text: str, row: Mapping[str, Any]) -> list[tuple[int, float]]:
        tokens, score = opened()
        found = _split(text, separator)
        ids, ends = tokenizer.stepwise(tokens, row, [text for text, _ in found], marker)
        score_NY = score(ids)
        return [(end, reward_of(score_NY[at])) for (_, end), at in zip(found, ends, strict=True)]

    return reward


def _split(text: str, separator: str) -> list[tuple[str, int]]:
    """(step, characters up to the end of its separator) for each step of a text that is not blank, or for the text."""
    found, end = [], 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            found.append((part, end))
    return found or [(text, len(text))]


def _reader(path: str | os.PathLike, label: int | str | None, default: int | None = None):
    """(f() -> (tokenizer, g(ids) -> scores [N, Y]), f(score_Y) -> reward); f loads the weights once."""
    path = Path(hub.folder(path, weights=True)).absolute()
    config = hf.loaded_config(path)
    if config.score_head is None:
        raise ValueError(f"{path}: a reward model needs a score head, got no score.weight")
    source = json.loads(config.source)
    names = score_head.label_names(source, config.score_head.labels)
    chosen = _label(label, names, default, path)

    @functools.cache
    def opened():
        jax.config.update("jax_platforms", "cpu")
        _, params = hf.load(path)
        compiled = jax.jit(lambda batch: models.classify(params, batch, config=config).label_BTY)

        def score(ids: Sequence[int]) -> np.ndarray:
            n = len(ids)
            batch = packing.pack([supervised([], ids)], max(32, 1 << (n - 1).bit_length()), rows=1)
            return np.asarray(compiled(jax.tree.map(lambda x: x[0], batch)))[0, :n]

        return tokenizer.load(path), score

    return opened, functools.partial(_reward, chosen, source.get("problem_type"))


def _label(label: int | str | None, names: Sequence[str], default: int | None, path: Path) -> int:
    if label is None:
        label = {1: 0, 2: default}.get(len(names))
    if isinstance(label, str) and names.count(label) == 1:
        return names.index(label)
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    shown = ", ".join(f"{i} {name!r}" for i, name in enumerate(names[:10]))
    raise ValueError(f"{path}: label must be one of {shown}{', ...' * (len(names) > 10)}, got {label!r:.80}")


def _reward(label: int, problem: str | None, score_Y: np.ndarray) -> float:
    x_Y = score_Y.astype(np.float64)
    if len(x_Y) == 1 or problem == "regression":
        return float(x_Y[label])
    if problem == "multi_label_classification":
        return float(1 / (1 + np.exp(-x_Y[label])))
    return float(1 / np.exp(x_Y - x_Y[label]).sum())
