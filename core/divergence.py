"""Divergences of a student's next-token distribution from a teacher's, a token each, in nats.

Of distributions S (student) and T (teacher), both softmax(logits / temperature):

  forward   KL(T || S): the student covers whatever the teacher may say (Hinton et al., arXiv:1503.02531)
  reverse   KL(S || T): the student keeps to what the teacher finds likely (MiniLLM, arXiv:2306.08543)
  js        beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S (GKD, arXiv:2306.13649)

js itself goes to 0 at both ends of beta: js / beta goes to the forward KL as beta -> 0, js / (1 - beta) to the reverse
one as beta -> 1. There is no factor temperature^2. Gradients flow into the student alone.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from .shapes import shaped

Divergence = Literal["forward", "reverse", "js"]


@shaped
def full(logits_CV, teacher_CV, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """The divergence [C] over the whole vocabulary from the logits of both, in fp32 or wider."""
    return between(_logp(logits_CV, temperature), _logp(teacher_CV, temperature), kind, beta)


@shaped
def top(logits_CV, ids_CK, logp_CK, *, kind: Divergence, beta: float = 0.5, temperature: float = 1.0):
    """The divergence [C] over K + 1 outcomes: K tokens that the teacher names, and all others as one, the tail.

    Merging outcomes can only lower a divergence, so this bounds that over the whole vocabulary from below. With K = V
    there is no tail, and both are equal.

    Args:
      ids_CK: different tokens, such as the teacher's likeliest.
      logp_CK: the teacher's log-probabilities of them at this temperature. What they leave to the tail counts as at
        least the dtype's epsilon, for less cannot be told from rounding.
    """
    logits_CV = _wide(logits_CV) / temperature
    (C, V), K = logits_CV.shape, ids_CK.shape[1]
    lse_C1 = jax.nn.logsumexp(logits_CV, -1, keepdims=True)
    student_CK = jnp.take_along_axis(logits_CV, ids_CK, -1) - lse_C1
    teacher_CK = logp_CK.astype(logits_CV.dtype)
    if K == V:
        return between(student_CK, teacher_CK, kind, beta)
    # Summed over the others themselves: 1 - sum would cancel.
    others_CV = logits_CV.at[jnp.arange(C)[:, None], ids_CK].set(-jnp.inf)
    tail_C1 = jax.nn.logsumexp(others_CV, -1, keepdims=True) - lse_C1
    rest_C1 = 1 - jnp.sum(jnp.exp(teacher_CK), -1, keepdims=True)
    rest_C1 = jnp.log(jnp.maximum(rest_C1, jnp.finfo(rest_C1.dtype).eps))
    join = lambda *parts: jnp.concatenate(parts, -1)
    return between(join(student_CK, tail_C1), join(teacher_CK, rest_C1), kind, beta)


def between(student_CK, teacher_CK, kind: Divergence, beta: float):
    """The divergence [C] of log-probabilities of the same K outcomes, which are all there are."""
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
