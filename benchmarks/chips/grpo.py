"""A whole run of `areax train grpo --serve.inside`, from random weights to the final checkpoint.

Most ids of the vocabulary are outside the byte tokenizer, so completions decode to short text or none, and the reward
varies within groups.
"""

import json
import statistics
import string
import tempfile
from pathlib import Path

from chips import planned, shapes, train


def score(text: str, row: dict) -> float:
    """The reward: 1 if the number of characters is even."""
    return float(len(text) % 2 == 0)


def measure(shape, length, prompt, steps, options, *, chip, keep) -> dict:
    """Runs GRPO and averages its steps, without the first two, which compile, and the last, during which nothing is
    generated.

    Args:
      length: of the model's context.
      prompt: characters of each.
      options: of `areax train grpo`; others have their defaults.
    """
    import random

    from areax.adapters import cli, tokenizer
    from areax.adapters.tracking import run_dir

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder, name) for name in ("model", "rows.jsonl", "run"))
        model.mkdir()
        tokenizer.save(tokenizer.byte_level(), model)
        (model / "config.json").write_text(json.dumps(shapes.hf(shape, length)))
        prompts = ["".join(rng.choices(string.ascii_lowercase, k=prompt)) for _ in range(32 * (steps + 2))]
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        own = {"model": model, "data": data, "out": out, "reward": f"{__file__}:score", "steps": steps}
        words = [word for name, value in (own | options).items() for word in (f"--{name}", str(value))]
        words += ["--init", "random", "--serve.inside"]
        figures = planned.figures("grpo", words, chip)
        if code := cli.main(["train", "grpo", *words]):
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
        "max_logp_diff": summary["max_logp_diff"], "peak_bytes": train.peak_bytes(), **figures,
    }  # fmt: skip
