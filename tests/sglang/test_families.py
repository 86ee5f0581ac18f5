"""Every family as exported here, served by SGLang: its log-probabilities are those of our forward pass.

Its CPU build does not serve some of them, which REFUSED says with SGLang's error.
"""

import asyncio
import itertools
import os

import jax
import numpy as np
import pytest
import servers
import tiny
import tiny_families
import transformers

from areax import models
from areax.adapters import hf, safetensors, tokenizer, torch
from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe
from areax.rollout.weights import tensors

PYTHON = os.environ.get("AREAX_SGLANG_PYTHON")
pytestmark = pytest.mark.wide  # conftest.py leaves the file out where there is no SGLang
PROMPT = [int(id) for id in np.random.default_rng(1).integers(3, 250, 40)]
YARN = dict(
    rope_theta=1e4,
    rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=1.0,
    ),
)  # fmt: skip
# As published models are, where SGLang knows nothing else: heads of hidden_size / num_attention_heads, no window in
# Mistral and Phi 3, no biases, experts in every layer, YaRN in DeepSeek.
PUBLISHED: dict[str, dict] = {
    "deepseek_v2": YARN | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": YARN | dict(attention_bias=False),
    "gemma2": dict(attn_logit_softcapping=1e4),  # none in effect: SGLang's backend for CPUs ignores it
    "granite": dict(attention_bias=False),
    "kimi_k2": YARN | dict(attention_bias=False),
    "llama": dict(attention_bias=False, mlp_bias=False),
    "llama4_text": dict(use_qk_norm=False),
    "ministral3": dict(
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=100.0,
            factor=4.0,
            original_max_position_embeddings=64,
            llama_4_scaling_beta=0.3,
        )
    ),  # SGLang scales queries by max_position_embeddings in its place, which is later
    "mistral": dict(sliding_window=None),
    "mixtral": dict(sliding_window=None, hidden_size=64),
    "olmo2": dict(attention_bias=False, hidden_size=64),
    "olmo3": dict(hidden_size=64),
    "phi3": dict(sliding_window=None),
    "qwen2": dict(hidden_size=64),
    "qwen2_moe": dict(hidden_size=64),
    "qwen3_moe": dict(mlp_only_layers=[]),
    "qwen3_next": dict(layer_types=None, full_attention_interval=2, mlp_only_layers=[]),
}
# SGLang 0.5.23, started on a CPU or asked for a token.
REFUSED = {
    "gemma4_text": "'head_dim' is a per-layer attribute",  # of transformers 5.19; on GPUs, too
    "gpt_oss": "GptOssForCausalLM requires one of",  # attention backends, none of which runs on a CPU
    "llama4_text": "NotImplementedError",  # experts whose input is weighted
    "minimax_m2": "assert x1.is_cuda",  # its norm of queries and keys
    "nemotron_h": "No module named 'sgl_kernel.mamba'",
    "qwen2_moe": "0 active drivers",  # of Triton, for the gate of the shared expert
    "qwen3_5_moe_text": "has no SGlang implementation",
    "qwen3_5_text": "has no SGlang implementation",
    "qwen3_next": "No module named 'sgl_kernel.mamba'",
}
TOWER = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, patch_size=14)
# Others need an image processor or a model that the CPU build cannot import: qwen3_vl, qwen3_5, qwen3_5_moe, llava,
# internvl; gemma4 and llama4 fail as their text models.
WRAPPERS: dict[str, dict] = {
    "gemma3": dict(
        vision_config=TOWER | dict(model_type="siglip_vision_model", image_size=28, vision_use_head=False),
        image_token_index=57, mm_tokens_per_image=4,
    ),
    "mistral3": dict(
        vision_config=TOWER | dict(model_type="pixtral", image_size=28, head_dim=8), image_token_index=57,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
IMAGES = {"mistral3": '{"image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"}'}


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """serve(checkpoint) -> a server of it, whose log is in `serve.log`."""
    with servers.sglangs(PYTHON) as start:
        logs = (tmp_path_factory.mktemp("logs") / f"{i}.log" for i in itertools.count())

        def serve(path):
            serve.log = next(logs)
            return start(
                path, serve.log, "--context-length", "4096", "--mamba-radix-cache-strategy", "no_buffer",
                "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
            )  # fmt: skip

        yield serve


def config_of(name):
    tokens = tokenizer.byte_level()
    sizes = dict(vocab_size=len(tokens), pad_token_id=0, eos_token_id=tokens.eos_token_id)
    return models.config_from_hf(tiny_families.hf(name) | PUBLISHED.get(name, {}) | sizes)


def weights(config, version=0):
    return tiny.weights(models.table(config), 0.1, version)


def wrapper(name, path):
    """A wrapper with weights that all matter, with the names of published vision towers."""
    family = dict(gemma3="gemma3_text", mistral3="mistral")[name]
    text = tiny_families.hf(family, **PUBLISHED.get(family, {}), vocab_size=len(tokenizer.byte_level()), pad_token_id=0)
    made = transformers.AutoConfig.for_model(name, text_config=text, **WRAPPERS[name])
    transformers.AutoModelForImageTextToText.from_config(made).save_pretrained(path)
    held = {key: np.array(x) for key, x in safetensors.read(path).items()}
    if name == "gemma3":
        held = {key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in held.items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    safetensors.write(path, held, held.values())
    if name in IMAGES:
        (path / "preprocessor_config.json").write_text(IMAGES[name])
    tokenizer.save(tokenizer.byte_level(), path)
    config, _ = hf.load(path)
    return config


def logp_of(config, params, ids):
    """The log-probability of each token after the first."""
    logits_BTV = jax.jit(models.forward, static_argnames="config")(params, np.array([ids]), config=config)
    assert float(logits_BTV.std()) > 0.5
    return np.asarray(jax.nn.log_softmax(logits_BTV[0, :-1]))[np.arange(len(ids) - 1), ids[1:]]


def assert_same(server, config, params):
    """The prompt's log-probabilities and those of tokens decoded after it."""
    answer = server.generate(PROMPT, fields={"logprob_start_len": 0})
    info = answer["meta_info"]
    got = [x[0] for x in [*info["input_token_logprobs"][1:], *info["output_token_logprobs"]]]
    np.testing.assert_allclose(got, logp_of(config, params, [*PROMPT, *answer["output_ids"]]), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in models.FAMILIES if name not in REFUSED])
def test_sglang_computes_what_we_do(name, serve, tmp_path):
    config = config_of(name)
    params = weights(config)
    with serve(hf.save(tmp_path / "model", config, params, tokenizer=tokenizer.byte_level())) as server:
        assert_same(server, config, params)


def test_mistral3_takes_no_push(serve, tmp_path):
    """SGLang computes what we do, and loads new weights, but then fails in forgetting images, on GPUs, too; so do all
    wrappers that it gives LLaVA's processor."""
    config = wrapper("mistral3", tmp_path / "base")
    params = weights(config)
    path = hf.save(tmp_path / "model", config, params, base=tmp_path / "base")
    with serve(path) as server:
        assert_same(server, config, params)
        assert server.post("/update_weights_from_disk", {"model_path": str(path)})[0] == 500
    assert "'LlavaMultimodalProcessor' object has no attribute 'mm_preprocess_cache'" in serve.log.read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_sglang_on_a_cpu_does_not_serve(name, serve, tmp_path):
    config = config_of(name)
    path = hf.save(tmp_path / "model", config, weights(config), tokenizer=tokenizer.byte_level())
    with pytest.raises((AssertionError, OSError)), serve(path) as server:
        server.generate(PROMPT)
    assert REFUSED[name] in serve.log.read_text()


@pytest.mark.parametrize("way", ["disk", "tensors"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gemma3"])
def test_a_push_replaces_the_weights(name, way, serve, tmp_path):
    """Of mixtures, of latent attention whose weights SGLang multiplies as it loads them, and of text models alone."""
    base = tmp_path / "base" if name in WRAPPERS else None
    config = wrapper(name, base) if base else config_of(name)
    params = [weights(config, version) for version in range(2)]
    tokens = None if base else tokenizer.byte_level()
    paths = [hf.write_published(tmp_path, v, config, p, base=base, tokenizer=tokens) for v, p in enumerate(params)]
    probe = Probe(tuple(PROMPT), tuple(map(float, logp_of(config, params[1], PROMPT))), 1e-4)
    handover = tensors.handover(lambda arrays: torch.messages(config, arrays)) if way == "tensors" else None

    async def push(server):
        async with client.connect([server.url], handover=handover) as fleet:
            await push_weights(fleet, paths[0], read_label(paths[0] / "manifest.json"))
            label = read_label(paths[1] / "manifest.json")
            await push_weights(fleet, paths[1], label, arrays=params[1] if handover else None, probe=probe)

    with serve(paths[0]) as server:
        assert_same(server, config, params[0])
        asyncio.run(push(server))
        assert_same(server, config, params[1])
