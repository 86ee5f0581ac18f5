"""Products x @ w^T of R's shapes: what the machine computes of them at most."""

import numpy as np

UNIT, AGAIN = "GFLOP/s", 30


def case(rows: int, inner: int, outer: int):
    """(work, ours, xla, torch), the functions that `run.py` looks for, for x of [rows, inner], w of [outer, inner]."""

    def drawn():
        rng = np.random.default_rng(0)
        return (rng.standard_normal(shape, np.float32) for shape in ((rows, inner), (outer, inner)))

    def work(model):
        flops = AGAIN * 2 * rows * inner * outer
        return flops / 1e9, flops

    def multiplied(product, x, w):
        def once():
            for _ in range(AGAIN):
                y = product(x, w)
            return float(abs(np.asarray(y[0])).sum(dtype=float))

        return once

    def waiting(product):
        import jax

        compiled = jax.jit(product)
        return lambda x, w: compiled(x, w).block_until_ready()

    def ours(folder, model):
        """Returns a function that multiplies some times and returns a sum of the first row; few rows in blocks."""
        import jax

        from areax.models.layers import blocked
        from areax.models.layers.linear import linear

        x, w = map(jax.numpy.asarray, drawn())
        return multiplied(waiting(linear), x, blocked.blocks(w) if rows <= 16 else w)

    def xla(folder, model):
        import jax

        return multiplied(waiting(lambda x, w: x @ w.T), *map(jax.numpy.asarray, drawn()))

    def torch(folder, model):
        import torch

        return multiplied(lambda x, w: x @ w.T, *map(torch.from_numpy, drawn()))

    return work, ours, xla, torch
