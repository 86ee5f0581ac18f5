"""The places at which a model computes the tokens of a batch: those of its rows, in the order of a ring over cp, or of
tries."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from ..core import trie as tries
from ..core.batch import Batch
from . import context, rules
from . import mesh as meshes


@dataclass(frozen=True)
class TokenLayout:
    """Functions that move arrays, [B, T, ...], between the tokens of a batch and a model's places.

    A prediction has a place, too: in rows that of the token that predicts, as in `Batch`; in tries, where several
    tokens may follow one, that of the predicted token.

    Attributes:
      inputs: input arrays to the places of their tokens. `inputs(x, fill)` has `fill` at the padding of tries.
      targets: target arrays to the places of predictions; `targets(x, fill)` likewise.
      learnt: the samples' mask to the places of predictions, bool: those that any sample learns.
      predicting: hidden states to the places of what they predict.
      back: values at the places of tokens to the batch's tokens.
      predictions: values at the places of predictions to the batch's target arrays.
      ahead: target arrays, so that `targets` puts a prediction where `predicting` moves what was computed at the place
        of the prediction before it: drafts are made there. In rows each is one token earlier, in tries as it was.
      behind: undoes `ahead` for what `predictions` returns.
    """

    inputs: Callable
    targets: Callable
    learnt: Callable
    predicting: Callable
    back: Callable
    predictions: Callable
    ahead: Callable
    behind: Callable


def of(batch: Batch, method: context.Method) -> TokenLayout:
    """The layout of a batch.

    Raises:
      ValueError: positions of tries are sharded over cp by the method "ring".
    """
    if batch.trie is None:
        into, back = context.arrange(method, batch.token_BT.shape[1])
        same = lambda x_BT, fill=0: into(x_BT)
        plain = lambda x_BT: x_BT
        ahead, behind = (lambda x_BT, by=by: jnp.roll(x_BT, by, 1) for by in (-1, 1))
        return TokenLayout(same, same, lambda mask_BT: into(mask_BT) > 0, plain, back, back, ahead=ahead, behind=behind)
    if method == "ring" and meshes.size("cp") > 1:
        raise ValueError(
            "tries over cp need the method gather or ulysses, got ring, whose order of positions suits rows"
        )
    between = lambda fn: lambda x, *fill: rules.constrain(fn(batch.trie, x, *fill), "batch seq")
    return TokenLayout(
        inputs=between(tries.to_places),
        targets=between(tries.targets_to_places),
        learnt=between(tries.learnt_places),
        predicting=between(tries.from_parents),
        back=between(tries.to_samples),
        predictions=between(tries.predictions_to_samples),
        ahead=lambda x_BT: x_BT,
        behind=lambda x_BT: x_BT,
    )
