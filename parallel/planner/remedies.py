"""What makes a training step fit the memory of its devices, or faster where memory is left."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax

from ...core import packing, param, quantised
from ..mesh import BATCH
from . import plan
from .chips import Chip
from .figures import USABLE
from .job import Job

MOST_DEVICES = 4096  # that are suggested
WORTH = 0.95  # of the step's time: more rows are suggested if they bring it below


def cheaper(job: Job) -> Iterator[tuple[str, Callable[[Job], Job]]]:
    """Options that save memory, and the job with them, from the cheapest in time and precision to the dearest."""
    optim = job.optim
    if job.remat != "full":
        yield "--run.remat full", lambda job: replace(job, remat="full")
    if job.adapters is None and job.reference == "device" and job.reference_moves:
        yield "--offload-reference", lambda job: replace(job, reference="host")
    if optim.name != "adafactor" and optim.state == "float32":
        yield "--optim.state float8", lambda job: replace(job, optim=replace(job.optim, state="float8"))
    if (critic := job.critic) and critic.optim.name != "adafactor" and critic.optim.state == "float32":
        yield "--critic.optim.state float8", _with_critic(state="float8")
    if job.adapters is None and optim.gradients == "float32" and job.microbatches > 1:
        yield "--optim.gradients bfloat16", lambda job: replace(job, optim=replace(job.optim, gradients="bfloat16"))
    if critic and critic.optim.gradients == "float32" and job.microbatches > 1:
        yield "--critic.optim.gradients bfloat16", _with_critic(gradients="bfloat16")
    if job.adapters is None and not optim.offload and not optim.ema:
        yield "--optim.offload", lambda job: replace(job, optim=replace(job.optim, offload=True))
    if critic and not critic.optim.offload and not critic.optim.ema:
        yield "--critic.optim.offload", _with_critic(offload=True)
    if job.adapters is not None:
        for kind in _narrower(job):
            yield f"--lora.base {kind}", functools.partial(_with_base, kind=kind)
    elif optim.weights == "float32":
        yield "--optim.weights bfloat16", lambda job: replace(job, optim=replace(job.optim, weights="bfloat16"))
    if critic and critic.optim.weights == "float32":
        yield "--critic.optim.weights bfloat16", _with_critic(weights="bfloat16")


def added(options: Sequence[str], option: str) -> list[str]:
    """The options with another, in place of one of the same name."""
    name = option.split()[0]
    return [*(one for one in options if one.split()[0] != name), option]


def _narrower(job: Job) -> tuple[quantised.Kind, ...]:
    """The kinds of a base under adapters with fewer bits than the job's, the widest first."""
    is_leaf = lambda x: isinstance(x, quantised.QuantisedWeight)
    kinds = {x.kind for x in jax.tree.leaves(job.frozen_shapes, is_leaf=is_leaf) if is_leaf(x)}
    return () if "nf4" in kinds else ("nf4",) if kinds else ("int8", "nf4")


def _with_base(job: Job, kind: quantised.Kind) -> Job:
    """The job with weights that have adapters in fewer bits, as `models.lora.frozen` keeps them."""
    assert job.adapters is not None
    adapted = [stack.params for stack in job.adapters.stacks]

    def narrow(params):
        stacks = [
            {name: quantised.quantise(x, kind) if f"{name}_a" in pairs else x for name, x in stack.items()}
            for stack, pairs in zip(params["stacks"], adapted, strict=True)
        ]
        return {**params, "stacks": stacks}

    return replace(job, frozen_shapes=jax.eval_shape(narrow, param.abstract(job.table, job.frozen)))


def _with_critic(**changes) -> Callable[[Job], Job]:
    """The job with other options of its critic's optimiser."""

    def change(job: Job) -> Job:
        assert job.critic is not None
        return replace(job, critic=replace(job.critic, optim=replace(job.critic.optim, **changes)))

    return change


def fitting(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> list[str]:
    """Options with which the job fits, each a suggestion of its own: fewer rows; an option that saves memory, or as
    many of them as it takes; more devices over fsdp.

    Args:
      server, shares: as `plan.memory_figures`.
    """
    fits = lambda job: plan.device_bytes(job, server, shares) <= USABLE * chip.memory
    found = []
    rows = lambda job: plan.most_rows(job, chip, server, shares)
    if least := rows(job):
        found.append(f"--rows {least}")
    options, changed = list[str](), job
    alone = [(option, change) for option, change in cheaper(job) if fits(change(job))]
    if alone:
        found += [option for option, _ in alone]
    else:
        for option, change in cheaper(job):
            options, changed = added(options, option), change(changed)
            if fits(changed):
                found.append(" ".join(options))
                break
        else:
            if options and not least and (least := rows(changed)):
                found.append(" ".join([*options, f"--rows {least}"]))
    for more in wider(job):
        if fits(more):
            found.append(f"--mesh.fsdp {more.layout.fsdp}" + f" --rows {more.rows}" * (more.rows != job.rows))
            break
    return found


def wider(job: Job) -> Iterator[Job]:
    """The job with more devices over fsdp, as far as they divide its weights; with more rows, if they need those."""
    layout = job.layout
    while layout.devices < MOST_DEVICES:
        layout = replace(layout, fsdp=2 * layout.fsdp)
        unit = job.size(*BATCH) // job.layout.fsdp * layout.fsdp
        try:
            yield replace(job, layout=layout, rows=-(-job.rows // unit) * unit)
        except ValueError:
            return


def paying(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> int:
    """The fewest rows of a microbatch with which a step is about as fast as with any number that fits; 0 if none fits.

    More rows would only fill up with padding: a step's last microbatch is seldom full.

    Args:
      job: a step with any number of rows.
      server, shares: as `plan.memory_figures`.
    """
    unit, rows = job.size(*BATCH), job.rows * job.used
    most = min(plan.most_rows(job, chip, server, shares), -(-rows // unit) * unit)
    if not most:
        return 0
    sizes = [*(unit << n for n in range((most // unit).bit_length())), most]
    seconds = {size: plan.time(_of(job, rows, size), chip)[0] for size in sizes}
    return next(size for size in sizes if WORTH * seconds[size] <= min(seconds.values()))


def _of(job: Job, rows: int, size: int) -> Job:
    """The same step in microbatches of `size` rows."""
    used = -(-rows // size)
    return replace(job, rows=size, used=used, microbatches=packing.bucket(used))


def faster(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> list[str]:
    """The option of a larger microbatch that fits and makes a step faster, if one does.

    Args:
      server, shares: as `plan.memory_figures`.
    """
    most = min(plan.most_rows(job, chip, server, shares), job.rows * job.used)
    if most < 2 * job.rows:
        return []
    wider = _of(job, job.rows * job.used, most)
    before, after = (plan.time(one, chip)[0] / one.tokens for one in (job, wider))
    return [f"--rows {most}"] if after < WORTH * before else []
