"""How a model sees the tokens of a batch: its rows as they are, in the order of a ring over cp, or tries."""

from collections.abc import Callable
from dataclasses import dataclass

from ..core import trie as tries
from ..core.batch import Batch
from . import context, rules


@dataclass(frozen=True)
class TokenLayout:
    """Functions between arrays over the tokens of a batch, [B, T, ...], and over the model's places.

    What predicts a token and what is predicted are at one place: in rows that of the token before, as in `Batch`; in
    tries, where several tokens may follow another, that of the predicted token itself.

    Attributes:
      inputs: input arrays to the places of their tokens. `inputs(x, fill)` has `fill` on the padding of tries.
      targets: target arrays to the places where tokens are predicted, likewise.
      predicting: hidden states at their own places to the places where they predict.
      back: values at the places of tokens to the batch's tokens.
      predictions: values at the places where tokens are predicted to the batch's target arrays.
    """

    inputs: Callable
    targets: Callable
    predicting: Callable
    back: Callable
    predictions: Callable


def of(batch: Batch, method: context.Method) -> TokenLayout:
    """The layout of a batch.

    Raises:
      ValueError: the method is "ring", and positions of tries are sharded over cp.
    """
    if batch.trie is None:
        into, back = context.arrange(method, batch.token_BT.shape[1])
        same = lambda x_BT, fill=0: into(x_BT)
        return TokenLayout(same, same, lambda x_BT: x_BT, back, back)
    between = lambda fn: lambda x, *fill: rules.constrain(fn(batch.trie, x, *fill), "batch seq")
    return TokenLayout(
        between(tries.to_places), between(tries.predicted), between(tries.behind_parents), between(tries.to_samples),
        between(tries.predictions),
    )  # fmt: skip
