"""`areax check`: validates a checkpoint, and compares its logits and gradients with PyTorch."""

from __future__ import annotations

import json
import os
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ... import models
from ...core import param
from ...models import config_json, wrappers
from ...models.layers import score_head
from .. import hf, safetensors
from .. import torch as torch_adapter
from ..runtime import hub

CAUSAL = "AutoModelForCausalLM"
TOLERANCE = 1e-4  # fp32: for logits relative to max(1, largest logit), for gradients to the tensor's largest entry
ROUNDING = 1e-5  # a tensor's gradient is rounding if its entries are below this part of the largest of all


def check(path: str | os.PathLike, against: Literal["torch"] | None = None, gradients: bool = False) -> dict:
    """Loads a checkpoint, verifies its manifest and that all values are finite; `against="torch"` also compares fp32
    logits on random tokens with transformers, of a classifier the scores of its labels.

    Args:
      gradients: with `against`, also compares the gradient of the mean cross-entropy in every tensor, of a classifier
        that of the mean squared score.

    Returns:
      {"ok", "path", "family", "parameters", "bytes", "dtypes", "manifest", "nonfinite"}, all JSON types; with `against`
      also {"max_logit_diff", "max_logit", "logit_std"}, with `gradients` {"max_gradient_diff", "worst_gradient"}, the
      difference being relative to the largest entry of its tensor.

    Raises:
      ValueError: the checkpoint does not load, or its tensors do not match its manifest.
    """
    if against not in (None, "torch"):
        raise ValueError(f"check: against must be 'torch' or left out, got {against!r}")
    if gradients and against is None:
        raise ValueError("check: gradients are compared with another library's; say which, --against torch")
    path = hub.folder(path, weights=True)
    config = hf.read_config(path)  # first, to report an unsupported model as such
    tensors = safetensors.read(path)
    manifest = hf.verify(path)
    config, params = hf.from_tensors(config, tensors, os.fspath(path))
    nonfinite = [name for name, tensor in tensors.items() if safetensors.count_nonfinite(tensor)]
    report = {
        "ok": not nonfinite,
        "path": os.fspath(path),
        "family": config.family,
        "parameters": param.count(models.table(config)),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "dtypes": sorted({tensor.dtype.name for tensor in tensors.values()}),
        "manifest": "verified" if manifest else "none",
        "nonfinite": nonfinite,
    }
    if against:
        report |= _against_torch(path, config, params, gradients)
        report["ok"] &= report["max_logit_diff"] <= TOLERANCE * max(1.0, report["max_logit"])
        report["ok"] &= report.get("max_gradient_diff", 0.0) <= TOLERANCE
    return report


def _against_torch(path, config, params, gradients: bool) -> dict:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"check: against='torch' needs PyTorch ({error}); install areax[torch]") from error
    source = wrappers.text(json.loads(config.source))
    dtype = torch.bfloat16 if config_json.quantisation(source) else torch.float32  # numbers are those of bfloat16
    kind = score_head.classifier(source)
    auto = getattr(transformers, kind or ("AutoModelForImageTextToText" if wrappers.wraps(config) else CAUSAL))
    try:
        model = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager").float().eval()
    except ImportError as error:  # of what it needs for some quantised checkpoints
        raise ValueError(f"check: transformers does not load {path}: {' '.join(str(error).split())}") from error
    tokens = _text_tokens(config, model.get_input_embeddings().padding_idx)
    token_BT = np.random.default_rng(0).choice(tokens, (2, min(64, config.context)))
    inputs = dict(input_ids=torch.from_numpy(token_BT), attention_mask=None, use_cache=False)
    theirs = model.score(model.base_model(**inputs).last_hidden_state) if kind else model(**inputs).logits
    forward, loss = (_scores, _squares) if kind else (models.forward, _loss)
    with jax.default_matmul_precision("highest"):  # accelerators would round fp32 operands
        ours_BTV = np.asarray(jax.jit(forward, static_argnames="config")(params, token_BT, config=config))
        gradient = jax.jit(jax.grad(loss), static_argnums=2)(params, token_BT, config) if gradients else None
    theirs_BTV = theirs.detach().numpy()
    report: dict = {
        "max_logit_diff": _largest(ours_BTV - theirs_BTV),
        "max_logit": _largest(theirs_BTV),
        "logit_std": float(theirs_BTV.std()),
    }
    if gradients:
        flat, target = theirs[:, :-1].flatten(0, 1), torch.from_numpy(token_BT[:, 1:]).flatten()
        lost = theirs.square().mean() if kind else torch.nn.functional.cross_entropy(flat, target)
        lost.backward()
        diffs = _gradient_diffs(config, gradient, model)
        worst = max(diffs, key=lambda name: diffs[name])
        report |= {"max_gradient_diff": diffs[worst], "worst_gradient": worst}
    return report


def _gradient_diffs(config, gradient, model) -> dict[str, float]:
    """The largest difference in each tensor of a checkpoint, relative to the tensor's largest entry, or to that of all
    tensors where it is mere rounding, as of the bias of keys without positions."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    # NaN: torch has no gradient of buffers.
    buffers = model.state_dict().keys() & dict(model.named_buffers()).keys()
    named = {name: torch.full_like(model.get_buffer(name), torch.nan) for name in buffers}
    named |= {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    _, theirs = torch_adapter.from_state_dict(config, revert_weight_conversion(model, named))
    (specs, wanted), (_, got) = (hf.to_tensors(config, tree, np.float32) for tree in (theirs, gradient))
    pairs = {name: (x, g) for name, x, g in zip(specs, got, wanted, strict=True) if not np.isnan(g).any()}
    largest = {name: _largest(g) for name, (_, g) in pairs.items()}
    least = ROUNDING * max(largest.values())
    scale = lambda name: largest[name] if largest[name] > least else least / ROUNDING
    return {name: _largest(x - g) / scale(name) for name, (x, g) in pairs.items()}


def _text_tokens(config, padding: int | None) -> list[int]:
    """The vocabulary without the ids that stand for images and the like in a wrapper, and without padding, of whose
    embedding torch has no gradient."""
    options = json.loads(config.source) if wrappers.wraps(config) else {}
    other = {value for name, value in options.items() if name.endswith(("_token_id", "_token_index"))} | {padding}
    return [id for id in range(config.vocab) if id not in other]


def _loss(params, token_BT, config):
    logp_BTV = jax.nn.log_softmax(models.forward(params, token_BT[:, :-1], config=config))
    return -jnp.mean(jnp.take_along_axis(logp_BTV, token_BT[:, 1:, None], -1))


def _scores(params, token_BT, config):
    sizes = token_BT.shape
    index_BT = jnp.broadcast_to(jnp.arange(sizes[1]), sizes)
    rows = token_BT, index_BT, jnp.ones(sizes, jnp.int32), index_BT
    hidden_BTD, _ = models.backbone(params, *rows, config=config, length_BT=jnp.full(sizes, sizes[1]))
    return score_head.apply(params, hidden_BTD)


def _squares(params, token_BT, config):
    return jnp.mean(jnp.square(_scores(params, token_BT, config)))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())
