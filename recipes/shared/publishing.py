"""Weight sync of a run: writes each version, a full model or named adapters, and pushes it to the servers."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from areax import models
from areax.adapters import hf, peft
from areax.adapters.runtime import malloc, passed
from areax.models import lora
from areax.models.lora import Lora
from areax.recipes.shared import in_parts, learner
from areax.recipes.shared.learner import Learner
from areax.recipes.shared.probe import NO_CANARIES, Canaries
from areax.recipes.shared.rl_options import Serving
from areax.rollout import client, loop
from areax.rollout.engine import in_process
from areax.rollout.fleet import canary, members
from areax.rollout.fleet.push import Push, push_weights
from areax.rollout.processes import folders
from areax.rollout.servers.labels import label_of, read_label
from areax.rollout.servers.server import Handover
from areax.rollout.servers.types import Probe
from areax.rollout.weights import lora as named
from areax.rollout.weights import object_store, store, tensors
from areax.rollout.weights.parts import Parts

log = logging.getLogger(__name__)

BASE = "base"  # folder of the published base, beside those of versions


@dataclass(frozen=True)
class WeightSync:
    """How a run's weights get to its servers.

    Attributes:
      settings: the model's config.
      options: `--push`.
      run_on_all: calls a function in all processes of the job; of these `host_copy`, `host_part` and `probe`.
      path: the checkpoint that servers start from.
      root: folder of published versions; None where nothing is written.
      write: `write(v, host)` -> the published directory.
      adapters: versions are adapters by name over `path`; None = whole models.
      first: label and weights that a server inside this process begins with.
      policy: whose weights such a server gets; None = servers get what is written.
      handover: gives servers the weights of a push without files.
      bucket: where versions are uploaded to, for stagers.
      parts: versions are in parts, of which each process serves its own to stagers.
      dtype: of what servers get, as `dtype` says.
    """

    settings: Any
    options: Push
    run_on_all: Callable
    path: Path
    root: Path | None = None
    write: Callable[[int, Any], Path] | None = None
    adapters: Lora | None = None
    first: Callable[[], tuple[str, in_process.Weights]] | None = None
    policy: Learner | None = None
    handover: Handover | None = None
    bucket: object_store.Uploads | None = None
    parts: Parts | None = None
    dtype: str | None = None


@contextlib.asynccontextmanager
async def opened(
    model: str, options: Serving, policy: Learner, run_on_all: Callable, tokens, run: str, start: int, dtype: str | None
) -> AsyncIterator[WeightSync]:
    """Sets up weight sync to these servers and writes version `start`, if versions are written at all.

    Args:
      run_on_all: calls a function in all processes of the job (`lockstep.leader`).
      run: id of the run, which `--published` then belongs to.
      dtype: as `dtype` says.
    """
    settings = policy.written
    if options.serve.inside:
        first = lambda: in_memory(policy.settings, start, learner.whole(policy), dtype)
        yield WeightSync(settings, options.push, run_on_all, Path(model), first=first, policy=policy, dtype=dtype)
        return
    adapters = await by_name(policy, options)
    if in_parts.possible(options, adapters):
        with folder("", policy, run, start, jax.process_count()) as root:
            async with in_parts.opened(options, run_on_all) as parts:
                write = writer(policy, root, tokens, None, dtype, written=(), others=parts.tensors)
                yield WeightSync(settings, options.push, run_on_all, Path(model), root, write, parts=parts, dtype=dtype)
        return
    with folder(options.published, policy, run, start) as root:
        path = run_on_all("publish_base", root) if adapters else run_on_all("publish", root, start)
        write = writer(policy, root, tokens, adapters, dtype, written={path})
        async with uploads(options, run) as there:
            yield WeightSync(
                settings, options.push, run_on_all, path, root, write, adapters,
                handover=handover(options.push, settings), bucket=there, dtype=dtype,
            )  # fmt: skip


def prepare_push(
    sync: WeightSync, fleet: client.Fleet, probe_ids: Sequence[int], v: int, canaries: Canaries = NO_CANARIES
) -> loop.Push:
    """Copies version v to the host, so that the next update may overwrite it; returns the coroutine function that
    writes the copy, pushes it to the servers and removes older versions. A server inside this process gets its copy
    here, from device to device, and nothing is written.

    Args:
      probe_ids: a prompt for servers to prove with that they hold the weights; () = none.
      canaries: prompts to compare servers with while they serve the first version and every `canary_every` versions,
        and while one drifts.
    """
    options = sync.options
    known = lambda ids: Probe(tuple(ids), tuple(sync.run_on_all("probe", ids)), options.tolerance, canaries.dtype)
    every = options.canary_every
    drifts = any(server.drifts and server.state != "dead" for server in fleet.servers)
    due = every and (fleet.published is None or v % every == 0 or drifts)
    computed = lambda: (known(probe_ids) if probe_ids else None, tuple(map(known, canaries.prompts)) if due else ())
    if sync.policy:
        [server] = fleet.servers
        assert server.prepare
        label, weights = in_memory(
            sync.settings, v, learner.weights(sync.policy), sync.dtype
        )  # a frozen tower is there
        arrays = server.prepare(label, weights)
        probe, probes = computed()
        return functools.partial(
            push_weights, fleet, "", label, mode=options.mode, arrays=arrays, probe=probe, canaries=probes
        )
    root, write = sync.root, sync.write
    assert root and write
    copied = ("host_part", v, store.numbers(root)) if sync.parts else ("host_copy", sync.adapters)
    host, (probe, probes) = sync.run_on_all(*copied), computed()

    async def push() -> None:
        directory = await store.written(lambda: write(v, host), root, lambda: fleet.labels)
        label = read_label(directory / hf.MANIFEST)
        await push_weights(
            fleet, directory, label, mode=options.mode, parallel_servers=options.parallel_servers,
            arrays=host if sync.handover else None, probe=probe, canaries=probes,
        )  # fmt: skip
        await asyncio.to_thread(store.prune, root, 2, fleet.labels)
        if sync.bucket:
            await sync.bucket.prune()

    return push


def in_memory(settings, version: int, params, dtype: str | None = None) -> tuple[str, in_process.Weights]:
    """(label, arrays) of a version that is not written: the label is that of the directory that would be.

    Args:
      params: the trainer's, whose tensors are hashed one at a time.
    """
    manifest = hf.manifest(settings, params, dtype, version)
    return label_of(hf.json_bytes(manifest)), in_process.Weights(settings, params, manifest, dtype)


def handover(options: Push, settings) -> Handover | None:
    """The function that sends weights to servers without files; None if they read files."""
    if options.way == "disk":
        return None
    from areax.adapters import torch

    return tensors.handover(functools.partial(torch.messages, settings))


def uploads(options: Serving, run: str) -> contextlib.AbstractAsyncContextManager[object_store.Uploads | None]:
    """The bucket of `--push.bucket`, which keeps versions after the run if `--published` does; None without one."""
    url = options.push.bucket
    return object_store.opened(url, run, keep=bool(options.published)) if url else contextlib.nullcontext()


@contextlib.contextmanager
def folder(published: str, policy: Learner, run: str, start: int, parts: int = 1) -> Iterator[Path]:
    """Yields the folder for published versions, `published` or a temporary one, which is removed at the end.

    `published` then belongs to this run. Versions after `start` in it are removed: the run got there before it was
    killed, and will get there again with other weights.

    Args:
      parts: of a version, of which the folder has one.

    Raises:
      ValueError: the folder belongs to another run, or holds other files.
    """
    if not published:
        size = in_parts.size(policy) // parts + passed.size(policy.written)
        with folders.scratch(store.choose_root(size), "weights") as root:
            yield root
        return
    with store.owned(Path(published), run) as root:
        store.remove_newer(root, start)
        yield root


async def by_name(policy: Learner, options: Serving) -> Lora | None:
    """The adapters to publish by name, if `--push.lora` and the servers allow it; None = publish the full model.

    Raises:
      ValueError: `--push.lora adapter` is not possible, with the reason.
    """
    wanted = options.push.lora
    if wanted == "merged" or policy.adapters is None:
        return None
    targets = lora.targets(models.table(policy.settings), policy.adapters)
    if policy.adapters.dora:
        why = "servers have no DoRA adapters by name (--lora.dora)"
    elif experts := [name for name in targets if name.startswith("expert_")]:
        why = f"servers have no adapters by name for {', '.join(experts)} (--lora.targets)"
    elif options.colocated or options.push.way == "tensors":
        why = "servers that are offloaded, or get tensors, need the full model (--colocated, --push.way tensors)"
    else:
        modules = peft.modules(policy.settings, policy.adapters)
        rank = peft.exported_rank(policy.settings, policy.adapters)
        fixed = [entry for entry in options.servers if not members.is_list(entry)]
        why = await named.refusal(fixed, rank, modules)
        if not why and len(fixed) < len(options.servers) and wanted != "adapter":
            why = "servers that join later may have no adapters; if all have, --push.lora adapter"
    if why and wanted == "adapter":
        raise ValueError(f"--push.lora adapter: {why}; use --push.lora merged")
    if why:
        log.warning("versions are published merged: %s", why)
    return None if why else policy.adapters


def publish_base(policy: Learner, root: Path, tokens) -> Path:
    """Publishes the base model, which servers start from and adapters name; all processes must call it."""
    return hf.write_published(root / BASE, 0, policy.written, policy.frozen[0], tokenizer=tokens)


def dtype(options: Serving, run: models.Run) -> str | None:
    """The dtype of published models; None = that of the checkpoint the run started from.

    Servers that the run starts compute in the trainer's dtype. If that is float32, weights of 16 bits would not follow
    the trainer's: most steps are smaller than half of their spacing.
    """
    return "float32" if not options.servers and learner.computed(run).dtype == "float32" else None


def rounding(sync: WeightSync, policy: Learner, run: models.Run) -> str:
    """`Probe.dtype`: how far a server with a version's weights may be from the trainer.

    Adapters by name are not rounded; the sum of adapters and the weights below is, and so are masters of a trainer that
    computes in a finer dtype than their files have.
    """
    computed = canary.coarsest(str(learner.computed(run).dtype))
    if sync.adapters:
        return computed
    shapes = jax.eval_shape(lambda: learner.weights(policy))
    files = canary.coarsest(hf.save_dtype(policy.written, shapes, sync.dtype).name)
    merged = policy.adapters is not None and files != "F32"
    return canary.ROUNDED if merged or canary.coarsest(computed, files) != computed else computed


def host_copy(policy: Learner, adapters: Lora | None, dtype: str | None):
    """Copies the weights of a version to numpy arrays; all processes must call it."""
    malloc.return_memory()  # of the last step
    if adapters:
        return peft.host_copy(policy.settings, policy.state.params, adapters)
    return hf.host_copy(policy.written, learner.weights(policy), dtype)


def writer(
    policy: Learner, root: Path, tokens, adapters: Lora | None, dtype: str | None, written: Collection[Path],
    others: Callable[[int], Coroutine[Any, Any, dict[str, dict]]] | None = None,
) -> Callable[[int, object], Path]:  # fmt: skip
    """Makes `write(v, host)`, which publishes a host copy as `root/v`, replacing what is there; returns the directory.

    What the model does not use of its checkpoint is written once; further versions link to it.

    Args:
      written: directories that this process wrote already.
      others: of versions in parts, the entries of a version's manifest that other processes know.
    """
    if adapters:
        base = (root / BASE / "0").absolute()
        label = read_label(base / hf.MANIFEST)
        once = functools.partial(
            peft.write_published, root, config=policy.settings, spec=adapters, base=base, base_label=label
        )
        write = lambda v, host: once(v, adapters=host)
    else:
        last = [*written][-1:]

        def write(v, host):
            like = next(filter(Path.is_dir, last), None)
            rest = (lambda: asyncio.run(others(v))) if others else dict
            last[:] = [hf.write_published(root, v, policy.written, host, dtype, None, tokens, like, rest)]
            return last[0]

    return lambda v, host: root / str(v) if root / str(v) in written else write(v, host)
