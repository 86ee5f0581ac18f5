"""Transferring weights to a server on another machine: delta vs full transfer, from the trainer or by a bucket.

    python benchmarks/delta.py [--gb 1] [--changed 0.03] [--link 125] [--bucket] [--write]
    python benchmarks/delta.py --hosts 2 [--servers 2] [--gb 1] [--changed 0.03] [--link 125]

A file server has two versions of a bf16 model, in which 3 % of the weights differ by one unit in the last place. A
stager process fetches the second version, in turns with the first version present and with nothing, through a proxy
that limits bandwidth to `--link` MB/s (125 is 1 Gbit/s; 0 = no proxy, plain loopback). Times are from the request until
the version is in place and verified, including computing and applying the delta. The memory needed is touched before
each: on a virtual machine that returns free memory to its host, getting it back takes longer than the work. --write
stores it as case `delta` of results.json.

--bucket measures further ways: an adapter of rank 16 from the trainer, and both by a bucket, to which the trainer
uploads the version, and its delta, over another such link. It needs s3fs, and moto for a server with S3's API
(tests/environments/sandboxes.txt); of that server, which is in Python, --link 12.5 leaves the link the slowest part.

--hosts measures something else: as many servers as --servers fetch the second version at the same time from a trainer
of one host, and of so many, each of which has a part of it and a link of its own.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import files
import ml_dtypes
import numpy as np
import run

TURNS = 3
PIECE = 256 << 10  # bytes that the proxy forwards at a time
BURST_S = 0.05
BUCKET = "s3://models/versions"


def versions(root: Path, gb: float, changed: float, hosts: int = 1) -> list[list]:
    """Writes two published versions; of each the part that each host has."""
    from areax.adapters import safetensors
    from areax.rollout.servers.labels import read_label
    from areax.rollout.servers.types import Published

    rng = np.random.default_rng(0)
    rows = int(gb * 1e9 / 2 / 8 / 8192)
    tensors = {f"layer.{i}": rng.standard_normal((rows, 8192), np.float32) * 0.02 for i in range(8)}
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    made = []
    for v in range(2):
        first, *others = paths = [root / f"{v}-{i}" for i in range(hosts)]
        for path in paths:
            path.mkdir()
        parts = safetensors.layout(tensors, parts=hosts)[:-1]
        own = [tensors[name] for entries in parts[0].values() for name in entries]
        rest = {}
        for path, part in zip(others, parts[1:], strict=True):
            for file, entries in part.items():
                rest |= safetensors.write_file(path / file, entries, [tensors[name] for name in entries])
        described = safetensors.write(first, tensors, own, parts=hosts, others=lambda rest=rest: rest)
        (first / "manifest.json").write_text(json.dumps({"version": v, "tensors": described}))
        (first / "config.json").write_text("{}")
        label = read_label(first / "manifest.json")
        made.append([Published(str(path), label) for path in paths])
        for x in tensors.values():
            bits = x.view(np.uint16)
            bits += (rng.random(bits.shape, np.float32) < changed) * rng.choice(np.array([1, 65535], np.uint16))
    return made


@contextlib.asynccontextmanager
async def link(url: str, mb_s: float, sent: list[int] | None = None):
    """Yields the address of a proxy to `url`; all connections share its bandwidth, which each direction has.

    Args:
      sent: the sizes of the answers are appended to it, piece by piece.
    """
    host, port = url.removeprefix("http://").rsplit(":", 1)
    free_at = [0.0, 0.0]  # of a direction

    async def through(reader, writer, way: int):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE):
                # catch up after late timers, up to BURST_S of the link
                free_at[way] = max(free_at[way], time.perf_counter() - BURST_S) + len(piece) / (mb_s * 1e6)
                await asyncio.sleep(max(0.0, free_at[way] - time.perf_counter()))
                writer.write(piece)
                if way and sent is not None:
                    sent.append(len(piece))
                await writer.drain()
        writer.close()

    async def accepted(reader, writer):
        there_reader, there_writer = await asyncio.open_connection(host, int(port), limit=2 * PIECE)
        with contextlib.suppress(asyncio.CancelledError):  # connections that s3fs keeps, at the end
            await asyncio.gather(through(reader, there_writer, 0), through(there_reader, writer, 1))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0, limit=2 * PIECE) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def adapter(root: Path, gb: float):
    """A published version that is an adapter of rank 16, in float32, of the matrices of `versions`."""
    from areax.adapters import safetensors
    from areax.rollout.servers.labels import read_label
    from areax.rollout.servers.types import Published

    rng, rows = np.random.default_rng(1), int(gb * 1e9 / 2 / 8 / 8192)
    shapes = {f"layer.{i}.{name}": shape for i in range(8) for name, shape in (("a", (16, 8192)), ("b", (rows, 16)))}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    (path := root / "adapter").mkdir()
    described = safetensors.write(path, tensors, tensors.values())
    (path / "manifest.json").write_text(json.dumps({"version": 2, "tensors": described}))
    return Published(str(path), read_label(path / "manifest.json"))


@contextlib.asynccontextmanager
async def bucket(mb_s: float, stack: contextlib.AsyncExitStack):
    """Yields the bucket, and the environment of a stager: a server with S3's API, each over a link of its own."""
    import s3fs
    from moto.server import ThreadedMotoServer

    from areax.rollout.weights import object_store

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    ours, theirs = [await stack.enter_async_context(link(url, mb_s)) for _ in range(2)]
    os.environ.update(keys, AWS_ENDPOINT_URL_S3=ours)
    await asyncio.to_thread(s3fs.S3FileSystem().mkdir, "models")
    async with object_store.opened(BUCKET, "benchmark", keep=False) as uploads:
        yield uploads, {**keys, "AWS_ENDPOINT_URL_S3": theirs}
    server.stop()


async def measure(root: Path, gb: float, changed: float, mb_s: float, with_bucket: bool) -> dict:
    import aiohttp

    from areax.rollout.weights import file_server

    (root / "trainer").mkdir()
    [first], [second] = versions(root / "trainer", gb, changed)
    small = adapter(root / "trainer", gb)
    own = root / "server"
    command = [sys.executable, "-m", "areax.rollout.weights.stager", "--port", "0", "--root", str(own)]
    found: dict[str, list] = {"delta": [], "all": []}
    if with_bucket:
        found |= {"adapter": [], "bucket delta": [], "bucket all": []}
    async with (
        aiohttp.ClientSession() as http,
        file_server.serve("127.0.0.1") as here,
        contextlib.AsyncExitStack() as stack,
    ):
        source = await stack.enter_async_context(link(here.url, mb_s)) if mb_s else here.url
        if with_bucket:
            uploads, environ = await stack.enter_async_context(bucket(mb_s, stack))

        async def stage(stager, weights, name):
            begun = time.perf_counter()
            if name.startswith("bucket"):
                told = await uploads.offered(weights)
            else:
                here.offer(weights)
                told = {"sources": [source], "source_key": here.key}
            offered_s = time.perf_counter() - begun
            body = {"label": weights.label, **told}
            async with http.post(f"{stager}/stage", json=body, timeout=aiohttp.ClientTimeout(3600)) as reply:
                answer = await reply.json()
            assert reply.status == 200, answer
            return answer | {"seconds": time.perf_counter() - begun, "upload_s": offered_s}

        for turn in range(1 + TURNS):  # the first is warm-up
            for name in found:
                shutil.rmtree(own, ignore_errors=True)
                here._listings.clear()  # hashing and the delta are part of a push
                here._deltas.clear()
                options, more = [], {}
                if name.startswith("bucket"):
                    uploads._versions.clear()
                    uploads._before = None
                    await uploads.prune()
                    options, more = ["--bucket", BUCKET], environ
                begin = functools.partial(
                    subprocess.Popen, [*command, *options], stdout=subprocess.PIPE, text=True, env=os.environ | more
                )
                with await asyncio.to_thread(begin) as there:
                    try:
                        stager = (await asyncio.to_thread(there.stdout.readline)).split()[0]
                        if name.endswith("delta"):
                            await stage(stager, first, name)
                        files.touch_memory(int(1.5e9 * gb))
                        result = await stage(stager, small if name == "adapter" else second, name)
                    finally:
                        there.kill()
                assert result["delta"] == name.endswith("delta")
                if turn:
                    found[name].append(result)
    return {
        name: {
            "seconds": statistics.median(one["seconds"] for one in many),
            "seconds_all": [round(one["seconds"], 2) for one in many],
            "upload_s": round(statistics.median(one["upload_s"] for one in many), 2),
            "mb": many[0]["bytes"] / 1e6,
        }
        for name, many in found.items()
    }


async def measure_hosts(root: Path, gb: float, changed: float, mb_s: float, hosts: int, servers: int) -> dict:
    """{way: {"seconds", "seconds_all", "mb"}}, the last a list of what leaves each host."""
    import aiohttp

    from areax.rollout.weights import file_server

    (root / "trainer").mkdir()
    first, second = versions(root / "trainer", gb, changed, hosts)
    command = [sys.executable, "-m", "areax.rollout.weights.stager", "--port", "0", "--root"]
    found: dict[str, list] = {"all": [], "delta": []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(3600)) as http, contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        trainers = [await enter(file_server.serve("127.0.0.1", key="key")) for _ in range(hosts)]
        sent: list[list[int]] = [[] for _ in trainers]
        urls = [await enter(link(one.url, mb_s, own)) for one, own in zip(trainers, sent, strict=True)]

        async def stage(stager: str, version: list) -> None:
            for one, part in zip(trainers, version, strict=True):
                one.offer(part)
            body = {"label": version[0].label, "sources": urls, "source_key": "key"}
            async with http.post(f"{stager}/stage", json=body) as reply:
                assert reply.status == 200, await reply.text()

        for turn in range(1 + TURNS):  # the first is warm-up
            for name in found:
                with contextlib.ExitStack() as running:
                    stagers = []
                    for i in range(servers):
                        shutil.rmtree(root / f"server-{i}", ignore_errors=True)
                        own = subprocess.Popen([*command, str(root / f"server-{i}")], stdout=subprocess.PIPE, text=True)
                        running.enter_context(own)
                        running.callback(own.kill)
                        stagers.append((await asyncio.to_thread(own.stdout.readline)).split()[0])
                    if name == "delta":
                        await asyncio.gather(*(stage(stager, first) for stager in stagers))
                    for one, own in zip(trainers, sent, strict=True):
                        one._listings.clear()
                        one._deltas.clear()
                        own.clear()
                    files.touch_memory(int(1.5e9 * gb * servers))
                    begun = time.perf_counter()
                    await asyncio.gather(*(stage(stager, second) for stager in stagers))
                    if turn:
                        found[name].append((time.perf_counter() - begun, [sum(own) / 1e6 for own in sent]))
    return {
        name: {
            "seconds": statistics.median(seconds for seconds, _ in many),
            "seconds_all": [round(seconds, 2) for seconds, _ in many],
            "mb": [round(mb, 1) for mb in many[-1][1]],
        }
        for name, many in found.items()
    }


def main() -> None:
    from areax.rollout.weights import store

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--changed", type=float, default=0.03)
    parser.add_argument("--link", type=float, default=125.0)
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.hosts:
        for hosts in (1, given.hosts):
            with tempfile.TemporaryDirectory(dir=store.choose_root(int(given.gb * 1e9))) as folder:
                work = measure_hosts(Path(folder), given.gb, given.changed, given.link, hosts, given.servers)
                for name, one in asyncio.run(work).items():
                    took = f"{one['seconds']:.2f} s {one['seconds_all']}"
                    print(f"{name}, {hosts} hosts to {given.servers} servers: {took}, MB sent by each: {one['mb']}")
        return
    with tempfile.TemporaryDirectory(dir=store.choose_root(int(given.gb * 1e9))) as folder:
        found = asyncio.run(measure(Path(folder), given.gb, given.changed, given.link, given.bucket))
    ours, theirs = found["delta"], found["all"]
    print(
        f"{given.gb:g} GB, {given.changed:.0%} changed, {given.link:g} MB/s: delta {ours['seconds']:.2f} s "
        f"{ours['seconds_all']}, {ours['mb']:.1f} MB; all {theirs['seconds']:.2f} s {theirs['seconds_all']}, "
        f"{theirs['mb']:.1f} MB: {ours['seconds'] / theirs['seconds']:.2f} of the time, "
        f"{ours['mb'] / theirs['mb']:.3f} of the bytes"
    )
    for name in [*found][2:]:
        one = found[name]
        print(f"{name} {one['seconds']:.2f} s {one['seconds_all']}, upload {one['upload_s']} s, {one['mb']:.1f} MB")
    if given.write:
        row = {"case": "delta", "model": None, "peer": "plain", "unit": "versions/s"}
        row |= {"ours": 1 / ours["seconds"], "theirs": 1 / theirs["seconds"]}
        details = found | {"bytes_share": ours["mb"] / theirs["mb"], "link_mb_s": given.link}
        run.store([row | {"ratio": row["ours"] / row["theirs"], "details": details} | run.origin()])


if __name__ == "__main__":
    main()
