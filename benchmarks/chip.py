"""A training step on the accelerator of this machine: tokens/s, MFU and peak memory, beside what `areax plan` says.

    python chip.py [--chip h200] [shape ...]

Rows of 4,096 and 16,384 packed tokens, four sequences each, bf16 over fp32 masters, AdamW, by each attention backend
that can, under remat "full" and "dots". Each case runs in a process of its own: peak memory is counted from its start.
Model FLOPs are those of the plan: what is computed again does not count. Writes chips.json and CHIPS.md, where cases of
other chips stay as they were.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
COMMON = dict(
    model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=40960, torch_dtype="bfloat16",
)  # fmt: skip
SHAPES = {
    "Qwen3-0.6B": COMMON | dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B-4-layers": COMMON | dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "tiny": COMMON | dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=512,
    ),
}  # fmt: skip
LENGTHS, SEQUENCES = (4096, 16384), 4  # of a packed row, and how many of equal length stand in it
REMATS = "full", "dots"
STEPS, UNCOUNTED = 10, 3
CASE = "chip", "shape", "length", "attention", "remat"
KINDS = {"H100": "h100", "H200": "h200", "B200": "b200", "TPU v5p": "v5p", "TPU v6": "v6e"}  # in JAX's device_kind


def measure(chip: str, shape: str, length: int, attention: str, remat: str) -> dict:
    """One row of chips.json."""
    import jax
    import numpy as np

    from areax import models
    from areax.adapters import plan
    from areax.core import losses, optim, packing, param, step
    from areax.parallel.mesh import Layout
    from areax.rollout.types import supervised

    @dataclass(frozen=True)
    class Config:
        model: str
        length: int
        run: models.Run
        batch: int = SEQUENCES
        rows: int = 1
        mesh: Layout = Layout()

    run = models.Run(dtype="bfloat16", attention=attention, remat=remat)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        options = plan.Options(chip=chip, sample_tokens=length // SEQUENCES)
        planned = plan.plan(Config(folder, length, run), options)["figures"]
    config = models.config_from_hf(SHAPES[shape])
    table, objective = models.table(config), losses.SFT()
    optimizer = optim.make_optimizer(optim.Optimizer(), table)
    update = step.make_step(partial(models.score, config=config, run=run), objective, optimizer)
    state = step.init(jax.jit(lambda key: param.init(key, table))(jax.random.key(0)), optimizer)
    token_ST = np.random.default_rng(0).integers(0, config.vocab, (SEQUENCES, length // SEQUENCES))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in enumerate(token_ST)]
    batch = objective.prepare(jax.device_put(packing.pack(samples, length, rows=1)))
    seconds = []
    for _ in range(UNCOUNTED + STEPS):
        start = time.perf_counter()
        state, report = update(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[UNCOUNTED:])
    device = jax.local_devices()[0]
    used = device.memory_stats() or {}  # None on a CPU
    return {
        "chip": chip, "device": device.device_kind, "shape": shape, "length": length, "attention": attention,
        "remat": remat, "tokens_per_s": length / median, "step_s": median,
        "step_s_min": min(seconds[UNCOUNTED:]), "step_s_max": max(seconds[UNCOUNTED:]),
        "mfu": planned["model_flops"]["value"] / median / plan.CHIPS[chip].flops,
        "planned_mfu": planned["mfu"]["value"], "peak_bytes": used.get("peak_bytes_in_use"),
        "planned_peak_bytes": planned["peak_bytes"]["value"],
        "loss": float(report["loss"].sum), "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def cases(shapes, platform: str):
    """(shape, length, attention, remat) of what a packed batch on this platform can use."""
    from areax.models import backends

    for shape in shapes:
        for length in LENGTHS:
            needs = backends.Needs(platform, "bfloat16", length, SHAPES[shape]["head_dim"])
            for backend in backends.BACKENDS:
                if not backends.refusals(backend, needs):
                    yield from ((shape, length, backend, remat) for remat in REMATS)


def table(rows) -> str:
    names = "chip, shape, packed tokens, attention, remat, tokens/s, MFU, by the plan, peak GB, by the plan".split(", ")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        cells = [r["chip"], r["shape"], f"{r['length']:,}", r["attention"], r["remat"]]
        if "failed" in r:
            cells += [r["failed"], "", "", "", ""]
        else:
            cells += [f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.1%}", f"{r['planned_mfu']:.1%}"]
            cells += [f"{r[peak] / 1e9:.2f}" if r[peak] else "" for peak in ("peak_bytes", "planned_peak_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows) -> None:
    """Adds these rows, in the place of earlier ones of the same case."""
    page, name = HERE / "chips.json", lambda row: [row[key] for key in CASE]
    old = json.loads(page.read_text()) if page.exists() else []
    new = [name(r) for r in rows]
    rows = sorted([r for r in old if name(r) not in new] + rows, key=name)
    page.write_text(json.dumps(rows, indent=1) + "\n")
    about = "\n\n".join(part for part in __doc__.strip().split("\n\n") if not part.startswith("    python"))
    (HERE / "CHIPS.md").write_text(f"# Training steps on accelerators\n\n{about}\n\n{table(rows)}\n")


def main(arguments) -> None:
    if arguments[:1] == ["--one"]:
        print(json.dumps(measure(**json.loads(arguments[1]))))
        return
    import jax

    device = jax.local_devices()[0]
    chip = next((name for kind, name in KINDS.items() if kind in device.device_kind), None)
    if arguments[:1] == ["--chip"]:
        chip, arguments = arguments[1], arguments[2:]
    if chip is None:
        sys.exit(f"chip.py: {device.device_kind} is not known; name the chip whose peak counts with --chip")
    shapes = arguments or [shape for shape in SHAPES if shape != "tiny"]
    if unknown := set(shapes) - SHAPES.keys():
        sys.exit(f"chip.py: a shape must be one of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    rows = [run(dict(zip(CASE, (chip, *case), strict=True))) for case in cases(shapes, device.platform)]
    print(table(rows))
    if "tiny" not in shapes:
        write(rows)


def run(case: dict) -> dict:
    """A case in a process of its own; the last line of its error where it ends with one, out of memory say."""
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has the device open, too
    words = [sys.executable, __file__, "--one", json.dumps(case)]
    done = subprocess.run(words, env=environ, text=True, capture_output=True)
    row = (
        json.loads(done.stdout)
        if done.returncode == 0
        else case | {"failed": done.stderr.strip().split("\n")[-1][:100]}
    )
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
