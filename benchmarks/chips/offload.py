"""Training steps of `areax train sft` whose masters and moments are in the host's memory, from random weights.

No checkpoint is written: that of a large model would take longer than the steps.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from chips import planned, shapes, train

OPTIONS = {"state": "float8", "gradients": "bfloat16"}


def measure(shape, dtype, length, rows, microbatches, steps, *, chip, keep) -> dict:
    """Times steps after the first, which compiles.

    Args:
      rows: sequences of `length` tokens per microbatch.
    """
    import jax
    import numpy as np

    from areax import models
    from areax.core import losses, optim, packing, param
    from areax.parallel import batches, mesh
    from areax.recipes.shared import learner
    from areax.rollout.types import supervised

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shapes.hf(shape, length)))
        options = {
            "model": folder, "length": length, "rows": rows, "batch": rows * microbatches, "run.dtype": dtype,
            **{f"optim.{name}": value for name, value in OPTIONS.items()},
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        figures = planned.figures("sft", [*words, "--optim.offload"], chip)
    config = models.config_from_hf(shapes.hf(shape, length))
    table, on, run = models.table(config), mesh.make(mesh.Layout()), models.Run(dtype=dtype, remat="full")
    spec = optim.Optimizer(**train.ADAM, **OPTIONS, offload=True)
    score = lambda params, batch: models.score(params, batch, config=config, run=run)
    rng, seconds = np.random.default_rng(0), []
    tokens = rng.integers(0, config.vocab, (rows * microbatches, length))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in enumerate(tokens)]
    packed = packing.pack(samples, length, rows=rows)
    with jax.set_mesh(on):
        params = jax.jit(lambda key: param.init(key, table))(jax.random.key(0))
        own = learner.make(config, params, score, losses.SFT(), spec, on, updates=1 + steps, dtype=dtype)
        del params
        batch = learner.prepared(own, batches.batch(packed, on))
        for _ in range(1 + steps):
            start = time.perf_counter()
            report = jax.block_until_ready(learner.train_step(own, batch))
            seconds.append(time.perf_counter() - start)
            step_s = statistics.median(seconds[1:] or seconds)
            result = {
                "tokens_per_s": rows * microbatches * length / step_s, "step_s": step_s, "first_s": seconds[0],
                "peak_bytes": train.peak_bytes(), "loss": float(report["loss"].sum), **figures,
            }  # fmt: skip
            keep(result)
    return result
