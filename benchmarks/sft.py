"""A step of `areax train sft` on 4 problems of GSM8K with its defaults, against TRL's SFTTrainer with its own, which
recompute activations; fp32, a constant learning rate. Every step has the same rows, so that losses can be compared.
"""

from pathlib import Path

import peers
import real
import sizes

UNIT, PEERS = "tokens/s", {"R": ("trl",)}
STEPS, LR = 10_000, 1e-6  # more steps than will be run
TOKENS = {4: 674, 32: 7352}  # of so many rows


def case(batch: int, rank: int = 0):
    """(work, ours, trl), the functions that `run.py` looks for, for `batch` rows a step; `rank` is that of adapters on
    all matrices of layers, 0 = all weights are trained."""

    def work(model):
        """Of the FLOPs those of attention and, with adapters, of gradients of frozen weights are left out."""
        return TOKENS[batch], (2 if rank else 3) * 2 * sizes.matmul_weights(model) * TOKENS[batch]

    def ours(folder, model):
        """Returns a function that runs one step and returns its loss."""
        from areax.core.optim import Optimizer
        from areax.models.lora import Lora
        from areax.recipes import sft
        from areax.recipes.shared import offline

        config = sft.Config(
            model=folder, data="", out=str(Path(folder).parent / f"areax-sft-{batch}-{rank}"), steps=STEPS, batch=batch,
            optim=Optimizer(lr=LR), lora=Lora(rank=rank),
        )  # fmt: skip
        rows, loss = real.problems("train", batch), lambda report: float(report["loss"].sum)
        return peers.paced_recipe(offline, "train_step", lambda: sft.main(config, rows), loss)

    def trl(folder, model):
        import datasets
        from peft import LoraConfig
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(
            output_dir=str(Path(folder).parent / "trl"), use_cpu=True, bf16=False, per_device_train_batch_size=batch,
            learning_rate=LR, lr_scheduler_type="constant", max_steps=STEPS, save_strategy="no", report_to="none",
            logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        tokens = AutoTokenizer.from_pretrained(folder)
        ask = lambda row: tokens.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
        )  # fmt: skip
        # as texts: in a conversation it would also learn the newline behind the end of a turn
        rows = [{"prompt": ask(row), "completion": row["completion"]} for row in real.problems("train", batch)]

        def loop(pause):
            trainer = SFTTrainer(
                peers.causal_lm(folder), settings, train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tokens, callbacks=[peers.pausing(pause, "loss")],
                peft_config=LoraConfig(r=rank, target_modules="all-linear") if rank else None,
            )  # fmt: skip
            trainer.train()

        return peers.paced(loop)

    return work, ours, trl


work, ours, trl = case(4)
