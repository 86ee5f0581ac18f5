"""Chunked log-probabilities of given tokens from hidden states, without materialising [T, V] logits.

Used by SFT, RL, distillation and evaluation.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from . import hardware
from .shapes import shaped

KEPT = 2**26  # largest number of logits, 256 MB in fp32, that are saved for the backward pass
LEFT_OUT = -1e30  # logit of a token that the sampler did not keep: its probability is 0, and 0 x log 0 no NaN


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


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_one_pass(logits_AV, target_A, sums, axis):
    """`from_logits` with a backward pass that reads the logits once rather than once per sum.

    Args:
      sums: entropy and log-sum-exp, if they are known from a pass before: then nothing is computed but the gradient,
        and the results have no meaning.
    """
    return _one_pass_forward(logits_AV, target_A, sums, axis)[0]


def _one_pass_forward(logits_AV, target_A, sums, axis):
    if sums is None:
        logp_A, *sums = from_logits(logits_AV, target_A, axis=axis)
    else:
        logp_A = jnp.zeros_like(sums[0])
    entropy_A, lse_A = sums
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
    return slope_AV + jnp.where(target_A[:, None] == column_V[None], dlogp_A1, 0), None, None


_in_one_pass.defvjp(_one_pass_forward, _one_pass_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _project(h_CD, head, narrow, known_CV, turned: bool):
    """Logits in fp32 or wider. The backward matmuls run in the dtype of the hidden states, as in layers, except for
    fp16, in which most gradients of logits would underflow.

    Args:
      head: [V, D], whose numbers are not read: it gets the gradient.
      narrow: [V, D], the head in the hidden states' dtype, which gets none.
      known_CV: the logits, if they are known from a pass before.
      turned: both are transposed, [D, V].
    """
    if known_CV is not None:
        return known_CV
    wide = jnp.promote_types(h_CD.dtype, jnp.float32)
    return jnp.einsum("CD,DV->CV" if turned else "CD,VD->CV", h_CD, narrow, preferred_element_type=wide)


def _project_backward(turned, kept, d_CV):
    h_CD, none, narrow = kept
    wide, d_CV = d_CV.dtype, d_CV.astype(jnp.promote_types(h_CD.dtype, jnp.bfloat16))
    product = jnp.einsum("CV,CD->DV" if turned else "CV,CD->VD", d_CV, h_CD, preferred_element_type=wide)
    dh_CD = d_CV @ (narrow.T if turned else narrow)
    return dh_CD.astype(h_CD.dtype), product.astype(none.dtype), None, None


_project.defvjp(
    lambda h, head, narrow, *rest: (_project(h, head, narrow, *rest), (h, head[:0], narrow)), _project_backward
)


class _Chunks(NamedTuple):
    """How chunks of tokens are computed: what is alike for all of them, and static.

    Attributes:
      turned: as in `_project`.
      keeps: logits are saved for the backward pass.
      axis, per_chunk: as in `from_hidden`.
      made: a function for each model from products to logits.
    """

    turned: bool
    keeps: bool
    axis: str | None
    per_chunk: Callable | None
    made: tuple[Callable, ...]

    def one(self, head, h_CD, narrow, given, known=(None, None)):
        """(results of a chunk, products of its hidden states and the head); `known`: these products, and two of the
        results, from a pass before."""
        target_C, temperature_C, kept_CK, beside, others_CE = given
        product_CV = _project(h_CD, head, narrow[0], known[0], self.turned)
        kept = partial(_kept, kept_CK=kept_CK, axis=self.axis)
        logits_CV = kept(self.made[0](product_CV) / temperature_C[:, None])
        extra = None
        if self.per_chunk:
            whole = lambda h_CE, narrow_VE: _project(h_CE, narrow_VE, narrow_VE, None, False)
            others = map(whole, others_CE, narrow[1:])
            rows = [logits_CV, *(kept(make(x_CV)) for make, x_CV in zip(self.made[1:], others, strict=True))]
            if self.axis is not None:
                rows = [jax.lax.all_gather(x_CV, self.axis, axis=1, tiled=True) for x_CV in rows]
            extra = self.per_chunk(rows[0], target_C, beside, *rows[1:])
        return (*_in_one_pass(logits_CV, target_C, known[1], self.axis), extra), product_CV


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_chunks(how: _Chunks, head, h_NCD, narrow, needed_N, given):
    """The results of all chunks, [N, C, ...]. The gradient of the head is a sum that each chunk adds to, and which
    chunks that nobody needs do not touch; no gradient flows into the rest but hidden states.

    Args:
      needed_N: bool; None = all.
      given: pytree of [N, C, ...]: targets, temperatures, `beside`, and hidden states of other models.
    """
    return _all_chunks(how, head, h_NCD, narrow, needed_N, given)[0]


def _all_chunks(how, head, h_NCD, narrow, needed_N, given):
    """(the results of all chunks, the products if they are kept)."""

    def one(_, chunk):
        needed, h_CD, given = chunk
        out = _if_needed(needed, lambda *chunk: how.one(head, chunk[0], narrow, chunk[1]), h_CD, given)
        return None, (out[0], out[1] if how.keeps else None)

    return jax.lax.scan(one, None, (needed_N, h_NCD, given))[1]


def _chunks_forward(how, *given):
    trains = given[0].perturbed  # else no sum is made: XLA would not find out in a loop that nobody reads it
    of_primal = lambda x: isinstance(x, CustomVJPPrimal)
    head, h_NCD, *rest = jax.tree.map(lambda x: x.value, given, is_leaf=of_primal)
    out, product_NCV = _all_chunks(how, head, h_NCD, *rest)
    return out, (head[:0] if trains else None, h_NCD, *rest, product_NCV, out[1:3])


def _chunks_backward(how, kept, slopes):
    none, h_NCD, narrow, needed_N, given, *known = kept
    zero = jnp.zeros(narrow[0].shape, jnp.float32 if none is None else none.dtype)
    head = None if none is None else zero
    slopes = jax.tree.map(_whole, slopes, is_leaf=lambda x: isinstance(x, SymbolicZero))

    def one(sum, chunk):
        needed, h_CD, given, known, slope = chunk

        def add(sum, h_CD, given, known, slope):
            chunk = lambda head, h_CD: how.one(head, h_CD, narrow, given, known)[0]
            if head is None:
                return None, jax.vjp(lambda h_CD: chunk(zero, h_CD), h_CD)[1](slope)[0]
            dhead, dh_CD = jax.vjp(chunk, head, h_CD)[1](slope)
            return sum + dhead, dh_CD

        if needed is None:
            return add(sum, h_CD, given, known, slope)
        nothing = lambda sum, h_CD, *_: (sum, jnp.zeros_like(h_CD))
        return jax.lax.cond(needed, add, nothing, sum, h_CD, given, known, slope)

    dhead, dh_NCD = jax.lax.scan(one, head, (needed_N, h_NCD, given, tuple(known), slopes), reverse=True)
    return dhead, dh_NCD, None, None, None


_by_chunks.defvjp(_chunks_forward, _chunks_backward, symbolic_zeros=True)


def _whole(slope):
    """A cotangent as an array."""
    if not isinstance(slope, SymbolicZero):
        return slope
    return (
        np.zeros(slope.shape, slope.dtype) if slope.dtype == jax.dtypes.float0 else jnp.zeros(slope.shape, slope.dtype)
    )


def _if_needed(needed, f, *chunk):
    """f(*chunk), or zeros."""
    if needed is None:
        return f(*chunk)
    nothing = lambda *chunk: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, *chunk))
    return jax.lax.cond(needed, f, nothing, *chunk)


def _same(product_CV):
    return product_CV


def _kept(logits_CV, kept_CK, axis):
    """Logits with LEFT_OUT for tokens that are not kept, as in `from_hidden`."""
    if kept_CK is None:
        return logits_CV
    C, V = logits_CV.shape
    column_CK = kept_CK if axis is None else kept_CK - V * jax.lax.axis_index(axis)
    column_CK = jnp.where((kept_CK >= 0) & (column_CK >= 0), column_CK, V)
    kept_CV = jnp.zeros((C, V), bool).at[jnp.arange(C)[:, None], column_CK].set(True, mode="drop")
    return jnp.where(kept_CV | (kept_CK < 0).all(1, keepdims=True), logits_CV, LEFT_OUT)


@shaped
def from_hidden(
    hidden_AD, head_VD, target_A, *, temperature=1.0, kept_AK=None, needed_A=None, chunk=None, per_chunk=None,
    beside=None, others=(), logits=(), axis=None, turned=None, together=(),
):  # fmt: skip
    """Computes (logp, entropy, logsumexp), each f32[A], of softmax(hidden @ head^T / temperature), chunk by chunk.

    The backward pass recomputes each chunk, unless `chunk` and `per_chunk` are None and there are at most `KEPT`
    logits. Logits and the head's gradient are accumulated in fp32 or wider.

    Args:
      temperature: positive scalar, or one per token, [A].
      kept_AK: i32, ids of the tokens that the sampler kept, -1 = none: the softmax, and rows of logits in `per_chunk`,
        are over these alone; a row of -1 keeps all. The target must be one of them.
      needed_A: bool, the tokens whose results are read: those of others are 0, and chunks of them cost nothing; None =
        all.
      chunk: tokens per chunk; None = `chunk_size(V)` of the platform.
      per_chunk: optional `f(logits_CV, target_C, given, *others_CV) -> pytree of [C, ...]` on whole rows of logits;
        `given` is the chunk's slice of `beside`.
      beside: pytree of [A, ...], passed to `per_chunk` in slices.
      others: pairs (hidden_AE, head_VE) of other models over the same vocabulary, whose logits are passed to
        `per_chunk`, not divided by any temperature.
      logits: for the model and each of the others a function of single products of hidden state and head, applied
        before the temperature: a scale or a soft cap; none = the products are the logits.
      axis: mesh axis over which the heads' rows are sharded, as in `from_logits`; `per_chunk` still gets whole rows.
      together: with `axis`, all axes of the mesh: its devices compute equally many chunks, which hold collectives.
      turned: (the head, what gets its gradient in its own dtype and is not read) in place of `head_VD`, both [D, V].

    No gradient flows into temperatures, `beside` and other models.

    Returns:
      logp_A, entropy_A, lse_A, and per_chunk's results with leading axis A (None without it).
    """
    fixed = jax.lax.stop_gradient
    read, into = (head_VD, head_VD) if turned is None else turned
    A, V = hidden_AD.shape[0], read.shape[0 if turned is None else 1]
    wide = jnp.promote_types(hidden_AD.dtype, jnp.float32)
    C = min(chunk or chunk_size(V, hardware.platform()), A)
    pad = -A % C
    again = chunk or per_chunk or A * V > KEPT
    temperature_A = jnp.broadcast_to(jnp.asarray(temperature, wide), (A,))

    others_AE = [fixed(hidden_AE) for hidden_AE, _ in others]
    narrow = tuple(fixed(head).astype(h.dtype) for h, head in ((hidden_AD, read), *others))
    made = tuple(logits) or (_same,) * len(narrow)
    how = _Chunks(turned is not None, not again, axis, per_chunk, made)
    xs = [hidden_AD, (target_A, fixed(temperature_A), kept_AK, fixed(beside), others_AE)]
    skips = needed_A is not None and C < A
    if skips:  # tokens that are needed first, so that they share chunks
        order_A = jnp.argsort(~needed_A)
        xs = jax.tree.map(lambda x: jnp.take(x, order_A, axis=0), xs)
    edge = lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), "edge").reshape(-1, C, *x.shape[1:])
    h_NCD, given = jax.tree.map(edge, xs)
    needed_N = edge(needed_A[order_A]).any(1) if skips else None
    if skips and axis is not None:
        needed_N = jnp.arange(len(h_NCD)) < jax.lax.pmax(needed_N.sum(), together)
    out = _by_chunks(how, into, h_NCD, narrow, needed_N, given)
    out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:A], out)
    if skips:
        out = jax.tree.map(lambda x: jnp.zeros_like(x).at[order_A].set(x, unique_indices=True), out)
    if needed_A is None:
        return out
    return jax.tree.map(lambda x: jnp.where(needed_A.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)), out)
