"""Features of images among the tokens of a text model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...core.shapes import shaped
from .table import table
from .tower import Tower, features


@dataclass(frozen=True)
class Seen:
    """What a text model gets of images.

    Attributes:
      merged_BUD: features, which replace the embeddings of tokens.
      tapped_NBUD: features that are added behind each of the first N layers.
      feature_BT: which of the U features belongs to a token; -1 = none.
      position_3BT: positions in time, height and width.
    """

    merged_BUD: Any
    tapped_NBUD: Any
    feature_BT: Any
    position_3BT: Any


def see(params, images: Mapping[str, Any], tower: Tower, run: Any) -> Seen:
    """Encodes the images of packed rows.

    Args:
      params: the tower's.
      images: the arrays of `patches.arrange`.
      run: a `models.Run`.
    """
    arrays = (images.get(name) for name in ("patch", "patch_frame", "patch_place", "patch_window"))
    made = features(params, *arrays, tower=tower, table=table(tower), run=run)
    merged_BUD, tapped_NBUD = made if tower.trained else jax.lax.stop_gradient(made)
    return Seen(merged_BUD, tapped_NBUD, images["feature"], jnp.moveaxis(images["axis_position"], -1, 0))


def over_frozen(score: Callable) -> Callable:
    """Turns `score(params, batch, *more)` into `f(params, batch, tower, *more)`, for `step.make_step` and the like: the
    weights of a frozen tower are an argument of their own and get no gradient."""
    return lambda params, batch, tower, *more: score({**params, "vision": tower}, batch, *more)


@shaped
def replaced(x_BTD, feature_BUD, feature_BT):
    """The embeddings, with features in place of those of the tokens that stand for one."""
    return jnp.where(feature_BT[..., None] >= 0, _by_token(feature_BUD, feature_BT).astype(x_BTD.dtype), x_BTD)


@shaped
def added(x_BTD, feature_BUD, feature_BT):
    """The hidden states, with features added to those of the tokens that stand for one."""
    return x_BTD + jnp.where(feature_BT[..., None] >= 0, _by_token(feature_BUD, feature_BT).astype(x_BTD.dtype), 0)


def _by_token(feature_BUD, feature_BT):
    return jnp.take_along_axis(feature_BUD, jnp.maximum(feature_BT, 0)[..., None], axis=1)
