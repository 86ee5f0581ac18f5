"""Published versions of a tiny model, and each kind of server with it.

areax's own server always; SGLang and vLLM where AREAX_SGLANG_PYTHON and AREAX_VLLM_PYTHON name the Python of an
environment with them.
"""

import os
import types

import jax
import numpy as np
import pytest
import servers

from areax import models
from areax.adapters import hf, tokenizer
from areax.core import param
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe

PROMPT = [5, 17, 42, 100, 61, 7, 9]
HF = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 4096, "initializer_range": 0.2,
}  # fmt: skip
OPTIONS = {
    "sglang": ["--context-length", "4096", "--max-running-requests", "16"],
    "vllm": ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "16"],
}
PYTHONS = {kind: os.environ.get(f"AREAX_{kind.upper()}_PYTHON") for kind in OPTIONS}


@pytest.fixture(scope="session")
def versions(tmp_path_factory):
    """Two policy versions as directories, their labels, and reference log-probabilities of our own forward pass.

    `logp(v, tokens, temperature)` is [T, V]: row t holds those of the token at index t + 1.
    """
    root, tokens = tmp_path_factory.mktemp("published"), tokenizer.byte_level()
    config = models.config_from_hf({**HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id})
    params = [param.init(jax.random.key(v), models.table(config)) for v in range(2)]
    paths = [hf.write_published(root, v, config, p, tokenizer=tokens) for v, p in enumerate(params)]

    def logp(v, ids, temperature=1.0):
        logits_BTV = models.forward(params[v], np.array([ids], np.int32), config=config)
        return np.asarray(jax.nn.log_softmax(logits_BTV[0] / temperature, axis=-1))

    def probe(v):
        logp_TV = logp(v, PROMPT)
        return Probe(tuple(PROMPT), tuple(float(logp_TV[t, id]) for t, id in enumerate(PROMPT[1:])), 1e-4)

    labels = [read_label(path / "manifest.json") for path in paths]
    return types.SimpleNamespace(prompt=PROMPT, paths=paths, labels=labels, logp=logp, probe=probe)


@pytest.fixture(scope="session", params=["areax", *(kind for kind, python in PYTHONS.items() if python)])
def server(request, versions, tmp_path_factory):
    """A server of each kind in turn, which can be killed and started again at its address."""
    kind, log = request.param, tmp_path_factory.mktemp("log") / "server.log"
    with servers.restartable(kind, versions.paths[0], PYTHONS.get(kind), log, *OPTIONS.get(kind, ())) as remote:
        yield remote
