"""Evaluation on held-out sets: their names, and the metrics of sampled groups."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from areax.adapters import tokenizer
from areax.adapters.tracking import diagnosis, progress
from areax.recipes.shared import describe
from areax.rollout.chat import images
from areax.rollout.scheduling import episodes
from areax.rollout.types import Sample

NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)")


def named(heldout: Sequence[str]) -> dict[str, str]:
    """{name: source} of `--heldout`, given as SOURCE or as NAME=SOURCE ...; one set may be without a name, "".

    Raises:
      ValueError: one of several sets has no name, or two have the same.
    """
    sets: dict[str, str] = {}
    given = [heldout] if isinstance(heldout, str) else list(heldout)
    for text in filter(None, given):
        found = NAMED.fullmatch(text)
        name, source = found.groups() if found else ("", text)
        if not name and len(given) > 1:
            raise ValueError(f"--heldout: each of several sets needs a name, as in math={text}, got {text}")
        if name in sets:
            raise ValueError(f"--heldout: sets must have different names, got {name} twice")
        sets[name] = source
    return sets


def pass_at(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of k of these completions, drawn without replacement.

    For rewards 0 and 1 it is pass@k by the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374),
    1 - C(n - c, k) / C(n, k) for c of n completions right.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"pass_at: k must be from 1 to the {n} completions, got {k}")
    # The i-th smallest (from 1) is the best of k if the other k - 1 are among the i - 1 smaller ones.
    return float(sum(x * (math.comb(i, k - 1) / math.comb(n, k)) for i, x in enumerate(sorted(rewards))))


def summary(groups: Sequence[Sequence[Sample]], samples: int) -> dict[str, Any]:
    """Metrics of the groups of an evaluation, a group per row.

    Args:
      samples: completions asked for per row, n.

    Returns:
      {"accuracy", "stderr", "rows", "scored_rows", "samples", "unscorable", "truncated", "length", "pass@2", "pass@4",
      ..., "pass@n"}. `accuracy` is the mean, over the `scored_rows` that have a scored completion, of the mean reward
      of these (avg@n), `stderr` its standard error over rows; `pass@k`, the mean over rows of `pass_at`, leaves out
      rows with fewer than k scored completions. None where there is nothing to average.
    """
    every = [sample for group in groups for sample in group]
    outcomes = [[episodes.outcome(s) for s in episodes.one_a_rollout(group)] for group in groups]
    scored = [[x for x in row if x == x] for row in outcomes]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    rows = [np.mean(row) for row in scored if row]
    ks = sorted({*(1 << i for i in range(1, samples.bit_length())), samples} - {1})
    return {
        "accuracy": mean(rows),
        "stderr": float(np.std(rows, ddof=1) / len(rows) ** 0.5) if len(rows) > 1 else None,
        "rows": len(groups),
        "scored_rows": len(rows),
        "samples": len(every),
        "unscorable": sum(x != x for row in outcomes for x in row),
        "truncated": mean([s.finish == "length" for s in every]),
        "length": mean([s.mask.sum() for s in every]),
        **{f"pass@{k}": mean([pass_at(row, k) for row in scored if len(row) >= k]) for k in ks},
    }


def say_endless(groups: Sequence[Sequence[Sample]], tokens: Any) -> None:
    """Says why if no completion ended before the length limit."""
    every = [sample for group in groups for sample in group]
    if every and all(sample.finish == "length" for sample in every):
        seen = {"truncated": 1.0, "unstopped": describe.unstopped(every, tokenizer.stop_ids(tokens))}
        for condition in diagnosis.of(seen):
            progress.say(f"eval: {condition.what}: {condition.advice}")


def combined(sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several sets as one: each as NAME/metric, their mean as "accuracy", their sums as "rows" and
    "scored_rows"."""
    flat = {f"{name}/{key}" if name else key: x for name, values in sets.items() for key, x in values.items()}
    accuracies = [values["accuracy"] for values in sets.values() if values["accuracy"] is not None]
    total = {"accuracy": float(np.mean(accuracies)) if accuracies else None}
    return total | {name: sum(values[name] for values in sets.values()) for name in ("rows", "scored_rows")} | flat


def counted(values: dict[str, Any]) -> str:
    """The held-out rows that an accuracy is of, in words."""
    scored, rows = values["scored_rows"], values["rows"]
    return f"{rows} held-out rows" if scored == rows else f"{scored} of {rows} held-out rows, the others have no score"


def answers(rows: Sequence[dict], groups: Sequence[Sequence[Sample]], tokens: Any) -> list[dict]:
    """For each row of an evaluation {"row", "prompt", "answers", "rewards", "finish", "lengths"}, ready for JSON.

    An answer is the text of a rollout's first sample; a reward is None if it could not be scored. Rejected episodes are
    missing.
    """
    made = []
    for row, group in zip(rows, groups, strict=True):
        shown = episodes.one_a_rollout(group)
        finite = lambda x: float(x) if math.isfinite(x) else None
        made.append(
            {
                "row": images.shown(row),
                "prompt": _text(shown[0], "prompt", tokens) if shown else None,
                "answers": [_text(s, "text", tokens) for s in shown],
                "rewards": [finite(episodes.outcome(s)) for s in shown],
                "finish": [s.finish for s in shown],
                "lengths": [int(s.mask.sum()) for s in shown],
            }
        )
    return made


def _text(sample: Sample, name: str, tokens: Any) -> str:
    """The prompt or the text of a sample, as its workflow shows it, or else decoded."""
    if name in sample.info:
        return str(sample.info[name])
    start = int(np.argmax(sample.mask)) if sample.mask.any() else len(sample.tokens)
    return tokens.decode((sample.tokens[:start] if name == "prompt" else sample.tokens[start:]).tolist())
