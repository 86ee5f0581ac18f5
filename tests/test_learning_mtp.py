"""Drafts stay accepted while the policy changes, if the layer that makes them trains with it: `make test-learning`.

The task: a walk over the digits from the one in the prompt. Imitation teaches steps of 1, 2 or 3, all equally likely;
reinforcement learning rewards those of 3.
"""

import dataclasses
import random

import pytest
import tiny
from test_models_mtp import write

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.command_line.options import replaced
from areax.core.losses import GRPO
from areax.core.mtp import MTP
from areax.core.optim import Optimizer
from areax.models import mtp
from areax.recipes import grpo, sft
from areax.rollout.chat import template
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.local import Serve
from areax.rollout.types import Sampling as Sampled

pytestmark = pytest.mark.learning
LENGTH, WIDTH = 24, 4
MODEL = {
    "model_type": "glm4_moe", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": True,
    "tie_word_embeddings": False, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
REWARD = f"""
def score(text, row):
    digits = [int(c) for c in row["prompt"] + text if c.isdigit()]
    return sum((b - a) % 10 == 3 for a, b in zip(digits, digits[1:])) / {LENGTH}
"""


def walk(rng) -> dict:
    at = [rng.randrange(10)]
    for _ in range(LENGTH):
        at.append((at[-1] + rng.choice((1, 2, 3))) % 10)
    return {"prompt": str(at[0]), "completion": "".join(map(str, at[1:]))}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows, a reward and, of each seed, a model that imitates walks, whose layer drafts them."""
    path = tmp_path_factory.mktemp("drafts")
    rng = random.Random(0)
    tiny.rows(path / "walks.jsonl", [walk(rng) for _ in range(4000)])
    tiny.rows(path / "prompts.jsonl", [{"prompt": str(i % 10)} for i in range(640)])
    (path / "reward.py").write_text(REWARD)
    return path


def acceptance(path, seed) -> float:
    """Share of the engine's drafts that are accepted in 200 answers at temperature 1."""
    tokens = tokenizer.load(path)
    config, params = hf.load(path, mtp=True)
    prompts = [tuple(template.prompt(tokens, {"prompt": str(i)})) for i in range(10)]
    config = dataclasses.replace(config, mtp=False)
    with Engine(config, params, slots=20, context=64, draft=WIDTH) as engine:
        sampling = Sampling(1.0, max_new_tokens=LENGTH, ignore_eos=True)
        asked = [
            Request(f"{i}", prompts[i % 10], dataclasses.replace(sampling, seed=1000 * seed + i)) for i in range(200)
        ]
        engine.generate(asked)
        stats = engine.stats()
    return stats["accepted"] / stats["drafted"]


SEEDS = [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_of_a_layer_that_trains_with_the_policy_are_accepted_more_often(place, seed):
    tokens = tokenizer.character("0123456789")
    source = MODEL | {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    config = models.config_from_hf(source)
    start = place / f"start-{seed}"
    weights = (tiny.weights(of(config), 0.1, seed) for of in (models.table, mtp.table))
    write(start, config, *weights, tokens)
    imitation = sft.Config(
        str(start), str(place / "walks.jsonl"), str(place / f"sft-{seed}"), steps=200, batch=32, length=48, rows=32,
        optim=Optimizer(lr=3e-3, warmup=20), mtp=MTP(1.0), seed=seed,
    )  # fmt: skip
    sft.main(imitation)
    imitated = place / f"sft-{seed}/model"
    found = {"before": acceptance(imitated, seed)}
    for name, changes in {
        "frozen": dict(optim=Optimizer(lr=3e-4, b2=0.99, warmup=5)),
        "trained": dict(optim=Optimizer(lr=3e-4, mtp_lr=3e-3, b2=0.99, warmup=5), mtp=MTP(1.0)),
    }.items():
        base = grpo.Config(str(imitated), str(place / "prompts.jsonl"), f"{place}/reward.py:score")
        run = replaced(
            base, out=str(place / f"{name}-{seed}"), steps=30, groups=8, group_size=8, max_concurrent=32, length=48,
            rows=32, eta=0, sampling=Sampled(max_new_tokens=LENGTH), objective=GRPO(advantage={"std": "none"}),
            serve=Serve(slots=64, context=64, inside=True, draft=WIDTH), seed=seed, samples_every=0, **changes,
        )  # fmt: skip
        done = grpo.main(run)
        assert done["complete"]
        found[name] = acceptance(place / f"{name}-{seed}/model", seed)
    print(f"seed {seed}: acceptance " + ", ".join(f"{name} {x:.3f}" for name, x in found.items()))
    assert found["trained"] > found["frozen"] + 0.1
