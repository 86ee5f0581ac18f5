"""Speedup by asynchrony and interruption: the real controller over real sockets, with simulated servers and trainer.

    python benchmarks/asynchronous.py [--write]

Servers are processes that respond at the speed of a rate model (areax.rollout.simulation.server); lengths are
lognormal, clipped at 1200 tokens, with a coefficient of variation above 1. The trainer sleeps for as long as the
servers need for the tokens of a batch with all slots busy, so both have the same resources. Prints seconds per step
with eta = 0, with eta = 4, and with eta = 4 when a push waits for running requests to finish; also what `areax
simulate` predicts for the same settings, and the bound: no step can be shorter than the trainer's time. --write stores
it as case `async` of results.json.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
import urllib.request

import numpy as np
import run

SETTINGS = {  # name: (eta, push)
    "eta 0": (0, "retract"), "eta 4": (4, "retract"), "eta 4, no interruption": (4, "drain"),
}  # fmt: skip


def config():
    """Two servers with 32 slots each; batches of 128 episodes; a trainer as fast as the servers."""
    from areax.rollout.simulation import simulate
    from areax.rollout.simulation.server import Rates

    rates = Rates(slots=32, step_s=0.002, request_s=0.00005, read_tokens_s=1e6, load_s=0.05)
    made = simulate.Config(
        servers=2, server=rates, groups=16, group_size=8, prompt=16, new=200.0, cv=1.2, longest=1200, steps=30,
        publish_s=0.01,
    )  # fmt: skip
    generated = float(np.mean(simulate.lengths(made, 100_000)))
    share = (generated + made.prompt) / generated  # the trainer reads prompts too
    return dataclasses.replace(made, train_tokens_s=made.servers * rates.full() * share)


def serve() -> None:
    """Runs a server in this process and prints its address."""
    from aiohttp import web

    from areax.rollout.simulation.server import Rates, Server

    async def main():
        server = Server(Rates(**json.loads(sys.argv[2])))

        async def answer(request):
            if request.path == "/busy":
                return web.json_response(server.busy())
            body = await request.json() if request.can_read_body else None
            return web.json_response(await server.reply(request.path, body or {}))

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(main())


@contextlib.contextmanager
def servers(rates, count: int):
    with contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, "serve", json.dumps(dataclasses.asdict(rates))]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(count)]
        for process in started:
            stack.callback(process.kill)
        yield [process.stdout.readline().strip() for process in started]


def measure(made, eta: int, push: str):
    """Measures the controller in wall time."""
    from areax.rollout import client
    from areax.rollout.simulation import simulate

    made = dataclasses.replace(made, push=push)
    with servers(made.server, made.servers) as urls:

        def busy():
            return [json.loads(urllib.request.urlopen(f"{url}/busy").read()) for url in urls]

        async def main():
            limit = made.max_concurrent * made.group_size
            async with client.connect(urls, concurrency=limit) as fleet:
                return await simulate.play(made, eta, fleet, time.sleep, busy)

        return asyncio.run(main())


def main() -> None:
    from areax.rollout.simulation import simulate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    made = config()
    drawn = simulate.lengths(made, 100_000)
    print(
        f"{drawn.mean():.0f} tokens per episode, coefficient of variation {drawn.std() / drawn.mean():.2f}", flush=True
    )
    rows = {}
    for name, (eta, push) in SETTINGS.items():
        real = measure(made, eta, push)
        simulated = simulate.simulate(dataclasses.replace(made, push=push), eta)
        rows[name] = {
            "step_s": real.step_s, "simulated_step_s": simulated.step_s, "idle": real.idle, "busy": real.busy,
            "staleness": real.mean_staleness,
        }  # fmt: skip
        print(
            f"{name:24} {real.step_s:6.3f} s per step (simulated {simulated.step_s:6.3f}), trainer idle "
            f"{real.idle:5.1%}, servers busy {real.busy:5.1%}, staleness {real.mean_staleness:.2f}",
            flush=True,
        )
    bound = made.groups * made.group_size * (float(drawn.mean()) + made.prompt) / made.train_tokens_s
    found = {
        "rows": rows, "bound_s": bound,
        "asynchrony": rows["eta 0"]["step_s"] / rows["eta 4"]["step_s"],
        "ideal": rows["eta 0"]["step_s"] / bound,
        "interruption": rows["eta 4, no interruption"]["step_s"] / rows["eta 4"]["step_s"] - 1,
    }  # fmt: skip
    print(
        f"eta 4 vs eta 0: {found['asynchrony']:.2f} x; ideal {found['ideal']:.2f} x (the trainer never idle, "
        f"{bound:.3f} s per step), {found['asynchrony'] / found['ideal']:.0%} of it reached; "
        f"interruption on vs off: {found['interruption']:+.1%}"
    )
    if given.write:
        ours, theirs = (1 / rows[name]["step_s"] for name in ("eta 4", "eta 0"))
        row = {"case": "async", "model": None, "peer": "sync", "ours": ours, "theirs": theirs, "unit": "steps/s"}
        run.store([row | {"ratio": ours / theirs, "details": found} | run.origin()])


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["serve"] else main()
