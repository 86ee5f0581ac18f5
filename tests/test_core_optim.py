"""Optimisers beside loops in float64 and torch's, matrix by matrix; decay, clipping, schedules, averages, shards."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from areax.adapters import orbax as states
from areax.adapters.commands import aot
from areax.core import matrixwise, metrics, optim, packing, param, step
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

weight = lambda axes, key="w.weight", **rest: param.Param(axes, (key,), jax.nn.initializers.normal(), **rest)
DIMS = dict(vocab=6, embed=8, heads=4, experts=2, expert_ffn=6, expert_embed=8, one=1)
LAYER = {
    "norm1": weight("embed"), "q": weight("heads embed"), "o": weight("embed heads"),
    "q_bias": weight("heads", "q.bias"), "shared_router": weight("one embed"),
    "expert_up": weight("experts expert_ffn expert_embed"),
}  # fmt: skip
TOP = {"embed": weight("vocab embed"), "head": weight("vocab embed"), "norm": weight("embed")}
TABLE = param.Table(TOP, (param.Stack((0, 1, 2), LAYER),), DIMS)
SMALL = param.Table(  # for meshes, with every kind of leaf
    {name: TOP[name] for name in ("embed", "norm")},
    (param.Stack((0, 1), {name: LAYER[name] for name in ("q", "q_bias", "expert_up")}),),
    DIMS,
)
FROZEN = replace(TABLE, top=TOP | {"embed": replace(TOP["embed"], trainable=False)})
LR, DECAY, NAMES = 0.1, 0.3, tuple(optim.USES)
RATES = (LR, LR * 2 / 3, LR / 3)


def draw(table, seed):
    rng = np.random.default_rng(seed)
    return param.tree_map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), table)


WEIGHTS, GRADS = draw(TABLE, 0), [draw(TABLE, seed) for seed in (1, 2, 3)]


LEAVES = param.leaf_list(TABLE)


def test_kinds():
    """A bias of each expert is no matrix, which Muon would orthogonalise and decay would shrink."""
    kinds = {"embed": "norm", "vocab embed": "embedding", "embed heads": "matrix", "experts expert_ffn embed": "matrix"}
    assert {axes: optim.kind(weight(axes)) for axes in kinds} == kinds
    assert optim.kind(weight("heads", "q.bias")) == optim.kind(weight("experts expert_ffn", "up_bias")) == "bias"


def spec(name, **changes):
    """Rates 1, 2/3 and 1/3 of LR, all that a step does but clipping."""
    usual = dict(lr=LR, schedule="linear", steps=3, weight_decay=DECAY, clip=0)
    return optim.Optimizer(name, **usual | changes)


def run(optimizer, weights=WEIGHTS, grads=GRADS):
    """The weights before and after each step, and the last state."""

    @functools.partial(jax.jit, compiler_options=aot.CHEAP)
    def one(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    out, opt_state = [weights], optimizer.init(weights)
    for g in grads:
        params, opt_state = one(out[-1], opt_state, g)
        out.append(params)
    return out, opt_state


@functools.cache
def ran(options, steps=3):
    return run(optim.make_optimizer(options, TABLE), grads=GRADS[:steps])


def apart(leaf):
    """Where each matrix or vector of a leaf lies."""
    return list(np.ndindex(leaf.shape[: len(leaf.shape) - min(2, len(leaf.param.axes.split()))]))


def close(got, wanted, start, tolerance):
    """Changes agree, relative to the largest of a leaf, up to the rounding of weights in fp32."""
    for a, b, s in zip(*map(jax.tree.leaves, (got, wanted, start)), strict=True):
        a, b, s = (np.asarray(x, np.float64) for x in (a, b, s))
        np.testing.assert_allclose(a, b, atol=tolerance * abs(b - s).max() + 3e-7 * abs(s).max(), rtol=0)


# -- the papers' algorithms, in float64 on one matrix or vector ------------------------------------


def adam(grads, w, b1=0.9, b2=0.95, eps=1e-8):
    m = v = 0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = yield w, (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def lion(grads, w, b1=0.9, b2=0.95):
    m = 0
    for g in grads:
        w = yield w, np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g


def sgd(grads, w, momentum=0.95):
    m = 0
    for g in grads:
        m = momentum * m + g
        w = yield w, m


def muon(grads, w, momentum=0.95):
    m = 0
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        w = yield w, 0.2 * np.sqrt(max(w.shape)) * x


def adafactor(grads, w):
    r = c = v = 0
    rms = lambda x: np.sqrt(np.mean(x**2))
    for t, g in enumerate(grads, 1):
        beta, square = 1 - t**-0.8, g * g + 1e-30
        if w.ndim == 2:
            r, c = beta * r + (1 - beta) * square.sum(1), beta * c + (1 - beta) * square.sum(0)
            v = np.outer(r, c) / r.sum()
        else:
            v = beta * v + (1 - beta) * square
        u = g / np.sqrt(v)
        w = yield w, u / max(1, rms(u)) * max(1e-3, rms(w))


def written_out(name, leaf):
    if name == "muon":
        return muon if leaf.path.split(".")[-1] in ("q", "o", "expert_up") else adam
    return {"adamw": adam, "lion": lion, "sgd": sgd, "adafactor": adafactor}[name]


def by_loops(name):
    """The weights after all steps, each matrix by itself."""

    def one(leaf, weights, *grads):
        out = np.array(weights, np.float64)
        for at in apart(leaf):
            steps = written_out(name, leaf)([np.asarray(g, np.float64)[at] for g in grads], out[at])
            w, direction = next(steps)
            for i in range(len(grads)):
                w = w - RATES[i] * (direction + DECAY * w * (len(leaf.param.axes.split()) > 1))
                w, direction = steps.send(w) if i + 1 < len(grads) else (w, None)
            out[at] = w
        return out

    return param.tree_map(one, TABLE, WEIGHTS, *GRADS)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_match_the_paper(name):
    got, _ = ran(spec(name))
    close(got[-1], by_loops(name), WEIGHTS, 1e-4 if name == "muon" else 1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_three_steps_match_torch(name):
    """Torch's Muon iterates in bfloat16."""
    import torch

    make = {
        "adamw": lambda w: torch.optim.AdamW(w, betas=(0.9, 0.95), weight_decay=DECAY),
        "sgd": lambda w: torch.optim.SGD(w, momentum=0.95),
        "adafactor": lambda w: torch.optim.Adafactor(w, weight_decay=DECAY),
        "muon": lambda w: torch.optim.Muon(w, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    }[name]
    got, _ = ran(spec(name))
    for leaf in ("q", "o", "expert_up"):
        of = lambda tree, leaf=leaf: np.array(tree["stacks"][0][leaf])
        out = of(WEIGHTS)
        for at in np.ndindex(out.shape[:-2]):
            w = torch.nn.Parameter(torch.tensor(out[at]))
            theirs = make([w])
            for g, rate in zip(GRADS, RATES, strict=True):
                theirs.param_groups[0]["lr"] = rate
                if name == "sgd":  # torch's decay goes through the momentum
                    w.data *= 1 - rate * DECAY
                w.grad = torch.tensor(of(g)[at])
                theirs.step()
            out[at] = w.detach().numpy()
        close(of(got[-1]), out, of(WEIGHTS), 2e-2 if name == "muon" else 1e-5)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_stack_is_updated_like_its_separate_matrices(name):
    """A table whose every layer and expert is a weight of its own."""
    top = {}
    split = lambda tree: {
        f"{leaf.path}{at}": x[at]
        for leaf, x in zip(LEAVES, jax.tree.leaves(tree), strict=True)
        for at in apart(leaf)
    }  # fmt: skip
    for leaf in LEAVES:
        axes = " ".join(leaf.param.axes.split()[-2:])
        top |= {f"{leaf.path}{at}": replace(leaf.param, axes=axes) for at in apart(leaf)}
    flat, nested = param.Table(top, (), DIMS), lambda tree: split(tree) | {"stacks": []}
    together, _ = ran(spec(name))
    alone, _ = run(optim.make_optimizer(spec(name), flat), nested(WEIGHTS), [nested(g) for g in GRADS])
    close(nested(together[-1]), alone[-1], nested(WEIGHTS), 3e-6)


@pytest.mark.slow
def test_the_first_step_of_muon_matches_optax():
    """Later ones correct the bias of its momentum, which the paper's do not; and experts are gathered there."""
    numbers = lambda leaf: optax.contrib.MuonDimensionNumbers(-1, -2) if leaf.shape[-2:] != (1, 8) else None
    of = lambda tree: {name: tree["stacks"][0][name] for name in ("q", "o", "expert_up")}
    theirs = optax.contrib.muon(
        LR, muon_weight_dimension_numbers=jax.tree.map(numbers, of(WEIGHTS)), consistent_rms=0.2
    )
    updates, _ = theirs.update(of(GRADS[0]), theirs.init(of(WEIGHTS)), of(WEIGHTS))
    got, _ = ran(spec("muon", weight_decay=0.0), steps=1)
    close(of(got[1]), optax.apply_updates(of(WEIGHTS), updates), of(WEIGHTS), 1e-5)


@pytest.mark.slow
def test_muon_updates_have_singular_values_near_one():
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(n, 12)))[0] for n in (12, 40))
    values = np.geomspace(0.01, 1, 12)
    x = jnp.asarray((u * values) @ v.T / np.linalg.norm(values), jnp.float32)
    for matrix in (x, x.T):
        got = np.linalg.svd(np.asarray(matrixwise.orthogonalise(matrix)), compute_uv=False)
        assert 0.6 < got.min() and got.max() < 1.3
    assert not np.asarray(matrixwise.orthogonalise(jnp.zeros((3, 2, 4)))).any()


# -- what is around the direction ------------------------------------------------------------------


def test_the_default_equals_optax_adamw_bit_for_bit():
    options = optim.Optimizer(lr=LR, weight_decay=DECAY)
    mask = param.tree_map(lambda leaf: len(leaf.param.axes.split()) > 1, TABLE)
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optim.schedule(options), b1=0.9, b2=0.95, eps=1e-8, weight_decay=DECAY, mask=mask),
    )
    for a, b in zip(*map(jax.tree.leaves, (ran(options)[0][-1], run(plain)[0][-1])), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name, named",
    list(zip(NAMES, [("matrix", "embedding"), ("norm",), ("bias", "embedding"), ("matrix", "norm"), ()], strict=True)),
)
def test_weight_decay_applies_only_to_the_named_kinds(name, named):
    """Of a weight without gradient rate x decay is taken, or nothing."""
    kinds = {
        "embed": "embedding", "head": "embedding", "norm": "norm", "norm1": "norm", "q_bias": "bias",
        "q": "matrix", "o": "matrix", "expert_up": "matrix", "shared_router": "matrix",
    }  # fmt: skip
    still = jax.tree.map(jnp.zeros_like, WEIGHTS)
    got, _ = run(optim.make_optimizer(spec(name, decay=named), TABLE), grads=[still])
    for leaf, a, b in zip(LEAVES, *map(jax.tree.leaves, (got[1], WEIGHTS)), strict=True):
        share = LR * DECAY if kinds[leaf.path.split(".")[-1]] in named else 0
        np.testing.assert_allclose(a, (1 - share) * b, rtol=1e-6)


@pytest.mark.slow
def test_the_global_norm_is_clipped():
    norm = float(optax.tree.norm(GRADS[0]))
    for clip, scale in ((0.5, 0.5 / norm), (2 * norm, 1), (0, 1)):
        got, _ = ran(optim.Optimizer("sgd", lr=1.0, momentum=0.0, clip=clip), steps=1)
        wanted = jax.tree.map(lambda w, g, scale=scale: w - scale * g, WEIGHTS, GRADS[0])
        close(got[1], wanted, WEIGHTS, 1e-5)


def test_schedules():
    cosine = optim.schedule(optim.Optimizer(lr=1.0, schedule="cosine", warmup=10, steps=110, floor=0.1))
    np.testing.assert_allclose([cosine(i) for i in (0, 9, 10, 60, 110, 500)], [0.1, 0.91, 1, 0.55, 0.1, 0.1], rtol=1e-5)
    linear = optim.schedule(optim.Optimizer(lr=1.0, schedule="linear", steps=100))
    np.testing.assert_allclose([linear(0), linear(50), linear(100)], [1, 0.5, 0], atol=1e-6)
    assert optim.schedule(optim.Optimizer(lr=3.0))(1000) == 3.0
    with pytest.raises(ValueError, match="needs steps > warmup"):
        optim.schedule(optim.Optimizer(schedule="cosine"))


@pytest.mark.sweep
@pytest.mark.parametrize("part", ["vision", "mtp"])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_part_has_a_learning_rate_of_its_own(name, part):
    """Its steps are those of a model of its own; the others' stay as they are."""
    both = replace(TABLE, inner={part: replace(SMALL, top=SMALL.top | {"head": FROZEN.top["embed"]})})
    weights, grads = draw(both, 0), [draw(both, seed) for seed in (1, 2, 3)]
    got = run(optim.make_optimizer(spec(name, **{f"{part}_lr": LR / 4}), both), weights, grads)[0]
    inside = lambda tree: tree[part]
    text = lambda tree: {key: x for key, x in tree.items() if key != part}
    for of, table, lr in ((text, TABLE, LR), (inside, both.inner[part], LR / 4)):
        alone = run(optim.make_optimizer(spec(name, lr=lr), table), of(weights), [of(g) for g in grads])[0]
        for a, b in zip(jax.tree.leaves([of(x) for x in got]), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_layer_that_drafts_is_clipped_by_its_own_norm():
    """However large its gradient is, the model's update is that without it."""
    both = replace(TABLE, inner={"mtp": SMALL})
    weights, grads = draw(both, 0), draw(both, 1)
    large = {**grads, "mtp": jax.tree.map(lambda x: 1000 * x, grads["mtp"])}
    options = optim.Optimizer("sgd", lr=1.0, momentum=0.0, clip=0.5)
    got = run(optim.make_optimizer(options, both), weights, [large])[0][1]
    change = jax.tree.map(lambda a, b: a - b, weights, got)
    text = lambda tree: {key: x for key, x in tree.items() if key != "mtp"}
    alone = run(optim.make_optimizer(options, TABLE), text(weights), [text(grads)])[0][1]
    for a, b in zip(jax.tree.leaves(text(got)), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(optax.tree.norm(change["mtp"]), 0.5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_frozen_weights_do_not_change_or_enter_the_norm(name):
    """Neither does their gradient, in the norm that is clipped, nor are there moments of them."""
    options = spec(name, clip=1.0, ema=0.9)
    got, opt_state = run(optim.make_optimizer(options, FROZEN))
    np.testing.assert_array_equal(got[-1]["embed"], WEIGHTS["embed"])
    without = [g | {"embed": jnp.zeros_like(g["embed"])} for g in GRADS]
    wanted, whole = run(optim.make_optimizer(options, TABLE), grads=without)
    for path in ("head", "norm"):
        np.testing.assert_allclose(got[-1][path], wanted[-1][path], rtol=1e-6)
    held = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    assert held(opt_state) < held(whole)
    average = optim.averaged(got[-1], opt_state)
    np.testing.assert_array_equal(average["embed"], WEIGHTS["embed"])
    np.testing.assert_allclose(average["head"], optim.averaged(wanted[-1], whole)["head"], rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_average_follows_the_weights_after_each_update(name):
    got, opt_state = ran(spec(name, ema=0.8))
    plain, without = ran(spec(name))
    average = jax.tree.map(np.float64, WEIGHTS)
    for params in plain[1:]:
        average = jax.tree.map(lambda a, w: 0.8 * a + 0.2 * np.asarray(w, np.float64), average, params)
    close(optim.averaged(got[-1], opt_state), average, WEIGHTS, 1e-5)
    close(got[-1], plain[-1], WEIGHTS, 1e-6)
    assert optim.averaged(plain[-1], without) is plain[-1]


@pytest.mark.parametrize(
    "options, line",
    [
        (dict(name="adam"), "name must be one of adamw, muon, lion, sgd, adafactor, got 'adam'"),
        (dict(momentum=0.9), "adamw does not use momentum, got 0.9"),
        (dict(name="sgd", b2=0.99), "sgd does not use b2, got 0.99"),
        (dict(name="lion", eps=1e-6), "lion does not use eps, got 1e-06"),
        (dict(name="adafactor", b1=0.0), "adafactor does not use b1, got 0.0"),
        (dict(decay=("matrix", "vector")), "decay must be among matrix, embedding, norm, bias, got 'vector'"),
        (dict(lr=0.0, vision_lr=1e-5), "lr must be above 0 beside a vision_lr, whose schedule is the same, got 0.0"),
        (dict(lr=0.0, mtp_lr=1e-5), "lr must be above 0 beside a mtp_lr, whose schedule is the same, got 0.0"),
        (dict(ema=1.0), "ema must be at least 0 and below 1, got 1.0"),
    ],
)
def test_unsupported_options_give_a_one_line_error(options, line):
    with pytest.raises(ValueError, match=line) as caught:
        optim.Optimizer(**options)
    assert "\n" not in str(caught.value)


# -- on a mesh -------------------------------------------------------------------------------------


class Quadratic:
    """A loss of which every weight has a gradient."""

    @staticmethod
    def loss(out, batch):
        return out.value * jnp.sum(batch.weight_BT), {}


def quadratic(params, batch):
    rng = np.random.default_rng(5)
    squares = jax.tree.map(lambda x: jnp.sum((x - rng.normal(size=x.shape).astype(np.float32)) ** 2), params)
    return SimpleNamespace(value=sum(jax.tree.leaves(squares)), aux={})


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_sharded_like_the_weights(name, tmp_path):
    on = mesh.make(mesh.Layout(fsdp=2, ep=2, tp=2))
    table = SMALL if name in ("adamw", "lion") else replace(SMALL, top=SMALL.top | {"embed": FROZEN.top["embed"]})
    optimizer = optim.make_optimizer(spec(name, clip=1.0, ema=0.9), table)
    shardings = rules.of_state(optimizer, table, on)
    weights = draw(table, 0)
    batch = packing.pack([supervised([1], [2, 3], sample=i, rollout=i) for i in range(8)], 4, rows=8)
    with jax.set_mesh(on):
        start = step.init(jax.device_put(weights, shardings.params), optimizer, shardings)
        split = batches.batch(batch, on)
        lowered = step.make_step(quadratic, Quadratic, optimizer, shardings).lower(start, split)
        update = lowered.compile(aot.CHEAP)
        stepped, _ = update(start, split)
        before = jax.tree.map(np.asarray, stepped)
        skipped, report = update(stepped, split.replace(weight_BT=split.weight_BT * np.inf))
    assert metrics.to_dict(report)["skipped"] == 1 and int(skipped.step) == 2
    kept = lambda state: jax.tree.leaves((state.params, state.opt_state))
    for a, b in zip(kept(before), kept(skipped), strict=True):
        np.testing.assert_array_equal(a, b)

    where = dict(jax.tree_util.tree_leaves_with_path(shardings.params))
    sizes = dict(jax.tree_util.tree_leaves_with_path(weights))
    for path, x in jax.tree_util.tree_leaves_with_path(skipped.opt_state):
        own = next((p for p in where if path[-len(p) :] == p), None)
        if own is None:  # a counter
            assert x.ndim == 0
            continue
        whole, part = sizes[own].shape, where[own].shard_shape(sizes[own].shape)
        means = [(n, m) if k == n else (1, 1) for k, n, m in zip(x.shape, whole, part, strict=True)]
        assert list(zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)) == means

    if name in ("muon", "adafactor"):  # whose matrices lie on several devices
        start = jax.jit(lambda params: step.init(params, optimizer))(weights)
        alone = step.make_step(quadratic, Quadratic, optimizer).lower(start, batch).compile(aot.CHEAP)
        close(before.params, alone(start, batch)[0].params, weights, 1e-4 if name == "muon" else 1e-5)
    if name == "adafactor":  # the state with the most kinds of parts
        with states.open_store(tmp_path) as store:
            store.save(1, skipped)
            back, _ = store.restore(skipped)
        for a, b in zip(*map(jax.tree.leaves, (back, skipped)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_factored_moments_are_sharded_by_their_remaining_axis():
    on = mesh.make(mesh.Layout(fsdp=2, ep=2, tp=2))
    optimizer = optim.make_optimizer(optim.Optimizer("adafactor"), TABLE)
    factored = optax.tree.get(rules.of_state(optimizer, TABLE, on).opt_state, "inner_states")["matrix"].inner_state
    row, column = (tree["stacks"][0]["expert_up"].spec for tree in (factored.row, factored.column))
    assert row == P(None, "ep", "tp", None) and column == P(None, "ep", None, "fsdp")
