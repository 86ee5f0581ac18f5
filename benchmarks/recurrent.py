"""CPU time of recurrent layers vs softmax attention of the same width, forward and backward, on one core.

    taskset -c 0 python benchmarks/recurrent.py [--lengths 512 2048 4096] [--write]

One row of one sequence, 512 channels: attention and Mamba 2 with 8 heads of 64, the gated delta rule with 8 of 64 and 4
of 128; fp32, chunks as by default. Projections, convolutions, norms and rope are not counted: only what mixes tokens.
Sides take turns; the median of the process's CPU seconds counts, so that other programs matter less. --write stores
the delta rule against attention at 2,048 tokens as case `recurrent` of results.json.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import run

from areax.models.attention import chunked
from areax.models.layers import delta, mamba

WIDTH, STATE, REPETITIONS = 512, 128, 7
OURS, PEER, LENGTH = "delta 8 x 64", "attention", 2048  # of the stored row


def sides(T: int) -> dict:
    """{name: (function of its inputs, inputs)}."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(1, T, *shape)), jnp.float32)
    segment_BT, index_BT = jnp.ones((1, T), jnp.int32), jnp.arange(T)[None]
    attend = lambda q, k, v: chunked.causal(q, k, v, segment_BT, index_BT)
    found: dict = {PEER: (attend, [draw(8, 64) for _ in range(3)])}
    for heads in (8, 4):
        qkv = [draw(heads, WIDTH // heads) for _ in range(3)]
        inputs = [delta.l2_norm(qkv[0]), delta.l2_norm(qkv[1]), qkv[2]]
        inputs += [jax.nn.sigmoid(draw(heads)), -jax.nn.softplus(draw(heads))]
        found[f"delta {heads} x {WIDTH // heads}"] = lambda *x: delta.chunked(*x, segment_BT), inputs
    scan = lambda x, dt, b, c: mamba.chunked(x, dt, -jnp.ones(8), b, c, jnp.ones(8), segment_BT)
    found["mamba 8 x 64"] = scan, [draw(8, 64), jax.nn.softplus(draw(8)), draw(1, STATE), draw(1, STATE)]
    return found


def compiled(fn, inputs):
    """fn's gradient for given gradients of its output, and its temporary memory in MB."""
    both = lambda inputs, dout: (lambda out, pull: (out, pull(dout)))(*jax.vjp(fn, *inputs))
    dout = jnp.ones(jax.eval_shape(fn, *inputs).shape)
    program = jax.jit(both).lower(inputs, dout).compile()
    return lambda: program(inputs, dout), program.memory_analysis().temp_size_in_bytes / 1e6


def measure(T: int) -> dict:
    """{name: (median CPU seconds, all of them, temporary MB)}."""
    programs = {name: compiled(*side) for name, side in sides(T).items()}
    seconds: dict = {name: [] for name in programs}
    for _ in range(1 + REPETITIONS):
        for name, (program, _) in programs.items():
            began = time.process_time()
            jax.block_until_ready(program())
            seconds[name].append(time.process_time() - began)
    return {name: (statistics.median(x[1:]), x[1:], programs[name][1]) for name, x in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, LENGTH, 4096])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    print("| T | layer | CPU ms (min to max) | of attention's time | temporary MB |\n|---|---|---|---|---|")
    for T in given.lengths:
        found = measure(T)
        for name, (median, x, memory) in found.items():
            print(
                f"| {T:,} | {name} | {1e3 * median:.0f} ({1e3 * min(x):.0f} to {1e3 * max(x):.0f}) | "
                f"{median / found[PEER][0]:.2f} | {memory:.0f} |",
                flush=True,
            )
        if given.write and T == LENGTH:
            row = {"case": "recurrent", "model": OURS, "peer": PEER, "unit": "tokens/s of CPU time"}
            row |= {"ours": T / found[OURS][0], "theirs": T / found[PEER][0]}
            details = {name: {"cpu_seconds": x, "temporary_mb": memory} for name, (_, x, memory) in found.items()}
            run.store([row | {"ratio": row["ours"] / row["theirs"], "details": details} | run.origin()])


if __name__ == "__main__":
    main()
