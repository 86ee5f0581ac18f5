"""Samples that share tokens in every way: groups, forked episodes, duplicates, one that is a prefix of another."""

import numpy as np

from areax.core import packing
from areax.models import trie_alignment, trie_lengths
from areax.rollout.types import Sample


def samples(
    vocabulary: int = 64, seed: int = 0, shared: int = 13, routed: tuple[int, int, int] | None = None,
    pairs: bool = False,
) -> list[Sample]:  # fmt: skip
    """16 samples of four groups.

    Args:
      shared: length of a prompt, and of an episode's first turn.
      pairs: they are pairs, chosen and rejected.
      routed: layers, experts of a token, and experts: every sample replays its own, the same where prompts are shared.
    """
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(1, vocabulary, n).tolist()
    header, made = draw(5), []
    for group in range(2):  # four completions of a prompt, one of them twice, one a prefix of another
        prompt = header + draw(shared)
        first, second = draw(9), draw(14)
        made += [(prompt, tail, group) for tail in (first, second, first, second[:6])]
    history = draw(shared)
    for turn in range(4):  # an episode: each turn has the turns before, and a branch of its own, once of one token
        made.append((history, draw((6, 1, 3, 8)[turn]), 2))
        history = history + draw(4)
    alone = draw(8)
    made += [(alone, draw(3), 3), (alone, draw(5), 3), (draw(4), draw(11), 3), (draw(2), draw(2), 3)]
    made = [one(i, prompt, tail, group, rng, routed) for i, (prompt, tail, group) in enumerate(made)]
    return [s.replace(pair=i // 2) for i, s in enumerate(made)] if pairs else made


def random(seed: int, count: int = 14, vocabulary: int = 64) -> list[Sample]:
    """Samples that go on from a random token of another, or from none."""
    rng = np.random.default_rng(seed)
    made: list[tuple[list[int], list[int], int]] = []
    for group in range(count):
        prompt: list[int] = []
        if made and rng.random() < 0.8:
            asked, tail, group = made[rng.integers(len(made))]
            prompt = (asked + tail)[: rng.integers(len(asked + tail) + 1)]
        new = rng.integers(0 if len(prompt) > 1 else 2, 12)
        made.append((prompt[:80], rng.integers(1, 4, new).tolist() or [1], group))  # few tokens: shared by chance, too
    return [one(i, prompt, tail, group, rng, None) for i, (prompt, tail, group) in enumerate(made)]


def one(i: int, prompt: list[int], tail: list[int], group: int, rng, routed) -> Sample:
    tokens = np.array(prompt + tail, np.int32)
    n, start = len(tokens), len(prompt)
    learnt = np.arange(n) >= (start - 4 if group == 2 else start)  # an episode also learns what branches share
    arrays = {}
    if routed:
        layers, k, experts = routed
        place = (tokens[:, None] + np.arange(layers)) % experts
        chosen = (place[..., None] + np.arange(k)) % experts
        chosen[start:] = (chosen[start:] + i) % experts
        arrays = {"routed_experts": ("input", chosen.astype(np.int32))}
    return Sample(
        tokens=tokens, mask=learnt, logp=np.where(learnt, rng.normal(-2, 0.5, n), 0).astype(np.float32),
        version=np.where(learnt, 1, -1).astype(np.int32), turn=np.zeros(n, np.int32),
        rewards=((n - 1, float(rng.random())),), components={}, group=group, prompt=group, rollout=i, sample=i,
        label=float(1 - i % 2), arrays=arrays,
    )  # fmt: skip


def batches(config, data):
    """(rows, tries) of the samples."""
    align = trie_alignment(config)
    length = 96 if align == 1 else 512
    tries = packing.pack_tries(data, length, rows=2, align=align, apart=trie_lengths(config))
    assert tries.trie is not None
    return packing.pack(data, length, rows=4), tries


def by_sample(x_MBT, batch) -> dict[int, np.ndarray]:
    """The values at the tokens of each sample."""
    x_MBT, sample_MBJ, segment_MBT = (np.asarray(x) for x in (x_MBT, batch.sample_BJ, batch.segment_BT))
    places = np.argwhere(sample_MBJ >= 0)
    return {int(sample_MBJ[m, b, j]): x_MBT[m, b, segment_MBT[m, b] == j + 1] for m, b, j in places}
