"""Decoding with the KV cache equals the full forward pass."""

import base64
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families

from areax import models
from areax.adapters import hf
from areax.core import packing, param, quantised
from areax.models import paging
from areax.models.layers import native
from areax.models.layers.blocked import OUTPUTS, Blocked
from areax.models.layers.linear import Transposed
from areax.rollout.engine import in_process
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import pool, staging
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.engine.routes import request_parsing
from areax.rollout.engine.routes.service import Service
from areax.rollout.servers.engine_mesh import EngineMesh
from areax.rollout.servers.engine_options import EngineOptions
from areax.rollout.types import supervised

TINY = dict(
    vocab_size=89, hidden_size=48, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=256,
    initializer_range=0.16, eos_token_id=7,
)  # fmt: skip
CASES = {
    "qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True),
    "qwen3_moe": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0],
    ),
    "qwen2_moe": dict(
        num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=24, shared_expert_intermediate_size=40,
    ),
    "deepseek_v3": dict(
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=12, tie_word_embeddings=False, n_routed_experts=9, n_group=3, topk_group=2,
        num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        },
    ),
    "llama4_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, num_local_experts=6,
        intermediate_size_mlp=40, interleave_moe_layer_step=2, no_rope_layers=[0, 1], attention_chunk_size=23,
        floor_scale=9, attn_scale=0.3,
    ),
    "qwen3 window": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=21, max_window_layers=1,
    ),
    "qwen3_5_text": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
        rms_norm_eps=1e-2, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=10, linear_value_head_dim=14,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
    "qwen3_5_moe_text": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-2,
        layer_types=["full_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=14, linear_value_head_dim=10, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
    "qwen3_next": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
        rms_norm_eps=1e-2, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=10, linear_value_head_dim=14, linear_conv_kernel_dim=3, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[1],
    ),
    "nemotron_h": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, num_hidden_layers=4, layer_norm_epsilon=1e-2,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=6, mamba_head_dim=10, n_groups=3, ssm_state_size=12, conv_kernel=5, n_routed_experts=6,
        num_experts_per_tok=2, n_group=3, topk_group=2, routed_scaling_factor=1.5, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40, moe_latent_size=16,
    ),
    "olmo3": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, sliding_window=11,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "granite": dict(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, embedding_multiplier=1.7,
        attention_multiplier=0.21, residual_multiplier=0.6, logits_scaling=0.8,
    ),
    "ministral3": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "smollm3": dict(num_attention_heads=4, num_key_value_heads=2, no_rope_layers=[0, 1], pad_token_id=None),
    "gemma2": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, query_pre_attn_scalar=9, sliding_window=21,
        attn_logit_softcapping=6.0, final_logit_softcapping=8.0,
    ),
    "gemma3_text": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=14, query_pre_attn_scalar=40, sliding_window=21,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4_text": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=4, global_head_dim=6, sliding_window=9,
        rms_norm_eps=1e-2,  # small heads are small at times, and their norms would multiply rounding
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=89, num_kv_shared_layers=2, use_double_wide_mlp=True,
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True, num_global_key_value_heads=2,
    ),
    "gemma4_text experts": dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=6, global_head_dim=10, sliding_window=21,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm4_moe": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, use_qk_norm=True,
        n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=False, routed_scaling_factor=1.5,
    ),
    "gpt_oss": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, sliding_window=21,
        num_local_experts=6, num_experts_per_tok=2, swiglu_limit=1.0,
    ),
    "minimax_m2": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=12, rotary_dim=8, tie_word_embeddings=False,
        num_local_experts=6, num_experts_per_tok=2,
    ),
    "glm4": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False, pad_token_id=None,
    ),
    "llama": dict(
        num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip


@functools.cache
def model(case):
    if case in CASES:
        config, std = models.config_from_hf({"model_type": case.split()[0]} | TINY | CASES[case]), 0.16
    else:
        same = {"vocab_size": TINY["vocab_size"], "eos_token_id": TINY["eos_token_id"]}
        if case == "phi3":  # rope that changes while a sequence grows is that of test_rollout_engine_long_rope
            same["original_max_position_embeddings"] = 4096
        config, std = tiny_families.config(case, **same), 0.2
    return config, tiny.weights(models.table(config), std)


# These have each way of keeping and reading what came before once. transformers knows no kimi_k2.
COMMON = "qwen3", "qwen3_moe", "qwen3 window", "deepseek_v3", "qwen3_5_text", "nemotron_h", "gemma4_text"
ALL = list(dict.fromkeys([*CASES, *(name for name in tiny_families.FAMILIES if name != "kimi_k2")]))


def served_by(*marks):
    """The cases, with marks for those that are not among the common ones."""
    return [pytest.param(case, marks=marks if case not in COMMON else ()) for case in ALL]


@pytest.fixture(scope="module", params=served_by(pytest.mark.wide))
def served(request):
    config, params = model(request.param)
    engine = Engine(config, params, slots=4, context=160, steps=4)
    engine.start()
    yield config, params, engine
    engine.close()


@functools.partial(jax.jit, static_argnames="config")
def forward(params, token_BT, config):
    return models.forward(params, token_BT, config=config)


def prompts(seed, lengths):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, TINY["vocab_size"], n).tolist()) for n in lengths]


def test_matrices_are_turned_for_decoding_but_biases_of_experts_are_not():
    stack = {"router": np.ones((2, 3, 4), np.float32), "expert_up_bias": np.ones((2, 3, 5), np.float32)}
    top = {"embed": np.ones((6, 4), np.float32), "norm": np.ones(4, np.float32)}
    axes = {"router": param.Param("router embed", (), None), "expert_up_bias": param.Param("experts router", (), None)}
    names = {"embed": param.Param("vocab embed", (), None), "norm": param.Param("embed", (), None)}
    sizes = dict(vocab=6, embed=4, router=3, experts=3)
    table = param.Table(names, (param.Stack((0, 1), axes),), sizes)
    layers = staging.stage({**top, "stacks": [stack]}, table, jax.sharding.Mesh(np.array(jax.devices()[0]), ()))[
        "layers"
    ]
    assert [layer["router"].weight.shape for layer in layers] == [(4, 3)] * 2
    assert [layer["expert_up_bias"].shape for layer in layers] == [(3, 5)] * 2


SIZES = dict(slots=4, context=160, steps=4)


def asked(n=9):
    sampling = Sampling(0.7, max_new_tokens=n, ignore_eos=True, seed=3)
    return [Request(str(i), p, sampling, input_logprobs_from=0) for i, p in enumerate(prompts(4, (5, 20)))]


@pytest.fixture
def in_blocks(monkeypatch):
    """Small matrices are in blocks, too."""
    monkeypatch.setattr(staging, "LEAST", 1)


@pytest.mark.slow
def test_without_a_compiler_xla_computes(in_blocks, compiled):
    config, params = model("qwen3")
    with Engine(config, params, **SIZES) as engine:
        assert isinstance(engine.weights["head"], Blocked)
        fast = engine.generate(asked())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "ready", lambda: False)
        jax.clear_caches()  # programs that call C
        with Engine(config, params, **SIZES) as engine:
            assert isinstance(engine.weights["head"], Transposed)
            for one, other in zip(fast, engine.generate(asked()), strict=True):
                assert one.tokens == other.tokens
                np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
                np.testing.assert_allclose(one.input_logp[1:], other.input_logp[1:], atol=1e-5)
    jax.clear_caches()  # programs that do not


def test_samples_keep_their_bits_beside_others(in_blocks):
    config, params = model("qwen3")
    with Engine(config, params, **SIZES) as engine:
        alone = [engine.generate([one])[0] for one in asked()]
        engine.flush()
        for one, other in zip(alone, engine.generate(asked()), strict=True):
            assert one.tokens == other.tokens and one.logp == other.logp and one.input_logp == other.input_logp


def test_a_tied_head_in_blocks_is_the_only_copy_in_any_dtype(in_blocks, compiled):
    config, params = model("qwen3")
    for dtype, kept_as in ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.uint32)):
        kept = jax.tree.map(lambda x, dtype=dtype: jnp.asarray(x).astype(dtype), params)
        with Engine(config, kept, **SIZES) as engine:
            assert "embed" not in engine.weights and engine.weights["head"].weight.dtype == kept_as
            alone = [engine.generate([one])[0] for one in asked()]
            engine.flush()
            for one, other in zip(alone, engine.generate(asked()), strict=True):
                assert one.tokens == other.tokens and one.logp == other.logp and one.input_logp == other.input_logp


def test_weights_in_bf16_stay_so_and_are_multiplied_as_in_fp32(in_blocks, compiled):
    config, params = model("qwen3")
    params = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), params)
    with Engine(config, params, **SIZES) as engine:
        assert engine.weights["layers"][0]["q"].weight.dtype == jnp.uint32  # two in each
        narrow = engine.generate(asked())
        is_leaf = lambda w: isinstance(w, Blocked)
        two = lambda w_FDN: jax.lax.bitcast_convert_type(w_FDN, jnp.bfloat16).swapaxes(2, 3)
        in_fp32 = lambda w_FDN: two(w_FDN).reshape(len(w_FDN), -1, OUTPUTS).astype(jnp.float32)
        widened = lambda w: dataclasses.replace(w, weight=in_fp32(w.weight)) if is_leaf(w) else w
        engine.swap(jax.tree.map(widened, engine.weights, is_leaf=is_leaf), "in fp32")
        for one, other in zip(narrow, engine.generate(asked()), strict=True):
            assert one.tokens == other.tokens and one.logp == other.logp and one.input_logp == other.input_logp


@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_rounded_weights_generate_as_the_numbers_that_they_stand_for(kind, in_blocks):
    config, params = model("qwen3")

    def rounded(path, w):
        name = path[-1].key
        if name != "embed" and (w.ndim < 3 or name.endswith("_bias")):
            return w
        return quantised.dequantise(quantised.quantise(jnp.asarray(w), "int8" if name == "embed" else kind))

    with Engine(config, params, **SIZES, weights=kind) as engine:
        assert engine.weights["layers"][0]["q"].weight.dtype == {"int8": jnp.int8, "nf4": jnp.uint8}[kind]
        found = engine.generate(asked())
    exact = jax.tree_util.tree_map_with_path(rounded, params)
    with Engine(config, exact, **SIZES) as engine:
        engine.swap({**engine.weights, "embed": jnp.asarray(params["embed"])}, "embeddings are not rounded")
        for one, other in zip(found, engine.generate(asked()), strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


def test_rounded_weights_are_refused_on_several_devices():
    with pytest.raises(ValueError, match="weights in int8 are for one device, got tp 2; use weights=auto"):
        EngineOptions(weights="int8", mesh=EngineMesh(tp=2))
    with pytest.raises(ValueError, match="weights must be auto, int8 or nf4, got 'int4'"):
        EngineOptions(weights="int4")


LENGTHS = (1, 2, 17, 70)  # no prefill, a full bucket, and a partial one over several cache chunks


@pytest.mark.sweep
def test_greedy_tokens_are_those_of_transformers(served, tmp_path):
    import torch
    import transformers

    config, params, engine = served
    folder = hf.save(tmp_path / "model", config, params)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = prompts(1, LENGTHS)
    done = engine.generate([Request(str(i), p, Sampling(0.0, max_new_tokens=50)) for i, p in enumerate(asked)])
    for prompt, progress in zip(asked, done, strict=True):
        ids, every = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)  # else 0 means padding
        with torch.no_grad():
            ids = reference.generate(ids, attention_mask=every, max_new_tokens=50, do_sample=False, pad_token_id=0)
        assert progress.tokens == ids[0, len(prompt) :].tolist()
        ended = progress.tokens[-1] == 7
        assert progress.finish == ({"type": "stop", "matched": 7} if ended else {"type": "length", "length": 50})


@pytest.mark.sweep
@pytest.mark.parametrize("served", served_by(pytest.mark.mesh), indirect=True)
def test_logprobs_equal_those_of_a_teacher_forced_forward_pass(served):
    config, params, engine = served
    asked = prompts(2, LENGTHS)
    sampling = Sampling(0.8, max_new_tokens=40, ignore_eos=True)
    done = engine.generate([
        Request(str(i), p, sampling, input_logprobs_from=0, top_logprobs=3) for i, p in enumerate(asked)
    ])  # fmt: skip
    T = max(LENGTHS) + 40
    token_BT = np.zeros((len(asked), T), np.int32)
    for row, (prompt, progress) in enumerate(zip(asked, done, strict=True)):
        token_BT[row, : len(prompt) + 40] = [*prompt, *progress.tokens]
    logits_BTV = forward(params, token_BT, config)
    assert float(jnp.std(logits_BTV)) > 1
    # With delta nets either side is up to 2.7e-5 from float64, by token in `hybrid_oracle`: fp32 has no more digits.
    # With the scaled embeddings of Gemma 3 either side is up to 8e-6 from it.
    atol = 4e-5 if hasattr(config, "delta") else 2e-5 if config.family == "gemma3_text" else 1e-5
    for row, (prompt, progress) in enumerate(zip(asked, done, strict=True)):
        n = len(prompt)

        def check(logp, top, start, temperature, row=row):
            logp_TV = np.asarray(jax.nn.log_softmax(logits_BTV[row] / temperature))
            at = np.arange(start, start + len(logp))
            np.testing.assert_allclose(logp, logp_TV[at - 1, token_BT[row, at]], atol=atol)
            for t, pairs in zip(at, top, strict=True):
                best = np.argsort(-logp_TV[t - 1])[:3]
                assert [i for _, i in pairs] == best.tolist()
                np.testing.assert_allclose([x for x, _ in pairs], logp_TV[t - 1, best], atol=atol)

        check(progress.logp, progress.top, n, 0.8)
        assert progress.input_logp[0] is None and progress.input_top[0] is None
        check(progress.input_logp[1:], progress.input_top[1:], 1, 1.0)


@pytest.mark.sweep
def test_samples_do_not_depend_on_neighbours(served):
    """Bit for bit, even if the tokens of all slots are sorted by expert together."""
    sampling = lambda i: Sampling(1.0, max_new_tokens=30, ignore_eos=True, seed=i)
    asked = [Request(str(i), p, sampling(i)) for i, p in enumerate(prompts(4, (3, 9, 17, 70)))]
    together = engine_results(served[2], asked)
    for request, beside in zip(asked, together, strict=True):
        served[2].flush()
        assert engine_results(served[2], [request]) == [beside]


def test_latent_attention_caches_one_vector_for_all_heads():
    config, _ = model("deepseek_v3")
    kinds = paging.kinds(config.records, 64, 16, 4)
    for keys, values in pool.empty(config.records, kinds, [5], 2, 16, jnp.float32):
        assert (keys.shape, values.shape) == ((6, 1, 18 + 6, 16), (6, 1, 16, 18))


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["qwen3", "deepseek_v3", "qwen3_5_text", "gemma4_text"])
def test_the_size_of_caches_is_known_before_they_are_made(case):
    """What is refused as too large must not fit: latent vectors, states and shared keys take less than keys would."""
    config, _ = model(case)
    kinds = paging.kinds(config.records, 128, 16, 2)
    counts = paging.counts(kinds, 3, 128, 16, 4, None)
    made = jax.tree.leaves(pool.empty(config.records, kinds, counts, 3, 16, jnp.bfloat16))
    assert paging.size_of(kinds, counts, 3) == sum(x.nbytes for x in made)


def engine_results(engine, asked):
    return [(done.tokens, done.logp) for done in engine.generate(asked)]


@pytest.fixture(scope="module")
def mixture():
    config, params = model("qwen3_moe")
    with Engine(config, params, slots=4, context=160, steps=4) as engine:
        yield config, params, engine


def recording(**more):
    return [
        Request(str(i), p, Sampling(1.0, max_new_tokens=12, ignore_eos=True, seed=i), routed_experts=True, **more)
        for i, p in enumerate(prompts(6, (1, 9, 70)) + prompts(6, (1, 9, 70)))
    ]


@pytest.mark.slow
def test_routed_experts_are_recorded_and_can_be_replayed(mixture):
    """They are recorded for every token but the last, however prompts were cached; replaying them changes nothing."""
    config, params, engine = mixture
    asked = recording()
    plain = engine_results(engine, [dataclasses.replace(request, routed_experts=False) for request in asked])
    done = engine.generate(asked)
    assert [(progress.tokens, progress.logp) for progress in done] == plain
    data = []
    for i, (request, progress) in enumerate(zip(asked, done, strict=True)):
        n = len(request.prompt) + len(progress.tokens)
        routed = np.array(progress.routed)
        assert routed.shape == (n - 1, config.layers, config.top_k) and (routed[:, 0] == -1).all()
        unknown = np.full((1, *routed.shape[1:]), -1, routed.dtype)
        sample = supervised(request.prompt, progress.tokens, sample=i, rollout=i, group=i)
        data.append(sample.replace(arrays={"routed_experts": ("input", np.concatenate([routed, unknown]))}))
    score = jax.jit(lambda batch: models.score(params, jax.tree.map(lambda x: x[0], batch), config=config))
    replayed = packing.pack(data, 96, rows=8)
    own = packing.pack([sample.replace(arrays={}) for sample in data], 96, rows=8)
    for progress, logp in zip(done, packing.unpack(score(replayed).logp_BT[None], replayed, data), strict=True):
        np.testing.assert_allclose(logp[-12:], progress.logp, atol=1e-5)
    np.testing.assert_array_equal(score(replayed).aux["load"], score(own).aux["load"])
    changed = [s.replace(arrays={"routed_experts": ("input", (s.arrays["routed_experts"][1] + 1) % 8)}) for s in data]
    assert not np.array_equal(score(packing.pack(changed, 96, rows=8)).aux["load"], score(own).aux["load"])


@pytest.mark.slow
def test_a_retracted_request_keeps_its_recorded_experts(mixture):
    _, params, engine = mixture
    request = recording()[-1]
    [whole] = engine.generate([request])
    begun, gate, ended, last = *(threading.Event() for _ in range(3)), []

    def tell(progress):
        last[:] = [progress]
        (ended if progress.finish else begun).set()
        gate.wait()  # blocks the engine's thread until the pause is requested

    engine.submit(request, tell)
    begun.wait()
    had = last[0]
    threading.Timer(0.1, gate.set).start()
    engine.pause("retract")
    assert len(had.routed) == len(request.prompt) + len(had.tokens) - 1 and had.tokens != whole.tokens
    engine.load(jax.tree.map(lambda x: -x, params), "v1")  # weights that route differently
    engine.resume()
    ended.wait()
    now = len(had.routed)
    assert last[0].retractions == 1 and len(last[0].routed) == len(whole.routed)
    np.testing.assert_array_equal(last[0].routed[:now], whole.routed[:now])
    engine.load(params, "default")


@pytest.mark.slow
def test_recorded_experts_are_sent_in_the_format_of_sglang(mixture):
    """Base64 of i32[tokens but the last, layers, top_k]; a model without experts has none to send."""
    config, params, engine = mixture
    body = {"input_ids": [3, 1, 4], "sampling_params": {"max_new_tokens": 5}, "return_routed_experts": True}
    ask = request_parsing.generate(body, None, engine.context)
    [progress] = engine.generate(ask.requests)
    answer = Service(engine, None, "", {}, "float32").answer(progress, ask, 0, 0.0)
    sent = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    n = 3 + len(progress.tokens) - 1
    np.testing.assert_array_equal(sent.reshape(n, config.layers, config.top_k), progress.routed)
    plain, weights = model("qwen3")
    with Engine(plain, weights, slots=2, context=32) as dense, pytest.raises(ValueError, match="a model with experts"):
        dense.generate(ask.requests)


@pytest.mark.wide
@pytest.mark.slow
def test_decoding_with_bfloat16_weights():
    config, params = model("qwen3")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with Engine(config, low, slots=2, context=32) as engine:
        prompt = prompts(3, [9])[0]
        done = engine.generate([Request("a", prompt, Sampling(max_new_tokens=20, ignore_eos=True))])[0]
    logits_BTV = forward(low, np.array([[*prompt, *done.tokens]]), config)
    logp_TV = np.asarray(jax.nn.log_softmax(logits_BTV[0]))
    at = np.arange(9, 29)
    assert np.abs(np.asarray(done.logp) - logp_TV[at - 1, done.tokens]).max() < 0.2


def scaled(case):
    """A model whose next tokens are neither certain nor alike: the last norm makes the deviation of its logits 1."""
    config, params = model(case)
    logits_BTV = forward(params, np.array(prompts(8, [40, 40])), config)
    norm = (params["norm"] + config.norm_offset) / jnp.std(logits_BTV) - config.norm_offset
    return config, params | {"norm": norm}


def replayed(config, prompt, progress, i):
    """A sample, for training, of what the engine generated, with the experts that it reported."""
    sample = supervised(prompt, progress.tokens, sample=i, rollout=i, group=i)
    if not getattr(config, "top_k", 0):
        return sample
    routed = np.array(progress.routed)
    unknown = np.full((1, *routed.shape[1:]), -1, routed.dtype)
    return sample.replace(arrays={"routed_experts": ("input", np.concatenate([routed, unknown]))})


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in COMMON else pytest.mark.wide) for case in ALL]
)
def test_in_bfloat16_trainer_and_engine_agree_about_samples(case):
    """k3 of the log-probabilities of a trainer with master weights in fp32, and of the engine, which gets them rounded.

    They are the same without rounding (above).
    """
    config, params = scaled(case)
    low = in_process.Weights(config, params, {}).cast("bfloat16")
    experts = bool(getattr(config, "top_k", 0))
    sampling = lambda i: Sampling(1.0, max_new_tokens=30, ignore_eos=True, seed=i)
    asked = [
        Request(str(i), p, sampling(i), routed_experts=experts) for i, p in enumerate(prompts(9, (2, 17, 30, 60) * 4))
    ]
    with Engine(config, low, slots=4, context=160, steps=4) as engine:
        done = engine.generate(asked)
    data = [replayed(config, asked[i].prompt, progress, i) for i, progress in enumerate(done)]
    batch, run = packing.pack(data, 128, rows=16), models.Run(dtype="bfloat16")
    score = jax.jit(lambda batch: models.score(params, jax.tree.map(lambda x: x[0], batch), config=config, run=run))
    found = packing.unpack(score(batch).logp_BT[None], batch, data)
    apart = np.concatenate([
        logp[-30:] - progress.logp for logp, progress in zip(found, done, strict=True)
    ]).astype(np.float64)  # fmt: skip
    k3 = np.mean(np.exp(apart) - 1 - apart)
    assert 0 < k3 < 1e-3
