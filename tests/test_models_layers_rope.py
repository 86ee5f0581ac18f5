"""Options of rotary embeddings in a config.json: the frequencies that transformers computes, or one line."""

import copy

import numpy as np
import pytest
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from areax import models
from areax.models.layers import rope

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
        {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 4.0, "rope_theta": 10.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0, "original_max_position_embeddings": 16}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 10.0}, "original_max_position_embeddings": 16},
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


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10.0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "factor of rope_type linear must be a number above 0, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor.* must be .*, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor.* must be .*, got '2'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of rope_type llama3 .* None"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above low_freq_factor 1, got 1"),
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
    ],
)  # fmt: skip
def test_other_options_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as raised:
        ours("llama", options)
    assert "\n" not in str(raised.value)
