"""Divergences between a student's and a teacher's next-token distributions, per token, in nats.

For distributions S (student) and T (teacher), both softmax(logits / temperature):

  forward   KL(T || S): mode-covering (Hinton et al., arXiv:1503.02531)
  reverse   KL(S || T): mode-seeking (MiniLLM, arXiv:2306.08543)
  js        beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S (GKD, arXiv:2306.13649)

Of two vocabularies, the tokens that both have are compared individually and all others as one outcome (`common`,
`top_common`); `unmatched` compares the others by their sorted probabilities.

js goes to 0 at both ends of beta: js / beta tends to the forward KL as beta -> 0, js / (1 - beta) to the reverse KL as
beta -> 1. There is no factor temperature^2. Gradients flow only into the student.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .checks import one_of
from .shapes import shaped

Divergence = Literal["forward", "reverse", "js"]
ABSENT = -1e30  # log-probability of what is no outcome: its probability is 0, and 0 x log 0 no NaN


@shaped
def full(logits_CV, teacher_CV, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """The divergence [C] over the whole vocabulary from both models' logits, in fp32 or wider."""
    return between(_logp(logits_CV, temperature), _logp(teacher_CV, temperature), kind, beta)


@shaped
def top(logits_CV, ids_CK, logp_CK, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """The divergence [C] over K + 1 outcomes: K tokens chosen by the teacher, and all others merged into a tail.

    A lower bound of the divergence over the whole vocabulary, since merging outcomes can only lower it; equal if K = V,
    where there is no tail.

    Args:
      ids_CK: distinct tokens, such as the teacher's likeliest.
      logp_CK: the teacher's log-probabilities of them at this temperature. The tail's mass is at least the dtype's
        epsilon, since less is rounding error.
    """
    logits_CV = _wide(logits_CV) / temperature
    (C, V), K = logits_CV.shape, ids_CK.shape[1]
    lse_C1 = jax.nn.logsumexp(logits_CV, -1, keepdims=True)
    student_CK = jnp.take_along_axis(logits_CV, ids_CK, -1) - lse_C1
    teacher_CK = logp_CK.astype(logits_CV.dtype)
    if K == V:
        return between(student_CK, teacher_CK, kind, beta)
    # Summed over the other tokens: 1 - sum would cancel catastrophically.
    others_CV = logits_CV.at[jnp.arange(C)[:, None], ids_CK].set(-jnp.inf)
    tail_C1 = jax.nn.logsumexp(others_CV, -1, keepdims=True) - lse_C1
    rest_C1 = 1 - jnp.sum(jnp.exp(teacher_CK), -1, keepdims=True)
    rest_C1 = jnp.log(jnp.maximum(rest_C1, jnp.finfo(rest_C1.dtype).eps))
    join = lambda *parts: jnp.concatenate(parts, -1)
    return between(join(student_CK, tail_C1), join(teacher_CK, rest_C1), kind, beta)


def common(logits_CV, teacher_CW, common_2K, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """The divergence [C] between distributions over two vocabularies, over K + 1 outcomes: the tokens that both have,
    and all others, of which each may have its own, merged into a tail.

    Args:
      common_2K: ids (numpy) of these tokens in V and in W. A tail's mass is at least the dtype's epsilon.
    """

    def outcomes(logits_CV, ids_K):
        logp_CV = _logp(logits_CV, temperature)
        rest_R = np.setdiff1d(np.arange(logp_CV.shape[1]), ids_K)
        floor = np.full((len(logp_CV), 1), np.log(jnp.finfo(logp_CV.dtype).eps), logp_CV.dtype)
        tail_C1 = jax.nn.logsumexp(logp_CV[:, rest_R], -1, keepdims=True) if len(rest_R) else floor
        return jnp.concatenate([logp_CV[:, ids_K], jnp.maximum(tail_C1, floor)], -1)

    return between(outcomes(logits_CV, common_2K[0]), outcomes(teacher_CW, common_2K[1]), kind, beta)


@shaped
def top_common(logits_CV, ids_CK, logp_CK, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """As `top`, for a teacher with another vocabulary, whose tokens that the student lacks have the id -1: they are
    among all others."""
    V, there_CK = logits_CV.shape[1], ids_CK >= 0
    logp_CV = _logp(logits_CV, temperature)
    picked_CK = jnp.take_along_axis(logp_CV, jnp.where(there_CK, ids_CK, 0), -1)
    chosen = lambda x_CK: jnp.where(there_CK, x_CK, ABSENT)
    student_CK, teacher_CK = chosen(picked_CK), chosen(logp_CK.astype(logp_CV.dtype))
    row_C1 = jnp.arange(len(logp_CV))[:, None]
    others_CV = logp_CV.at[row_C1, jnp.where(there_CK, ids_CK, V)].set(-jnp.inf, mode="drop")
    floor = jnp.log(jnp.finfo(logp_CV.dtype).eps)
    tail_C1 = jnp.maximum(jax.nn.logsumexp(others_CV, -1, keepdims=True), floor)
    rest_C1 = jnp.log1p(-jnp.minimum(jnp.sum(jnp.exp(teacher_CK), -1, keepdims=True), 1 - jnp.exp(floor)))
    join = lambda *parts: jnp.concatenate(parts, -1)
    return between(join(student_CK, tail_C1), join(teacher_CK, rest_C1), kind, beta)


def unmatched(logits_CV, teacher_CW, common_2K, temperature: float = 1.0):
    """sum_i |s_i - t_i| [C]: s and t are the probabilities of the tokens that only the student, and only the teacher,
    has, in descending order, the shorter list followed by zeros.

    Universal logit distillation (ULD, arXiv:2402.12030), restricted to these tokens as in TRL's GOLD.
    """

    def ordered(logits_CV, ids_K):
        p_CV = jnp.exp(_logp(logits_CV, temperature))
        rest_R = np.setdiff1d(np.arange(p_CV.shape[1]), ids_K)
        return -jnp.sort(-p_CV[:, rest_R], -1)

    s_CR, t_CR = ordered(logits_CV, common_2K[0]), jax.lax.stop_gradient(ordered(teacher_CW, common_2K[1]))
    R = max(s_CR.shape[1], t_CR.shape[1])
    padded = lambda x_CR: jnp.pad(x_CR, ((0, 0), (0, R - x_CR.shape[1])))
    return jnp.sum(jnp.abs(padded(s_CR) - padded(t_CR)), -1)


def between(student_CK, teacher_CK, kind: Divergence, beta: float):
    """The divergence [C] between log-probabilities over the same, exhaustive K outcomes."""
    one_of("divergence: kind", kind, Divergence)
    s_CK, t_CK = student_CK, jax.lax.stop_gradient(teacher_CK)
    kl = lambda p_CK, q_CK: jnp.sum(jnp.exp(p_CK) * (p_CK - q_CK), -1)
    if kind == "forward":
        return kl(t_CK, s_CK)
    if kind == "reverse":
        return kl(s_CK, t_CK)
    mixed_CK = jnp.logaddexp(t_CK + jnp.log(beta), s_CK + jnp.log1p(-beta))
    return beta * kl(t_CK, mixed_CK) + (1 - beta) * kl(s_CK, mixed_CK)


def teacher_top(teacher_CV, K: int, temperature: float = 1.0):
    """(ids [C, K], log-probabilities [C, K]) of the teacher's likeliest tokens, for `top`."""
    logp_CK, ids_CK = jax.lax.top_k(_logp(teacher_CV, temperature), K)
    return ids_CK, logp_CK


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _logp(logits_CV, temperature: float):
    return jax.nn.log_softmax(_wide(logits_CV) / temperature, -1)
