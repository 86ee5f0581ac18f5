"""`--trie auto` changes no number of a run: what samples share is computed once, in every recipe."""

import random
from dataclasses import replace

import forks
import jax
import job_program
import numpy as np
import pytest
import tiny
import tiny_families

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.parallel.mesh import Layout
from areax.recipes import distill, grpo, preference, prm, sft
from areax.recipes.shared import common, packer, trainer
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


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("name", [
    name if name in ("sft", "dpo") else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES
])  # fmt: skip
def test_training_on_given_rows(place, name):
    recipe, own = RECIPES[name]
    lines = {}
    for trie in ("off", "auto"):
        own = own | ({"teacher": str(place / "wide")} if name == "distill" else {})
        data = str(place / f"{name}.jsonl")
        recipe.main(recipe.Config(
            model=str(place / "model"), data=data, heldout=data, out=str(place / f"{name}-{trie}"), steps=3, batch=16,
            length=64, rows=2, optim=job_program.PLAIN, trie=trie, **own,
        ))  # fmt: skip
        lines[trie] = list(run_dir.read_lines(place / f"{name}-{trie}/metrics.jsonl"))
    same(lines["auto"], lines["off"], place / f"{name}-auto/model", place / f"{name}-off/model")


@pytest.mark.long
def test_recurrent_layers_get_nodes_that_begin_at_chunks(place):
    """Places of a trie are rounded up to chunks, and so is --length."""
    given = tiny_families.OPTIONS["qwen3_next"] | dict(
        model_type="qwen3_next", max_position_embeddings=512, initializer_range=0.05
    )  # fmt: skip
    tiny.model(place / "recurrent", **given)
    align = models.trie_alignment(hf.read_config(place / "recurrent"))
    rows = [{"prompt": "1+2+" * 24 + f"{i % 4}+", "completion": str(i)} for i in range(16)]
    data = str(tiny.rows(place / "long.jsonl", rows))
    lines = []
    for trie in ("off", "auto"):
        out = place / f"recurrent-{trie}"
        sft.main(sft.Config(
            model=str(place / "recurrent"), data=data, out=str(out), steps=3, batch=16, length=12 * align + 4, rows=1,
            optim=job_program.PLAIN, trie=trie,
        ))  # fmt: skip
        lines.append(list(run_dir.read_lines(out / "metrics.jsonl")))
    assert align > 1
    same(*reversed(lines), place / "recurrent-auto/model", place / "recurrent-off/model")


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("method, layout", [
    ("gather", Layout(fsdp=2, cp=2, tp=2)), ("ulysses", Layout(fsdp=2, cp=2)),
])  # fmt: skip
def test_a_mesh(place, method, layout):
    given = dict(data=str(place / "sft.jsonl"), steps=3, batch=16, length=64, rows=2, optim=job_program.PLAIN)
    lines = []
    for name, own in {
        "rows": dict(trie="off"), "mesh": dict(trie="auto", mesh=layout, run=models.Run(cp=method))
    }.items():  # fmt: skip
        out = place / f"{method}-{name}"
        sft.main(sft.Config(model=str(place / "model"), out=str(out), **given, **own))
        lines.append(list(run_dir.read_lines(out / "metrics.jsonl")))
    same(*reversed(lines), place / f"{method}-mesh/model", place / f"{method}-rows/model")


def same(lines, wanted, model, wanted_model):
    """Checks metrics, but the one of tries, and that weights moved alike."""
    assert len(lines) == len(wanted) >= 3
    for line, other in zip(lines, wanted, strict=True):
        assert ("trie_ratio" in line) == ("loss" in line and "heldout_loss" not in line)
        assert line.get("trie_ratio", 0) < 0.8 and "trie_ratio" not in other
        for key, value in other.items():
            if isinstance(value, float) and not key.endswith(("filled", "seconds", "_s", "tokens_per_second")):
                np.testing.assert_allclose(line[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
    for a, b in zip(*(jax.tree.leaves(hf.load(path)[1]) for path in (model, wanted_model)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def groups(seed: int, prompt: int = 12) -> list:
    """Four groups of four completions, of which two begin alike, sampled by nobody."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(4):
        ids, begin = [3, *rng.integers(5, 16, prompt - 1).tolist()], rng.integers(5, 16, 2).tolist()
        for i in range(4):
            tokens = [*begin[: 2 * (i % 2)], *rng.integers(5, 16, rng.integers(1, 9)).tolist()]
            done = Completion(tokens, (-3 * rng.random(len(tokens))).tolist(), [0] * len(tokens), "stop")
            own = dict(group=g, prompt=g, rollout=4 * g + i, sample=4 * g + i)
            made.append(sampled(ids, done, temperature=1.0, reward=float(rng.random()), **own))
    return [made[i : i + 4] for i in range(0, 16, 4)]


BESIDE = {name: job_program.BESIDE[name] for name in ("reference", "critic", "teacher", "adapters")} | {
    "distillation": lambda model: dict(objective=losses.GRPO(), teacher=model, distill_coef=0.5)
}


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("beside", [
    name if name == "reference" else pytest.param(name, marks=pytest.mark.slow) for name in BESIDE
])  # fmt: skip
def test_reinforcement_learning(place, beside):
    model = str(place / "model")
    base = replaced(
        grpo.Config(model, data="", reward=""), steps=2, groups=4, group_size=4, length=32, rows=2, minibatches=2,
        optim=job_program.PLAIN, **BESIDE[beside](model),
    )  # fmt: skip
    rows, shared = (grpo.build_trainer(replaced(base, trie=trie)) for trie in ("off", "auto"))
    for step in range(2):
        wanted, got = (trainer.train_on_batch(each, groups(step)) for each in (rows, shared))
        assert got["trie_ratio"] < 0.7 and "trie_ratio" not in wanted
        for key, value in wanted.items():
            if isinstance(value, float) and key != "filled":
                np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
        for (_, logp), (_, other) in zip(got["groups"][0], wanted["groups"][0], strict=True):
            if logp is not None:
                np.testing.assert_allclose(logp, other, atol=1e-5)
    for a, b in zip(*(jax.tree.leaves(each.policy.state.params) for each in (shared, rows)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("changes, words", [
    (dict(mesh=Layout(cp=2), run=models.Run(cp="ring")), "--run.cp ring cannot split tries; gather and ulysses can"),
    (dict(run=models.Run(attention="splash")), "--run.attention splash cannot compute tries; triton and chunked can"),
])  # fmt: skip
def test_runs_without_tries_say_why_in_one_line(place, changes, words, capsys):
    settings = hf.read_config(place / "model")
    config = sft.Config(model=str(place / "model"), data="", trie="auto", **changes)
    assert packer.make(config, settings)(forks.samples(), 2).trie is None
    assert capsys.readouterr().err == f"--trie auto has no effect: {words}\n"
    assert packer.make(replace(config, trie="off"), settings)(forks.samples(), 2).trie is None
    assert not capsys.readouterr().err


def test_rope_that_depends_on_the_length_keeps_samples_apart_and_is_said_in_one_line(capsys):
    """Samples longer than 20 tokens share with each other; a run whose completions may cross that length is told."""
    settings = tiny_families.config("phi3")
    batch = packer.make(sft.Config(model="", data="", trie="auto"), settings)(forks.samples(), 2)
    assert batch.trie.apart == models.trie_lengths(settings) == (20,)
    common.note_rope(settings, 20)
    common.note_rope(tiny_families.config("qwen3"), 96)
    assert not capsys.readouterr().err
    common.note_rope(settings, 21)
    said = capsys.readouterr().err
    assert said.startswith("rope changes in sequences longer than 20 tokens: ") and said.count("\n") == 1
    assert "--length 20 avoids it" in said
