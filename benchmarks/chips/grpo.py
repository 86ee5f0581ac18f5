"""A whole run of `areax train grpo --serve.inside` at eta 1, from random weights to the final checkpoint.

Most ids of the vocabulary are outside the byte tokenizer, so completions decode to short text or none, and the reward
varies within groups.
"""

import json
import statistics
import string
import tempfile
from pathlib import Path

from chips import shapes, train


def score(text: str, row: dict) -> float:
    """The reward: 1 if the number of characters is even."""
    return float(len(text) % 2 == 0)


def measure(shape, dtype, groups, group_size, prompt, new, length, rows, slots, steps, *, chip, keep) -> dict:
    """Runs GRPO and averages its steps, without the first two, which compile, and the last, during which nothing is
    generated."""
    import random

    from areax.adapters import cli, tokenizer
    from areax.adapters.tracking import run_dir

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder, name) for name in ("model", "rows.jsonl", "run"))
        model.mkdir()
        tokenizer.save(tokenizer.byte_level(), model)
        (model / "config.json").write_text(json.dumps(shapes.hf(shape, length)))
        prompts = ["".join(rng.choices(string.ascii_lowercase, k=prompt)) for _ in range(groups * (steps + 2))]
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        options = {
            "model": model, "data": data, "out": out, "reward": f"{__file__}:score", "init": "random", "steps": steps,
            "groups": groups, "group-size": group_size, "eta": 1, "max-concurrent": 2 * groups, "length": length,
            "rows": rows, "sampling.max-new-tokens": new, "run.dtype": dtype, "run.remat": "dots",
            "serve.slots": slots, "serve.context": length, "serve.dtype": dtype,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if code := cli.main(["train", "grpo", *words, "--serve.inside"]):
            raise RuntimeError(f"areax train grpo ended with exit code {code}")
        lines = [line for line in run_dir.read_lines(out / run_dir.METRICS) if line["kind"] == "grpo"]
        summary = json.loads((out / run_dir.SUMMARY).read_text())
    counted = lines[2:-1]
    total = lambda name: sum(line[name] for line in counted)
    step_s = total("time_step")
    return {
        "steps": len(lines), "seconds": summary["seconds"], "first_step_s": lines[0]["time_step"],
        "step_s": step_s / len(counted), "tokens_per_s": total("tokens") / step_s,
        "sampled_tokens_per_s": sum(line["samples"] * line["length"] for line in counted) / step_s,
        **{f"{part}_share": total(f"time_{part}") / step_s for part in ("rollout", "update", "publish")},
        "push_pause_s": statistics.median(line["push_pause_s"] for line in lines if "push_pause_s" in line),
        "max_logp_diff": summary["max_logp_diff"], "peak_bytes": train.peak_bytes(),
    }  # fmt: skip
