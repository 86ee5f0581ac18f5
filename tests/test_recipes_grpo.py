"""GRPO as a user runs it: a real server process, real rewards, weights pushed live."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from areax import models
from areax.adapters import cli, hf, tokenizer, tracker
from areax.core import losses, param
from areax.core.losses import GRPO
from areax.core.optim import AdamW
from areax.parallel.mesh import Layout
from areax.recipes import grpo
from areax.rollout import arithmetic
from areax.rollout.local import Serve
from areax.rollout.workflows import Sampling


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("grpo")
    tiny.model(path / "model")
    split = arithmetic.splits()
    tiny.rows(path / "rows.jsonl", split["train"][:40])
    tiny.rows(path / "heldout.jsonl", split["heldout"][:10])
    (path / "rewards.py").write_text(
        "import dataclasses\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Digits:\n"
        "    share: float\n"
        "def score(text, row):\n"
        "    digits = Digits(sum(c.isdigit() for c in text) / 4)\n"
        "    return {'digits': digits.share, 'exact': float(text == row['answer'])}\n"
    )
    return path


def config(place, out, **changes):
    base = grpo.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), reward=f"{place}/rewards.py:score",
        out=str(place / out), steps=3, groups=4, group_size=4, max_concurrent=8, length=32, rows=4, eta=0,
        sampling=Sampling(max_new_tokens=4), objective=GRPO(std="none"), optim=AdamW(lr=1e-2, b2=0.99),
        serve=Serve(slots=8, context=64), samples_every=1,
    )  # fmt: skip
    return replace(base, **changes)


def leaves(path):
    return [np.asarray(x) for x in jax.tree.leaves(hf.load(path)[1])]


def test_synchronous_runs_are_identical_and_resume_exactly(place):
    """Two runs with eta = 0 give the same parameters, and so does a run in two parts."""
    first = grpo.main(config(place, "first", heldout=str(place / "heldout.jsonl")))
    assert first["complete"] and first["heldout_rows"] == 10 and set(first["accuracies"]) == {"0", "3"}
    assert [label.split("-")[0] for label in first["server_version"]] == ["3"]
    assert first["max_logp_diff"] <= 1e-4 and first["mismatch_k3_now"] < 1e-9
    grpo.main(config(place, "parts", steps=2))
    grpo.main(config(place, "parts"))
    for a, b in zip(leaves(place / "first/model"), leaves(place / "parts/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    start = leaves(place / "model")
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, leaves(place / "first/model"), strict=True))
    lines = [x for x in tracker.read_lines(place / "first/metrics.jsonl") if x["kind"] == "grpo"]
    assert [x["step"] for x in lines] == [1, 2, 3]
    assert all(x["staleness_max"] == 0 and x["samples"] == 16 and abs(x["ratio"] - 1) < 1e-5 for x in lines)
    shown = list(tracker.read_lines(place / "first/samples.jsonl"))
    assert len(shown) == 12 and all(len(x["tokens"]) == len(x["logp"]) for x in shown)


@pytest.mark.mesh
def test_a_trainer_on_a_mesh_takes_the_step_of_one_device(place):
    """The first batch is sampled from the same weights with the same seeds, so both learn from the same tokens."""
    first = []
    for name, layout in {"one": Layout(), "mesh": Layout(fsdp=2, cp=2, tp=2)}.items():
        assert grpo.main(config(place, name, steps=1, mesh=layout))["max_logp_diff"] <= 1e-4
        lines = tracker.read_lines(place / f"{name}/metrics.jsonl")
        first.append(next(line for line in lines if line["kind"] == "grpo"))
    for name in ("loss", "grad_norm", "entropy", "reward", "tokens"):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", losses.POLICIES)
def test_every_algorithm_trains_from_the_command_line(place, name):
    out = place / f"algorithm-{name}"
    options = {
        "model": place / "model", "data": place / "rows.jsonl", "reward": f"{place}/rewards.py:score", "out": out,
        "steps": 3, "groups": 4, "group-size": 4, "max-concurrent": 8, "length": 32, "rows": 4,
        "sampling.max-new-tokens": 4, "serve.slots": 8, "serve.context": 64, "optim.lr": 1e-2,
    }  # fmt: skip
    assert cli.main(["train", name.lower(), *(str(w) for k, v in options.items() for w in (f"--{k}", v))]) == 0
    lines = [x for x in tracker.read_lines(out / "metrics.jsonl") if x["kind"] == "grpo"]
    assert len(lines) == 3 and all(x["grad_norm"] > 0 and x["skipped"] == 0 for x in lines)


@pytest.mark.mesh
def test_experts_of_sampling_are_those_of_training(place, monkeypatch):
    """A mixture is served, what it reports travels with the samples, and the trainer's scores agree."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    tiny.model(place / "mixture", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    packed, pack = [], grpo.packing.pack
    monkeypatch.setattr(grpo.packing, "pack", lambda *args, **more: packed.append(pack(*args, **more)) or packed[-1])
    sampling = Sampling(max_new_tokens=4, routed_experts=True)
    done = grpo.main(config(place, "experts", model=str(place / "mixture"), steps=2, eta=1, sampling=sampling))
    assert done["complete"] and done["max_logp_diff"] <= 1e-4
    for batch in packed:
        chosen_MBTX = np.asarray(batch.input["routed_experts"])
        assert chosen_MBTX.shape[-1] == 2 * 2 and set(np.unique(chosen_MBTX[batch.mask_BT > 0])) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="needs a model with experts"):
        grpo.main(config(place, "none", steps=1, sampling=sampling))


def test_asynchronous_keeps_the_bound(place):
    done = grpo.main(config(place, "async", eta=2, steps=5, minibatches=2))
    assert done["complete"] and done["counts"]["accepted"] == 20
    lines = [x for x in tracker.read_lines(place / "async/metrics.jsonl") if x["kind"] == "grpo"]
    assert [x["version"] for x in lines] == [0, 1, 2, 3, 4]
    assert max(x["staleness_max"] for x in lines) <= 2
    assert done["max_logp_diff"] <= 1e-4


def test_a_recipe_by_path_runs_under_spawn(place):
    """A recipe file with a Config of its own, a reward file with a dataclass of its own, no package in sight."""
    (place / "mine.py").write_text(
        "import dataclasses\n"
        "from areax.recipes import grpo\n"
        "from areax.rollout.local import Serve\n"
        "from areax.rollout.workflows import Sampling\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Config:\n"
        '    """Mine."""\n'
        "    place: str\n"
        "    steps: int = 1\n"
        "def main(config):\n"
        "    p = config.place\n"
        "    return grpo.main(grpo.Config(model=p + '/model', data=p + '/rows.jsonl', reward=p + '/rewards.py:score',\n"
        "        out=p + '/mine', steps=config.steps, groups=2, group_size=2, length=32, rows=2,\n"
        "        sampling=Sampling(max_new_tokens=4), serve=Serve(slots=4, context=64)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "areax", "train", str(place / "mine.py"), "--place", str(place)],
        capture_output=True, text=True, timeout=300, env={**os.environ}, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1


def test_a_reward_that_raises_ends_the_run_with_one_line(place):
    (place / "broken.py").write_text("def score(text, row):\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*broken.py:2"):
        grpo.main(config(place, "broken", reward=f"{place}/broken.py:score", steps=1))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data": "nowhere.jsonl"}, "no such file"),
        ({"reward": "areax.rollout.gsm8k:rewrad"}, "did you mean reward"),
        ({"model": "nowhere"}, "nowhere"),
        ({"length": 8}, "must fit in a row of 8"),
        ({"sampling": Sampling(max_new_tokens=4, top_p=0.9)}, "top_p"),
    ],
)
def test_bad_input_is_one_line(place, changes, words):
    with pytest.raises(ValueError, match=words):
        grpo.main(config(place, "bad" + words[:3].strip(), steps=1, **changes))


def test_two_steps_on_gsm8k(place):
    """The real files where AREAX_GSM8K names them, else a small fixture of our own wording."""
    folder = Path(os.environ.get("AREAX_GSM8K") or Path(__file__).parent / "data/gsm8k")
    tokens = tokenizer.byte_level()
    settings = models.config_from_hf(
        {**tiny.HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "max_position_embeddings": 1024}
    )
    hf.save(place / "bytes", settings, param.init(jax.random.key(0), models.table(settings)), tokenizer=tokens)
    done = grpo.main(
        config(
            place, "gsm8k", model=str(place / "bytes"), data=str(folder / "train.jsonl"),
            row="areax.rollout.gsm8k:row", reward="areax.rollout.gsm8k:reward", steps=2, groups=2, group_size=2,
            length=1024, rows=2, eta=1, sampling=Sampling(max_new_tokens=16), serve=Serve(slots=4, context=1024),
        )
    )  # fmt: skip
    assert done["complete"] and done["max_logp_diff"] <= 1e-4


def test_shuffled_rewards_keep_the_multiset(place):
    samples = [[_sample(10 * g + i) for i in range(3)] for g in range(4)]
    mixed = grpo.shuffled(samples, seed=(0, 1))
    flat = lambda groups: [s.reward for group in groups for s in group]
    assert sorted(flat(mixed)) == sorted(flat(samples)) and flat(mixed) != flat(samples)
    assert [len(g) for g in mixed] == [3] * 4


def _sample(reward):
    from areax.rollout.types import Completion, sampled

    return sampled([1, 2], Completion([3, 4], [-1.0, -1.0], [0, 0], "stop"), temperature=1.0, reward=reward)
