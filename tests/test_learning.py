"""Each way of learning takes a small task to a stated level, with fixed seeds: `make test-learning`.

The task is the demo's: two-digit addition, imitated from a teacher that forgets the carry in 70 % of its examples.
After imitation a quarter of the held-out sums is right, those without a carry.
"""

import functools
import json
import random
from dataclasses import replace

import pytest
import tiny

from areax import models
from areax.adapters import tokenizer
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import demo, distill, eval, grpo, preference, sft
from areax.recipes.shared.rl_options import CriticOptions
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

pytestmark = pytest.mark.learning
REWARD = "areax.rollout.tasks.arithmetic:reward"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The demo's data, and its model after imitation."""
    path = tmp_path_factory.mktemp("learning")
    demo.write_data(demo.Config(), path)
    sft.main(demo.sft_config(demo.Config(sft_steps=700), path))
    return path


def accuracy(model, place) -> float:
    """Share of the held-out sums that are right, decoded greedily."""
    config = eval.Config(
        model=str(model), data=str(place / "data/heldout.jsonl"), reward=REWARD, serve=Serve(slots=128, context=64),
        max_concurrent=192, sampling=Sampling(temperature=0.0, max_new_tokens=4),
    )  # fmt: skip
    return eval.main(config)["accuracy"]


def learnt(place, name, objective, **changes) -> float:
    """Held-out accuracy after reinforcement learning from the imitating model."""
    config = demo.grpo_config(demo.Config(rl_steps=80), place, name)
    done = grpo.main(replaced(config, objective=objective, **{"evaluate_every": 80, "samples_every": 0} | changes))
    assert done["complete"]
    return done["accuracy"]


def test_imitation_does_not_surpass_its_teacher(place):
    assert 0.2 < accuracy(place / "sft/model", place) < 0.55
    losses = [x["nll"] for x in run_dir.read_lines(place / "sft/metrics.jsonl") if "nll" in x]
    assert losses[-1] < 0.4 * losses[0]


PLAIN = {"std": "none"}  # as in the demo: the deviation of a group only scales here
POLICIES = {
    "GRPO": losses.GRPO(advantage=PLAIN),
    "DAPO": losses.DAPO(advantage=PLAIN),
    "GSPO": losses.GSPO(advantage=PLAIN, clip_low=0.05, clip_high=0.05),
}


@pytest.mark.parametrize("name", POLICIES)
def test_reinforcement_leads_past_the_teacher(place, name):
    assert learnt(place, name, POLICIES[name]) >= 0.9


HYBRID = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    "tie_word_embeddings": True, "max_position_embeddings": 64, "initializer_range": 0.06,
}  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """As `place`, for a Qwen3.5 of the size of the demo's Qwen3, in smaller batches."""
    path, options = tmp_path_factory.mktemp("hybrid"), demo.Config(sft_steps=700)
    demo.write_data(options, path, HYBRID)
    sft.main(replace(demo.sft_config(options, path), batch=128, rows=42))
    return path


def test_delta_nets_imitate_what_attention_does(hybrid):
    assert 0.2 < accuracy(hybrid / "sft/model", hybrid) < 0.55


def test_reinforcement_leads_delta_nets_past_the_teacher(hybrid):
    assert learnt(hybrid, "GRPO", POLICIES["GRPO"], steps=60, evaluate_every=60, groups=32) >= 0.9


def test_a_critic_takes_the_place_of_groups(place):
    """PPO with one completion a prompt: nothing is compared but the critic's expectation."""
    critic = CriticOptions(optim=Optimizer(lr=3e-3, b2=0.99, warmup=5), warmup=20)
    changes = dict(critic=critic, groups=512, group_size=1, minibatches=2)
    assert learnt(place, "PPO", losses.PPO(), **changes) >= 0.8
    lines = [x for x in run_dir.read_lines(place / "PPO/metrics.jsonl") if x["kind"] == "grpo"]
    assert max(x.get("explained_variance", 0) for x in lines) > 0.2


def test_adapters_learn_what_all_weights_do(place):
    changes = dict(lora=Lora(rank=8), optim=Optimizer(lr=2e-3, b2=0.99, warmup=10))
    assert learnt(place, "LoRA", losses.GRPO(advantage=PLAIN), **changes) >= 0.8
    assert (place / "LoRA/adapter/adapter_model.safetensors").exists()


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    """level(state, seed): the mean loss of the last 50 of 300 steps of imitation, with moments in that dtype."""
    path = tmp_path_factory.mktemp("levels")
    demo.write_data(demo.Config(), path)

    @functools.cache
    def level(state: str, seed: int) -> float:
        config = demo.sft_config(demo.Config(sft_steps=300), path)
        out = path / f"{state}-{seed}"
        sft.main(replace(config, seed=seed, out=str(out), optim=replace(config.optim, state=state)))
        told = [x["nll"] for x in run_dir.read_lines(out / "metrics.jsonl") if "nll" in x]
        return sum(told[-50:]) / 50

    return level


SEEDS = [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_8_bit_moments_imitate_as_those_in_fp32(levels, seed):
    """The same rows in the same order; runs part when the carry is learnt, a few steps earlier or later by chance."""
    assert levels("float8", seed) < 1.15 * levels("float32", seed)


def test_8_bit_moments_reach_the_level_of_those_in_fp32(levels):
    """The mean over seeds."""
    narrow, wide = (sum(levels(state, seed) for seed in SEEDS) for state in ("float8", "float32"))
    assert narrow < 1.05 * wide


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_narrow_numbers_lead_past_the_teacher(place, seed):
    """As on an accelerator, computed and served in bf16; with 8-bit moments and a reference that waits on the host."""
    optim = Optimizer(lr=2e-4, b2=0.99, warmup=10, state="float8")
    changes = dict(optim=optim, run=models.Run(dtype="bfloat16"), offload_reference=True, seed=seed)
    changes |= {"serve": Serve(slots=128, context=64, dtype="bfloat16")}
    objective = losses.GRPO(advantage=PLAIN, kl={"coef": 1e-3})
    assert learnt(place, f"narrow-{seed}", objective, **changes) >= 0.9


@pytest.fixture(scope="module")
def pairs(place):
    """Files of pairs of training and held-out rows: the sum over one without its carry, or with one that it has not."""
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (place / f"data/{name}.jsonl").read_text().splitlines()]
        wrong = lambda row: arithmetic.forgetful(row) if row["carry"] else str(int(row["answer"]) + 10)
        made = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong(row)} for row in rows]
        tiny.rows(place / f"data/pairs-{name}.jsonl", made)
    return lambda **more: preference.Config(
        model=str(place / "sft/model"), data=str(place / "data/pairs-train.jsonl"),
        heldout=str(place / "data/pairs-heldout.jsonl"), batch=64, length=64, rows=14, **more,
    )  # fmt: skip


def test_preferences_lead_past_the_teacher(place, pairs):
    config = pairs(out=str(place / "dpo"), steps=100, objective=losses.DPO(), optim=Optimizer(lr=5e-5, warmup=10))
    done = preference.main(config)
    assert done["complete"] and done["heldout_preference_accuracy"] >= 0.9
    assert accuracy(place / "dpo/model", place) >= 0.7


def test_a_reward_model_tells_right_from_wrong(place, pairs):
    spec = losses.RewardModel()
    config = pairs(out=str(place / "rm"), steps=200, objective=spec, optim=Optimizer(lr=5e-4, warmup=10))
    assert preference.main(config)["heldout_preference_accuracy"] >= 0.95


def test_a_teacher_says_what_the_demonstrations_do_not(place):
    """The student sees the flawed demonstrations again, but learns what a better model makes of them."""
    better = place / "GRPO/model"
    if not better.exists():
        learnt(place, "GRPO", POLICIES["GRPO"])
    config = distill.Config(
        model=str(place / "sft/model"), teacher=str(better), data=str(place / "data/demonstrations.jsonl"),
        out=str(place / "distilled"), steps=150, batch=256, length=64, rows=28, optim=Optimizer(lr=1e-3, warmup=10),
    )  # fmt: skip
    assert distill.main(config)["complete"]
    assert accuracy(place / "distilled/model", place) >= 0.85


def test_a_teacher_with_another_tokenizer_teaches(tmp_path):
    """Of ten answers that the student guesses: it comes nearer to its teacher on its own samples, without a reward, by
    distributions where both have one token, and by log ratios: its tokens from 10 to 19 are two of its teacher's."""
    rng = random.Random(0)
    drawn = lambda: f"1{rng.randrange(1000):03}"
    rows = [{"prompt": f"{q}+", "completion": a} for q, a in ((q, drawn()) for q in "0123456789")]
    tiny.rows(tmp_path / "rows.jsonl", rows)
    tiny.rows(tmp_path / "guesses.jsonl", [{**row, "completion": drawn()} for row in rows * 100])
    roles = "system", "user", "assistant"
    for name, words, data, steps in (
        ("teacher", roles, "rows", 100), ("student", (*roles, *map(str, range(10, 20))), "guesses", 60)
    ):  # fmt: skip
        tokens, base = tokenizer.character("0123456789+", words=words), tmp_path / name / "base"
        shape = dict(hidden_size=64, intermediate_size=128, initializer_range=0.06, num_hidden_layers=1)
        tiny.model(base, vocab_size=len(tokens), eos_token_id=tokens.eos_token_id, **shape)
        tokenizer.save(tokens, base)
        imitated = sft.Config(
            model=str(base), data=str(tmp_path / f"{data}.jsonl"), out=str(tmp_path / name / "sft"), steps=steps,
            batch=40, length=32, rows=16, optim=Optimizer(lr=3e-3, warmup=10, b2=0.99),
        )  # fmt: skip
        assert sft.main(imitated)["complete"]
    config = replaced(
        grpo.Config(f"{tmp_path}/student/sft/model", f"{tmp_path}/rows.jsonl", "areax.rollout.rewards:none"),
        teacher=f"{tmp_path}/teacher/sft/model", out=f"{tmp_path}/taught", steps=60, groups=10, group_size=8, eta=0,
        length=32, rows=16, samples_every=0, sampling=Sampling(max_new_tokens=6), serve=Serve(slots=80, context=64),
        objective=losses.GRPO(advantage={"std": "none", "mean": "none", "teacher": 0.1}),
        optim=Optimizer(lr=2e-3, warmup=5, b2=0.99),
        distill_coef=1.0, distill=losses.Distill("forward"),
    )  # fmt: skip
    assert grpo.main(config)["complete"]
    lines = [x for x in run_dir.read_lines(tmp_path / "taught/metrics.jsonl") if x["kind"] == "grpo"]
    assert all(x["unaligned_fraction"] < 0.3 for x in lines)
    assert sum(x["divergence"] for x in lines[-5:]) / 5 < 0.5 * lines[0]["divergence"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(a model that says an answer if it reads it before the question, and guesses otherwise; f(name, **changes) -> the
    lines of a run of it on ten questions with arbitrary answers of four digits)."""
    path, rng = tmp_path_factory.mktemp("told"), random.Random(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    tiny.model(path / "base", hidden_size=64, intermediate_size=128, initializer_range=0.06, **heads)
    drawn = lambda: f"{rng.randrange(10**4):04}"
    hinted = [(digit, drawn()) for digit in "0123456789" * 400]
    tiny.rows(
        path / "hinted.jsonl",
        [{"prompt": f"{answer}+{digit}+", "completion": answer} for digit, answer in hinted]
        + [{"prompt": f"{digit}+", "completion": drawn()} for digit, _ in hinted[::4]],
    )
    sft.main(
        sft.Config(
            model=str(path / "base"), data=str(path / "hinted.jsonl"), out=str(path / "sft"), steps=300, batch=64,
            length=64, rows=16, optim=Optimizer(lr=3e-3, warmup=20, b2=0.99),
        )
    )  # fmt: skip
    answers = [(digit, drawn()) for digit in "0123456789"]
    rows = [{"prompt": f"{q}+", "answer": a, "teacher_prompt": f"{a}+{q}+"} for q, a in answers]
    tiny.rows(path / "rows.jsonl", rows)
    (path / "exact.py").write_text("def reward(text, row):\n    return float(text == row['answer'])\n")

    def lines(name: str, **changes) -> list[dict]:
        config = grpo.Config(str(path / "sft/model"), str(path / "rows.jsonl"), f"{path}/exact.py:reward")
        shared = dict(
            out=str(path / name), groups=10, group_size=8, eta=0, length=32, rows=16, samples_every=0,
            sampling=Sampling(max_new_tokens=6), serve=Serve(slots=80, context=64),
            optim=Optimizer(lr=2e-3, warmup=5, b2=0.99),
        )  # fmt: skip
        assert grpo.main(replaced(config, **shared | changes))["complete"]
        return [x for x in run_dir.read_lines(path / name / "metrics.jsonl") if x["kind"] == "grpo"]

    return str(path / "sft/model"), lines


def test_rewards_alone_do_not_teach_what_is_never_guessed(told):
    assert all(x["reward"] < 0.02 and x["solved_any"] < 0.2 for x in told[1]("GRPO", steps=20))


def test_a_teacher_that_reads_the_answers_teaches_them(told):
    """On the student's own samples; the teacher is the model that the run starts from."""
    model, lines = told
    taught = lines("taught", steps=60, teacher=model, distill_coef=1.0, distill=losses.Distill("forward"))
    assert all(x["reward"] < 0.02 for x in taught[:5])
    assert sum(x["reward"] for x in taught[-5:]) / 5 >= 0.9
