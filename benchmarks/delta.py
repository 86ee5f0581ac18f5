"""Transferring weights to a server on another machine: delta vs full transfer.

    python benchmarks/delta.py [--gb 1] [--changed 0.03] [--link 125] [--write]

A file server has two versions of a bf16 model, in which 3 % of the weights differ by one unit in the last place. A
stager process fetches the second version, in turns with the first version present and with nothing, through a proxy
that limits bandwidth to `--link` MB/s (125 is 1 Gbit/s; 0 = no proxy, plain loopback). Times are from the request until
the version is in place and verified, including computing and applying the delta. The memory needed is touched before
each: on a virtual machine that returns free memory to its host, getting it back takes longer than the work. --write
stores it as case `delta` of results.json.
"""

import argparse
import asyncio
import contextlib
import json
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


def versions(root: Path, gb: float, changed: float) -> list:
    """Writes two published versions."""
    from areax.adapters import safetensors
    from areax.rollout.servers.labels import read_label
    from areax.rollout.servers.types import Published

    rng = np.random.default_rng(0)
    rows = int(gb * 1e9 / 2 / 8 / 8192)
    tensors = {f"layer.{i}": rng.standard_normal((rows, 8192), np.float32) * 0.02 for i in range(8)}
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    made = []
    for v in range(2):
        path = root / str(v)
        path.mkdir()
        described = safetensors.write(path, tensors, tensors.values())
        (path / "manifest.json").write_text(json.dumps({"version": v, "tensors": described}))
        (path / "config.json").write_text("{}")
        made.append(Published(str(path), read_label(path / "manifest.json")))
        for x in tensors.values():
            bits = x.view(np.uint16)
            bits += (rng.random(bits.shape, np.float32) < changed) * rng.choice(np.array([1, 65535], np.uint16))
    return made


@contextlib.asynccontextmanager
async def link(url: str, mb_s: float):
    """Yields the address of a proxy to `url` with limited bandwidth."""
    host, port = url.removeprefix("http://").rsplit(":", 1)

    async def through(reader, writer, limited: bool):
        free_at = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE):
                if limited:
                    # catch up after late timers, up to BURST_S of the link
                    free_at = max(free_at, time.perf_counter() - BURST_S) + len(piece) / (mb_s * 1e6)
                    await asyncio.sleep(max(0.0, free_at - time.perf_counter()))
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def accepted(reader, writer):
        there_reader, there_writer = await asyncio.open_connection(host, int(port), limit=2 * PIECE)
        await asyncio.gather(through(reader, there_writer, False), through(there_reader, writer, True))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0, limit=2 * PIECE) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def measure(root: Path, gb: float, changed: float, mb_s: float) -> dict:
    import aiohttp

    from areax.rollout.weights import file_server

    (root / "trainer").mkdir()
    first, second = versions(root / "trainer", gb, changed)
    own = root / "server"
    command = [sys.executable, "-m", "areax.rollout.weights.stager", "--port", "0", "--root", str(own)]
    found: dict[str, list] = {"delta": [], "all": []}
    async with (
        aiohttp.ClientSession() as http,
        file_server.serve("127.0.0.1") as here,
        contextlib.AsyncExitStack() as stack,
    ):
        source = await stack.enter_async_context(link(here.url, mb_s)) if mb_s else here.url

        async def stage(stager, weights):
            here.offer(weights)
            body = {"label": weights.label, "source": source, "source_key": here.key}
            begun = time.perf_counter()
            async with http.post(f"{stager}/stage", json=body, timeout=aiohttp.ClientTimeout(3600)) as reply:
                answer = await reply.json()
            assert reply.status == 200, answer
            return answer | {"seconds": time.perf_counter() - begun}

        for turn in range(1 + TURNS):  # the first is warm-up
            for name in found:
                shutil.rmtree(own, ignore_errors=True)
                here._listings.clear()  # hashing and the delta are part of a push
                here._deltas.clear()
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as there:
                    try:
                        stager = there.stdout.readline().split()[0]
                        if name == "delta":
                            await stage(stager, first)
                        files.touch_memory(int(1.5e9 * gb))
                        result = await stage(stager, second)
                    finally:
                        there.kill()
                assert result["delta"] == (name == "delta")
                if turn:
                    found[name].append(result)
    return {
        name: {
            "seconds": statistics.median(one["seconds"] for one in many),
            "seconds_all": [round(one["seconds"], 2) for one in many],
            "mb": many[0]["bytes"] / 1e6,
        }
        for name, many in found.items()
    }


def main() -> None:
    from areax.rollout.weights import store

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--changed", type=float, default=0.03)
    parser.add_argument("--link", type=float, default=125.0)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=store.choose_root(int(given.gb * 1e9))) as folder:
        found = asyncio.run(measure(Path(folder), given.gb, given.changed, given.link))
    ours, theirs = found["delta"], found["all"]
    print(
        f"{given.gb:g} GB, {given.changed:.0%} changed, {given.link:g} MB/s: delta {ours['seconds']:.2f} s "
        f"{ours['seconds_all']}, {ours['mb']:.1f} MB; all {theirs['seconds']:.2f} s {theirs['seconds_all']}, "
        f"{theirs['mb']:.1f} MB: {ours['seconds'] / theirs['seconds']:.2f} of the time, "
        f"{ours['mb'] / theirs['mb']:.3f} of the bytes"
    )
    if given.write:
        row = {"case": "delta", "model": None, "peer": "plain", "unit": "versions/s"}
        row |= {"ours": 1 / ours["seconds"], "theirs": 1 / theirs["seconds"]}
        details = found | {"bytes_share": ours["mb"] / theirs["mb"], "link_mb_s": given.link}
        run.store([row | {"ratio": row["ours"] / row["theirs"], "details": details} | run.origin()])


if __name__ == "__main__":
    main()
