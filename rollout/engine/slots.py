"""The slots of an engine: assigns requests to slots, gives them memory, and has the devices compute them.

A request in a slot first computes its prompt (`prompts`), then decodes. Pages are taken as sequences grow. When none is
left, cached prefixes go first, then the requests that came last: their pages are kept in host memory until there is
room again. Owned by one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ... import models
from ...core import param
from ...models import mtp, paging, vision
from ...models.layer import rope_switches
from ...models.lora import Lora
from ...parallel import mesh
from ..servers.engine_mesh import ONE_DEVICE, EngineMesh
from . import adapters, budget, grammar
from .adapters import Factors
from .cache import Cache
from .device_state import DeviceState
from .live import Live
from .options import Options
from .programs.decode import COLUMNS, INTEGERS, REALS
from .prompts import Prompts, pairs
from .request import STOPS


def devices_of(split: EngineMesh) -> list[jax.Device]:
    """The first devices of this process, as many as needed; in a job of several processes those of all.

    Raises ValueError if there are not so many, or the job has more.
    """
    if (count := jax.process_count()) > 1:
        if split.dp > 1 or split.devices != len(jax.devices()):
            raise ValueError(
                f"Engine: tp x ep must be the number of all devices of {count} processes, {len(jax.devices())}, and dp "
                f"1, got {split}; start a job for each replica"
            )
        return jax.devices()
    local = jax.local_devices()
    if split.devices > len(local):
        virtual = f"; JAX_NUM_CPU_DEVICES={split.devices} makes virtual ones of a CPU" * (local[0].platform == "cpu")
        raise ValueError(f"Engine: {split} needs {split.devices} devices, got {len(local)} of this process{virtual}")
    return local[: split.devices]


def mesh_of(split: EngineMesh = ONE_DEVICE, devices: Sequence[jax.Device] = ()) -> jax.sharding.Mesh:
    """The mesh of an engine on these devices; none = as `devices_of`."""
    devices = devices or devices_of(split)
    if len(devices) == 1:
        return jax.sharding.Mesh(np.array(devices[0]), ())
    return mesh.generating(split.ep, split.tp, devices)


def _switches(config, context: int) -> tuple[int, ...]:
    """The lengths within the context at which rotary embeddings change once.

    Raises:
      ValueError: beyond one of them they depend on each length.
    """
    found = set(rope_switches(config.records))
    if dynamic := found - set(models.trie_lengths(config)):
        if context > min(dynamic):
            raise ValueError(
                f"Engine: context must be at most max_position_embeddings, {min(dynamic)} tokens, with dynamic rope, "
                f"because every further token would change all cached keys, got {context}"
            )
    return tuple(sorted(length for length in found - dynamic if length < context))


class Slots:
    """What `count` sequences of at most `context` tokens have, and where they are.

    Attributes:
      seated: {slot: Live}, of requests whose prompts are being computed and of those that decode.
      running: {slot: Live} of those that decode.
      free: the other slots.
      preempted: requests that had to give up their memory since the list was last emptied, the earliest first.
      device: what is on the devices.
      cache: their memory.
      switches: lengths above which sequences are computed otherwise (`models.layer.rope_switches`).
      predicts: drafts are made by the model's layer for multi-token prediction, `params["mtp"]`.
      counts: totals: prefills, prefilled_tokens, dispatches, preemptions, drafted, accepted.
    """

    def __init__(self, config, params, options: Options, on: jax.sharding.Mesh):
        self._dtype = params["embed"].dtype
        self.predicts = options.draft > 1 and "mtp" in params
        # Refuses more slots than there is memory for.
        kinds, counts = budget.pages(config, self._dtype, options, on, self.predicts)
        count, context = options.slots, options.context
        self.count, self.context, self.steps, self.width = count, context, options.steps, options.draft
        self.config = dataclasses.replace(config, eos=(), source="{}")  # similar models share compiled programs
        self.switches = _switches(config, context)
        self.seated: dict[int, Live] = {}
        self.running: dict[int, Live] = {}
        self.free = dict.fromkeys(range(count))  # an ordered set
        self.preempted: list[Live] = []
        kv_dtype = paging.kv_dtype(self._dtype, options.kv_cache_dtype)
        self.device = DeviceState(self.config, kv_dtype, on, kinds, counts, options, self.predicts)
        self.swap(self.stage(params))
        self.cache = Cache(kinds, counts, self.device, slots=count, context=context, C=options.page)
        self._prompts = Prompts(self.cache, self.device, self._room)
        self.counts = self._prompts.counts
        self._state = np.zeros((count, len(COLUMNS) + STOPS), np.int32)
        self._masks = grammar.Masks(count, config.vocab)

    def stage(self, params):
        """Prepares weights for `swap`, next to the ones in use.

        Args:
          params: "mtp", the layer for multi-token prediction, and "vision", the vision tower, may be missing later on;
            they are ignored unless drafts are made by the one, and images read by the other.

        Raises:
          ValueError: they do not match the config, or the dtype of the first ones.
        """
        params = {name: w for name, w in params.items() if name in self.device.parts or name not in ("mtp", "vision")}
        table = models.table(self.config)
        if "vision" not in params and self.device.has("vision"):
            text = models.table(vision.without_vision(self.config))
            alike = len(params["stacks"]) == len(table.stacks)  # the tower was left out, or never loaded
            table = dataclasses.replace(table, inner={}) if alike else text
        expected = param.abstract(table, self._dtype)
        if "mtp" in params:
            expected["mtp"] = param.abstract(mtp.table(self.config), self._dtype)
        shapes = lambda tree: {
            jax.tree_util.keystr(path, simple=True, separator="."): (tuple(x.shape), jnp.dtype(x.dtype).name)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        wanted, given = shapes(expected), shapes(params)
        for name in sorted(wanted.keys() | given.keys()):
            if wanted.get(name) != given.get(name):
                raise ValueError(
                    f"Engine: parameter {name} must be {wanted.get(name, 'absent')}, got {given.get(name, 'none')}"
                )
        return self.device.stage(params, table)

    def swap(self, weights) -> None:
        """Takes weights from `stage` into use; other processes take what they have staged."""
        self.device.staged = weights
        self.device.run("swap")

    def release(self, *, weights: bool, caches: bool) -> None:
        """Frees device memory at once, while nothing runs. `clear` makes new caches; weights have to be set."""
        self.device.run("release", weights, caches)
        if caches:
            self.cache.prefixes.clear()

    def adapter_factors(self, spec: Lora, tree) -> Factors:
        """Converts an adapter for `add_adapter`; raises as `adapters.factors`."""
        return adapters.factors(spec, tree, models.table(self.config), self._dtype)

    def add_adapter(self, factors: Factors) -> int:
        """Adds an adapter and returns its index; raises as `Adapters.check`."""
        self.device.adapters.check(factors)
        return self.device.run("add_adapter", factors)

    def remove_adapter(self, index: int) -> None:
        """Frees the index of an adapter that no request uses."""
        self.device.run("remove_adapter", index)

    def clear(self) -> None:
        """Forgets cached prefixes; while no request has a slot, wipes pages, to drop any NaN of diverged weights."""
        self.cache.clear(idle=not self.seated)
        self._prompts.forget()

    def admits(self, live: Live) -> bool:
        """Whether there is a slot for a request, and, as far as is known now, memory for its prompt."""
        if not self.free:
            return False
        return not self.seated or self.cache.fits(live, len(self.seated))

    def enter(self, live: Live) -> None:
        """Gives a request a slot, which must be free."""
        live.slot = next(iter(self.free))
        del self.free[live.slot]
        self.seated[live.slot] = live
        self._prompts.enter(live)

    def leave(self, live: Live) -> None:
        """Frees the request's slot and pages, if it has any."""
        if live.slot is None:
            return
        self._prompts.drop(live)
        self.cache.give(live)
        self.seated.pop(live.slot)
        self.running.pop(live.slot, None)
        self.free[live.slot] = None
        self._state[live.slot] = 0
        live.slot = None

    def compute_prompts(self, budget: int) -> list[Live]:
        """Computes about `budget` tokens of prompts; returns requests that need no more than their prompts.

        Running requests that have got longer than one of their `switches` become prompts again.
        """
        ended = []
        for live in [live for live in self.running.values() if live.total == self._state[live.seat, COLUMNS["end"]]]:
            self.running.pop(live.seat)
            self._state[live.seat] = 0
            self.cache.give(live)
            self._prompts.enter(live)
        for live in self._prompts.advance(budget):
            if not live.request.sampling.max_new_tokens:
                self.leave(live)
                ended.append(live)
                continue
            self.running[live.seat] = live
            self._write(live, self._state[live.seat])
            request, done = live.request, live.progress.tokens
            if self.width > 1:
                self.device.run("remember", live.seat, request.prompt, done)
            if request.sampling.penalised:
                self.device.run("penalise", live.seat, done, request.sampling.logit_bias)
        return ended

    def step(self, wanted: int) -> list[tuple[Live, list[int], list[float], list, list, list]]:
        """Runs a dispatch of decode steps, which stops early once `wanted` slots are idle; returns (request, tokens,
        logp, likeliest tokens, experts of the input tokens, tokens that could be drawn) for each running request."""
        self._make_room_to_decode()
        position, lives = COLUMNS["position"], self.running.values()
        mask_SM = self._masks.fill({slot: live.matcher for slot, live in self.running.items() if live.matcher})
        ranked = any(live.request.top_logprobs for live in lives)
        names = ["token", "logp", *(["drafted"] if self.width > 1 else []), *(["top_logp", "top_id"] if ranked else [])]
        names += ["routed"] if any(live.request.routed_experts for live in lives) else []
        names += ["kept", "kept_logp"] if any(live.request.sampling_mask for live in lives) else []
        out, self._state[:, position] = self.device.run(
            "decode", self._state, self.cache.table_KSX, wanted, mask_SM, names
        )
        self.counts["dispatches"] += 1
        valid_USQ = out["token"] >= 0
        if self.width > 1:
            self.counts["drafted"] += int(np.sum(out["drafted"]))
            self.counts["accepted"] += int(np.sum(valid_USQ[..., 1:]))
        made = []
        for slot, live in self.running.items():
            own = lambda name, slot=slot: out[name][:, slot][valid_USQ[:, slot]]  # of its tokens, in order
            k, tokens = live.request.top_logprobs, own("token").tolist()
            top = pairs(own("top_logp")[:, :k], own("top_id")[:, :k]) if k else []
            routed = list(own("routed")) if live.request.routed_experts else []
            masks: list = []
            if live.request.sampling_mask:
                rows = zip(own("kept_logp").tolist(), own("kept"), strict=True)
                masks = [(p, ids[ids >= 0].tolist()) for p, ids in rows]
            made.append((live, tokens, own("logp").tolist(), top, routed, masks))
            self._state[slot, COLUMNS["token"]] = tokens[-1]
            self.cache.behind(live, int(self._state[slot, position]))
            if live.matcher:
                live.matcher.take(tokens[0])
        return made

    def compile_step(self) -> None:
        """Compiles what `step` runs, and changes nothing; any thread may call it."""
        self.device.compile_decode(self._state, self.cache.table_KSX)

    def _make_room_to_decode(self) -> None:
        """Gives each running request pages for a dispatch, the earliest first."""
        for live in sorted(self.running.values(), key=lambda live: live.number):
            while live.slot is not None:
                position, end = (int(self._state[live.slot, COLUMNS[name]]) for name in ("position", "end"))
                last = min(position + self.steps * self.width, end) - 1  # the last token that a dispatch may put there
                if self.cache.reaches(live, last):
                    break
                if not self._prompts.next_page(live, position):
                    self._preempt(live)

    def _room(self, live: Live, kind: int) -> bool:
        """Makes room for a page: drops a cached prefix, or else takes the memory of the request that came last, if it
        came after `live`."""
        if self.cache.prefixes.evict(kind):
            return True
        last = max(self.seated.values(), key=lambda other: other.number)
        if last.number <= live.number:
            return False
        self._preempt(last)
        return True

    def _preempt(self, live: Live) -> None:
        """Takes a request's memory; what it has decoded is kept in host memory."""
        if live.slot in self.running:
            self.cache.save(live, int(self._state[live.slot, COLUMNS["position"]]))
        self.counts["preemptions"] += 1
        live.progress.retractions += 1
        self.leave(live)
        self.preempted.append(live)

    @staticmethod
    def _write(live: Live, row: np.ndarray) -> None:
        """Fills a slot's row of the state."""
        request, sampling, done = live.request, live.request.sampling, live.progress.tokens
        prompt = len(request.prompt)
        values = {
            "token": (done or request.prompt)[-1],
            "position": prompt + len(done) - 1,
            "end": live.end,
            "least": 0 if live.matcher else prompt + sampling.min_new_tokens,  # a matcher's mask takes care of it
            "active": 1,
            "top": request.top_logprobs,
            "seed_high": live.seed >> 32,
            "seed_low": live.seed & 0xFFFFFFFF,
            "top_k": sampling.top_k,
            "adapter": live.adapter.index if live.adapter else 0,
            "grammar": int(live.matcher is not None),
            "penalised": int(sampling.penalised),
            "shift": live.images.shift if live.images else 0,
            "masked": int(request.sampling_mask),
        }
        row.view(np.uint32)[: len(INTEGERS)] = [values[name] & 0xFFFFFFFF for name in INTEGERS]
        row.view(np.float32)[len(INTEGERS) : len(COLUMNS)] = [getattr(sampling, name) for name in REALS]
        row[len(COLUMNS) :] = -1
        row[len(COLUMNS) : len(COLUMNS) + len(live.stops)] = list(live.stops)
