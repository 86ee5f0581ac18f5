"""What the embedded engine gains by pages and cached prefixes, on this machine.

    python benchmarks/pages.py [--model S] [--slots 16] [--context 8192] [--requests 20]

`memory`: greedy answers of lognormal length (median 1,340 tokens, longest 7,500) with memory for all slots at full
length, and with 40 % of it. `group`: a prompt of 2,048 tokens for 16 samples, and 16 different prompts of that length;
one token each. CPU and wall seconds, the best of two runs after a first one.
"""

import argparse
import time

import jax
import numpy as np
import sizes


def seconds(engine, asked) -> tuple[float, float]:
    """(CPU seconds, wall seconds)"""
    engine.generate(asked)
    best = (float("inf"), float("inf"))
    for _ in range(2):
        engine.flush()
        begin = time.process_time(), time.perf_counter()
        engine.generate(asked)
        best = min(best, (time.process_time() - begin[0], time.perf_counter() - begin[1]))
    return best


def main(argv=None) -> int:
    from areax import models
    from areax.core import param
    from areax.rollout.engine.engine import Engine
    from areax.rollout.engine.request import Request, Sampling

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("S", "M"), default="S")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args(argv)
    config = models.config_from_hf(sizes.config(options.model))
    params = param.init(jax.random.key(0), models.table(config))
    rng = np.random.default_rng(3)
    draw = lambda n: tuple(rng.integers(0, config.vocab, n).tolist())
    ask = lambda i, prompt, new: Request(str(i), prompt, Sampling(0.0, max_new_tokens=int(new), ignore_eos=True))

    lengths = np.clip(rng.lognormal(7.2, 0.8, options.requests), 1, options.context - 692)
    asked = [ask(i, draw(64), n) for i, n in enumerate(lengths)]
    whole = None
    for share in (1.0, 0.4):
        memory = share * whole / 1e9 if whole else 0
        with Engine(config, params, slots=options.slots, context=options.context, memory=memory) as engine:
            whole = whole or sum(x.nbytes for x in jax.tree.leaves(engine._slots.device.held))
            cpu, wall = seconds(engine, asked)
            preempted = engine.stats()["preemptions"] // 3
        print(f"memory {share:4.0%}: {cpu:7.2f} s CPU, {wall:7.2f} s wall, {preempted} preemptions a run", flush=True)

    prompt = draw(2048)
    with Engine(config, params, slots=16, context=4096) as engine:
        for name, prompts in (("one prompt", [prompt] * 16), ("16 prompts", [draw(2048) for _ in range(16)])):
            before = engine.stats()["prefilled_tokens"]
            cpu, wall = seconds(engine, [ask(i, each, 1) for i, each in enumerate(prompts)])
            read = (engine.stats()["prefilled_tokens"] - before) // 3
            print(f"group, {name}: {cpu:7.2f} s CPU, {wall:7.2f} s wall, {read:,} tokens computed", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
