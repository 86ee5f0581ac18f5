"""Measures what a run's controller costs with very many servers and episodes: CPU time, memory, and the loop's lag.

    python benchmarks/controller.py [--servers 1000] [--episodes 100000] [--tokens 256] [--seconds 60]

The controller is what runs in the trainer's process: workflow, executor, fleet, checks of samples, pushes. Servers are
in the same process, without sockets: each answers a request after a time drawn around the mean, with an answer of bytes
that is parsed and checked as any other. Sockets add about 30 KB and 0.1 ms a request. A step trains on nothing.
"""

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time

from areax.rollout import client, loop
from areax.rollout.fleet.push import push_weights
from areax.rollout.processes import garbage
from areax.rollout.scheduling.executor import Executor, Prompts
from areax.rollout.servers.server import Server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.simulation import clock
from areax.rollout.types import sampled

LOOK_S = 0.005  # between looks at the loop's clock
PROMPT = 256  # tokens


class Answering:
    """A server that generates `tokens` tokens in about `seconds`, however many requests it has."""

    def __init__(self, tokens, seconds, seed):
        self._tokens, self._seconds, self._chance, self._label = tokens, seconds, random.Random(seed), "default"
        self._made = {}

    async def answer(self, path, body):
        match path:
            case "/generate":
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) * self._seconds)
                return 200, self._text().replace("NAME", body["rid"])
            case "/update_weights_from_disk":
                await asyncio.sleep(1.0)
                self._label = body["weight_version"]
            case "/model_info":
                return 200, json.dumps({"weight_version": self._label})
            case "/weights_checker":
                return 200, json.dumps({"ranks": [{"checksums": {"weights": self._label}}]})
            case "/v1/loads":
                load = {"num_running_reqs": 100, "num_waiting_reqs": 0, "max_running_requests": 128, "token_usage": 0.5}
                return 200, json.dumps({"loads": [load]})
        return 200, '{"success": true, "message": ""}'

    def _text(self):
        if self._label not in self._made:
            n, spans = self._tokens, [{"version": self._label, "start": 0, "end": self._tokens}]
            self._made = {self._label: json.dumps({"text": "x" * n, "output_ids": [7] * n, "meta_info": {
                "id": "NAME", "finish_reason": {"type": "length"}, "prompt_tokens": PROMPT, "cached_tokens": 0,
                "output_token_logprobs": [[-1.0, 7, None]] * n, "weight_versions": spans}})}  # fmt: skip
        return self._made[self._label]


async def looked(lags):
    while True:
        then = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        lags.append(time.perf_counter() - then - LOOK_S)


async def measure(options):
    group, size = 8, options.episodes // 16  # episodes of a batch: 16 batches are in flight
    chances = random.Random(0)
    network = clock.Network(
        {f"http://{i}": Answering(options.tokens, options.answer_s, chances.random()) for i in range(options.servers)}
    )
    servers = [Server(SGLang(url, network), ["default"]) for url in network.servers]
    fleet = client.assemble(servers, concurrency=2 * options.episodes // options.servers, timeout_s=1e9)
    watching = asyncio.create_task(client.health.watch(fleet))
    lags, marks, pushes, steps = [], [], [], options.steps
    looking = asyncio.create_task(looked(lags))

    async def workflow(generate, row):
        done = await generate(row["prompt"], max_new_tokens=options.tokens)
        return sampled(row["prompt"], done, temperature=1.0, reward=random.random())

    def mark(*_):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        marks.append((time.perf_counter(), usage.ru_utime + usage.ru_stime, len(lags), fleet.counts["requests"]))

    rows = [{"prompt": [i % 1000] * PROMPT} for i in range(4096)]
    with tempfile.TemporaryDirectory() as folder:

        def prepare_push(v):
            async def pushed():
                then = time.perf_counter()
                await push_weights(fleet, folder, f"{v}-{v:08x}", mode="in_place")
                pushes.append(time.perf_counter() - then)

            return pushed

        async with garbage.spared(), Executor(
            workflow, fleet.generate, Prompts(rows, shuffle=False), group_size=group,
            groups_per_batch=size // group, eta=15, max_concurrent=options.episodes // group, seed=None,
        ) as rollout:  # fmt: skip
            await loop.run(
                rollout.batch,
                lambda groups: groups,
                prepare_push,
                eta=15,
                steps=steps,
                admit=rollout.admit,
                on_step=mark,
            )
    looking.cancel()
    watching.cancel()
    await fleet.close()
    (t0, cpu0, n0, r0), (t1, cpu1, n1, r1) = marks[len(marks) // 3], marks[-1]
    lags = sorted(lags[n0:n1])
    at = lambda share: 1000 * lags[int(share * (len(lags) - 1))]
    return {
        "servers": options.servers, "episodes": options.episodes, "tokens": options.tokens,
        "samples_s": (r1 - r0) / (t1 - t0), "cpus": (cpu1 - cpu0) / (t1 - t0),
        "cpu_ms": 1000 * (cpu1 - cpu0) / (r1 - r0),
        "lag_p50_ms": at(0.5), "lag_p99_ms": at(0.99), "lag_max_ms": at(1.0), "push_s": max(pushes, default=0.0),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--answer-s", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=24)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))
