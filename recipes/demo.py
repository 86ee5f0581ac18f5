"""End-to-end demo on one machine: a new model, SFT on flawed demonstrations, asynchronous GRPO, checkpoint, report.

The task is two-digit addition. The teacher of the SFT stage forgets the carry in 70 % of its demonstrations; three
quarters of the problems have one. GRPO sees only right or wrong. No pair of operands of a held-out row occurs in
training, in either order.

With `--task shapes` it is counting shapes in pictures, for a vision-language model whose tower is trained with the
rest; the teacher overlooks one of them. No scene of a held-out row occurs in training.
"""

import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areax import models
from areax.adapters import tokenizer
from areax.adapters.command_line import options
from areax.adapters.report import build
from areax.adapters.tracking import run_dir
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo, sft
from areax.recipes.shared import demo_vision, notebook
from areax.recipes.shared.rl_options import Evaluation, Rollout, Serving, Training
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic, shapes
from areax.rollout.types import Sampling

MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 64, "initializer_range": 0.06,
}  # fmt: skip
DEMONSTRATIONS = 1 << 16
TASKS = {"sums": arithmetic, "shapes": shapes}
STEPS = {"sums": (1000, 100), "shapes": (500, 50)}  # of the two stages
# With pictures: rows of five samples, of which a microbatch has 256.
PICTURES = {"vision": "trained", "length": 136, "rows": 56, "run": models.Run(remat="none")}
CONTROLS = {"shuffled": 0.6, "frozen": 0.6, "pictures": 0.45}  # accuracy that each must stay below


@dataclass(frozen=True)
class Config:
    """Trains a small model from scratch, then improves it by asynchronous RL.

    Attributes:
      task: "sums", or "shapes": counting in pictures (needs areax[vision]).
      out: directory for data, both stages, `model/`, report.html and summary.json.
      seed: random seed of weights, demonstrations, order and sampling.
      split: seed of the split of problems into training, development and held-out rows.
      rows: rows to evaluate: "heldout", or "dev" while choosing settings.
      eta: maximum staleness in versions (0 = synchronous): from admitting a group to training on it.
      sft_steps: steps of the SFT stage; 0 = 1,000, or 500 with pictures.
      rl_steps: batches of the GRPO stage; 0 = 100, or 50 with pictures.
      sft_lr: learning rate of the SFT stage.
      rl_lr: learning rate of the GRPO stage.
      error_rate: share of demonstrations in which the teacher errs where it can.
      controls: instead runs controls from the SFT checkpoint: shuffled rewards, learning rate 0, and shuffled pictures
        if the task has any.
    """

    task: Literal["sums", "shapes"] = "sums"
    out: str = "runs/demo"
    seed: int = 0
    split: int = 0
    rows: str = "heldout"
    eta: int = 1
    sft_steps: int = 0
    rl_steps: int = 0
    sft_lr: float = 3e-3
    rl_lr: float = 2e-4
    error_rate: float = 0.7
    controls: bool = False

    def __post_init__(self):
        for name, holds, rule in (
            ("rows", self.rows in ("heldout", "dev"), "heldout or dev"),
            ("seed", self.seed >= 0, "at least 0"),
            ("split", self.split >= 0, "at least 0"),
            ("eta", self.eta >= 0, "at least 0"),
            ("sft_steps", self.sft_steps >= 0, "at least 0"),
            ("rl_steps", self.rl_steps >= 0, "at least 0"),
            ("error_rate", 0 <= self.error_rate <= 1, "from 0 to 1"),
        ):
            if not holds:
                raise ValueError(f"--{name.replace('_', '-')} must be {rule}, got {getattr(self, name)}")


def main(config: Config) -> int:
    """Runs the stages and prints the results; returns the exit code, 1 if a control improved, 130 if it was stopped."""
    notebook.refuse_running_loop(config)
    began = time.monotonic()
    steps = zip((config.sft_steps, config.rl_steps), STEPS[config.task], strict=True)
    sft_steps, rl_steps = (given or usual for given, usual in steps)
    config = dataclasses.replace(config, sft_steps=sft_steps, rl_steps=rl_steps)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    heldout = write_data(config, out)
    if not (out / "sft" / run_dir.SUMMARY).exists() or not config.controls:
        print("1 of 3  supervised fine-tuning of a new model")
        if not sft.main(sft_config(config, out))["complete"]:
            return 130
    if config.controls:
        return controls(config, out)
    print("2 of 3  asynchronous GRPO against a generation server")
    rl = grpo.main(grpo_config(config, out, "grpo"))
    print("3 of 3  report")
    _join(out)
    summary = {
        "sft_accuracy": rl["accuracies"].get("0"),
        "rl_accuracy": rl["accuracy"],
        "heldout_rows": heldout,
        "rl_steps": rl["steps"],
        "eta": config.eta,
        "server_version": ", ".join(rl["server_version"]),
        "max_logp_diff": rl.get("max_logp_diff"),
        "mismatch_k3": rl.get("mismatch_k3_now"),
        "seconds": time.monotonic() - began,
        "checkpoint": rl["checkpoint"],
        "report": str(out / "report.html"),
        "complete": rl["complete"],
    }
    run_dir.write_json(out / run_dir.SUMMARY, summary)
    build.report(out)
    before, after = summary["sft_accuracy"], summary["rl_accuracy"]
    print(
        f"\nheld-out accuracy, greedy, {heldout} rows: {_percent(before)} after SFT, {_percent(after)} after "
        f"{rl['steps']} steps of GRPO\ncheckpoint  {summary['checkpoint']}\nreport      {summary['report']}\n"
        f"summary     {out / run_dir.SUMMARY}\nseconds     {summary['seconds']:.0f}"
    )
    return 0 if rl["complete"] else 130


async def run(config: Config) -> int:
    """`main` where an event loop is running, as in a notebook; cancelled, it stops as after Ctrl-C."""
    return await notebook.run_in_thread(main, config)


def controls(config: Config, out: Path) -> int:
    """Runs GRPO with shuffled rewards, with learning rate 0, and with shuffled pictures: none may reach its limit.

    Half as many steps as with rewards, by when those have taken the model to nearly 100 %.
    """
    results = {}
    for name in CONTROLS if config.task == "shapes" else ("shuffled", "frozen"):
        run = grpo_config(config, out, f"control-{name}")
        changes: dict[str, dict] = {
            "shuffled": {"shuffle_rewards": True},
            "frozen": {"optim": dataclasses.replace(run.training.optim, lr=0.0)},
            "pictures": {"data": str(out / "data/pictures.jsonl")},
        }
        run = options.replaced(run, **changes[name], steps=(config.rl_steps + 1) // 2)
        results[name] = grpo.main(run)["accuracy"]
    run_dir.write_json(out / "controls.json", results)
    for name, accuracy in results.items():
        print(f"control {name:9} held-out accuracy {_percent(accuracy)}, must stay below {CONTROLS[name]:.0%}")
    return int(any(accuracy is None or accuracy >= CONTROLS[name] for name, accuracy in results.items()))


def sft_config(config: Config, out: Path) -> sft.Config:
    """Options of the SFT stage."""
    made = sft.Config(
        model=str(out / "base"), data=str(out / "data/demonstrations.jsonl"), out=str(out / "sft"), init="random",
        steps=config.sft_steps, batch=256, length=64, rows=28, seed=config.seed,
        optim=Optimizer(lr=config.sft_lr, schedule="cosine", warmup=20, floor=0.1),
    )  # fmt: skip
    if config.task == "sums":
        return made
    return options.replaced(made, init="checkpoint", **PICTURES)


def grpo_config(config: Config, out: Path, name: str) -> grpo.Config:
    """Options of the GRPO stage."""
    optim = Optimizer(lr=config.rl_lr, b2=0.99, warmup=10)
    made = grpo.Config(
        model=str(out / "sft/model"), data=str(out / "data/train.jsonl"), out=str(out / name),
        reward=f"{TASKS[config.task].__name__}:reward", steps=config.rl_steps, seed=config.seed,
        rollout=Rollout(
            groups=64, group_size=8, eta=config.eta, max_concurrent=192, sampling=Sampling(max_new_tokens=4)
        ),
        training=Training(length=64, rows=40, objective=GRPO(advantage={"std": "none"}), optim=optim),
        serving=Serving(serve=Serve(slots=128, context=64)),
        evaluation=Evaluation(heldout=(str(out / f"data/{config.rows}.jsonl"),), evaluate_every=25),
    )  # fmt: skip
    return made if config.task == "sums" else options.replaced(made, **PICTURES)


def write_data(config: Config, out: Path, model: dict = MODEL) -> int:
    """Writes data, tokenizer and config.json of the new model; returns the number of rows to evaluate.

    Args:
      model: the config.json without what the tokenizer determines; of any family.
    """
    task = TASKS[config.task]
    splits = task.splits(task.Task(seed=config.split))
    teacher = task.demonstrations(splits["train"], error_rate=config.error_rate, seed=config.seed)
    files = {
        **splits,
        "demonstrations": list(itertools.islice(teacher, DEMONSTRATIONS)),
    }
    if config.task == "shapes":
        files["pictures"] = shapes.shuffled(splits["train"], config.seed)
    (out / "data").mkdir(exist_ok=True)
    for name, rows in files.items():
        (out / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config.task == "shapes":
        demo_vision.write(out / "base", shapes.WORDS, shapes.SIDE, config.seed)
        return len(splits[config.rows])
    (out / "base").mkdir(exist_ok=True)
    tokens = tokenizer.character("0123456789+")
    tokenizer.save(tokens, out / "base")
    source = {**model, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    hf = models.config_to_hf(models.config_from_hf(source))
    run_dir.write_json(out / "base" / "config.json", hf)
    return len(splits[config.rows])


def _join(out: Path) -> None:
    """Joins the metrics of both stages in one run directory, for one report."""
    for name in (run_dir.METRICS, run_dir.SAMPLES):
        lines, before = [], 0.0
        for stage in ("sft", "grpo"):
            own = list(run_dir.read_lines(out / stage / name))
            lines += [{**line, "seconds": before + line["seconds"]} if "seconds" in line else line for line in own]
            before = max((line.get("seconds", 0.0) for line in lines), default=0.0)
        (out / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.write_json(out / run_dir.CONFIG, json.loads((out / "grpo" / run_dir.CONFIG).read_text()))


def _percent(value) -> str:
    return "unknown" if value is None else f"{value:.1%}"
