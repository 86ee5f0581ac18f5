"""A training step on this machine's accelerator: tokens/s, MFU and peak memory, vs transformers and the plan.

    python chip.py [--chip h200] [shape ...]

16,384 and 4,096 tokens in four sequences of equal length, bf16 over fp32 master weights, AdamW: areax packs them into
one row and uses the kernels chosen by `auto`, with remat "dots" and "full"; transformers gets a batch without padding
under autocast, with torch's scaled-dot-product attention and fused AdamW, without and with gradient checkpointing, if
torch sees the accelerator. Each case runs in a separate process: peak memory counts from its start. MFU is the plan's
model FLOPs over the chip's peak on its data sheet, without recomputation. Writes chips.json and CHIPS.md after each
case; other cases are kept.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
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
    "Qwen3-30B-A3B-2-layers": COMMON | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "tiny": COMMON | dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=512,
    ),
}  # fmt: skip
LENGTHS, SEQUENCES = (16384, 4096), 4  # tokens per step, and number of sequences
REMATS = {"areax": ("dots", "full"), "transformers": ("none", "full")}
STEPS, UNCOUNTED = 10, 3
ADAM = dict(lr=1e-6, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
CASE = "chip", "shape", "length", "system", "remat"
PACKAGES = {"areax": ("jax",), "transformers": ("transformers", "torch")}
KINDS = {"H100": "h100", "H200": "h200", "B200": "b200", "TPU v5p": "v5p", "TPU v6": "v6e"}  # in JAX's device_kind


def planned(chip: str, shape: str, length: int, remat: str) -> dict:
    """Figures of the plan by name."""
    from areax import models
    from areax.adapters.commands import plan
    from areax.parallel.mesh import Layout

    @dataclass(frozen=True)
    class Config:
        model: str
        length: int
        run: models.Run
        batch: int = SEQUENCES
        rows: int = 1
        mesh: Layout = Layout()

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        options = plan.Options(chip=chip, sample_tokens=length // SEQUENCES)
        return plan.plan(Config(folder, length, models.Run(dtype="bfloat16", remat=remat)), options)["figures"]


def tokens(shape: str, length: int):
    import numpy as np

    return np.random.default_rng(0).integers(0, SHAPES[shape]["vocab_size"], (SEQUENCES, length // SEQUENCES))


def areax(shape: str, length: int, remat: str):
    """(function that runs a step and returns its loss, function that returns peak memory in bytes or None)."""
    import jax

    from areax import models
    from areax.core import losses, optim, packing, param, step
    from areax.rollout.types import supervised

    config = models.config_from_hf(SHAPES[shape])
    table, objective = models.table(config), losses.SFT()
    optimizer = optim.make_optimizer(optim.Optimizer(**ADAM), table)
    run = models.Run(dtype="bfloat16", remat=remat)
    update = step.make_step(partial(models.score, config=config, run=run), objective, optimizer)
    state = step.init(jax.jit(lambda key: param.init(key, table))(jax.random.key(0)), optimizer)
    rows = enumerate(tokens(shape, length))
    samples = [supervised(row[:1], row[1:], sample=i, rollout=i, group=i) for i, row in rows]
    batch = objective.prepare(jax.device_put(packing.pack(samples, length, rows=1)))

    def once():
        nonlocal state
        state, report = update(state, batch)
        jax.block_until_ready(state)
        return float(report["loss"].sum)

    return once, lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # None on a CPU


def transformers(shape: str, length: int, remat: str):
    """`areax` for transformers."""
    import peers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_float32_matmul_precision("high")
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("cuda"):
        net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        token = torch.from_numpy(tokens(shape, length)).cuda()
    if remat == "full":
        net.gradient_checkpointing_enable()
    optimizer = peers.torch_adamw(net.train(), **ADAM)

    def once():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = net(input_ids=token, labels=token, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return once, torch.cuda.max_memory_allocated


def measure(chip: str, shape: str, length: int, system: str, remat: str) -> dict:
    """One row of chips.json."""
    from areax.parallel.planner import chips

    figures = planned(chip, shape, length, "dots" if system == "transformers" else remat)
    once, peak = {"areax": areax, "transformers": transformers}[system](shape, length, remat)
    seconds = []
    for _ in range(UNCOUNTED + STEPS):
        start = time.perf_counter()
        loss = once()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[UNCOUNTED:])
    row = {
        "chip": chip, "shape": shape, "length": length, "system": system, "remat": remat,
        "tokens_per_s": length / median, "step_s": median,
        "step_s_min": min(seconds[UNCOUNTED:]), "step_s_max": max(seconds[UNCOUNTED:]), "first_s": seconds[0],
        "mfu": figures["model_flops"]["value"] / median / chips.CHIPS[chip].flops, "peak_bytes": peak(), "loss": loss,
        "versions": {name: version(name) for name in PACKAGES[system]}, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    if system == "areax":
        row |= {f"planned_{name}": figures[name]["value"] for name in ("mfu", "peak_bytes")}
    return row


def table(rows) -> str:
    names = "chip, shape, tokens, system, remat, tokens/s, MFU, by the plan, peak GB, by the plan".split(", ")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        cells = [r["chip"], r["shape"], f"{r['length']:,}", r["system"], r["remat"]]
        if "failed" in r:
            cells += [r["failed"], "", "", "", ""]
        else:
            share = lambda name, r=r: f"{r[name]:.1%}" if name in r else ""
            size = lambda name, r=r: f"{r[name] / 1e9:.1f}" if r.get(name) else ""
            cells += [f"{r['tokens_per_s']:,.0f}", share("mfu"), share("planned_mfu")]
            cells += [size("peak_bytes"), size("planned_peak_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(row) -> None:
    """Adds this row, replacing an earlier one of the same case."""
    page, name = HERE / "chips.json", lambda row: [row[key] for key in CASE]
    old = json.loads(page.read_text()) if page.exists() else []
    rows = sorted([r for r in old if name(r) != name(row)] + [row], key=name)
    page.write_text(json.dumps(rows, indent=1) + "\n")
    about = "\n\n".join(part for part in __doc__.strip().split("\n\n") if not part.startswith("    python"))
    (HERE / "CHIPS.md").write_text(f"# Training steps on accelerators\n\n{about}\n\n{table(rows)}\n")


def systems() -> list[str]:
    """Systems to measure: transformers only if torch has an accelerator."""
    sees = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", sees], capture_output=True)
    if found.returncode:
        print("chip.py: torch sees no accelerator, measuring only areax", file=sys.stderr)
    return ["areax"] if found.returncode else ["areax", "transformers"]


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
        sys.exit(f"chip.py: unknown device {device.device_kind}; choose the chip for peak FLOP/s with --chip")
    shapes = arguments or [shape for shape in SHAPES if shape != "tiny"]
    if unknown := set(shapes) - SHAPES.keys():
        sys.exit(f"chip.py: a shape must be one of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    rows = []
    for length, shape, system in itertools.product(LENGTHS, shapes, systems()):
        for remat in REMATS[system]:
            rows.append(run(dict(zip(CASE, (chip, shape, length, system, remat), strict=True))))
            if shape != "tiny":
                write(rows[-1])
    print(table(rows))


def run(case: dict) -> dict:
    """Runs a case in a separate process; returns its row, or the last line of its error, e.g. out of memory."""
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process uses the device too
    words = [sys.executable, __file__, "--one", json.dumps(case)]
    done = subprocess.run(words, env=environ, text=True, capture_output=True)
    row = (
        json.loads(done.stdout.strip().split("\n")[-1])
        if done.returncode == 0
        else case | {"failed": done.stderr.strip().split("\n")[-1][:100]}
    )
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
