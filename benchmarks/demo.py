"""Runs the demo over seeds, splits and eta, then its controls, and writes DEMO.md with the results.

python benchmarks/demo.py runs/demo-table
"""

import json
import subprocess
import sys
from pathlib import Path

# (seed, split, eta): three new seeds, then two other splits. Settings were tuned with seed 0 on the development rows of
# split 7.
RUNS = [(1, 0, 1), (2, 0, 1), (3, 0, 1), (1, 1, 2), (1, 2, 2)]
HEAD = """# The demo over seeds and splits

`python benchmarks/demo.py runs/demo-table` on a machine with two cores. Held-out accuracy is greedy; no pair of
operands of a held-out row occurs in training, in either order. Settings were chosen with seed 0 on the development rows
of split 7; none of the rows below was used for that. Always forgetting the carry scores 25 %; imitating the teacher's
mixture scores 47.5 %.

| seed | split | eta | rows | after SFT | after GRPO | steps | max d logp (nats) | k3 | server version | seconds |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def run(out: Path, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "areax", "demo", "--out", str(out), *options], check=True)


def row(seed: int, split: int, eta: int, s: dict) -> str:
    return (
        f"| {seed} | {split} | {eta} | {s['heldout_rows']} | {s['sft_accuracy']:.1%} | {s['rl_accuracy']:.1%} | "
        f"{s['rl_steps']} | {s['max_logp_diff']:.1e} | {s['mismatch_k3']:.1e} | {s['server_version']} | "
        f"{s['seconds']:.0f} |\n"
    )


def main(root: Path) -> None:
    """Runs what is missing in `root`, and rewrites the table after each run."""
    text, table = HEAD, Path(__file__).with_name("DEMO.md")
    for i, (seed, split, eta) in enumerate(RUNS):
        out = root / f"seed{seed}-split{split}-eta{eta}"
        options = ["--seed", str(seed), "--split", str(split), "--eta", str(eta)]
        if not (out / "summary.json").exists():
            run(out, *options)
        text += row(seed, split, eta, json.loads((out / "summary.json").read_text()))
        if i == 0 and not (out / "controls.json").exists():
            run(out, *options, "--controls")
        controls = json.loads((root / "seed{}-split{}-eta{}".format(*RUNS[0]) / "controls.json").read_text())
        table.write_text(
            f"{text}\nControls, from the SFT checkpoint of the first row: with rewards permuted among the completions "
            f"of a batch\n{controls['shuffled']:.1%}, with learning rate 0 {controls['frozen']:.1%}.\n"
        )
    print(table.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
