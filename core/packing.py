"""Sequence packing: several samples share a row, separated by segment ids (numpy; the only place that shifts targets).

Reads the fields of a sample by name and imports no type.
"""

from collections.abc import Sequence

import jax
import numpy as np

from . import fitting, teacher_rows, trie_packing
from .batch import FINISH, Batch

FULLEST = 4  # a row of tries holds at most this many times the samples' tokens of an average row
SAVED = 0.2  # share of the samples' tokens that tries must save; below it rows are as fast


def pack(
    samples: Sequence, length: int, *, rows: int = 8, components: Sequence[str] = (),
    shapes: Sequence[fitting.Shape] = (),
) -> Batch:  # fmt: skip
    """Packs samples first-fit-decreasing into a Batch [M, B, T] of M microbatches of B = `rows` rows of T = `length`.

    Samples with the same `pair` (at least 0) are placed in the same microbatch, in any of its rows.
    M is rounded up to 2^k or 3 * 2^k with empty microbatches at the end, and J to `slots`, so that few shapes compile;
    `used(batch)` is the number of microbatches that are not empty.

    If samples have a `teacher_prompt`, `input` has the rows that their teacher reads (`teacher_rows`). A sample then
    takes as much of a row as the longer of the two needs.

    Args:
      rows: rows per microbatch; must be a multiple of the devices along the batch axes.
      components: names of the reward components to include.
      shapes: smaller (T, B), as of `fitting.shapes`: the batch takes the one that computes fewest positions.

    Raises:
      ValueError: no samples, rows or length, a sample longer than `length`, a pair too large for a microbatch, a sample
        that lacks a component, samples whose extra arrays differ in name, kind, type or shape, or some with images
        and some with a `teacher_prompt`.
    """
    sizes = _checked(samples, length, rows, components)
    pairs, given = [s.pair for s in samples], [(length, rows), *shapes]
    places = fitting.place(sizes[:, None], pairs, given, range(len(samples)))
    shape = places.T, slots(int(np.bincount(places.row).max()))
    if not teacher_rows.given(samples):
        return _filled(samples, places.row, places.start, places, shape, components)
    start = teacher_rows.closed_up(places.row, places.start, [len(s.tokens) for s in samples])
    batch = _filled(samples, places.row, start, places, shape, components)
    segment_BT = batch.segment_BT.reshape(-1, places.T)
    made = teacher_rows.arrange(samples, segment_BT, places.row, start)
    return batch.replace(input=batch.input | {name: x.reshape(batch.token_BT.shape) for name, x in made.items()})


def pack_tries(
    samples: Sequence, length: int, *, rows: int = 8, components: Sequence[str] = (),
    shapes: Sequence[fitting.Shape] = (), align: int = 1, apart: Sequence[int] = (),
) -> Batch:  # fmt: skip
    """Packs samples as `pack`, but the tokens that they share are computed once: a Batch with a `trie` [M, B, T].

    Samples share their first tokens while these and the values of all extra arrays there but `observation` and `state`
    agree to the bit. All fields but `trie` are over flattened samples: rows as `pack` makes them, of length A, T times
    a power of two. A trie longer than T is cut (`trie_packing.grow`), and so is one whose samples are so alike that A
    would become too large for the other rows (`FULLEST`). Rows are filled with tries as `pack` fills them with samples.
    Samples of a pair are in the same microbatch.

    It returns what `pack` returns where tries save less than `SAVED` of the tokens, samples have images or a
    `teacher_prompt`, or a pair, with the padding after its nodes, does not fit into a microbatch.

    Args:
      length: T; rounded up to a multiple of `align` if need be.
      rows, components, shapes: as in `pack`; lengths of shapes are multiples of `align`.
      align: every node (tokens up to a fork, or to the end of a sample) begins at a multiple of it.
      apart: samples of more than one of these numbers of tokens share nothing with samples of fewer or as many
        (`models.trie_lengths`).

    Raises:
      ValueError: as `pack`; align below 1.
    """
    if align < 1:
        raise ValueError(f"pack: align must be at least 1, got {align}")
    sizes = _checked(samples, length, rows, components)
    T = trie_packing.aligned(length, align)
    alone = teacher_rows.given(samples) or any(s.images for s in samples)
    trees, most = ([], 0) if alone else _grown(samples, sizes, T, align, apart)
    widths, pairs = np.array([tree.size for tree in trees]), np.array([tree.pair for tree in trees])
    split = [widths[pairs == pair].sum() for pair in np.unique(pairs[pairs >= 0])]  # pairs that a trie does not hold
    if not trees or widths.sum() > (1 - SAVED) * sizes.sum() or any(width > rows * T for width in split):
        return pack(samples, length, rows=rows, components=components, shapes=shapes)
    both = np.stack([widths, [tree.tokens for tree in trees]], 1)
    named = [tree.branches[0].sample for tree in trees]
    places = fitting.place(both, pairs, [(T, rows), *shapes], named, most)
    row, start = places.row, places.start
    row_of, start_of, filled = np.zeros(len(samples), int), np.zeros(len(samples), int), np.zeros(places.rows, int)
    for t in np.lexsort((start, row)):
        for branch in trees[t].branches:
            row_of[branch.sample], start_of[branch.sample] = row[t], filled[row[t]]
            filled[row[t]] += branch.stop
    shape = flattened(int(filled.max()), int(np.bincount(row_of).max()), places.T)
    batch = _filled(samples, row_of, start_of, places, shape, components)
    M = len(batch.token_BT)
    trie = trie_packing.places(trees, row, start, start_of, (M * places.B, places.T, shape[0]), align, apart)
    return batch.replace(trie=jax.tree.map(lambda x: x.reshape(M, places.B, -1), trie))


def _checked(samples: Sequence, length: int, rows: int, components: Sequence[str]) -> np.ndarray:
    """The samples' lengths, each with its teacher's prompt if it is longer so."""
    if rows < 1:
        raise ValueError(f"pack: rows must be at least 1, got {rows}")
    if not isinstance(length, int | np.integer) or length < 1:
        raise ValueError(f"pack: length must be a whole number of at least 1, got {length!r}; `shapes` may be several")
    if not len(samples):
        raise ValueError("pack: at least one sample is needed, got none")
    for i, s in enumerate(samples):
        for name in components:
            if name not in s.components:
                raise ValueError(
                    f"pack: every sample needs the component {name}, got {sorted(s.components)} in sample {i}"
                )
        if (own := _forms(s)) != (first := _forms(samples[0])):
            raise ValueError(
                f"pack: all samples need the same arrays, got {sorted(own.items())} in sample {i} "
                f"and {sorted(first.items())} in sample 0"
            )
    if teacher_rows.given(samples) and any(s.images for s in samples):
        raise ValueError("pack: samples must have no images where some have a teacher_prompt, which is text, got both")
    if teacher_rows.given(samples) and "sampling_mask" in first:
        raise ValueError("pack: samples must have no sampling_mask where some have a teacher_prompt, got both")
    sizes = np.array([max(len(s.tokens), len(s.teacher_tokens)) for s in samples])
    if sizes.max() > length:
        i = int(sizes.argmax())
        raise ValueError(
            f"pack: every sample must fit in a row of {length} tokens, got {sizes[i]} in sample {i}; "
            "raise length or drop it"
        )
    return sizes


def _forms(sample) -> dict[str, str]:
    """Kind, type and shape of a sample's arrays, but for the tokens' axis; floats are packed as the widest of them."""
    type_of = lambda x: "float" if x.dtype.kind == "f" else str(x.dtype)
    return {name: " ".join([kind, type_of(x), *map(str, x.shape[1:])]) for name, (kind, x) in sample.arrays.items()}


def _filled(
    samples: Sequence, row: np.ndarray, start: np.ndarray, places: fitting.Places, shape: tuple[int, int],
    components: Sequence[str],
) -> Batch:  # fmt: skip
    """The Batch [M, B, T] of samples in rows of a shape (T, J), each from its start on."""
    (T, J), B, M, slot = shape, places.B, bucket(-(-places.rows // places.B)), _slot_of(row, start)

    def empty(width, value, dtype, tail=()):
        return np.full((M * B, width, *tail), value, dtype)

    token, position, index, segment, target = (empty(T, 0, np.int32) for _ in range(5))
    mask, (logp, weight, rewarded) = empty(T, False, bool), (empty(T, 0, np.float32) for _ in range(3))
    version = empty(T, -1, np.int32)
    reward, seg_weight = empty(J, np.nan, np.float32), empty(J, 0, np.float32)
    group, prompt, sample, rollout, pair, finish = (empty(J, -1, np.int32) for _ in range(6))
    label, component = empty(J, np.nan, np.float32), {name: empty(J, np.nan, np.float32) for name in components}
    seg_length = empty(J, 0, np.int32)
    extra: dict = {"input": {}, "target": {}}
    dtypes = trie_packing.dtypes(samples)
    for name, (kind, x) in samples[0].arrays.items():
        extra[kind][name] = empty(T, 0, dtypes[name], x.shape[1:])
    number = {name: _dense([getattr(s, name) for s in samples]) for name in ("group", "prompt", "rollout")}
    pairs = _dense([s.pair for s in samples])

    for i, s in enumerate(samples):
        b, j, at, n = row[i], slot[i], start[i], len(s.tokens)
        here, ahead = slice(at, at + n), slice(at, at + n - 1)
        token[b, here] = s.tokens
        position[b, here] = index[b, here] = np.arange(n)
        segment[b, here] = j + 1
        target[b, ahead], mask[b, ahead] = s.tokens[1:], s.mask[1:]
        logp[b, ahead], version[b, ahead] = s.logp[1:], s.version[1:]
        weight[b, ahead] = s.mask[1:] * s.weight
        reward[b, j], seg_weight[b, j], seg_length[b, j] = s.reward, s.weight, n
        sample[b, j] = i
        group[b, j], prompt[b, j] = number["group"][i], number["prompt"][i]
        rollout[b, j], finish[b, j] = number["rollout"][i], FINISH.index(s.finish)
        pair[b, j], label[b, j] = pairs[i], s.label
        for learnt, value in zip(_credited(s), (value for _, value in s.rewards), strict=True):
            rewarded[b, at + learnt - 1] += value
        for name in components:
            component[name][b, j] = s.components[name]
        for name, (kind, x) in s.arrays.items():
            extra[kind][name][b, here if kind == "input" else ahead] = x if kind == "input" else x[1:]

    batch = Batch(
        token_BT=token, position_BT=position, index_BT=index, segment_BT=segment,
        target_BT=target, mask_BT=mask, logp_BT=logp, version_BT=version, weight_BT=weight,
        reward_BT=rewarded, reward_BJ=reward, finish_BJ=finish, group_BJ=group, prompt_BJ=prompt, sample_BJ=sample,
        rollout_BJ=rollout, length_BJ=seg_length, weight_BJ=seg_weight, pair_BJ=pair, label_BJ=label,
        component=component, input=extra["input"], target=extra["target"],
    )  # fmt: skip
    return jax.tree.map(lambda x: x.reshape(M, B, *x.shape[1:]), batch)


def flattened(tokens: int, count: int, T: int) -> tuple[int, int]:
    """(A, J) of rows of tries, given the most tokens and samples of a row: coarser steps than those of rows without
    tries, since both vary much from batch to batch, and what they cost is little beside a model's places."""
    return T * power(-(-tokens // T)), slots(count)


def slots(count: int) -> int:
    """J of rows with at most `count` samples: 1, 16, 64, 256, ..."""
    return power(count, 16 if count <= 16 else 4)


def used(batch: Batch):
    """Number of microbatches of a Batch [M, B, T] that hold tokens; the empty ones come last."""
    return (batch.segment_BT > 0).any((-2, -1)).sum()


def trie_ratio(*batches: Batch) -> float:
    """Tokens that are computed over those of the samples: 1 without tries."""
    return sum(map(computed, batches)) / sum(int(np.sum(batch.segment_BT > 0)) for batch in batches)


def filled(*batches: Batch) -> float:
    """Tokens that are computed over the positions of the microbatches in use."""
    places = [batch.token_BT if batch.trie is None else batch.trie.first_BT for batch in batches]
    positions = sum(int(used(batch)) * x[0].size for batch, x in zip(batches, places, strict=True))
    return sum(map(computed, batches)) / positions


def computed(batch: Batch) -> int:
    """Tokens that a model computes: those of samples, shared ones once if there is a trie."""
    return int(np.sum(batch.segment_BT > 0 if batch.trie is None else batch.trie.first_BT >= 0))


def unpack(x_MBT, batch: Batch, samples: Sequence) -> list[np.ndarray]:
    """Maps `target` values back to the samples' tokens: f[n] per sample, 0 for its first token."""
    x, segment = np.asarray(x_MBT), np.asarray(batch.segment_BT)
    out = [np.zeros(len(s.tokens), x.dtype) for s in samples]
    for m, b, j in np.argwhere(np.asarray(batch.sample_BJ) >= 0):
        i = int(batch.sample_BJ[m, b, j])
        out[i][1:] = x[m, b, segment[m, b] == j + 1][:-1]
    return out


def _grown(samples: Sequence, sizes: np.ndarray, T: int, align: int, apart: Sequence[int]) -> tuple[list, int]:
    """Tries of at most T places, and the tokens of samples that a row of them may hold.

    All rows have room for as many tokens as the fullest one, which is therefore kept from holding `FULLEST` times more
    of them than rows do on average. Tries with more are cut, which adds less than a quarter to all places.
    """
    trees = trie_packing.grow(samples, T, align, apart=apart)
    most = FULLEST * max(T, int(T * sizes.sum() / sum(tree.size for tree in trees)))
    if max(tree.tokens for tree in trees) > most:
        trees = trie_packing.grow(samples, T, align, most, apart)
    return trees, max(most, *(tree.tokens for tree in trees))


def _slot_of(row: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Number of each sample in its row."""
    slot, count = np.zeros(len(row), int), np.zeros(int(row.max()) + 1, int)
    for i in np.lexsort((start, row)):
        slot[i] = count[row[i]]
        count[row[i]] += 1
    return slot


def bucket(n):
    """The smallest 2^k or 3 * 2^k that is at least n."""
    size = power(n)
    return size * 3 // 4 if size >= 4 and size * 3 // 4 >= n else size


def power(n: int, base: int = 2) -> int:
    """The smallest power of the base that is at least n."""
    size = 1
    while size < n:
        size *= base
    return size


def _dense(ids):
    """Renumbers ids from 0 in order of first appearance; negative ids are kept."""
    seen: dict = {}
    return [i if i < 0 else seen.setdefault(i, len(seen)) for i in ids]


def _credited(sample) -> list[int]:
    """Index of the token that each reward is credited to: the last learnt one up to the reward's, else the first learnt
    one; the reward's own token in samples without learnt tokens."""
    learnt = np.flatnonzero(sample.mask[1:]) + 1
    if not len(learnt):
        return [max(index, 1) for index, _ in sample.rewards]
    return [int(learnt[max(np.searchsorted(learnt, index, side="right") - 1, 0)]) for index, _ in sample.rewards]
