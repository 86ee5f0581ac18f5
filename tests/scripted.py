"""Stand-in generation servers on real sockets that misbehave on cue."""

import asyncio
import contextlib
import itertools
import json
import types

import aiohttp.web

from areax.rollout.servers.labels import version_of

V0, V1, V2 = "0-00000000", "1-11111111", "2-22222222"


def token_at(index):
    return (7 * index + 3) % 50


def logp_at(index):
    return -index / 64  # exactly representable in binary


@contextlib.asynccontextmanager
async def serving(label=V0, *, port=0, step_s=0.0, seeded=False, honest=False, key=""):
    """A generation server whose tokens and log-probabilities depend on the absolute index only.

    It says which folder it loaded, and loads adapters into `adapters`: name -> folder.

    `script` holds the answers of the next `/generate` calls; `refuse` maps other paths to an answer. With `honest`, the
    log-probability is minus the version it really has; `fails` names a path at which its next push fails. `wrong` lists
    calls that would crash SGLang: use while its memory is released, release while requests run, resuming twice. With a
    `key`, requests without it get a 401, as from SGLang.
    """
    state = types.SimpleNamespace(
        label=label, weights=label, step_s=step_s, script=[], refuse={}, calls=[], aborts=0, load=0, most=0, fails="",
        released=False, wrong=[], source="", adapters={},
    )  # fmt: skip
    state.going = asyncio.Event()
    state.going.set()
    answer = aiohttp.web.json_response

    async def generate(request):
        body = await request.json()
        state.calls.append(("/generate", body))
        state.load += 1
        state.most = max(state.most, state.load)
        try:
            return await (state.script.pop(0) if state.script else tokens)(request, body)
        finally:
            state.load -= 1

    async def tokens(request, body):
        await state.going.wait()
        aborts, first = state.aborts, len(body["input_ids"])
        ids, labels, really, finish = [], [], [], "length"
        for index in range(first, first + body["sampling_params"]["max_new_tokens"]):
            await asyncio.sleep(state.step_s)
            if state.aborts != aborts:
                finish = "abort"
                break
            await state.going.wait()
            if state.released:
                state.wrong.append("generates while released")
            ids.append(token_at(index))
            labels.append(state.label)
            really.append(-float(max(0, version_of(state.weights))))
        logp = really if honest else [logp_at(first + i) for i in range(len(ids))]
        return answer(reply(ids, logp, labels, finish))

    async def control(request):
        body = json.loads(await request.text() or "null")
        state.calls.append((request.path, body))
        if request.path in state.refuse:
            return await state.refuse[request.path](request, body)
        if request.path == "/pause_generation":
            state.going.clear()
            state.aborts += body["mode"] == "abort"
        if request.path == "/continue_generation":
            state.going.set()
        if request.path == "/release_memory_occupation":
            if state.going.is_set() or state.released:
                state.wrong.append("releases while it runs, or twice")
            state.released = True
            return answer(None)
        if request.path == "/resume_memory_occupation":
            if not state.released:
                state.wrong.append("resumes what was not released")
            state.released = False
            return answer(None)
        if request.path == "/update_weights_from_disk":
            if state.released:
                state.wrong.append("loads while released")
            state.weights = body["weight_version"]
        if request.path == state.fails:
            state.fails = ""
            return answer({"message": "it went wrong"}, status=500)
        if request.path == "/update_weights_from_disk":
            state.label, state.source = body["weight_version"], body["model_path"]
            return answer({"success": True, "message": "loaded"})
        if request.path == "/load_lora_adapter":
            state.adapters[body["lora_name"]] = body["lora_path"]
            return answer({"success": True})
        if request.path == "/unload_lora_adapter":
            del state.adapters[body["lora_name"]]
            return answer({"success": True})
        if request.path == "/v1/models":
            return answer({"data": [{"id": n, "root": where, "parent": "base"} for n, where in state.adapters.items()]})
        if request.path == "/model_info":
            return answer({"weight_version": state.label, **({"model_path": state.source} if state.source else {})})
        if request.path == "/server_info":
            states = [{"released": ["kv_cache", "weights"] if state.released else []}]
            return answer({"enable_deterministic_inference": seeded, "internal_states": states})
        if request.path == "/flush_cache":
            return aiohttp.web.Response(text="Cache flushed.")
        if request.path == "/health":
            return aiohttp.web.Response(status=200 if state.going.is_set() else 503)
        if request.path == "/weights_checker":
            return answer({"detail": "Not Found"}, status=404)
        return answer({"message": "done"})

    @aiohttp.web.middleware
    async def guarded(request, handler):
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return answer({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = aiohttp.web.Application(middlewares=[guarded])
    app.router.add_post("/generate", generate)
    app.router.add_route("*", "/{path:.*}", control)
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    state.generated = lambda: [body for path, body in state.calls if path == "/generate"]
    try:
        yield state
    finally:
        await runner.cleanup()


def reply(ids, logp, labels, finish):
    spans, start = [], 0
    for label, run in itertools.groupby(labels):
        end = start + len(list(run))
        spans.append({"version": label, "start": start, "end": end})
        start = end
    return {
        "text": "text",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(logp, ids, strict=True)],
            "weight_versions": spans,
            "cached_tokens": 0,
        },
    }


def answers(status, body):
    async def handler(request, _):
        return aiohttp.web.json_response(body, status=status)

    return handler


async def hangs_up(request, _):
    request.transport.close()
    return aiohttp.web.Response()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def check(done, prompt, n):
    """Asserts that `done` has each of n tokens once, with its own log-probability."""
    assert done.tokens == [token_at(len(prompt) + i) for i in range(n)]
    assert done.logp == [logp_at(len(prompt) + i) for i in range(n)]
    assert len(done.version) == n


def run(main):
    """Runs `main` with a timeout: tests take up to 6 s (20 s on a slow machine), an unanswered call 120 s or more."""
    return asyncio.run(asyncio.wait_for(main(), 100))


def controls(server):
    ignored = ("/generate", "/server_info", "/health", "/v1/loads")
    return [path for path, _ in server.calls[2:] if path not in ignored]  # without the two of connect


def states(fleet):
    return [one.state for one in fleet.servers]


@contextlib.asynccontextmanager
async def answering(handler):
    """The address of a server whose every path `handler(request)` answers."""
    app = aiohttp.web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
