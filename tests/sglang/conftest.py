"""Published versions of a tiny model, and the servers that the contract tests run against.

Only the embedded server is tested unless AREAX_SGLANG_PYTHON names the Python of an environment with SGLang.
"""

import dataclasses
import functools
import os
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servers
import tiny

from areax import models
from areax.adapters import hf, tokenizer, torch
from areax.adapters import peft as peft_files
from areax.core import param
from areax.models import lora
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe
from areax.rollout.weights import tensors

PYTHON = os.environ.get("AREAX_SGLANG_PYTHON")
collect_ignore = [] if PYTHON else ["test_families.py", "test_images.py", "test_parsers.py", "test_real.py"]
PROMPT = [5, 17, 42, 100, 61]
RANK = 4
ADAPTERS = (
    "--enable-lora", "--max-lora-rank", str(RANK), "--lora-backend", "torch_native",
    "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
CONTEXT = 4096  # long enough that a request is still running when a test gets to it
HF = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="session")
def versions(tmp_path_factory):
    """Policy versions as directories, their labels, and reference outputs of our own forward pass.

    Versions 0 and 1 have nothing in common; 2 is version 0 with 3 % of its weights changed.

    `logp(v, tokens, temperature)` is [T, V]: row t holds the log-probabilities of the token at index t + 1;
    `logits(v, tokens)` are those of temperature 1; `greedy(v, tokens, n)` is the greedy continuation of n tokens;
    `ending` is a prompt whose continuation soon stops.
    `probe(v)` is the probe that a push compares; `handover` sends SGLang `params[v]`, two or three tensors a message.
    """
    root = tmp_path_factory.mktemp("published")
    tokens = tokenizer.byte_level()
    config = models.config_from_hf({**HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id})
    forward = jax.jit(lambda p, token_BT: models.forward(p, token_BT, config=config))

    def perturb(key):  # norm weights of exactly 1 would hide an error in the norms
        weights = param.init(key, models.table(config))
        noise = iter(jax.random.split(key, 100))
        return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), weights)

    def near(weights):
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda x: jnp.where(rng.random(x.shape) < 0.03, 1.5 * x, x), weights)

    params = [perturb(jax.random.key(v)) for v in range(2)]
    params.append(near(params[0]))

    def logits(v, ids):
        length = next(n for n in (128, 1024, 2048, CONTEXT) if n >= len(ids))  # so many compilations
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        return forward(params[v], padded)[0, : len(ids)]

    def logp(v, ids, temperature=1.0):
        logits_TV = logits(v, ids)
        return np.asarray(jax.nn.log_softmax(logits_TV / (temperature or 1.0), axis=-1))

    def greedy(v, ids, n):
        ids = list(ids)
        for _ in range(n):
            ids.append(int(logp(v, ids)[len(ids) - 1].argmax()))
        return ids[len(ids) - n :]

    assert float(jnp.std(forward(params[0], np.arange(64)[None]))) >= 1
    ending = [250, 3, 9]
    stop = next(id for id in greedy(0, ending, 12)[3:] if id not in greedy(0, PROMPT, 12))
    config = dataclasses.replace(config, eos=(*config.eos, stop))
    paths = [hf.write_published(root, v, config, p, tokenizer=tokens) for v, p in enumerate(params)]
    labels = [read_label(path / "manifest.json") for path in paths]
    handover = tensors.handover(lambda arrays: torch.messages(config, arrays, size=50_000))

    def probe(v):
        logp_TV = logp(v, PROMPT)
        return Probe(tuple(PROMPT), tuple(float(logp_TV[t, id]) for t, id in enumerate(PROMPT[1:])), 1e-4)

    return types.SimpleNamespace(
        config=config, tokenizer=tokens, paths=paths, labels=labels, logits=logits, logp=logp, greedy=greedy,
        ending=ending,
        params=params, probe=probe, handover=handover,
    )  # fmt: skip


@pytest.fixture(scope="session")
def adapters(versions, tmp_path_factory):
    """Versions 1 to 4 as published adapters over version 0, their labels, and reference outputs of PEFT.

    `logp(v, tokens)` is as in `versions`; version 0 is the base.
    """
    import peft  # slow to import, and needed by these tests only
    import torch
    import transformers

    root = tmp_path_factory.mktemp("adapters")
    spec = lora.Lora(rank=RANK, alpha=5, rslora=True)
    table = lora.table(models.table(versions.config), spec)
    paths = {
        v: peft_files.write_published(
            root, v, versions.config, tiny.weights(table, 0.2, v), spec, versions.paths[0], versions.labels[0]
        )
        for v in range(1, 5)
    }

    @functools.cache
    def model(v):
        base = transformers.AutoModelForCausalLM.from_pretrained(versions.paths[0]).eval()
        return peft.PeftModel.from_pretrained(base, paths[v]) if v else base

    def logp(v, ids):
        with torch.no_grad():
            return model(v)(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1).numpy()

    labels = {v: read_label(path / "manifest.json") for v, path in paths.items()}
    return types.SimpleNamespace(paths=paths, labels=labels, logp=logp)


@pytest.fixture(scope="session")
def embedded(versions):
    with servers.embedded(versions.paths[0], context=CONTEXT, slots=8) as remote:
        yield remote


@pytest.fixture(scope="session")
def sglang(versions, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    with servers.sglang(versions.paths[0], PYTHON, log, "--context-length", str(CONTEXT), *ADAPTERS) as remote:
        yield remote


@pytest.fixture(params=["embedded", "sglang"] if PYTHON else ["embedded"])
def server(request, versions):
    """Each server in turn, with version 0 loaded, whatever state the previous test left it in."""
    return renewed(request.getfixturevalue(request.param), versions)


@pytest.fixture
def real(sglang, versions):
    """The real SGLang server only."""
    return renewed(sglang, versions)


def renewed(server, versions):
    server.ok("/continue_generation", {})
    for card in server.ok("/v1/models")["data"]:
        if card["parent"]:
            server.ok("/unload_lora_adapter", {"lora_name": card["id"]})
    body = {"model_path": str(versions.paths[0]), "weight_version": versions.labels[0]}
    server.ok("/abort_request", {"rid": "", "abort_all": True})
    deadline = time.monotonic() + 30
    while server.post("/update_weights_from_disk", body)[0] != 200:  # until the aborted requests have ended
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return server
