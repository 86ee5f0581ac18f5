"""LoRA adapters selected by name: the same tests on the embedded server and on the real SGLang.

Every log-probability is compared with PEFT on transformers, for the adapter that the server reports for the token.
"""

import asyncio
import contextlib
import json
import os

import numpy as np
import pytest
import servers

from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.weights import lora

pytestmark = [pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")]  # PEFT on transformers 5
if not os.environ.get("AREAX_SGLANG_PYTHON"):
    pytestmark.append(pytest.mark.slow)  # on the embedded server only
PROMPT = [5, 17, 42, 100, 61, 7, 8, 9]


def exact(adapters, v, prompt, tokens, logp):
    logp_TV = adapters.logp(v, [*prompt, *tokens])[len(prompt) - 1 :]
    np.testing.assert_allclose(logp, [logp_TV[i, id] for i, id in enumerate(tokens)], atol=1e-4)


def load(server, adapters, v):
    body = {"lora_name": adapters.labels[v], "lora_path": str(adapters.paths[v])}
    return server.ok("/load_lora_adapter", body)


def listed(server):
    return {card["id"]: card["root"] for card in server.ok("/v1/models")["data"] if card["parent"]}


def test_cached_prefixes_are_not_shared_between_adapters(server, versions, adapters):
    """The prefix cache is keyed by adapter; the reported weight version is that of the base."""
    assert load(server, adapters, 1)["success"] and load(server, adapters, 2)["success"]
    assert listed(server) == {adapters.labels[v]: str(adapters.paths[v]) for v in (1, 2)}
    cached = []
    for v in (0, 1, 2, 0, 1, 2):
        answer = server.generate(PROMPT, fields={"lora_path": adapters.labels[v]} if v else {})
        meta = answer["meta_info"]
        exact(adapters, v, PROMPT, answer["output_ids"], [row[0] for row in meta["output_token_logprobs"]])
        assert [span["version"] for span in meta["weight_versions"]] == [versions.labels[0]]
        cached.append(meta["cached_tokens"] > 0)
    assert cached[1:] == [False, False, True, True, True]


def test_a_batch_may_mix_adapters_and_the_base_model(server, adapters):
    for v in (1, 2):
        load(server, adapters, v)
    prompts, used = [[*PROMPT, i] for i in range(6)], [0, 1, 2, 2, 0, 1]
    names = [adapters.labels[v] if v else None for v in used]
    answers = server.generate(prompts, max_new_tokens=24, fields={"lora_path": names})
    for v, prompt, answer in zip(used, prompts, answers, strict=True):
        exact(adapters, v, prompt, answer["output_ids"], [r[0] for r in answer["meta_info"]["output_token_logprobs"]])


def test_duplicate_unknown_and_missing_adapters_are_rejected(server, adapters, tmp_path):
    load(server, adapters, 1)
    name = adapters.labels[1]
    for body, words in (
        ({"lora_name": name, "lora_path": str(adapters.paths[1])}, "already"),
        ({"lora_name": "9-00000000", "lora_path": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        status, answer = server.post("/load_lora_adapter", body)
        assert status == 400 and answer["success"] is False and words in answer["error_message"]
    status, answer = server.post("/unload_lora_adapter", {"lora_name": "9-00000000"})
    assert status == 400 and "9-00000000" in answer["error_message"]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": "9-00000000"}
    status, answer = server.post("/generate", body)
    assert status == 400 and "9-00000000" in answer["error"]["message"]  # our client recognises the case by the name
    assert list(listed(server)) == [name]


@pytest.mark.parametrize("way", ["disk", "stager"])
def test_client_requests_survive_a_push(server, versions, adapters, tmp_path, way):
    """Generation is not paused, each completion has one version, and unused adapters are unloaded."""
    prompts = [[*PROMPT, i] for i in range(4)]
    until = lambda fleet, n: fleet.generate(PROMPT, max_new_tokens=n, ignore_eos=True)

    async def run(stagers):
        async with client.connect([server.url], stagers=stagers) as fleet:
            push = lambda v: push_weights(fleet, adapters.paths[v], adapters.labels[v])
            first = await push(1)
            assert first.pause_s > 0 and first.loaded == (server.url,)  # for the base
            begun, pushed, done = asyncio.Event(), asyncio.Event(), []
            api = fleet.servers[0].api
            answer = api.generate

            async def late(*given, adapter, **more):  # no request ends before the pushes, however slow they are
                part = await answer(*given, adapter=adapter, **more)
                if adapter == adapters.labels[1]:
                    await pushed.wait()
                return part

            api.generate = late
            ask = lambda p: fleet.generate(p, max_new_tokens=400, ignore_eos=True, on_tokens=lambda _: begun.set())
            running = [asyncio.create_task(ask(prompt)) for prompt in prompts]
            await begun.wait()
            second = await push(2)
            done.append(await until(fleet, 8))
            third = await push(3)
            assert (await api.adapters()).keys() == {adapters.labels[v] for v in (1, 2, 3)}
            pushed.set()
            done.append(await until(fleet, 8))
            old = await asyncio.gather(*running)
            fourth = await push(4)
            assert [report.pause_s for report in (second, third, fourth)] == [0, 0, 0]
            assert bool(second.stage_bytes) == bool(stagers)
            assert (await api.adapters()).keys() == {adapters.labels[v] for v in (3, 4)} and fleet.version == 4
            done.append(await until(fleet, 8))
            read = await fleet.read(PROMPT)
            assert fleet.counts["resumed"] == fleet.counts["strange"] == 0
            return old, done, read[1]

    with servers.stager(tmp_path / "staged") if way == "stager" else contextlib.nullcontext() as url:
        old, done, read = asyncio.run(run([url] if url else []))
    for v, prompt, one in (*((1, prompt, one) for prompt, one in zip(prompts, old, strict=True)),
                           *zip((2, 3, 4), [PROMPT] * 3, done, strict=True)):  # fmt: skip
        assert set(one.version) == {v}
        exact(adapters, v, prompt, one.tokens, one.logp)
    exact(adapters, 4, PROMPT[:1], PROMPT[1:], [row[0] for row in read.inputs[1:]])


def test_lost_adapters_are_reloaded_before_the_next_request(server, versions, adapters):
    """As after a restart: the server has other weights, another label and no adapters."""

    async def main():
        async with client.connect([server.url]) as fleet:
            await push_weights(fleet, adapters.paths[1], adapters.labels[1])
            body = {"model_path": str(versions.paths[1]), "weight_version": "default"}
            server.ok("/update_weights_from_disk", body)
            server.ok("/unload_lora_adapter", {"lora_name": adapters.labels[1]})
            one = await fleet.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
            assert fleet.counts["strange"] == fleet.counts["recovered"] == 1
            return one

    one = asyncio.run(main())
    assert set(one.version) == {1}
    exact(adapters, 1, PROMPT, one.tokens, one.logp)


def test_an_adapter_replaced_under_its_name_is_loaded_again(server, adapters):
    async def main():
        timeouts = client.Timeouts(heartbeat_s=0.2)
        async with client.connect([server.url], timeouts=timeouts) as fleet:
            await push_weights(fleet, adapters.paths[1], adapters.labels[1])
            await asyncio.sleep(1)
            assert fleet.counts["stale"] == 0
            await asyncio.to_thread(server.ok, "/unload_lora_adapter", {"lora_name": adapters.labels[1]})
            body = {"lora_name": adapters.labels[1], "lora_path": str(adapters.paths[2])}
            await asyncio.to_thread(server.ok, "/load_lora_adapter", body)
            while not fleet.counts["recovered"]:
                await asyncio.sleep(0.1)
            assert listed(server) == {adapters.labels[1]: str(adapters.paths[1])}
            return await fleet.generate(PROMPT, max_new_tokens=8, ignore_eos=True)

    one = asyncio.run(asyncio.wait_for(main(), 60))
    assert set(one.version) == {1}
    exact(adapters, 1, PROMPT, one.tokens, one.logp)


def test_servers_report_which_adapters_they_accept(server, adapters):
    modules = json.loads((adapters.paths[1] / "adapter_config.json").read_text())["target_modules"]
    assert asyncio.run(lora.refusal([server.url], 4, modules)) == ""
