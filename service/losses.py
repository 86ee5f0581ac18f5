"""The losses of the API by name: which function of `core.token_losses`, which inputs, and which options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core import token_losses
from ..core.losses import PerToken


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
      objective: the sum over tokens; reads its options from `batch.scalars`, so that another value compiles nothing.
      needs, takes: inputs of a datum, beside its targets, that must be there, and that may be.
      options: names in the config -> defaults; None = there is none.
    """

    objective: PerToken
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    options: Mapping[str, float | None]


Options = Mapping[str, tuple[str, float | None]]  # argument of the function -> name in the config, default


def _loss(function: Callable, needs: tuple[str, ...], takes: tuple[str, ...], options: Options) -> Loss:
    def summed(logp_BT, batch):
        given = {argument: batch.scalars[name] for argument, (name, _) in options.items()}
        return function(logp_BT, batch, **given)

    return Loss(PerToken(summed, reduce="sum"), needs, takes, dict(options.values()))


_RATIO = ("logprobs", "advantages")
_BOUNDS: Options = {"low": ("clip_low_threshold", 0.8), "high": ("clip_high_threshold", 1.2)}
_WIDE: Options = {"low": ("clip_low_threshold", 0.0), "high": ("clip_high_threshold", 4.0)}
LOSSES: dict[str, Loss] = {
    "cross_entropy": _loss(token_losses.cross_entropy, (), ("weights",), {}),
    "importance_sampling": _loss(token_losses.importance_sampling, _RATIO, (), {}),
    "ppo": _loss(token_losses.ppo, _RATIO, (), _BOUNDS),
    "cispo": _loss(token_losses.cispo, _RATIO, (), _WIDE),
    "dro": _loss(token_losses.dro, _RATIO, (), {"beta": ("beta", None)}),
    "gspo": _loss(token_losses.gspo, (*_RATIO, "sequence_ratio_mask"), (), _BOUNDS),
}
REFUSED = {"stable_reinforce": "its formula is not published", "custom": "use forward_backward_custom's two passes"}


def loss(name: str) -> Loss:
    """Raises ValueError for a name that is none of LOSSES."""
    if name not in LOSSES:
        why = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise ValueError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r:.80}{why}")
    return LOSSES[name]


def options(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """The options of a loss, with defaults.

    Raises:
      ValueError: it has no such option, one is not finite, or has no default and is missing.
    """
    known = loss(name).options
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"loss_fn_config: {name} has {', '.join(known) or 'no options'}, got {key!r:.80}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config: {key} must be a finite number, got {value!r:.80}")
    chosen = {**known, **given}
    if missing := [key for key, value in chosen.items() if value is None]:
        raise ValueError(f"loss_fn_config: {name} needs {missing[0]}, which has no default; give a number")
    return chosen  # type: ignore[return-value]
