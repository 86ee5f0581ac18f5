"""The programs of an engine, lowered from shapes for devices that need not be here: no weights, no requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ... import models
from ...core import param
from ...models import mtp, paging, vision
from ...models.layer import Recurrent
from ...parallel import mesh
from . import budget, grammar
from .options import Options
from .programs import decode as decoding
from .programs import drafts, images, mtp_drafts, penalties, pool, prefill, staging
from .request import FEW, STOPS

IMAGE = 1024  # tokens of the image that `encode` reads


def programs(config, dtype: str, options: Options, memory: float, predicts: bool) -> dict[str, Callable]:
    """{name: f(devices) -> jax.stages.Lowered} of the programs that an engine runs most, at their largest shapes.

    Args:
      config: the model's, with its tower if it reads images.
      dtype: of the weights.
      options: `resolved`, of one replica.
      memory: bytes of a device.
      predicts: drafts are made by the model's layer for multi-token prediction.
    """
    lower = {"decoding": _decode, "prefill": _prefill, "scores of prompts": _scores}
    if config.vision:
        lower["an image"] = _encode
    on = lambda f, devices: f(_Shapes(config, dtype, options, memory, predicts, devices))
    return {name: functools.partial(on, f) for name, f in lower.items()}


class _Shapes:
    """What an engine has on its devices, as shapes and shardings."""

    def __init__(self, config, dtype: str, options: Options, memory: float, predicts: bool, devices: Sequence[Any]):
        self.on = mesh.generating(options.mesh.ep, options.mesh.tp, devices)  # with axes, so that it has a platform
        self.config = dataclasses.replace(config, eos=(), source="{}")  # as `Slots`
        self.options, self.predicts, self.dtype = options, predicts, jnp.dtype(dtype)
        kinds, counts = budget.pages(config, dtype, options, self.on, predicts, memory)
        records = mtp.records(config, predicts)
        self.of_layer = paging.of_layers(kinds, records)
        with jax.set_mesh(self.on):
            table = models.table(config)
            params = param.abstract(table, dtype)
            self.weights: dict[str, Any] = staging.stage(params, table, self.on, options.weights)
            if predicts:
                own = mtp.table(config)
                [self.weights["mtp"]] = staging.layers(param.abstract(own, dtype), own, self.on, options.weights)
            if config.vision:
                self.weights["vision"] = staging.whole(params["vision"], vision.table(config.vision), self.on)
            kept = paging.kv_dtype(jnp.dtype(dtype), options.kv_cache_dtype)
            self.held = pool.abstract(records, kinds, counts, options.slots, options.page, kept)
        self.pages = len(kinds), -(-options.context // options.page)

    def array(self, dtype, *shape: int):
        """One that is whole on each device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.on, PartitionSpec()))

    def made(self, f: Callable):
        """What `f` makes, whole on each device."""
        with jax.set_mesh(self.on):
            return jax.tree.map(lambda x: self.array(x.dtype, *x.shape), jax.eval_shape(f))


def _host(*shape: int) -> np.ndarray:
    """What the host gives a program."""
    return np.zeros(shape, np.int32)


def _decode(of: _Shapes) -> jax.stages.Lowered:
    slots, draft, vocab = of.options.slots, of.options.draft, of.config.vocab
    known = None
    if draft > 1:
        texts = lambda: drafts.empty(slots, of.options.context)
        known = of.made((lambda: mtp_drafts.empty(slots, draft)) if of.predicts else texts)
    state_SW, table_KSX = _host(slots, len(decoding.COLUMNS) + STOPS), _host(of.pages[0], slots, of.pages[1])
    tables = of.made(lambda: penalties.empty(slots, vocab))
    if of.on.size > 1 and vocab % of.on.shape["tp"] == 0:
        split = NamedSharding(of.on, PartitionSpec(None, "tp"))  # as `penalties.pinned`
        tables = dataclasses.replace(
            tables, count_SV=jax.ShapeDtypeStruct(tables.count_SV.shape, tables.count_SV.dtype, sharding=split)
        )
    mask_SM = of.made(lambda: grammar.empty(slots, vocab))
    with jax.set_mesh(of.on):
        return decoding.decode.lower(
            of.weights, of.held, state_SW, table_KSX, 1, tables, mask_SM, known,
            config=of.config, of_layer=of.of_layer, steps=of.options.steps, width=draft,
        )  # fmt: skip


def _chunks(of: _Shapes) -> tuple[int, int]:
    """Chunks of prompts that are computed at a time, and tokens of each: the largest of `Prompts`."""
    T, recurrent = of.options.page, any(isinstance(layer, Recurrent) for layer in of.config.records)
    with jax.set_mesh(of.on):
        return prefill.rows(T, of.options.slots if recurrent else None), T


def _prefill(of: _Shapes) -> jax.stages.Lowered:
    R, T = _chunks(of)
    rows, table_KRX = [_host(R) for _ in range(6)], _host(of.pages[0], R, of.pages[1])
    seen = None
    if of.config.vision:
        feature_NRTD = of.array(of.dtype, 1 + len(of.config.vision.taps), R, T, of.config.vision.out)
        seen = images.Seen(feature_NRTD, _host(R, T), _host(3, R, T))
    with jax.set_mesh(of.on):
        return prefill.prefill.lower(
            of.weights, of.held, _host(R, T), *rows, table_KRX, seen,
            config=of.config, of_layer=of.of_layer,
        )  # fmt: skip


def _scores(of: _Shapes) -> jax.stages.Lowered:
    R, T = _chunks(of)
    hidden_RTD = of.array(of.dtype, R, T, of.config.embed)
    with jax.set_mesh(of.on):
        return prefill.scores.lower(of.weights, hidden_RTD, 0, _host(T), config=of.config, top=FEW)


def _encode(of: _Shapes) -> jax.stages.Lowered:
    tower = of.config.vision
    count = IMAGE * tower.unit
    patches = {
        "patch": np.zeros((1, count, tower.pixels), np.float32), "patch_frame": _host(1, count),
        "patch_place": _host(1, count, 4), "order": _host(IMAGE),
        **({"patch_window": _host(1, count)} if tower.window else {}),
    }  # fmt: skip
    with jax.set_mesh(of.on):
        return images.encode.lower(of.weights["vision"], patches, tower=tower)
