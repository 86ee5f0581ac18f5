"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2): one more layer, which predicts the token after
the next one. The generation engine drafts with it; training scores its drafts if it is asked to (`score`).

Checkpoints have it behind the model's own layers (`num_nextn_predict_layers`) or as "mtp.*". Embeddings and output head
are the model's; the first kind stores copies of them, which are not read, and are written as the model's. Of several
such layers the first is used.

The paper does not say whether hidden states go in before or after the model's last norm. In SGLang and vLLM it is
after, and where the layer continues from its own hidden states, after its own norm.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
from jax.nn.initializers import ones, zeros

from ..core import quantised
from ..core import trie as tries
from ..core.batch import Batch
from ..core.mtp import Trunk, drafted
from ..core.param import Param, Stack, Table
from ..core.segments import at_last
from ..parallel import rules, vocab
from ..parallel.token_layout import TokenLayout
from . import dense, remat, wrappers
from .attention import rows
from .families import FAMILIES
from .layer import Attention, Layer, Mixer, mixers, rope_switches
from .layers import moe
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


def with_mtp(config):
    """The Config of a model with its layer, whose weights are then `params["mtp"]`.

    Raises:
      ValueError: the family or the checkpoint has none, by config.json; or it is read with a vision tower.
    """
    if not stated(config):
        families = ", ".join(sorted(BEHIND | APART))
        names = " or ".join(sorted({name for name, _ in (BEHIND | APART).values()}))
        raise ValueError(
            f"config.json: the model must have a layer for multi-token prediction, by {names} in a family that has one "
            f"({families}), got {config.family} without; leave its loss out (--mtp.coef)"
        )
    if config.vision:
        raise ValueError(
            "config.json: drafts are trained on text alone, got a model with its vision tower; leave out --mtp.coef, "
            "or --vision and rows with images"
        )
    return dataclasses.replace(config, mtp=True)


def copies(config) -> dict[str, str]:
    """{key: the weight of the model, "embed" or "head"} of the copies that a checkpoint has in such layers."""
    weights = dict(zip(wrappers.COPIES, ("embed", "embed" if config.tied else "head"), strict=True))
    ends = {f"{copy}weight": name for copy, name in weights.items()}
    parts = ((key, re.fullmatch(r".*?layers\.\d+\.(.*)", key)) for key in (config.rest.names if config.rest else ()))
    return {key: ends[found[1]] for key, found in parts if found and found[1] in ends}


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


def forward(params, w, hidden_BTD, token_BT, mixer: Mixer, config, routing=None):
    """Applies the layer.

    Args:
      params: the model's weights, for its embeddings.
      w: the layer's weights, as in `table`.
      hidden_BTD: the model's hidden states after its last norm; to predict further tokens, what this function returned
        for the previous position.
      token_BT: the token after each position.
      routing: a `moe.Routing`, of a layer with experts; None = its defaults.

    Returns:
      hidden_BTD after the layer's norm: its product with the model's output head gives the logits of the token after
      `token`.
    """
    module = FAMILIES[config.family]

    def norm(x, name):
        return rms_norm(x, w[f"mtp_{name}"], config.norm_eps, config.norm_offset)

    x_BTD = module.embed(params, token_BT, config, hidden_BTD.dtype)
    x_BTD = jnp.concatenate([norm(x_BTD, "embed_norm"), norm(hidden_BTD, "hidden_norm")], -1)
    x_BTD, _ = module.block(linear(x_BTD, w["mtp_project"]), w, mixer, config, routing)
    return norm(x_BTD, "norm")


def score(params, hidden_BTD, batch: Batch, layout: TokenLayout, head_VD, logits, *, config, run, trunk: Trunk):
    """(log-probability f32[B, T] that a draft gives each target, in nats; 1 where it is the draft's likeliest, else 0).

    The draft of token t + 2 reads the model's hidden state of token t, behind its last norm, and the embedding of token
    t + 1, as the engine's first draft does; it attends to the drafts of its sequence before it, in tries those on its
    branch. The probabilities are those at temperature 1, whatever that of the policy; a sampler's mask does not matter.
    Of a layer with experts the router chooses them, and neither recorded experts nor load balancing have a part in it.

    Args:
      params: the model's weights, with those of the layer as "mtp".
      hidden_BTD: of `models.backbone`, at its places.
      logits: f(products of hidden states and head) -> logits.
      run: a `models.Run`.
      trunk: "detached" = gradients flow into the layer alone; "trained" = also into hidden states, embeddings and head.

    Returns:
      Both [B, T], as target arrays; 0 where no draft learns the prediction (`core.mtp.drafted`).
    """
    if trunk == "detached":
        fixed = jax.lax.stop_gradient
        params, hidden_BTD, head_VD = {**fixed(params), "mtp": params["mtp"]}, fixed(hidden_BTD), fixed(head_VD)
    own, [stack] = record(config), table(config).stacks
    # At the places of predictions: the state that predicts a token, and that token.
    at = lambda x_BT: layout.predicting(layout.inputs(x_BT))
    state_BTD, next_BT = layout.predicting(hidden_BTD), layout.targets(batch.target_BT)
    length_BT = None
    if rope_switches((own,)):
        length_BT = at(at_last(batch.position_BT, batch.segment_BT) + 1)
    mixer = mixers((own,), at(batch.position_BT), length_BT=length_BT)
    attend = rows.over(
        layout.inputs(batch.segment_BT), at(batch.index_BT), batch.trie and _without_roots(batch.trie),
        backend=run.attention, query_chunk=run.query_chunk, method=run.cp,
    )  # fmt: skip

    def layer(w, state_BTD, params):
        w = quantised.widened(rules.gather(w, stack.params, state_BTD.dtype), state_BTD.dtype)
        over = lambda q_BTNH, k_BTKH, v_BTKV, sinks_N=None, latent=None: attend(
            own.pattern, q_BTNH, k_BTKH, v_BTKV, sinks_N
        )
        routing = moe.Routing(dispatch=run.dispatch, kernel=run.expert_kernel)
        made_BTD = forward(params, w, state_BTD, next_BT, mixer(own, over), config, routing)
        return rules.constrain(made_BTD, "batch seq hidden")

    [w] = params["mtp"]["stacks"]
    made_BTD = remat.checkpoint(run.remat)(layer)(jax.tree.map(lambda x: x[0], w), state_BTD, _embeddings(params))
    target_BT = layout.targets(layout.ahead(batch.target_BT))
    scored = vocab.score(
        layout.predicting(made_BTD), head_VD, target_BT, temperature_BT=jnp.ones(target_BT.shape, jnp.float32),
        needed_BT=layout.learnt(layout.ahead(drafted(batch))), chunk=run.head_chunk, per_chunk=_right, logits=(logits,),
    )  # fmt: skip
    logp_BT, _, _, right_BT = jax.tree.map(lambda x: layout.behind(layout.predictions(x)), scored)
    return logp_BT, right_BT


def _without_roots(trie: tries.Trie) -> tries.Trie:
    """The trie in which nothing sees roots, whose tokens follow none: no draft is made there."""
    place_BT = jnp.broadcast_to(jnp.arange(trie.parent_BT.shape[-1]), trie.parent_BT.shape)
    return dataclasses.replace(trie, until_BT=jnp.where(trie.parent_BT == place_BT, place_BT + 1, trie.until_BT))


def _right(logits_CV, target_C, _):
    return jax.lax.stop_gradient(jnp.argmax(logits_CV, -1) == target_C).astype(jnp.float32)


def _embeddings(params) -> dict:
    """The weights of the model that the layer reads."""
    return {name: x for name, x in params.items() if name not in ("stacks", "mtp")}
