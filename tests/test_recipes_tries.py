"""`--trie auto` changes no number of a run: what samples share is computed once, in every recipe."""

import random
from dataclasses import replace

import jax
import job_program
import numpy as np
import pytest
import tiny

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core import losses, packing
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes import distill, grpo, preference, prm, sft
from areax.recipes.shared import trainer, tries
from areax.rollout.types import Completion, sampled

SYSTEM = "1+2+3+4+5+6+7+"  # in front of every prompt
WIDE = dict(seed=1, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("tries"), random.Random(0)
    tiny.model(path / "model", tie_word_embeddings=False)
    tiny.model(path / "wide", **WIDE)
    digits = lambda some: "".join(rng.choice(some) for _ in range(rng.randint(1, 4)))
    rows = []
    for _ in range(32):
        answers = {"chosen": digits("02468"), "rejected": digits("13579")}
        steps = [digits("0123456789") for _ in range(2)]
        rows.append({
            "prompt": f"{SYSTEM}{rng.randrange(10)}+", "completion": answers["chosen"], "label": rng.random() < 0.5,
            "completions": steps, "labels": [step[0] in "02468" for step in steps], **answers,
        })  # fmt: skip
    for recipe, names in FIELDS.items():
        tiny.rows(path / f"{recipe}.jsonl", [{name: row[name] for name in ("prompt", *names)} for row in rows])
    return path


FIELDS = {
    "sft": ["completion"], "distill": ["completion"], "dpo": ["chosen", "rejected"], "kto": ["completion", "label"],
    "reward": ["chosen", "rejected"], "prm": ["completions", "labels"],
}  # fmt: skip
RECIPES = {
    "sft": (sft, {}),
    "distill": (distill, {}),
    "dpo": (preference, dict(objective=losses.DPO())),
    "kto": (preference, dict(objective=losses.KTO())),
    "reward": (preference, dict(objective=losses.RewardModel())),
    "prm": (prm, {}),
}


@pytest.mark.parametrize("name", [
    name if name in ("sft", "dpo", "distill") else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES
])  # fmt: skip
def test_training_on_given_rows(place, name):
    recipe, own = RECIPES[name]
    lines = {}
    for trie in ("off", "auto"):
        own = own | ({"teacher": str(place / "wide")} if name == "distill" else {})
        data = str(place / f"{name}.jsonl")
        recipe.main(recipe.Config(
            model=str(place / "model"), data=data, heldout=data, out=str(place / f"{name}-{trie}"), steps=3, batch=16,
            length=64, rows=2, optim=replace(job_program.PLAIN, lr=1e4), trie=trie, **own,
        ))  # fmt: skip
        lines[trie] = list(run_dir.read_lines(place / f"{name}-{trie}/metrics.jsonl"))
    same(lines["auto"], lines["off"], place / f"{name}-auto/model", place / f"{name}-off/model")


def same(lines, wanted, model, wanted_model):
    """Checks metrics, but the one of tries, and that weights moved alike."""
    assert len(lines) == len(wanted) >= 3
    for line, other in zip(lines, wanted, strict=True):
        assert ("trie_ratio" in line) == ("loss" in line and "heldout_loss" not in line)
        assert line.get("trie_ratio", 0) < 0.8 and "trie_ratio" not in other
        for key, value in other.items():
            if isinstance(value, float) and not key.endswith(("seconds", "_s", "tokens_per_second")):
                np.testing.assert_allclose(line[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
    for a, b in zip(*(jax.tree.leaves(hf.load(path)[1]) for path in (model, wanted_model)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
