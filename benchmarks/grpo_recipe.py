"""A synchronous step of GRPO on a chat model: 8 completions of at most 8 tokens for each of 8 prompts of 87 tokens,
sums and differences behind three examples; `areax train grpo --eta 0` with a server of its own against TRL's
GRPOTrainer, each with its defaults; fp32, temperature 1, no KL. Answers have 2 to 3 tokens; prompts are most of it.
"""

import json
from pathlib import Path

import peers
import sizes

UNIT, PEERS = "samples/s", {"R": ("trl",)}
PROMPTS, GROUP, PROMPT, NEW = 8, 8, 87, 8
STEPS, LR = 10_000, 1e-6  # more steps than will be run


def work(model):
    """(samples, FLOPs of each by itself if its answer had 2 tokens: a forward pass to sample, then training)."""
    passes = (sizes.flops(model, [PROMPT + 2], backward=backward) for backward in (False, True))
    return PROMPTS * GROUP, PROMPTS * GROUP * sum(passes)


def rows() -> list[dict]:
    from areax.rollout.tasks import digits

    return digits.splits(digits.Task())["train"][:PROMPTS]


def ours(folder, model):
    """Returns a function that runs one step and returns the number of samples."""
    from areax.core.optim import Optimizer
    from areax.recipes import grpo
    from areax.recipes.shared.rl_options import Rollout, Training
    from areax.rollout.types import Sampling

    out = Path(folder).parent
    data = out / "digits.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    config = grpo.Config(
        model=folder, data=str(data), out=str(out / "areax-grpo"), steps=STEPS,
        reward="areax.rollout.tasks.digits:reward",
        rollout=Rollout(groups=PROMPTS, group_size=GROUP, eta=0, sampling=Sampling(max_new_tokens=NEW)),
        training=Training(optim=Optimizer(lr=LR)),
    )  # fmt: skip
    return peers.paced_recipe(grpo, "train_on_batch", lambda: grpo.main(config), lambda report: PROMPTS * GROUP)


def trl(folder, model):
    import datasets
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from areax.rollout.tasks import digits

    settings = GRPOConfig(
        output_dir=str(Path(folder).parent / "trl"), use_cpu=True, bf16=False, num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP, max_completion_length=NEW, learning_rate=LR,
        lr_scheduler_type="constant", max_steps=STEPS, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    chats = [{"prompt": row["messages"], "answer": row["answer"]} for row in rows()]

    def rewards(completions, answer, **_):
        texts = (completion[0]["content"] for completion in completions)
        return [digits.reward(text, {"answer": right}) for text, right in zip(texts, answer, strict=True)]

    def loop(pause):
        trainer = GRPOTrainer(
            peers.causal_lm(folder), rewards, args=settings, train_dataset=datasets.Dataset.from_list(chats),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[peers.pausing(pause, lambda: PROMPTS * GROUP)],
        )  # fmt: skip
        trainer.train()

    return peers.paced(loop)
