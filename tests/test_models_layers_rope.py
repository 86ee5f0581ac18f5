"""Rotary embeddings: tables and rotation as in transformers, for the options of every family, or one line."""

import copy
import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from areax import models
from areax.models.layers import rope
from areax.models.layers.rope import Rope

SIZES = dict(
    vocab_size=10, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS = {
    "llama": (transformers.LlamaConfig, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (transformers.Qwen3Config, modeling_qwen3.Qwen3RotaryEmbedding),
}


def ours(family, options):
    config = models.config_from_hf({**SIZES, "model_type": family, **copy.deepcopy(options)})
    return rope.frequencies(config.rope, 8), config


@pytest.mark.parametrize("family", THEIRS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 1.0, "rope_theta": 10.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0, "original_max_position_embeddings": 16}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0}, "original_max_position_embeddings": 16},
        {"rope_theta": 10.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_theta": 10.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0, "original_max_position_embeddings": 32},
         "original_max_position_embeddings": 16},
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(family, options, tmp_path):
    kind, embedding = THEIRS[family]
    frequencies, config = ours(family, options)
    np.testing.assert_allclose(embedding(kind(**SIZES, **copy.deepcopy(options))).inv_freq, frequencies, rtol=1e-5)
    saved = models.config_to_hf(config)
    assert models.config_from_hf(saved).rope == config.rope
    again = {name: saved[name] for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    np.testing.assert_allclose(embedding(kind(**SIZES, **again)).inv_freq, frequencies, rtol=1e-5)


# Families of transformers: the names of its rotary embedding and its config, and what its config.json leaves out.
FAMILIES = {
    "qwen3": ("Qwen3RotaryEmbedding", "Qwen3Config", Rope()),
    "phi3": ("Phi3RotaryEmbedding", "Phi3Config", Rope(partial=1.0)),
    "glm4": ("Glm4RotaryEmbedding", "Glm4Config", Rope(partial=0.5, pairs=True)),
    "deepseek_v3": ("DeepseekV3RotaryEmbedding", "DeepseekV3Config", Rope(pairs=True)),
    "minimax_m2": ("MiniMaxM2RotaryEmbedding", "MiniMaxM2Config", Rope(5e6, partial=0.75)),
    "gpt_oss": (
        "GptOssRotaryEmbedding", "GptOssConfig",
        Rope(1.5e5, "yarn", factor=32.0, original_context=4096, truncate=False),
    ),
    "ministral3": (
        "Ministral3RotaryEmbedding", "Ministral3Config",
        Rope(1e6, "yarn", factor=16.0, original_context=16384, mscale=1.0, mscale_all_dim=1.0),
    ),
    "qwen3_5": (
        "Qwen3_5TextRotaryEmbedding", "Qwen3_5TextConfig", Rope(partial=0.25, sections=(1, 1, 2), interleaved=True),
    ),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", Rope(sections=(2, 3, 3))),
    "gemma3": ("Gemma3RotaryEmbedding", "Gemma3TextConfig",
               {"full_attention": Rope(1e6), "sliding_attention": Rope(1e4)}),
    "olmo3": ("Olmo3RotaryEmbedding", "Olmo3Config",
              {"full_attention": Rope(5e5), "sliding_attention": Rope(5e5)}),
    "gemma4": ("Gemma4TextRotaryEmbedding", "Gemma4TextConfig",
               {"full_attention": Rope(1e6, "proportional", partial=0.25), "sliding_attention": Rope(1e4)}),
}  # fmt: skip
LOCAL = {"gemma3": "rope_local_base_freq", "olmo3": "rope_theta"}
HEAD = 16
BASE = dict(
    vocab_size=10, hidden_size=64, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=HEAD,
    num_key_value_heads=4, max_position_embeddings=96, qk_rope_head_dim=HEAD, pad_token_id=0,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
POSITIONS = np.array([[0, 1, 2, 11, 40, 95]])
YARN = {"rope_type": "yarn", "factor": 6.0, "rope_theta": 300.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.5],
}  # fmt: skip
SHORT6 = {"short_factor": LONGROPE["short_factor"][:6], "long_factor": LONGROPE["long_factor"][:6]}


def modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def their_tables(family, hf, positions=POSITIONS):
    """{layer type, or None: (frequencies, cos, sin) by transformers}."""
    embedding, config, default = FAMILIES[family]
    embedding = getattr(modeling(family), embedding)(getattr(transformers, config)(**copy.deepcopy(hf)))
    tables = {}
    for kind in default if isinstance(default, dict) else (None,):
        given = (torch.zeros(1), torch.tensor(positions), *([kind] if kind else []))
        cos, sin = (table.numpy() for table in embedding(*given))
        freq = getattr(embedding, f"{kind}_inv_freq" if kind else "inv_freq").numpy()
        tables[kind] = freq, cos[..., : len(freq)], sin[..., : len(freq)]
    return tables


def read(family, hf):
    """{layer type, or None: Rope}."""
    default = FAMILIES[family][2]
    if isinstance(default, dict):
        return rope.by_layer_type(hf, default, LOCAL.get(family))
    others = ("llama_4_scaling_beta",) if family == "ministral3" else ()
    return {None: rope.from_hf(hf, default, others)}


def written(family, ropes, hf):
    if None in ropes:
        return rope.to_hf(ropes[None], hf)
    return rope.to_hf_by_layer_type(ropes, LOCAL.get(family), hf)


def check_tables(family, ropes, hf, positions=POSITIONS):
    """Of one sequence with these positions; transformers makes the tables of the longest one for all."""
    length = positions.max() + 1
    for kind, (freq, cos, sin) in their_tables(family, hf, positions).items():
        size = hf.get("global_head_dim", HEAD) if kind == "full_attention" else HEAD
        if (switch := ropes[kind].switch) is None or length <= switch or ropes[kind].kind == "longrope":
            np.testing.assert_allclose(rope.frequencies(ropes[kind], size, length > (switch or 0)), freq, rtol=2e-6)
        ours = rope.tables(jnp.asarray(positions), ropes[kind], size, jnp.full(positions.shape, length))
        np.testing.assert_allclose(ours[0], cos, atol=2e-5)
        np.testing.assert_allclose(ours[1], sin, atol=2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 300.0}}),
        ("qwen3", {"rope_theta": 300.0, "rope_scaling": {"type": "dynamic", "factor": 3.0}}),
        ("qwen3", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 300.0,
                                       "partial_rotary_factor": 0.4, "factor": 2.0}}),
        ("qwen3", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 300.0}}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3", {"rope_theta": 300.0, "rope_scaling": {"type": "yarn", "factor": 6.0,
                                                         "original_max_position_embeddings": 32}}),
        ("qwen3", {"rope_parameters": {**YARN, "factor": 0.5}}),
        ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8, "beta_slow": 2.5}}),
        ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 1.9, "beta_slow": 1.8, "truncate": False}}),
        ("qwen3", {"rope_parameters": {**YARN, "beta_fast": None, "attention_factor": 0.7, "mscale": 3.0,
                                       "mscale_all_dim": 2.0}}),
        ("qwen3", {"rope_parameters": {**YARN, "mscale": 0.7}}),
        ("qwen3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}}),
        ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 4}}),
        ("qwen3", {"rope_parameters": YARN, "original_max_position_embeddings": 64}),
        ("qwen3", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}}),
        ("qwen3", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 96, "factor": 4.0}}),
        ("qwen3", {"rope_parameters": {**LONGROPE, "attention_factor": 1.75, "factor": 2.0}}),
        ("phi3", {}),
        ("phi3", {"rope_theta": 300.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32,
                  "rope_scaling": {"type": "longrope", **SHORT6}}),
        ("phi3", {"rope_theta": 300.0, "original_max_position_embeddings": 96,
                  "rope_scaling": {**LONGROPE, "rope_type": "su", "original_max_position_embeddings": 96}}),
        ("glm4", {}),
        ("glm4", {"partial_rotary_factor": 1.0, "rope_theta": 300.0}),
        ("glm4", {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.4}}),
        ("glm4", {"rope_parameters": YARN}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}}),
        ("deepseek_v3", {"rope_theta": 300.0, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("minimax_m2", {"rotary_dim": 12}),
        ("gpt_oss", {"max_position_embeddings": 131072}),
        ("gpt_oss", {"rope_theta": 300.0, "max_position_embeddings": 131072}),
        ("gpt_oss", {"rope_theta": 300.0, "rope_scaling": {**YARN, "truncate": False}}),
        ("ministral3", {"max_position_embeddings": 262144}),
        ("ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
                                            "llama_4_scaling_beta": 0.1, "max_position_embeddings": 96}}),
        ("qwen3_5", {}),
        ("qwen3_5", {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.75,
                                         "mrope_section": [2, 3, 1], "mrope_interleaved": True}}),
        ("qwen2_5_vl", {"rope_theta": 300.0, "rope_scaling": {"type": "mrope", "mrope_section": [3, 4, 1]}}),
        ("gemma3", {}),
        ("gemma3", {"rope_theta": 300.0, "rope_local_base_freq": 20.0, "rope_scaling": {"rope_type": "linear",
                                                                                       "factor": 8.0}}),
        ("gemma3", {"rope_theta": 300.0}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 3.0}},
                    "rope_local_base_freq": 20.0, "original_max_position_embeddings": 16}),
        ("olmo3", {}),
        ("olmo3", {"rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}, "rope_theta": 5e5}),
        # In the old spelling alone, transformers 5 has 5e5 for sliding layers whatever rope_theta is.
        ("olmo3", {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 5e5}}}),
        ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 20.0}}}),
        ("gemma4", {"global_head_dim": 24}),
        ("gemma4", {"global_head_dim": 24, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20.0}}}),
        # The part that turns is not the family's where options are given.
        *[("gemma4", {"global_head_dim": 24, "rope_parameters": {
            "full_attention": {**kind, "rope_theta": 300.0}, "sliding_attention": {"rope_theta": 20.0}}})
          for kind in ({"rope_type": "proportional"}, {"rope_type": "default"}, {})],
    ],
)  # fmt: skip
def test_tables_are_those_of_transformers(family, options):
    hf = {**BASE, **options}
    ropes = read(family, hf)
    check_tables(family, ropes, hf)
    # What we write has the same values, for us and for transformers, as do both spellings alone.
    new = {**hf, **json.loads(json.dumps(written(family, ropes, hf)))}
    assert read(family, new) == ropes
    check_tables(family, ropes, new)
    for drop in ("rope_scaling", "rope_parameters"):
        if drop == "rope_parameters" and None not in ropes and not new.get("rope_scaling"):
            continue  # there is no old spelling
        alone = {name: value for name, value in new.items() if name != drop}
        assert read(family, alone) == ropes
        check_tables(family, ropes, alone)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}},
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16, "factor": 2.0}},
        {"rope_theta": 300.0, "rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16},
    ],
)  # fmt: skip
def test_the_length_of_a_sequence_decides_for_all_of_its_tokens(options):
    """As in transformers, each length alone; in one batch each sequence has its own."""
    hf = {**BASE, **options}
    turns = read("qwen3", hf)[None]
    assert turns.switch == 16
    lengths = 12, 16, 17, 40
    for n in lengths:
        check_tables("qwen3", {None: turns}, hf, np.arange(n)[None])
    alone = [rope.tables(jnp.arange(12)[None], turns, HEAD, jnp.full((1, 12), n)) for n in lengths]
    position_BT, length_BT = jnp.tile(jnp.arange(12), (4, 1)), jnp.tile(jnp.array(lengths)[:, None], 12)
    for got, wanted in zip(rope.tables(position_BT, turns, HEAD, length_BT), zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(got, jnp.concatenate(wanted))
    with pytest.raises(ValueError, match=f"{turns.kind} needs the length of each token's sequence, got none"):
        rope.tables(position_BT, turns, HEAD)


def test_options_that_change_nothing_and_those_of_families_are_kept():
    others = {"finetuned": True, "attn_factor": 1, "apply_yarn_scaling": True, "llama_4_scaling_beta": 0.1}
    hf = {"rope_parameters": {**YARN, **others}, "max_position_embeddings": 96}
    new = rope.to_hf(rope.from_hf(hf, others=("llama_4_scaling_beta",)), hf)
    for spelling in ("rope_parameters", "rope_scaling"):
        assert others.items() <= new[spelling].items()


@pytest.mark.parametrize(
    "options, words",
    [
        ({**YARN, "attn_factor": 0.9}, "yarn does not use, got attn_factor 0.9; state attention_factor, the whole"),
        ({**YARN, "extrapolation_factor": 0.5}, "does not use, got extrapolation_factor 0.5; remove it"),
        ({**YARN, "apply_yarn_scaling": False}, "got apply_yarn_scaling False; remove it"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "got llama_4_scaling_beta 0.1"),
        ({**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2}, "longrope does not use, got short_mscale 1.1"),
        ({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "dynamic does not use, got alpha 1000.0"),
        ({"type": "linear", "rope_type": "default", "factor": 4.0}, "default does not use, got factor 4.0"),
        ({"rope_type": "linear", "factor": 4.0, "beta_fast": 8}, "linear does not use, got beta_fast 8"),
        ({**LLAMA3, "attention_factor": 0.5}, "llama3 does not use, got attention_factor 0.5"),
    ],
)
def test_options_that_a_kind_does_not_use_are_refused(options, words):
    for spelling in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=f"config.json: {spelling} must have no option that rope_type .*{words}"):
            rope.from_hf({spelling: options, "max_position_embeddings": 96})


def test_the_old_spelling_by_layer_type_is_written_where_it_can_say_it():
    by_kind = lambda sliding: {"full_attention": Rope(300.0, "linear", factor=8.0), "sliding_attention": sliding}
    gemma = rope.to_hf_by_layer_type(by_kind(Rope(20.0)), "rope_local_base_freq")
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"]) == (300.0, 20.0)
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert rope.to_hf_by_layer_type(by_kind(Rope(300.0)), "rope_theta")["rope_scaling"]["factor"] == 8.0
    for local, sliding in ((None, Rope(20.0)), ("rope_theta", Rope(20.0)), ("rope_theta", Rope(300.0, "linear"))):
        new = rope.to_hf_by_layer_type(by_kind(sliding), local)
        assert new == {"rope_parameters": new["rope_parameters"]} | ({"rope_scaling": None} if local else {})


def test_one_set_of_options_is_that_of_every_layer_type():
    hf = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0}
    kinds = {"full_attention": Rope(partial=0.5), "chunked_attention": Rope(pairs=True)}
    assert rope.by_layer_type(hf, kinds) == {
        "full_attention": Rope(300.0, "linear", factor=2.0, partial=0.5),
        "chunked_attention": Rope(300.0, "linear", factor=2.0, pairs=True),
    }


def test_the_factor_of_deepseeks_softmax_scale():
    for factor, k in ((40.0, 1.0), (6.0, 0.707), (6.0, 0.0), (0.5, 1.0)):
        assert rope.yarn_scale(factor, k) == modeling("deepseek_v3").yarn_get_mscale(factor, k)


def rotated(family, x, cos, sin):
    """x [B, T, N, H] rotated by the family's function in transformers, with our tables."""
    x, cos, sin = (torch.tensor(np.asarray(a)) for a in (x, cos, sin))
    if family == "llama4":
        return modeling(family).apply_rotary_emb(x, x, torch.complex(cos, sin))[0].numpy()
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if family == "gemma4":
        return modeling(family).apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2).numpy()
    if family == "deepseek_v3":  # leaves even entries first, then odd ones
        halves = modeling(family).apply_rotary_pos_emb_interleave(x, x, cos, sin, unsqueeze_dim=2)[0]
        return halves.unflatten(-1, (2, -1)).mT.flatten(-2).numpy()
    return modeling(family).apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0].numpy()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, ours",
    [
        ("qwen3", Rope(30.0)),
        ("phi3", Rope(30.0, partial=0.75)),
        ("phi3", Rope(30.0, "yarn", factor=4.0, original_context=32, partial=0.4)),
        ("glm4", Rope(30.0, partial=0.5, pairs=True)),
        ("glm4", Rope(30.0, partial=1.0, pairs=True)),
        ("deepseek_v3", Rope(30.0, pairs=True)),
        ("llama4", Rope(30.0, pairs=True)),
        ("gemma4", Rope(30.0, "proportional", partial=0.25)),
    ],
)
def test_rotation_is_that_of_transformers(family, ours):
    x = np.random.default_rng(0).normal(size=(2, 6, 3, HEAD)).astype(np.float32)
    cos, sin = rope.tables(jnp.asarray(np.concatenate([POSITIONS, POSITIONS + 5])), ours, HEAD)
    got = rope.rotate(jnp.asarray(x), cos, sin, ours.pairs)
    np.testing.assert_allclose(got, rotated(family, x, cos, sin), atol=1e-6)
    assert rope.rotate(jnp.asarray(x, jnp.bfloat16), cos, sin, ours.pairs).dtype == jnp.bfloat16


@pytest.mark.parametrize("family, size", [("qwen3_5", 64), ("qwen2_5_vl", 16)])
def test_positions_with_axes_are_those_of_transformers(family, size):
    sections = (3, 4, 1)
    hf = {**BASE, "head_dim": size, "hidden_size": 4 * size, "rope_parameters": {
        "rope_type": "default", "rope_theta": 30.0, "mrope_section": list(sections)}}  # fmt: skip
    positions = np.random.default_rng(0).integers(0, 40, (3, 2, 6))
    [(freq, cos, sin)] = their_tables(family, hf, positions).values()
    ours = rope.from_hf(hf, FAMILIES[family][2])
    assert ours.sections == sections
    for got, want in zip(rope.axis_tables(jnp.asarray(positions), ours, size), (cos, sin), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    # Text has the same position on each axis.
    text = jnp.asarray(positions[0])
    for one, same in zip(
        rope.axis_tables(jnp.stack([text] * 3), ours, size), rope.tables(text, ours, size), strict=True
    ):
        np.testing.assert_array_equal(one, same)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10.0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "factor of rope_type linear must be a number above 0, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor.* must be .*, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor.* must be .*, got '2'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of rope_type llama3 .* None"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, "must be at least low_freq_factor 1, got 0.5"),
        ({"rope_theta": None}, "rope_theta.* must be .*, got None"),
        ({"rope_theta": "500"}, "rope_theta.* must be .*, got '500'"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters must be one set of options for all layers"),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}}, "for all layers, got .*sliding"),
        ({"rope_scaling": {"full_attention": LINEAR}}, "rope_scaling must be one set of options for all layers"),
        ({"rope_scaling": "linear"}, "rope_scaling must be .*, got 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 777.0}},
         "rope_scaling and rope_parameters must agree, .*remove the wrong one"),
        ({"rope_parameters": {"rope_type": None}}, "rope_type must be .*, got None"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "rope_type must be .* got 'mrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
         "partial_rotary_factor must be a number above 0 and at most 1, got 1.5"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor of rope_type dynamic must be .* above 0, got None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor of rope_type yarn must be a number above 0, got None"),
        ({"rope_parameters": {**YARN, "beta_slow": 40}}, "beta_fast must be at least beta_slow 40, got 32"),
        ({"rope_parameters": {**YARN, "mscale": "1"}}, "mscale of rope_type yarn must be a number above 0, got '1'"),
        ({"rope_parameters": {**YARN, "attention_factor": 0}}, "attention_factor of rope_type yarn must be .* got 0"),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_theta of rope_type yarn must be .* above 1, got 1"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 1}}, "original_max.* above 1, got 1"),
        ({"rope_parameters": {**LONGROPE, "long_factor": [10**400]}}, "long_factor .* list of numbers above 0, got"),
        ({"rope_parameters": {**LONGROPE, "long_factor": None}}, "long_factor .* list of numbers above 0, got None"),
        ({"rope_parameters": {**LONGROPE, "short_factor": [0.0]}}, "short_factor .* numbers above 0, got .0.0."),
        ({"rope_parameters": LONGROPE}, "short_factor must be 4 numbers, half of the 8 entries .*, got 8"),
        ({"rope_parameters": LONGROPE, "max_position_embeddings": None}, "max_position_embeddings"),
    ],
)  # fmt: skip
def test_other_options_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as raised:
        ours("llama", options)
    assert "\n" not in str(raised.value)


def test_options_by_layer_type_are_refused_in_one_line():
    kinds = {"full_attention": Rope(1e6), "sliding_attention": Rope(1e4)}
    for options, local, words in (
        (
            {"full_attention": {}, "slide": {"rope_theta": 2.0}},
            None,
            "for full_attention and sliding_attention alone, got .'sl",
        ),
        ({"rope_theta": 2.0}, "rope_theta", "rope_parameters must have options for each of full_attention, sliding_at"),
        ({"full_attention": LINEAR, "factor": 2.0}, None, "alone, got .'factor'"),
        ({"full_attention": {**YARN, "truncate": False}}, None, "truncate must be true in rope_parameters by layer"),
        ({"sliding_attention": {"rope_type": "ntk"}}, None, "rope_type must be .*, got 'ntk'"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            rope.by_layer_type({"rope_parameters": options, "max_position_embeddings": 96}, kinds, local)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters must agree"):
        both = {"rope_parameters": {"full_attention": LINEAR}, "rope_scaling": {"type": "linear", "factor": 3.0}}
        rope.by_layer_type(both, kinds, "rope_local_base_freq")
    for sections in ([1, 2], [1.0, 2, 5], [0, 4, 4], 8):
        with pytest.raises(ValueError, match="mrope_section must be three whole numbers above 0, got"):
            rope.from_hf({"rope_parameters": {"mrope_section": sections}}, Rope(sections=(2, 3, 3)))
    with pytest.raises(ValueError, match="rope_type of a model that reads images must not be dynamic: not implemented"):
        options = {"rope_type": "dynamic", "factor": 2.0}
        rope.from_hf({"rope_parameters": options, "max_position_embeddings": 96}, Rope(sections=(2, 3, 3)))
    with pytest.raises(ValueError, match=r"mrope_section must add up to 8, got \[1, 2, 4\]"):
        rope.axis_tables(jnp.zeros((3, 1, 2), jnp.int32), Rope(sections=(1, 2, 4)), 16)
