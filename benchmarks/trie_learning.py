"""Learning with tries and without: the demo's task behind a long system prompt, from the same weights, over seeds.

    python benchmarks/trie_learning.py OUT

The task is two-digit addition after imitation of a teacher that forgets the carry (docs/demo.md), each question behind
a system prompt of 239 digits and signs. Imitation runs once. Then GRPO trains from its checkpoint with `--trie auto`
and with `--trie off`, in turns, with the same seeds: 16 prompts of 8 completions a step, the server in a process of its
own, eta 1. Sampling is asynchronous, so no two runs are equal: the spread over seeds says what a difference means. OUT
keeps the checkpoint and the runs that are complete. The table of RESULTS.md is what it prints.
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

TRIES, SEEDS = ("auto", "off"), (0, 1, 2)
PROMPTS, GROUP = 16, 8
SFT_STEPS, STEPS, WINDOW = 600, 50, 10  # WINDOW: steps over which rewards are averaged
LENGTH = 1040  # tokens of a row: four samples of the longest without tries
LR = 2e-4


def start(out: Path) -> Path:
    """The demo's data with the system prompt, and its model after imitation; returns the model's folder."""
    from areax.recipes import demo, sft

    config = demo.Config(sft_steps=SFT_STEPS)
    model = out / "sft/model"
    if model.exists():
        return model
    demo.write_data(config, out, {**demo.MODEL, "max_position_embeddings": 4096})
    rng = random.Random(0)
    system = {"role": "system", "content": "+".join(str(rng.randrange(10, 100)) for _ in range(80))}
    for file in (out / "data").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["messages"] = [system, {"role": "user", "content": row.pop("prompt")}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft.main(replace(demo.sft_config(config, out), length=2 * LENGTH, rows=3, trie="auto"))
    return model


def run(model: Path, out: Path, seed: int, trie: str) -> tuple[list[dict], dict]:
    """Metrics of the steps, and the summary, of `areax train grpo`."""
    from areax.adapters.tracking import run_dir
    from areax.core.optim import Optimizer
    from areax.recipes import grpo
    from areax.recipes.shared.rl_options import Evaluation, Rollout, Serving, Training
    from areax.rollout.servers.local import Serve
    from areax.rollout.types import Sampling

    config = grpo.Config(
        model=str(model), data=str(out / "data/train.jsonl"), out=str(out / f"{trie}-{seed}"),
        reward="areax.rollout.tasks.arithmetic:reward", steps=STEPS, seed=seed,
        rollout=Rollout(groups=PROMPTS, group_size=GROUP, sampling=Sampling(max_new_tokens=4)),
        training=Training(length=LENGTH, rows=1, trie=trie, optim=Optimizer(lr=LR)),
        serving=Serving(serve=Serve(slots=PROMPTS * GROUP, context=320)),
        evaluation=Evaluation(heldout=(str(out / "data/heldout.jsonl"),)),
    )  # fmt: skip
    summary = grpo.main(config)
    if not summary["complete"]:
        raise SystemExit(130)
    lines = run_dir.read_lines(Path(config.out) / run_dir.METRICS)
    return [line for line in lines if line["kind"] == "grpo"], summary


def row(seed: int, trie: str, lines: list[dict], summary: dict) -> str:
    """A line of the table. Medians and the curve leave out evaluations; the first step compiles."""
    rewards = [line["reward"] for line in lines]
    curve = " ".join(f"{statistics.mean(rewards[i : i + WINDOW]):.2f}" for i in range(0, STEPS, WINDOW))
    median = lambda name: statistics.median(line[name] for line in lines[1:])
    ratio = f"{median('trie_ratio'):.3f}" if trie == "auto" else "-"
    return (
        f"| {seed} | {trie} | {summary['accuracies']['0']:.1%} | {summary['accuracy']:.1%} | {curve} | {ratio} | "
        f"{median('time_update'):.2f} | {median('time_step'):.2f} | {summary['max_logp_diff']:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = start(out)
    print(
        f"| seed | --trie | accuracy after SFT | after {STEPS} steps | mean reward, every {WINDOW} steps | "
        "trie_ratio | s per update | s per step | max d logp (nats) |\n|---|---|---|---|---|---|---|---|---|"
    )
    accuracies: dict[str, list[float]] = {trie: [] for trie in TRIES}
    for seed in SEEDS:
        for trie in TRIES:
            lines, summary = run(model, out, seed, trie)
            accuracies[trie].append(summary["accuracy"])
            print(row(seed, trie, lines, summary), flush=True)
    for trie, found in accuracies.items():
        print(f"--trie {trie}: accuracy {statistics.mean(found):.1%}, standard deviation {statistics.stdev(found):.1%}")


if __name__ == "__main__":
    main()
