"""What an engine keeps on its devices: weights, memory of sequences, adapters, tables; and the operations on it.

Operations take and return host data, so that all processes of an engine over several hosts can run them alike, each on
its own devices. Process 0 schedules: it alone decides which run, and reads what they return. One process calls them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ...core.param import Table
from ...models import mtp, paging, vision
from ...models.paging import Kind
from ...parallel import transfer, turns
from ...parallel.multihost import lockstep, processes
from ...parallel.multihost.channel import Share
from . import grammar
from .adapters import Adapters, Factors
from .options import Options
from .programs import decode as decoding
from .programs import drafts, images, mtp_drafts, penalties, pool, staging
from .programs import prefill as prompts

OPERATIONS = (
    "swap", "drop_staged", "release", "empty", "wipe", "decode", "prefill", "scores", "copy", "save", "restore",
    "forget", "penalise", "remember", "add_adapter", "remove_adapter", "encode", "forget_features",
)  # fmt: skip


class DeviceState:
    """The state of an engine on its devices; operations on it run on one thread. `dtype` is that of keys and values.

    Attributes:
      mesh: the devices.
      several: whether they belong to several processes.
      operations: {name: function} of all that `run` runs.
      parts: names of parts of the weights that the next ones may come without, which then stay: "mtp", "vision".
      weights: in the layout of `staging`; None once they are released.
      staged: the next weights.
      held: the memory of all layers, see `pool`; None while it is released.
      adapters: the loaded adapters.
      of_layer: the kind of each layer's pages.
      tables: see `penalties`.
      known: what drafts are made of, see `decode`; None without drafts.
    """

    def __init__(
        self, config, dtype, mesh: jax.sharding.Mesh, kinds: Sequence[Kind], counts: Sequence[int], options: Options,
        predicts: bool = False,
    ):  # fmt: skip
        """
        Args:
          predicts: drafts are made by the model's layer for multi-token prediction.
        """
        self.mesh, self.several = mesh, mesh.is_multi_process
        self._config, self._dtype, self._predicts = config, dtype, predicts
        self.parts = [*(["mtp"] if predicts else []), *(["vision"] if config.vision else [])]
        records = mtp.records(config, predicts)
        self._size = records, kinds, counts, options.slots, options.page
        self.of_layer = paging.of_layers(kinds, records)
        self._states = frozenset(i for kind in kinds if kind.states for i in kind.layers)
        self._kept_as = options.weights
        self._fused = {"steps": options.steps, "width": options.draft}
        self.operations: dict[str, Callable] = {
            name: functools.partial(self._on_mesh, getattr(self, name)) for name in OPERATIONS
        }
        self.run: Callable[..., Any] = self._run_here
        self.weights: Any = None
        self.staged: Any = None
        self.held: Any = None
        self.adapters = Adapters(mesh)
        self._hidden_RTD: Any = None  # of the last chunks of prompts, for `scores`
        self._saved: dict[int, list] = {}
        self._features: dict[str, Any] = {}  # of images
        self._kept: dict[str, Any] = {}  # parts in host memory, while weights are released
        with jax.set_mesh(mesh):
            self.tables = penalties.empty(options.slots, config.vocab)
            self.no_mask_SM = grammar.empty(options.slots, config.vocab)
            self.known: Any = None
            if options.draft > 1:
                of_texts = lambda: drafts.empty(options.slots, options.context)
                self.known = mtp_drafts.empty(options.slots, options.draft) if predicts else of_texts()
        self._run_here("empty")

    # How operations run.

    def _run_here(self, name: str, *data):
        return self.operations[name](*data)

    def _on_mesh(self, operation: Callable, *data):
        """Runs an operation with the engine's mesh, not the one that the calling thread may train on."""
        with turns.taken(self.mesh), jax.set_mesh(self.mesh):
            return operation(*data)

    @contextlib.contextmanager
    def leading(self, share: Share | None) -> Iterator[None]:
        """During the block `run` runs operations in all processes, while the others `follow`; None = there are none.

        An exception ends this process, and thus all, so that clients ask another server.
        """
        if share is None:
            yield
            return
        try:
            with lockstep.leader(self.operations, share) as self.run:
                yield
        except Exception as error:  # of any kind: the others wait for this process, and its thread ends
            processes.leave(error)
        finally:
            self.run = self._run_here

    def follow(self, share: Share) -> None:
        """In the other processes: runs what process 0 runs, until it is done."""
        lockstep.worker_loop(self.operations, share)

    # Weights and adapters.

    def stage(self, params, table: Table) -> Any:
        """Copies weights to the devices, next to the ones in use; any thread may call it, in each process by itself."""
        with contextlib.nullcontext() if self.several else jax.set_mesh(self.mesh):
            made = staging.stage(params, table, self.mesh, self._kept_as)
            if "mtp" in params:
                [made["mtp"]] = staging.layers(params["mtp"], mtp.table(self._config), self.mesh, self._kept_as)
            if "vision" in params:
                made["vision"] = staging.whole(params["vision"], vision.table(self._config.vision), self.mesh)
            return made

    def swap(self) -> None:
        """Takes the staged weights into use. A vision tower stays if they have none, and so does a layer for
        multi-token prediction."""
        for name in self.parts:
            if name not in self.staged:
                self.staged = {**self.staged, name: self.weights[name] if self.weights else self._again(name)}
        self.weights, self.staged, self._kept = self.staged, None, {}

    def has(self, name: str) -> bool:
        """Whether there are weights of one of `parts`, maybe in host memory."""
        return name in (self.weights or self._kept)

    def _again(self, name: str):
        """A part on the devices, from host memory."""
        kept, shardings = self._kept[name]
        put = lambda x, sharding: x if isinstance(x, jax.Array) else jax.device_put(x, sharding)
        return jax.tree.map(put, transfer.to_devices(kept), shardings)

    def drop_staged(self) -> None:
        """Forgets staged weights."""
        self.staged = None

    def add_adapter(self, factors: Factors) -> int:
        """Adds an adapter and returns its index; it must be `Adapters.check`ed."""
        return self.adapters.add(factors)

    def remove_adapter(self, index: int) -> None:
        self.adapters.remove(index)

    def _with_adapters(self):
        return self.weights if self.adapters.factors is None else self.weights | {"adapters": self.adapters.factors}

    # Memory.

    @property
    def bytes(self) -> int:
        """Memory of weights and caches on all devices, in bytes."""
        own = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        return sum(self.mesh.size * own(x) for x in jax.tree.leaves((self.weights, self.held)))

    def release(self, weights: bool, caches: bool) -> None:
        """Frees memory at once, while nothing runs, even if something else refers to it. Parts that the next weights
        may come without move to host memory."""
        for name in self.parts if weights and self.weights else ():
            found = self.weights[name]
            self._kept[name] = transfer.to_host(found), jax.tree.map(lambda x: x.sharding, found)
        for x in jax.tree.leaves((self.weights if weights else None, self.held if caches else None)):
            x.delete()
        if weights:
            self.weights = self.staged = None
        if caches:
            self.held = None

    def empty(self) -> None:
        """Makes empty caches."""
        self.held = pool.empty(*self._size, self._dtype)

    def wipe(self, counts: Sequence[int]) -> None:
        """Zeroes the first pages, as many of each kind, and all states, as `pool.wipe`."""
        used = np.array([counts[kind] if kind >= 0 else 0 for kind in self.of_layer], np.int32)
        self.held = pool.wipe(self.held, used, states=self._states)

    def copy(self, page_K2N: list[np.ndarray], keep_2N: np.ndarray, restore_2N: np.ndarray) -> None:
        """As `pool.copy`."""
        self.held = pool.copy(self.held, page_K2N, keep_2N, restore_2N, of_layer=self.of_layer, states=self._states)

    def save(self, number: int, page_KN: np.ndarray, slot: int) -> None:
        """Copies a sequence's pages, and its slot's states, to host memory, each process its part, as `number`."""
        self._saved[number] = transfer.to_host(
            pool.read(self.held, page_KN, slot, of_layer=self.of_layer, states=self._states)
        )

    def restore(self, number: int, page_KN: np.ndarray, slot: int) -> None:
        """Puts what was saved as `number` to other pages, and to a slot."""
        saved = transfer.to_devices(self._saved.pop(number))
        self.held = pool.restore(self.held, saved, page_KN, slot, of_layer=self.of_layer, states=self._states)

    def forget(self, number: int) -> None:
        """Drops what was saved as `number`."""
        del self._saved[number]

    # Generation.

    def encode(self, name: str, patches: dict[str, np.ndarray]) -> None:
        """Makes the features of an image, as `images.encode`, and keeps them as `name`."""
        self._features[name] = images.encode(self.weights["vision"], patches, tower=self._config.vision)

    def forget_features(self, names: Sequence[str]) -> None:
        for name in names:
            del self._features[name]

    def prefill(
        self, token_RT, next_R, start_R, length_R, total_R, adapter_R, slot_R, table_KRX, scored: bool, routed: bool,
        views: images.Views | None = None,
    ) -> np.ndarray | None:  # fmt: skip
        """Computes chunks of prompts, as `prefill.prefill`.

        Args:
          scored: keep hidden states for `scores`.
          routed: return the experts of the tokens.
          views: what they see of images that were encoded; None = they are text alone.
        """
        seen = views and images.seen(views, self._features, self._config.vision, self.weights["norm"].dtype)
        self.held, hidden_RTD, routed_RTLK = prompts.prefill(
            self._with_adapters(), self.held, token_RT, next_R, start_R, length_R, total_R, adapter_R, slot_R,
            table_KRX, seen, config=self._config, of_layer=self.of_layer,
        )  # fmt: skip
        self._hidden_RTD = hidden_RTD if scored else None
        if self.several:  # many programs with collectives that nobody waits for may stop for good, on the CPU
            jax.block_until_ready(hidden_RTD)
        return np.asarray(routed_RTLK) if routed else None

    def scores(self, row: int, target_T: np.ndarray, top: int) -> Any:
        """As `prefill.scores`, of a row of the last `prefill`."""
        made = prompts.scores(self._with_adapters(), self._hidden_RTD, row, target_T, config=self._config, top=top)
        return jax.device_get(made)

    def decode(
        self, state_SW: np.ndarray, table_KSX: np.ndarray, free: int, mask_SM: np.ndarray | None, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Runs a dispatch, as `decode.decode`; returns the named ones of its outputs, and position_S.

        Args:
          mask_SM: None = no slot has a grammar.
        """
        made = self._decode(decoding.decode, state_SW, table_KSX, free, mask_SM)
        self.held, self.tables, self.known, out, position_S = made
        return {name: np.asarray(out[name]) for name in names}, np.asarray(position_S)

    def compile_decode(self, state_SW: np.ndarray, table_KSX: np.ndarray) -> None:
        """Compiles what `decode` runs, and changes nothing; any thread may call it while others run operations."""
        with jax.set_mesh(self.mesh):
            self._decode(decoding.decode.lower, state_SW, table_KSX, 1, None).compile()

    def _decode(self, use: Callable, state_SW, table_KSX, free: int, mask_SM: np.ndarray | None) -> Any:
        mask_SM = self.no_mask_SM if mask_SM is None else mask_SM
        return use(
            self._with_adapters(), self.held, state_SW, table_KSX, free, self.tables, mask_SM, self.known,
            config=self._config, of_layer=self.of_layer, **self._fused,
        )  # fmt: skip

    def penalise(self, slot: int, tokens: Sequence[int], biases: Sequence[tuple[int, float]]) -> None:
        """As `penalties.rewritten`."""
        self.tables = penalties.rewritten(self.tables, slot, tokens, biases)

    def remember(self, slot: int, prompt: Sequence[int], done: Sequence[int]) -> None:
        """As `drafts.rewritten`; or forgets the drafts of the slot's last request."""
        if self._predicts:
            self.known = mtp_drafts.forgotten(self.known, slot)
        else:
            self.known = drafts.rewritten(self.known, slot, prompt, done)
