"""Training state checkpoints with Orbax: parameters, optimiser, step and data cursor, written atomically.

state/40/              a state: Orbax's files, and hashes.json with the hash of each
state/.41.writing/     one that is being written; it is renamed once complete, hashes included
state/39.damaged/      one whose files are not what was written, set aside
"""

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental import multihost_utils

from ..core.step import State
from ..parallel import offload
from ..parallel.multihost import agreement, processes
from . import hf, safetensors
from .runtime import malloc
from .runtime.atomic_dir import sync_tree

log = logging.getLogger(__name__)

HASHES = "hashes.json"  # {"version", "files": {file: xxh3_128}}
SEEN_S = 10.0  # in which a file of another process must be seen on a shared file system
WRITING, DAMAGED = ".writing", ".damaged"
LONGEST_S = 7 * 86400  # that a state may take: Orbax gives up after 20 minutes, by a clock that may jump
UNREAD = "[", "\\"  # in a path: what Orbax writes there it does not find again
CHUNK = 1 << 22  # bytes read and hashed at a time


class Store:
    """Saved states of one run; created by `open_store`.

    Attributes:
      latest: the newest version saved, or None.
    """

    def __init__(self, path: Path, keep: int, latest: int | None):
        self.path, self.latest = path, latest
        self._keep = keep
        self._background = ThreadPoolExecutor(1, "areax-state")
        self._commit: Future | None = None

    @functools.cached_property
    def _checkpointer(self):
        """Orbax's checkpointer, created lazily: it is slow to import, and a new run needs it only to save."""
        import orbax.checkpoint as ocp

        _quiet()
        # Compression would make a state a seventh smaller, in three times the time, and hold it in memory once more.
        state, about = ocp.PyTreeCheckpointHandler(use_compression=False), ocp.JsonCheckpointHandler()
        handler = ocp.CompositeCheckpointHandler(state=state, about=about)
        return ocp.AsyncCheckpointer(handler, async_options=ocp.options.AsyncOptions(timeout_secs=LONGEST_S))

    def save(self, version: int, state, cursor=None) -> None:
        """Copies the state to the host and writes it in the background; on a CPU it is written when this returns.

        Once it is complete, all but the newest `keep` states are removed.

        Args:
          state: a `State`, or a dictionary of States and other trees of arrays.
          cursor: any JSON value.

        Raises:
          ValueError: the state has numbers that are not finite, or processes of the job hold different replicas; it is
            not saved, so that the last good one stays.
          RuntimeError: the version, or a later one, is already saved.
          OSError: the state saved before could not be written, or this one, which is known at once on a CPU.
        """
        import orbax.checkpoint as ocp

        self.wait()
        malloc.return_memory()  # of a step, for copies
        if self.latest is not None and version <= self.latest:
            raise RuntimeError(f"{self.path}: version {version} was not saved; {self.latest} already exists")
        tree = _tree(state)
        if bad := _not_finite(tree):
            last = "no state was saved before" if self.latest is None else f"the newest good state is {self.latest}"
            raise ValueError(f"{self.path}: version {version} is not saved, {bad}; {last}")
        agreement.replicas("a state that is to be saved", tree)
        about = {"cursor": cursor, "arrays": _described(tree)}
        directory = self.path / f".{version}{WRITING}"
        self._checkpointer.save(
            directory, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree), about=ocp.args.JsonSave(about))
        )
        self.latest = version
        self._commit = self._background.submit(self._finish, version, directory)
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        if all(device.platform == "cpu" for x in arrays for device in x.devices()):
            self.wait()  # a step cannot overwrite arrays that are being written, and would copy them

    def _finish(self, version: int, directory: Path) -> None:
        """Adds the hashes to a state that is being written, renames it to its name, and removes older states."""
        try:
            self._checkpointer.wait_until_finished()
        except TimeoutError as error:
            raise OSError(f"{self.path}: version {version} could not be written: {error}") from error
        except (
            ValueError
        ) as error:  # of tensorstore, for a full disk too: "... to file 5: No space left on device [...]"
            why = str(error).partition(" [")[0].rpartition(": ")[2]
            raise OSError(f"{self.path}: version {version} could not be written: {why}") from error
        if jax.process_index() > 0:
            return
        safetensors.write_bytes(directory / HASHES, _hashes_json(version, hashes(directory)))
        sync_tree(directory)
        directory.rename(self.path / str(version))
        for old in versions(self.path)[: -self._keep]:
            shutil.rmtree((self.path / str(old)).rename(self.path / f".{old}{WRITING}"))

    def wait(self) -> None:
        """Waits until the last saved state is complete; raises OSError if it could not be written."""
        commit, self._commit = self._commit, None
        if commit:
            commit.result()

    def cursor(self, version: int) -> Any:
        """The cursor saved with a version; arrays are not read."""
        return self._about(version)["cursor"]

    def _about(self, version: int) -> dict:
        """What was saved beside the arrays. Orbax's reader would wait for all processes, and one may look alone."""
        return json.loads((self.path / str(version) / "about" / "metadata").read_bytes())

    def restore(self, like, version: int | None = None) -> tuple[Any, Any]:
        """(state, cursor) of a version, the newest by default, in the structure and dtypes of `like`.

        Raises:
          ValueError: nothing was saved, or the saved state has other weights or dtypes.
        """
        import orbax.checkpoint as ocp

        self.wait()
        version = self.latest if version is None else version
        if version is None:
            raise ValueError(f"{self.path}: a saved state is needed, got none")
        directory, tree = self.path / str(version), _tree(like)
        about = self._about(version)
        # Orbax would silently cast to another dtype.
        then, now = about["arrays"], _described(tree)
        if then != now:
            differs = next((f"{x} and {y}" for x, y in zip(then, now, strict=False) if x != y), "further arrays")
            raise ValueError(
                f"{self.path}: the saved state must match the model and optimiser, got {differs}; "
                "resume with the same settings, or use another path"
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        how = ocp.checkpoint_utils.construct_restore_args(target)
        restored = self._checkpointer.restore(
            directory, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(target, how))
        )
        return _as(like, restored["state"]), about["cursor"]

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if "_checkpointer" in vars(self):
                self._checkpointer.close()


def _quiet() -> None:
    """Orbax logs a traceback of each error that it raises, and misses files that are not written here."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _check_shared(path: Path) -> None:
    """Raises ValueError, in all processes, unless all see the folder of process 0: each writes a part of a state."""
    mark = path / f".shared-{int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))}"
    if jax.process_index() == 0:
        mark.touch()
    processes.anyone(False)  # it is there
    until = time.monotonic() + SEEN_S
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    try:
        agreement.same("folder on a shared file system", **{str(path): "shared" if seen else "another folder"})
    finally:
        if jax.process_index() == 0:
            mark.unlink()


@contextlib.contextmanager
def open_store(path, *, keep: int = 2) -> Iterator[Store]:
    """Opens the states under `path`, keeping the newest `keep`; waits for pending writes on exit.

    The newest state is compared with its hashes, in one read of its files. If it is damaged, it is set aside, with a
    warning, and the newest older one that is whole takes its place.

    Raises:
      ValueError: there are states, but none is whole; processes of the job see different folders; Orbax would not find
        states at this path.
    """
    path = Path(path).absolute()
    if unread := [sign for sign in UNREAD if sign in str(path)]:
        raise ValueError(f"{path}: states need a path without {unread[0]}, which Orbax takes for a pattern")
    path.mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:
        _check_shared(path)
    latest = _newest_whole(path) if jax.process_index() == 0 else None
    if jax.process_count() > 1:  # all must choose the same
        agreed = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if latest is None else latest)))
        latest = None if agreed < 0 else agreed
    store = Store(path, keep, latest)
    try:
        yield store
    finally:
        store.close()


def newest(path: Path) -> tuple[int, Any] | None:
    """(the newest version under `path`, its cursor), without a look at its arrays; None if there is none to read."""
    if not path.is_dir() or not (found := versions(path)):
        return None
    unreadable = contextlib.suppress(ValueError, OSError, LookupError, TypeError)
    with contextlib.closing(Store(path.absolute(), 1, found[-1])) as store, unreadable:
        return found[-1], store.cursor(found[-1])
    return None


def verified(path: Path, version: int | None = None) -> int:
    """A version under `path` whose files match their hashes: the one given, or the newest; nothing there is changed.

    Raises:
      ValueError: there is no such version, or it is damaged; names those that are kept.
    """
    found = versions(path) if path.is_dir() else []
    if not found:
        raise ValueError(f"{path}: a saved state is needed, got none; runs save one every --save-every steps")
    kept = f"kept are those of {', '.join(map(str, found))}"
    version = found[-1] if version is None else version
    if version not in found:
        raise ValueError(f"{path}: there is no state of step {version}; {kept}")
    if why := _damage(path, version):
        raise ValueError(f"{path / str(version)}: {why}; {kept}, so choose another, or restore it from a copy")
    return version


@contextlib.contextmanager
def opened(path: Path, version: int) -> Iterator[tuple[dict[str, hf.Deferred], Any]]:
    """Yields ({name: array}, cursor) of a version: names are the paths of its leaves, joined by dots, and each array is
    read to the host when it is needed, whatever devices it was saved from."""
    import orbax.checkpoint as ocp

    _quiet()
    directory = path.absolute() / str(version) / "state"
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    with (
        contextlib.closing(Store(path.absolute(), 1, version)) as store,
        contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader,
    ):
        cursor = store.cursor(version)
        tree = reader.metadata(directory).item_metadata.tree

        def read(wanted: str) -> np.ndarray:
            only = lambda at, x: x if name(at) == wanted else ocp.PLACEHOLDER
            item = jax.tree_util.tree_map_with_path(only, tree)
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            try:
                read = reader.restore(directory, args=ocp.args.PyTreeRestore(item, how))
            except (OSError, ValueError) as error:
                if directory.is_dir():
                    raise
                raise ValueError(f"{directory.parent}: its run has removed it meanwhile; name a newer step") from error
            return next(x for at, x in jax.tree_util.tree_leaves_with_path(read) if name(at) == wanted)

        leaves = {name(at): x for at, x in jax.tree_util.tree_leaves_with_path(tree)}
        yield {n: hf.Deferred(functools.partial(read, n), tuple(x.shape), x.dtype) for n, x in leaves.items()}, cursor


def versions(path: Path) -> list[int]:
    """The versions of the complete states under `path`, oldest first."""
    names = [entry.name for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def hashes(directory: Path) -> dict[str, str]:
    """{relative path: xxh3_128 in hex} of all files below a directory, except its hashes."""
    files = sorted(Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    names = [file.relative_to(directory).as_posix() for file in files]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading release Python's lock
        return {name: digest for name, digest in zip(names, pool.map(_hash, files), strict=True) if name != HASHES}


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _newest_whole(path: Path) -> int | None:
    """The newest version that matches its hashes, or None without any; removes what was left half-written."""
    for leftover in path.glob(f".*{WRITING}*"):
        _remove(leftover)
    found = versions(path)
    damage: dict[int, str] = {}
    for version in reversed(found):
        if not (why := _damage(path, version)):
            break
        damage[version] = why
    whole = max(set(found) - set(damage), default=None)
    aside = [entry.name for entry in path.glob(f"*{DAMAGED}")]
    if whole is None and (found or aside):
        listed = "; ".join([f"{version}: {why}" for version, why in damage.items()] + aside)
        raise ValueError(
            f"{path}: none of the saved states is whole ({listed}); restore them from a copy, or start over in another "
            "directory"
        )
    for version, why in damage.items():
        target = path / f"{version}{DAMAGED}"
        _remove(target)
        (path / str(version)).rename(target)
        log.warning("%s: %s; set aside, using %s instead", target, why, whole)
    return whole


def _remove(path: Path) -> None:
    """Removes a folder, a file or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hashes_json(version: int, files: dict[str, str]) -> bytes:
    return hf.json_bytes({"version": version, "files": files})


def _damage(path: Path, version: int) -> str:
    """What of a state is not as it was written; "" if it is whole. Further files do not matter."""
    directory = path / str(version)
    try:
        if not (directory / HASHES).is_file():
            return f"{HASHES} is missing"
        stored, now = (directory / HASHES).read_bytes(), hashes(directory)
        then = hf.read_json(directory / HASHES).get("files")
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except ValueError:
        return f"{HASHES} is damaged"
    if not isinstance(then, dict):
        return f"{HASHES} is damaged"
    for name in sorted(then):
        if now.get(name) != then[name]:
            return f"{name} is {'damaged' if name in now else 'missing'}"
    return "" if stored == _hashes_json(version, then) else f"{HASHES} is damaged, or of another version"


@jax.jit
def _zeros(arrays: list) -> jax.Array:
    """0 for each array, NaN if a number in it is not finite.

    XLA computes no array for it, as for a count, and a sum over devices keeps NaN, which a maximum may lose.
    """
    wide = lambda x: x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return jnp.stack([jnp.sum(wide(x) * 0) for x in arrays])


def _not_finite(tree) -> str:
    """Which array has how many numbers that are not finite; "" if there is none."""
    pairs = [(p, x) for p, x in jax.tree_util.tree_leaves_with_path(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    there = [x for _, x in pairs if not offload.on_host(x)]
    of_devices = iter(np.asarray(_zeros(there)) if there else ())
    # What the host holds may be larger than a device.
    one = lambda x: np.asarray(_zeros([offload.to_device(x)]))[0]
    zeros = [one(x) if offload.on_host(x) else next(of_devices) for _, x in pairs]
    bad = [pair for pair, zero in zip(pairs, zeros, strict=True) if zero != 0]
    if not bad:
        return ""
    (path, x), *others = bad
    count = int(jnp.sum(~jnp.isfinite(offload.to_device(x) if offload.on_host(x) else x), dtype=jnp.float32))
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    where = f"{name}, as in {len(others)} other arrays" if others else name
    return f"{count} of the {x.size} numbers of {where} are not finite"


def _described(tree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in paths]


def leaves(state) -> dict[str, Any]:
    """{name: array} of a state, by the names of `opened`."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): x for path, x in jax.tree_util.tree_leaves_with_path(_tree(state))}


def _tree(state):
    """States as dictionaries, the form they have on disk."""
    if isinstance(state, State):
        return {"params": state.params, "opt_state": state.opt_state, "step": state.step}
    return {name: _tree(x) for name, x in state.items()} if isinstance(state, dict) else state


def _as(like, tree):
    """Inverse of `_tree`, in the structure of `like`."""
    if isinstance(like, State):
        return State(**tree)
    return {name: _as(x, tree[name]) for name, x in like.items()} if isinstance(like, dict) else tree
