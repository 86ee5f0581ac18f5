"""Divergences between a student's and a teacher's next-token distributions, per token, in nats.

For distributions S (student) and T (teacher), both softmax(logits / temperature):

  forward   KL(T || S): mode-covering (Hinton et al., arXiv:1503.02531)
  reverse   KL(S || T): mode-seeking (MiniLLM, arXiv:2306.08543)
  js        beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S (GKD, arXiv:2306.13649)

js goes to 0 at both ends of beta: js / beta tends to the forward KL as beta -> 0, js / (1 - beta) to the reverse KL as
beta -> 1. There is no factor temperature^2. Gradients flow only into the student.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from .checks import one_of
from .shapes import shaped

Divergence = Literal["forward", "reverse", "js"]


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
