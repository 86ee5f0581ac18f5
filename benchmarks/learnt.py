"""What a training step saves by computing logits only where something is learnt: time and memory by the learnt share.

    python benchmarks/learnt.py [MODEL ...] [--length 1280] [--rows 2] [--repeat 5]

Steps of SFT over rows of which the last share is learnt, with `models.score(learnt_only=True)`, as all recipes have it,
and without. Prints a line of JSON for each model and share: seconds of either (the least of the repetitions, which
take turns), their ratio, and the temporary memory of either program in MB. Models are those of sizes.py, with random
weights; R has SmolLM2-135M's shape, L twelve of its layers.
"""

import argparse
import functools
import json
import time

import jax
import numpy as np
import sizes

from areax import models
from areax.core import losses, optim, packing, param, step
from areax.rollout.types import supervised

SHARES = 0.05, 0.2, 0.5, 1.0


def measured(config, share: float, given) -> dict[str, float]:
    """The figures of one model and share."""
    rng, learnt = np.random.default_rng(0), round(share * (given.length - 1))
    rows = rng.integers(0, config.vocab, (given.rows, given.length))
    of = functools.partial(supervised, group=0)
    samples = [of(row[:-learnt], row[-learnt:], sample=i, rollout=i) for i, row in enumerate(rows)]
    objective, optimizer = losses.SFT(), optim.make_optimizer(optim.Optimizer(), models.table(config))
    batch = jax.jit(objective.prepare)(packing.pack(samples, given.length, rows=given.rows))
    steps, states, found = {}, {}, {"share": share}
    for name, only in (("all", False), ("learnt", True)):
        score = functools.partial(models.score, config=config, run=models.Run(remat="dots"), learnt_only=only)
        states[name] = step.init(param.init(jax.random.key(0), models.table(config)), optimizer)
        steps[name] = step.make_step(score, objective, optimizer).lower(states[name], batch).compile()
        found[f"{name}_mb"] = round(steps[name].memory_analysis().temp_size_in_bytes / 1e6)
    times = {name: [] for name in steps}
    for _ in range(given.repeat + 1):
        for name, run in steps.items():
            begun = time.perf_counter()
            states[name], report = run(states[name], batch)
            jax.block_until_ready(states[name])
            times[name].append(time.perf_counter() - begun)
    for name, seconds in times.items():
        found[f"{name}_s"] = round(min(seconds[1:]), 4)
    return found | {"times_as_fast": round(found["all_s"] / found["learnt_s"], 2)}


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["S", "L"])
    for name, default in (("length", 1280), ("rows", 2), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for model in given.models:
        made = sizes.config(model) if model != "L" else sizes.config("R") | {"num_hidden_layers": 12}
        config = models.config_from_hf(made)
        for share in SHARES:
            print(json.dumps({"model": model, **measured(config, share, given)}), flush=True)


if __name__ == "__main__":
    main()
