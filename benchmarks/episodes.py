"""Client overhead per episode, and memory growth: areax's executor and fleet vs a bare loop.

    python benchmarks/episodes.py [--episodes 50000] [--concurrent 2000] [--tokens 64] [--json]

A server process answers each request after 0.2 s with `--tokens` tokens, like SGLang. Both sides run in separate
processes and keep the same number of requests in flight; the bare side only sends the same bodies with aiohttp and
parses the answers. Prints the client's CPU time per episode, and its memory at each tenth of the run.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZE, GROUPS = 8, 32  # episodes per group, groups per batch
DELAY_S = 0.2
PROMPT = list(range(100, 132))


def body(tokens: int) -> dict:
    """Request body of a fleet, sent by both sides."""
    sampling = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": tokens, "min_new_tokens": 0,
        "ignore_eos": False,
    }  # fmt: skip
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


def serve(tokens: int) -> None:
    """Runs a server in this process and prints its address."""
    from aiohttp import web

    rows = [[-1.0 - i / 7, i, None] for i in range(tokens)]
    answer = json.dumps({
        "text": "x" * tokens, "output_ids": list(range(tokens)),
        "meta_info": {
            "id": "0" * 32, "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": len(PROMPT),
            "completion_tokens": tokens, "cached_tokens": 0, "e2e_latency": 0.2, "output_token_logprobs": rows,
            "input_token_logprobs": [], "weight_version": "0-00000000",
            "weight_versions": [{"version": "0-00000000", "start": 0, "end": tokens}],
        },
    }).encode()  # fmt: skip

    async def generate(request):
        await request.read()
        await asyncio.sleep(DELAY_S)
        return web.Response(body=answer, content_type="application/json")

    async def version(request):
        return web.json_response({"weight_version": "0-00000000"})

    async def main():
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/{path}", version)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(main())


def memory() -> float:
    """Resident memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def ours(url: str, episodes: int, concurrent: int, tokens: int, note) -> None:
    """Executor, fleet, episodes, samples and events, as in a training run; batches are discarded."""
    from areax.rollout import client, events
    from areax.rollout.scheduling import executor
    from areax.rollout.types import sampled

    async def workflow(generate, row):
        return sampled(PROMPT, await generate(PROMPT, max_new_tokens=tokens), temperature=1.0, reward=1.0)

    eta = 1 + concurrent // (GROUPS * SIZE)
    prompts = executor.Prompts([{"i": i} for i in range(1000)])
    with tempfile.NamedTemporaryFile() as file, events.writing(file.name):
        async with client.connect([url], concurrency=concurrent) as fleet:
            async with executor.Executor(
                workflow, fleet.generate, prompts, group_size=SIZE, groups_per_batch=GROUPS, eta=eta,
                max_concurrent=concurrent // SIZE, seed=None,
            ) as rollout:  # fmt: skip
                for v in range(episodes // (GROUPS * SIZE)):
                    rollout.admit(v)
                    await rollout.batch(v)
                    note((v + 1) * GROUPS * SIZE)


async def bare(url: str, episodes: int, concurrent: int, tokens: int, note) -> None:
    import aiohttp

    numbers = iter(range(episodes))

    async def caller(http):
        for number in numbers:
            async with http.post(f"{url}/generate", json=body(tokens)) as reply:
                answer = json.loads(await reply.text())
            assert len(answer["output_ids"]) == tokens
            note(number)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.gather(*(caller(http) for _ in range(concurrent)))


def side(name: str, url: str, episodes: int, concurrent: int, tokens: int) -> None:
    """Runs one side and prints JSON."""
    track: dict[int, float] = {}

    def note(done: int) -> None:
        tenth = 10 * done // episodes
        if tenth not in track:
            track[tenth] = memory()

    play = {"ours": ours, "bare": bare}[name]
    begun, cpu = time.perf_counter(), time.process_time()
    asyncio.run(play(url, episodes, concurrent, tokens, note))
    found = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - begun}
    print(json.dumps(found | {"memory_mb": [round(mb, 1) for _, mb in sorted(track.items())]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--concurrent", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    numbers = [str(n) for n in (given.episodes, given.concurrent, given.tokens)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found = {}
    with subprocess.Popen([sys.executable, __file__, "serve", str(given.tokens)], **pipes) as server:
        try:
            url = server.stdout.readline().strip()
            for name in ("ours", "bare"):
                command = [sys.executable, __file__, "side", name, url, *numbers]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found[name] = json.loads(done.stdout)
        finally:
            server.kill()
    for one in found.values():
        one["cpu_ms_an_episode"] = 1000 * one["cpu_s"] / given.episodes
    found["ratio"] = found["ours"]["cpu_s"] / found["bare"]["cpu_s"]
    found["growth_mb"] = found["ours"]["memory_mb"][-1] - found["ours"]["memory_mb"][2]
    if given.json:
        print(json.dumps(found))
        return
    for name in ("ours", "bare"):
        one = found[name]
        print(
            f"{name:5} {one['cpu_ms_an_episode']:.3f} ms CPU per episode, {one['seconds']:.0f} s; memory at each tenth "
            f"of the run, MB: {', '.join(f'{mb:.0f}' for mb in one['memory_mb'])}"
        )
    print(f"CPU ratio {found['ratio']:.2f}; memory growth after two tenths {found['growth_mb']:+.1f} MB")


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["serve"]:
            serve(int(sys.argv[2]))
        case ["side"]:
            side(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
        case _:
            main()
