"""M-RoPE (arXiv:2409.12191): positions of tokens in time, height and width (numpy)."""

from collections.abc import Sequence

import numpy as np

from .media import Media
from .tower import Tower


def standing(tokens, tower: Tower, sampled=None) -> np.ndarray:
    """Which tokens stand for a feature of an image or video: those with their ids, unless a policy sampled them."""
    stands = np.isin(tokens, (tower.image, tower.video))
    return stands if sampled is None else stands & ~np.asarray(sampled)


def positions(tokens, media: Sequence[Media], tower: Tower, sampled=None) -> tuple[np.ndarray, int]:
    """(i32[n, 3], delta) of a sequence: a token decoded at index i >= n has the position i + delta on all three axes.

    Text goes on by one on all axes. The features of an image have the next position in time, and from it on their row
    and column; the text after them goes on behind the longer of the two.

    Args:
      tokens: i32[n]; features of images and videos are `tower.image` and `tower.video`.
      media: in the order of the tokens.
      sampled: bool[n], tokens that are text whatever their id, because a policy sampled them; None = none.

    Raises:
      ValueError: the tokens are not those of the images.
    """
    tokens = np.asarray(tokens)
    stands = standing(tokens, tower, sampled)
    out = np.zeros((len(tokens), 3), np.int32)
    left, frames = list(media), 0  # frames of the first that are still to come
    at = start = 0  # in tokens and in positions
    while at < len(tokens):
        if not stands[at]:
            n = int(np.argmax(stands[at:])) or len(tokens) - at
            out[at : at + n] = start + np.arange(n)[:, None]
            at, start = at + n, start + n
            continue
        if not left:
            raise _mismatch(stands, media, tower)
        (t, h, w), video = left[0].grid, tokens[at] == tower.video
        apart = video and tower.frames_apart
        frames = (frames or t) - (1 if apart else t)
        h, w, t = h // tower.merge, w // tower.merge, 1 if apart else t
        n = t * h * w
        here = slice(at, at + n)
        if len(tokens) < at + n or not (stands[here] & (tokens[here] == tokens[at])).all():
            raise _mismatch(stands, media, tower)
        time, row, column = np.mgrid[:t, :h, :w].reshape(3, -1)
        if video and not apart:
            step = np.float32(tower.per_second) * np.float32(left[0].seconds)
            time = (time.astype(np.float32) * step).astype(np.int32)
        out[here] = start + np.stack([time, row, column], -1)
        at, start = at + n, start + max(h, w)
        left = left if frames else left[1:]
    if left:
        raise _mismatch(stands, media, tower)
    return out, int(out.max(initial=-1)) + 1 - len(tokens)


def _mismatch(stands, media: Sequence[Media], tower: Tower) -> ValueError:
    grids = [tuple(map(int, one.grid)) for one in media]
    return ValueError(
        f"images: a grid (t, h, w) needs t h w / {tower.unit} tokens {tower.image} or {tower.video} in its place, got "
        f"{int(stands.sum())} of them for the grids {grids!r:.200}"
    )
