"""Memory of a plan beside what JAX keeps, XLA takes as arguments, and the engine allocates, for every family."""

import itertools

import jax
import jax.numpy as jnp
import pytest
import tiny_families
import vlm

from areax import models
from areax.adapters.commands import aot
from areax.core import losses, optim, param
from areax.core.trie import Trie
from areax.models import layer, lora, paging, transformer
from areax.models.layers import moe, recurrence
from areax.parallel import mesh, offload
from areax.parallel.planner import activations, generation, memory, towers
from areax.parallel.planner.job import Job
from areax.rollout.engine.programs import pool, staging
from areax.rollout.engine.slots import mesh_of

UNLIKE = "deepseek_v3", "gemma4_text", "qwen3_5_text"  # families that differ most; `make test-wide` has the others
ONE = mesh.Layout()


def job(config, layout=ONE, rows=8, length=64, microbatches=1, **rest):
    router = getattr(config, "router", moe.Router())
    more = dict(top_k=router.top_k, router_fp32=router.fp32, activation=config.activation.kind, chunks=recurrence.CPU)
    sizes = rows, length, microbatches, microbatches, length
    return Job(models.table(config), config.records, layout, *sizes, **more | rest)


SOME = (("attention_out", "save"), ("mlp_gate_up", "offload"))


def wide(family):
    """The case of a family, `wide` unless it is unlike all others."""
    return pytest.param(family, marks=[pytest.mark.wide] * (family not in UNLIKE))


# -- activations -----------------------------------------------------------------------------------


def kept(config, run, rows, length, flattened=0) -> int:
    """Bytes that `jax.vjp` of the backbone keeps of layers: what scans stack, and what layers read beside their input:
    inputs of their own, and keys and values of another layer. Over tries, if `flattened` tokens of samples are given.
    """
    token_BT, place_BA = (jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in (length, flattened))

    def closure(params, token_BT, place_BA):
        suited = models.trie_alignment(config), models.trie_lengths(config)
        trie = Trie(token_BT, token_BT, token_BT, place_BA, *suited) if flattened else None
        how = dict(config=config, run=run, trie=trie, length_BT=token_BT)
        hidden = lambda params: transformer.backbone(params, *(token_BT,) * 4, **how)
        return jax.tree.leaves(jax.vjp(hidden, params)[1])

    jaxpr = jax.make_jaxpr(closure)(param.abstract(models.table(config)), token_BT, place_BA).jaxpr
    arrays = [x for x in jaxpr.outvars if not hasattr(x, "val")]
    scanned = {x for equation in jaxpr.eqns if equation.primitive.name == "scan" for x in equation.outvars}
    depths = {len(stack.layers) for stack in models.table(config).stacks}
    own = {(rows, length, size) for size in [getattr(config, "per_layer", 0)] if size}
    shared = {
        (rows, length, record.kv_heads, size)
        for record in config.records if getattr(record, "kept", False) for size in (record.key_dim, record.value_dim)
    }  # fmt: skip

    def counts(x) -> bool:
        stacked = x.aval.ndim > 0 and x.aval.shape[0] in depths
        return (stacked and (x in scanned or x.aval.shape[1:] in own)) or x.aval.shape in shared

    return sum(x.aval.size * x.aval.dtype.itemsize for x in arrays if counts(x))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family", [wide(family) for family in tiny_families.FAMILIES])
@pytest.mark.parametrize("remat", ["full", "dots", "offload", pytest.param(SOME, marks=pytest.mark.wide)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
def test_saved_activations_match_the_formula(family, remat, dtype):
    """On the device and on the host together."""
    config = tiny_families.config(family)
    made = job(config, rows=5, length=128, dtype=dtype, remat=remat)
    formula = activations.saved(made) + activations.saved(made, "offload")
    assert formula == kept(config, models.Run(dtype=dtype, remat=remat), 5, 128)


@pytest.mark.wide
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_without_rematerialisation_saved_activations_are_close_to_the_formula(family):
    """Of Llama 4 less is counted: it normalises queries and keys without weights, which no table has."""
    config = tiny_families.config(family)
    formula = activations.saved(job(config, rows=5, length=128, remat="none"))
    got = kept(config, models.Run(remat="none"), 5, 128)
    if family == "llama4_text":
        assert 0.8 < formula / got < 0.9
    else:
        assert abs(formula / got - 1) < 0.1


# -- arguments -------------------------------------------------------------------------------------

MESHES = {"one": ONE, "fsdp2 tp2 ep2": mesh.Layout(fsdp=2, tp=2, ep=2), "cp2 tp2 dp2": mesh.Layout(dp=2, cp=2, tp=2)}
OFTEN = {"one": "deepseek_v3", "fsdp2 tp2 ep2": "qwen3_5_text", "cp2 tp2 dp2": "gemma4_text"}
ARGUMENTS = [
    pytest.param(family, name, marks=[pytest.mark.mesh if OFTEN[name] == family else pytest.mark.wide])
    for family in tiny_families.FAMILIES
    for name in MESHES
]


@pytest.mark.sweep
@pytest.mark.parametrize("family, name", ARGUMENTS)
def test_argument_bytes_match_the_compiled_step(family, name):
    layout, config = MESHES[name], tiny_families.config(family)
    spec = aot.Step(config, losses.SFT(), optim.Optimizer(), models.Run(), layout, 8, 64, 1, slots=4)
    formula = memory.memory(job(config, layout, slots=4, reads=aot.reads(spec)))
    assert formula.arguments == aot.compile(spec).memory_analysis().argument_size_in_bytes


# Each base and each family once on a mesh.
ADAPTED = {
    ("qwen3", "one", "stored"): (), ("qwen3", "one", "nf4"): (), ("qwen3", "fsdp2 tp2 ep2", "int8"): pytest.mark.mesh,
    ("deepseek_v3", "fsdp2 tp2 ep2", "nf4"): pytest.mark.mesh,
    ("gemma4_text", "fsdp2 tp2 ep2", "stored"): pytest.mark.mesh,
    ("qwen3_5_text", "fsdp2 tp2 ep2", "int8"): pytest.mark.mesh,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family, name, base", [
    pytest.param(*case, marks=ADAPTED.get(case, pytest.mark.wide))
    for case in itertools.product(["qwen3", *UNLIKE], ["one", "fsdp2 tp2 ep2"], ["stored", "nf4", "int8"])
])  # fmt: skip
def test_argument_bytes_of_adapters_match_the_compiled_step(family, name, base):
    """Adapters and their moments in fp32, the frozen weights in the checkpoint's dtype, or in fewer bits."""
    layout, config = MESHES[name], tiny_families.config(family, torch_dtype="bfloat16")
    spec = lora.Lora(4, base=base)
    run = models.Run(dtype="float32")
    step = aot.Step(config, losses.SFT(), optim.Optimizer(), run, layout, 8, 64, 1, slots=4, lora=spec)
    made = job(
        config, layout, slots=4, reads=aot.reads(step), adapters=lora.table(models.table(config), spec),
        frozen="bfloat16", frozen_shapes=aot.frozen(step),
    )  # fmt: skip
    assert memory.memory(made).arguments == aot.compile(step).memory_analysis().argument_size_in_bytes


# -- vision towers ---------------------------------------------------------------------------------


def seeing(name, trained):
    source = {"model_type": name, "architectures": ["Any"], "dtype": "bfloat16", **vlm.CASES[name]}
    return models.with_vision(models.config_from_hf(source), trained)


TOWERS = [
    ("qwen2_5_vl", "one", "trained", 1), ("qwen3_vl", "one", "frozen", 2), ("qwen3_vl", "one", "adapters", 1),
    pytest.param("qwen3_vl", "fsdp2 tp2", "trained", 2, marks=pytest.mark.mesh),
    pytest.param("qwen2_5_vl", "cp2 dp2", "frozen", 1, marks=pytest.mark.mesh),
    pytest.param("qwen2_5_vl", "fsdp2 tp2", "adapters", 1, marks=pytest.mark.mesh),
    pytest.param("qwen3_5", "one", "trained", 1, marks=pytest.mark.wide),
]  # fmt: skip


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name, where, how, microbatches", TOWERS)
def test_argument_bytes_with_a_tower_match_the_compiled_step(name, where, how, microbatches):
    """Of a frozen one the weights alone, in the checkpoint's dtype under adapters; and patches of images."""
    layouts = {"one": ONE, "fsdp2 tp2": mesh.Layout(fsdp=2, tp=2), "cp2 dp2": mesh.Layout(dp=2, cp=2)}
    layout, config, patches = layouts[where], seeing(name, how == "trained"), 96
    spec = lora.Lora(4) if how == "adapters" else lora.Lora()
    step = aot.Step(
        config, losses.SFT(), optim.Optimizer(), models.Run(dtype="bfloat16"), layout, 8, 64, microbatches, slots=4,
        lora=spec, patches=patches,
    )  # fmt: skip
    adapted = dict(
        adapters=lora.table(models.table(config), spec), frozen="bfloat16", frozen_shapes=aot.frozen(step)
    ) if spec.rank else {}  # fmt: skip
    made = job(
        config, layout, microbatches=microbatches, slots=4, reads=aot.reads(step), vision=config.vision,
        patches=patches, dtype="bfloat16", **adapted,
    )  # fmt: skip
    assert memory.memory(made).arguments == aot.compile(step).memory_analysis().argument_size_in_bytes


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.wide)])
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_saved_activations_of_a_towers_layers_match_the_formula(name, remat):
    """Features, and what mergers keep outside layers, are estimates."""
    config, B, P = seeing(name, True), 3, 96
    zeros = lambda *shape: jax.ShapeDtypeStruct((B, *shape), jnp.int32)
    arrays = jax.ShapeDtypeStruct((B, P, config.vision.pixels), jnp.float32), zeros(P), zeros(P, 4), zeros(P)
    table = models.vision.table(config.vision)

    def closure(params, *arrays):
        run = lambda params: models.vision.features(
            params, *arrays, tower=config.vision, table=table, run=models.Run(remat=remat)
        )
        return jax.tree.leaves(jax.vjp(run, params)[1])

    jaxpr = jax.make_jaxpr(closure)(param.abstract(table), *arrays).jaxpr
    scanned = {x for equation in jaxpr.eqns if equation.primitive.name == "scan" for x in equation.outvars}
    depths = {len(stack.layers) for stack in table.stacks}
    kept = {x for x in jaxpr.outvars if not hasattr(x, "val") and x in scanned and x.aval.shape[0] in depths}
    got = sum(x.aval.size * x.aval.dtype.itemsize for x in kept if x.aval.shape[1] in (B, B * P))  # not weights
    made = job(config, rows=B, vision=config.vision, patches=P, remat=remat)
    assert config.vision.layers * towers._kept(made, "save") == got


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_temporaries_under_adapters_are_one_layers_weights_and_no_gradients_of_them(base):
    wide = dict(hidden_size=256, intermediate_size=1024)
    config = tiny_families.config("qwen3", torch_dtype="bfloat16", **wide)
    spec = lora.Lora(4, base=base)
    step = aot.Step(config, losses.SFT(), optim.Optimizer(), models.Run(), ONE, 1, 16, 1, slots=4, lora=spec)
    made = job(
        config, rows=1, length=16, slots=4, reads=aot.reads(step), adapters=lora.table(models.table(config), spec),
        frozen="bfloat16", frozen_shapes=aot.frozen(step),
    )  # fmt: skip
    got = aot.compile(step).memory_analysis().temp_size_in_bytes
    assert 1 < memory.memory(made).temporary / got < 2


NEAR = 4
NARROW = {  # what of optimisers changes the memory of a step
    "bf16 moments": dict(state="bfloat16"),
    "8-bit moments": dict(state="float8"),
    "8-bit muon": dict(name="muon", state="float8"),
    "bf16 weights": dict(weights="bfloat16", state="float8", gradients="bfloat16"),
    "offloaded": dict(offload=True),
    "offloaded bf16 weights": dict(offload=True, weights="bfloat16", state="float8"),
    "averaged bf16 weights": dict(weights="bfloat16", ema=0.9),
}


# A dense model on one device has each once, a mixture one; of a mesh some, what differs there.
NARROWED = {
    **{("qwen3", name, "one"): () for name in NARROW}, ("qwen3_moe", "8-bit moments", "one"): (),
    **{("qwen3", name, "fsdp2 tp2 ep2"): pytest.mark.mesh for name in ("8-bit muon", "offloaded bf16 weights")},
    **{("qwen3_moe", name, "fsdp2 tp2 ep2"): pytest.mark.mesh for name in ("8-bit moments", "averaged bf16 weights")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family, name, layout", [
    pytest.param(*case, marks=NARROWED.get(case, pytest.mark.wide))
    for case in itertools.product(["qwen3", "qwen3_moe"], NARROW, ["one", "fsdp2 tp2 ep2"])
])  # fmt: skip
def test_argument_bytes_of_narrow_states_match_the_compiled_step(family, name, layout):
    """On the host lies what `offload.init` makes. The CPU backend has three times the formula's temporaries, whatever
    the state: it computes bf16 in fp32 and copies the blocks of experts. Here: within a factor of NEAR."""
    on, config = MESHES[layout], tiny_families.config(family)
    spec = optim.Optimizer(**NARROW[name])
    compiled = aot.Step(config, losses.SFT(), spec, models.Run(dtype="bfloat16"), on, 8, 64, 2, slots=4)
    made = job(config, on, microbatches=2, slots=4, reads=aot.reads(compiled), optim=spec, dtype="bfloat16")
    formula, analysis = memory.memory(made), aot.compile(compiled).memory_analysis()
    assert formula.arguments == analysis.argument_size_in_bytes
    if layout == "one":
        assert 1 / NEAR < formula.temporary / analysis.temp_size_in_bytes < NEAR
    if spec.offload and layout == "one":
        table = models.table(config)
        state = offload.init(param.init(jax.random.key(0), table), table, spec, "bfloat16", mesh.make(on))
        assert formula.host == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
@pytest.mark.parametrize("context", [200, 1100])
def test_a_servers_bytes_are_those_of_the_engine(family, context, slots=3):
    """Keys and values of each layer's own sizes, latent vectors, states; weights with a head of their own."""
    config = tiny_families.config(family)
    size = lambda made: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
    C = paging.default_page(context)
    kinds = paging.kinds(config.records, context, C, 2)
    counts = paging.counts(kinds, slots, context, C, paging.STEPS, None)
    held = jax.eval_shape(lambda: pool.empty(config.records, kinds, counts, slots, C, jnp.bfloat16))
    assert paging.size_of(kinds, counts, slots) == size(held)
    cache, state = layer.cached_bytes(config.records, 2)
    assert sum(kind.bytes for kind in kinds if not kind.states) == C * cache
    assert sum(kind.bytes for kind in kinds if kind.states) == state
    params = param.tree_map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.param.dtype or jnp.bfloat16), models.table(config)
    )  # fmt: skip
    staged = staging.stage(params, models.table(config), mesh_of())
    assert generation.weights_bytes(job(config), 2) == size(staged)
