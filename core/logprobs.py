"""Chunked log-probabilities of given tokens from hidden states, without materialising [T, V] logits.

Used by SFT, RL, distillation and evaluation.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import hardware
from .shapes import shaped

KEPT = 2**26  # largest number of logits, 256 MB in fp32, that are saved for the backward pass
SUMS, LOGITS = "logprobs", "logits"  # checkpoint names of what a chunk saves for the backward pass


def chunk_size(vocabulary: int, platform: str = "cpu") -> int:
    """Tokens per chunk: about 16 MB of fp32 logits on a CPU, to fit its cache, 1 GB elsewhere; at least 128 tokens."""
    logits = 2**22 if platform == "cpu" else 2**28
    return max(128, 1 << max(0, (logits // vocabulary).bit_length() - 1))


@shaped
def from_logits(logits_AV, target_A, *, axis: str | None = None):
    """Natural log-probability of the target, entropy and log-sum-exp of each row of logits, each [A], in nats.

    Differentiable in the logits, entropy included: d entropy / d logits = -p (log p + entropy).

    Args:
      axis: mesh axis over which the vocabulary is sharded, V columns per device; targets index the whole vocabulary.
    """
    if axis is None:
        lse_A = jax.nn.logsumexp(logits_AV, axis=-1)
        picked_A = jnp.take_along_axis(logits_AV, target_A[:, None], axis=-1)[:, 0]
        total = lambda x_A: x_A
    else:
        total = lambda x_A: jax.lax.psum(x_A, axis)
        V = logits_AV.shape[-1]
        top_A = jax.lax.pmax(jax.lax.stop_gradient(logits_AV.max(-1)), axis)
        lse_A = top_A + jnp.log(total(jnp.exp(logits_AV - top_A[:, None]).sum(-1)))
        column_A = target_A - V * jax.lax.axis_index(axis)
        here_A = (column_A >= 0) & (column_A < V)
        picked_A = jnp.take_along_axis(logits_AV, jnp.clip(column_A, 0, V - 1)[:, None], axis=-1)[:, 0]
        picked_A = total(jnp.where(here_A, picked_A, 0))
    logp_AV = logits_AV - lse_A[:, None]
    entropy_A = -total(jnp.sum(jnp.exp(logp_AV) * logp_AV, axis=-1))
    return picked_A - lse_A, entropy_A, lse_A


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _in_one_pass(logits_AV, target_A, axis):
    """`from_logits` with a backward pass that reads the logits once rather than once per sum."""
    return _one_pass_forward(logits_AV, target_A, axis)[0]


def _one_pass_forward(logits_AV, target_A, axis):
    logp_A, *sums = from_logits(logits_AV, target_A, axis=axis)
    entropy_A, lse_A = checkpoint_name(tuple(sums), SUMS)
    return (logp_A, entropy_A, lse_A), (logits_AV, target_A, entropy_A, lse_A)


def _one_pass_backward(axis, kept, given):
    logits_AV, target_A, entropy_A, lse_A = kept
    column_V = jnp.arange(logits_AV.shape[-1], dtype=target_A.dtype)
    if axis is not None:
        column_V += logits_AV.shape[-1] * jax.lax.axis_index(axis)
        given = jax.lax.psum(given, axis)  # each device holds a part of the cotangents
    dlogp_A1, dentropy_A1, dlse_A1 = (x_A[:, None] for x_A in given)
    logp_AV = logits_AV - lse_A[:, None]
    slope_AV = jnp.exp(logp_AV) * (dlse_A1 - dlogp_A1 - dentropy_A1 * (logp_AV + entropy_A[:, None]))
    return slope_AV + jnp.where(target_A[:, None] == column_V[None], dlogp_A1, 0), None


_in_one_pass.defvjp(_one_pass_forward, _one_pass_backward)


@jax.custom_vjp
def _project(h_CD, head_VD, narrow_VD):
    """Logits in fp32 or wider. The backward matmuls run in the dtype of the hidden states, as in layers, except for
    fp16, in which most gradients of logits would underflow.

    Args:
      narrow_VD: the head cast to the hidden states' dtype; gradients flow only into `head_VD`.
    """
    wide = jnp.promote_types(h_CD.dtype, jnp.float32)
    return jnp.einsum("CD,VD->CV", h_CD, narrow_VD, preferred_element_type=wide)


def _project_backward(kept, d_CV):
    h_CD, none_0D, narrow_VD = kept
    wide, d_CV = d_CV.dtype, d_CV.astype(jnp.promote_types(h_CD.dtype, jnp.bfloat16))
    dhead_VD = jnp.einsum("CV,CD->VD", d_CV, h_CD, preferred_element_type=wide)
    return (d_CV @ narrow_VD).astype(h_CD.dtype), dhead_VD.astype(none_0D.dtype), None


_project.defvjp(lambda h, head, narrow: (_project(h, head, narrow), (h, head[:0], narrow)), _project_backward)


@shaped
def from_hidden(
    hidden_AD, head_VD, target_A, *, temperature=1.0, needed_A=None, chunk=None, per_chunk=None, beside=None, others=(),
    logits=(), axis=None, narrow=None,
):  # fmt: skip
    """Computes (logp, entropy, logsumexp), each f32[A], of softmax(hidden @ head^T / temperature), chunk by chunk.

    The backward pass recomputes each chunk, unless `chunk` and `per_chunk` are None and there are at most `KEPT`
    logits. Logits and the head's gradient are accumulated in fp32 or wider.

    Args:
      temperature: positive scalar, or one per token, [A].
      needed_A: bool, the tokens whose results are read: those of others are 0, and chunks of them cost nothing, except
        over an axis; None = all.
      chunk: tokens per chunk; None = `chunk_size(V)` of the platform.
      per_chunk: optional `f(logits_CV, target_C, given, *others_CV) -> pytree of [C, ...]` on whole rows of logits;
        `given` is the chunk's slice of `beside`.
      beside: pytree of [A, ...], passed to `per_chunk` in slices.
      others: pairs (hidden_AE, head_VE) of other models over the same vocabulary, whose logits are passed to
        `per_chunk`, not divided by any temperature.
      logits: for the model and each of the others a function of single products of hidden state and head, applied
        before the temperature: a scale or a soft cap; none = the products are the logits.
      axis: mesh axis over which the heads' rows are sharded, as in `from_logits`; `per_chunk` still gets whole rows.
      narrow: the head in the dtype of the hidden states, [V, D]; then `head_VD` only gets the gradient, and its numbers
        are not read. None = a cast of it.

    Returns:
      logp_A, entropy_A, lse_A, and per_chunk's results with leading axis A (None without it).
    """
    A, V = hidden_AD.shape[0], head_VD.shape[0]
    wide = jnp.promote_types(hidden_AD.dtype, jnp.float32)
    C = min(chunk or chunk_size(V, hardware.platform()), A)
    pad = -A % C
    again = chunk or per_chunk or A * V > KEPT
    temperature_A = jnp.broadcast_to(jnp.asarray(temperature, wide), (A,))

    others_AE = [hidden_AE for hidden_AE, _ in others]
    heads = [(head, jax.lax.stop_gradient(head).astype(h.dtype)) for h, head in ((hidden_AD, head_VD), *others)]
    if narrow is not None:
        heads[0] = head_VD, jax.lax.stop_gradient(narrow)
    made = logits or [lambda product_CV: product_CV] * len(heads)

    def one(h_CD, target_C, temperature_C, given, others_CE):
        project = lambda i, h_CD: made[i](_project(h_CD, *heads[i]))
        logits_CV = checkpoint_name(project(0, h_CD) / temperature_C[:, None], LOGITS)
        extra = None
        if per_chunk:
            rows = [logits_CV, *(project(i, h_CE) for i, h_CE in enumerate(others_CE, 1))]
            if axis is not None:
                rows = [jax.lax.all_gather(x_CV, axis, axis=1, tiled=True) for x_CV in rows]
            extra = per_chunk(rows[0], target_C, given, *rows[1:])
        return *_in_one_pass(logits_CV, target_C, axis), extra

    def one_if_needed(needed_C, *given):
        nothing = lambda *given: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *given))
        return jax.lax.cond(needed_C.any(), one, nothing, *given)

    xs = [hidden_AD, target_A, temperature_A, beside, others_AE]
    skips = needed_A is not None and axis is None and C < A
    if skips:  # tokens that are needed first, so that they share chunks
        order_A = jnp.argsort(~needed_A)
        xs = jax.tree.map(lambda x: jnp.take(x, order_A, axis=0), [needed_A, *xs])
    saved = (SUMS,) if again else (SUMS, LOGITS)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    fn = jax.checkpoint(one_if_needed if skips else one, prevent_cse=C == A, policy=policy)
    if C == A:
        out = fn(*xs)
    else:
        chunks = lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), "edge").reshape(-1, C, *x.shape[1:])
        xs = jax.tree.map(chunks, xs)
        _, out = jax.lax.scan(lambda _, x: (None, fn(*x)), None, xs)
        out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:A], out)
    if skips:
        out = jax.tree.map(lambda x: jnp.zeros_like(x).at[order_A].set(x, unique_indices=True), out)
    if needed_A is None:
        return out
    return jax.tree.map(lambda x: jnp.where(needed_A.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)), out)
