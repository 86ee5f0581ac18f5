"""Metrics of a batch's samples: rewards, lengths, staleness, trainer-sampler agreement; sample texts."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from areax.adapters.tracking import run_dir
from areax.core.clipping import BOUND
from areax.rollout.scheduling import episodes
from areax.rollout.types import Sample

LENGTH_BINS = 32


def shuffled(groups: list[list[Sample]], seed) -> list[list[Sample]]:
    """Permutes the rewards among the rollouts of a batch at random; a control experiment."""
    flat = episodes.one_a_rollout([s for group in groups for s in group])
    order = np.random.default_rng(seed).permutation(len(flat))
    others = {s.rollout: flat[i] for s, i in zip(flat, order, strict=True)}
    end = lambda s, other: tuple((len(s.tokens) - 1, value) for _, value in other.rewards)
    take = lambda s, other: s.replace(rewards=end(s, other), components=other.components)
    return [[take(s, others[s.rollout]) for s in group] for group in groups]


def agreement(samples: list[Sample], logps: list[np.ndarray], version: int) -> dict[str, float]:
    """Max |d logp| and mean k3 between trainer and sampler on tokens of the current version, in float64.

    k3 = exp(d) - 1 - d with d = trainer - sampler, clipped to +-20 as in training, estimates KL(sampler || trainer).
    """
    now = [s.version == version for s in samples]
    gap = np.concatenate(
        [(x.astype(np.float64) - s.logp)[here] for x, s, here in zip(logps, samples, now, strict=True)]
    )
    if not len(gap):
        return {}
    bounded = np.clip(gap, -BOUND, BOUND)
    return {"max_logp_diff": float(np.abs(gap).max()), "mismatch_k3_now": float(np.mean(np.expm1(bounded) - bounded))}


def batch(samples: list[Sample], version: int) -> dict:
    """Rewards and lengths of a batch's rollouts; finish reasons, repetition and staleness of its samples."""
    whole = episodes.one_a_rollout(samples)
    reward = np.array([episodes.outcome(s) for s in whole])
    learnt: dict[int, int] = {}
    for s in samples:
        learnt[s.rollout] = learnt.get(s.rollout, 0) + int(s.mask.sum())
    length = np.array(list(learnt.values()))
    by_group: dict[int, list[float]] = {}
    for s in whole:
        by_group.setdefault(s.group, []).append(episodes.outcome(s))
    values = [np.array(r) for r in by_group.values()]
    equal = np.array([(v == v[0]).all() for v in values])
    best = np.array([np.where(np.isnan(v), -np.inf, v).max() for v in values])
    scored = ~np.isnan(reward)
    edges = np.unique(np.linspace(0, max(1, length.max()) + 1, LENGTH_BINS + 1).astype(int))
    return {
        "reward": float(reward[scored].mean()) if scored.any() else None,
        "reward_std": float(reward[scored].std()) if scored.any() else None,
        **_components(whole),
        "unscorable": float(np.mean(~scored)),
        "solved_all": float(np.mean(equal & (best > 0))),
        "solved_none": float(np.mean(equal & (best <= 0))),
        "solved_any": float(np.mean(best > 0)),
        "groups_that_teach": sum(len(set(v[~np.isnan(v)].tolist())) > 1 for v in values),
        "length": float(length.mean()),
        "length_p50": float(np.median(length)),
        "length_p90": float(np.quantile(length, 0.9)),
        "length_reward_correlation": _correlation(length[scored], reward[scored]),
        "empty": float(np.mean(length <= 1)),
        "repetition": float(np.mean([_repeated(s.tokens[s.mask]) for s in samples])),
        "truncated": float(np.mean([s.finish == "length" for s in samples])),
        "aborted": float(np.mean([s.finish in ("abort", "error") for s in samples])),
        **_ages(samples, version),
        "samples": len(samples),
        "tokens": int(sum(len(s.tokens) for s in samples)),
        "version": version,
        "length_hist": {"edges": edges.tolist(), "counts": np.histogram(length, edges)[0].tolist()},
    }


def unstopped(samples: Sequence[Sample], ends: Collection[int]) -> float:
    """The share of answers that were cut at the length limit and whose last turn goes on past one of `ends`."""
    last = (s.tokens[s.mask & (s.turn == s.turn.max())][:-1] for s in samples if s.finish == "length")
    return sum(bool(np.isin(tokens, list(ends)).any()) for tokens in last) / len(samples)


def by_source(groups: list[list[Sample]], source: Callable[[int], str]) -> dict[str, float | None]:
    """Metrics of the groups of each source: share of the batch, mean reward, share of solved prompts.

    Args:
      source: the name of a prompt's source.
    """
    own: dict[str, list[list[float]]] = {}
    for group in groups:
        scored = [x for x in map(episodes.outcome, episodes.one_a_rollout(group)) if x == x]
        own.setdefault(source(group[0].prompt), []).append(scored)
    made: dict[str, float | None] = {}
    for name, outcomes in sorted(own.items()):
        every = [x for group in outcomes for x in group]
        made[f"{name}/share"] = len(outcomes) / len(groups)
        made[f"{name}/reward"] = float(np.mean(every)) if every else None
        made[f"{name}/solved_any"] = float(np.mean([max(group, default=0.0) > 0 for group in outcomes]))
    return made


def _components(samples: list[Sample]) -> dict[str, float]:
    """Mean of each reward component over the samples that have it."""
    names = sorted({name for s in samples for name in s.components})
    own = {name: [s.components[name] for s in samples if name in s.components] for name in names}
    return {f"reward_{name}": float(np.nanmean(x)) for name, x in own.items() if not np.isnan(x).all()}


def _ages(samples: list[Sample], version: int) -> dict:
    """Staleness: versions between sampling a token and training on it; `span`: within one sample."""
    learnt = [s.version[s.mask] for s in samples if s.mask.any()]
    age = np.maximum(np.concatenate([version - x for x in learnt]), 0) if learnt else np.zeros(1, int)
    span = np.array([np.ptp(x) for x in learnt] or [0])
    return {
        "staleness": float(age.mean()),
        "staleness_max": float(age.max()),
        "staleness_span": float(span.max()),
        "partial": float(np.mean(span > 0)),
        "staleness_hist": {"edges": list(range(int(age.max()) + 2)), "counts": np.bincount(age).tolist()},
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 and x.std() > 0 and y.std() > 0 else 0.0


def _repeated(tokens: np.ndarray, n: int = 4) -> float:
    """Share of n-grams that occurred before in the sequence; 0 below 2 n tokens."""
    if len(tokens) < 2 * n:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1 - len(np.unique(runs, axis=0)) / len(runs)


def show(
    run: run_dir.Run, tokens, v: int, traced: Sequence[tuple[Sample, np.ndarray | None]], kind: str = "grpo"
) -> None:  # fmt: skip
    """Writes samples to samples.jsonl, token by token, with the trainer's log-probabilities if there are any.

    Args:
      kind: "grpo" for those that made version v, "eval" for those of an evaluation of it.
    """
    for sample, logp in traced:
        new = sample.mask
        run.sample(
            v, kind=kind, version=v - 1 if kind == "grpo" else None, prompt=sample.info.get("prompt", ""),
            text=sample.info.get("text", ""), reward=sample.reward, finish=sample.finish,
            tokens=[tokens.decode([t]) for t in sample.tokens[new]], logp=sample.logp[new].tolist(),
            version_of_token=sample.version[new].tolist(), images=[image.hash for image in sample.images],
            **({} if logp is None else {"trainer_logp": logp[new].tolist()}),
        )  # fmt: skip
