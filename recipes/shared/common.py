"""Helpers of every recipe: devices and memory, models from paths, the run's directory, generation servers."""

import contextlib
import functools
import math
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from areax import models
from areax.adapters import hf, orbax, safetensors, tokenizer
from areax.adapters.command_line.options import json_object
from areax.adapters.launch import devices
from areax.adapters.report import chrome_trace
from areax.adapters.runtime import hub
from areax.adapters.runtime.malloc import keep_memory as keep_memory
from areax.adapters.tracking import progress
from areax.core import metrics, param
from areax.core.balance import Balance
from areax.models.layer import rope_switches
from areax.models.vision import Tower
from areax.parallel import mesh, rules
from areax.parallel.multihost import agreement
from areax.recipes.shared import terminal
from areax.recipes.shared.vision import Vision, said
from areax.rollout import client
from areax.rollout.engine import in_process, server
from areax.rollout.processes import folders, keys, memory
from areax.rollout.servers import local
from areax.rollout.servers.server import Handover, Origin

SHARE = "0.94"  # of GPU memory for JAX: plans count on `planner.figures.USABLE` of it
TOKEN = 40  # bytes of a token in a batch's arrays
SEEN = "image", "video", "patch", "frames", "channels", "merge", "window"  # what a tower's arrays depend on
RUN = "run.lock"  # in a run's directory: locked while a process trains there; holds the run's id

merge = jax.jit(metrics.merge_trees)  # one computation instead of five a metric


def share_devices() -> None:
    """Makes this process and servers that it starts return freed GPU memory; call it before JAX computes anything.

    By default JAX reserves most of a GPU and keeps it; its "platform" allocator allocates what a computation needs and
    frees it afterwards. An allocator set in the environment is kept.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")


def take_devices() -> None:
    """Makes this process take nearly all memory of its GPUs, of which JAX reserves three quarters by default; call it
    before JAX computes anything. A share set in the environment is kept."""
    if not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"} & set(os.environ):
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", SHARE)


def open_mesh(layout: mesh.Layout, *, rows: int | str, length: int) -> jax.sharding.Mesh:
    """Makes the mesh of a layout; `rows` may be "auto".

    Raises:
      ValueError: it does not fit the devices, or does not divide microbatches of `rows` rows of `length` tokens.
    """
    batch = math.prod(getattr(layout, axis) for axis in mesh.BATCH)
    for option, value, axes, over in (
        ("rows", rows, " x ".join(mesh.BATCH), batch), ("length", length, "cp", layout.cp)
    ):  # fmt: skip
        if value != "auto" and int(value) % over:
            raise ValueError(f"--{option} must be a multiple of {axes} = {over}, got {value}")
    return mesh.make(layout)


def open_model(
    path: str, init: Literal["checkpoint", "random"], seed: int, on: jax.sharding.Mesh, dtype: str | None = "float32",
    vision: Vision = "auto", mtp: bool = False,
):  # fmt: skip
    """(config, sharded weights) of a model, a directory or hub name, of which "random" needs only config.json.

    Args:
      dtype: of the weights: fp32 for master weights; None = as stored, for frozen ones.
      vision: as `vision.decided` gives it; "auto" = without the vision tower, if the model has one.
      mtp: with the layer for multi-token prediction.

    Raises:
      ValueError: the model has no vision tower to load, or weights are random; it has no layer for multi-token
        prediction; or as `check_same`.
    """
    if init == "checkpoint":
        path = hub.folder(path, weights=True)
        check_weights(path)
        check_same(path)
        with terminal.loading(path, said(hf.read_config(path), vision)):
            config, params = hf.load(path, dtype=dtype, mesh=on, vision=vision != "auto", mtp=mtp)
        return with_tower(config, vision), params
    if vision != "auto":
        raise ValueError("--init random draws the text model alone, which reads no images; train from a checkpoint")
    check_same(hub.folder(path), weights=False)
    config = models.text_only(hf.read_config(hub.folder(path)))  # nothing draws a wrapper's other parts
    config = models.with_mtp(config) if mtp else config
    with terminal.phase(f"drawing new weights for {path}"):
        return config, draw(models.table(config), seed, on)


def with_tower(config, vision: Vision):
    """The Config of a model that was loaded with its tower unless that is "auto", with the tower frozen or not."""
    return replace(config, vision=replace(config.vision, trained=vision == "trained")) if config.vision else config


def check_weights(path: str) -> None:
    """Raises ValueError if a model's directory has no weights, which --init random does not need."""
    place = Path(path)
    if place.is_dir() and not any(place.glob("*.safetensors*")):
        safetensors.refuse_pickles(place)
        raise ValueError(
            f"--model {path}: needs weights, model.safetensors or {safetensors.INDEX}, got neither; or start from new "
            "ones with --init random"
        )


def check_same(path: str, *, weights: bool = True) -> None:
    """Raises ValueError if processes of the job find different settings, or weights, in a model's directory."""
    if jax.process_count() > 1:
        agreement.same(f"settings in {path}", **hf.settings(path))
        if weights:
            agreement.same(f"weights in {path}", **hf.fingerprint(path))


def open_tokenizer(path: str, chat_template_kwargs: str = "") -> Any:
    """The tokenizer of a model, whose chat template is given the variables of `--chat-template-kwargs`."""
    variables = json_object("--chat-template-kwargs", chat_template_kwargs)
    with progress.reminding(f"reading the tokenizer of {path}"):
        tokens = tokenizer.load(path)
    try:
        return tokenizer.bind(tokens, variables)
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs: {error}; {path}") from None


def say_added_ends(model: str, config, tokens) -> None:
    """Says which tokens end completions too, because the tokenizer's chat template ends turns with them, though the
    model's files do not name them, as those of base models."""
    added = hf.with_ends(config, tokens).eos[len(config.eos) :]
    if added and jax.process_index() == 0:
        names = ", ".join(map(tokens.convert_ids_to_tokens, added))
        progress.say(
            f"{model}: config.json and generation_config.json do not name {names}, with which its tokenizer ends a "
            "turn or a text; completions end there too, and exports name it"
        )


def open_teacher(path: str, run: models.Run, on: jax.sharding.Mesh, vision: Tower | None = None, ids: int = 0):
    """(config, sharded weights) of a teacher, in the dtype of its computation.

    Args:
      vision: the student's tower, if the student reads images; the teacher then reads them, too.
      ids: of its own tokenizer, which must be in its vocabulary.

    Raises:
      ValueError: ids are outside of the vocabulary; images are other patches for the teacher; or as `check_same`.
    """
    folder, dtype = hub.folder(path, weights=True), run.dtype or models.default_dtype(jax.default_backend())
    check_same(folder)
    with terminal.loading(folder):
        config, params = hf.load(folder, dtype=dtype, mesh=on, vision=vision is not None)
    if config.vocab < ids:
        raise ValueError(f"--teacher {path}: must have a token for each of its tokenizer's {ids}, got {config.vocab}")
    for name in SEEN if vision else ():
        if (got := getattr(config.vision, name)) != (wanted := getattr(vision, name)):
            raise ValueError(
                f"--teacher {path}: must see images as the student, with {name} {wanted} of its tower, got {got}"
            )
    return config, params


def check_tokens(what: str, theirs: Any, tokens: Any) -> None:
    """Raises ValueError unless each token of a tokenizer has its id in another one, that of `what`, too."""
    ids = theirs.get_vocab()
    for token, i in tokens.get_vocab().items():
        if ids.get(token) != i:
            raise ValueError(
                f"{what}: must have the trained model's tokenizer, got id {ids.get(token)} for {token!r} instead of "
                f"{i}; choose a model of the same family"
            )


def draw(table: param.Table, seed: int, on: jax.sharding.Mesh):
    """New random fp32 weights, sharded over the mesh."""
    return jax.jit(lambda key: param.init(key, table), out_shardings=rules.of_params(table, on))(jax.random.key(seed))


def check_microbatch(model: str, rows: int | str, length: int) -> None:
    """Raises ValueError if rows of `length` tokens are longer than the model's context, so that nothing could fill
    them, or if `rows` of them, unless "auto", do not fit into memory, with one activation of each token."""
    config = check_context(model, length)
    there = memory.of_devices(jax.local_devices()) * jax.process_count()
    least = 1 if rows == "auto" else int(rows)
    memory.check(f"--rows {rows} of --length {length}", least * length * (TOKEN + 2 * config.embed), there)


def check_context(model: str, length: int):
    """The Config of a model; raises ValueError if rows of `length` tokens are longer than its context."""
    config = hf.read_config(hub.folder(model))
    if length > config.context:
        raise ValueError(f"--length must be at most {config.context}, the context of {model}, got {length}")
    return config


def note_rope(settings, length: int) -> None:
    """Says, in one line, if a completion within `length` tokens may cross a length at which rope changes."""
    crossed = [switch for switch in rope_switches(settings.records) if switch < length]
    if crossed:
        progress.say(
            f"rope changes in sequences longer than {crossed[0]:,} tokens: training scores all of a longer completion "
            "with the new frequencies, but its first tokens were sampled with the old ones; "
            f"--length {crossed[0]} avoids it"
        )


def check_balance(model: str, balance: Balance) -> None:
    """Raises ValueError if a router's bias is to move and the model has none."""
    config = hf.read_config(hub.folder(model))
    if balance.bias and not any("router_bias" in stack.params for stack in models.table(config).stacks):
        raise ValueError(
            "--balance.bias needs a model that chooses experts with a bias, such as GLM-4.5 or DeepSeek-V3, got "
            f"{config.family} in {model}; leave it out, or balance experts with --balance.load"
        )


def own_devices(serve: local.Serve, trainer: int, colocated: bool) -> list[list[int]]:
    """The devices of this process that each server started by a run is shown (`launch.devices.of_own_servers`).

    Args:
      trainer: devices of the trainer's mesh.
    """
    return devices.of_own_servers(
        len(jax.local_devices()), 0 if colocated else trainer, serve.count, serve.mesh.devices
    )


def own_environs(serve: local.Serve, trainer: int, colocated: bool) -> list[dict[str, str]]:
    """Changes of the environment that show each of these servers its GPUs; none on a CPU, whose devices are virtual."""
    first = jax.local_devices()[0]
    if first.platform != "gpu" or serve.inside:
        return []
    amd = "rocm" in first.client.platform_version
    return [devices.showing(ids, amd) for ids in own_devices(serve, trainer, colocated)]


def check_own_servers(serve: local.Serve, trainer: int, colocated: bool) -> None:
    """Raises ValueError if servers that a run starts here need more devices than there are, or some that belong to this
    process; says if they take memory that the trainer counts on.

    Args:
      trainer: devices of the trainer's mesh.
    """
    there = jax.local_devices()
    if there[0].platform == "tpu" and not serve.inside:
        raise ValueError(
            "servers that a run starts are other processes, and this one has all TPU chips that it sees; generate in "
            "this one with --serve.inside, or divide the chips with `areax launch --devices N --servers N -- train ...`"
        )
    if serve.mesh.devices > len(there) and jax.process_count() == 1:
        raise ValueError(
            f"--serve.mesh: {serve.mesh} needs {serve.mesh.devices} devices, got {len(there)}; lower --serve.mesh.tp, "
            "dp or ep"
        )
    if there[0].platform == "gpu" and not (serve.inside or colocated):
        shared = [ids for ids in own_devices(serve, trainer, colocated) if ids[0] < trainer]
        if shared:
            gpus = ", ".join(str(i) for i in sorted({i for ids in shared for i in ids}))
            progress.say(
                f"{len(shared)} of {serve.count} servers of this run share GPU {gpus} and its memory with the trainer, "
                f"whose mesh takes {min(trainer, len(there))} of {len(there)}: give them their own with a smaller "
                "--mesh or `areax launch`, generate in this process with --serve.inside, or take turns with "
                "--colocated --eta 0"
            )


def check_own_engine(model: str, serve: local.Serve) -> None:
    """Raises ValueError if the engine would refuse the options of servers that a run starts here, such as too little
    memory for the model. `serve` comes from `Serve.sized`.

    In a job, a server may have more devices than this process sees; it then checks its options itself.
    """
    there = jax.local_devices()
    if serve.mesh.devices <= len(there):
        server.check(hub.folder(model), serve, dtype=serve.dtype, devices=there)


def check_directory(option: str, path: str) -> None:
    """Raises ValueError if an option's `path` is not a directory and cannot be created; creates nothing."""
    place = Path(path)
    if unread := [sign for sign in orbax.UNREAD if sign in str(place.absolute())]:
        raise ValueError(
            f"{option} must have no {unread[0]} in its path, which Orbax takes for a pattern, got {place.absolute()}; "
            "name another place"
        )
    for part in (place, *place.parents):
        if not (part.exists() or part.is_symlink()):  # asked first: another process of the job may create it meanwhile
            continue
        if not part.is_dir():
            raise ValueError(f"{option} must be a directory, got {path}, and {part} is a file; name another place")
        if os.access(part, os.W_OK | os.X_OK) and os.statvfs(part).f_blocks:  # /proc and the like have none
            return
        raise ValueError(f"{option} must be a directory that can be written to, got {path}; name another place")


def complete(config: Any, start: int, quiet: bool = False) -> bool:
    """Whether the run has reached `config.steps` already, which it says unless `quiet`; it then keeps its options."""
    done = 0 < config.steps <= start
    if done and not quiet:
        more = f"--steps {config.steps} trains no more; raise it to go on"
        print(f"{config.out}: has {start} steps already, {more}", file=sys.stderr)
    return done


@contextlib.contextmanager
def run_directory(out: str, published: str = "") -> Iterator[str]:
    """Creates the run's directory if it does not exist, keeps other processes out of it, and yields the run's id.

    Removes what a killed process left half-written, and a new directory of a run that was refused before it wrote
    anything, unless it publishes. In a job of several processes, all but process 0 do nothing and get "".

    Args:
      published: folder of versions that belong to the run's id, which must then stay; "" = none.

    Raises:
      ValueError: the path is not a directory, or another process is training there.
    """
    check_directory("--out", out)
    path = Path(out)
    if jax.process_index() > 0:
        yield ""
        return
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    held = folders.lock(path / RUN)
    if held is None:
        raise ValueError(f"--out {out}: another process is training in this directory; wait for it, or name another")
    with held:
        held.seek(0)
        run = held.read().strip()
        if not run:
            run = secrets.token_hex(8)
            held.write(f"{run}\n")
            held.flush()
        for leftover in (*path.glob(".model.*.tmp"), *path.glob(".adapter.*.tmp")):
            shutil.rmtree(leftover)
        try:
            yield run
        finally:
            if new and not published and not any(map(_written, path.rglob("*"))):
                shutil.rmtree(path)


def run_id(out: str) -> str:
    """The id of the run in a directory; "" if there is none."""
    file = Path(out) / RUN
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def _written(path: Path) -> bool:
    """Whether a file of a run's directory holds more than what the start of a run puts there."""
    return path.is_file() and path.name not in (RUN, chrome_trace.EVENTS) and path.stat().st_size > 0


@contextlib.asynccontextmanager
async def fleet(
    urls: Sequence[str],
    path: str | os.PathLike,
    serve: local.Serve,
    *,
    concurrency: int,
    log: str | os.PathLike = os.devnull,
    timeout_s: float = 3600.0,
    lost_s: float = client.TIMEOUTS.lost_s,
    stagers: Sequence[str] = (),
    source: Origin | None = None,
    handover: Handover | None = None,
    first: Callable[[], tuple[str, in_process.Weights]] | None = None,
    experts_per_token: int = 0,
    longest: int = 0,
    image_token: int | None = None,
    ends: Sequence[int] = (),
    environs: Sequence[Mapping[str, str]] = (),
    vocabulary: int = 0,
) -> AsyncIterator[client.Fleet]:
    """Connects to the servers at `urls`; without any, starts servers of checkpoint `path` here and restarts those that
    die.

    Args:
      timeout_s: how long a completion may take without progress (`client.connect`).
      lost_s: how long a server may be out of reach, if this run cannot restart it.
      source: where stagers fetch versions from, as `client.connect`.
      first: returns the label and weights that an in-process server starts with, instead of the checkpoint's.
      experts_per_token: as `client.connect`.
      longest: tokens at which generation ends, as `client.connect`; says if servers take less.
      image_token: of a model that reads images, as `client.connect`.
      ends: as `client.connect`, for servers that this run does not start: its own read the model's tokenizer.
      environs: of servers that are started, as `local.servers`.
      vocabulary: as `client.connect`.
    """
    keys.read(keys.SERVER)  # an invalid one is refused before servers start
    path = path if urls else hub.folder(os.fspath(path), weights=True)
    prepare = None
    connect = functools.partial(
        client.connect, concurrency=concurrency, timeout_s=timeout_s, experts_per_token=experts_per_token,
        longest=longest, image_token=image_token, vocabulary=vocabulary,
        timeouts=replace(client.TIMEOUTS, max_restarts=serve.restarts, lost_s=lost_s),
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        if urls:
            reached = connect(urls, stagers=stagers, source=source, handover=handover, ends=ends)
        elif serve.inside:
            one = in_process.serving(os.fspath(path), serve.engine, first, dtype=serve.dtype)
            url, own = stack.enter_context(one)
            handover, prepare = own, own.stage
            reached = connect([url], handover=handover)
        else:
            with progress.phase(f"starting {serve.count} server{'s' * (serve.count > 1)}"):
                started = await stack.enter_async_context(local.servers(path, serve, log, environs))
            reached = connect(started.urls, restart=started.restart)
        with progress.phase(f"waiting for servers: {', '.join(urls)}") if urls else contextlib.nullcontext():
            fleet = await stack.enter_async_context(reached)
        for server in fleet.servers:
            server.handover, server.prepare, server.fresh = handover, prepare, not urls
            if 0 < server.context < longest:
                progress.say(
                    f"{server.url}: takes sequences of at most {server.context:,} tokens, where answers end, less than "
                    f"--length {longest:,}; start it with a longer context (SGLang: --context-length) or more memory"
                )
        yield fleet
