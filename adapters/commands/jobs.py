"""From a recipe's Config to what a plan is computed from: the steps to compile, the planner's job, generation."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from ... import models
from ...core import losses, packing, param, teacher_rows
from ...core.balance import Balance
from ...core.distill import Taught
from ...core.mtp import MTP
from ...core.optim import Optimizer
from ...core.process_reward import LABEL
from ...models import layer, lora, mtp, paging, remat
from ...models.layers import recurrence
from ...parallel import mesh as meshes
from ...parallel.planner import generation as generations
from ...parallel.planner import job as jobs
from ...parallel.planner import remedies
from ...parallel.planner.chips import Chip
from ...parallel.planner.tries import Tries
from .. import hf
from ..runtime import hub
from . import tries
from .aot import Array, Step, frozen, reads

NEEDS = ("model", "mesh", "rows", "length", "run")  # options that a recipe's Config must have
RL = ("group_size", "groups", "minibatches", "sampling", "eta", "servers", "serve", "colocated")  # and if it generates


@dataclass(frozen=True)
class Planned:
    """What a plan of a recipe is computed from.

    Attributes:
      steps: the steps that `areax plan --check` compiles: the policy's or the model's, and a critic's.
      job: the step, for the planner, with its critic and teacher.
      generation: of a recipe that generates.
      itemsize: bytes of an exported weight.
      shared: what `--trie auto` does to the step, in words; "" if it is off.
    """

    settings: Any
    steps: tuple[Step, ...]
    job: jobs.Job
    generation: generations.Generation | None
    itemsize: int
    shared: str = ""


def check(config: Any) -> None:
    """Raises ValueError if a Config, as `options.flat` gives it, lacks an option that plans need, or one has a value
    that cannot be planned."""
    needs = NEEDS + (RL if generates(config) else ("batch",))
    missing = [name for name in needs if not hasattr(config, name)]
    if missing:
        raise ValueError(f"plan: a recipe's Config needs {', '.join(needs)}, got no {missing[0]}")
    named = [getattr(config, name, None) for name in ("teacher", "teachers", "self_distillation")]
    if _taught(config) and not any(named):
        raise ValueError(
            "plan: name --teacher, a directory, --teachers, addresses of servers, or --self-distillation, to plan "
            "with; got none"
        )


def made(config: Any, chip: Chip, *, sample_tokens: int = 0, image_tokens: int = 0, rollout_chips: int = 0) -> Planned:
    """What a Config, as `options.flat` gives it, trains on a chip.

    Args:
      sample_tokens, image_tokens, rollout_chips: as `plan.Options`.
    """
    settings = _seeing(config, hf.read_config(hub.folder(config.model)))
    settings = models.with_mtp(settings) if _mtp(config).coef else settings
    if config.length > settings.context:
        raise ValueError(
            f"plan: --length must be at most {settings.context}, the context of {config.model}, got {config.length}"
        )
    sequence = sample_tokens or config.length
    if not 0 < sequence <= config.length:
        raise ValueError(f"plan: --sample-tokens must be from 1 to --length {config.length}, got {sequence}")
    a_row = config.length // sequence
    trie, shared = tries.planned(config, _readers(config, settings), _chunks(chip)[0], sequence)
    needed = trie.rows if trie else math.ceil(samples(config) / a_row)
    config, unit = copy.copy(config), math.prod(getattr(config.mesh, axis) for axis in meshes.BATCH)
    config.rows = min(config.rows, -(-needed // unit) * unit)  # a step computes no empty rows
    used = -(-needed // config.rows)
    slots = trie.slots if trie else packing.slots(a_row)
    run = replace(config.run, dtype=config.run.dtype or models.default_dtype(chip.platform))
    patches = _patches(config, settings, a_row * image_tokens if image_tokens else config.length)
    steps = _steps(config, settings, run, packing.bucket(used), slots, patches, trie)
    job = _job(config, steps, chip, used, sequence, trie)
    itemsize = hf.save_dtype(settings, param.abstract(models.table(settings))).itemsize
    generation = None
    if generates(config):
        generation = _generation(config, settings, chip.platform, sequence, itemsize, rollout_chips)
    return Planned(settings, steps, job, generation, itemsize, shared)


def _chunks(chip: Chip) -> tuple[int, int]:
    """`Job.chunks` on a chip."""
    return recurrence.CPU if chip.platform == "cpu" else recurrence.ELSEWHERE


def _readers(config, settings) -> list:
    """The settings of all models that read the batches."""
    critic = config.critic.model if getattr(_objective(config), "needs_values", False) else ""
    others = [path for path in (getattr(config, "teacher", ""), critic) if path]
    return [settings, *(hf.read_config(hub.folder(path)) for path in others)]


def beside(planned: Planned, chip: Chip) -> tuple[float, generations.Shares]:
    """A server's bytes, and whether it is on the trainer's first device, as `plan.memory_figures` takes them."""
    g = planned.generation
    return (generations.server_bytes(planned.job, chip, g), g.shares) if g else (0.0, "no")


def rows(config: Any, chip: Chip, *, sample_tokens: int = 0, image_tokens: int = 0, rollout_chips: int = 0) -> int:
    """The rows per microbatch that `--rows auto` chooses on a chip: `remedies.paying`, or the fewest if none fit.

    Args:
      config: as for `made`; its own `rows` are not read.
    """
    config = copy.copy(config)
    config.rows = math.prod(getattr(config.mesh, axis) for axis in meshes.BATCH)
    known = dict(sample_tokens=sample_tokens, image_tokens=image_tokens, rollout_chips=rollout_chips)
    planned = made(config, chip, **known)
    return remedies.paying(planned.job, chip, *beside(planned, chip)) or config.rows


def samples(config) -> int:
    """Samples per optimiser step."""
    if generates(config):
        return config.groups * config.group_size // config.minibatches
    pairs = losses.Preference | losses.KTO | losses.RewardModel
    return config.batch * (2 if isinstance(_objective(config), pairs) else 1)


def generates(config) -> bool:
    return hasattr(config, "group_size")


def _objective(config):
    return getattr(config, "objective", losses.SFT())


def _taught(config) -> bool:
    """Whether a teacher is needed: its distributions, or its log-probabilities for the advantage."""
    objective = _objective(config)
    scored = isinstance(objective, losses.Policy) and objective.advantage.teacher
    return isinstance(objective, losses.Distill) or bool(getattr(config, "distill_coef", 0) or scored)


def _mtp(config) -> MTP:
    return getattr(config, "mtp", MTP())


def _optim(spec: Optimizer) -> Optimizer:
    """The optimiser with some valid schedule length: it does not change the state."""
    return replace(spec, steps=spec.steps or spec.warmup + 1)


# -- steps -----------------------------------------------------------------------------------------


def _seeing(config, settings):
    """The Config of a model with the tower that the recipe's option asks for; "auto" counts as none."""
    wanted = getattr(config, "vision", "auto")
    return settings if wanted == "auto" else models.with_vision(settings, trained=wanted == "trained")


def _patches(config, settings, tokens: int) -> int:
    """Patches of a row in which so many tokens stand for images."""
    tower, cp = settings.vision, config.mesh.cp
    return tower.unit * min(cp * packing.bucket(-(-tokens // cp)), config.length) if tower else 0


def _steps(
    config, settings, run: models.Run, microbatches: int, slots: int, patches: int, trie: Tries | None
) -> tuple[Step, ...]:
    """The step of the model, and of its critic."""
    objective, teacher = _objective(config), None
    if isinstance(objective, losses.RewardModel):
        settings = scored(settings)
    elif isinstance(objective, losses.ProcessReward):
        settings = scored(settings, models.ScoreHead(objective.labels, bias=True))
    if coef := getattr(config, "distill_coef", 0):
        objective = Taught(objective, config.distill, coef)
    if isinstance(objective, losses.Distill | Taught) and config.teacher:
        teacher = _seeing(config, hf.read_config(hub.folder(config.teacher)))
    step = Step(
        settings, objective, _optim(getattr(config, "optim", Optimizer())), run, config.mesh, config.rows,
        trie.length if trie else config.length, microbatches, slots=slots, flattened=trie.flattened if trie else 0,
        lora=getattr(config, "lora", lora.Lora()), arrays=tuple(_arrays(config, settings)),
        balance=getattr(config, "balance", Balance()), mtp=_mtp(config), patches=patches, teacher=teacher,
        self_distillation=getattr(config, "self_distillation", False),
    )  # fmt: skip
    if not getattr(_objective(config), "needs_values", False):
        return (step,)
    if path := config.critic.model:
        settings = hf.read_config(hub.folder(path))
    critic = replace(
        step, config=scored(replace(settings, mtp=False)), mtp=MTP(), objective=config.critic.objective,
        optim=_optim(config.critic.optim), lora=lora.Lora(), arrays=(), balance=Balance(), teacher=None,
        self_distillation=False, follows=step,
    )  # fmt: skip
    return step, critic


def scored(settings, head: models.ScoreHead = hf.SCALAR):
    """The settings with a score head, its own or this one, and without an output head."""
    return replace(settings, score_head=settings.score_head or head, tied=True)


def _arrays(config, settings) -> list[Array]:
    """What samples bring along beside the arrays that every sample has."""
    found, objective = [], _objective(config)
    if isinstance(objective, losses.ProcessReward):
        found.append(Array("input", LABEL, "int32"))
    if getattr(getattr(config, "sampling", None), "routed_experts", False):
        if not getattr(settings, "top_k", 0):
            raise ValueError(f"plan: --sampling.routed-experts needs a model with experts, got {settings.family}")
        found.append(Array("input", "routed_experts", "int32", (settings.layers, settings.top_k)))
    if getattr(getattr(config, "sampling", None), "sampling_mask", False):
        found.append(Array("target", "sampling_mask", "int32", (config.sampling.top_k,)))
    if top := getattr(getattr(config, "sampling", None), "top_logprobs", 0):
        found += [Array("target", "sampler_ids", "int32", (top,)), Array("target", "sampler_logp", tail=(top,))]
    served = bool(getattr(config, "teachers", ()))
    if getattr(config, "self_distillation", False):
        found += [Array("input", name, "bool" if name == teacher_rows.MASK else "int32") for name in teacher_rows.NAMES]
    if isinstance(objective, losses.Policy):
        found += [Array("component", name) for name in objective.advantage.needs]
        found += [Array("scalars", "kl_coef")] if objective.kl.target else []
        found += [Array("scalars", "version", "int32")] if objective.correction.proximal == "interpolate" else []
        found += [Array("target", "observation", "int8")] if objective.observation.coef else []
        found += [Array("target", "state", "int32")] if objective.advantage.state_coef else []
        if served or objective.advantage.teacher:
            found.append(Array("target", "teacher"))
        top_k = config.distill.top_k if getattr(config, "distill_coef", 0) else 0
    else:
        found += [Array("target", "teacher")] if served else []
        top_k = getattr(objective, "top_k", 0)
    if served and top_k:
        found += [Array("target", "teacher_ids", "int32", (top_k,)), Array("target", "teacher_logp", tail=(top_k,))]
    return found


# -- the planner's job -----------------------------------------------------------------------------


def _job(config, steps: tuple[Step, ...], chip: Chip, used: int, sequence: float, trie: Tries | None) -> jobs.Job:
    step, *critics = steps
    inner = _objective(config)
    epochs = getattr(config, "epochs", 1)
    reference = getattr(inner, "needs_reference", False)
    where: Literal["", "device", "host"] = "device" if reference else ""
    if reference and getattr(config, "offload_reference", False):
        where = "host"
    moved = getattr(config, "reference_mix", 1.0) != 1
    run, model = step.run, _model(step.config)
    teacher = None
    if _taught(config) and config.teacher:
        scores = bool(isinstance(inner, losses.Policy) and inner.advantage.teacher) / epochs
        other = _seeing(config, hf.read_config(hub.folder(config.teacher)))
        teacher = jobs.Teacher(_model(other), scores, taught=step.distill is not None)
    elif getattr(config, "self_distillation", False):
        scores = bool(isinstance(inner, losses.Policy) and inner.advantage.teacher) / epochs
        teacher = jobs.Teacher(model, scores, taught=step.distill is not None, itself=True)
    critic = None
    if critics:
        critic = jobs.Critic(_model(critics[0].config), critics[0].optim, reads(critics[0]), 1 / epochs)
    adapted = step.lora.rank > 0
    return jobs.Job(
        model.table, model.records, config.mesh, config.rows, step.length, step.microbatches, used, sequence,
        dtype=run.dtype or "float32", remat=remat.chosen(run.remat, "accelerator"), cp=run.cp,
        head_chunk=run.head_chunk, dispatch=run.dispatch,
        top_k=model.top_k, router_fp32=model.router_fp32, activation=model.activation,
        vision=model.vision, patches=step.patches,
        chunks=_chunks(chip), slots=step.slots, tries=trie, reads=reads(step),
        scores=(step.whole.needs_scores + bool(where)) / epochs, reference=where,
        reference_moves=hasattr(config, "offload_reference"), reference_dtype="float32" if moved else "",
        platform=chip.platform, optim=step.optim,
        adapters=lora.table(model.table, step.lora) if adapted else None,
        frozen=step.frozen if adapted else "float32", frozen_shapes=frozen(step) if adapted else None,
        value=isinstance(inner, losses.RewardModel | losses.ProcessReward), whole_logits=step.distill is not None,
        critic=critic, teacher=teacher,
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _model(settings) -> jobs.Model:
    router = getattr(settings, "router", None)
    return jobs.Model(
        models.table(settings), settings.records, getattr(settings, "top_k", 0), router is not None and router.fp32,
        settings.activation.kind, settings.vision,
    )  # fmt: skip


def _generation(
    config, settings, platform: str, sequence: float, itemsize: int, rollout_chips: int
) -> generations.Generation:
    new = min(config.sampling.max_new_tokens, sequence)
    engine = None if config.servers else config.serve  # the embedded engine, started by the recipe
    split = meshes.Layout(**asdict(engine.mesh)) if engine else meshes.Layout()
    if engine and rollout_chips:
        raise ValueError(
            f"plan: without --servers the recipe starts {engine.count}, on {_chips(split.devices)} each, got "
            f"--rollout-chips {rollout_chips}; set --servers, or leave it out"
        )
    size = of_cache = itemsize
    if engine:
        engine.mesh.check(settings)
        own = jnp.dtype(models.default_dtype(platform) if engine.dtype == "auto" else engine.dtype)
        size, of_cache = own.itemsize, paging.kv_dtype(own, engine.kv_cache_dtype).itemsize
    cache, state = layer.cached_bytes(settings.records, size, twice=False)
    slots = capacity = held = 0
    predictor: list[param.Leaf] = []
    if engine:
        slots, cache, state, capacity, held = _server_cache(config, settings, platform, of_cache)
        predictor = param.leaf_list(mtp.table(settings)) if predicts(config, settings) else []
    # "no": of a host with enough devices servers take those behind the trainer's (`launch.devices.of_own_servers`)
    shares: generations.Shares = "turns" if config.colocated else "always" if config.serve.inside else "no"
    greedy = _objective(config).advantage.mean == "greedy" if isinstance(_objective(config), losses.Policy) else False
    return generations.Generation(
        samples=config.groups * (config.group_size + greedy), prompt=sequence - new, new=new,
        slots=slots * split.dp if engine else None,
        itemsize=size, cache=cache, state=state, devices=rollout_chips,
        steps=config.minibatches * getattr(config, "epochs", 1), ahead=config.eta, embedded=engine is not None,
        split=split, shares=shares, count=engine.count if engine else 1,
        capacity=capacity * split.dp, held=held, predictor=predictor,
    )  # fmt: skip


def _chips(count: int) -> str:
    return "one chip" if count == 1 else f"{count} chips"


def predicts(config, settings) -> bool:
    """Whether a server that the recipe starts makes drafts by multi-token prediction."""
    return config.serve.draft > 1 and mtp.stated(settings)


def _server_cache(config, settings, platform: str, itemsize: int) -> tuple[int, int, int, int, int]:
    """The cache of a server that the recipe starts, or of a replica of it: its slots; bytes of a token and of a
    sequence's states on each of its chips; the tokens that it holds, and its bytes there."""
    context = min(config.serve.context or config.length, settings.context)
    paging.check_draft("plan: --serve.draft", config.serve.draft, context)
    slots = config.serve.slots or paging.default_slots(platform, context)
    page = paging.default_page(context)
    records = mtp.records(settings, predicts(config, settings))
    kinds = paging.kinds(records, context, page, itemsize, config.serve.mesh.tp)
    memory = config.serve.memory * 1e9 or None
    try:
        counts = paging.counts(kinds, slots, context, page, paging.STEPS * config.serve.draft, memory)
    except ValueError as error:
        raise ValueError(f"plan: {error}") from None
    paged = [count for count, kind in zip(counts, kinds, strict=True) if not kind.states]
    cache = sum(kind.bytes for kind in kinds if not kind.states) // page
    state = sum(kind.bytes for kind in kinds if kind.states)
    tokens = paged[0] * page if paged else slots * context
    return slots, cache, state, tokens, paging.size_of(kinds, counts, slots)
