"""What vLLM answers, as version 0.32 was seen to, and what of it is refused; the real server is in tests/contract."""

import asyncio
import base64
import contextlib
import copy
import io
import json

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.servers import kinds
from areax.rollout.servers.image_tokens import TokensPrompt
from areax.rollout.servers.server import Server
from areax.rollout.servers.types import Part, Probe
from areax.rollout.servers.vllm import VLLM
from areax.rollout.types import Image
from areax.rollout.weights import tensors, verify

CONFIG = {"vllm_config": {
    "model_config": {"dtype": "torch.float32", "quantization": None, "max_model_len": 1024,
                     "logprobs_mode": "processed_logprobs", "enable_sleep_mode": False},
    "cache_config": {"kv_cache_size_tokens": 1048576},
    "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False},
    "scheduler_config": {"max_num_seqs": 16},
    "lora_config": {"max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2, "target_modules": None},
}}  # fmt: skip
ANSWER = {
    "request_id": "generate-tokens-abc", "model": "/m", "created": 1795986752,
    "usage": {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None},
    "prompt_logprobs": [
        None, {"17": {"logprob": -10.04, "rank": 280, "decoded_token": "/"}, "9": {"logprob": -1.5, "rank": 1}},
        {"42": {"logprob": -5.08, "rank": 1}}, {"100": {"logprob": -5.2, "rank": 2}, "3": {"logprob": -4.0, "rank": 1}},
        {"61": {"logprob": -4.9, "rank": 1}},
    ],
    "choices": [{
        "index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [155, 37], "routed_experts": None,
        "weight_versions": [{"version": "1-0000abcd", "start": 0, "end": 2}], "text": "CN",
        "logprobs": {"content": [{"token": "", "logprob": -3.25, "bytes": []}, {"token": "C", "logprob": -3.5}]},
    }],
}  # fmt: skip
PROMPT = [5, 17, 42, 100, 61]


@contextlib.asynccontextmanager
async def serving(answer=None, config=CONFIG, missing=()):
    """Yields (its calls, bodies that were sent): a server that answers as vLLM does, with `answer` to generate."""
    sent = []

    async def generate(request):
        body = await request.json()
        sent.append(body)
        made = copy.deepcopy(ANSWER) if answer is None else answer
        if not isinstance(made, dict):
            text = "".join(f"data: {json.dumps(x)}\n\n" for x in made) + "data: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(made)

    async def post(request):
        sent.append((request.path_qs, await request.json()))
        return web.json_response({"success": True, "results": [None]})

    said = {
        "/version": {"version": "0.32.0"}, "/weight_info": {"weight_version": "1-0000abcd"}, "/server_info": config,
        "/get_world_size": {"world_size": 1}, "/health": {},
    }  # fmt: skip

    async def get(request):
        return web.json_response(said[request.path])

    async def detokenize(request):
        return web.json_response({"prompt": {5: "a", 6: ""}.get((await request.json())["tokens"][0])})

    app = web.Application()
    for path in said.keys() - missing:
        app.router.add_get(path, get)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/detokenize", detokenize)
    for path in ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/abort_requests"):
        app.router.add_post(path, post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield await kinds.found(url, http, ready_s=2.0, vocabulary=288), sent
    finally:
        await runner.cleanup()


def asked(work, *server, **how):
    """What `work(api)` returns, and what the server got."""

    async def main():
        async with serving(*server, **how) as (api, sent):
            return await work(api), sent

    return asyncio.run(main())


def generated(answer=None, on_tokens=None, **sampling):
    sampling = {"temperature": 0.5, "max_new_tokens": 2, "min_new_tokens": 0, "top_k": -1, **sampling}
    return asked(lambda api: api.generate(PROMPT, sampling, rid="abc", on_tokens=on_tokens, cache_key="v1"), answer)


def test_it_is_told_from_sglang_and_described():
    async def work(api):
        return api, await api.describe(timeout_s=2.0)

    (api, found), _ = asked(work)
    assert isinstance(api, VLLM) and found.weights == ("1-0000abcd", "") and not (found.seeded or found.stages)
    assert (found.ranks, found.capacity, found.slots, found.context) == (1, 1048576, 16, 1024)
    assert json.loads(found.layout) == ["float32", "None", "1", "1", "False"]


@pytest.mark.parametrize(
    "missing, changes, words",
    [
        (("/version",), {}, "must be SGLang, vLLM or areax serve"),
        (("/weight_info",), {}, "vLLM must be started with VLLM_SERVER_DEV_MODE=1"),
        (("/server_info",), {}, "vLLM must be started with VLLM_SERVER_DEV_MODE=1"),
        ((), None, "vLLM must be started with VLLM_SERVER_DEV_MODE=1"),
        ((), {"logprobs_mode": "processed_logits"}, "needs --logprobs-mode processed_logprobs, got processed_logits"),
    ],
)
def test_servers_that_were_not_started_for_it_say_so(missing, changes, words):
    config = copy.deepcopy(CONFIG)
    if changes is None:
        config["vllm_config"] = None
    else:
        config["vllm_config"]["model_config"] |= changes
    with pytest.raises(ValueError, match=words):
        asked(lambda api: api.describe(timeout_s=2.0), config=config, missing=missing)


def test_a_completion_has_tokens_log_probabilities_and_versions():
    part, [body] = generated(stop_token_ids=[2], regex="ab+")
    assert (part.tokens, part.logp, part.labels) == ([155, 37], [-3.25, -3.5], ["1-0000abcd"] * 2)
    assert part.finish == "length" and part.text == "CN" and part.info["prompt_tokens"] == 5
    assert body == {
        "request_id": "abc", "token_ids": PROMPT, "output_mode": "text", "cache_salt": "v1",
        "sampling_params": {
            "temperature": 0.5, "max_tokens": 2, "min_tokens": 0, "top_k": -1, "stop_token_ids": [2], "logprobs": 0,
            "structured_outputs": {"regex": "ab+"},
        },
    }  # fmt: skip


def events():
    first, last = copy.deepcopy(ANSWER), copy.deepcopy(ANSWER)
    for event, token, logp in ((first, 155, -3.25), (last, 37, -3.5)):
        event["choices"][0] |= {"token_ids": [token], "logprobs": {"content": [{"logprob": logp}]}}
        del event["usage"]
    first["choices"][0] |= {"finish_reason": None, "weight_versions": None}
    return [first, last]


def test_a_stream_has_the_new_tokens_alone():
    seen = []
    part, [body] = generated(events(), seen.append)
    assert seen == [[155], [155, 37]] and body["stream"]
    assert (part.tokens, part.logp, part.labels) == ([155, 37], [-3.25, -3.5], ["1-0000abcd"] * 2)


def test_an_event_of_another_request_is_not_taken_for_ours():
    mixed = events()
    mixed[0] |= {"request_id": "generate-tokens-abd"}
    with pytest.raises(
        ServerError, match="/inference/v1/generate: .*must be to request 'abc', got one to 'generate-tok"
    ):
        generated(mixed, lambda _: None)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a, c: a.update(request_id="generate-tokens-abd"), "must be to request 'abc', got one to 'generate-tok"),
        (lambda a, c: c.update(token_ids=[155, 288]), "below the vocabulary size 288, got 288"),
        (lambda a, c: c.update(token_ids=[155]), "logprobs of 2 tokens do not belong to the 1 ids"),
        (lambda a, c: c["logprobs"]["content"][0].update(logprob=0.5), "must be a number from -10000 to 0, got 0.5"),
        (lambda a, c: c.update(weight_versions=None), "got 0 labels for 2 tokens"),
        (lambda a, c: c.update(finish_reason="repetition"), "the finish must be one of stop, length, abort, got"),
        (lambda a, c: c.update(finish_reason="stop"), "an answer that stops must end in the stop token"),
        (lambda a, c: a["usage"].update(prompt_tokens=4), "must be to a prompt of 5 tokens, got one to 4"),
        (lambda a, c: a["choices"].append(c), "lacks what a single request returns"),
        (lambda a, c: c.pop("logprobs"), "lacks what a single request returns .KeyError"),
    ],
)
def test_a_wrong_answer_names_the_server(change, words):
    answer = copy.deepcopy(ANSWER)
    change(answer, answer["choices"][0])
    with pytest.raises(ServerError, match=rf"http://127.*/inference/v1/generate: .*{words}"):
        generated(answer, stop_token_ids=[2])


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "sent, words",
    [
        (npy(np.zeros((6, 2, 3), np.float32)), "must be 2 per layer and token, got float32"),
        (npy(np.zeros((6, 2, 3), np.uint8)), r"must be 2 per layer and token, got uint8\[6, 2, 3\]"),
        (npy(np.full((6, 2, 2), 2**32 + 1, np.uint64)), "must be numbers from 0 on, got 4294967297"),
        (npy(np.full((6, 2, 2), -1, np.int32)), "must be numbers from 0 on, got -1"),
        (npy(np.zeros((6, 2, 2), np.uint8))[:-8], "must be 2 per layer and token"),
        (base64.b64encode(b"PK\x03\x04" + bytes(60)).decode(), "must be a .npy file"),
        ("!", "lacks what a single request returns"),
    ],
)
def test_experts_that_are_none_are_refused(sent, words):
    answer = copy.deepcopy(ANSWER)
    answer["choices"][0]["routed_experts"] = sent
    work = lambda api: api.generate(PROMPT, {"max_new_tokens": 2}, rid="abc", experts_per_token=2)
    with pytest.raises(ServerError, match=words):
        asked(work, answer)
    answer["choices"][0]["routed_experts"] = npy(np.arange(24, dtype=np.uint8).reshape(6, 2, 2))
    part, _ = asked(work, answer)
    assert part.routed.dtype == np.int32 and part.routed.ravel().tolist() == [*range(24)]


def test_each_token_has_a_text_or_the_server_is_named():
    assert asked(lambda api: api.texts([5, 6, 5]))[0] == ["a", "", "a"]
    with pytest.raises(ServerError, match="/detokenize: must return a text for each of 2 tokens"):
        asked(lambda api: api.texts([5, 7]))


def test_a_prompt_is_read():
    async def work(api):
        api._check_sender = lambda *_: None  # of a random request
        return await api.read(PROMPT, top_k=1)

    part, [body] = asked(work)
    assert [row[:2] for row in part.inputs] == [[None, 5], [-10.04, 17], [-5.08, 42], [-5.2, 100], [-4.9, 61]]
    assert part.input_top[1:] == [[[-1.5, 9]], [[-5.08, 42]], [[-4.0, 3]], [[-4.9, 61]]] and not part.tokens
    assert body["sampling_params"] == {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 1, "logprobs": 0}


def test_a_push_pauses_loads_and_labels():
    async def work(api):
        await api.pause("retract")
        await api.update_weights_from_disk("/p/3", "3-0000abcd")
        await api.resume()
        await api.abort("abc")

    _, sent = asked(work)
    assert sent == [
        ("/pause?mode=abort&clear_cache=true", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/p/3"}}),
        ("/update_weight_version", {"new_version": "3-0000abcd"}),
        ("/resume", {}),
        ("/abort_requests", {"request_ids": ["generate-tokens-abc"]}),
    ]


@pytest.mark.parametrize(
    "rank, room, words",
    [
        (4, 3, ""),
        (16, 3, "supports adapters of rank 8 at most, not 16"),
        (4, 2, "keeps 2 adapters at most, and a push needs 3"),
    ],
)
def test_adapters_that_a_server_has_no_room_for(rank, room, words):
    config = copy.deepcopy(CONFIG)
    config["vllm_config"]["lora_config"]["max_cpu_loras"] = room
    why, _ = asked(lambda api: api.adapter_refusal(rank, ["q_proj"]), config=config)
    assert words in why and bool(why) == bool(words)


def test_what_is_not_sent_to_vllm_is_refused():
    async def work(api):
        api.mode = "raw_logprobs"
        with pytest.raises(ValueError, match="at temperature 0.5; start vLLM with --logprobs-mode processed_logprobs"):
            await api.generate(PROMPT, {"temperature": 0.5, "max_new_tokens": 2})
        with pytest.raises(ValueError, match="images are not sent to vLLM"):
            await api.generate(TokensPrompt([7, 5], [Image(b"x")], 7), {"max_new_tokens": 2})
        with pytest.raises(ValueError, match="sampling masks of vLLM are not read yet; use areax serve or SGLang"):
            await api.generate(PROMPT, {"max_new_tokens": 2, "top_k": 5, "sampling_mask": True})
        with pytest.raises(ValueError, match="top_logprobs of vLLM are not read yet; use areax serve or SGLang"):
            await api.generate(PROMPT, {"max_new_tokens": 2, "top_logprobs": 5})
        async with client.connect([api.url]) as fleet:
            with pytest.raises(ValueError, match="vLLM takes no tensors over HTTP; push by --push.way disk"):
                await tensors.handover(lambda arrays: iter([("", True)]))(fleet.servers[0], None, True)

    asked(work)


@pytest.mark.parametrize(("moved", "found"), [(0.0, False), (0.03, False), (0.06, True)])
def test_weights_replaced_under_their_label_are_found_by_the_probe(moved, found):
    known, now = Probe((1, 2, 3), (-1.0, -2.0)), [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]

    class Api:
        url = "http://vllm"

        async def read(self, tokens, **_):
            return Part([], [], [], "length", "", {}, inputs=now)

    async def main():
        server = Server(Api(), ["1-0000abcd"])
        assert await verify.replaced(server, timeout_s=1.0) == ""  # it has passed no probe yet
        server.weights_verified.set()
        verify.probe_difference(server, known, await Api().read(()))
        now[1][0] -= 2 * moved
        return await verify.replaced(server, timeout_s=1.0)

    why = asyncio.run(main())
    assert ("moved by 0.06 nats per token, but its label is still '1-0000abcd'" in why) if found else why == ""
