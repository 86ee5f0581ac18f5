"""Lines of a metrics.jsonl, and what a sink should have of them."""

import json
import math


def log(run, steps, kind="grpo", plus=0.0):
    for step in steps:
        ages = {"edges": [0, 1, 2], "counts": [step, 2]}
        odd = math.inf if step == 2 else 0.25
        run.log(kind, step, reward=step + plus, odd=odd, refused=step, missing=None, staleness_hist=ages)


def wanted(path):
    """{tag: [(step, value)]} of a metrics.jsonl, parsed independently of our code."""
    found = {}
    for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        odd = {name: float(value) for name, value in line.pop("nonfinite", {}).items()}
        for name, value in (line | odd).items():
            if name not in ("step", "kind", "seconds") and isinstance(value, int | float):
                found.setdefault(f"{line['kind']}/{name}", []).append((line["step"], value))
    return found
