"""Nemotron-H against the recurrence token by token in float64, and what its config.json may say."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tiny
import transformers

from areax import models
from areax.adapters import hf, safetensors
from areax.models import nemotron_h, paging
from areax.models.layers import recurrence
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import pool
from areax.rollout.engine.request import Request, Sampling

KINDS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
TINY = dict(
    model_type="nemotron_h", vocab_size=41, hidden_size=24, intermediate_size=20, layers_block_type=KINDS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, layer_norm_epsilon=1e-3, mamba_num_heads=6,
    mamba_head_dim=7, n_groups=3, ssm_state_size=5, conv_kernel=4, use_bias=True, mlp_bias=True, time_step_min=0.6,
    n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2, routed_scaling_factor=1.3,
    moe_intermediate_size=10, moe_shared_expert_intermediate_size=14, moe_latent_size=9,
)  # fmt: skip
LENGTHS = (1, 2, 23, 9)  # shorter than the convolution, and not


def silu(x):
    return x / (1 + np.exp(-x))


def relu2(x):
    return np.maximum(x, 0) ** 2


def norm(x, eps=TINY["layer_norm_epsilon"]):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


class Oracle:
    """A model of numpy in float64: `Oracle(tensors)(tokens)` are the logits [T, V] of one sequence."""

    def __init__(self, tensors):
        self.tensors = {name.removeprefix("backbone."): np.asarray(x, np.float64) for name, x in tensors.items()}

    def __call__(self, tokens):
        x = self.tensors["embeddings.weight"][tokens]
        mixers = {"linear_attention": self.mamba, "full_attention": self.attention, "mlp": self.mlp, "moe": self.moe}
        for i, kind in enumerate(KINDS):
            at = f"layers.{i}."
            x = x + mixers[kind](norm(x) * self.tensors[f"{at}norm.weight"], f"{at}mixer.")
        return norm(x) * self.tensors["norm_f.weight"] @ self.tensors["lm_head.weight"].T

    def linear(self, x, name):
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def mlp(self, x, at):
        return self.linear(relu2(self.linear(x, f"{at}up_proj")), f"{at}down_proj")

    def attention(self, x, at):
        """Without positions."""
        q, k, v = (self.linear(x, f"{at}{name}_proj").reshape(len(x), -1, TINY["head_dim"]) for name in "qkv")
        out = np.zeros(q.shape)
        for t, n in itertools.product(range(len(q)), range(q.shape[1])):
            score = k[: t + 1, n // 2] @ q[t, n] / np.sqrt(q.shape[2])
            weight = np.exp(score - score.max())
            out[t, n] = weight / weight.sum() @ v[: t + 1, n // 2]
        return self.linear(out.reshape(len(x), -1), f"{at}o_proj")

    def moe(self, x, at):
        """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2) over experts at another width."""
        low, out = self.linear(x, f"{at}fc1_latent_proj"), []
        for token, score in zip(low, 1 / (1 + np.exp(-self.linear(x, f"{at}gate"))), strict=True):
            choice = score + self.tensors[f"{at}gate.e_score_correction_bias"]
            groups = np.argsort([-np.sort(group)[-2:].sum() for group in choice.reshape(3, 2)])[:2]
            best = sorted((e for e in range(6) if e // 2 in groups), key=lambda e: -choice[e])[:2]
            parts = [score[e] * self.mlp(token, f"{at}experts.{e}.") for e in best]
            out.append(TINY["routed_scaling_factor"] * sum(parts) / sum(score[e] for e in best))
        return self.linear(np.array(out), f"{at}fc2_latent_proj") + self.mlp(x, f"{at}shared_experts.")

    def mamba(self, x, at):
        """arXiv:2405.21060, section 7, one token and head at a time, with a gate before the norm of each group."""
        heads, size, groups, N, taps = (
            TINY[name] for name in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
        )
        inner, own = heads * size, {name: self.tensors[f"{at}{name}"] for name in ("A_log", "D", "dt_bias")}
        z, mixed, dt = np.split(self.linear(x, f"{at}in_proj"), [inner, 2 * inner + 2 * groups * N], -1)
        padded = np.concatenate([np.zeros((taps - 1, mixed.shape[1])), mixed])
        kernel = self.tensors[f"{at}conv1d.weight"][:, 0]
        state, out = np.zeros((heads, size, N)), np.zeros((len(x), heads, size))
        for t in range(len(x)):
            read = silu((padded[t : t + taps].T * kernel).sum(1) + self.tensors[f"{at}conv1d.bias"])
            value, key, query = np.split(read, [inner, inner + groups * N])
            value, key, query = (each.reshape(-1, n) for each, n in ((value, size), (key, N), (query, N)))
            for h in range(heads):
                step = max(np.logaddexp(0, dt[t, h] + own["dt_bias"][h]), TINY["time_step_min"])
                g = h // (heads // groups)
                state[h] = np.exp(-step * np.exp(own["A_log"][h])) * state[h] + step * np.outer(value[h], key[g])
                out[t, h] = state[h] @ query[g] + own["D"][h] * value[h]
        gated = (out.reshape(len(x), -1) * silu(z)).reshape(len(x), groups, -1)
        return self.linear(norm(gated).reshape(len(x), -1) * self.tensors[f"{at}norm.weight"], f"{at}out_proj")


@pytest.fixture(scope="module")
def model():
    config = models.config_from_hf(TINY)
    return config, tiny.weights(models.table(config), 0.25)


@pytest.mark.slow
def test_packed_rows_are_the_recurrence_of_each_sequence_in_float64(model):
    config, params = model
    specs, arrays = hf.to_tensors(config, params, "float32")
    oracle = Oracle(dict(zip(specs, arrays, strict=True)))
    tokens = np.random.default_rng(0).integers(0, TINY["vocab_size"], sum(LENGTHS))
    wanted = np.concatenate([oracle(each) for each in np.split(tokens, np.cumsum(LENGTHS)[:-1])])
    segment = np.repeat(np.arange(1, 1 + len(LENGTHS), dtype=np.int32), LENGTHS)
    forward = jax.jit(lambda params: models.forward(params, tokens[None], config=config, segment_BT=segment[None]))
    got = np.asarray(forward(params))[0]
    assert wanted.std() > 1
    assert np.abs(got - wanted).max() < 1e-5 * wanted.std()


# As checkpoints on the hub spell them; sizes are smaller. The first is dense, as Nemotron-H and Nemotron Nano 2 are.
PUBLISHED = {
    "dense": dict(
        attention_bias=False, attention_dropout=0.0, attention_head_dim=16, chunk_size=128, conv_kernel=4, expand=2,
        head_dim=16, hidden_dropout=0.0, hidden_size=48, hybrid_override_pattern="M-M*-M-", initializer_range=0.02,
        intermediate_size=40, layer_norm_epsilon=1e-5, mamba_head_dim=8, mamba_hidden_act="silu", mamba_num_heads=16,
        mamba_proj_bias=False, max_position_embeddings=8192, mlp_bias=False, mlp_hidden_act="relu2", n_groups=8,
        num_attention_heads=4, num_hidden_layers=7, num_key_value_heads=2, num_query_groups=2, residual_in_fp32=False,
        rms_norm_eps=1e-5, sliding_window=None, ssm_state_size=16, tie_word_embeddings=False, time_step_floor=1e-4,
        time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, time_step_rank=256,
        use_bias=False, use_conv_bias=True, vocab_size=61,
    ),
    "experts": dict(
        attention_bias=False, hidden_size=48, hybrid_override_pattern="MEM*E", intermediate_size=20, head_dim=16,
        layer_norm_epsilon=1e-5, norm_eps=1e-5, mamba_head_dim=8, mamba_num_heads=16, n_groups=8, ssm_state_size=16,
        moe_intermediate_size=20, moe_shared_expert_intermediate_size=40, n_group=1, n_routed_experts=8,
        n_shared_experts=1, norm_topk_prob=True, num_attention_heads=4, num_experts_per_tok=3, num_hidden_layers=5,
        num_key_value_heads=2, routed_scaling_factor=2.5, topk_group=1, vocab_size=61, rope_theta=10000,
        partial_rotary_factor=1.0,  # though there is no rope
    ),
    "older names": dict(
        layers_block_type=["mamba", "attention"], mamba_n_groups=4, mamba_d_conv=3, mamba_conv_bias=False,
        mamba_dt_min=0.02, mamba_dt_max=0.3, mamba_dt_init_floor=0.05, mamba_num_heads=16, hidden_size=48,
        vocab_size=61, num_hidden_layers=2,
    ),
    "both kinds of names": dict(
        layer_types=["moe", "linear_attention"], num_local_experts=6, n_routed_experts=4, n_groups=2, mamba_n_groups=8,
        hidden_size=48, vocab_size=61,
    ),
    "both kinds of layers": dict(
        layers_block_type=["mlp", "full_attention"], hybrid_override_pattern="MM", hidden_size=48, vocab_size=61
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_what_they_mean_to_transformers(name):
    ours = models.config_from_hf(PUBLISHED[name] | {"model_type": "nemotron_h"})
    theirs = transformers.AutoConfig.for_model("nemotron_h", **PUBLISHED[name]).to_dict()
    ignored = dict(source="", eos=())
    same = dataclasses.replace(ours, **ignored)
    assert same == dataclasses.replace(models.config_from_hf(theirs), **ignored)
    written = models.config_to_hf(ours)
    assert {*written["layers_block_type"]} <= {"mamba", "attention", "mlp", "moe"}  # which SGLang reads, too
    again = transformers.AutoConfig.for_model(**written)
    assert again.layers_block_type == theirs["layers_block_type"]
    assert same == dataclasses.replace(models.config_from_hf(written), **ignored)
    assert "experts" not in models.table(ours).dims or "moe" in ours.kinds


@pytest.mark.parametrize(
    "option, words",
    [
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias must be False, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"sliding_window": 8}, "sliding_window must be None, got 8"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act must be 'silu', got 'gelu'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2', got 'silu'"),
        ({"residual_in_fp32": True}, "residual_in_fp32 must be False, got True"),
        ({"hidden_dropout": 0.1}, "hidden_dropout must be 0.0, got 0.1"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        ({"attention_head_dim": 8}, "attention_head_dim must be 6, got 8"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit must be \[0, Infinity\], got \[0.0, 0.1\]"),
        ({"mamba_dt_limit": [0.1, 0.2]}, r"time_step_limit must be \[0, Infinity\], got \[0.1, 0.2\]"),
        ({"n_groups": 4}, "mamba_num_heads must be a multiple of n_groups, got 6 and 4"),
        ({"mamba_n_groups": "4"}, "mamba_n_groups must be a whole number above 0, got '4'"),
        ({"n_groups": 0}, "n_groups must be a whole number above 0, got 0"),
        ({"time_step_floor": 0}, "time_step_floor must be a finite number above 0, got 0"),
        ({"layers_block_type": ["mlp", "conv"]}, "layers_block_type must have linear_attention, .*, got conv"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M|E"}, r".* hybrid_override_pattern M .*, got \|"),
        ({"layers_block_type": []}, "layers_block_type must have .*, got none"),
        ({"num_hidden_layers": 4}, "num_hidden_layers must be the number of layers .*, 5, got 4"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most n_routed_experts 6, got 7"),
        ({"moe_latent_size": 0}, "moe_latent_size must be a whole number above 0, or null, got 0"),
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(option, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(TINY | option)


@pytest.mark.slow
def test_tensors_that_predict_further_tokens_are_ignored_and_all_prefixes_are_read(model):
    config, params = model
    specs, arrays = hf.to_tensors(config, params, "float32")
    stored = dict(zip(specs, arrays, strict=True))
    assert {name.partition(".")[0] for name in stored} == {"backbone", "lm_head"}
    more = {"mtp.layers.0.norm.weight": np.ones(24, np.float32)}
    module = {name.replace("backbone.", "model."): x for name, x in stored.items()}
    bare = {name.replace("backbone.", ""): x for name, x in stored.items() if name != "lm_head.weight"}
    bare_config, bare_params = hf.from_tensors(config, bare | more, "here", init_missing=("head",))
    for tensors in (stored | more, module):
        _, same = hf.from_tensors(config, tensors, "here")
        assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
    assert jax.tree.all(jax.tree.map(np.array_equal, params | {"head": 0}, bare_params | {"head": 0}))
    assert hf.to_tensors(bare_config, bare_params, "float32")[0].keys() == stored.keys()
    with pytest.raises(ValueError, match="here: unexpected backbone.layers.5.norm.weight"):
        hf.from_tensors(config, stored | {"backbone.layers.5.norm.weight": np.ones(24, np.float32)}, "here")


def test_what_time_steps_and_decays_are_made_of_stays_in_fp32(model, tmp_path):
    config, params = model
    hf.save(tmp_path / "a", config, params, "bfloat16")
    stored = safetensors.read(tmp_path / "a")
    wide = {name.rpartition(".")[2] for name, x in stored.items() if x.dtype == np.float32}
    assert wide == {"A_log", "D", "dt_bias", "e_score_correction_bias"}
    _, again = hf.load(tmp_path / "a", dtype="bfloat16")
    for name in ("decay_log", "dt_offset", "skip"):
        np.testing.assert_array_equal(again["stacks"][0][name], params["stacks"][0][name])


def test_a_new_model_starts_with_the_time_steps_and_decays_of_transformers():
    net = models.config_from_hf({k: v for k, v in TINY.items() if k != "time_step_min"}).mamba
    offset = recurrence.time_steps(net.start, jax.random.key(0), (2000, 6), "float32")
    log_dt = np.log(np.logaddexp(0, offset))
    assert np.isclose([log_dt.min(), log_dt.max()], np.log([0.001, 0.1]), atol=0.02).all()
    assert np.isclose(log_dt.mean(), np.log(0.01), atol=0.05)
    np.testing.assert_allclose(np.exp(nemotron_h._decays(None, (2, 6), "float32")[1]), np.arange(1, 7), rtol=1e-6)


@pytest.mark.slow
def test_layers_without_states_neither_take_memory_nor_keep_prompts_from_being_reused():
    hybrid, plain = (
        models.config_from_hf(TINY | {"layers_block_type": kinds}) for kinds in (KINDS, ["full_attention", "mlp"])
    )

    def sizes(config):
        kinds = paging.kinds(config.records, 64, 16, 4)
        made = pool.empty(config.records, kinds, [3] * len(kinds), 2, 16, np.float32)
        return [sum(x.size for x in jax.tree.leaves(layer)) for layer in made]

    mamba, page = 6 * 7 * 5 + (42 + 15 + 15) * 3, 2 * 2 * 6 * 16
    states = 2 + 1 + 3  # of slots, before any token, of prefixes
    assert sizes(hybrid) == [states * mamba, 0, 4 * page, 0, states * mamba] and sizes(plain) == [4 * page, 0]
    params = tiny.weights(models.table(plain), 0.25)
    prompt, sampling = tuple(range(1, 9)), Sampling(0.0, max_new_tokens=3, ignore_eos=True)
    with Engine(plain, params, slots=2, context=64) as engine:
        first, again = (engine.generate([Request(name, prompt, sampling)])[0] for name in "ab")
    assert first.tokens == again.tokens and again.cached_tokens > 0
