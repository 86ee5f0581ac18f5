"""A torch module around a model's functions."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import torch

from ... import models
from ...core import param
from ...core.batch import Batch
from ...core.segments import segment_index
from ...models import wrappers
from .. import hf
from . import function, to_torch
from .rows import Rows, read

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput

RUN = models.Run()


class Model(torch.nn.Module):
    """A language model of any family with its weights as torch parameters, named as in transformers' module.

    JAX computes outputs and gradients, compiled once per shape of the input. Weights that areax does not train are
    buffers. The weights are copies of `params`, with layers side by side in memory, as JAX reads them.

    Attributes:
      settings: the Config.
      run: execution options, such as gradient checkpointing and the dtype of the computation.

    Raises:
      ValueError: the model has a vision tower or a score head, or the parameters do not match the config.
    """

    # For transformers' Trainer: the loss takes num_items_in_batch, and never predicts the first token of a row.
    accepts_loss_kwargs = True
    loss_type = "ForCausalLM"

    def __init__(self, config, params, run: models.Run = RUN):
        super().__init__()
        if config.vision or config.score_head:
            raise ValueError("Model: must have neither a vision tower nor a score head; load the language model alone")
        self.settings, self.run = config, run
        inside = _in_module(config)
        dtype = params["embed"].dtype if "embed" in params else "float32"
        stored = map(to_torch, hf.tensors_of(_table(config), inside.prefix, params, dtype, "Model")[1])
        for group in _groups(config):
            for name, x in zip(group.names, stored, strict=False):
                _set(self, name, torch.nn.Parameter(x) if group.trainable else x)
        if config.tied:
            _tie(self)
            self.register_state_dict_post_hook(_copy_head)
        self.register_load_state_dict_post_hook(_loaded)
        self._place()

    @torch.compiler.disable  # JAX compiles it
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
    ) -> CausalLMOutput:
        """Next-token logits [B, T, V] in fp32, and with labels the loss, as of models in transformers.

        Args:
          attention_mask: 0 = padding, at either end of a row.
          position_ids: None = from 0 in each sequence. Without a mask or segments, a sequence begins wherever positions
            do not count on.
          labels: the tokens to learn, each at its own place, -100 elsewhere; the first token of a sequence is never
            predicted. The loss is their mean negative log-likelihood.
          segment_ids: of packed rows; adjacent equal ids are one sequence, 0 is padding.
          num_items_in_batch: what the loss is divided by instead of the number of these labels.
          skip_logits: whether only the loss is computed, in chunks of tokens without holding all logits; None = while
            training with labels.

        Raises:
          ValueError: as `rows.read` and `function.arrays`.
        """
        from transformers.modeling_outputs import CausalLMOutput

        rows = read(self.settings.vocab, input_ids, attention_mask, position_ids, segment_ids, labels)
        if labels is None:
            return CausalLMOutput(logits=self._compute(_logits, rows))
        learnt_BT = torch.from_numpy(rows.mask_BT).to(input_ids.device)
        if self.training if skip_logits is None else skip_logits:
            nll_BT, logits_BTV = -self._compute(_logp, rows), None
        else:
            logits_BTV = self._compute(_logits, rows)
            target_BT = torch.from_numpy(rows.target_BT).to(input_ids.device, torch.int64)
            nll_BT = torch.nn.functional.cross_entropy(logits_BTV.movedim(-1, 1), target_BT, reduction="none")
        count = learnt_BT.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=torch.where(learnt_BT, nll_BT, 0).sum() / count, logits=logits_BTV)

    def save_pretrained(self, path: str | os.PathLike, tokenizer: Any = None, **options: Any) -> Path:
        """Writes a Hugging Face checkpoint, as `hf.save`, whose other options may be given."""
        return hf.save(path, self.settings, params(self), tokenizer=tokenizer, **options)

    def _compute(self, of: Callable, rows: Rows) -> torch.Tensor:
        shapes, tensors = _weights(self)
        return function.apply(of(self.settings, self.run), shapes, tensors, rows)

    def _apply(self, fn, recurse=True):  # torch's, for `to`, `bfloat16` and the like, which give tensors new memory
        tied = _is_tied(self)
        super()._apply(fn, recurse)
        if tied:  # torch may have made two new parameters of it
            _tie(self)
        self._place()
        return self

    def __setstate__(self, state):  # of a copy, whose tensors have memory of their own
        super().__setstate__(state)
        self._place()

    def _place(self) -> None:
        """Moves the tensors of each array to where JAX reads them without a copy."""
        for group in _groups(self.settings):
            tensors = [_get(self, name) for name in group.names]
            if not function.laid_out(tensors):
                for tensor, x in zip(tensors, torch.stack([tensor.detach() for tensor in tensors]), strict=True):
                    tensor.data = x


def params(model: Model):
    """The parameter tree of a module, for areax's functions and `hf.save`.

    Arrays share the memory of torch's parameters, but parts of fused tensors, and change when these do.
    """
    return _tree(model.settings, function.arrays(*_weights(model)))


class _Group(NamedTuple):
    """Tensors of a module that are one array for JAX.

    Attributes:
      leaves: of the array; several are parts of it.
      shape: its leading axes, along which the tensors are stacked.
    """

    leaves: list[param.Leaf]
    names: list[str]
    shape: tuple[int, ...]

    @property
    def trainable(self) -> bool:
        return self.leaves[0].param.trainable


def _in_module(config):
    """The Config with the prefix of keys in transformers' module of a causal model, also if it was a backbone's."""
    inside = wrappers.in_module(config)
    return dataclasses.replace(inside, prefix=inside.prefix or "model.")


@functools.cache
def _table(config) -> param.Table:
    return wrappers.in_modules(models.table(config), config)


@functools.cache
def _groups(config) -> list[_Group]:
    prefix = _in_module(config).prefix
    names = lambda leaf: [spelt[-1] for spelt in leaf.keys(prefix).values()]
    return [_Group(leaves, names(leaves[0]), leaves[0].unstacked_shape) for leaves in param.by_tensor(_table(config))]


def _weights(model: Model) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    groups = _groups(model.settings)
    if model.settings.tied and not _is_tied(model):
        raise ValueError(
            f"Model: {' and '.join(_tied(model))} must be one parameter, as config.json ties them, got two"
        )
    return [group.shape for group in groups], [_get(model, name) for group in groups for name in group.names]


def _tree(config, arrays: list):
    """The parameter tree of the groups' arrays."""
    found = {}
    for group, x in zip(_groups(config), arrays, strict=True):
        for leaf in group.leaves:
            found[leaf.path] = x if leaf.param.part is None else _part(leaf.param.part.take, len(group.shape))(x)
    return param.tree_map(lambda leaf: found[leaf.path], models.table(config))


def _part(take: Callable, axes: int) -> Callable:
    """`take` along leading axes."""
    return jax.vmap(_part(take, axes - 1)) if axes else take


@functools.cache
def _logits(config, run: models.Run) -> Callable:
    def logits(arrays, rows: Rows):
        """f32[B, T, V]."""
        more = dict(position_BT=rows.position_BT, segment_BT=rows.segment_BT)
        return models.forward(_tree(config, arrays), rows.token_BT, config=config, run=run, **more)

    return logits


@functools.cache
def _logp(config, run: models.Run) -> Callable:
    def logp(arrays, rows: Rows):
        """Log-probabilities of the targets, f32[B, T]."""
        segment_BT = jax.numpy.ones_like(rows.token_BT) if rows.segment_BT is None else rows.segment_BT
        index_BT = segment_index(segment_BT)
        position_BT = index_BT if rows.position_BT is None else rows.position_BT
        fields: dict[str, Any] = {each.name: None for each in dataclasses.fields(Batch)}
        fields |= dict(token_BT=rows.token_BT, target_BT=rows.target_BT, input={}, target={})
        batch = Batch(**fields | dict(position_BT=position_BT, index_BT=index_BT, segment_BT=segment_BT))
        return models.score(_tree(config, arrays), batch, config=config, run=run).logp_BT

    return logp


class Weights(torch.nn.Module):
    """A part of a Model. It has weights and computes nothing."""

    def extra_repr(self) -> str:
        own = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return ", ".join(f"{name}: {list(x.shape)}" for name, x in own)


def _set(module: torch.nn.Module, name: str, x: torch.Tensor) -> None:
    """Registers a parameter or buffer under a dotted name."""
    *path, last = name.split(".")
    for part, inner in zip(path, [*path[1:], last], strict=True):
        if isinstance(module, torch.nn.ModuleList):
            module.extend(Weights() for _ in range(len(module), int(part) + 1))
        elif part not in dict(module.named_children()):
            module.add_module(part, torch.nn.ModuleList() if inner.isdigit() else Weights())
        module = module.get_submodule(part)
    if isinstance(x, torch.nn.Parameter):
        module.register_parameter(last, x)
    else:
        module.register_buffer(last, x)


def _get(module: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _tied(model: Model) -> tuple[str, str]:
    """The names of a tied head and of the embeddings."""
    inside = _in_module(model.settings)
    return wrappers.head(inside), f"{inside.prefix}embed_tokens.weight"


def _is_tied(model: Model) -> bool:
    head, embed = _tied(model)
    return _get(model, head) is _get(model, embed)


def _tie(model: Model) -> None:
    head, embed = _tied(model)
    _set(model, head, model.get_parameter(embed))


def _loaded(model: Model, _) -> None:
    """Ties the head again, and places tensors, that `load_state_dict(..., assign=True)` has replaced."""
    if model.settings.tied:
        _tie(model)
    model._place()


def _copy_head(model: Model, state: dict, prefix: str, _) -> None:
    """Gives a tied head in a state dict memory of its own: safetensors, which Trainer saves with, refuses to share."""
    name = prefix + _tied(model)[0]
    if not isinstance(state[name], torch.nn.Parameter):
        state[name] = state[name].clone()
