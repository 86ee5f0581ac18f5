"""Decoding: the embedded engine with random weights and all slots busy, requests of equal length."""

import statistics
import time

from chips import shapes, train


def measure(shape, dtype, slots, prompt, new, repeats, *, chip, keep) -> dict:
    """Generates a full batch repeatedly; tokens/s counts sampled tokens, and the time includes prefill."""
    import jax
    import numpy as np

    from areax import models
    from areax.core import param
    from areax.rollout.engine.engine import Engine
    from areax.rollout.engine.request import Request, Sampling

    config = models.config_from_hf(shapes.hf(shape, prompt + new))
    table = models.table(config)
    cast = lambda tree: jax.tree.map(lambda x, to: x.astype(to.dtype), tree, param.abstract(table, dtype))
    params = jax.jit(lambda key: cast(param.init(key, table)))(jax.random.key(0))
    rng, sampling = np.random.default_rng(0), Sampling(max_new_tokens=new, ignore_eos=True)
    seconds = []
    with Engine(config, params, slots=slots, context=prompt + new) as engine:
        del params  # the engine holds a copy
        for _ in range(1 + repeats):
            rows = rng.integers(0, config.vocab, (slots, prompt)).tolist()  # new prompts, so that none is cached
            requests = [Request(str(i), tuple(row), sampling) for i, row in enumerate(rows)]
            start = time.perf_counter()
            made = engine.generate(requests)
            seconds.append(time.perf_counter() - start)
            assert sum(len(progress.tokens) for progress in made) == slots * new
        held = engine.stats()["bytes"]
    median = statistics.median(seconds[1:])
    return {
        "tokens_per_s": slots * new / median, "token_s": median / new, "first_s": seconds[0],
        "seconds_min": min(seconds[1:]), "seconds_max": max(seconds[1:]), "engine_bytes": held,
        "peak_bytes": train.peak_bytes(),
    }  # fmt: skip
