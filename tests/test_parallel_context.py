"""Attention over cp and tp by every method, with patterns and sinks, against each sequence alone."""

from functools import partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core.segments import segment_index
from areax.models.attention import chunked
from areax.models.attention.pattern import Pattern
from areax.parallel import context, mesh

B, T, N, K, H, V = 2, 48, 8, 2, 8, 5
NAMES = "out", "dq", "dk", "dv", "dsinks"
LAYOUTS = {"cp8": mesh.Layout(cp=8), "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2), "dp2 tp4": mesh.Layout(dp=2, tp=4)}
PATTERNS = {
    "none": {},
    "softcap": dict(softcap=2.0, scale=0.7),
    "chunk": dict(chunk=7),
    "all": dict(chunk=19, window=10, scale=0.9, softcap=3.0),
}


def segments():
    """Sequences that cross the borders of devices, one-token sequences, padding."""
    segment_BT = np.zeros((B, T), np.int32)
    segment_BT[0, :46] = np.repeat([1, 2, 3, 4, 5], [9, 1, 1, 30, 5])
    segment_BT[1] = 1
    return jnp.asarray(segment_BT)


def on_mesh(layout, method, pattern, q, k, v, dout, sinks_N):
    segment_BT = segments()
    with jax.set_mesh(mesh.make(LAYOUTS[layout])):
        into, back = context.arrange(method, T)
        causal = partial(chunked.causal, pattern=pattern, query_chunk=4)
        ring = partial(chunked.ring, axis="cp", pattern=pattern, query_chunk=4)

        def attend(q, k, v, sinks_N):
            rows = *(into(x) for x in (q, k, v, segment_BT, segment_index(segment_BT))), sinks_N
            return back(context.attention(causal, ring, *rows, method=method, pattern=pattern))

        @jax.jit
        def run(dout, *inputs):
            out, backward = jax.vjp(attend, *inputs)
            return out, *backward(dout)

        return run(dout, q, k, v, sinks_N)


def cases():
    """Each pattern with each method, and each layout with all features; those with most axes too every day. `wide` has
    all."""
    for method in ("gather", "ulysses", "ring"):
        for layout in LAYOUTS:
            if layout == "dp2 tp4" and method != "gather":
                continue  # without cp the methods are the same
            for kind in PATTERNS:
                everyday = layout == "dp2 cp2 tp2" and kind == "all"
                mark = pytest.mark.mesh if layout == "cp8" or kind == "all" else pytest.mark.wide
                yield pytest.param(layout, method, kind, marks=() if everyday else mark)


@pytest.mark.sweep
@pytest.mark.parametrize("layout, method, kind", list(cases()))
def test_sinks_and_patterns_equal_sequences_alone(layout, method, kind):
    """Values and gradients, those of the sinks too, which sum over all rows and positions."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, k, v, dout, sinks_N = draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V), draw(B, T, N, V), 2 * draw(N)
    got = on_mesh(layout, method, Pattern(**PATTERNS[kind]), q, k, v, dout, sinks_N)
    wanted = attention_oracle.alone(q, k, v, segments(), dout, sinks_N, **PATTERNS[kind])
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
