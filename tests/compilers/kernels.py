"""Kernels at the sizes that they promise to compute, lowered for devices that need not be here."""

from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from areax.adapters.commands.programs import Program
from areax.models.attention import cudnn, splash, triton
from areax.models.attention.pattern import PLAIN, Pattern
from areax.models.layers import grouped, grouped_triton
from areax.parallel import mesh
from areax.rollout.engine.programs import attention_gpu, attention_tpu

BACKENDS = {"splash": splash, "triton": triton, "cudnn": cudnn}
ALL = Pattern(window=300, chunk=500, scale=0.3, softcap=20.0)


def program(lower, *args, **options) -> Program:
    """A Program of one device of a function of this module."""
    return Program(1, partial(_on_mesh, lower, args, options), 0)


def _on_mesh(lower, args, options, devices):
    on = mesh.make(mesh.Layout(), devices)
    whole = NamedSharding(on, PartitionSpec())
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
    with jax.set_mesh(on):
        f, inputs = lower(like, *args, **options)
        return jax.jit(f).lower(*inputs)


def _with_gradients(f, count: int):
    """f's result, and what comes back from it to its first inputs."""

    def run(*inputs):
        rest = inputs[count:]
        out, back = jax.vjp(lambda *own: f(*own, *rest), *inputs[:count])
        return out, *back(out)

    return run


def packed(
    like, name: str, H: int, V: int | None = None, heads: tuple[int, int] = (8, 2), dtype: str = "bfloat16",
    pattern: Pattern = PLAIN, sinks: bool = False, T: int = 1024,
):  # fmt: skip
    """Attention over packed rows and its gradients, by a backend."""
    (N, K), V = heads, V or H
    q, k, v = (like(dtype, 2, T, *sizes) for sizes in ((N, H), (K, H), (K, V)))
    own = (like("float32", N),) if sinks else ()
    causal = BACKENDS[name].causal
    run = lambda q, k, v, *rest: causal(q, k, v, rest[-1], *rest[:-1], pattern=pattern)
    return _with_gradients(run, 3 + len(own)), (q, k, v, *own, like("int32", 2, T))


def gathered(like, name: str, H: int, dtype: str = "bfloat16", pattern: Pattern = PLAIN, T: int = 1024, S: int = 4096):
    """The same over other keys, four parts of a row of which one is the queries' own."""
    q, k, v = (like(dtype, 2, *sizes) for sizes in ((T, 8, H), (S, 2, H), (S, 2, H)))

    def run(q, k, v, here, index, there, key_index):
        keys = dict(index_BT=index, key_segment_BS=there, key_index_BS=key_index)
        return BACKENDS[name].causal(q, k, v, here, pattern=pattern, **keys)

    return _with_gradients(run, 3), (q, k, v, *[like("int32", 2, size) for size in (T, T, S, S)])


def block(like, H: int, V: int | None = None, dtype: str = "bfloat16", pattern: Pattern = PLAIN, T: int = 1024):
    """A block of a ring of devices: its output, and gradients in fp32."""
    q, k, v = (like(dtype, 2, T, *sizes) for sizes in ((8, H), (2, H), (2, V or H)))
    how = dict(pattern=pattern, interpret=False, aligned=False)

    def run(q, k, v, *where):
        here, there = where[:2], where[2:]
        out, lse = triton.forward(q, k, v, here, there, **how)
        return out, *triton.backward(q, k, v, here, there, lse, lse, out, **how)

    return run, (q, k, v, *[like("int32", 2, T)] * 4)


def tries(like, H: int, V: int | None = None, dtype: str = "bfloat16", pattern: Pattern = PLAIN, T: int = 1024):
    """Attention over tries and its gradients."""
    q, k, v = (like(dtype, 2, T, *sizes) for sizes in ((8, H), (2, H), (2, V or H)))
    return _with_gradients(partial(triton.tree, pattern=pattern), 3), (q, k, v, *[like("int32", 2, T)] * 4)


READERS = {"gpu": attention_gpu, "tpu": attention_tpu}


def pages(
    like, platform: str, H: int, V: int | None = None, heads: tuple[int, int] = (8, 2), T: int = 1, C: int = 128,
    dtype: str = "bfloat16", kept: str | None = None, pattern: Pattern = PLAIN,
):  # fmt: skip
    """Attention of T queries of each of 16 sequences over pages of C tokens, as the engine calls it."""
    (N, K), V, B, X = heads, V or H, 16, 16
    keys, values = (like(kept or dtype, 99, K, *sizes) for sizes in ((H, C), (C, V)))
    module = READERS[platform]
    assert module.supports(keys, values), (keys, values)
    R = N // K * T
    inputs = like(dtype, B, K, R, H), (keys, values), like("int32", B, X), like("int32", B, R)
    return partial(module.read, pattern=pattern), (*inputs, like("int32", B), like("int32", B))


def experts(like, name: str, E: int, F: int, D: int, rows: int = 4096, dtype: str = "bfloat16"):
    """The grouped matmul of rows sorted by expert, and its gradients."""
    chosen = np.arange(rows, dtype=np.int32) % E
    plan = jax.eval_shape(partial(grouped.plan, E=E), chosen)
    of = lambda x: like(x.dtype, *x.shape)
    R = len(plan.pair_R)
    x, w = like(dtype, R, D), like(dtype, E, F, D)
    if name == "triton":
        assert grouped_triton.fits(R // len(plan.expert_S), F, D), R // len(plan.expert_S)
        return _with_gradients(grouped_triton.matmul, 2), (x, w, of(plan.expert_S), of(plan.used), of(plan.rows_E))
    f = {"megablox": grouped.megablox, "ragged_dot": grouped.ragged_dot}[name]
    return _with_gradients(f, 2), (x, w, of(plan.rows_E))
