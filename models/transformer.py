"""Forward passes of every family: hidden states, logits, scores and values."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ..core import centering, quantised, teacher_rows
from ..core import trie as tries
from ..core.batch import Batch
from ..core.mtp import Trunk
from ..core.segments import at_last, segment_index
from ..core.shapes import shaped
from ..parallel import context, experts, rules, token_layout, vocab
from . import mtp, remat, vision
from .attention import backends
from .attention import rows as attention_rows
from .families import FAMILIES
from .layer import AnyMixer, Attention, mixers, over_rows, rope_switches, trie_alignment, trie_lengths
from .layers import grouped, moe, score_head
from .layers.norm import rms_norm
from .remat import Keep


@dataclass(frozen=True)
class Run:
    """Execution options, hashable; none of them changes the mathematics.

    Attributes:
      dtype: compute dtype: activations and matmuls, for example bfloat16; None = that of the weights, and in training
        scripts bfloat16 on accelerators, float32 on a CPU (`default_dtype`). Norms, softmax
        and the head stay in fp32.
      remat: gradient checkpointing: "full" recomputes each layer from its input, "dots" all but attention and matmuls
        with weights, "none" nothing, each using more memory than the one before; "auto" = "full", and in training
        scripts on a CPU "dots", the fastest there.
        "offload" keeps what "dots" keeps in host memory; or pairs of a name and "save" or "offload", see
        `models.remat`.
      attention: attention backend, see `models.attention.backends`; "auto" = a kernel of the platform that supports
        all the model needs, else "chunked".
      query_chunk: queries per chunk of chunked attention, which "auto" then uses; None = 64 to 128 on a CPU, else 512.
      cp: how attention works on rows sharded over cp; `parallel.context` has the costs.
      head_chunk: tokens per chunk of logits; None = by vocabulary size.
      dispatch: how tokens reach experts on other devices; `parallel.experts` has the costs.
      expert_kernel: grouped matmul kernel for experts, see `models.layers.grouped`; "auto" = by platform.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    remat: Keep = "auto"
    attention: backends.Name = "auto"
    query_chunk: int | None = None
    cp: context.Method = "gather"
    head_chunk: int | None = None
    dispatch: experts.Method = "gather"
    expert_kernel: grouped.Kernel = "auto"

    def __post_init__(self):
        for name in ("query_chunk", "head_chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"Run: {name} must be at least 1, or None, got {getattr(self, name)}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Output of `score` per target token: log-probability, entropy and log-sum-exp (nats), value, and extras.

    Attributes:
      value_BT: output of the scalar head; None without one.
      label_BTY: scores of the labels of a head, of `classify` alone.
      draft_logp_BT, draft_right_BT: log-probability by the layer for multi-token prediction, in nats, and whether the
        token is its likeliest, 1 or 0; None unless `score` was asked for `drafts`.
      extra: what `per_chunk` returned, [B, T, ...].
      aux: layer statistics by name, summed over the batch's tokens and stacked over the layers that report them, stack
        by stack: those of `moe.statistics` with experts. They add up over microbatches.
    """

    logp_BT: Any
    entropy_BT: Any
    lse_BT: Any
    value_BT: Any = None
    extra: Any = None
    aux: dict[str, Any] = field(default_factory=dict)
    label_BTY: Any = None
    draft_logp_BT: Any = None
    draft_right_BT: Any = None


def default_dtype(platform: str) -> Literal["float32", "bfloat16"]:
    """The dtype in which training scripts and servers compute on a platform unless they are told another."""
    return "float32" if platform == "cpu" else "bfloat16"


def family(config):
    """The module of `models` that defines a config's family."""
    return FAMILIES[config.family]


@shaped
def backbone(
    params, token_BT, position_BT, segment_BT, index_BT, chosen_BTLK=None, *, config, run: Run = Run(), packing=True,
    images=None, trie: tries.Trie | None = None, weight_BT=None, length_BT=None,
):  # fmt: skip
    """Embedding, a scan over each stack of layers, final norm.

    Args:
      chosen_BTLK: experts of each token for `moe.Routing`, with L the MoE layers or all layers (others are ignored);
        None = the routers choose.
      packing: False = each row is one sequence without padding.
      images: the arrays of `vision.arrange`; None or {} = text alone.
      trie: the layout of rows of tries, whose indices count from their roots; None = rows of sequences.
      weight_BT: how often a token counts in the statistics of experts; None = once.
      length_BT: of each token's sequence, see `lengths`.

    Returns:
      hidden_BTD; the `aux` of `Scores`.

    Raises:
      ValueError: chosen_BTLK does not match the model's number of layers or experts per token; or tries do not suit its
        recurrent layers or rotary embeddings.
    """
    if trie is not None:
        _check_trie(trie, config)
    module = family(config)
    table = module.table(config)
    chosen = _by_stack(chosen_BTLK, table, config)
    x_BTD = module.embed(params, token_BT, config, run.dtype or params["embed"].dtype)
    seen = vision.see(params["vision"], images, config.vision, run) if images else None
    if seen:
        x_BTD = vision.replaced(x_BTD, seen.merged_BUD, seen.feature_BT)
    mixer = mixers(config.records, position_BT, seen and seen.position_3BT, length_BT)
    inputs = per_layer(module, params, token_BT, x_BTD, config)
    counted_BT = segment_BT > 0 if weight_BT is None else weight_BT
    shared: dict[int, Any] = {}  # keys and values that later layers use, by layer

    over = attention_rows.over(
        segment_BT, index_BT, trie, backend=run.attention, query_chunk=run.query_chunk, method=run.cp, packing=packing
    )

    def attend(pattern, found, q_BTNH, k_BTKH=None, v_BTKV=None, sinks_N=None, latent=None):
        k_BTKH, v_BTKV = found or (k_BTKH, v_BTKV)
        return over(pattern, q_BTNH, k_BTKH, v_BTKV, sinks_N)

    def layer(stack, x_BTD, each):
        w, chosen_BTK, beside, tapped_BUD = each
        record = config.records[stack.layers[0]]
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        w = quantised.widened(rules.gather(w, stack.params, x_BTD.dtype), x_BTD.dtype) | beside
        routing = moe.Routing(counted_BT, chosen_BTK, run.dispatch, run.expert_kernel)
        mix: AnyMixer
        if isinstance(record, Attention):
            found = () if record.source is None else shared[record.source]
            mix = mixer(record, partial(attend, record.pattern, found))
        else:
            mix = over_rows(record, segment_BT, run.cp, None if trie is None else trie.parent_BT)
        x_BTD, report = module.block(x_BTD, w, mix, config, routing)
        sums = {name: x for name, x in report.items() if name != "experts"}
        if tapped_BUD is not None:
            x_BTD = vision.added(x_BTD, tapped_BUD, seen.feature_BT)
        return rules.constrain(x_BTD, "batch seq hidden"), sums

    reports: list[dict] = []
    for turn in table.rounds:
        steps = [remat.checkpoint(run.remat)(partial(layer, table.stacks[i])) for i in turn]

        def one_of_each(x_BTD, each, steps=steps):
            sums = []
            for step, weights in zip(steps, each, strict=True):
                x_BTD, new = step(x_BTD, weights)
                sums.append(new)
            return x_BTD, sums

        beside = [{name: x[np.array(table.stacks[i].layers)] for name, x in inputs.items()} for i in turn]
        tapped = [_tapped(table.stacks[i].layers, config, seen) for i in turn]
        each = list(zip([params["stacks"][i] for i in turn], [chosen[i] for i in turn], beside, tapped, strict=True))
        x_BTD, sums = jax.lax.scan(one_of_each, x_BTD, each)
        for i, new in zip(turn, sums, strict=True):
            if "keys_values" in new:  # of a stack of one layer, since no other has its record
                shared[table.stacks[i].layers[0]] = jax.tree.map(lambda x: x[0], new.pop("keys_values"))
        reports += [new for new in sums if new]
    aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else {}
    return last_norm(x_BTD, params, config), aux


def _check_trie(trie: tries.Trie, config):
    if trie.align % (needed := trie_alignment(config)):
        raise ValueError(
            f"recurrent layers need tries whose nodes begin at multiples of {needed}, got {trie.align}; pack them with "
            "align=models.trie_alignment(config)"
        )
    T = trie.first_BT.shape[-1]  # no sample is longer
    reached = {length for length in trie_lengths(config) if length < T}
    if reached - set(trie.apart):
        raise ValueError(
            f"long rope needs tries in which samples of more than {min(reached)} tokens share nothing with others, got "
            f"apart {trie.apart}; pack them with apart=models.trie_lengths(config)"
        )
    dynamic = set(rope_switches(config.records)) - set(trie_lengths(config))
    if dynamic and T > min(dynamic):
        raise ValueError(
            f"dynamic rope needs rows of tries of at most {min(dynamic)} tokens, max_position_embeddings, got {T}; "
            "pack longer samples with packing.pack"
        )


def per_layer(module, params, token_BT, x_BTD, config) -> dict:
    """What layers read beside the residual stream, {name: [layers, B, T, ...]}; nothing in most families."""
    made = module.per_layer(params, token_BT, x_BTD, config) if hasattr(module, "per_layer") else None
    return {} if made is None else {"per_layer_input": made}


def _tapped(layers, config, seen):
    """The features that are added behind the layers of a stack, [layers, B, U, D]; None if there are none."""
    record = config.records[layers[0]]
    if seen is None or not (isinstance(record, Attention) and record.deepstack):
        return None
    return seen.tapped_NBUD[np.array(layers)]


def last_norm(x_BTD, params, config):
    """Applies the norm after the last layer."""
    return rms_norm(x_BTD, params["norm"], config.norm_eps, config.norm_offset)


def _by_stack(chosen_BTLK, table, config):
    """Each stack's slice of the chosen experts, [L, B, T, K]; None for stacks without experts."""
    sparse = ["router" in stack.params for stack in table.stacks]
    if chosen_BTLK is None:
        return [None] * len(sparse)
    layers = sorted(i for stack, has in zip(table.stacks, sparse, strict=True) if has for i in stack.layers)
    recorded = range(config.layers) if chosen_BTLK.shape[2] == config.layers else layers  # servers record all
    wanted = len(layers), getattr(config, "top_k", 0)
    if chosen_BTLK.shape[2:] != (len(recorded), wanted[1]):
        raise ValueError(
            f"routed_experts: must be [..., {wanted[0]} layers with experts, {wanted[1]} experts per token], "
            f"got {list(chosen_BTLK.shape[2:])}; were they recorded with another model?"
        )
    place = {i: at for at, i in enumerate(recorded)}
    part = lambda stack: jnp.moveaxis(chosen_BTLK[:, :, np.array([place[i] for i in stack.layers])], 2, 0)
    return [part(stack) if has else None for stack, has in zip(table.stacks, sparse, strict=True)]


def lengths(config, position_BT, segment_BT):
    """The length of each token's sequence, the position of its last token + 1, i32[B, T], in rows in their own order;
    None if the model's rotary embeddings do not depend on it."""
    return at_last(position_BT, segment_BT) + 1 if rope_switches(config.records) else None


def head(params):
    """The output matrix [V, D]; the embedding if tied."""
    return params.get("head", params["embed"])


def logits(product, config):
    """The logits, given the products of hidden states with the head: scaled, then softly capped, if the model does."""
    scaled = product if config.logit_scale == 1 else product * config.logit_scale
    cap = config.logit_softcap
    return scaled if cap is None else cap * jnp.tanh(scaled / cap)


@shaped
def forward(params, token_BT, *, config, position_BT=None, segment_BT=None, run: Run = Run(), images=None):
    """Next-token logits, f32[B, T, V]: those at a position predict the token after it.

    Args:
      token_BT: token ids; that they are in the vocabulary is not checked.
      position_BT: rope positions; None = index within the segment.
      segment_BT: segment ids, adjacent equal ids being one sequence; 0 = padding; None = each row is one sequence.
      images: the arrays of `vision.arrange`, whose positions are then those of rope; None = text alone.

    Raises:
      ValueError: there are images, and the model was loaded without its vision tower; it has no output head.
    """
    _check_output(config)
    packing = segment_BT is not None
    segment_BT = segment_BT if packing else jnp.ones(token_BT.shape, jnp.int32)
    index_BT = segment_index(segment_BT)
    position_BT = index_BT if position_BT is None else position_BT
    into, back = context.arrange(run.cp, token_BT.shape[1])
    length_BT = lengths(config, position_BT, segment_BT)
    rows = map(into, (token_BT, position_BT, segment_BT, index_BT))
    more = dict(images=_images(images or {}, config, into), length_BT=None if length_BT is None else into(length_BT))
    hidden_BTD = back(backbone(params, *rows, config=config, run=run, packing=packing, **more)[0])
    wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    w = head(params).astype(hidden_BTD.dtype)
    return logits(jnp.einsum("BTD,VD->BTV", hidden_BTD, w, preferred_element_type=wide), config)


def score(
    params, batch: Batch, *, config, run: Run = Run(), temperature=1.0, learnt_only=False, per_chunk=None, beside=None,
    others=(), drafts: Trunk | None = None,
):  # fmt: skip
    """Log-probability, entropy and log-sum-exp of `batch.target_BT` under softmax(logits / temperature), as Scores.

    Works in chunks of tokens: no [T, V] array is held, forward or backward. If the batch has
    `input["routed_experts"]` [B, T, L, K], tokens use these experts (routing replay, `moe.Routing`); if it has the
    arrays of `vision.arrange`, tokens stand for features of images. If it has `target["sampling_mask"]` [B, T, K], the
    softmax is over the tokens that the sampler kept (`logprobs.from_hidden`).

    If it has a `trie`, tokens that samples share are computed once, and the result is over samples, as the batch is. Of
    the temperature and of `beside`, a shared token gets what the first of its samples has there.

    Args:
      temperature: positive scalar, or one per token, [B, T]; where samples share a token, the first one's.
      learnt_only: gives 0 for predictions that are not learnt (`batch.scored_BT`), whose logits then cost nothing: for
        losses, which read no others.
      per_chunk: optional `f(logits_CV, target_C, given, *others_CV) -> pytree of [C, ...]`, returned in `extra` as
        [B, T, ...]; `given` is the chunk's slice of `beside`.
      beside: pytree of [B, T, ...], passed to `per_chunk` in slices.
      others: pairs (params, config) of further models that read the same batch, or the rows that it has for them
        (`core.teacher_rows`); `per_chunk` gets their logits at temperature 1, without gradients. If their vocabulary is
        larger, only its first V entries, but all of those that read tokens of another tokenizer.
      drafts: also scores drafts (`mtp.score`), through a trunk that is "detached" or "trained"; None = does not.

    Raises:
      ValueError: the batch is not one microbatch [B, T]; one of the others has a smaller vocabulary; or there are
        images, and one of the models was loaded without its vision tower; or one has no output head.
    """
    if batch.token_BT.ndim != 2:
        raise ValueError(
            f"score: the batch must be one microbatch [B, T], got tokens of shape {batch.token_BT.shape}; "
            "take one with jax.tree.map(lambda x: x[0], batch)"
        )
    for each in (config, *(other for _, other in others)):
        _check_output(each)
    hidden_BTD, aux, layout = _hidden(params, batch, config, run)
    whole = teacher_rows.BACK in batch.input  # of another tokenizer, whose ids mean others
    read = lambda other: other.vocab if whole else config.vocab
    frozen = [_frozen(weights, other, batch, read(other), run) for weights, other in others]
    temperature_BT = jnp.broadcast_to(jnp.asarray(temperature), batch.target_BT.shape)
    kept_BTK = batch.target.get("sampling_mask")
    made = vocab.score(
        layout.predicting(hidden_BTD), head(params), layout.targets(batch.target_BT),
        temperature_BT=layout.targets(temperature_BT, 1),
        kept_BTK=None if kept_BTK is None else layout.targets(kept_BTK, -1),
        needed_BT=layout.learnt(batch.scored_BT) if learnt_only else None, chunk=run.head_chunk, per_chunk=per_chunk,
        beside=jax.tree.map(layout.targets, beside), others=tuple(frozen),
        logits=tuple(partial(logits, config=each) for each in (config, *(other for _, other in others))),
    )  # fmt: skip
    logp, entropy, lse, extra = jax.tree.map(layout.predictions, made)
    scalar = "score" in params and params["score"].shape[0] == 1
    value = layout.back(score_head.apply(params, hidden_BTD))[..., 0] if scalar else None
    found = Scores(logp, entropy, lse, value, extra, aux)
    if drafts is None:
        return found
    draft_logp, right = mtp.score(
        params, hidden_BTD, batch, layout, head(params), partial(logits, config=config), config=config, run=run,
        trunk=drafts,
    )  # fmt: skip
    return replace(found, draft_logp_BT=draft_logp, draft_right_BT=right)


def score_centred(
    params, batch: Batch, *, config, run: Run, temperature=1.0, drafts: Trunk | None = None
) -> Scores:  # fmt: skip
    """`score` of learnt tokens for score centering: `extra` has the log-probabilities of `target["sampler_ids"]`."""
    return score(
        params, batch, config=config, run=run, temperature=temperature, learnt_only=True,
        per_chunk=centering.logp_of, beside=batch.target[centering.IDS], drafts=drafts,
    )  # fmt: skip


def _check_output(config):
    if not config.output_head:
        raise ValueError("models: a classifier has no output head; its scores are read by models.classify")


def value(params, batch: Batch, *, config, run: Run = Run()):
    """Output of the scalar head (a critic's values) at each token, as Scores without log-probabilities.

    Raises:
      ValueError: the head has several labels.
    """
    out = classify(params, batch, config=config, run=run)
    labels = out.label_BTY.shape[-1]
    if labels != 1:
        raise ValueError(f"value: needs a score head of one label, got {labels}; classify gives the scores of each")
    return Scores(None, None, None, out.label_BTY[..., 0], aux=out.aux)


def classify(params, batch: Batch, *, config, run: Run = Run()):
    """Scores of the score head's Y labels at each token, f32[B, T, Y], as `Scores.label_BTY` without log-probabilities:
    the logits of transformers' ForTokenClassification; those of ForSequenceClassification are at the last token."""
    hidden_BTD, aux, layout = _hidden(params, batch, config, run)
    return Scores(None, None, None, aux=aux, label_BTY=layout.back(score_head.apply(params, hidden_BTD)))


def _hidden(params, batch: Batch, config, run: Run):
    """Last hidden states at their own places, the `aux` of `Scores`, and the layout of the places."""
    layout, trie = token_layout.of(batch, run.cp), batch.trie
    rows = map(layout.inputs, (batch.token_BT, batch.position_BT, batch.segment_BT, batch.index_BT))
    chosen_BTLK = batch.input.get("routed_experts")
    if chosen_BTLK is not None:  # -1: not replayed
        chosen_BTLK = layout.inputs(jnp.where(batch.segment_BT[..., None, None] > 0, chosen_BTLK, -1), -1)
    images = _images(batch.input, config, layout.inputs)
    length_BT = lengths(config, batch.position_BT, batch.segment_BT)
    if length_BT is not None:  # samples that share a token need not be equally long: see `trie_lengths`
        length_BT = layout.inputs(length_BT)
    weight_BT = None if trie is None else tries.sample_counts(trie, batch.segment_BT)
    made = backbone(
        params, *rows, chosen_BTLK, config=config, run=run, images=images, trie=trie, weight_BT=weight_BT,
        length_BT=length_BT,
    )  # fmt: skip
    return *made, layout


def _images(inputs, config, into):
    """The arrays of images among inputs, those of tokens in the order of `run.cp`."""
    return {name: into(x) if name in vision.PER_TOKEN else x for name, x in vision.given(inputs, config.vision).items()}


def _frozen(params, config, batch: Batch, vocabulary: int, run: Run):
    """(hidden_BTE, head_VE) of a frozen model, its head cut to the vocabulary."""
    if config.vocab < vocabulary:
        raise ValueError(f"score: other models need a vocabulary of at least {vocabulary} entries, got {config.vocab}")
    params = jax.lax.stop_gradient(params)
    hidden_BTE, _, layout = _hidden(params, teacher_rows.of(batch), config, run)
    hidden_BTE = layout.predicting(hidden_BTE)
    if teacher_rows.TOKEN in batch.input:
        hidden_BTE = layout.inputs(teacher_rows.aligned(layout.back(hidden_BTE), batch))
    return jax.lax.stop_gradient(hidden_BTE), head(params)[:vocabulary]
