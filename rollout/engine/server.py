"""Serves the embedded engine with SGLang's HTTP API: `serve(path)`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax

from ... import models
from ...adapters import hf
from ...adapters.data import images
from ...core import param
from ...models import config_json
from ...models.layers import native
from ...parallel.multihost import agreement
from ...parallel.multihost.channel import Share
from ..processes import addresses, http_process, joining, keys
from ..servers.engine_options import DEFAULTS, EngineOptions
from ..servers.labels import label_of, manifest_bytes
from . import bench, budget, hosts, replicas
from .checkpoint import blind, read_weights
from .engine import Engine
from .grammar import Grammars
from .options import Options
from .routes.app import app
from .routes.service import Service
from .slots import mesh_of

UVICORN: dict[str, Any] = {  # of uvicorn; the last: seconds for responses in progress at shutdown
    "loop": "auto", "lifespan": "on", "timeout_graceful_shutdown": 5
}  # fmt: skip
MADE_BY = {"mtp": "drafts by multi-token prediction", "text": "drafts from texts"}


def serve(
    path: str,
    options: EngineOptions = DEFAULTS,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    dtype: str = "auto",
    version: str | None = None,
    seed: int = 0,
    api_key: str | None = None,
    style: str = "",
    reasoning: bool = True,
    loading: contextlib.AbstractContextManager | None = None,
    join: str = "",
) -> None:
    """Serves the checkpoint folder `path` until SIGTERM or SIGINT; prints a line that begins with the URL when ready.

    In a job of several processes (`parallel.multihost.processes`) the mesh has the devices of all. Process 0 serves,
    the others follow it until it ends.

    Args:
      port: 0 = any free port.
      version: label of the weights until the first update; None = that of a published version, else "default".
      seed: from which requests without a seed get theirs.
      dtype: of weights and computation; "auto" = that of the platform.
      api_key: key that requests must send as `Authorization: Bearer KEY`; whoever has it can also replace the weights.
      style, reasoning: as for `OpenAI`.
      loading: entered while process 0 loads the weights.
      join: address of a run that takes servers as they come, `--servers join+http://HOST:PORT`; "" = none.

    Raises:
      ValueError: the address is not available, or it is reachable from other machines and there is no key, or the run
        to join cannot reach it; the folder cannot be loaded; processes have other options or weights than process 0.
        Nothing is served then.
      RuntimeError: another process has ended, or the engine of several.
    """
    with hosts.joined() as (index, share), contextlib.ExitStack() as stack:
        if index == 0:
            guarded = http_process.bind_guarded(host, port, key=api_key, variable=keys.SERVER, what="serve")
            sock = stack.enter_context(contextlib.closing(guarded))
            own = _seen_from(join, host, sock.getsockname()[1])
        with loading if loading and index == 0 else contextlib.nullcontext():
            service = load(path, share, options, dtype=dtype, version=version or published_label(path), seed=seed)
        engine = service.engine
        if index > 0:
            engine.device.follow(share)
            return
        ready = f"{http_process.address((host, sock.getsockname()[1]))} serves {described(service)}"
        with hosts.serving(engine):
            # For a GPU, XLA measures kernels while it compiles: nothing else should run then.
            if isinstance(engine, Engine) and jax.process_count() == 1 and jax.default_backend() != "gpu":
                engine.compile_ahead()
            made = app(service, api_key, style, reasoning)
            with joining.joined(join, own) as leaving:

                def ending() -> None:
                    leaving.set()
                    engine.abort_all()

                http_process.serve(made, sock, ready, ending=ending, **UVICORN)


def _seen_from(run: str, host: str, port: int) -> str:
    """The address of this server for the run at the address `run`, "" = none; if it listens at all addresses of this
    machine, the one on the route there.

    Raises ValueError if `run` is no address, or on another machine, which does not reach a loopback address.
    """
    if run:
        addresses.check(run, "join")
        if host in ("", "0.0.0.0", "::"):
            host = http_process.towards(run)
        elif http_process.loopback(host) and not http_process.loopback(urlsplit(run).hostname or ""):
            raise ValueError(f"join: {run} cannot reach {host}; give --host an address of this machine, and a key")
    return http_process.address((host, port))


def described(service: Service) -> str:
    """What is served, in a line: model, parameters and their dtype, devices, memory for tokens, slots, and extras
    such as drafts."""
    engine, path = service.engine, service.path
    config, options = engine.config, engine.options
    stored = config_json.quantisation(json.loads(config.source))
    line = f"{config.family} {path}: {_short(param.count(models.table(config)))} parameters in {service.dtype}"
    line += f" (stored in {stored.method})" if stored else ""
    line += f" kept in {options.weights}" if options.weights != "auto" else ""
    line += f" on {options.mesh}, a cache of {engine.stats()['capacity']:,} tokens"
    line += f" in {options.kv_cache_dtype}" if options.kv_cache_dtype != "auto" else ""
    line += f", {engine.slots} slots of {engine.context} tokens"
    if engine.draft_from:
        line += f", {MADE_BY[engine.draft_from]}"
    if service.sees:
        line += ", images"
    elif why := blind(path):
        line += f", {why}"
    if jax.default_backend() == "cpu" and (lacking := native.missing()):
        line += f", computed by XLA ({lacking})"
    if service.tokenizer is None:
        line += ", token ids only (the folder has no tokenizer)"
    return line


def _short(count: int) -> str:
    """A number with three digits, such as 596M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def benchmark(path: str, options: EngineOptions, *, dtype: str) -> None:
    """Prints how fast the checkpoint folder `path` would be served, as a table.

    Raises:
      ValueError: the folder cannot be loaded, or the context is too short to measure.
    """
    with hosts.joined() as (index, share):
        engine = load(path, share, options, dtype=dtype, version="default").engine
        if index > 0:
            engine.device.follow(share)
            return
        with hosts.serving(engine):
            prompt, answer = bench.lengths(engine.context, options.draft)
            print(
                f"{engine.config.family} {path}: prompts of {prompt} random tokens, answers of {answer}, "
                f"{known_dtype(dtype)}, {options.mesh} of {jax.device_count()} ({jax.devices()[0].device_kind})"
                + (f", {MADE_BY[engine.draft_from]}" if engine.draft_from else ""),
                flush=True,
            )
            for line in bench.table(bench.measure(engine)):
                print(line, flush=True)


def load(path: str, share: Share, options: EngineOptions, *, dtype: str, version: str, seed: int = 0) -> Service:
    """The service of the checkpoint folder `path`, over all processes of the job.

    Raises:
      ValueError: as `prepare`; processes have other options or weights than process 0.
    """
    dtype = known_dtype(dtype)
    config, params, checksums = read_weights(path, dtype, sees=blind(path) is None)
    agreement.same(
        "options and weights", dtype=dtype, options=options, version=version, seed=seed, weights=checksums,
        **hf.settings(path),
    )  # fmt: skip
    service = prepare(path, options, config, params, checksums, dtype=dtype, version=version, seed=seed)
    hosts.connect(service, share)
    return service


def known_dtype(dtype: str) -> str:
    """The dtype of weights and computation that "auto" stands for on this platform; any other is returned as given."""
    return models.default_dtype(jax.default_backend()) if dtype == "auto" else dtype


def published_label(path: str) -> str:
    """The label of the published version in the folder `path`; "default" if it is another checkpoint."""
    where = Path(path) / hf.MANIFEST
    content = manifest_bytes(where)
    if content is None or hf.json_object(content, where).get("version") is None:
        return "default"
    return label_of(content, where)


def check(path: str, options: EngineOptions, *, dtype: str, devices: Sequence[jax.Device] = ()) -> None:
    """Raises ValueError as `prepare` would if the model of the checkpoint folder `path` cannot be served with these
    options: split like this, or in this memory. Reads config.json alone, and thus counts no layer for multi-token
    prediction.

    Args:
      devices: as many as the mesh has; none = the first of this process.
    """
    config = hf.read_config(path)
    if blind(path) is None:
        config = models.with_vision(config)
    made = Options(**vars(_within(options, config).engine)).resolved()
    made.mesh.check(config)
    each = made.mesh.replica
    budget.pages(config, known_dtype(dtype), made, mesh_of(each, devices[: each.devices]))


def _within(options: EngineOptions, config) -> EngineOptions:
    """The options, with a context within the model's."""
    return replace(options, context=min(options.context, config.context))


def prepare(
    path: str, options: EngineOptions, config, params, checksums: dict[str, str], *, dtype: str, version: str,
    seed: int = 0,
) -> Service:  # fmt: skip
    """Makes an engine with a copy of these weights, and its service. The folder `path` has the tokenizer, if any, the
    layer for multi-token prediction, with which drafts are made, unless the weights have it, and the image processor of
    a vision tower.

    Raises:
      ValueError: as `images.load`, `images.Processor.check` and `Engine`.
    """
    decode, grammars = None, None
    if tokenizer := hf.tokenizer_in(Path(path)):
        config = hf.with_ends(config, tokenizer)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        grammars = Grammars(tokenizer, config.vocab, config.eos)
    options = _within(options, config)
    if options.draft > 1 and "mtp" not in params and (predictor := hf.mapped_mtp(path, config, dtype)):
        params = {**params, "mtp": predictor}
    agreement.same("layer for multi-token prediction, and ends of answers", mtp="mtp" in params, ends=config.eos)
    processor = images.load(path) if config.vision else None
    if processor:
        processor.check(config.vision)
    engine = replicas.serving(
        config, params, version=version, decode=decode, grammars=grammars, processor=processor, seed=seed,
        **vars(options),
    )  # fmt: skip
    return Service(engine, tokenizer, str(path), checksums, dtype, processor)
