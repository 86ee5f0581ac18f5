"""Held-out accuracy by step of RL on a real model, beside TRL's GRPOTrainer with the same weights, prompts and options.

    python benchmarks/learning_real.py OUT [--seeds 3] [--write]

SmolLM2-135M-Instruct (`real.py`) learns sums and differences of two digits, asked for with three examples
(`areax.rollout.tasks.digits`): 8 prompts of 8 completions a step, at most 8 tokens each, a constant learning rate of
1e-5, fp32, synchronous; everything else is each library's default. Accuracy is greedy, on the task's held-out rows.
Seeds change the order of prompts and the sampling. OUT keeps the model and the runs that are complete. --write stores
the case `learning_real` of results.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import real
import run

PROMPTS, GROUP, NEW, LR = 8, 8, 8, 1e-5
STEPS, EVERY = 20, 5


def ours(model: Path, out: Path, seed: int) -> dict[int, float]:
    """{step: accuracy} of `areax train grpo`."""
    from areax.core.optim import Optimizer
    from areax.recipes import grpo
    from areax.recipes.shared.rl_options import Evaluation, Rollout, Training
    from areax.rollout.types import Sampling

    config = grpo.Config(
        model=str(model), data=str(out / "train.jsonl"), out=str(out / f"areax-{seed}"), steps=STEPS, seed=seed,
        reward="areax.rollout.tasks.digits:reward",
        rollout=Rollout(groups=PROMPTS, group_size=GROUP, eta=0, sampling=Sampling(max_new_tokens=NEW)),
        training=Training(optim=Optimizer(lr=LR)),
        evaluation=Evaluation(heldout=(str(out / "heldout.jsonl"),), evaluate_every=EVERY),
    )  # fmt: skip
    summary = grpo.main(config)
    if not summary["complete"]:
        raise SystemExit(130)
    return {int(step): accuracy for step, accuracy in summary["accuracies"].items()}


def trl(model: Path, out: Path, seed: int) -> dict[int, float]:
    """{step: accuracy} of TRL's GRPOTrainer, in microbatches of 16 without recomputation."""
    import datasets
    import peers
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from areax.rollout.tasks import digits

    rows = {name: list(map(json.loads, open(out / f"{name}.jsonl"))) for name in ("train", "heldout")}
    tokens = AutoTokenizer.from_pretrained(model, padding_side="left")
    net, found = peers.causal_lm(str(model)), {}
    asked = tokens.apply_chat_template(
        [row["messages"] for row in rows["heldout"]], add_generation_prompt=True, padding=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip

    def rewards(completions, answer, **_):
        texts = (completion[0]["content"] for completion in completions)
        return [digits.reward(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]

    class Evaluating(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step % EVERY == 0:
                self.on_train_end(args, state, control)

        @torch.inference_mode()
        def on_train_end(self, args, state, control, **_):
            made = net.eval().generate(**asked, do_sample=False, max_new_tokens=NEW)
            net.train()
            texts = tokens.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
            found[state.global_step] = statistics.mean(map(digits.reward, texts, rows["heldout"]))

    settings = GRPOConfig(
        output_dir=str(out / f"trl-{seed}"), use_cpu=True, bf16=False, gradient_checkpointing=False, seed=seed,
        per_device_train_batch_size=16, gradient_accumulation_steps=PROMPTS * GROUP // 16, num_generations=GROUP,
        max_completion_length=NEW, learning_rate=LR, lr_scheduler_type="constant", max_steps=STEPS, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    chats = [{"prompt": row["messages"], "answer": row["answer"]} for row in rows["train"]]
    trainer = GRPOTrainer(
        net, rewards, args=settings, train_dataset=datasets.Dataset.from_list(chats), processing_class=tokens,
        callbacks=[Evaluating()],
    )  # fmt: skip
    trainer.train()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    from areax.rollout.tasks import digits

    out, model = given.out, given.out / "model"
    out.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        real.write("R", str(model))
    for name, rows in digits.splits(digits.Task()).items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: dict[str, list] = {"areax": [], "trl": []}
    for seed in range(given.seeds):
        for name, side in (("areax", ours), ("trl", trl)):
            began = time.monotonic()
            accuracies = side(model, out, seed)
            found[name].append(accuracies)
            shown = ", ".join(f"{step}: {accuracy:.2f}" for step, accuracy in accuracies.items())
            print(f"{name:5} seed {seed}: {shown}; {time.monotonic() - began:.0f} s", flush=True)
    print("| step | areax | TRL |\n|---|---|---|")
    for step in found["areax"][0]:
        means = (statistics.mean(accuracies[step] for accuracies in found[name]) for name in ("areax", "trl"))
        print(f"| {step} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    if given.write:
        here, there = (statistics.mean(runs[STEPS] for runs in found[name]) for name in ("areax", "trl"))
        row = {"case": "learning_real", "model": "R", "peer": "trl", "ours": here, "theirs": there, "unit": "accuracy"}
        run.store([row | {"ratio": here / there, "details": found} | run.origin()])


if __name__ == "__main__":
    main()
