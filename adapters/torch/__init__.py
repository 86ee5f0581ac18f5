"""Converts parameters to and from PyTorch state dicts with Hugging Face checkpoint keys."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import ml_dtypes
import numpy as np

from ... import models
from ...core import param
from ...models import wrappers
from .. import hf

if TYPE_CHECKING:
    from torch import Tensor


def to_state_dict(config, params) -> dict[str, Tensor]:
    """{checkpoint key: tensor} of the parameters, in their dtype; includes a tied head, as torch modules do.

    Parameters on one CPU device are not copied: the tensors share their memory, so clone before changing them in place
    (`load_state_dict` copies). Those on accelerators or several devices, and parts of fused tensors, are copied.
    """
    found: dict[str, Tensor] = {}

    def add(leaf, x):
        tensor, part = to_torch(x), leaf.param.part
        for index, spelt in leaf.keys(config.prefix).items():
            if part:
                if spelt[0] not in found:
                    found[spelt[0]] = tensor.new_empty(leaf.stored_shape)
                part.put(found[spelt[0]], tensor[index])
            else:
                found[spelt[0]] = tensor[index]

    param.tree_map(add, models.table(config), params)
    if config.tied:
        found[wrappers.head(config)] = found[f"{config.prefix}embed_tokens.weight"]
    return found


def from_state_dict(config, state_dict: Mapping[str, Tensor], dtype="float32", init_missing: Sequence[str] = ()):
    """(config, params) from a torch state dict, as strict and with the same arguments and errors as `hf.load`.

    `models.config_from_hf(module.config.to_dict())` gives the config of a transformers model.
    """
    tensors = {key: to_numpy(tensor) for key, tensor in state_dict.items()}
    return hf.from_tensors(config, tensors, "from_state_dict", dtype, init_missing=init_missing)


def messages(config, params, size: int = 256 << 20) -> Iterator[tuple[str, bool]]:
    """Serialises parameters for SGLang's `/update_weights_from_tensor` as (message, whether it is the last): tensors by
    checkpoint key in the dtype that `hf.save` would write, pickled by value, in base64.

    Args:
      params: jax or numpy arrays (`hf.host_copy`).
      size: maximum bytes of tensors per message; a larger tensor gets its own message.
    """
    specs, arrays = hf.to_tensors(config, params, hf.save_dtype(config, params))
    part: list[tuple[str, Tensor]] = []
    held = 0
    for key, x in zip(specs, arrays, strict=True):
        if part and held + x.nbytes > size:
            yield _pickled(part), False
            part, held = [], 0
        part.append((key, to_torch(x)))
        held += x.nbytes
    yield _pickled(part), True


def _pickled(part: list[tuple[str, Tensor]]) -> str:
    # The plain pickler writes values; torch's would pass a file descriptor, which crashes the server.
    return base64.b64encode(pickle.dumps(part)).decode()


def to_torch(x) -> Tensor:
    """An array as a tensor: of its memory if it is JAX's on one CPU device, else a copy."""
    import torch

    if isinstance(x, jax.Array) and hf.on_host(x):
        return torch.from_dlpack(x)
    host = np.array(x)
    if host.dtype == ml_dtypes.bfloat16:  # torch supports only numpy's dtypes
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor as an array, of its memory if that is contiguous on a CPU."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
