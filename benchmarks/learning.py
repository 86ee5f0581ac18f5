"""Steps until a small task is learnt, beside TRL's GRPOTrainer: same weights, prompts, rewards, batch, learning rate.

    python benchmarks/learning.py OUT [--write]

The task is the demo's (docs/demo.md): two-digit addition after imitation of a teacher that forgets the carry. Each side
trains from that checkpoint with 16 prompts of 8 completions a step, fp32, and a learning rate of 2e-4; everything else
is the library's default. The task is learnt at the step whose samples and those of the four steps before have a mean
reward of at least 0.8. Seeds change the order of prompts and the sampling. OUT keeps the checkpoint and the runs that
are complete. --write stores the case `learning` of results.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import run

SEEDS = range(9)
PROMPTS, GROUP, NEW = 16, 8, 4
LR, STEPS = 2e-4, 200  # TRL's learning rate falls linearly to 0 in this many; it has learnt long before
OURS = 60  # steps; a constant learning rate does not depend on them
LEVEL, WINDOW = 0.8, 5


def reached(rewards: list[float]) -> int | None:
    """The first step, counted from 1, at which the mean of the last WINDOW rewards is at least LEVEL."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if statistics.mean(rewards[end - WINDOW : end]) >= LEVEL), None)


def start(out: Path) -> Path:
    """The demo's data, and its model after imitation; returns the model's folder."""
    from areax.recipes import demo, sft

    config = demo.Config()
    if not (out / "sft" / "model").exists():
        demo.write_data(config, out)
        sft.main(demo.sft_config(config, out))
    return out / "sft" / "model"


def ours(model: Path, out: Path, seed: int, eta: int) -> list[float]:
    """Mean rewards of each step of `areax train grpo`."""
    from areax.adapters.tracking import run_dir
    from areax.core.optim import Optimizer
    from areax.recipes import grpo
    from areax.recipes.shared.rl_options import Rollout, Serving, Training
    from areax.rollout.servers.local import Serve
    from areax.rollout.types import Sampling

    config = grpo.Config(
        model=str(model), data=str(out / "data/train.jsonl"), out=str(out / f"areax-eta{eta}-{seed}"),
        reward="areax.rollout.tasks.arithmetic:reward", steps=OURS, seed=seed,
        rollout=Rollout(groups=PROMPTS, group_size=GROUP, eta=eta, sampling=Sampling(max_new_tokens=NEW)),
        training=Training(length=64, optim=Optimizer(lr=LR)),
        serving=Serving(serve=Serve(slots=PROMPTS * GROUP, context=64)),
    )  # fmt: skip
    if not grpo.main(config)["complete"]:
        raise SystemExit(130)
    return [line["reward"] for line in run_dir.read_lines(Path(config.out) / run_dir.METRICS) if line["kind"] == "grpo"]


def trl(model: Path, out: Path, seed: int) -> list[float]:
    """Mean rewards of each step of TRL's GRPOTrainer; it stops once the task is learnt."""
    import datasets
    import peers
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from areax.rollout.tasks import arithmetic

    rows = [json.loads(line) for line in (out / "data/train.jsonl").read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]

    def rewards(completions, answer, **_):
        texts = (completion[0]["content"] for completion in completions)
        return [arithmetic.reward(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]

    class Reached(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            rewards = [line["reward"] for line in state.log_history if "reward" in line]
            control.should_training_stop |= reached(rewards) is not None

    settings = GRPOConfig(
        output_dir=str(out / f"trl-{seed}"), use_cpu=True, bf16=False, gradient_checkpointing=False, seed=seed,
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=NEW,
        learning_rate=LR, max_steps=STEPS, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        peers.causal_lm(str(model)), rewards, args=settings, train_dataset=datasets.Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Reached()],
    )  # fmt: skip
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    out = given.out
    out.mkdir(parents=True, exist_ok=True)
    model = start(out)
    sides = {
        "areax, eta 0": lambda seed: ours(model, out, seed, 0),  # synchronous, as TRL is
        "areax, eta 1": lambda seed: ours(model, out, seed, 1),  # the default
        "trl": lambda seed: trl(model, out, seed),
    }
    found: dict[str, list] = {}
    for name, side in sides.items():
        for seed in SEEDS:
            began = time.monotonic()
            rewards = side(seed)
            found.setdefault(name, []).append({"seed": seed, "steps": reached(rewards), "first_reward": rewards[0]})
            print(
                f"{name:12} seed {seed}: learnt at step {reached(rewards)}, first reward {rewards[0]:.2f}, "
                f"{time.monotonic() - began:.0f} s for {len(rewards)} steps",
                flush=True,
            )
    steps = {name: statistics.median(row["steps"] or STEPS + 1 for row in rows) for name, rows in found.items()}
    print(f"median steps: {steps}")
    if given.write:
        here, there = (1 / steps[name] for name in ("areax, eta 0", "trl"))
        row = {"case": "learning", "model": None, "peer": "trl", "ours": here, "theirs": there, "unit": "1/steps"}
        run.store([row | {"ratio": here / there, "details": found} | run.origin()])


if __name__ == "__main__":
    main()
