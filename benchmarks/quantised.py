"""Loading a checkpoint in FP8, 2 GB with the sizes of Qwen3-1.7B, vs the same numbers in bfloat16.

    python benchmarks/quantised.py [--runs 7] [--in DIR] [--write]

Either is loaded to bfloat16 on the default device by a process of its own, from the page cache; both take turns.
Memory is that process's peak, without the parameters, but with Python and JAX. --write stores it as case `quantised`
of results.json.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import run

HF = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6,
    max_position_embeddings=40960, dtype="bfloat16",
)  # fmt: skip
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def make(root: Path) -> None:
    """Writes root/fp8 with random codes and scales, and root/bf16 with the numbers that areax reads from it."""
    from areax import models
    from areax.adapters import hf, safetensors
    from areax.core import param

    config = models.config_from_hf(HF)
    abstract = param.abstract(models.table(config), "bfloat16")
    whole, _ = hf.to_tensors(config, abstract, "bfloat16")
    rng = np.random.default_rng(0)
    bell = (rng.standard_normal(1 << 22, np.float32) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    specs: dict = {}
    for name, spec in whole.items():
        specs[name] = spec
        if name.endswith("_proj.weight"):
            grid = tuple(-(-size // 128) for size in spec.shape)
            specs |= {name: np.broadcast_to(bell[0], spec.shape)}
            specs |= {f"{name}_scale_inv": np.broadcast_to(np.float32(0), grid)}

    def drawn():
        for spec in specs.values():
            if spec.dtype == np.float32:
                yield rng.uniform(1e-4, 2e-4, spec.shape).astype(np.float32)
            else:
                yield np.resize(bell, math.prod(spec.shape)).astype(spec.dtype).reshape(spec.shape)

    for name, more in (("fp8", {"quantization_config": FP8}), ("bf16", {})):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(HF | more))
    safetensors.write(root / "fp8", specs, drawn())
    config, params, _ = hf.mapped(root / "fp8", None)
    specs, arrays = hf.to_tensors(config, params, "bfloat16")
    safetensors.write(root / "bf16", specs, arrays)


def load(folder: str) -> dict:
    """What the load of a checkpoint takes in this process."""
    import jax

    from areax.adapters import hf
    from areax.recipes.shared import common

    common.keep_memory()  # as the recipes do
    jax.block_until_ready(jax.numpy.zeros(1))
    wall, cpu = time.perf_counter(), time.process_time()
    params = hf.load(folder, "bfloat16")[1]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"wall": wall, "cpu": cpu, "parameter_mb": total / 1e6, "above_mb": (peak - total) / 1e6}


def measure(root: Path, runs: int) -> dict[str, list[dict]]:
    done: dict = {"fp8": [], "bf16": []}
    for i in range(1 + runs):
        for name, results in done.items():
            child = subprocess.run(
                [sys.executable, __file__, "--load", root / name], stdout=subprocess.PIPE, check=True
            )
            if i:  # the first reads the file into the page cache
                results.append(json.loads(child.stdout))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--in", dest="root", help="directory for 5.5 GB of files; default: the system's for such files")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(given.load)))
        return
    if given.make:
        make(Path(given.make))
        return
    with tempfile.TemporaryDirectory(dir=given.root) as root:
        subprocess.run([sys.executable, __file__, "--make", root], check=True)
        done = measure(Path(root), given.runs)
    middle = lambda results, of: statistics.median(one[of] for one in results)
    sides = {
        name: {
            "seconds": middle(results, "wall"), "seconds_min": min(one["wall"] for one in results),
            "seconds_max": max(one["wall"] for one in results), "cpu_seconds": middle(results, "cpu"),
            "above_mb": max(one["above_mb"] for one in results), "parameter_mb": results[0]["parameter_mb"],
        }
        for name, results in done.items()
    }  # fmt: skip
    print("| | s (min to max) | CPU-s | peak memory above the parameters, MB |\n|---|---|---|---|")
    for name, one in sides.items():
        print(f"| {name} | {run.spread(one)} | {one['cpu_seconds']:.2f} | {one['above_mb']:.0f} |")
    ratio = sides["fp8"]["seconds"] / sides["bf16"]["seconds"]
    least = sides["fp8"]["seconds_min"] / sides["bf16"]["seconds_min"]
    print(f"fp8 / bf16: {ratio:.2f} by medians, {least:.2f} by the fastest")
    if given.write:
        ours, theirs = (1 / sides[name]["seconds"] for name in ("fp8", "bf16"))
        row = {"case": "quantised", "model": "Qwen3-1.7B", "peer": "bfloat16", "unit": "loads/s"}
        run.store([row | {"ours": ours, "theirs": theirs, "ratio": ours / theirs, "details": sides} | run.origin()])


if __name__ == "__main__":
    main()
