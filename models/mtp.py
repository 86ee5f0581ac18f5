"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2): one more layer, which predicts the token after
the next one. The generation engine drafts with it; it is not trained.

Checkpoints have it behind the model's own layers (`num_nextn_predict_layers`) or as "mtp.*". Embeddings and output head
are the model's; the first kind stores copies of them, which are not read. Of several such layers the first is used.

The paper does not say whether hidden states go in before or after the model's last norm. In SGLang and vLLM it is
after, and where the layer continues from its own hidden states, after its own norm.
"""

import dataclasses
import json

import jax.numpy as jnp
from jax.nn.initializers import ones, zeros

from ..core.param import Param, Stack, Table
from . import dense, wrappers
from .families import FAMILIES
from .layer import Attention, Layer, Mixer
from .layers.linear import linear
from .layers.norm import rms_norm

# The families of each kind -> the option with the number of such layers, and its default.
BEHIND = dict.fromkeys(("deepseek_v3", "glm4_moe", "kimi_k2"), ("num_nextn_predict_layers", 0))
APART = dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), ("mtp_num_hidden_layers", 1))
# Names in checkpoints.
NAMES = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
NAMES_APART = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "project": "fc",
               "norm": "norm"}  # fmt: skip


def known(config) -> bool:
    """Whether checkpoints of the family may have such a layer."""
    return config.family in BEHIND | APART


def stated(config) -> bool:
    """Whether a model's checkpoint has such a layer, as far as config.json says."""
    name, silent = (BEHIND | APART).get(config.family, ("", 0))
    return bool(wrappers.text(json.loads(config.source)).get(name, silent))


def record(config) -> Attention:
    """The layer's attention: that of the model's last layer with attention."""
    return next(layer for layer in reversed(config.records) if isinstance(layer, Attention))


def records(config, predicts: bool) -> tuple[Layer, ...]:
    """The records of the model's layers, followed by this layer's if it `predicts`."""
    return (*config.records, record(config)) if predicts else config.records


def table(config) -> Table:
    """The weights, as a stack of one layer; the family must be `known`."""
    sparse = {"dense_layers": ()} if hasattr(config, "dense_layers") else {}
    one = dataclasses.replace(config, layers=1, records=(record(config),), **sparse)
    plain = FAMILIES[config.family].table(one)
    std, _ = dense.inits(config)
    start = zeros if config.norm_offset else ones
    apart = config.family in APART
    at, names = ("mtp.", NAMES_APART) if apart else (dense.AT, NAMES)
    own = {
        f"mtp_{name}": Param(
            "embed mtp_inputs" if name == "project" else "embed", (f"{at}{key}.weight",),
            std if name == "project" else start,
        )
        for name, key in names.items()
    }  # fmt: skip

    def placed(p: Param) -> Param:
        keys = tuple(key.replace(dense.AT, "mtp.layers.{layer}.") for key in p.keys)
        return dataclasses.replace(p, keys=keys) if apart else p

    block = {name: placed(p) for name, p in plain.stacks[0].params.items()}
    index = 0 if apart else config.layers
    return Table({}, (Stack((index,), block | own),), {**plain.dims, "mtp_inputs": 2 * config.embed})


def forward(params, w, hidden_BTD, token_BT, mixer: Mixer, config):
    """Applies the layer.

    Args:
      params: the model's weights, for its embeddings.
      w: the layer's weights, as in `table`.
      hidden_BTD: the model's hidden states after its last norm; to predict further tokens, what this function returned
        for the previous position.
      token_BT: the token after each position.

    Returns:
      hidden_BTD after the layer's norm: its product with the model's output head gives the logits of the token after
      `token`.
    """
    module = FAMILIES[config.family]

    def norm(x, name):
        return rms_norm(x, w[f"mtp_{name}"], config.norm_eps, config.norm_offset)

    x_BTD = module.embed(params, token_BT, config, hidden_BTD.dtype)
    x_BTD = jnp.concatenate([norm(x_BTD, "embed_norm"), norm(hidden_BTD, "hidden_norm")], -1)
    x_BTD, _ = module.block(linear(x_BTD, w["mtp_project"]), w, mixer, config)
    return norm(x_BTD, "norm")
