"""A model's functions as functions of torch tensors, which torch differentiates by JAX's gradients.

Memory is shared where that is safe. Parameters are read in place: a call has finished with them when it returns, and
torch refuses a backward pass after they were changed. Results belong to torch: nothing of JAX refers to them any more,
so optimisers and clipping may change gradients in place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import torch

PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}  # of torch -> of JAX
ALIGNMENT = 64  # bytes; JAX copies other memory

Shape = tuple[int, ...]


def apply(function: Callable, shapes: Sequence[Shape], tensors: Sequence[torch.Tensor], inputs: Any) -> torch.Tensor:
    """function(arrays, inputs), differentiable by the tensors that require gradients.

    Compiled once for each function, shapes, and arrays that have such tensors; others are not differentiated.

    Args:
      function: hashable; equal ones share what is compiled.
      shapes: for each array the leading axes along which tensors are stacked; the tensors are in this order.
      inputs: a pytree of arrays.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Function.apply(function, shapes, inputs, *tensors)
    return owned(_programs(function).value(arrays(shapes, tensors), inputs))


def arrays(shapes: Sequence[Shape], tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
    """The tensors as arrays, [*shape, ...] for each shape: of the same memory where that is `laid_out`, else copies.

    Raises:
      ValueError: they are on another kind of device than JAX computes on, in a dtype that JAX does not have, or those
        of one array in several.
    """
    return [_stacked(shape, group) for shape, group in zip(shapes, _grouped(shapes, tensors), strict=True)]


def _grouped(shapes: Sequence[Shape], flat: Sequence) -> Iterator[Sequence]:
    left = iter(flat)
    return (list(itertools.islice(left, math.prod(shape))) for shape in shapes)


def _stacked(shape: Shape, tensors: Sequence[torch.Tensor]) -> jax.Array:
    first = tensors[0].detach()
    if PLATFORMS.get(first.device.type) != jax.default_backend():
        raise ValueError(
            f"torch's parameters must be where JAX computes, got {first.device.type} and {jax.default_backend()}; move "
            "the model, or set JAX_PLATFORMS"
        )
    if len(dtypes := {str(x.dtype) for x in tensors}) > 1:
        raise ValueError(f"torch's parameters that are one stack of layers must have one dtype, got {sorted(dtypes)}")
    if laid_out(tensors):
        whole = first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    else:
        whole = torch.stack([tensor.detach() for tensor in tensors])
    made = jax.dlpack.from_dlpack(whole.view(*shape, *first.shape))
    if made.itemsize != first.itemsize:
        raise ValueError(
            f"torch's parameters in {first.dtype} need jax.config.update('jax_enable_x64', True), JAX has {made.dtype}"
        )
    return made


def laid_out(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether JAX can read tensors of one shape in place: they lie one after the other, from an aligned address."""
    first = tensors[0]
    memory = first.untyped_storage().data_ptr()
    return first.data_ptr() % ALIGNMENT == 0 and all(
        x.is_contiguous()
        and x.dtype == first.dtype
        and x.untyped_storage().data_ptr() == memory
        and x.storage_offset() == first.storage_offset() + i * first.numel()
        for i, x in enumerate(tensors)
    )


def owned(x: jax.Array) -> torch.Tensor:
    """A tensor of the memory of an array that nobody else has; it is computed when this returns."""
    return torch.from_dlpack(x.block_until_ready())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """What a backward pass needs besides the weights.

    Attributes:
      own: arrays.
      places: for each leaf of `tree` its place among the weights; None = the next of `own`.
      tree: structure of JAX's function for the backward pass.
    """

    own: list[jax.Array]
    places: tuple[int | None, ...] = field(metadata={"static": True})
    tree: Any = field(metadata={"static": True})


class _Programs(NamedTuple):
    value: Callable
    linearised: Callable
    pulled: Callable


@functools.cache
def _programs(function: Callable) -> _Programs:
    """Compiles function(weights, inputs), and its two halves with gradients by the weights at the places `trained`."""

    def linearised(weights, inputs, trained):
        def by_trained(chosen):
            merged = dict(enumerate(weights)) | dict(zip(trained, chosen, strict=True))
            return function(list(merged.values()), inputs)

        out, pull = jax.vjp(by_trained, [weights[i] for i in trained])
        leaves, tree = jax.tree.flatten(pull)
        # Weights would be copied if they were among the results.
        given = {id(x): i for i, x in enumerate(weights)}
        own = [x for x in leaves if id(x) not in given]
        return out, _Residuals(own, tuple(given.get(id(x)) for x in leaves), tree)

    def pulled(weights, residuals: _Residuals, cotangent):
        own = iter(residuals.own)
        leaves = [next(own) if place is None else weights[place] for place in residuals.places]
        return residuals.tree.unflatten(leaves)(cotangent)[0]

    return _Programs(jax.jit(function), jax.jit(linearised, static_argnums=2), jax.jit(pulled))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, shapes, inputs, *tensors):
        needed = list(_grouped(shapes, ctx.needs_input_grad[3:]))
        ctx.function, ctx.shapes, ctx.needed = function, shapes, needed
        ctx.trained = tuple(i for i, group in enumerate(needed) if any(group))
        out, residuals = _programs(function).linearised(arrays(shapes, tensors), inputs, ctx.trained)
        ctx.residuals = dataclasses.replace(residuals, own=[])
        # Torch frees them after the backward pass, and notices if a weight is changed before it.
        ctx.save_for_backward(*tensors, *map(owned, residuals.own))
        return owned(out)

    @staticmethod
    def backward(ctx, cotangent):
        if torch.is_grad_enabled():
            raise RuntimeError("Model: gradients cannot be differentiated again, got create_graph=True; leave it out")
        count, saved = sum(map(len, ctx.needed)), ctx.saved_tensors  # once: torch's checkpoint recomputes them
        weights = arrays(ctx.shapes, saved[:count])
        own = [jax.dlpack.from_dlpack(x) for x in saved[count:]]
        residuals = dataclasses.replace(ctx.residuals, own=own)
        cotangent = jax.dlpack.from_dlpack(cotangent.contiguous())
        found = dict(zip(ctx.trained, _programs(ctx.function).pulled(weights, residuals, cotangent), strict=True))
        grads: list[torch.Tensor | None] = []  # also of frozen tensors in an array that trains, which torch ignores
        for i, (shape, needed) in enumerate(zip(ctx.shapes, ctx.needed, strict=True)):
            if i in found:
                whole = owned(found[i])
                grads += whole.reshape(len(needed), *whole.shape[len(shape) :]).unbind()
            else:
                grads += [None] * len(needed)
        return None, None, None, *grads
