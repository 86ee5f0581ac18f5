"""Images and videos of packed rows as arrays for the device: their patches, and which token stands for which feature
(numpy)."""

import math
from collections.abc import Sequence

import numpy as np

from ...core.batch import Batch
from ...core.packing import bucket
from .media import Media, check
from .positions import positions, standing
from .tower import Tower

PER_TOKEN = "feature", "axis_position"  # of the arrays that `arrange` makes, those with an entry per token
NAMES = "patch", "patch_frame", "patch_place", "patch_window", *PER_TOKEN


def attach(
    batch: Batch, media: Sequence[Sequence[Media]], tower: Tower, patches: int | None = None, dtype="float32"
) -> Batch:
    """A packed Batch [M, B, T] with the images of its samples among its inputs.

    Tokens that a policy sampled stand for no feature, whatever their id.

    Args:
      media: of each packed sample, in the order of its tokens.
      patches, dtype: as `arrange`.

    Raises:
      ValueError: as `arrange`.
    """
    T, J = batch.token_BT.shape[-1], batch.sample_BJ.shape[-1]
    rows = [
        [one for sample in row if sample >= 0 for one in media[sample]]
        for row in np.asarray(batch.sample_BJ).reshape(-1, J)
    ]
    version_BT = np.asarray(batch.version_BT).reshape(-1, T)
    sampled_BT = np.pad(version_BT[:, :-1] >= 0, ((0, 0), (1, 0)))  # a token's version is with the one before it
    tokens = batch.token_BT.reshape(-1, T), batch.segment_BT.reshape(-1, T)
    made = arrange(*tokens, rows, tower, patches, sampled_BT, dtype)
    front = batch.token_BT.shape[:-1]
    return batch.replace(input={**batch.input, **{name: x.reshape(*front, *x.shape[1:]) for name, x in made.items()}})


def arrange(
    token_BT, segment_BT, media: Sequence[Sequence[Media]], tower: Tower, patches: int | None = None, sampled_BT=None,
    dtype="float32",
) -> dict:  # fmt: skip
    """The arrays of packed rows with images, for `Batch.input` and `models.forward`.

    Patches of windows are side by side, so that features are not in the order of their tokens; `feature` says which is
    whose.

    Args:
      media: of each row, in the order of its tokens.
      patches: P, of each row; None = the next 2^k or 3 * 2^k features that hold those of every row.
      sampled_BT: tokens that a policy sampled, which stand for no feature; None = none.
      dtype: of the pixels; the tower casts them to that of the computation.

    Returns:
      patch: [B, P, F] pixels.
      patch_frame: i32[B, P] number of the frame in its row, from 1; 0 = padding.
      patch_place: i32[B, P, 4] row and column in the frame's grid, and rows and columns of the grid.
      patch_window: i32[B, P] number of the attention window in its row, from 1; 0 = padding; without windows, none.
      feature: i32[B, T] which of the row's P / merge^2 features replaces the token's embedding; -1 = none.
      axis_position: i32[B, T, 3] positions in time, height and width, see `positions`.

    Raises:
      ValueError: a row has more patches than fit, patches do not match their grid, or tokens do not match the images.
    """
    token_BT, segment_BT = np.asarray(token_BT), np.asarray(segment_BT)
    stands_BT = standing(token_BT, tower, sampled_BT) & (segment_BT > 0)
    (B, T), unit = token_BT.shape, tower.unit
    if len(media) != B:
        raise ValueError(f"images: {B} rows need as many lists of images, got {len(media)}")
    counts = [sum(check(one, tower) for one in row) for row in media]
    P = bucket(max(-(-max(counts) // unit), 1)) * unit if patches is None else patches
    if P % unit:
        raise ValueError(f"images: patches must be a multiple of {unit}, got {P}")
    if max(counts) > P:
        raise ValueError(
            f"images: rows of {P} patches must hold those of every row's images, at most {max(counts)} here; raise "
            "patches, or pack fewer images into a row"
        )
    out: dict[str, np.ndarray] = {
        "patch": np.zeros((B, P, tower.pixels), dtype),
        "patch_frame": np.zeros((B, P), np.int32),
        "patch_place": np.zeros((B, P, 4), np.int32),
        "feature": np.full((B, T), -1, np.int32),
        "axis_position": np.zeros((B, T, 3), np.int32),
    }
    if tower.window is not None:
        out["patch_window"] = np.zeros((B, P), np.int32)
    for b, row in enumerate(media):
        features = _place_patches(out, b, row, tower)
        _place_tokens(out, b, token_BT[b], segment_BT[b], stands_BT[b], row, features, tower)
    return out


def given(inputs: dict, tower: Tower | None) -> dict:
    """The arrays of images among a batch's inputs; {} without any.

    Raises:
      ValueError: there are some, and the model has no tower; or some are missing.
    """
    found = {name: inputs[name] for name in NAMES if name in inputs}
    if found and tower is None:
        raise ValueError(
            "batch: images need a model with a vision tower, got one of text alone; load it with "
            "hf.load(path, vision=True)"
        )
    needed = [name for name in NAMES if name != "patch_window" or (tower and tower.window)]
    if found and (missing := [name for name in needed if name not in found]):
        raise ValueError(f"batch: images need all arrays of vision.arrange, got none for {', '.join(missing)}")
    return found


def _place_patches(out: dict, b: int, row: Sequence[Media], tower: Tower) -> np.ndarray:
    """Fills in what belongs to patches; where each feature of the row is, in the order of its tokens."""
    start = frames = windows = 0
    found = [np.zeros(0, np.int64)]
    for one in row:
        t, h, w = one.grid
        end, each = start + t * h * w, np.arange(t)[:, None]
        place, window, order = _frame(h, w, tower)
        out["patch"][b, start:end] = np.asarray(one.patches).reshape(t, h * w, -1)[:, order].reshape(end - start, -1)
        out["patch_place"][b, start:end] = np.tile(place[order], (t, 1))
        out["patch_frame"][b, start:end] = np.repeat(each + frames + 1, h * w)
        if tower.window is not None:
            count = window.max() + 1
            out["patch_window"][b, start:end] = (window[order] + each * count + windows + 1).reshape(-1)
            windows += t * count
        features = np.argsort(order[:: tower.unit]) + each * (h * w // tower.unit)
        found.append(features.reshape(-1) + start // tower.unit)
        start, frames = end, frames + t
    return np.concatenate(found)


def _frame(h: int, w: int, tower: Tower) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the patches of a frame, in the processor's order: (places [N, 4], windows [N]), and their order by window."""
    m = tower.merge
    row, column = np.mgrid[:h, :w]
    merged = lambda x: x.reshape(h // m, m, w // m, m).swapaxes(1, 2).reshape(-1)  # features side by side
    row, column = merged(row), merged(column)
    place = np.stack([row, column, np.full_like(row, h), np.full_like(row, w)], -1)
    if tower.window is None:
        return place, np.zeros_like(row), np.arange(h * w)
    window = row // tower.window * -(-w // tower.window) + column // tower.window
    return place, window, np.argsort(window, kind="stable")


def _place_tokens(out: dict, b: int, token_T, segment_T, stands_T, row: Sequence[Media], features, tower) -> None:
    """Fills in what belongs to tokens, segment by segment."""
    if stands_T.sum() != len(features):
        raise ValueError(
            f"images: each feature needs a token {tower.image} or {tower.video}, got {len(features)} features and "
            f"{int(stands_T.sum())} tokens in row {b}"
        )
    out["feature"][b, stands_T] = features
    left = list(row)
    for segment in np.unique(segment_T[segment_T > 0]):
        here = segment_T == segment
        own: list[Media] = []
        while sum(math.prod(one.grid) for one in own) < (here & stands_T).sum() * tower.unit:
            own.append(left.pop(0))
        out["axis_position"][b, here] = positions(token_T[here], own, tower, ~stands_T[here])[0]
