"""Recurrent layers over tries against rows of one sample each."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from areax import models
from areax.models import layer
from areax.models.layers import conv, delta, mamba, recurrence
from areax.parallel import mesh

N, G, K, V, W = 4, 2, 6, 5, 4
CHUNK = 8
ONE = mesh.Layout()
RECORD = layer.Recurrent((("any", (1,)),))


class Places(NamedTuple):
    """Tries at places T, and where the tokens of their samples S are: own_SL, -1 behind a sample's end."""

    parent_BT: np.ndarray
    segment_BT: np.ndarray
    row_S1: np.ndarray
    own_SL: np.ndarray


def placed(samples, C):
    """(parents, whether a token is there, the places of each sample) of one row: token by token, depth first; nodes
    start at multiples of C, where a token is the first of all or has siblings."""
    children: dict[tuple, dict] = {}
    for tokens in samples:
        for t, token in enumerate(tokens):
            children.setdefault(tuple(tokens[:t]), {})[token] = None
    parent, real, at = [], [], {}

    def visit(path):
        branches = children.get(path, {})
        for token in branches:
            while (not path or len(branches) > 1) and len(parent) % C:
                parent.append(len(parent))
                real.append(0)
            here = at[*path, token] = len(parent)
            parent.append(at.get(path, here))
            real.append(1)
            visit((*path, token))

    visit(())
    return parent, real, [[at[tuple(tokens[: t + 1])] for t in range(len(tokens))] for tokens in samples]


def layout(rows, C, T=None):
    made = [placed(samples, C) for samples in rows]
    T = T or max(len(parent) for parent, *_ in made) + 3
    parent_BT, segment_BT = np.tile(np.arange(T, dtype=np.int32), (len(rows), 1)), np.zeros((len(rows), T), np.int32)
    for b, (parent, real, _) in enumerate(made):
        parent_BT[b, : len(parent)], segment_BT[b, : len(parent)] = parent, real
    own = [(b, places) for b, (*_, of_samples) in enumerate(made) for places in of_samples]
    own_SL = np.full((len(own), max(len(places) for _, places in own)), -1)
    for s, (_, places) in enumerate(own):
        own_SL[s, : len(places)] = places
    return Places(parent_BT, segment_BT, np.array([[b] for b, _ in own]), own_SL)


def grown(seed, count, longest):
    """Samples of which each goes on from a place in one before: branches of one token and of many, ends within others,
    the same again, and sometimes a trie of its own."""
    rng = np.random.default_rng(seed)
    samples = [[*rng.integers(1, 99, longest)]]
    for i in range(1, count):
        stem = samples[rng.integers(i)] if i % 5 else []
        cut = int(rng.integers(len(stem) + 1))
        new = int(rng.choice([0, 1, 2, CHUNK, longest])) if cut else 3
        samples.append([*stem[:cut], *rng.integers(100 * i, 100 * i + 99, new)])
    return samples


TRUNK = [*range(1, 60)]
ROWS = {
    "random": [grown(0, 12, 21), grown(1, 7, 40), grown(2, 3, 5)],
    "deep": [[[*TRUNK[:i], 100 + i] for i in range(1, 25)], [TRUNK, *([*TRUNK[:i], 100] for i in range(57, 2, -6))]],
    "prefixes": [[TRUNK[:i] for i in (3, 30, 30, 8, 59)], [[1], [2], [3, 4], [1]]],
}
DRAW = {
    "delta": dict(q=(G, K), k=(G, K), v=(N, V), beta=(N,), g=(N,)),
    "mamba": dict(x=(N, V), dt=(N,), A=None, b=(G, K), c=(G, K), D=None),
}
MODULES = {"delta": delta, "mamba": mamba}
GATES = {"delta": ("beta", "g"), "mamba": ("dt",)}


def drawn(kind, places: Places):
    """Inputs by name at all places, those of padding large."""
    rng, (B, T) = np.random.default_rng(3), places.parent_BT.shape
    made = {name: rng.normal(size=(N,) if tail is None else (B, T, *tail)) for name, tail in DRAW[kind].items()}
    if kind == "delta":
        for name in ("q", "k"):
            made[name] /= np.linalg.norm(made[name], axis=-1, keepdims=True)
        made |= dict(beta=1 / (1 + np.exp(-made["beta"])), g=-0.3 * np.logaddexp(0, made["g"]))
    else:
        made |= dict(dt=np.logaddexp(0, made["dt"]), A=-np.array([0.1, 1.0, 0.3, 0.05]))
    padding = lambda x: np.where((places.segment_BT > 0).reshape(B, T, *[1] * (x.ndim - 2)), x, 50 * x)
    return {name: np.float32(padding(x) if x.ndim > 1 else x) for name, x in made.items()}


def of_samples(places: Places, x_BT):
    """Values at the tokens of samples, [S, L, ...]."""
    return x_BT[places.row_S1, np.maximum(places.own_SL, 0)]


def both(places: Places, over_tries, over_samples, inputs, on=ONE):
    """(outputs at the tokens of samples, gradients of the inputs), over tries on a mesh, and over rows of samples."""
    rng = np.random.default_rng(4)
    shape = jax.eval_shape(over_samples, inputs).shape
    real_SL = (places.own_SL >= 0).reshape(*places.own_SL.shape, *[1] * (len(shape) - 2))
    dout_SL = np.where(real_SL, rng.normal(size=shape), 0).astype(np.float32)

    def run(fn, inputs):
        out_SL, pull = jax.vjp(fn, inputs)
        return jnp.where(real_SL, out_SL, 0), pull(dout_SL)[0]

    tries = jax.jit(lambda inputs: run(lambda inputs: of_samples(places, over_tries(inputs)), inputs))
    with jax.set_mesh(mesh.make(on)):
        got = jax.device_get(tries(inputs))
    return got, jax.jit(lambda inputs: run(over_samples, inputs))(inputs)


def check(places: Places, got, want):
    """The same within 1e-5 of the largest value, and no gradients at padding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max())), got, want)
    for name, x in got[1].items():
        assert x.any()
        assert x.shape[:2] != places.segment_BT.shape or not x[places.segment_BT == 0].any(), name


def masked(kind, inputs, segment_BT):
    gated = {name: jnp.where(segment_BT[..., None] > 0, inputs[name], 0) for name in GATES[kind]}
    return [(inputs | gated)[name] for name in DRAW[kind]]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", MODULES)
def test_branches_start_with_the_state_of_their_parent(kind, rows):
    places, module = layout(ROWS[rows], CHUNK), MODULES[kind]

    def over_tries(inputs):
        return module.chunked(*masked(kind, inputs, places.segment_BT), places.segment_BT, CHUNK, places.parent_BT)

    def over_samples(inputs):
        rows = (of_samples(places, inputs[name]) if tail else inputs[name] for name, tail in DRAW[kind].items())
        return module.chunked(*rows, np.int32(places.own_SL >= 0))

    check(places, *both(places, over_tries, over_samples, drawn(kind, places)))


@pytest.mark.sweep
@pytest.mark.parametrize("width", [W, 1])
@pytest.mark.parametrize("C", [1, CHUNK])
def test_convolutions_read_what_came_before_in_the_sample(C, width):
    places = layout([samples for rows in ROWS.values() for samples in rows], C)
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    inputs = {"x": draw(*places.parent_BT.shape, 6), "weight": draw(6, width), "bias": draw(6)}

    def over_tries(inputs):
        return conv.over_tries(inputs["x"], inputs["weight"], places.parent_BT, C, inputs["bias"])

    def over_samples(inputs):
        rows_SLC, segment_SL = of_samples(places, inputs["x"]), np.int32(places.own_SL >= 0)
        return conv.convolve(rows_SLC, inputs["weight"], segment_SL, inputs["bias"])

    check(places, *both(places, over_tries, over_samples, inputs))


LAYOUTS = {"one": ONE, "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2), "cp2": mesh.Layout(cp=2)}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "on", ["one", *(pytest.param(name, marks=pytest.mark.mesh) for name in ("cp2", "dp2 cp2 tp2"))]
)
@pytest.mark.parametrize("kind", MODULES)
def test_layers_over_tries(kind, on):
    """Convolution, gates and recurrence as a layer uses them, with the platform's chunk."""
    places = layout([ROWS["random"][0], ROWS["deep"][1]], recurrence.chunk_size(), 1280)
    inputs, rng = drawn(kind, places), np.random.default_rng(6)
    mixed = [name for name, tail in DRAW[kind].items() if tail and name not in GATES[kind]]
    taps = {f"{name}_taps": np.float32(rng.normal(size=(np.prod(DRAW[kind][name]), W)) / W) for name in mixed}

    def run(inputs, segment_BT, parent_BT=None):
        mix = layer.over_rows(RECORD, segment_BT, "gather", parent_BT)
        convolve = lambda name, x: mix.convolve(name, x.reshape(*x.shape[:2], -1), inputs[f"{name}_taps"])
        seen = {name: convolve(name, inputs[name]).reshape(inputs[name].shape) for name in mixed}
        seen |= {name: mix.gate(inputs[name]) for name in GATES[kind]}
        return mix.recur("any", MODULES[kind], *(seen.get(name, inputs[name]) for name in DRAW[kind]))

    over_tries = lambda inputs: run(inputs, places.segment_BT, places.parent_BT)

    def over_samples(inputs):
        rows = {name: of_samples(places, x) if DRAW[kind].get(name) else x for name, x in inputs.items()}
        return run(rows, np.int32(places.own_SL >= 0))

    check(places, *both(places, over_tries, over_samples, inputs | taps, LAYOUTS[on]))


def gradients(kind, places: Places):
    """(the gradients of all inputs, given parents and the inputs; the inputs)."""

    def loss(inputs, parent_BT):
        rows, segment_BT = (inputs[name] for name in DRAW[kind]), jnp.ones_like(parent_BT)
        return jnp.sum(jnp.square(MODULES[kind].chunked(*rows, segment_BT, parent_BT=parent_BT)))

    return jax.grad(loss), drawn(kind, places)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", MODULES)
def test_memory_is_linear_in_the_trie_and_no_loop_is_over_tokens(kind):
    gradient, inputs = gradients(kind, layout(ROWS["prefixes"], 32))

    def memory(T):
        resized = {name: (1, T, *x.shape[2:]) if x.ndim > 1 else x.shape for name, x in inputs.items()}
        shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in resized.items()}
        traced = jax.jit(gradient).trace(shapes, jax.ShapeDtypeStruct((1, T), np.int32))
        assert max(lengths(traced.jaxpr.jaxpr)) <= T // 32
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    half, whole = map(memory, (1024, 2048))
    tokens = sum(np.prod(x.shape[2:]) * 4 for x in inputs.values() if x.ndim > 1)
    states = N * K * V * 4 / 32
    assert whole < 2.1 * half
    assert whole < 4 * 2048 * (tokens + 2 * states)


def lengths(jaxpr):
    """Those of all loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in core.jaxprs_in_params(eqn.params):
            yield from lengths(inner)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", MODULES)
def test_rows_and_heads_are_computed_where_they_are(kind):
    """Sharded over rows and heads, no device needs anything of another, but for sums of gradients over rows."""
    gradient, inputs = gradients(kind, layout(ROWS["prefixes"], 32, 256))
    on = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda *axes: NamedSharding(on, PartitionSpec(*axes))
    spec = lambda x: place("dp", None, "tp") if x.ndim > 1 else place("tp")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec(x)) for name, x in inputs.items()}
    parents = jax.ShapeDtypeStruct((2, 256), np.int32, sharding=place("dp"))
    program = jax.jit(gradient).lower(shapes, parents).compile().as_text()
    assert not any(f"{name}(" in program for name in ("all-gather", "all-to-all", "collective-permute"))
    assert ("all-reduce(" in program) == (kind == "mamba")


@pytest.mark.parametrize("family, size", [("qwen3_next", 32), ("nemotron_h", 32), ("qwen3", 1)])
def test_nodes_start_at_chunks_of_models_with_states(family, size):
    source = tiny_families.COMMON | tiny_families.OPTIONS[family] | dict(model_type=family)
    config = models.config_from_hf(source)
    assert models.trie_alignment(config) == size
    layers = (layer.STATELESS, *(each for each in config.records if isinstance(each, layer.Attention)))
    assert models.trie_alignment(dataclasses.replace(config, records=layers)) == 1
