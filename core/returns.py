"""GAE and discounted returns per token; only sampled tokens are steps of the episode.

Tokens between them (user and tool messages) are skipped: they are neither discounted nor given a value.
Linear recurrences are solved by an associative scan, in log2 T parallel steps.
"""

import jax
import jax.numpy as jnp

from .shapes import shaped


@shaped
def gae(reward_BT, value_BT, sampled_BT, segment_BT, *, gamma: float = 1.0, lam=1.0):
    """Generalised advantage estimation (arXiv:1506.02438), 0 off sampled tokens; not meant to be differentiated.

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, next = the segment's next sampled token; after
    the last one both V_next and A_next are 0, also if generation was truncated.

    Args:
      reward_BT: reward of each sampled token.
      value_BT: the critic's value at the position that predicts the sampled token, as in `Scores.value_BT`.
      lam: a number, or one per token, [B, T], the same over each sequence.
    """
    no = jnp.zeros((*segment_BT.shape[:-1], 1), bool)
    same_BT = jnp.concatenate([segment_BT[..., 1:] == segment_BT[..., :-1], no], -1) & (segment_BT > 0)
    after = lambda x_BT: jnp.concatenate([x_BT[..., 1:], jnp.zeros_like(x_BT[..., :1])], -1)
    ends_BT = same_BT & after(sampled_BT)
    next_BT = _backward(jnp.where(same_BT & ~ends_BT, 1.0, 0.0), jnp.where(ends_BT, after(value_BT), 0))
    delta_BT = jnp.where(sampled_BT, reward_BT + gamma * next_BT - value_BT, 0)
    decay_BT = jnp.where(sampled_BT, gamma * lam, 1.0)
    return jnp.where(sampled_BT, _backward(jnp.where(same_BT, decay_BT, 0), delta_BT), 0)


@shaped
def returns(reward_BT, sampled_BT, segment_BT, *, gamma: float = 1.0):
    """Discounted sum of rewards from each sampled token on; 0 off sampled tokens."""
    return gae(reward_BT, jnp.zeros_like(reward_BT), sampled_BT, segment_BT, gamma=gamma)


@shaped
def of_turns(reward_BT, first_BT, segment_BT, *, gamma: float = 1.0):
    """Sum of rewards from each token on, those of the k-th turn behind its own discounted by gamma^k.

    Args:
      first_BT: the first token of each turn.
    """
    no = jnp.zeros((*segment_BT.shape[:-1], 1), bool)
    same_BT = jnp.concatenate([segment_BT[..., 1:] == segment_BT[..., :-1], no], -1) & (segment_BT > 0)
    ends_BT = jnp.concatenate([first_BT[..., 1:], no], -1)
    return _backward(jnp.where(same_BT, jnp.where(ends_BT, gamma, 1.0), 0), reward_BT)


def _backward(a_BT, b_BT):
    """Solves x_t = a_t x_{t+1} + b_t backwards, with x = 0 after the end."""
    join = lambda right, left: (left[0] * right[0], left[0] * right[1] + left[1])
    return jax.lax.associative_scan(join, (a_BT.astype(b_BT.dtype), b_BT), reverse=True, axis=b_BT.ndim - 1)[1]
