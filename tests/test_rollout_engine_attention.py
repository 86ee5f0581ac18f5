"""The decoding step's attention over cached segments against each sequence alone."""

from functools import partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.models.attention.pattern import Pattern
from areax.rollout.engine import decode

N, K, H, V = 6, 2, 8, 5
LENGTHS = 16, 16, 32  # of the cache's segments
POSITIONS = 0, 5, 16, 37, 63  # one a slot: the first, within and at the edges of segments, the last
PATTERNS = {
    "none": {},
    "window": dict(window=7),
    "chunk": dict(chunk=11),
    "softcap": dict(softcap=2.0, scale=0.7),
    "all": dict(chunk=27, window=13, scale=0.9, softcap=3.0),
}


@partial(jax.jit, static_argnames=("pattern",))
def attend(q_S1NH, layer, position_S, sinks_N, first, pattern):
    last = jnp.max(position_S)
    return decode.attend_segments(q_S1NH, layer, position_S, first, last, sinks_N, pattern=pattern)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", PATTERNS)
def test_each_slot_is_the_last_query_of_its_sequence(kind, sinks):
    """Whatever is cached behind it, and whether segments before the first key are read or skipped."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    S, L, pattern = len(POSITIONS), sum(LENGTHS), Pattern(**PATTERNS[kind])
    q, k, v, sinks_N = draw(S, 1, N, H), draw(S, L, K, H), draw(S, L, K, V), 2 * draw(N) if sinks else None
    ends = np.cumsum(LENGTHS)[:-1]
    parts = np.split(k.transpose(0, 2, 3, 1), ends, 3), np.split(v.transpose(0, 2, 1, 3), ends, 2)
    layer = list(zip(*parts, strict=True))
    position_S = np.array(POSITIONS, np.int32)
    got = attend(q, layer, position_S, sinks_N, jnp.int32(0), pattern)
    for slot, position in enumerate(POSITIONS):
        own = slice(slot, slot + 1), slice(0, position + 1)
        rows = np.zeros((1, position + 1, N, H), np.float32), k[own], v[own]
        rows[0][:, -1] = q[slot]
        segment_BT, dout = np.ones((1, position + 1), int), np.zeros((1, position + 1, N, V))
        out = attention_oracle.alone(*rows, segment_BT, dout, sinks_N, **PATTERNS[kind])[0]
        np.testing.assert_allclose(got[slot, 0], out[0, -1], atol=2e-6)
    far = POSITIONS.index(37)
    only = slice(far, None)  # slots whose keys all lie beyond the first segment, where the pattern has limits
    layer = [(keys[only], values[only]) for keys, values in layer]
    first = jnp.maximum(pattern.first(jnp.int32(37)), 0)
    np.testing.assert_array_equal(attend(q[only], layer, position_S[only], sinks_N, first, pattern), got[only])
