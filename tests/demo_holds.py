"""Checks the results of `make demo` and `make demo-controls` in runs/demo against docs/demo.md."""

import json
import sys
from pathlib import Path

out = Path("runs/demo")
summary = json.loads((out / "summary.json").read_text())
steps = summary["rl_steps"]
number = lambda name: float("nan") if summary[name] is None else summary[name]  # which holds no rule
rules = {
    "at least 500 held-out rows": summary["heldout_rows"] >= 500,
    "below 55 % after SFT": number("sft_accuracy") < 0.55,
    "at least 90 % after GRPO": number("rl_accuracy") >= 0.9,
    "servers have the trainer's version": all(
        x.split("-")[0] == str(steps) for x in summary["server_version"].split(", ")
    ),
    "max |d logp| at most 1e-4": number("max_logp_diff") <= 1e-4,
    "k3 below 1e-9": number("mismatch_k3") < 1e-9,
    "checkpoint and report are there": all(Path(summary[k]).exists() for k in ("checkpoint", "report")),
}
if (out / "controls.json").exists():
    for name, accuracy in json.loads((out / "controls.json").read_text()).items():
        rules[f"control {name} below 60 %"] = accuracy is not None and accuracy < 0.6
for rule, holds in rules.items():
    print("holds " if holds else "BROKEN", rule)
print(f"demo: {sum(rules.values())} passed, {len(rules) - sum(rules.values())} failed, {summary['seconds']:.0f} s")
sys.exit(not all(rules.values()))
