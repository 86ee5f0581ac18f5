"""The compiled programs of images: features of their patches, and the places of these in chunks of prompts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....models import transformer as models
from ....models import vision
from ....models.vision import Tower
from . import pool


class Part(NamedTuple):
    """Features of an image in a row of chunks: `size` of them from the `first` on, for tokens from `at` on."""

    name: str
    row: int
    at: int
    first: int
    size: int


class Views(NamedTuple):
    """What the tokens of chunks see of images, in host memory.

    Attributes:
      feature_RT: index of the token in its row if it stands for a feature; -1 = it does not.
      position_RT3: for rope, in time, height and width.
      parts: which features these are.
    """

    feature_RT: np.ndarray
    position_RT3: np.ndarray
    parts: Sequence[Part]


class Seen(NamedTuple):
    """`Views` on the devices, for `prefill`.

    Attributes:
      feature_NRTD: by token, the features that replace embeddings, then those that are added behind each of the first
        N - 1 layers.
      feature_RT: as in `Views`.
      position_3RT: for rope, in time, height and width.
    """

    feature_NRTD: Any
    feature_RT: Any
    position_3RT: Any


@functools.partial(jax.jit, static_argnames=("tower",))
def encode(params, patches: Mapping[str, Any], *, tower: Tower):
    """Features of an image in the order of its tokens, [N, U, D], the first as in `Seen`; the last may not count.

    Each image is encoded by itself, so that its bits depend on nothing else.

    Args:
      params: the tower's.
      patches: as `Picture.take`.
    """
    arrays = (patches.get(name) for name in ("patch", "patch_frame", "patch_place", "patch_window"))
    run = models.Run(remat="none")
    merged_BUD, tapped_NBUD = vision.features(params, *arrays, tower=tower, table=vision.table(tower), run=run)
    feature_NUD = jnp.concatenate([merged_BUD, tapped_NBUD[:, 0]])
    return pool.replicated(feature_NUD[:, patches["order"]])


def seen(views: Views, features: Mapping[str, Any], tower: Tower, dtype) -> Seen:
    """Puts encoded features, by name, to the tokens that stand for them."""
    made_NRTD = _empty(1 + len(tower.taps), *views.feature_RT.shape, tower.out, dtype)
    for name, *where in views.parts:
        made_NRTD = _put(made_NRTD, features[name], *where)
    return Seen(made_NRTD, views.feature_RT, np.moveaxis(views.position_RT3, 2, 0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _empty(N: int, R: int, T: int, D: int, dtype):
    return pool.replicated(jnp.zeros((N, R, T, D), dtype))


@functools.partial(jax.jit, donate_argnums=0)
def _put(made_NRTD, feature_NUD, row, at, first, size):
    index_T = jnp.arange(made_NRTD.shape[2]) - at
    new_NTD = jnp.take(feature_NUD, first + index_T, axis=1, mode="clip")
    own_T = (index_T >= 0) & (index_T < size)
    return pool.replicated(made_NRTD.at[:, row].set(jnp.where(own_T[None, :, None], new_NTD, made_NRTD[:, row])))
