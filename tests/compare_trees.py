"""Compares two checkouts of areax: python tests/compare_trees.py OLD NEW [--out FOLDER]

Runs the same commands in both, with the Python that runs this program: a seeded SFT run, a GRPO run at eta 0 with its
own servers, the printed objectives, and the options of every recipe. These must agree: each number of metrics.jsonl
that two runs of OLD agree on, the hashes of the exported weights, and the printed presets. Lists options that were
added, renamed or given another default, and public addresses that no longer exist.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny

from areax.rollout.tasks import arithmetic

MODEL = ["--length", "32", "--rows", "4", "--steps", "3", "--optim.lr", "0.01", "--optim.b2", "0.99"]
RUNS = {
    "sft": ["sft", *MODEL, "--batch", "8", "--learn", "last", "--heldout", "rows.jsonl", "--lora.rank", "0"],
    "lora": ["sft", *MODEL, "--batch", "8", "--lora.rank", "2"],
    "grpo": ["grpo", *MODEL, "--reward", "reward.py:reward", "--eta", "0", "--groups", "4",
             "--group-size", "4", "--sampling.max-new-tokens", "4", "--serve.slots", "8", "--serve.context", "64",
             "--objective.advantage.std", "none", "--samples-every", "1", "--heldout", "rows.jsonl"],
    "dpo": ["dpo", *MODEL, "--batch", "4"],
}  # fmt: skip
PUBLIC = (
    "areax.adapters.hf:load", "areax.adapters.hf:save", "areax.models:forward", "areax.models:score",
    "areax.models:Run", "areax.core.packing:pack", "areax.core.advantages:group", "areax.core.losses:GRPO",
    "areax.rollout.client:connect", "areax.rollout.workflows:single_turn", "areax.rollout.types:Sample",
    "areax.rollout.rewards:pool",
)  # fmt: skip
PROGRAM = """
import dataclasses, importlib, json, sys, typing
from areax.core import losses
def options(config, prefix=""):
    hints = typing.get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        hint, name = hints[field.name], prefix + field.name.replace("_", "-")
        group = bool(getattr(hint, "__metadata__", ()))
        parts = (hint.__origin__ if group else hint, *typing.get_args(hint))
        kind = next((t for t in parts if isinstance(t, type) and dataclasses.is_dataclass(t)), None)
        if kind is None:
            yield name, "required" if field.default is dataclasses.MISSING else repr(field.default)
        else:
            yield from options(kind, prefix if group else name + ".")
missing = []
for address in json.loads(sys.argv[1]):
    module, name = address.split(":")
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing.append(f"{address} ({error})")
recipes = {name: importlib.import_module(f"areax.recipes.{name}") for name in json.loads(sys.argv[2])}
print(json.dumps({
    "presets": {name: str(preset()) for name, preset in (losses.POLICIES | losses.PREFERENCES).items()},
    "options": {name: dict(options(module.Config)) for name, module in recipes.items()},
    "missing": missing,
}))
"""


def environment(tree: Path) -> dict[str, str]:
    """An environment in which `areax` is this checkout."""
    (tree / ".dev").mkdir(exist_ok=True)
    link = tree / ".dev/areax"
    if not link.exists():
        link.symlink_to("..")
    return os.environ | {"PYTHONPATH": str(tree / ".dev"), "PYTHONWARNINGS": "ignore"}


def described(tree: Path) -> dict:
    """Presets, options of the recipes, and public addresses that cannot be imported, of a checkout."""
    arguments = [json.dumps(PUBLIC), json.dumps(["sft", "grpo", "preference", "distill", "eval"])]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment(tree), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def ran(tree: Path, out: Path, place: Path) -> dict:
    """{run: (metrics lines, hashes of exported weights)} of all runs in a checkout."""
    results = {}
    for name, options in RUNS.items():
        print(f"{tree}: {name}", file=sys.stderr)
        data = "pairs.jsonl" if name == "dpo" else "rows.jsonl"
        command = [sys.executable, "-m", "areax", "train", *options, "--model", str(place / "model")]
        command += ["--data", data, "--out", str(out / name)]
        done = subprocess.run(command, env=environment(tree), cwd=place, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("seconds", None)  # two runs may agree on it by chance
        manifest = json.loads((out / name / "model/manifest.json").read_text())
        results[name] = (lines, {key: entry["xxh3_128"] for key, entry in manifest["tensors"].items()})
    return results


def same(name: str, old, new) -> bool:
    """Whether a metric is bitwise the same; sums in order of request completion may differ by rounding."""
    if name in ("length_begun", "length_bias") and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-12, abs_tol=1e-12)
    return old == new


def differences(first: list[dict], again: list[dict], new: list[dict]) -> list[str]:
    """Values that two runs of the old checkout agree on but a run of the new one does not."""
    found = [] if len(first) == len(new) else [f"{len(first)} lines of metrics, now {len(new)}"]
    for a, b, c in zip(first, again, new, strict=False):
        where = f"{a['kind']} {a['step']}"
        found += [
            f"{where}: {k} was {a[k]}, is {c.get(k)}" for k in a if a[k] == b.get(k) and not same(k, a[k], c.get(k))
        ]
        found += [f"{where}: {k} is new" for k in c if k not in a]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--out", type=Path, help="an empty folder for the runs; default: a new one")
    arguments = parser.parse_args()
    place = arguments.out or Path(tempfile.mkdtemp(prefix="compare-"))
    place.mkdir(parents=True, exist_ok=True)
    tiny.model(place / "model")
    (place / "reward.py").write_text("def reward(text, row):\n    return float(text.strip() == row['answer'])\n")
    rows = [row | {"completion": row["answer"]} for row in arithmetic.splits()["train"][:64]]
    tiny.rows(place / "rows.jsonl", rows)
    tiny.rows(place / "pairs.jsonl", [row | {"chosen": row["answer"], "rejected": "0"} for row in rows])
    old, new = arguments.old.resolve(), arguments.new.resolve()
    first, again, later = (
        ran(tree, place / name, place) for tree, name in ((old, "old"), (old, "again"), (new, "new"))
    )
    before, after = described(old), described(new)
    wrong = [f"{address} is gone" for address in after["missing"]]
    for name in RUNS:
        compared = sum(a[k] == b.get(k) for a, b in zip(first[name][0], again[name][0], strict=True) for k in a)
        found = differences(first[name][0], again[name][0], later[name][0])
        tensors = [key for key, value in first[name][1].items() if later[name][1].get(key) != value]
        found += [f"exported {key} differs" for key in tensors]
        print(f"{name}: {compared} numbers and {len(first[name][1])} exported tensors compared, {len(found)} differ")
        wrong += [f"{name}: {line}" for line in found]
    presets = [name for name, text in before["presets"].items() if after["presets"].get(name) != text]
    print(f"presets: {len(before['presets'])} compared, {len(presets)} print something else")
    wrong += [f"{name} prints:\n{after['presets'].get(name)}\nprinted:\n{before['presets'][name]}" for name in presets]
    for recipe, options in before["options"].items():
        now = after["options"][recipe]
        print(f"options of {recipe}: {len(options)} before, {len(now)} now")
        for name in sorted(options.keys() | now.keys()):
            if options.get(name) != now.get(name):
                print(f"  --{name}: {options.get(name, 'not there')} -> {now.get(name, 'not there')}")
    print(*wrong, sep="\n")
    print(f"compare: {'the same' if not wrong else f'{len(wrong)} differences'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
