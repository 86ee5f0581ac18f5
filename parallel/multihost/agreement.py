"""Consistency checks between the processes of a job: options, rows, files, code, and replicas of weights.

Each raises in every process, with one line that names what differs and in which process. All processes must call them,
in the same order. They do nothing in a single process.
"""

import dataclasses
import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from jax._src.distributed import global_state  # its key-value store has no public API
from jax.experimental import multihost_utils

from .meeting import START_S

KEY = "areax/software"
SETTINGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"  # what results depend on
WIDTH = 60  # characters of a value in an error


def shown(value: Any) -> str:
    """The repr of a value without what differs between processes: addresses, and the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} of {', '.join(sorted(map(shown, value)))}"
    return re.sub(r" at 0x[0-9a-fA-F]+(?=>)", "", repr(value))


def same(what: str, /, **values: Any) -> None:
    """Checks that all processes have the same values: arrays and pictures to the bit, dataclasses, mappings and lists
    by their entries, others as `shown`.

    Args:
      what: what they are, for the error.

    Raises:
      ValueError: in every process; names those that differ from process 0, and the first entry that does.
    """
    if jax.process_count() == 1:
        return
    entries = {name: _text(value) for name, value in _entries("", values)}
    digests = {name: xxhash.xxh3_64_hexdigest(text.encode()) for name, text in entries.items()}
    total = xxhash.xxh3_128_digest(json.dumps(digests, sort_keys=True).encode())
    totals = multihost_utils.process_allgather(np.frombuffer(total, np.uint8))
    differ = [i for i, other in enumerate(totals) if (other != totals[0]).any()]
    if not differ:
        return
    first, *others = map(json.loads, gathered(json.dumps(digests)))
    there = others[differ[0] - 1]
    name = next(name for name in [*first, *there] if first.get(name) != there.get(name))
    texts = gathered(entries.get(name, "absent"))
    raise ValueError(
        f"processes: all need the same {what}, got different ones in process {', '.join(map(str, differ))} than in "
        f"process 0: {name} is {_apart(texts[differ[0]], texts[0])} in process {differ[0]}, "
        f"{_apart(texts[0], texts[differ[0]])} in process 0; start all with the same command and files"
    )


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a value consists of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value)
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            yield from _entries(f"{name}.{key}" if name else str(key), inside)
    elif isinstance(value, np.ndarray) and value.dtype == object:  # which holds addresses
        yield from _entries(name, value.tolist())
    elif isinstance(value, list | tuple) and value:
        for i, inside in enumerate(value):
            yield from _entries(f"{name}[{i}]", inside)
    else:
        yield name, value


def _text(value: Any) -> str:
    arrays = isinstance(value, jax.Array) or hasattr(value, "__array_interface__")  # those of numpy, pictures of PIL
    if arrays and not isinstance(value, np.generic):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} with hash {_hash(array)}"
    return shown(value)


def _hash(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _apart(text: str, other: str) -> str:
    """A short text, or of a longer one the part around the first character at which it differs from the other."""
    if len(text) <= WIDTH:
        return text
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(at - WIDTH // 3, 0)
    return "..." * (start > 0) + text[start : start + WIDTH] + "..." * (start + WIDTH < len(text))


def gathered(text: str) -> list[str]:
    """The texts of all processes."""
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [
        row[:size].tobytes().decode()
        for row, size in zip(multihost_utils.process_allgather(padded), sizes, strict=True)
    ]


def same_software() -> None:
    """Checks that all processes run the same Python, jax, jaxlib and code of this package, with as many devices and the
    same settings of JAX; computes nothing.

    Raises:
      ValueError: in the processes that differ from process 0.
    """
    own, store = _software(), global_state.client
    assert store is not None
    if jax.process_index() == 0:
        store.key_value_set(KEY, json.dumps(own))
        return
    first = json.loads(store.blocking_key_value_get(KEY, START_S * 1000))
    for name, version in own.items():
        if version != first[name]:
            raise ValueError(
                f"processes: all need the same software and devices, got {name} {version} in process "
                f"{jax.process_index()}, {first[name]} in process 0; set up all hosts alike"
            )


@functools.cache
def _software() -> dict[str, str]:
    root, digest = Path(__file__).resolve().parents[2], hashlib.blake2b(digest_size=8)
    for package in sorted(path.parent for path in root.glob("*/__init__.py")):
        for file in filter(Path.is_file, sorted(package.rglob("*.py"))):  # no dangling links, as Emacs makes for locks
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    versions = {"Python": platform.python_version(), "jax": jax.__version__, "jaxlib": jax.lib.__version__}
    devices = {"devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"}
    settings = {name.upper(): str(getattr(jax.config, name)) for name in SETTINGS}
    return {**versions, **devices, **settings, "areax with files of hash": digest.hexdigest()}


def replicas(what: str, tree: Any) -> None:
    """Checks that parts of arrays that several devices hold, as those of weights over dp, are equal to the bit.

    Each process hashes what its devices hold, which copies it to the host. What a single process holds is not read.

    Args:
      what: what the tree is, for the error.
      tree: arrays over the devices of all processes.

    Raises:
      ValueError: in every process; names the processes, and the first array that differs.
    """
    if jax.process_count() == 1:
        return
    held: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        held[device.process_index].append(device)
    place = {device: (i, j) for i, own in enumerate(held) for j, device in enumerate(own)}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    holders = [_holders(x) for _, x in leaves]
    hashes = np.zeros((len(leaves), max(map(len, held))), np.uint64)
    for i, (_, x) in enumerate(leaves):
        for shard in x.addressable_shards:
            if shard.device in holders[i]:
                hashes[i, place[shard.device][1]] = int(_hash(np.asarray(shard.data)), 16)
    # as bytes: jax would make 32 bits of 64
    every = multihost_utils.process_allgather(hashes.view(np.uint8)).view(np.uint64)
    wrong: dict[str, set[int]] = {}
    for i, (path, _) in enumerate(leaves):
        for device, first in holders[i].items():
            (p, j), (q, k) = place[device], place[first]
            if every[p, i, j] != every[q, i, k]:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                wrong.setdefault(name, set()).update({p, q})
    if wrong:
        name, between = next(iter(wrong.items()))
        more = f", as {len(wrong) - 1} other arrays do" if len(wrong) > 1 else ""
        raise ValueError(
            f"processes: replicas of {what} must be equal, got {name} that differs between processes "
            f"{' and '.join(map(str, sorted(between)))}{more}; go on from the last saved state"
        )


def _holders(x: jax.Array) -> dict[jax.Device, jax.Device]:
    """{device: the first device with the same part} of an array's parts that several processes hold."""
    parts: dict[str, list[jax.Device]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        parts.setdefault(str(index), []).append(device)
    shared = [held for held in parts.values() if len({device.process_index for device in held}) > 1]
    return {device: held[0] for held in shared for device in held}
