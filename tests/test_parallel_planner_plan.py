"""Formulas of a plan beside what JAX and XLA do: saved values, FLOPs, collectives, argument bytes."""

import dataclasses
import math
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from sweeps import thinned

from areax import models
from areax.adapters.commands import aot
from areax.core import logprobs, losses, optim, param
from areax.models import transformer
from areax.models.layers import moe, recurrence
from areax.parallel import mesh, rules
from areax.parallel.planner import activations, flops, generation, memory, plan
from areax.parallel.planner.chips import CHIPS
from areax.parallel.planner.figures import LATENCY, LAUNCH, LINK, MATMUL, PAGED, STREAM, USABLE
from areax.parallel.planner.job import Job

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "qwen3": SIZES | dict(model_type="qwen3"),
    "qwen2": SIZES | dict(model_type="qwen2", tie_word_embeddings=False),
    "llama": SIZES | dict(model_type="llama", attention_bias=True, mlp_bias=True),
    "qwen2_moe": SIZES
    | dict(
        model_type="qwen2_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "qwen3_moe": SIZES
    | dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]),
}
B, T = 8, 64
ONE, SFT, RUN, ADAMW = mesh.Layout(), losses.SFT(), models.Run(), optim.Optimizer()


@cache
def config(family, **changes):
    return models.config_from_hf(FAMILIES[family] | changes)


def job(family, layout=ONE, rows=B, length=T, microbatches=1, **rest):
    settings = rest.pop("config", None) or config(family)
    router, sizes = getattr(settings, "router", moe.Router()), (rows, length, microbatches, microbatches, length)
    more = dict(top_k=router.top_k, router_fp32=router.fp32, activation=settings.activation.kind, chunks=recurrence.CPU)
    return Job(models.table(settings), settings.records, layout, *sizes, **more | rest)


@cache
def compiled(family, layout, objective=SFT, run=RUN, microbatches=1, layers=3, optimizer=ADAMW, rows=B):
    settings = config(family, num_hidden_layers=layers)
    return aot.compile(aot.Step(settings, objective, optimizer, run, layout, rows, T, microbatches, slots=4))


# -- memory ----------------------------------------------------------------------------------------


def stacked(family, run, rows, length, on):
    """What `jax.vjp` of the backbone keeps: (traced, its arrays, whether each is stacked by a scan over layers)."""
    table = models.table(config(family))
    split = lambda axes: NamedSharding(on, rules.spec(axes, mesh=on))
    token_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=split(("batch", "seq")))
    params = jax.tree.map(
        lambda x, its: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=its),
        param.abstract(table), rules.of_params(table, on),
    )  # fmt: skip

    def closure(params, token_BT):
        hidden = lambda params: transformer.backbone(params, *(token_BT,) * 4, config=config(family), run=run)
        return jax.tree.leaves(jax.vjp(hidden, params)[1])

    traced = jax.jit(closure).trace(params, token_BT)
    jaxpr = traced.jaxpr.jaxpr
    scanned = {x for equation in jaxpr.eqns if equation.primitive.name == "scan" for x in equation.outvars}
    depths = {len(stack.layers) for stack in table.stacks}
    of_layers = [x in scanned and x.aval.ndim > 0 and x.aval.shape[0] in depths for x in jaxpr.outvars]
    return traced, [x.aval for x in jaxpr.outvars], of_layers


REMATS, DTYPES = ("full", "dots", "none"), (None, "bfloat16")


@pytest.mark.sweep
@pytest.mark.parametrize(  # every family with every way of keeping, each of both in turn with either dtype
    "family, remat, dtype",
    [
        pytest.param(family, remat, dtype, marks=[pytest.mark.wide] * ((i + j + k) % 2))
        for i, family in enumerate(FAMILIES)
        for j, remat in enumerate(REMATS)
        for k, dtype in enumerate(DTYPES)
    ],
)
def test_saved_activations_of_layers_match_the_formula(family, remat, dtype):
    """By JAX's own account. Weights are arguments, not counted; a mixture's part under "none" is an estimate."""
    _, arrays, of_layers = stacked(family, models.Run(dtype=dtype, remat=remat), 5, 128, mesh.make())
    got = sum(x.size * x.dtype.itemsize for x, its in zip(arrays, of_layers, strict=True) if its)
    formula = activations.saved(job(family, rows=5, length=128, dtype=dtype or "float32", remat=remat))
    if "moe" in family and remat == "none":
        assert abs(formula / got - 1) < 0.1
    else:
        assert formula == got


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("layout", [mesh.Layout(fsdp=4, tp=2), mesh.Layout(dp=2, cp=2, tp=2)], ids=str)
def test_saved_activations_of_each_device_match_the_formula(layout, remat):
    """As XLA's partitioner lays out what is kept, none of which is told where to lie."""
    on = mesh.make(layout)
    with jax.set_mesh(on):
        traced, arrays, of_layers = stacked("qwen3", models.Run(remat=remat), B, T, on)
        places = traced.lower().compile().output_shardings
    kept = [(x, its) for x, its, of_layer in zip(arrays, places, of_layers, strict=True) if of_layer]
    got = sum(math.prod(its.shard_shape(x.shape)) * x.dtype.itemsize for x, its in kept)
    assert activations.saved(job("qwen3", layout, remat=remat)) == got


PAIRS = [  # the last two with several microbatches, of which every array of the batch is an argument
    ("qwen3", mesh.Layout(fsdp=4, tp=2), losses.SFT(), 1),
    ("qwen2", mesh.Layout(fsdp=8), losses.GRPO(), 1),
    ("qwen3_moe", mesh.Layout(fsdp=2, ep=4), losses.GRPO(kl={"coef": 0.1}), 1),
    ("llama", mesh.Layout(dp=2, cp=2, tp=2), losses.GRPO(entropy={"coef": 0.1}), 1),
    ("qwen2", mesh.Layout(dp=4, cp=2), losses.GRPO(correction={"proximal": "behaviour"}), 2),
    ("qwen3_moe", mesh.Layout(cp=2, ep=2, tp=2), losses.SFT(), 3),
]
ARGUMENTS = [pytest.param(*pair, marks=[pytest.mark.mesh] * (i > 1)) for i, pair in enumerate(PAIRS)]


@pytest.mark.sweep
@pytest.mark.parametrize("family, layout, objective, microbatches", ARGUMENTS)
def test_argument_bytes_match_the_compiled_step(family, layout, objective, microbatches):
    spec = aot.Step(config(family), objective, ADAMW, models.Run(), layout, B, T, microbatches, slots=4)
    formula = memory.memory(job(family, layout, microbatches=microbatches, slots=4, reads=aot.reads(spec)))
    analysis = compiled(family, layout, objective, microbatches=microbatches).memory_analysis()
    assert formula.arguments == analysis.argument_size_in_bytes


OPTIMIZERS = [optim.Optimizer("adafactor", ema=0.9), optim.Optimizer("muon")]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", thinned(OPTIMIZERS, 2, pytest.mark.slow))
def test_argument_bytes_of_other_optimisers_match_the_compiled_step(optimizer):
    layout, one = mesh.Layout(fsdp=4, tp=2), config("qwen3", num_hidden_layers=1)
    spec = aot.Step(one, SFT, optimizer, RUN, layout, B, T, 1, slots=4)
    formula = memory.memory(job("qwen3", layout, config=one, slots=4, reads=aot.reads(spec), optim=optimizer))
    analysis = compiled("qwen3", layout, layers=1, optimizer=optimizer).memory_analysis()
    assert formula.arguments == analysis.argument_size_in_bytes


def test_moments_and_averages_take_the_memory_of_their_shapes():
    held = lambda *args, **rest: memory.memory(job("qwen3", optim=optim.Optimizer(*args, **rest)))
    weights = held().params
    assert held().moments == 2 * weights + 12 and held(ema=0.9).moments == 3 * weights + 12
    assert held("lion").moments == weights + 12 and held("sgd").moments == weights + 8
    assert held("sgd", momentum=0.0).moments == 8 and held("adafactor").moments < weights / 4


def test_logits_are_kept_by_the_rule_of_the_score():
    few, many = job("qwen3"), job("qwen3", rows=2**15, length=64)
    assert few.local_tokens * 64 <= logprobs.KEPT < many.local_tokens * 64
    assert (
        memory.logits_kept(few) and not memory.logits_kept(many) and not memory.logits_kept(job("qwen3", head_chunk=8))
    )
    assert memory.logits(few) == B * T * 64 * 4
    assert memory.logits(many) == logprobs.chunk_size(64) * 64 * 4


# -- work ------------------------------------------------------------------------------------------


def dots(text: str) -> int:
    """FLOPs of all matmuls in an HLO text, each once: 2 x entries of the result x the contracted axes."""
    count = lambda sizes: math.prod(map(int, filter(None, sizes)))
    shapes = {name: shape.split(",") for name, shape in re.findall(r"%([\w.\-]+) = \w+\[([\d,]*)\]", text)}
    calls = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(%([\w.\-]+), .*?lhs_contracting_dims=\{([\d,]*)\}", text)
    assert calls
    return sum(
        2 * count(out.split(",")) * count(shapes[left][int(axis)] for axis in axes.split(","))
        for out, left, axes in calls
    )


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("remat", thinned(REMATS, 3, pytest.mark.slow))
def test_flops_match_the_compiled_matmuls(remat, family="qwen3"):
    """One layer, one row and one chunk of queries: each matmul stands once in the program, and all pairs are computed.

    There XLA sees that "full" and "none" would compute the same scores twice in one place, and does it once.
    """
    one = config(family, num_hidden_layers=1)
    got = dots(compiled(family, ONE, run=models.Run(remat=remat), layers=1, rows=1).as_text())
    formula = flops.flops(job(family, config=one, remat=remat, rows=1), pairs=lambda *_: T * T)
    scores = 2 * one.heads * one.head_dim * T * T
    assert got == formula.hardware - (0 if remat == "dots" else scores)
    assert formula.attention == 6 * scores and formula.matmuls == 6 * flops.active(job(family, config=one)) * T


def test_active_weights_are_those_of_the_chosen_experts():
    c, table = config("qwen3_moe"), models.table(config("qwen3_moe"))
    layer = c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    mixture = c.experts * c.embed + 3 * c.top_k * c.embed * c.expert_ffn
    assert flops.active(job("qwen3_moe")) == 3 * layer + 2 * mixture + 3 * c.embed * c.ffn + c.vocab * c.embed
    assert flops.active(job("qwen3_moe")) < param.count(table)


def collectives(text: str, layers: int) -> Counter:
    """Bytes of the results of all collectives between two devices or more, by kind; loops over layers count fully."""
    found: Counter = Counter()
    for line in text.splitlines():
        call = re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", line)
        groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", line)
        if not call or (groups and 1 in (len((groups[1] or "").split(",")) * (not groups[2]), int(groups[2] or 0))):
            continue
        times = layers if "while/body" in line else 1
        sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"[fs]32\[([\d,]+)\]", call[1])]
        found[call[2]] += 4 * times * sum(sizes)
    return found


def payloads(made: Job) -> dict[str, float]:
    return {t.name: t.payload for t in flops.transfers(made)}


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("remat", ["full", "none"])
def test_fsdp_traffic_matches_the_formula(remat):
    """Gathers of weights to the byte, and of the tokens to look up; gradients too, which XLA sums on a CPU before it
    parts them but for the head's; what was looked up."""
    layout = mesh.Layout(fsdp=8)
    got = collectives(compiled("qwen3", layout, run=models.Run(remat=remat)).as_text(), 3)
    formula = payloads(job("qwen3", layout, remat=remat))
    assert got["all-gather"] == formula["weights_gather"] + B * T * 4
    assert got["all-to-all"] == formula["lookup_trade"]
    made = config("qwen3")
    norms = (3 * 2 * (made.head_dim + made.embed) + made.embed) * 4  # of three layers and the last: whole everywhere
    assert got["all-reduce"] + 8 * got["reduce-scatter"] == formula["gradients_scatter"] + norms


@pytest.mark.mesh
def test_ulysses_traffic_matches_the_formula():
    layout = mesh.Layout(dp=4, cp=2)
    got = collectives(compiled("qwen3", layout, run=models.Run(cp="ulysses")).as_text(), 3)
    assert got["all-to-all"] == payloads(job("qwen3", layout, cp="ulysses"))["cp_trade"]


def test_each_mesh_axis_has_its_own_communication():
    names = lambda *args, **rest: set(payloads(job(*args, **rest)))
    assert names("qwen3") == set()
    assert names("qwen3", mesh.Layout(dp=8)) == {"gradients_reduce"}
    assert names("qwen3", mesh.Layout(tp=2)) == {"tp_reduce"}
    cp = mesh.Layout(cp=2)
    for method, name in (("gather", "cp_gather"), ("ulysses", "cp_trade"), ("ring", "cp_send")):
        assert names("qwen3", cp, cp=method) == {"gradients_reduce", name}
    ep = {"weights_gather", "gradients_scatter", "lookup_trade", "ep_gather", "ep_scatter"}
    assert names("qwen3_moe", mesh.Layout(ep=2)) == ep


def test_a_ring_sends_each_piece_past_every_other_device():
    """Keys, values and their places: n - 1 turns forward and again, n - 1 backward, gradients home with the n-th."""
    n, c = 4, config("qwen3")
    made = job("qwen3", mesh.Layout(cp=n), cp="ring")
    keys, places = 2 * c.kv_heads * c.head_dim * made.local_tokens * 4, 2 * made.local_tokens * 4
    assert payloads(made)["cp_send"] == c.layers * (3 * (n - 1) * (keys + places) + n * keys)


# -- plans -----------------------------------------------------------------------------------------


CACHE = 2 * 3 * 2 * 16 * 2  # bytes of a token: keys and values of 3 layers of 2 heads of 16, in bfloat16


def figures(*args, chip="h100", **rest):
    return {f.name: f.value for f in plan.plan(job(*args, **rest), CHIPS[chip]).figures}


def test_impossible_layouts_are_refused_by_name():
    for layout, rest, line in (
        (mesh.Layout(dp=3), {}, r"--rows must be a multiple of dp x fsdp x ep = 3, got 8"),
        (mesh.Layout(cp=3), {}, r"--length must be a multiple of cp = 3, got 64"),
        (mesh.Layout(cp=2), dict(cp="ring", length=66), r"--length must be a multiple of 2 x cp = 4, got 66"),
        (mesh.Layout(tp=16), {}, r"query heads must be a multiple of tp = 16, got 8"),
        (mesh.Layout(cp=8, tp=2), dict(cp="ulysses"), r"query heads must be a multiple of tp x cp = 16, got 8"),
        (mesh.Layout(fsdp=5), dict(rows=5), r"embed of size 32 cannot be split over fsdp = 5 devices"),
    ):
        with pytest.raises(ValueError, match=line):
            job("qwen3", layout, **rest)


def test_too_many_rows_do_not_fit():
    made = job("qwen3", mesh.Layout(fsdp=2), rows=2, length=4096, remat="none")
    most, usable = plan.most_rows(made, CHIPS["v6e"]), USABLE * CHIPS["v6e"].memory
    peak = lambda rows: memory.memory(dataclasses.replace(made, rows=rows)).peak
    assert most % 2 == 0 and peak(most) <= usable < peak(most + 2)
    huge = dataclasses.replace(CHIPS["v6e"], memory=1e3)
    assert plan.most_rows(made, huge) == 0 and not plan.plan(made, huge).fits


def test_time_adds_up_and_faster_chips_are_faster():
    layout = mesh.Layout(fsdp=4, tp=2)
    slow, fast = figures("qwen3", layout, chip="h100"), figures("qwen3", layout, chip="b200")
    computing = slow["compute_s"] + slow["passing_s"]
    total = max(computing, slow["beside_s"]) + slow["waiting_s"] + slow["update_s"]
    assert slow["step_s"] == pytest.approx(total) and fast["step_s"] < slow["step_s"]
    assert slow["mfu"] == pytest.approx(slow["model_flops"] / (8 * CHIPS["h100"].flops * slow["step_s"]))
    assert slow["mfu"] < slow["hardware_utilisation"] <= MATMUL


def test_links_are_slow_beyond_a_host():
    made, chip = job("qwen3", mesh.Layout(fsdp=8, tp=2), rows=8), CHIPS["h100"]
    assert plan.link(made, chip, ("tp",)) == LINK * chip.link
    assert plan.link(made, chip, ("fsdp", "ep")) == LINK * chip.network


def test_generation_speeds_up_with_devices_until_memory_or_slots_bound_it():
    base = generation.Generation(
        samples=1024, prompt=100, new=900, slots=None, itemsize=2, devices=8, steps=1, ahead=1, cache=CACHE
    )  # fmt: skip
    seconds = lambda **changes: {
        f.name: f.value
        for f in generation.generation_figures(
            job("qwen3"), CHIPS["h100"], dataclasses.replace(base, **changes), step_s=1.0
        )
    }
    eight, sixteen, few = seconds(), seconds(devices=16), seconds(slots=4)
    assert sixteen["generate_batch_s"] < eight["generate_batch_s"] < few["generate_batch_s"]
    c = config("qwen3")
    assert eight["cache_bytes_per_token"] == CACHE
    assert eight["server_weights_bytes"] == 2 * (param.count(models.table(c)) + c.vocab * c.embed)
    chosen = seconds(devices=0)
    assert chosen["generate_batch_s"] <= max(chosen["train_batch_s"], 2 * seconds(devices=1024)["generate_batch_s"])


def test_servers_get_no_more_chips_than_there_are():
    asked = generation.Generation(
        samples=8, prompt=10, new=10, slots=None, itemsize=2, devices=1, steps=1, ahead=1, cache=CACHE
    )
    small = dataclasses.replace(CHIPS["h100"], memory=param.count(models.table(config("qwen3"))))
    figures = lambda **changes: {
        f.name: f.value
        for f in generation.generation_figures(job("qwen3"), small, dataclasses.replace(asked, **changes), step_s=1.0)
    }
    needed = figures(devices=0)["server_devices"]
    assert needed > 1 and figures(devices=2 * needed)["rollout_devices"] == 2 * needed
    with pytest.raises(ValueError, match=f"must be at least {needed}, as needed for a server's weights, got 1"):
        figures()
    assert figures(devices=0, embedded=True)["server_devices"] == 1  # the recipe's own, whether it fits or not
    assert not plan.plan(job("qwen3"), small, generation=dataclasses.replace(asked, embedded=True, slots=1)).fits


@pytest.mark.parametrize("split", [ONE, mesh.Layout(tp=2), mesh.Layout(ep=2, tp=2), mesh.Layout(dp=2, ep=4)], ids=str)
def test_chips_of_a_server_share_weights_and_wait_for_sums(split):
    """Each reads its part of the weights. Experts alone are over ep; replicas over dp have sequences of their own."""
    c, chip, slots, cache, state = config("qwen3_moe"), CHIPS["h100"], 6 * split.dp, 128, 64
    own = generation.Generation(
        samples=8, prompt=10, new=20, slots=slots, itemsize=2, devices=0, steps=1, ahead=0, cache=cache, state=state,
        embedded=True, split=split, capacity=slots * 64,
    )  # fmt: skip
    speed = generation.rates(job("qwen3_moe"), chip, own)
    experts, moe_layers = 2 * 8 * 3 * 32 * 24, 2
    norms = 2 * (2 * 3 * 32 + 32 + 2 * 3 * 16)  # whole everywhere, and so are routers
    routers = 2 * moe_layers * 8 * 32
    others = 2 * (param.count(models.table(c)) + c.vocab * c.embed) - moe_layers * experts - norms - routers
    read = others / split.tp + norms + routers + moe_layers * experts / split.tp / split.ep  # 6 sequences read all
    sums = [(n, count) for n, count in ((split.tp, 7 - moe_layers), (split.tp * split.ep, moe_layers)) if n > 1]
    sent = sum(count * 2 * (n - 1) / n * c.embed * 2 for n, count in sums) / (LINK * chip.link)
    waits = sum(count for _, count in sums) * LATENCY
    stream = STREAM * chip.bandwidth
    assert speed.devices == split.devices and speed.slots == slots and speed.cache_tokens == slots * 64
    assert speed.step_s == pytest.approx(read / stream + waits + 3 * LAUNCH)
    kept = 20 * cache / (PAGED * chip.bandwidth) + 2 * state / stream
    assert speed.request_s == pytest.approx((kept + sent) / split.dp)
    chosen = moe_layers * 3 * 32 * 24 * c.top_k
    passed = (flops.active(job("qwen3_moe")) - chosen + chosen / split.ep) / split.tp
    assert 1 / speed.read_tokens_s == pytest.approx((2 * passed / (MATMUL * chip.flops) + sent) / split.dp)


@pytest.mark.parametrize("shares", ["no", "always", "turns"])
def test_a_server_counts_where_it_shares_the_device(shares):
    """Its whole cache is there from the start; a server that offloads leaves the trainer its state meanwhile."""
    made, chip = job("qwen3"), CHIPS["h100"]
    own = generation.Generation(
        samples=8, prompt=10, new=10, slots=4, itemsize=2, devices=0, steps=1, ahead=0, embedded=True, capacity=4 * 64,
        held=5 * 64 * CACHE, shares=shares, cache=CACHE,
    )  # fmt: skip
    c, m = config("qwen3"), memory.memory(made)
    weights = 2 * (param.count(models.table(c)) + c.vocab * c.embed)
    server = (1 if shares == "turns" else 2) * weights + 5 * 64 * CACHE  # the next version beside the one in use
    state = m.params + m.moments + m.batch + m.reference
    needed = {"no": max(m.peak, server), "always": m.peak + server, "turns": max(m.peak, state + server)}[shares]
    for spare in (1, -1):
        tight = dataclasses.replace(chip, memory=(needed + spare) / USABLE)
        assert plan.plan(made, tight, generation=own).fits == (spare > 0)
    figures = {f.name: f.value for f in plan.plan(made, chip, generation=own).figures}
    assert figures["server_bytes"] == server and figures["cache_tokens"] == 4 * 64
    assert figures.get("shared_bytes") == (None if shares == "no" else needed)
