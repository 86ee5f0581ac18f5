"""A mesh changes where numbers are, not what they are: loss, metrics and gradients equal those of one device."""

import dataclasses
import itertools
import re
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax import models
from areax.core import balance, losses, metrics, packing, param, step
from areax.models.attention import chunked
from areax.models.attention.pattern import Pattern
from areax.parallel import batches as place
from areax.parallel import context, experts, mesh, ring, rules
from areax.rollout.types import Sample

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=True,
)  # fmt: skip
DELTA = dict(
    rms_norm_eps=1e-2,  # as in gemma4_text
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=12, linear_value_head_dim=10,
    rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
)  # fmt: skip
SHARED = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)
FAMILIES = {
    "qwen3": COMMON | dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen2": COMMON | dict(model_type="qwen2", tie_word_embeddings=False),
    "qwen3_moe": COMMON
    | dict(
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        initializer_range=0.3,
    ),
    "qwen2_moe": COMMON
    | dict(
        model_type="qwen2_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        initializer_range=0.3,
    ),
    "deepseek_v3": COMMON
    | dict(
        model_type="deepseek_v3",
        num_key_value_heads=8,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        head_dim=6,
        v_head_dim=12,
        attention_bias=True,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        initializer_range=0.3,
    ),
    "llama4_text": COMMON
    | dict(
        model_type="llama4_text",
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=9,
        floor_scale=7,
        attn_scale=0.3,
        initializer_range=0.3,
    ),
    "qwen3 window": COMMON | dict(model_type="qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3_5_text": COMMON | DELTA | dict(model_type="qwen3_5_text"),
    "qwen3_5_moe_text": COMMON | DELTA | SHARED | dict(model_type="qwen3_5_moe_text"),
    "qwen3_next": COMMON | DELTA | SHARED | dict(model_type="qwen3_next", mlp_only_layers=[2]),
    "nemotron_h": COMMON
    | dict(
        model_type="nemotron_h",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-2,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=16,
        mamba_head_dim=6,
        n_groups=8,
        ssm_state_size=10,
        use_bias=True,
        mlp_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=16,
        initializer_range=0.3,
    ),
    "olmo2": COMMON | dict(model_type="olmo2", attention_bias=True),
    "gemma2": COMMON
    | dict(
        model_type="gemma2",
        query_pre_attn_scalar=9,
        sliding_window=7,
        attn_logit_softcapping=6.0,
        final_logit_softcapping=8.0,
    ),
    "gemma4_text": COMMON
    | dict(
        model_type="gemma4_text",
        rms_norm_eps=1e-2,  # small heads are small at times, and their norms would multiply rounding
        head_dim=4,
        global_head_dim=8,
        sliding_window=7,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=72,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "llama": COMMON | dict(model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "glm4_moe": COMMON
    | dict(
        model_type="glm4_moe",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
        initializer_range=0.3,
    ),
    "gpt_oss": COMMON
    | dict(
        model_type="gpt_oss",
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=1.0,
        initializer_range=0.3,
    ),
    "minimax_m2": COMMON
    | dict(model_type="minimax_m2", num_local_experts=8, num_experts_per_tok=2, rotary_dim=6, initializer_range=0.3),
}
LAYOUTS = {
    "dp8": mesh.Layout(dp=8), "fsdp8": mesh.Layout(fsdp=8), "fsdp2 tp4": mesh.Layout(fsdp=2, tp=4),
    "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2), "dp2 cp2 tp2 ring": mesh.Layout(dp=2, cp=2, tp=2),
    "cp8 gather": mesh.Layout(cp=8), "cp8 ulysses": mesh.Layout(cp=8), "cp8 ring": mesh.Layout(cp=8),
    "fsdp2 ep4": mesh.Layout(fsdp=2, ep=4), "ep8": mesh.Layout(ep=8), "cp2 ep2 tp2": mesh.Layout(cp=2, ep=2, tp=2),
}  # fmt: skip
SENT = {f"{name} all_to_all": LAYOUTS[name] for name in ("fsdp2 ep4", "ep8", "cp2 ep2 tp2")}  # of experts alone
OBJECTIVES = {
    "sft": losses.SFT(), "grpo": losses.GRPO(entropy={"coef": 0.01}, advantage={"std": "none"}),
    "balanced": balance.wrap(losses.SFT(), balance.Balance(load=0.1, z=0.01)),
    "sequences": losses.GSPO(
        correction={"level": "geometric", "action": "truncate"}, denominator="rollout", advantage={"std": "none"}
    ),
}  # fmt: skip
BIASED = ("qwen2", "llama")
ROWS, LENGTH = 8, 48


def samples():
    """Sequences of unequal lengths, several a row, that cross the borders of cp; groups of 4 with rewards."""
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(rng.integers(5, 40, 32)):
        mask = np.arange(n) >= 3
        sampled = lambda x, otherwise=0, mask=mask: np.where(mask, x, otherwise)
        out.append(
            Sample(
                tokens=rng.integers(0, 64, n).astype(np.int32), mask=mask,
                logp=sampled(-rng.random(n) * 4).astype(np.float32),
                version=sampled(0, -1).astype(np.int32), turn=sampled(0, -1).astype(np.int32),
                rewards=((int(n) - 1, float(rng.random())),), group=i // 4, prompt=i // 4, sample=i, rollout=i,
            )
        )  # fmt: skip
    return out


@cache
def model(family):
    config = models.config_from_hf(FAMILIES[family])
    table = models.table(config)
    params = jax.jit(lambda key: param.init(key, table))(jax.random.key(1))
    for stack in params["stacks"]:
        if "router_bias" in stack:  # that it has no gradient must not mean that it has no effect
            stack["router_bias"] = 0.3 * jax.random.normal(jax.random.key(2), stack["router_bias"].shape)
    return config, table, params


def run(name):
    """How attention crosses cp and tokens reach experts in a layout."""
    word = lambda method: next((word for word in name.split() if word in get_args(method)), "gather")
    return models.Run(cp=word(context.Method), dispatch=word(experts.Method))


def sgd_steps(family, objective, name, count):
    """(metrics of each step, parameters after it): SGD of rate 1 makes the change of the weights the gradient."""
    config, table, params = model(family)
    sgd = optax.sgd(1.0 if count == 1 else 0.1)
    on = mesh.make((LAYOUTS | SENT).get(name, mesh.Layout()))
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, table, on)
        score = partial(models.score, config=config, run=run(name))
        batch = place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on)
        scores = step.make_scores(score)
        update = step.make_step(score, objective, sgd, shardings)
        state = step.init(jax.tree.map(jnp.copy, jax.device_put(params, shardings.params)), sgd, shardings)
        out = []
        for _ in range(count):
            ready = jax.jit(objective.prepare)(batch, scores(state.params, batch))
            state, report = update(state, ready)
            out.append((metrics.to_dict(report), jax.tree.map(np.asarray, state.params)))
    return out


@cache
def one_device(family, objective, count):
    return sgd_steps(family, OBJECTIVES[objective], "one", count)


def compare(got, wanted, start, steps=1):
    """Metrics, and the change of every weight, within 1e-5 of the largest change of its leaf."""
    (report, params), (expected, reference) = got, wanted
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        if np.isscalar(value):
            # atol: some are differences of log-probabilities of size 4 to 8, each of them rounded to 5e-7
            np.testing.assert_allclose(report[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert report[name]["counts"] == value["counts"], name
    for (path, a), b, x in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(reference), jax.tree.leaves(start), strict=True
    ):
        scale = float(np.abs(b - x).max())
        assert (scale > 0) != (path[-1].key == "router_bias"), jax.tree_util.keystr(path)
        # a weight of size 1 is rounded to 6e-8 whenever a step's change is added to it
        assert float(np.abs(a - b).max()) <= 1e-5 * scale + steps * 2e-7, jax.tree_util.keystr(path)


def cases():
    """Family, layout, objective: each two of the three meet under `mesh`, all three under `wide`; of families that
    differ from Qwen3 by biases alone under `mesh` only each kind of splitting them.

    One layout with three axes is in the everyday suite.
    """
    for i, family in enumerate(FAMILIES):
        layouts, objectives = list(LAYOUTS), ("sft", "grpo")
        if family == "qwen3_moe":
            layouts, objectives = [*LAYOUTS, *SENT], ("balanced", "grpo")  # the former is SFT and more
        elif family == "qwen2_moe":
            layouts, objectives = ["fsdp2 ep4", "cp2 ep2 tp2 all_to_all"], ("sft",)
        elif family == "deepseek_v3":
            layouts = ["fsdp8", "fsdp2 tp4", "dp2 cp2 tp2 ring", "cp8 ulysses", "cp2 ep2 tp2 all_to_all"]
            objectives = ("balanced",)
        elif family == "llama4_text":
            layouts, objectives = ["dp2 cp2 tp2 ring", "cp8 gather", "fsdp2 ep4", "cp2 ep2 tp2"], ("sft",)
        elif family == "glm4_moe":
            layouts, objectives = ["fsdp2 ep4", "cp2 ep2 tp2 all_to_all"], ("balanced",)
        elif family == "gpt_oss":  # sinks are split as heads are, biases of experts as experts and their widths
            layouts, objectives = ["cp8 ulysses", "dp2 cp2 tp2 ring", "fsdp2 ep4", "cp2 ep2 tp2 all_to_all"], ("sft",)
        elif family == "minimax_m2":  # norms over heads of all devices
            layouts, objectives = ["fsdp2 tp4", "cp2 ep2 tp2"], ("sft",)
        elif (
            family == "qwen3_5_text"
        ):  # channels and heads of delta nets are split over tp and cp, their rows over neither
            layouts, objectives = ["fsdp2 tp4", "dp2 cp2 tp2 ring", "cp8 ulysses"], ("sft",)
        elif family == "qwen3_5_moe_text":
            layouts, objectives = ["cp2 ep2 tp2 all_to_all"], ("balanced",)
        elif family == "qwen3_next":  # parts of a tensor, by key head, are split over tp
            layouts, objectives = ["fsdp2 tp4", "cp2 ep2 tp2"], ("sft",)
        elif family == "nemotron_h":  # as qwen3_5_text, and layers that are only experts or an MLP
            layouts = ["fsdp2 tp4", "dp2 cp2 tp2 ring", "cp8 ulysses", "cp2 ep2 tp2 all_to_all"]
            objectives = ("balanced",)
        elif family == "olmo2":
            layouts, objectives = ["dp2 cp2 tp2"], ("grpo",)
        elif family == "gemma2":  # norms, windows by layer type, and soft caps in attention and in the split vocabulary
            layouts, objectives = ["fsdp2 tp4", "dp2 cp2 tp2 ring", "cp8 ulysses"], ("grpo",)
        elif family == "gemma4_text":  # keys and values of other layers, an input for each layer, experts beside MLPs
            layouts, objectives = ["dp2 cp2 tp2 ring", "cp2 ep2 tp2", "fsdp2 tp4"], ("sft",)
        elif family == "qwen3 window":  # where positions are not split a window is a mask like others
            layouts = [layout for layout in LAYOUTS if LAYOUTS[layout].cp > 1]
        for (j, layout), (k, objective) in itertools.product(enumerate(layouts), enumerate(objectives)):
            case = family, layout, objective
            often = () if case == ("qwen3", "dp2 cp2 tp2 ring", "grpo") else pytest.mark.mesh
            alike = family in BIASED and layout not in ("fsdp8", "fsdp2 tp4", "dp2 cp2 tp2 ring", "cp8 ulysses")
            rare = alike or (i + j + k) % len(objectives)
            yield pytest.param(*case, marks=pytest.mark.wide if rare else often)


@pytest.mark.parametrize("family, layout, objective", list(cases()))
def test_a_step_equals_one_device(family, layout, objective):
    [got] = sgd_steps(family, OBJECTIVES[objective], layout, 1)
    [wanted] = one_device(family, objective, 1)
    compare(got, wanted, model(family)[2])


@pytest.mark.mesh
@pytest.mark.parametrize("layout", ["cp8 gather", "dp2 cp2 tp2 ring"])
def test_sequence_statistics_are_summed_over_devices(layout):
    [got] = sgd_steps("qwen3", OBJECTIVES["sequences"], layout, 1)
    [wanted] = one_device("qwen3", "sequences", 1)
    compare(got, wanted, model("qwen3")[2])


@pytest.mark.parametrize(
    "layout",
    [pytest.param("fsdp2 tp4", marks=pytest.mark.wide), pytest.param("dp2 cp2 tp2 ring", marks=pytest.mark.mesh)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_equal_one_device(family, layout):
    got, wanted = sgd_steps(family, losses.SFT(), layout, 3), one_device(family, "sft", 3)
    for steps, (a, b) in enumerate(zip(got, wanted, strict=True), 1):
        compare(a, b, model(family)[2], steps)


@pytest.mark.mesh
def test_replayed_experts_stay_with_their_tokens():
    """Where positions are split in zig-zag order and experts over devices, records still belong to their tokens."""
    config, table, params = model("qwen3_moe")
    rng = np.random.default_rng(3)
    draw = lambda n: np.argsort(rng.random((n, config.layers, 8)), -1)[..., : config.top_k].astype(np.int32)
    data = [s.replace(arrays={"routed_experts": ("input", draw(len(s.tokens)))}) for s in samples()]
    batch, out = packing.pack(data, LENGTH, rows=ROWS), []
    for name in ("one", "cp2 ep2 tp2 all_to_all"):
        on = mesh.make((LAYOUTS | SENT).get(name, mesh.Layout()))
        how = dataclasses.replace(run(name), cp="ring")
        with jax.set_mesh(on):
            scores = step.make_scores(partial(models.score, config=config, run=how))
            there = jax.device_put(params, rules.of_params(table, on))
            out.append(jax.tree.map(np.asarray, scores(there, place.batch(batch, on))))
    # as in `compare`: some are of size 9; records that are one token off differ by 6
    np.testing.assert_allclose(out[1].logp_BT, out[0].logp_BT, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[1].aux["load"], out[0].aux["load"])


@pytest.mark.mesh
@pytest.mark.parametrize("how", get_args(context.Method))
def test_the_compiled_step_communicates_what_its_method_states(how):
    """Keys and values are gathered, traded or passed on; nothing of the size of a row's hidden states is gathered."""
    config, table, params = model("llama")
    on = mesh.make(mesh.Layout(cp=8))
    with jax.set_mesh(on):
        shardings = rules.of_state(optax.sgd(1.0), table, on)
        score = partial(models.score, config=config, run=models.Run(cp=how))
        update = step.make_step(score, losses.SFT(), optax.sgd(1.0), shardings)
        state = step.init(jax.device_put(params, shardings.params), optax.sgd(1.0), shardings)
        batch = jax.jit(losses.SFT().prepare)(place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on))
        text = update.lower(state, batch).compile().as_text()
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    gathered = {tuple(n for n in map(int, shape.split(",")) if n > 1) for shape in gathers}
    keys = {(ROWS, LENGTH, config.kv_heads, config.head_dim)} if how == "gather" else set()
    assert {shape for shape in gathered if np.prod(shape) >= ROWS * LENGTH * config.head_dim} == keys
    own = {"gather": "all-gather", "ulysses": "all-to-all", "ring": "collective-permute"}
    assert all((f" {call}(" in text) == (how == its) for its, call in own.items() if its != "gather")


@pytest.mark.parametrize("window, calls", [(None, "all-gather"), (7, "collective-permute"), (44, "all-gather")])
def test_gather_fetches_only_keys_within_the_window(window, calls):
    """Six positions a device: a window of 7 reaches one device, one of 44 all of them."""
    pattern = Pattern(window=window)
    causal = partial(chunked.causal, pattern=pattern)
    attend = partial(context.attention, causal, None, method="gather", pattern=pattern)
    x, place = jax.ShapeDtypeStruct((1, LENGTH, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    with jax.set_mesh(mesh.make(mesh.Layout(cp=8))):
        text = jax.jit(attend).lower(x, x, x, place, place).compile().as_text()
    assert {call for call in ("all-gather", "collective-permute") if f" {call}(" in text} == {calls}


def test_zig_zag_balances_the_work_of_devices():
    order = ring.order(32, 4)
    np.testing.assert_array_equal(np.sort(order), np.arange(32))
    assert {int(piece.sum()) for piece in order.reshape(4, -1)} == {sum(range(32)) // 4}
    with pytest.raises(ValueError, match="must be a multiple of 2 x cp = 8, got 36"):
        ring.order(36, 4)
