"""Publishing 1 GB of weights (named as in Hugging Face, hashed, synced, with a manifest, by rename) where servers on
this machine read it, against a plain write of the same bytes to the same file system.

Both sides first touch as much memory as they are going to write: on a virtual machine that gives free memory back to
its host, whoever comes first would pay for getting it again, up to four times the writing itself.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import sizes

UNIT, PEERS = "GB/s", {None: ("plain",)}
SOURCE = "1GB"


def work(model):
    return sizes.matmul_weights(SOURCE) * 4 / 1e9, None


def root(folder):
    from areax.rollout import publish

    return publish.choose_root(Path(folder, "model.safetensors").stat().st_size)


def touch_memory():
    np.empty(int(work(None)[0] * 1e9), np.uint8).fill(1)


def ours(folder, model):
    """A function that publishes one version and returns the bytes of its tensors."""
    import json

    from areax.adapters import hf

    config, params = hf.load(folder)
    where = Path(tempfile.mkdtemp(dir=root(folder)))

    def once():
        path = hf.write_published(where, 0, config, params)
        return json.loads((path / hf.MANIFEST).read_bytes())["bytes"]

    once.before = touch_memory
    once.after = lambda: shutil.rmtree(where / "0")
    once.close = lambda: shutil.rmtree(where)
    return once


def plain(folder, model):
    data = Path(folder, "model.safetensors").read_bytes()
    where = Path(tempfile.mkdtemp(dir=root(folder)))

    def once():
        with open(where / "plain", "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        return len(data)

    once.before = touch_memory
    once.after = lambda: (where / "plain").unlink()
    once.close = lambda: shutil.rmtree(where)
    return once
