"""End-to-end demo on one machine: a new model, SFT on flawed demonstrations, asynchronous GRPO, checkpoint, report.

The task is two-digit addition. The teacher of the SFT stage forgets the carry in 70 % of its demonstrations; three
quarters of the problems have one. GRPO sees only right or wrong. No pair of operands of a held-out row occurs in
training, in either order.

With `--task shapes` it is counting shapes in pictures, for a vision-language model whose tower is trained with the
rest; the teacher overlooks one of them. No scene of a held-out row occurs in training.

With `--task chat` a pretrained chat model learns sums and differences of two digits. It needs no SFT: its weights are
converted instead, and written as GGUF at the end.
"""

import dataclasses
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.command_line import options
from areax.adapters.commands import convert
from areax.adapters.report import build
from areax.adapters.runtime import hub
from areax.adapters.tracking import run_dir
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo, sft
from areax.recipes.shared import common, demo_vision, notebook
from areax.recipes.shared.rl_options import Evaluation, Rollout, Serving, Training
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic, digits, shapes
from areax.rollout.types import Sampling

MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 64, "initializer_range": 0.06,
}  # fmt: skip
DEMONSTRATIONS = 1 << 16
TASKS = {"sums": arithmetic, "shapes": shapes, "chat": digits}
STEPS = {"sums": (1000, 100), "shapes": (500, 50), "chat": (0, 20)}  # of the two stages
FIRST = {"sums": "sft", "shapes": "sft", "chat": "base"}  # what RL improves
# With pictures: rows of five samples, of which a microbatch has 256.
PICTURES = {"vision": "trained", "length": 136, "rows": 56, "run": models.Run(remat="none")}
CONTROLS = {  # accuracy that each must stay below
    "sums": {"shuffled": 0.6, "frozen": 0.6},
    "shapes": {"shuffled": 0.6, "frozen": 0.6, "pictures": 0.45},
    "chat": {"shuffled": 0.3, "frozen": 0.3},
}
OF_SFT = "sft_steps", "sft_lr", "error_rate"
STARTED = "demo.json"  # what `out` is the demo of
STAGES = "base", "sft", "grpo"  # folders in it


@dataclass(frozen=True)
class Config:
    """Trains a small model from scratch, then improves it by asynchronous RL; or improves a chat model.

    Attributes:
      task: "sums" of two numbers, "shapes" to count in pictures, by a vision-language model (areax[vision]), or "chat":
        sums of two digits, by a pretrained chat model (areax[gguf]).
      model: the chat model: Hugging Face directory, a model on the hub, or a GGUF file.
      out: directory for data, both stages, report.html and summary.json; each task needs its own.
      seed: random seed of weights, demonstrations, order and sampling.
      split: seed of the split of problems into training, development and held-out rows.
      rows: rows to evaluate: "heldout", or "dev" while choosing settings.
      eta: maximum staleness in versions (0 = synchronous): from admitting a group to training on it.
      sft_steps: steps of the SFT stage; 0 = 1,000, or 500 with pictures.
      rl_steps: batches of the GRPO stage; 0 = 100, 50 with pictures, or 20 of the chat model.
      sft_lr: learning rate of the SFT stage.
      rl_lr: learning rate of the GRPO stage; 0 = 2e-4, or 2e-5 of the chat model.
      error_rate: share of demonstrations in which the teacher errs where it can.
      controls: instead runs controls from the same checkpoint as the GRPO stage: shuffled rewards, learning rate 0
        and, with pictures, shuffled pictures.
    """

    task: Literal["sums", "shapes", "chat"] = "sums"
    model: str = ""
    out: str = "runs/demo"
    seed: int = 0
    split: int = 0
    rows: str = "heldout"
    eta: int = 1
    sft_steps: int = 0
    rl_steps: int = 0
    sft_lr: float = 3e-3
    rl_lr: float = 0.0
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
            ("sft_lr", not self.sft_lr < 0, "at least 0"),
            ("rl_lr", not self.rl_lr < 0, "at least 0"),
            ("error_rate", 0 <= self.error_rate <= 1, "from 0 to 1"),
        ):
            if not holds:
                raise ValueError(f"--{name.replace('_', '-')} must be {rule}, got {getattr(self, name)}")
        if (self.task == "chat") != bool(self.model):
            raise ValueError(
                f"--model names the model of --task chat, got {self.model!r} for {self.task}; "
                + ("leave it out" if self.model else "name one, or run `make demo-real`, which fetches one")
            )
        for name in OF_SFT if self.task == "chat" else ():
            if getattr(self, name) != getattr(Config, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} is for SFT, which --task chat does not need; leave it out"
                )


def main(config: Config) -> int:
    """Runs the stages and prints the results; returns the exit code, 1 if a control improved, 130 if it was stopped."""
    notebook.refuse_running_loop(config)
    began = time.monotonic()
    steps = zip((config.sft_steps, config.rl_steps), STEPS[config.task], strict=True)
    sft_steps, rl_steps = (given or usual for given, usual in steps)
    config = dataclasses.replace(config, sft_steps=sft_steps, rl_steps=rl_steps)
    out = Path(config.out)
    common.check_directory("--out", config.out)
    out.mkdir(parents=True, exist_ok=True)
    refuse_another(config, out)
    heldout = write_data(config, out)
    if not first_stage(config, out):
        return 130
    if config.controls:
        return controls(config, out)
    print("2 of 3  asynchronous GRPO against a generation server")
    rl = grpo.main(grpo_config(config, out, "grpo"))
    print("3 of 3  report")
    _join(out)
    first = FIRST[config.task]
    summary = {
        f"{first}_accuracy": rl["accuracies"].get("0"),
        "rl_accuracy": rl["accuracy"],
        "heldout_rows": heldout,
        "rl_steps": rl["steps"],
        "eta": config.eta,
        "server_version": ", ".join(rl["server_version"]),
        "max_logp_diff": rl.get("max_logp_diff"),
        "mismatch_k3": rl.get("mismatch_k3_now"),
        "seconds": time.monotonic() - began,
        "checkpoint": rl["checkpoint"],
        **({"gguf": _gguf(rl["checkpoint"], out / "model.gguf")} if config.task == "chat" and rl["complete"] else {}),
        "report": str(out / "report.html"),
        "complete": rl["complete"],
    }
    run_dir.write_json(out / run_dir.SUMMARY, summary)
    build.report(out)
    before, after = summary[f"{first}_accuracy"], summary["rl_accuracy"]
    when = "after SFT" if first == "sft" else "before"
    print(
        f"\nheld-out accuracy, greedy, {heldout} rows: {_percent(before)} {when}, "
        f"{_percent(after)} after {rl['steps']} steps of GRPO\ncheckpoint  {summary['checkpoint']}\n"
        f"report      {summary['report']}\nsummary     {out / run_dir.SUMMARY}\nseconds     {summary['seconds']:.0f}"
    )
    if "gguf" in summary:
        print(f"talk to it  areax serve {summary['gguf']}, or as it was before: areax serve {out / 'base'}")
    return 0 if rl["complete"] else 130


async def run(config: Config) -> int:
    """`main` where an event loop is running, as in a notebook; cancelled, it stops as after Ctrl-C."""
    return await notebook.run_in_thread(main, config)


def first_stage(config: Config, out: Path) -> bool:
    """Makes the model that RL improves, unless it is there for controls; returns whether it is complete."""
    if config.task == "chat":
        print("1 of 3  converting the model")
        if not (out / "base/config.json").exists():
            convert.convert(config.model, out / "base", "float32")
        return True
    if config.controls and (out / "sft" / run_dir.SUMMARY).exists():
        return True
    print("1 of 3  supervised fine-tuning of a new model")
    return sft.main(sft_config(config, out))["complete"]


def controls(config: Config, out: Path) -> int:
    """Runs GRPO with shuffled rewards, with learning rate 0, and with shuffled pictures: none may reach its limit.

    Half as many steps as with rewards, by when those have learnt most of what they do.
    """
    results, limits = {}, CONTROLS[config.task]
    for name in limits:
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
        print(f"control {name:9} held-out accuracy {_percent(accuracy)}, must stay below {limits[name]:.0%}")
    return int(any(accuracy is None or accuracy >= limits[name] for name, accuracy in results.items()))


def refuse_another(config: Config, out: Path) -> None:
    """Raises ValueError if the directory has another demo, or what is none, whose files would be overwritten."""
    model = os.path.realpath(config.model) if os.path.exists(config.model) else config.model
    file, own = out / STARTED, {"task": config.task, "model": model, "seed": config.seed, "split": config.split}
    own |= {"content": hub.content(model)} if hub.is_gguf(model) else {}
    if file.is_file():
        other = hf.read_json(file)
        if other != own and any((out / made).exists() for made in STAGES):
            raise ValueError(f"--out {out}: has the demo of {other}, not of {own}; name another directory")
    elif strange := [name for name in (run_dir.CONFIG, run_dir.METRICS, *STAGES) if (out / name).exists()]:
        raise ValueError(f"--out {out}: has {strange[0]}, which is of no demo; name another directory")
    run_dir.write_json(file, own)


def sft_config(config: Config, out: Path) -> sft.Config:
    """Options of the SFT stage."""
    made = sft.Config(
        model=str(out / "base"), data=str(out / "data/demonstrations.jsonl"), out=str(out / "sft"), init="random",
        steps=config.sft_steps, batch=256, length=64, rows=28, seed=config.seed,
        optim=Optimizer(lr=config.sft_lr, schedule="cosine", warmup=max(0, min(20, config.sft_steps - 1)), floor=0.1),
    )  # fmt: skip
    if config.task == "sums":
        return made
    return options.replaced(made, init="checkpoint", **PICTURES)


def grpo_config(config: Config, out: Path, name: str) -> grpo.Config:
    """Options of the GRPO stage."""
    chat = config.task == "chat"
    lr = config.rl_lr or (2e-5 if chat else 2e-4)
    made = grpo.Config(
        model=str(out / ("base" if chat else "sft/model")), data=str(out / "data/train.jsonl"), out=str(out / name),
        reward=f"{TASKS[config.task].__name__}:reward", steps=config.rl_steps, seed=config.seed,
        rollout=Rollout(
            groups=64, group_size=8, eta=config.eta, max_concurrent=192, sampling=Sampling(max_new_tokens=4)
        ),
        training=Training(
            length=64, rows=40, objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=lr, b2=0.99, warmup=10)
        ),
        serving=Serving(serve=Serve(slots=128, context=64)),
        evaluation=Evaluation(heldout=(str(out / f"data/{config.rows}.jsonl"),), evaluate_every=25),
    )  # fmt: skip
    if chat:
        return options.replaced(
            made, groups=16, max_concurrent=32, sampling=Sampling(max_new_tokens=8), length=128, rows="auto",
            optim=Optimizer(lr=lr, b2=0.99, warmup=2), serve=Serve(context=128), evaluate_every=10,
        )  # fmt: skip
    return made if config.task == "sums" else options.replaced(made, **PICTURES)


def write_data(config: Config, out: Path, model: dict = MODEL) -> int:
    """Writes data, and tokenizer and config.json of a new model; returns the number of rows to evaluate.

    Args:
      model: the config.json without what the tokenizer determines; of any family.
    """
    task = TASKS[config.task]
    splits = task.splits(task.Task(seed=config.split))
    files = dict(splits)
    if config.task != "chat":
        teacher = task.demonstrations(splits["train"], error_rate=config.error_rate, seed=config.seed)
        files["demonstrations"] = list(itertools.islice(teacher, DEMONSTRATIONS))
    if config.task == "shapes":
        files["pictures"] = shapes.shuffled(splits["train"], config.seed)
    (out / "data").mkdir(exist_ok=True)
    for name, rows in files.items():
        (out / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config.task == "shapes":
        demo_vision.write(out / "base", shapes.WORDS, shapes.SIDE, config.seed)
    if config.task != "sums":
        return len(splits[config.rows])
    (out / "base").mkdir(exist_ok=True)
    tokens = tokenizer.character("0123456789+")
    tokenizer.save(tokens, out / "base")
    source = {**model, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    run_dir.write_json(out / "base" / "config.json", models.config_to_hf(models.config_from_hf(source)))
    return len(splits[config.rows])


def _join(out: Path) -> None:
    """Joins the metrics of both stages in one run directory, for one report."""
    for name in (run_dir.METRICS, run_dir.SAMPLES):
        lines, before = [], 0.0
        for stage in ("sft", "grpo"):  # a chat model has no SFT
            own = list(run_dir.read_lines(out / stage / name)) if (out / stage / name).exists() else []
            lines += [{**line, "seconds": before + line["seconds"]} if "seconds" in line else line for line in own]
            before = max((line.get("seconds", 0.0) for line in lines), default=0.0)
        (out / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.write_json(out / run_dir.CONFIG, json.loads((out / "grpo" / run_dir.CONFIG).read_text()))


def _gguf(checkpoint: str, path: Path) -> str:
    """Writes a checkpoint as GGUF, its weights in 8 bits, in place of a former run's."""
    path.unlink(missing_ok=True)
    convert.convert(checkpoint, path, gguf_kind="q8_0")
    return str(path)


def _percent(value) -> str:
    return "unknown" if value is None else f"{value:.1%}"
