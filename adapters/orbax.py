"""Training state checkpoints with Orbax: parameters, optimiser, step and data cursor, written atomically."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ..core.step import State


class Store:
    """Saved states of one run; created by `open_store`."""

    def __init__(self, path: Path, keep: int, stack: contextlib.ExitStack):
        self.path, self._keep, self._stack = path, keep, stack

    @functools.cached_property
    def _manager(self):
        """Orbax's manager, created lazily: it is slow to import, and a new run needs it only to save."""
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
        return self._stack.enter_context(ocp.CheckpointManager(self.path, options=options))

    @property
    def latest(self) -> int | None:
        """The newest version saved, or None."""
        begun = "_manager" in vars(self) or any(self.path.iterdir())
        return self._manager.latest_step() if begun else None

    def save(self, version: int, state, cursor=None) -> None:
        """Copies the state to the host and writes it in the background; cursor is any JSON value.

        Args:
          state: a `State`, or a dictionary of States and other trees of arrays.

        Raises:
          RuntimeError: the version is already saved.
        """
        import orbax.checkpoint as ocp

        tree = _tree(state)
        about = {"cursor": cursor, "arrays": _described(tree)}
        saved = self._manager.save(
            version, args=ocp.args.Composite(state=ocp.args.StandardSave(tree), about=ocp.args.JsonSave(about))
        )
        if not saved:
            raise RuntimeError(f"{self.path}: version {version} was not saved; it already exists")

    def restore(self, like, version: int | None = None) -> tuple[Any, Any]:
        """(state, cursor) of a version, the newest by default, in the structure and dtypes of `like`.

        Raises:
          ValueError: nothing was saved, or the saved state has other weights or dtypes.
        """
        import orbax.checkpoint as ocp

        version = self.latest if version is None else version
        if version is None:
            raise ValueError(f"{self.path}: a saved state is needed, got none")
        tree = _tree(like)
        about = self._manager.restore(version, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        # Orbax would silently cast to another dtype.
        then, now = about["arrays"], _described(tree)
        if then != now:
            differs = next((f"{x} and {y}" for x, y in zip(then, now, strict=False) if x != y), "further arrays")
            raise ValueError(
                f"{self.path}: the saved state must match the model and optimiser, got {differs}; "
                "resume with the same settings, or use another path"
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = self._manager.restore(version, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        return _as(like, restored["state"]), about["cursor"]


@contextlib.contextmanager
def open_store(path, *, keep: int = 2) -> Iterator[Store]:
    """Opens the states under `path`, keeping the newest `keep`; waits for pending writes on exit."""
    path = Path(path).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield Store(path, keep, stack)


def _described(tree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in paths]


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
