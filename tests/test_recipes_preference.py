"""Preferences from files to files: learns, resumes exactly, says what is wrong; a reward model rewards elsewhere."""

import asyncio
import json
import random
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from areax.adapters import cli, hf, reward_model, tokenizer
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.core.optim import Optimizer
from areax.parallel.mesh import Layout
from areax.recipes import preference
from areax.recipes.shared import common, score_head
from areax.rollout import rewards
from areax.rollout.types import supervised


def pair(rng):
    """Even digits are better than odd ones."""
    digits = lambda some: "".join(rng.choice(some) for _ in range(rng.randint(1, 4)))
    return {"prompt": f"{rng.randrange(10)}+", "chosen": digits("02468"), "rejected": digits("13579")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("preference"), random.Random(0)
    tiny.model(path / "model", tie_word_embeddings=False)
    tiny.rows(path / "rows.jsonl", [pair(rng) for _ in range(64)])
    tiny.rows(path / "heldout.jsonl", heldout := [pair(rng) for _ in range(16)])
    sides = lambda row: [{"prompt": row["prompt"], "completion": row[k], "label": k == "chosen"} for k in CHOICE]
    tiny.rows(path / "single.jsonl", [side for row in heldout for side in sides(row)])
    return path


CHOICE = ("chosen", "rejected")


def config(place, out, **changes):
    base = preference.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), heldout=str(place / "heldout.jsonl"),
        out=str(place / out), steps=8, batch=16, length=64, rows=8, optim=Optimizer(lr=5e-3),
    )  # fmt: skip
    return replace(base, **changes)


@pytest.fixture(scope="module")
def scorer(place):
    """A reward model, and what the recipe said of it."""
    return place / "reward/model", preference.main(config(place, "reward", objective=losses.RewardModel()))


@pytest.mark.slow
def test_dpo_learns_and_resumed_equals_uninterrupted(place):
    whole = preference.main(config(place, "whole", save_every=4))
    assert whole["complete"] and whole["heldout_preference_accuracy"] >= 0.95 and whole["heldout_loss"] < 0.5
    first = next(run_dir.read_lines(place / "whole/metrics.jsonl"))
    np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-5)  # the policy is the reference
    assert first["left_out"] == 0  # two programs round scores of some nats each in their way
    np.testing.assert_allclose([first["reward_chosen"], first["reward_rejected"]], 0, atol=1e-6)
    tiny.cut_off(place / "whole", place / "parts", 4)
    preference.main(config(place, "parts", heldout=""))
    a, b = hf.load(place / "whole/model")[1], hf.load(place / "parts/model")[1]
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)
    steps = [line["step"] for line in run_dir.read_lines(place / "parts/metrics.jsonl") if "grad_norm" in line]
    assert steps == list(range(1, 9))


@pytest.mark.slow
def test_too_long_pairs_are_left_out(place, capsys):
    rows = [{"prompt": "1+", "chosen": "2" * n, "rejected": "3" * m} for n, m in ((1, 1), (70, 1), (1, 70), (2, 2))]
    long = config(place, "long", data=str(tiny.rows(place / "long.jsonl", rows)), heldout="", steps=1)
    assert preference.main(replace(long, too_long="drop"))["complete"]
    assert capsys.readouterr().err.splitlines()[0] == "2 of 4 rows are left out, longer than --length 64"


@pytest.mark.long
@pytest.mark.parametrize("objective", [losses.KTO(), losses.BCO()], ids=["kto", "bco"])
def test_learns_from_single_completions(place, objective):
    single = str(place / "single.jsonl")
    own = "kl_baseline" if objective.name == "KTO" else "reward_shift"
    done = preference.main(config(place, objective.name, data=single, heldout=single, objective=objective))
    assert done["heldout_preference_accuracy"] >= 0.9 and done["left_out"] == 0 and f"heldout_{own}" in done


@pytest.mark.slow
def test_a_reward_model_learns_and_opens_in_transformers(place, scorer):
    """The scores are those of AutoModelForSequenceClassification, of a padded batch, and rank as the recipe says."""
    import torch
    from transformers import AutoModelForSequenceClassification

    path, said = scorer
    assert said["heldout_preference_accuracy"] >= 0.95
    theirs, loading = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and theirs.config.num_labels == 1
    told = json.loads((path / "config.json").read_text())
    assert told["architectures"] == ["Qwen3ForSequenceClassification"] and told["pad_token_id"] is not None
    tokens, reward = tokenizer.load(path), reward_model.load(path)
    rows = [json.loads(line) for line in (place / "heldout.jsonl").read_text().splitlines()]
    ours = {side: [reward(row[side], row) for row in rows] for side in CHOICE}
    for side, scores in ours.items():
        ids = [sum(tokenizer.supervised(tokens, {**row, "completion": row[side]}), []) for row in rows]
        padded = tokens.pad({"input_ids": ids}, return_tensors="pt")
        with torch.no_grad():
            logits = theirs(**padded).logits[:, 0]
        np.testing.assert_allclose(scores, logits.numpy(), atol=1e-4)
        np.testing.assert_allclose(np.mean(scores), said[f"heldout_reward_{side}"], atol=1e-4)
    accuracy = np.mean(np.array(ours["chosen"]) > np.array(ours["rejected"]))
    assert accuracy == pytest.approx(said["heldout_preference_accuracy"])


@pytest.mark.slow
def test_a_reward_model_rewards_in_worker_processes(place, scorer, tmp_path):
    path = scorer[0]
    (tmp_path / "mine.py").write_text(
        f"from areax.adapters import reward_model\nreward = reward_model.load({str(path)!r})\n"
    )

    async def ask():
        async with rewards.pool(f"{tmp_path}/mine.py:reward", workers=1, timeout_s=120) as reward:
            return [(await reward(text, {"prompt": "1+"})).value for text in ("24", "35")]

    good, bad = asyncio.run(ask())
    own = reward_model.load(path)
    assert good > bad
    np.testing.assert_allclose([good, bad], [own(text, {"prompt": "1+"}) for text in ("24", "35")], rtol=1e-5)


@pytest.mark.slow
def test_a_reward_model_from_new_weights_and_from_itself(place, scorer, tmp_path):
    """Tied or not, the output matrix is not part of it; one that has a score head goes on with it."""
    tiny.model(place / "tied")
    tokens, mesh = tokenizer.load(place / "model"), common.open_mesh(Layout(), rows=8, length=64)
    for model, init in (
        ("model", "random"),
        ("model", "checkpoint"),
        ("tied", "checkpoint"),
        ("reward/model", "checkpoint"),
    ):
        changes = dict(model=str(place / model), objective=losses.RewardModel(), init=init)
        start = preference.open_model(config(place, "unused", **changes), tokens, mesh)
        hf.save(tmp_path / "model", *start, tokenizer=tokens)
        settings, params = hf.load(tmp_path / "model")
        assert settings.score_head and set(params) == {"embed", "norm", "score", "stacks"}
        for x, y in zip(*map(jax.tree.leaves, (start[1], params)), strict=True):
            np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(params["score"], hf.load(scorer[0])[1]["score"])


def test_end_of_turn_is_never_padding(place):
    tokens = tokenizer.load(place / "model")
    end = tokenizer.end_of_turn(tokens)
    tokens.pad_token = tokens.convert_ids_to_tokens(end)
    assert score_head.pad_id(tokens) != end and tokens.pad_token_id != end


@pytest.mark.wide
@pytest.mark.mesh
def test_training_is_the_same_on_a_mesh(place):
    for objective in (losses.DPO(), losses.RewardModel()):
        few = dict(steps=2, objective=objective)
        one = preference.main(config(place, f"one-{objective.name}", **few))
        on = preference.main(config(place, f"on-{objective.name}", mesh=Layout(fsdp=2, cp=2, tp=2), **few))
        for name in ("loss", "heldout_loss", "heldout_preference_accuracy"):
            np.testing.assert_allclose(on[name], one[name], rtol=1e-4)


def test_a_margin_is_the_reward_of_the_chosen_answer():
    rows = [{"prompt": "1+", "chosen": "2", "rejected": "3", "margin": 0.5}]
    sample = lambda row, text: supervised([1, 2], [3])
    made = preference.pairs(sample, losses.RewardModel(margin=True), rows)
    assert [(s.reward, s.label, s.pair, s.rollout) for s in made] == [(0.5, 1.0, 0, 0), (0.0, 0.0, 0, 1)]


def test_kto_pairs_every_completion_with_another_prompt():
    rows = [{"prompt": str(i), "completion": str(i), "label": i % 2 == 0} for i in range(3)]
    seen = []
    sample = lambda row, text: seen.append((row["prompt"], text)) or supervised([1, 2], [3])
    made = preference.pairs(sample, losses.KTO(), rows)
    assert [s.label for s in made] == [1, 0, 1, -1, -1, -1]
    assert seen == [("0", "0"), ("1", "1"), ("2", "2"), ("0", "2"), ("1", "0"), ("2", "1")]
    assert [s.label for s in preference.pairs(sample, losses.BCO(), rows)] == [1, 0, 1]


@pytest.mark.parametrize(
    "objective, fields, words",
    [
        (
            losses.DPO(),
            "prompt chosen",
            r"DPO: every row needs a text 'rejected', got the fields \['chosen', 'prompt'\]",
        ),
        (
            losses.DPO(),
            "chosen rejected",
            r"needs either 'prompt' or 'messages', got the fields \['chosen', 'rejected'\]",
        ),
        (losses.KTO(), "prompt completion", "KTO: every row needs a 'label' true or false, got None; got the fields"),
        (losses.BCO(), "prompt completion", "BCO: every row needs a 'label' true or false, got None; got the fields"),
        (losses.KTO(), "prompt chosen", "KTO: every row needs a text 'completion', got the fields"),
        (losses.RewardModel(margin=True), "prompt chosen rejected", "RewardModel: every row needs a number 'margin'"),
    ],
)
def test_rows_without_required_fields_are_named(place, objective, fields, words):
    tiny.rows(place / "bad.jsonl", [dict.fromkeys(fields.split(), "1")])
    with pytest.raises(ValueError, match=words) as error:
        preference.main(config(place, "bad", data=str(place / "bad.jsonl"), objective=objective))
    assert "\n" not in str(error.value)


def test_other_bad_input_gives_a_one_line_error(place, tmp_path):
    with pytest.raises(ValueError, match="--batch must be at least 2"):
        config(place, "bad", batch=1, objective=losses.KTO())
    data = tiny.rows(tmp_path / "rows.jsonl", [{"prompt": "1+", "chosen": "2" * 40, "rejected": "3" * 40}])
    with pytest.raises(ValueError, match="rows.jsonl:1: both sequences of a pair must fit in --rows 1 of --length 64"):
        preference.main(config(place, "bad", data=str(data), rows=1))
    with pytest.raises(ValueError, match="a checkpoint must be a directory that exists"):
        reward_model.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a reward model needs a score head"):
        reward_model.load(place / "model")("2", {"prompt": "1"})


def test_every_objective_is_a_command(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(preference, "main", lambda config: seen.append(config.objective))
    required = ["--model", "m", "--data", "d"]
    for name, preset in losses.PREFERENCES.items():
        assert cli.main(["train", name.lower(), *required]) == 0
        assert seen[-1] == preset()
    assert cli.main(["train", "kto", *required, "--objective.desirable-weight", "1.5"]) == 0
    assert seen[-1] == losses.KTO(desirable_weight=1.5)
    assert cli.main(["train", "rewardmodel", *required, "--objective.margin"]) == 0
    assert seen[-1] == losses.RewardModel(margin=True)
    assert cli.main(["train", "simpo", *required, "--objective.gamma", "0.5"]) == 0
    assert seen[-1] == losses.SimPO(gamma=0.5)
    assert cli.main(["train", "kto", *required, "--objective.desirable-weigth", "1.5"]) == 2
    assert "did you mean --objective.desirable-weight?" in capsys.readouterr().err
    assert cli.main(["train", "--help"]) == 0
    assert "dpo,ipo,simpo,cpo,orpo,kto,bco,rewardmodel" in capsys.readouterr().out
