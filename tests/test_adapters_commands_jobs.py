"""What a recipe's options train, as a plan counts it, beside the steps that XLA compiles."""

import dataclasses
import json

import pytest
import tiny_families

from areax import models
from areax.adapters.command_line import options
from areax.adapters.commands import aot, jobs
from areax.core import losses
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.parallel.planner import memory
from areax.parallel.planner.chips import CHIPS
from areax.recipes import distill, grpo, preference, prm, sft
from areax.recipes.shared.rl_options import CriticOptions
from areax.rollout.types import Sampling

MESHED = Layout(fsdp=2, tp=2, ep=2)
CHIP = dataclasses.replace(CHIPS["h100"], platform="cpu")
ROWS, LENGTH = 8, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """f(family, **changes) -> a directory with a config.json alone."""

    def of(family, **changes):
        path = tmp_path_factory.mktemp(family)
        hf = tiny_families.hf(family, torch_dtype="bfloat16", **changes)
        (path / "config.json").write_text(json.dumps(hf))
        return str(path)

    return of


def made(config):
    return jobs.made(options.flat(config), CHIP)


def steps(planned):
    """[(the formula's memory, XLA's) of each step]."""
    m = memory.memory(planned.job)
    formulas = [m, m.critic] if m.critic else [m]
    return [
        (formula, aot.compile(step).memory_analysis()) for formula, step in zip(formulas, planned.steps, strict=True)
    ]


def rl(model, one=True, **training):
    """A GRPO Config of two microbatches, or one."""
    shared = dict(rows=ROWS, length=LENGTH, mesh=Layout(), minibatches=1) | training
    sampling = shared.pop("sampling", Sampling(max_new_tokens=32))
    return options.replaced(
        grpo.Config(model=model, data="", reward=""), groups=2 if one else 4, group_size=4, sampling=sampling, **shared
    )


def offline(module, model, **changes):
    half = isinstance(changes.get("objective"), losses.Preference | losses.KTO | losses.RewardModel)
    shared = dict(rows=ROWS, length=LENGTH, batch=ROWS // (1 + half))
    return module.Config(model=model, data="", **shared | changes)


PPO = losses.PPO()
NEAR = "http://127.0.0.1:1"
CASES = {  # name: (family, Config of a directory and that of another model)
    "critic": ("qwen3", lambda own, other: rl(own, objective=PPO)),
    "critic, two microbatches": ("qwen3", lambda own, other: rl(own, one=False, objective=PPO)),
    "critic of its own": (
        "qwen3_moe",
        lambda own, other: rl(
            own, objective=PPO, critic=CriticOptions(model=other, optim=Optimizer(state="float8", offload=True))
        ),
    ),
    "critic beside adapters": ("qwen3", lambda own, other: rl(own, objective=PPO, lora=Lora(4, base="int8"))),
    "teacher in the advantage": (
        "qwen3", lambda own, other: rl(own, objective=losses.GRPO(advantage={"teacher": 1.0}), teacher=other)
    ),
    "teacher in the loss": ("qwen3", lambda own, other: rl(own, one=False, distill_coef=0.5, teacher=other)),
    "teachers on servers": (
        "qwen3",
        lambda own, other: rl(own, distill_coef=0.5, distill=losses.Distill(top_k=5), teachers=(NEAR,)),
    ),
    "distillation": ("qwen3", lambda own, other: offline(distill, own, teacher=other)),
    "distillation of adapters": ("qwen3", lambda own, other: offline(distill, own, teacher=other, lora=Lora(4))),
    "distillation by servers": (
        "qwen3",
        lambda own, other: offline(
            distill, own, teachers=(NEAR,), objective=losses.Distill(divergence="forward", top_k=3), batch=2 * ROWS
        ),
    ),
    "self-distillation": ("qwen3", lambda own, other: offline(distill, own, self_distillation=True, lora=Lora(4))),
    "self-distillation on samples": (
        "qwen3",
        lambda own, other: rl(
            own, one=False, self_distillation=True, distill_coef=1.0, objective=losses.GRPO(advantage={"teacher": 1.0})
        ),
    ),
    "balance": ("qwen3_moe", lambda own, other: offline(sft, own, balance=Balance(load=0.1, z=0.1))),
    "moved bias": ("glm4_moe", lambda own, other: rl(own, one=False, balance=Balance(z=0.1, bias=0.1))),
    "all to all": ("qwen3_moe", lambda own, other: offline(sft, own, run=models.Run(dispatch="all_to_all"))),
    "routed experts": (
        "qwen3_moe",
        lambda own, other: rl(own, objective=PPO, sampling=Sampling(max_new_tokens=32, routed_experts=True)),
    ),
    "sampling masks": (
        "qwen3",
        lambda own, other: rl(
            own, objective=PPO, sampling=Sampling(max_new_tokens=32, top_p=0.9, top_k=5, sampling_mask=True)
        ),
    ),
    "components": (
        "qwen3",
        lambda own, other: rl(own, one=False, objective=losses.GRPO(advantage={"components": ("a", "b")}), epochs=3),
    ),
    "interpolate": (
        "qwen3",
        lambda own, other: rl(
            own, objective=losses.GRPO(correction={"proximal": "interpolate"}, kl={"coef": 0.1, "target": 0.1})
        ),
    ),
    "score centering": (
        "qwen3",
        lambda own, other: rl(
            own, sampling=Sampling(max_new_tokens=32, top_logprobs=5),
            objective=losses.REINFORCE(score_centering=True, correction={"proximal": "behaviour"}),
        ),
    ),
    "states": ("qwen3", lambda own, other: rl(own, objective=losses.GRPO(advantage={"state_coef": 1.0}))),
    "observations": ("qwen3", lambda own, other: rl(own, objective=losses.GRPO(observation={"coef": 0.05}))),
    "kto": ("qwen3", lambda own, other: offline(preference, own, objective=losses.KTO())),
    "reward model": ("qwen3", lambda own, other: offline(preference, own, objective=losses.RewardModel(margin=True))),
    "process reward model": ("qwen3", lambda own, other: offline(prm, own)),
    "offloaded activations": ("qwen3_moe", lambda own, other: offline(sft, own, run=models.Run(remat="offload"))),
}  # fmt: skip
ONE_DEVICE = {"critic", "teacher in the loss", "kto"}  # the others on a mesh


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("name, layout", [
    *(pytest.param(name, Layout(), id=f"{name}-one", marks=[pytest.mark.wide] * (name not in ONE_DEVICE))
      for name in CASES),
    *(pytest.param(name, MESHED, id=f"{name}-mesh", marks=pytest.mark.wide if name in ONE_DEVICE else pytest.mark.mesh)
      for name in CASES),
])  # fmt: skip
def test_argument_bytes_are_those_of_the_compiled_steps(folder, name, layout):
    family, config = CASES[name]
    planned = made(options.replaced(config(folder(family), folder("qwen2")), mesh=layout))
    for formula, analysis in steps(planned):
        assert formula.arguments == analysis.argument_size_in_bytes
