"""Checks the results of a demo and its controls against docs/demo.md: `demo_holds.py [FOLDER]`, runs/demo by default.

Of a chat model's first steps (`make demo-real-short`) it checks that all parts ran and what they wrote.
"""

import json
import sys
from pathlib import Path

import numpy as np

from areax.adapters import gguf, safetensors
from areax.recipes import demo

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
summary = json.loads((out / "summary.json").read_text())
task, steps = json.loads((out / demo.STARTED).read_text())["task"], summary["rl_steps"]
number = lambda name: float("nan") if summary[name] is None else summary[name]  # which holds no rule


def as_rounded(stored: np.ndarray, x: np.ndarray) -> bool:
    """Whether numbers are those of x, rounded to 8 bits with a scale for each 32 of a matrix."""
    if x.ndim == 1:
        return np.array_equal(stored, x)
    gap, largest = (np.abs(each).reshape(-1, 32).max(-1) for each in (stored.astype(np.float32) - x, x))
    return bool((gap <= 0.6 * largest / 127).all())  # half a step, and a scale of 16 bits


rules = {
    "servers have the trainer's version": all(
        x.split("-")[0] == str(steps) for x in summary["server_version"].split(", ")
    ),
    "max |d logp| at most 1e-4": number("max_logp_diff") <= 1e-4,
    "k3 below 1e-9": number("mismatch_k3") < 1e-9,
    "checkpoint and report are there": all(Path(summary[k]).exists() for k in ("checkpoint", "report")),
}
if task == "chat":
    rules["5 to 20 % before"] = 0.05 <= number("base_accuracy") <= 0.2
    if steps >= demo.STEPS["chat"][1]:
        rules |= {
            "at least 50 held-out rows": summary["heldout_rows"] >= 50,
            "at least 45 % after GRPO": number("rl_accuracy") >= 0.45,
        }
    before, after = (safetensors.read(path) for path in (out / "base", Path(summary["checkpoint"])))
    changed = [np.abs(after[name] - before[name]).max() for name in before]
    rules["all weights changed, and none by more than 0.01"] = 0 < min(changed) and max(changed) < 0.01
    _, _, written = gguf.opened(summary["gguf"])
    rules["the GGUF file has the checkpoint's weights"] = written.keys() == after.keys() and all(
        as_rounded(written[name].read(), after[name]) for name in after
    )
else:
    rules |= {
        "at least 500 held-out rows": summary["heldout_rows"] >= 500,
        "below 55 % after SFT": number("sft_accuracy") < 0.55,
        "at least 90 % after GRPO": number("rl_accuracy") >= 0.9,
    }
if (out / "controls.json").exists():
    for name, accuracy in json.loads((out / "controls.json").read_text()).items():
        limit = demo.CONTROLS[task][name]
        rules[f"control {name} below {limit:.0%}"] = accuracy is not None and accuracy < limit
for rule, holds in rules.items():
    print("holds " if holds else "BROKEN", rule)
print(f"demo: {sum(rules.values())} passed, {len(rules) - sum(rules.values())} failed, {summary['seconds']:.0f} s")
sys.exit(not all(rules.values()))
