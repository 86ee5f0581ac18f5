"""The contract of generation servers, by the client, on the real vLLM server."""

import asyncio
import json
import os
import types

import jax
import numpy as np
import pytest
import servers

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.command_line.options import replaced
from areax.core import param
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe
from areax.rollout.servers.vllm import VLLM
from areax.rollout.types import Sampling

PROMPT = [5, 17, 42, 100, 61, 7, 9]
HF = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 1024, "initializer_range": 0.2,
}  # fmt: skip


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
    return types.SimpleNamespace(
        config=config, params=params, paths=paths, labels=labels, logp=logp, probe=probe, tokenizer=tokens
    )


@pytest.fixture(scope="session")
def server(versions, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    options = "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "16"
    with servers.vllm(versions.paths[0], os.environ["AREAX_VLLM_PYTHON"], log, *options) as remote:
        yield remote


def run(server, work):
    async def main():
        async with client.connect([server.url], vocabulary=288) as fleet:
            return await work(fleet)

    return asyncio.run(main())


def pushed(fleet, versions, v):
    return push_weights(fleet, versions.paths[v], versions.labels[v], probe=versions.probe(v))


def test_it_is_found_and_described(server):
    async def work(fleet):
        [own] = fleet.servers
        assert isinstance(own.api, VLLM) and (own.slots, own.context, own.ranks) == (16, 1024, 1) and not own.seeded

    run(server, work)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probabilities_are_those_of_the_scaled_distribution(server, versions, temperature):
    async def work(fleet):
        report = await pushed(fleet, versions, 0)
        return report, await fleet.generate(PROMPT, max_new_tokens=24, temperature=temperature, ignore_eos=True)

    report, done = run(server, work)
    logp_TV = versions.logp(0, PROMPT + done.tokens, temperature)
    theirs = [logp_TV[len(PROMPT) - 1 + i, token] for i, token in enumerate(done.tokens)]
    np.testing.assert_allclose(done.logp, theirs, atol=2e-5)
    assert done.version == [0] * 24 and done.finish == "length" and report.probe_diff < 1e-5


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_completion_goes_on_over_a_push_with_the_version_of_each_token(server, versions, mode, streamed):
    async def work(fleet):
        await pushed(fleet, versions, 0)
        seen = []
        how = {"on_tokens": seen.append} if streamed else {}
        going = asyncio.create_task(fleet.generate(PROMPT, max_new_tokens=700, ignore_eos=True, **how))
        await asyncio.sleep(0.7)
        await push_weights(fleet, versions.paths[1], versions.labels[1], mode=mode, probe=versions.probe(1))
        done = await going
        assert not streamed or seen[-1] == done.tokens
        return done

    done = run(server, work)
    assert len(done.tokens) == 700 and done.version == sorted(done.version) and {*done.version} == {0, 1}
    assert done.info["resumed"] == (mode == "retract")
    start = done.version.index(1)
    for v, part in ((0, range(start)), (1, range(start, 700))) if mode == "retract" else ((0, range(start)),):
        logp_TV = versions.logp(v, PROMPT + done.tokens)
        theirs = [logp_TV[len(PROMPT) - 1 + i, done.tokens[i]] for i in part]
        np.testing.assert_allclose([done.logp[i] for i in part], theirs, atol=2e-4)


def test_a_prompt_is_read_with_its_likeliest_tokens(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 1)
        return await fleet.read(PROMPT, top_k=3)

    _, part = run(server, work)
    logp_TV = versions.logp(1, PROMPT)
    assert part.inputs[0][0] is None and [row[1] for row in part.inputs] == PROMPT
    np.testing.assert_allclose(
        [row[0] for row in part.inputs[1:]], [logp_TV[t, id] for t, id in enumerate(PROMPT[1:])], atol=2e-5
    )
    for t, row in enumerate(part.input_top[1:]):
        assert [one[1] for one in row] == np.argsort(-logp_TV[t])[:3].tolist()


def test_stops_and_grammars(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 0)
        first = await fleet.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        stop = first.tokens[3]
        ended = await fleet.generate(PROMPT, max_new_tokens=8, temperature=0.0, stop_token_ids=[stop], ignore_eos=False)
        said = await fleet.generate(PROMPT, max_new_tokens=8, regex="ab{2}c")
        with pytest.raises(ValueError, match="longer|at most|maximum"):
            await fleet.generate(PROMPT * 200, max_new_tokens=8)
        return first, ended, said

    first, ended, said = run(server, work)
    end = first.tokens.index(ended.tokens[-1]) + 1
    assert ended.tokens == first.tokens[:end] and ended.finish == "stop" and said.text == "abbc"


def test_weights_that_are_not_those_of_the_label_are_found(server, versions):
    async def work(fleet):
        await pushed(fleet, versions, 0)
        with pytest.raises(ServerError, match="log-probabilities of the probe must be within"):
            await push_weights(fleet, versions.paths[1], versions.labels[1], probe=versions.probe(0))

    run(server, work)


def test_a_policy_learns_from_it(server, versions, tmp_path):
    """GRPO at eta 0: more of the letters a to m are right."""
    model = tmp_path / "model"
    model.mkdir()
    for file in versions.paths[0].iterdir():
        if file.name != "manifest.json":
            (model / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefgh" * 4))
    (tmp_path / "own.py").write_text(
        "def score(text, row):\n    return sum('a' <= c <= 'm' for c in text) / max(1, len(text))\n"
    )
    config = grpo.Config(str(model), str(tmp_path / "rows.jsonl"), f"{tmp_path}/own.py:score")
    config = replaced(
        config, out=str(tmp_path / "out"), steps=16, groups=4, group_size=8, max_concurrent=16, length=64, rows=4,
        eta=0, servers=(server.url,), sampling=Sampling(max_new_tokens=12, temperature=0.8),
        objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=2e-2, b2=0.99),
    )  # fmt: skip
    summary = grpo.main(config)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rewards = [x["reward"] for x in lines if x.get("kind") == "grpo"]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert summary["max_logp_diff"] < 1e-4 and summary["complete"]
