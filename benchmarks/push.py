"""Pushing 1 GB of new weights to a server on this machine, from the trainer's arrays until they are served, vs a plain
write and read of the same bytes on the same file system.

areax's side is complete: it writes a version (Hugging Face names, hashes, fsync, manifest, rename), and the embedded
server, a separate process, maps it, verifies each tensor's hash, stages it in decoding layout and swaps it in. The
plain side reads into memory that it already has. Both first touch as much memory as they will write: on a virtual
machine that returns free memory to its host, the first side would otherwise pay up to four times the writing to get it
back.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import files
import sizes

UNIT, PEERS = "GB/s", {None: ("plain",)}
SOURCE = "1GB"


def work(model):
    return sizes.matmul_weights(SOURCE) * 4 / 1e9, None


def root(folder):
    from areax.rollout.weights import store

    return store.choose_root(Path(folder, "model.safetensors").stat().st_size)


def touch_memory():
    files.touch_memory(int(work(None)[0] * 1e9))


def ours(folder, model):
    """Returns a function that pushes a version to the server and returns the bytes of its tensors."""
    import asyncio

    from areax.adapters import hf
    from areax.rollout import client
    from areax.rollout.fleet.push import push_weights
    from areax.rollout.servers import local
    from areax.rollout.servers.labels import read_label

    loop, stack = asyncio.new_event_loop(), contextlib.AsyncExitStack()
    wait, versions = loop.run_until_complete, itertools.count()
    config, params = hf.load(folder)
    where = Path(tempfile.mkdtemp(dir=root(folder)))

    async def begin():
        servers = await stack.enter_async_context(local.servers(folder, local.Serve(slots=4)))
        return await stack.enter_async_context(client.connect(servers.urls))

    fleet = wait(begin())

    def once():
        v = next(versions)
        path = hf.write_published(where, v, config, params)
        label = read_label(path / hf.MANIFEST)
        wait(push_weights(fleet, path, label))
        if fleet.labels != {label}:
            raise RuntimeError(f"push: the server has {fleet.labels} instead of {label}")
        return json.loads((path / hf.MANIFEST).read_bytes())["bytes"]

    def close():
        wait(stack.aclose())
        loop.close()
        shutil.rmtree(where)

    once.before = touch_memory
    once.after = lambda: [shutil.rmtree(path) for path in where.iterdir()]
    once.close = close
    return once


def plain(folder, model):
    data = Path(folder, "model.safetensors").read_bytes()
    where = Path(tempfile.mkdtemp(dir=root(folder)))
    memory = bytearray(len(data))

    def once():
        files.write(where / "plain", data)
        files.read(where / "plain", memory)
        return len(data)

    once.before = touch_memory
    once.after = lambda: (where / "plain").unlink()
    once.close = lambda: shutil.rmtree(where)
    return once
