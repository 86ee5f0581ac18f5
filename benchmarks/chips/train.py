"""Training steps: tokens/s, MFU and peak memory, beside transformers and the plan.

Sequences of equal length, AdamW, fp32 master weights. areax packs them into one row and uses the kernels that `auto`
chooses; transformers gets a batch without padding, under autocast, with torch's scaled-dot-product attention and fused
AdamW. Remat "full" is gradient checkpointing in transformers.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from chips import shapes

ADAM = dict(lr=1e-6, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)


def measure(shape, length, sequences, system, remat, dtype, steps, uncounted, *, chip, keep) -> dict:
    """Runs and times the training steps.

    Args:
      chip: name in `areax plan` of the chip for MFU and plan; None = leave them out.
    """
    figures = planned(chip, shape, length, sequences, remat if system == "areax" else "dots", dtype) if chip else {}
    once, peak = {"areax": areax, "transformers": transformers}[system](shape, length, sequences, remat, dtype)
    times, loss = timed(once, steps, uncounted)
    result = {"tokens_per_s": length / times["step_s"], **times, "peak_bytes": peak(), "loss": loss}
    if chip:
        from areax.parallel.planner import chips

        result["mfu"] = figures["model_flops"] / times["step_s"] / chips.CHIPS[chip].flops
        if system == "areax":
            result |= {f"planned_{name}": figures[name] for name in ("mfu", "peak_bytes")}
    return result


def timed(once: Callable, steps: int, uncounted: int) -> tuple[dict, Any]:
    """Figures of the time that calls take, after some that are not counted; and what the last one returned."""
    seconds = []
    for _ in range(uncounted + steps):
        start = time.perf_counter()
        last = once()
        seconds.append(time.perf_counter() - start)
    counted = seconds[uncounted:]
    named = {"step_s": statistics.median(counted), "step_s_min": min(counted), "step_s_max": max(counted)}
    return named | {"first_s": seconds[0]}, last


def planned(chip: str, shape: str, length: int, sequences: int, remat: str, dtype: str) -> dict:
    """The figures of `areax plan sft` by name, for one microbatch; works without the command line's packages."""
    from areax import models
    from areax.adapters.commands import aot
    from areax.core import losses, optim
    from areax.parallel.mesh import Layout
    from areax.parallel.planner import chips, job, plan

    config, run = models.config_from_hf(shapes.hf(shape, length)), models.Run(dtype=dtype, remat=remat)
    slots = 1 << (sequences - 1).bit_length()
    step = aot.Step(config, losses.SFT(), optim.Optimizer(), run, Layout(), 1, length, microbatches=1, slots=slots)
    made = job.Job(
        models.table(config), config.records, Layout(), 1, length, 1, 1, length // sequences, dtype=dtype, remat=remat,
        head_chunk=run.head_chunk, top_k=getattr(config, "top_k", 0), slots=slots, reads=aot.reads(step),
        platform=chips.CHIPS[chip].platform,
    )  # fmt: skip
    return {figure.name: figure.value for figure in plan.plan(made, chips.CHIPS[chip]).figures}


def tokens(shape: str, length: int, sequences: int):
    """Random token ids, [sequences, length // sequences]."""
    import numpy as np

    vocab = shapes.SHAPES[shape]["vocab_size"]
    return np.random.default_rng(0).integers(0, vocab, (sequences, length // sequences))


def areax(shape: str, length: int, sequences: int, remat: str, dtype: str):
    """Returns a function that takes one step and returns its loss, and one that returns peak device memory in bytes."""
    from areax import models
    from areax.core import losses, packing
    from areax.rollout.types import supervised

    config = models.config_from_hf(shapes.hf(shape, length))
    rows = enumerate(tokens(shape, length, sequences))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in rows]
    batch = packing.pack(samples, length, rows=1)
    once = stepping(config, losses.SFT(), batch, models.Run(dtype=dtype, remat=remat))
    return lambda: float(once()["loss"].sum), peak_bytes


def stepping(config, objective, batch, run):
    """Returns a function that takes one training step from random weights on and returns its metrics."""
    import jax

    from areax import models
    from areax.core import optim, param, step

    table = models.table(config)
    optimizer = optim.make_optimizer(optim.Optimizer(**ADAM), table)
    update = step.make_step(partial(models.score, config=config, run=run), objective, optimizer)
    state = step.init(jax.jit(lambda key: param.init(key, table))(jax.random.key(0)), optimizer)
    prepared = objective.prepare(jax.device_put(batch))

    def once():
        nonlocal state
        state, report = update(state, prepared)
        jax.block_until_ready(state)
        return report

    return once


def peak_bytes() -> int | None:
    """Peak device memory of this process so far; None on a CPU, where JAX does not report it."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def transformers(shape: str, length: int, sequences: int, remat: str, dtype: str):
    """As `areax`."""
    import peers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    config = AutoConfig.for_model(**shapes.hf(shape, length))
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        token = torch.from_numpy(tokens(shape, length, sequences)).to(device)
    if remat == "full":
        net.gradient_checkpointing_enable()
    optimizer = peers.torch_adamw(net.train(), **ADAM)
    low = getattr(torch, dtype)

    def once():
        with torch.autocast(device, dtype=low, enabled=low != torch.float32):
            loss = net(input_ids=token, labels=token, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return once, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None
