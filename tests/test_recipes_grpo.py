"""GRPO as a user runs it: a real server process, real rewards, weights pushed live.

Most runs share one server, which each gives its own weights first; those with `servers=()` start theirs.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import datasets as hf_datasets
import jax
import job_program
import jobs
import numpy as np
import pytest
import servers
import tiny
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areax import models
from areax.adapters import cli, hf, peft, safetensors, tokenizer
from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.adapters.tracking.sinks import Sinks
from areax.core import losses, packing
from areax.core.balance import Balance
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.models import lora
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes import grpo
from areax.recipes.shared import describe, learner, rollouts, run_export, trainer
from areax.recipes.shared.rl_options import Rollout
from areax.rollout import client, events, object_path
from areax.rollout.chat import template
from areax.rollout.fleet.push import Push
from areax.rollout.scheduling.curriculum import Curriculum
from areax.rollout.scheduling.episodes import sampling_seed
from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh
from areax.rollout.servers.labels import label_of, read_label
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Completion, Sampling, sampled


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
    with servers.embedded(path / "model", slots=8, context=64) as remote:
        (path / "url").write_text(remote.url)
        yield path


def config(place, out, **changes):
    base = grpo.Config(str(place / "model"), str(place / "rows.jsonl"), f"{place}/rewards.py:score")
    base = replaced(
        base, out=str(place / out), steps=3, groups=4, group_size=4, max_concurrent=8, length=32, rows=4, eta=0,
        sampling=Sampling(max_new_tokens=4), objective=GRPO(advantage={"std": "none"}),
        optim=Optimizer(lr=1e-2, b2=0.99),
        samples_every=1,
    )  # fmt: skip
    shared = {"servers": ((place / "url").read_text(),)}
    where = {"serve": Serve(slots=8, context=64)} if changes.get("servers") == () else shared
    return replaced(base, **{**where, **changes})


def leaves(path):
    return [np.asarray(x) for x in jax.tree.leaves(hf.load(path)[1])]


@pytest.fixture(scope="module")
def first(place):
    """The summary of a run with a server of its own, "first", which other runs must equal."""
    return grpo.main(config(place, "first", servers=(), heldout=(str(place / "heldout.jsonl"),), save_every=2))


@pytest.mark.slow
def test_synchronous_runs_are_identical_and_resume_exactly(place, first, monkeypatch, capsys):
    """A run with eta = 0 that was killed gives the same parameters, with another server."""
    assert first["complete"] and first["heldout_rows"] == 10 and set(first["accuracies"]) == {"0", "3"}
    assert [label.split("-")[0] for label in first["server_version"]] == ["3"]
    assert first["max_logp_diff"] <= 1e-4 and first["mismatch_k3_now"] < 1e-9
    pushes = [x for x in run_dir.read_lines(place / "first/events.jsonl") if x["kind"] == "push"]
    assert [push["load_s"] > 0 for push in pushes] == [False, True, True, True]  # it was started with version 0
    tiny.cut_off(place / "first", place / "parts", 2)
    grpo.main(config(place, "parts"))
    for a, b in zip(leaves(place / "first/model"), leaves(place / "parts/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    capsys.readouterr()
    with monkeypatch.context() as patch:  # complete, it has nothing to do, whatever servers there are
        patch.setattr(grpo, "build_trainer", lambda _: pytest.fail("a model was loaded"))
        again = grpo.main(config(place, "parts"))
        assert grpo.main(config(place, "parts", servers=("http://127.0.0.1:9",))) == again
    assert again == json.loads((place / "parts/summary.json").read_text())
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith(
            f"{place}/parts: the run is complete after 3 steps, its model is in {place}/parts/model;"
        )
    seen = [x for x in run_dir.read_lines(place / "parts/metrics.jsonl") if x["kind"] == "grpo"]
    for name in ("max_logp_diff", "mismatch_k3_now"):
        assert again[name] == max(x[name] for x in seen)
    start = leaves(place / "model")
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, leaves(place / "first/model"), strict=True))
    assert run_export.convert(place / "first", place / "exported")["step"] == 3
    for file in (place / "first/model").iterdir():
        assert (place / "exported" / file.name).read_bytes() == file.read_bytes()
    lines = [x for x in run_dir.read_lines(place / "first/metrics.jsonl") if x["kind"] == "grpo"]
    assert [x["step"] for x in lines] == [1, 2, 3]
    assert all(x["staleness_max"] == 0 and x["samples"] == 16 and abs(x["ratio"] - 1) < 1e-5 for x in lines)
    assert all(0 < x["push_probe_diff"] <= 1e-5 and x["push_prove_s"] > 0 for x in lines)
    shown = list(run_dir.read_lines(place / "first/samples.jsonl"))
    assert [(x["kind"], x["step"]) for x in shown].count(("eval", 0)) == 10 == len(shown) - 12 - 10
    assert all(len(x["tokens"]) == len(x["logp"]) for x in shown)


@pytest.mark.long
def test_a_resume_with_other_options_says_which_or_is_refused_and_leaves_config_json(place, first, capsys, tmp_path):
    """A run of two steps of three, taken up: refused with another seed, data or model; else the former file is kept."""
    tiny.cut_off(place / "first", place / "changed", 2)
    out, options = place / "changed", lambda name: json.loads((place / "changed" / name).read_text())
    before, own = (out / "config.json").read_text(), config(place, "changed")
    tiny.rows(tmp_path / "few.jsonl", arithmetic.splits()["train"][:30])
    tiny.model(tmp_path / "model", hidden_size=16)
    for changes, words in (
        (dict(seed=5), "--seed must be the run's, 0, for the same order of --data, got 5; or name another --out"),
        (
            dict(data=str(tmp_path / "few.jsonl")),
            "few.jsonl must have the 40 rows that the run was started with, got 30",
        ),
        (dict(curriculum=Curriculum(order="success")), "--curriculum.order and field must be the run's, shuffled, got"),
        (dict(model=str(tmp_path / "model")), f"other options, --model {place}/model -> {tmp_path}/model, which its"),
        (dict(optim=Optimizer("lion", lr=1e-2)), "other options, --optim.name adamw -> lion, which its"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            grpo.main(replaced(own, **changes))
        assert (out / "config.json").read_text() == before
    capsys.readouterr()
    grpo.main(replaced(own, groups=2, optim=Optimizer(lr=1e-3, b2=0.99)))
    [said] = [line for line in capsys.readouterr().err.splitlines() if "other options" in line]
    assert said == (
        f"{out}: goes on from step 2 with other options, --groups 4 -> 2, --optim.lr 0.01 -> 0.001, "
        f"--servers none -> {own.serving.servers[0]}, --serve.slots 8 -> 0, --serve.context 64 -> 0, "
        f"--heldout {place}/heldout.jsonl -> none, --save-every 2 -> 0; the former are in config.1.json"
    )
    assert (out / "config.1.json").read_text() == before and options("config.json")["rollout"]["groups"] == 2
    # Complete, it trains nothing, whatever the options, and keeps its own.
    before, trained = (out / "config.json").read_text(), leaves(out / "model")
    summary = grpo.main(replaced(own, steps=1, optim=Optimizer(lr=9.0)))
    assert summary["steps"] == 3 and summary["complete"] and (out / "config.json").read_text() == before
    assert f"{out}: has 3 steps already, --steps 1 trains no more" in capsys.readouterr().err
    assert not (out / "config.2.json").exists()
    for a, b in zip(leaves(out / "model"), trained, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_every_metric_of_a_run_can_be_named_to_stop_on(place, first):
    lines = list(run_dir.read_lines(place / "first/metrics.jsonl"))
    names = {name for line in lines if line["kind"] == "grpo" for name in run_dir.numbers(line)} | {"accuracy"}
    assert len(names) > 80
    config(place, "named", heldout=(str(place / "heldout.jsonl"),), stop_on=tuple(f"{name}>1" for name in names))
    kinds = {alarm["kind"] for alarm in first["alarms"]}
    assert kinds <= {"grpo"} and "stopped_on" not in first


@pytest.mark.slow
def test_eta_0_equals_the_synchronous_loop(place, first):
    """By hand, one request after the other and nothing beside it, come the same parameters, to the bit."""
    own, path = config(place, "by hand"), place / "by hand"
    tokens = tokenizer.load(own.model)
    (prompts, *_), state = grpo.read(own, tokens), grpo.build_trainer(own)
    server = servers.Remote(int(own.serving.servers[0].rpartition(":")[2]))
    reward = object_path.resolve(own.reward)

    def sample(row, prompt, i):
        ids = template.prompt(tokens, row)
        seed = sampling_seed(own.seed, prompt, i, 0)
        answer = server.generate(ids, temperature=1.0, max_new_tokens=4, ignore_eos=False, sampling_seed=seed)
        rows, finish = answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["finish_reason"]["type"]
        done = Completion([t for _, t, _ in rows], [logp for logp, _, _ in rows], [state.version] * len(rows), finish)
        value = sum(reward(tokens.decode(done.tokens, skip_special_tokens=True), row).values())
        made = sampled(ids, done, temperature=1.0, reward=value)
        return made.replace(group=prompt, prompt=prompt, rollout=4 * prompt + i, sample=4 * prompt + i)

    for v in range(own.steps):
        hf.write_published(path, v, state.policy.settings, learner.weights(state.policy))
        server.ok("/update_weights_from_disk", {"model_path": str(path / str(v)), "weight_version": f"{v}-00000000"})
        groups = [[sample(prompts[p], p, i) for i in range(4)] for p in range(4 * v, 4 * v + 4)]
        trainer.train_on_batch(state, groups)
    hand = [np.asarray(x) for x in jax.tree.leaves(learner.weights(state.policy))]
    for a, b in zip(leaves(place / "first/model"), hand, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.wide
@pytest.mark.slow
def test_a_curriculum_is_saved_and_resumed(place, capsys):
    """Rows that are sometimes solved are drawn, one too long is not; a run that was killed draws the same."""
    (place / "digit.py").write_text("def score(text, row):\n    return float(text[:1] in '012')\n")
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "id": i} for i in range(6)]
    tiny.rows(place / "few.jsonl", [*rows, {"prompt": "1+" * 9 + "1", "answer": "10", "id": 6}])
    own = dict(
        data=str(place / "few.jsonl"), reward=f"{place}/digit.py:score", curriculum=Curriculum(order="success"),
        max_prompt=20, groups=3, steps=3, save_every=1,
    )  # fmt: skip
    grpo.main(config(place, "curriculum", **own))
    assert "1 of 7 rows are left out, longer than --max-prompt 20" in capsys.readouterr().err.splitlines()
    tiny.cut_off(place / "curriculum", place / "curriculum-parts", 2)
    grpo.main(config(place, "curriculum-parts", **own))
    shown = [
        [(line["step"], line["prompt"], line["text"]) for line in run_dir.read_lines(place / out / "samples.jsonl")]
        for out in ("curriculum", "curriculum-parts")
    ]
    assert shown[0] == shown[1] and len(shown[0]) == 12
    for a, b in zip(leaves(place / "curriculum/model"), leaves(place / "curriculum-parts/model"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_other_processes_receive_only_packed_arrays(place):
    """Samples bring what only process 0 needs, or can have."""
    state, handed = grpo.build_trainer(config(place, "handed")), []

    def run(*data):
        handed.append(data)
        return trainer.train_packed(state, *data)

    report = trainer.train_on_batch(state, job_program.groups(0)[:2], run)
    assert report["reward"] > 0 and report["groups"][0][0][0].info
    assert {type(x) for x in jax.tree.leaves(handed)} == {np.ndarray} and pickle.dumps(handed)


@pytest.mark.long
def test_a_critic_is_saved_and_resumed(place):
    """Two models train, the first batch the critic alone; a run in two parts gives the same policy."""
    ppo = dict(objective=losses.PPO(), critic=trainer.CriticOptions(warmup=1), minibatches=2, epochs=2)
    whole = grpo.main(config(place, "critic", **ppo))
    grpo.main(config(place, "critic-parts", steps=2, **ppo))
    grpo.main(config(place, "critic-parts", **ppo))
    for a, b in zip(leaves(place / "critic/model"), leaves(place / "critic-parts/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    assert whole["complete"] and whole["steps"] == 3
    run_export.convert(place / "critic", place / "policy", step=3)
    for a, b in zip(leaves(place / "critic/model"), leaves(place / "policy"), strict=True):
        np.testing.assert_array_equal(a, b)
    lines = [x for x in run_dir.read_lines(place / "critic/metrics.jsonl") if x["kind"] == "grpo"]
    assert "ppo_kl" not in lines[0] and all(x["critic_grad_norm"] > 0 for x in lines)
    assert lines[0]["value_max"] > 0 and abs(lines[1]["ppo_kl"]) > 0  # the second pass is off policy


@pytest.mark.wide
@pytest.mark.slow
def test_a_critic_starts_from_a_token_classifier(place, tmp_path):
    """Its values are the scores, bias included, that transformers computes at the tokens that predict; its bias
    trains. One with several labels is refused."""
    tokens, path = tokenizer.load(place / "model"), str(tmp_path / "critic")
    settings, params = hf.load(place / "model", init_missing=("score",), score_head=models.ScoreHead(1, bias=True))
    params |= {"score": 5 * params["score"], "score_bias": params["score_bias"] + 3}
    hf.save(path, settings, params, tokenizer=tokens)
    steps = dict(objective=losses.PPO(), critic=trainer.CriticOptions(path, optim=Optimizer(lr=1e-2)))
    state, groups = grpo.build_trainer(config(place, "unused", **steps)), job_program.groups(0)
    report = trainer.train_on_batch(state, groups)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    seen = []
    for sample in (s for group in groups for s in group):
        with torch.no_grad():
            scores = theirs(torch.tensor(sample.tokens[None].astype(np.int64)), use_cache=False).logits[0, :-1, 0]
        seen.append(scores.numpy()[sample.mask[1:]])
    np.testing.assert_allclose(report["value"], np.mean(np.concatenate(seen)), rtol=1e-5)
    assert np.std(np.concatenate(seen)) > 0.1
    moved = np.asarray(learner.weights(state.critic)["score_bias"]) - np.asarray(params["score_bias"])
    assert 0 < np.abs(moved[0]) < 0.1
    config_json = json.loads((tmp_path / "critic/config.json").read_text())
    assert config_json["architectures"] == ["Qwen3ForTokenClassification"] and config_json["num_labels"] == 1
    settings, params = hf.load(place / "model", init_missing=("score",), score_head=models.ScoreHead(2))
    hf.save(path, settings, params, tokenizer=tokens)
    with pytest.raises(ValueError, match="--critic.model .*: needs a score head with 1 label, or none, got one with 2"):
        grpo.build_trainer(config(place, "unused", **steps))


@pytest.mark.wide
@pytest.mark.slow
def test_named_adapters_train_like_merged_ones(place):
    """With eta = 0 and the same seeds; the run with names in two parts."""
    common = dict(lora=Lora(rank=2, rslora=True), optim=Optimizer(lr=3e-2, b2=0.99))
    merged = grpo.main(config(place, "merged", steps=2, push=Push(lora="merged"), **common))
    common["published"] = str(place / "versions")
    first = grpo.main(config(place, "named", steps=1, push=Push(lora="adapter"), **common))
    named = grpo.main(config(place, "named", steps=2, **common))
    for done in (merged, first, named):
        assert done["complete"] and done["max_logp_diff"] <= 1e-4
    for a, b in zip(leaves(place / "merged/model"), leaves(place / "named/model"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    start = leaves(place / "model")
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(start, leaves(place / "merged/model"), strict=True))
    versions = sorted(path.name for path in (place / "versions").iterdir())
    assert versions == ["1", "2", "base", "run"] and (place / "versions/2/adapter_model.safetensors").is_file()
    pushes = [x for x in run_dir.read_lines(place / "named/events.jsonl") if x["kind"] == "push"]
    assert [push["label"].split("-")[0] for push in pushes] == ["0", "1", "1", "2"]
    assert [push["pause_s"] > 0 for push in pushes] == [True, False, True, False]  # for the base alone


def test_adapters_the_server_cannot_load_are_refused(place):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    push = Push(lora="adapter")
    tiny.model(place / "experts", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    with pytest.raises(ValueError, match="--push.lora adapter needs adapters to push, got --lora.rank 0"):
        config(place, "refused", push=push)
    with pytest.raises(ValueError, match="--push.lora adapter: servers have no adapters by name for expert_gate, "):
        grpo.main(config(place, "refused", push=Push(lora="adapter"), model=str(place / "experts"), lora=Lora(rank=2)))
    with pytest.raises(ValueError, match=r"--push.lora adapter: servers have no DoRA adapters by name \(--lora.dora\)"):
        grpo.main(config(place, "refused", push=Push(lora="adapter"), lora=Lora(rank=2, dora=True)))


@pytest.mark.wide
@pytest.mark.slow
def test_adapters_with_a_reference_and_a_teacher(place):
    """The model without its adapters is the reference; a teacher is in the advantages and beside the objective."""
    objective = GRPO(advantage={"std": "none", "teacher": 0.1}, kl={"coef": 0.1, "target": 0.01})
    done = grpo.main(
        config(
            place, "taught", steps=2, lora=Lora(rank=2), objective=objective, teacher=str(place / "model"),
            distill_coef=0.5,
        )
    )  # fmt: skip
    first, second = (x for x in run_dir.read_lines(place / "taught/metrics.jsonl") if x["kind"] == "grpo")
    assert done["complete"] and done["max_logp_diff"] <= 1e-4
    for name in ("kl", "divergence"):  # policy, reference and teacher begin as one
        assert abs(first[name]) < 1e-9 < second[name], name
    assert first["kl_coef"] == 0.1 and second["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 / 10))
    spec, adapters = peft.load(place / "taught/adapter", hf.read_config(place / "model"))
    base = hf.load(place / "model")[1]
    merged = lora.merge(base, adapters, spec)
    for a, b in zip(jax.tree.leaves(merged), leaves(place / "taught/model"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.long
def test_a_policy_is_its_own_teacher_with_more_to_read(place):
    """In the loss and in the advantages; of rows that say no more it learns nothing."""
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    tiny.rows(place / "told.jsonl", [{**row, "teacher_prompt": f"{row['answer']}+{row['prompt']}"} for row in rows])
    tiny.rows(place / "same.jsonl", [{**row, "teacher_prompt": row["prompt"]} for row in rows])
    run = lambda out, **changes: config(
        place, out, steps=2, self_distillation=True, distill_coef=0.5, reward="areax.rollout.rewards:none", **changes
    )
    objective = GRPO(advantage={"std": "none", "teacher": 0.1})
    done = grpo.main(run("told", data=str(place / "told.jsonl"), objective=objective, lora=Lora(rank=2)))
    lines = [x for x in run_dir.read_lines(place / "told/metrics.jsonl") if x["kind"] == "grpo"]
    assert done["complete"] and all(x["divergence"] > 0.01 and x["grad_norm"] > 0 for x in lines)
    follows = dict(average_teacher=True, optim=Optimizer(lr=1e-3, ema=0.9))
    grpo.main(run("follows", data=str(place / "told.jsonl"), objective=objective, **follows))
    first, second = (x for x in run_dir.read_lines(place / "follows/metrics.jsonl") if x["kind"] == "grpo")
    assert first["divergence"] == pytest.approx(lines[0]["divergence"], rel=1e-3) and second["divergence"] > 0.01
    grpo.main(run("same", data=str(place / "same.jsonl"), objective=objective))
    first = next(x for x in run_dir.read_lines(place / "same/metrics.jsonl") if x["kind"] == "grpo")
    assert abs(first["divergence"]) < 1e-6 and first["grad_norm"] < 1e-4


@pytest.mark.long
def test_a_teacher_with_another_tokenizer_scores_spans(place):
    """Local and served ones alike, in the advantages and beside the objective."""
    tokens = tokenizer.character("0123456789+", words=("system", "user", "assistant", *map(str, range(10, 100))))
    tiny.model(place / "pairs", seed=3, vocab_size=len(tokens), eos_token_id=tokens.eos_token_id)
    tokenizer.save(tokens, place / "pairs")
    objective = GRPO(advantage={"std": "none", "mean": "none", "teacher": 0.1})
    taught = dict(steps=2, objective=objective, distill_coef=0.5, distill=losses.Distill(top_k=4))
    taught |= {"reward": "areax.rollout.rewards:none"}
    runs = {"local": {"teacher": str(place / "pairs")}}
    with servers.embedded(place / "pairs", slots=8, context=64) as remote:
        runs["served"] = {"teachers": (remote.url,), "teacher_tokenizer": str(place / "pairs")}
        lines = {}
        for name, where in runs.items():
            assert grpo.main(config(place, f"pairs-{name}", **taught, **where))["complete"]
            path = place / f"pairs-{name}/metrics.jsonl"
            lines[name] = [x for x in run_dir.read_lines(path) if x["kind"] == "grpo"]
    for one, other in zip(*lines.values(), strict=True):
        assert 0 < one["compared_fraction"] < 1 and 0 <= one["unaligned_fraction"] < 1 and one["grad_norm"] > 0
        for name in ("loss", "divergence", "compared_fraction", "unaligned_fraction", "grad_norm"):
            np.testing.assert_allclose(other[name], one[name], rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_served_teachers_and_greedy_baselines(place, monkeypatch):
    """What a server says of each sample, and the reward of a greedy completion, travel with the samples."""
    monkeypatch.setenv("AREAX_TEACHER_KEY", "secret")
    with servers.embedded(place / "model", slots=8, context=64, api_key="secret") as remote:
        done = grpo.main(
            config(
                place, "served", steps=2, eta=1, teachers=(remote.url,), distill=losses.Distill(top_k=4),
                distill_coef=0.1, objective=losses.ReMax(advantage={"teacher": 0.1}),
            )
        )  # fmt: skip
    lines = [x for x in run_dir.read_lines(place / "served/metrics.jsonl") if x["kind"] == "grpo"]
    assert done["complete"] and all(x["unusable_fraction"] == 0 for x in lines)
    assert abs(lines[0]["divergence"]) < 1e-5 < lines[1]["divergence"] and "reward_greedy" in lines[0]


@pytest.mark.slow
def test_the_terminal_says_that_a_reward_is_constant(place, capsys):
    """From the first step on, whose samples are kept for a look."""
    (place / "constant.py").write_text("def score(text, row):\n    return 0.7\n")
    done = grpo.main(config(place, "constant", reward=f"{place}/constant.py:score", steps=1, samples_every=10))
    said = capsys.readouterr().err
    assert done["complete"] and said.count("grpo step 1: every completion got the same reward (reward_std 0") == 1
    assert "step 1: no group teaches" not in said  # the same said again
    assert "grpo waiting for the first batch" in said and "grpo compiling the first step" in said
    assert f"waiting for servers: {(place / 'url').read_text()}" in said
    assert len(list(run_dir.read_lines(place / "constant/samples.jsonl"))) == 4
    report = (place / "constant/report.html").read_text()
    assert "Every completion got the same reward" in report


@pytest.mark.slow
def test_groups_with_equal_rewards_are_resampled(place):
    (place / "rare.py").write_text("def score(text, row):\n    return float(text.startswith('0'))\n")
    run = config(place, "dynamic", objective=losses.DAPO(), reward=f"{place}/rare.py:score", steps=2, oversample=2)
    done = grpo.main(run)
    lines = [x for x in run_dir.read_lines(place / "dynamic/metrics.jsonl") if x["kind"] == "grpo"]
    assert all(x["groups_that_teach"] == 4 and x["effective_samples"] == x["samples"] == 16 for x in lines)
    assert done["counts"]["refused"] == sum(x["refused"] for x in lines) > 0
    assert done["counts"]["accepted"] == 8 and 0 < done["counts"]["stopped"] <= 4 and done["counts"]["dropped"] == 0


@pytest.mark.wide
@pytest.mark.mesh
def test_a_wrapper_is_trained_published_and_served(place, tmp_path):
    """Each version is whole, so that a server can start from it; the vision tower is on the disk once."""
    model, versions = tiny.wrapped(tiny.model(tmp_path / "model")), tmp_path / "versions"
    own = config(place, "wrapper", model=str(model), servers=(), published=str(versions), steps=2)
    assert grpo.main(own)["max_logp_diff"] <= 1e-4
    names = hf.load(model)[0].rest.names
    for path in (versions / "1", versions / "2", place / "wrapper/model"):
        before, after = safetensors.read(model), safetensors.read(path)
        assert before.keys() == after.keys() and hf.verify(path)
        assert {name for name in before if np.array_equal(before[name], after[name])} == {*names}
    assert len({(versions / v / "model-00002-of-00002.safetensors").stat().st_ino for v in "12"}) == 1


@pytest.mark.mesh
def test_a_step_on_a_mesh_equals_one_device(place):
    """The first batch is sampled from the same weights with the same seeds, so both learn from the same tokens."""
    first = []
    for name, layout in {"one": Layout(), "mesh": Layout(fsdp=2, cp=2, tp=2)}.items():
        assert grpo.main(config(place, name, steps=1, mesh=layout))["max_logp_diff"] <= 1e-4
        lines = run_dir.read_lines(place / f"{name}/metrics.jsonl")
        first.append(next(line for line in lines if line["kind"] == "grpo"))
    for name in ("loss", "grad_norm", "entropy", "reward", "tokens"):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_critic_of_another_tokenizer_is_refused(place, tmp_path):
    path = shutil.copytree(place / "model", tmp_path / "critic")
    file = path / "tokenizer.json"
    made = json.loads(file.read_text())
    first, second, *_ = made["model"]["vocab"]
    made["model"]["vocab"] |= {first: made["model"]["vocab"][second], second: made["model"]["vocab"][first]}
    file.write_text(json.dumps(made))
    given = dict(objective=losses.PPO(), critic=trainer.CriticOptions(str(path)))
    with pytest.raises(ValueError, match="--critic.model .*: must have the trained model's tokenizer, got id"):
        grpo.build_trainer(config(place, "unused", **given))


# Of each recipe, and of each way to compute advantages, references and critics, one; the others under `wide`.
ALGORITHMS = "sft", "distill", "PPO", "ReMax", "GSPO", "DAPO", "VESPO", "DPO", "KTO", "RewardModel"


@pytest.mark.sweep
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in ALGORITHMS else pytest.mark.wide)
    for name in ["sft", "distill", *losses.POLICIES, *losses.PREFERENCES]
])  # fmt: skip
def test_every_algorithm_trains_from_the_command_line(place, name):
    out, options = place / f"algorithm-{name}", {"model": place / "model", "steps": 3, "length": 32, "rows": 4}
    if name in losses.POLICIES:
        options |= {
            "data": place / "rows.jsonl", "reward": f"{place}/rewards.py:score", "groups": 4, "group-size": 4,
            "max-concurrent": 8, "sampling.max-new-tokens": 4, "servers": (place / "url").read_text(),
        }  # fmt: skip
    else:
        answers = list(map(json.loads, (place / "rows.jsonl").read_text().splitlines()))
        made = [
            {
                "prompt": row["prompt"],
                "completion": row["answer"],
                "chosen": row["answer"],
                "rejected": "0",
                "label": i % 2,
            }
            for i, row in enumerate(answers)
        ]
        options |= {"data": tiny.rows(place / "offline.jsonl", made), "batch": 8}
        options |= {"teacher": place / "model"} if name == "distill" else {}
    options |= {"out": out, "optim.lr": 1e-2}
    assert cli.main(["train", name.lower(), *(str(w) for k, v in options.items() for w in (f"--{k}", v))]) == 0
    lines = [x for x in run_dir.read_lines(out / "metrics.jsonl") if "grad_norm" in x]
    assert len(lines) == 3 and all(x["skipped"] == 0 for x in lines)
    # The distilled student starts as its teacher: nothing to learn.
    assert all(x["grad_norm"] > 0 for x in lines[name == "distill" and 3 :])


@pytest.mark.long
def test_training_replays_the_experts_of_sampling(place, monkeypatch):
    """A mixture is served, what it reports travels with the samples, and the trainer's scores agree."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    tiny.model(place / "mixture", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    packed, pack = [], packing.pack_tries
    monkeypatch.setattr(packing, "pack_tries", lambda *args, **more: packed.append(pack(*args, **more)) or packed[-1])
    sampling = Sampling(max_new_tokens=4, routed_experts=True)
    done = grpo.main(
        config(place, "experts", servers=(), model=str(place / "mixture"), steps=2, eta=1, sampling=sampling)
    )
    assert done["complete"] and done["max_logp_diff"] <= 1e-4
    assert len(packed) == 2
    for batch in packed:
        chosen_MBTLK = np.asarray(batch.input["routed_experts"])
        assert chosen_MBTLK.shape[-2:] == (2, 2) and set(np.unique(chosen_MBTLK[batch.mask_BT > 0])) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="needs a model with experts"):
        grpo.main(config(place, "none", steps=1, sampling=sampling))


@pytest.mark.long
def test_training_replays_the_masks_of_sampling(place, monkeypatch):
    """Sampled at top-p 0.7, the trainer's scores at its own weights are those of the server, and the ratio is 1; a
    reference, which starts as the policy, has a KL of 0."""
    packed, pack = [], packing.pack_tries
    monkeypatch.setattr(packing, "pack_tries", lambda *args, **more: packed.append(pack(*args, **more)) or packed[-1])
    sampling = Sampling(max_new_tokens=4, top_p=0.7, top_k=8, sampling_mask=True)
    objective = GRPO(advantage={"std": "none"}, kl={"coef": 0.1})
    done = grpo.main(config(place, "masks", steps=2, eta=1, sampling=sampling, objective=objective))
    assert done["complete"] and done["max_logp_diff"] <= 1e-4 and len(packed) == 2
    [first, *_] = [x for x in run_dir.read_lines(place / "masks/metrics.jsonl") if x["kind"] == "grpo"]
    assert abs(first["kl_k1"]) < 1e-5 and 0 < first["entropy"] < np.log(8)
    for batch in packed:
        kept_MBTK = np.asarray(batch.target["sampling_mask"])
        count = (kept_MBTK >= 0).sum(-1)[batch.mask_BT > 0]
        assert kept_MBTK.shape[-1] == 8 and 1 <= count.min() < 8 and len({*count}) > 1


@pytest.mark.slow
def test_training_centres_scores_by_what_the_sampler_reports(place, monkeypatch):
    """At eta 1, of the 8 likeliest tokens, which at its own weights have the same log-probabilities in the trainer."""
    packed, pack = [], packing.pack_tries
    monkeypatch.setattr(packing, "pack_tries", lambda *args, **more: packed.append(pack(*args, **more)) or packed[-1])
    objective = losses.REINFORCE(
        advantage={"mean": "group"}, correction={"proximal": "behaviour"}, score_centering=True
    )
    sampling = Sampling(max_new_tokens=4, top_logprobs=8)
    done = grpo.main(config(place, "centred", steps=2, eta=1, sampling=sampling, objective=objective))
    lines = [x for x in run_dir.read_lines(place / "centred/metrics.jsonl") if x["kind"] == "grpo"]
    assert done["complete"] and all(0 < x["sampler_mass"] < 1 and x["grad_norm"] > 0 for x in lines)
    settings, params = hf.load(place / "model")
    one = jax.tree.map(lambda x: x[0], packed[0])
    assert one.trie is not None
    out = jax.jit(functools.partial(models.score_centred, config=settings, run=models.Run()))(params, one)
    learnt = np.asarray(one.mask_BT)
    np.testing.assert_allclose(out.extra[learnt], one.target["sampler_logp"][learnt], atol=1e-4)
    assert learnt.sum() > 16 and (np.diff(one.target["sampler_logp"][learnt], axis=1) <= 0).all()


@pytest.mark.long
def test_moving_averages_of_rewards_go_on_with_a_run(place):
    objective = losses.REINFORCE(advantage={"mean": "moving", "moving_decay": 0.9})
    given = dict(objective=objective, save_every=1, group_size=1, steps=3)
    grpo.main(config(place, "moving", **given))
    tiny.cut_off(place / "moving", place / "moving-again", 2)
    grpo.main(config(place, "moving-again", **given))
    both = [
        [x["reward_moving"] for x in run_dir.read_lines(place / name / "metrics.jsonl") if x["kind"] == "grpo"]
        for name in ("moving", "moving-again")
    ]
    assert both[0] == both[1] and both[0][0] < both[0][1] < both[0][2]
    parts = [leaves(place / name / "model") for name in ("moving", "moving-again")]
    for a, b in zip(*parts, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_optimal_tokens_and_optimal_values_train(place):
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    made = tiny.rows(place / "valued.jsonl", [row | {"reference_rewards": [0, 0.5, 1.0]} for row in rows])
    tokens = losses.ReinforcePlusPlus(advantage={"mean": "optimal_token", "whiten": "none"})
    regression = losses.REINFORCE(
        advantage={"mean": "optimal_value"}, kl={"coef": 1e-3, "estimator": "k2", "over": "sequence"}
    )
    for name, given in (
        ("tokens", dict(objective=tokens)),
        ("values", dict(objective=regression, data=str(made), group_size=1)),
    ):
        assert grpo.main(config(place, f"optimal-{name}", steps=2, **given))["complete"]
        lines = [x for x in run_dir.read_lines(place / f"optimal-{name}/metrics.jsonl") if x["kind"] == "grpo"]
        assert len(lines) == 2 and all(x["grad_norm"] > 0 for x in lines)


def test_what_rows_and_workflows_must_bring_is_said():
    async def workflow(generate, row):
        return sampled([5], Completion([6], [-1.0], [0], "stop"), temperature=1.0)

    for given in (None, [], [0, "1"], [float("nan")], 1.0, [10**400], [0, 1e300]):
        with pytest.raises(ValueError, match="rows must have 'reference_rewards', a list of the rewards that .*; row"):
            asyncio.run(rollouts.valued(workflow, 0.5, None, {"reference_rewards": given}))
    [made] = asyncio.run(rollouts.valued(workflow, 0.5, None, {"reference_rewards": [0, 1.0]}))
    assert made.components == {"optimal_value": pytest.approx(0.5 * np.log((1 + np.exp(2)) / 2))}
    with pytest.raises(ValueError, match="state-coef: the workflow must mark states, got samples without the array"):
        asyncio.run(rollouts.states.marked(workflow, None, {}))


@pytest.mark.slow
def test_asynchronous_runs_keep_the_staleness_bound(place):
    """And while it runs it is watched by Prometheus; afterwards by TensorBoard."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    seen: list[str] = []

    def watch():
        while not any("areax_fleet_servers 1.0" in text for text in seen):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as reply:
                seen.append(reply.read().decode())
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    track = Sinks(tensorboard=True, prometheus=port)
    done = grpo.main(config(place, "async", eta=2, steps=5, minibatches=2, track=track))
    watcher.join(0)
    assert not watcher.is_alive() and "# TYPE areax_fleet_healthy gauge" in seen[-1]
    assert done["complete"] and done["counts"]["accepted"] == 20
    lines = [x for x in run_dir.read_lines(place / "async/metrics.jsonl") if x["kind"] == "grpo"]
    assert [x["version"] for x in lines] == [0, 1, 2, 3, 4]
    assert max(x["staleness_max"] for x in lines) <= 2 and max(x["group_staleness_max"] for x in lines) == 2
    assert all(x["length_begun"] > 0 and abs(x["length_bias"]) < 1 and x["limit"] == 32 for x in lines)
    assert done["max_logp_diff"] <= 1e-4
    board = EventAccumulator(str(place / "async/tensorboard")).Reload()
    for name in ("reward", "trainer_idle", "server_busy", "push_bytes", "effective_samples", "group_wait_s_max"):
        found = [(e.step, e.value) for e in board.Scalars(f"grpo/{name}")]
        np.testing.assert_allclose(found, [(x["step"], x[name]) for x in lines if name in x], rtol=1e-6)
    assert all(0 <= x["trainer_idle"] <= 1 and 0 <= x["server_busy"] <= 1 for x in lines)
    # nothing was refused and nothing else asked for: what was generated is what was learnt
    assert sum(x["generated_tokens"] for x in lines) == pytest.approx(sum(x["length"] * 16 for x in lines))


@pytest.mark.wide
@pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.wide)])
def test_restarting_a_dead_server_changes_no_number(place, monkeypatch, kills):
    """The samples are a function of the weights and the seeds, whichever server draws them, and when.

    One of two servers is killed as often as there are steps, at a random moment in each, and is back before the next.
    """
    plain = grpo.main(config(place, f"plain-{kills}", steps=kills))
    started, fleets = [], []
    start, assemble, update = local.Local.start, client.assemble, grpo.train_on_batch
    quick = dataclasses.replace(client.TIMEOUTS, lost_own_s=1.0, heartbeat_s=0.2, heartbeat_answer_s=2.0)
    monkeypatch.setattr(client, "TIMEOUTS", quick)  # an idle server is missed soon, too
    monkeypatch.setattr(local.Local, "start", lambda self, *given: started.append(self) or start(self, *given))
    monkeypatch.setattr(client, "assemble", lambda *a, **k: fleets.append(assemble(*a, **k)) or fleets[-1])
    recovered = lambda: fleets[0].counts["recovered"] if fleets else -1

    def kill():
        random = np.random.default_rng(0)
        for i in range(kills):
            jobs.until(lambda i=i: recovered() == i)
            time.sleep(random.uniform(0, 1))
            os.kill(list(started[0].running.values())[-1].pid, signal.SIGKILL)

    def after_a_kill(trainer, *rest):
        jobs.until(lambda: recovered() > trainer.version)
        return update(trainer, *rest)

    monkeypatch.setattr(grpo, "train_on_batch", after_a_kill)
    killer = threading.Thread(target=kill)
    killer.start()
    serve = Serve(slots=8, context=64, count=2, restarts=99)
    done = grpo.main(config(place, f"killed-{kills}", steps=kills, servers=(), serve=serve))
    killer.join()
    assert done["counts"]["dead"] == done["counts"]["restarted"] == done["counts"]["recovered"] == kills
    assert done["complete"] and done["server_version"] == plain["server_version"]
    for a, b in zip(leaves(done["checkpoint"]), leaves(plain["checkpoint"]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.wide
@pytest.mark.slow
def test_a_recipe_by_path_runs_under_spawn(place):
    """A recipe file with a Config of its own, a reward file with a dataclass of its own, no package in sight."""
    (place / "mine.py").write_text(
        "import dataclasses\n"
        "from areax.recipes import grpo\n"
        "from areax.recipes.shared.rl_options import Rollout, Serving, Training\n"
        "from areax.rollout.servers.local import Serve\n"
        "from areax.rollout.workflows import Sampling\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Config:\n"
        '    """Mine."""\n'
        "    place: str\n"
        "    steps: int = 1\n"
        "def main(config):\n"
        "    p = config.place\n"
        "    return grpo.main(grpo.Config(model=p + '/model', data=p + '/rows.jsonl', reward=p + '/rewards.py:score',\n"
        "        out=p + '/mine', steps=config.steps, training=Training(length=32, rows=2),\n"
        "        rollout=Rollout(groups=2, group_size=2, sampling=Sampling(max_new_tokens=4)),\n"
        "        serving=Serving(serve=Serve(slots=4, context=64))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "areax", "train", str(place / "mine.py"), "--place", str(place)],
        capture_output=True, text=True, timeout=300, env={**os.environ}, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    model, report = place / "mine/model", place / "mine/report.html"
    assert done.stdout == f"steps: 1\ncomplete: True\ncheckpoint: {model}\nreport: {report}\n"
    assert model.is_dir() and report.is_file() and json.loads((place / "mine/summary.json").read_text())["counts"]


def test_a_reward_that_raises_ends_the_run_with_one_line(place):
    (place / "broken.py").write_text("def score(text, row):\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*broken.py:2"):
        grpo.main(config(place, "broken", reward=f"{place}/broken.py:score", steps=1))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data": "nowhere.jsonl"}, "no such file"),
        ({"reward": "areax.rollout.tasks.gsm8k:rewrad"}, "did you mean reward"),
        ({"model": "nowhere"}, "nowhere"),
        ({"oversample": 5}, "--oversample must be from 0 to --groups 4, got 5"),
        ({"length": 8}, "rows.jsonl:1: a prompt must leave room for a completion within 8 tokens, got"),
        ({"objective": GRPO(advantage={"components": ("style",)})}, "every sample needs the component style"),
        ({"sampling": Sampling(max_new_tokens=4, top_p=0.9)}, "--sampling.top-p must be 1.0"),
    ],
)
def test_bad_input_gives_a_one_line_error(place, changes, words):
    with pytest.raises(ValueError, match=words):
        grpo.main(config(place, "bad" + words[:3].strip(), steps=1, **changes))


@pytest.mark.long
def test_two_steps_on_gsm8k(place):
    """The real files where AREAX_GSM8K names them, else a small fixture of our own wording."""
    folder = Path(os.environ.get("AREAX_GSM8K") or Path(__file__).parent / "data/gsm8k")
    tokens = tokenizer.byte_level()
    settings = models.config_from_hf(
        {**tiny.HF, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "max_position_embeddings": 1024}
    )
    hf.save(place / "bytes", settings, tiny.weights(models.table(settings), 0.2), tokenizer=tokens)
    done = grpo.main(
        config(
            place, "gsm8k", servers=(), model=str(place / "bytes"), data=str(folder / "train.jsonl"),
            row="areax.rollout.tasks.gsm8k:row", reward="areax.rollout.tasks.gsm8k:reward", steps=2, groups=2,
            group_size=2, length=1024, max_prompt=1000, rows=2, eta=1, sampling=Sampling(max_new_tokens=16),
            serve=Serve(slots=4, context=1024),
        )
    )  # fmt: skip
    assert done["complete"] and done["max_logp_diff"] <= 1e-4


def test_shuffled_rewards_are_a_permutation(place):
    samples = [[_sample(10 * g + i).replace(rollout=3 * g + i) for i in range(3)] for g in range(4)]
    mixed = describe.shuffled(samples, seed=(0, 1))
    flat = lambda groups: [s.reward for group in groups for s in group]
    assert sorted(flat(mixed)) == sorted(flat(samples)) and flat(mixed) != flat(samples)
    assert [len(g) for g in mixed] == [3] * 4


def test_only_groups_whose_rewards_differ_teach():
    """Unscorable completions are no difference."""
    nan = float("nan")
    groups = [(1.0, 1.0), (0.0, 1.0), (nan, nan), (nan, 1.0), (nan, 0.0, 1.0)]
    flat = [
        _sample(reward).replace(rollout=10 * g + i, group=g)
        for g, own in enumerate(groups)
        for i, reward in enumerate(own)
    ]
    assert describe.batch(flat, 0)["groups_that_teach"] == 2


def _sample(reward):
    from areax.rollout.types import Completion, sampled

    return sampled([1, 2], Completion([3, 4], [-1.0, -1.0], [0, 0], "stop"), temperature=1.0, reward=reward)


def test_too_long_rows_are_left_out_and_temperatures_are_compared(caplog):
    row = lambda n, temperature=1.0: sampled(
        [5], Completion([6] * n, [-1.0] * n, [0] * n, "stop"), temperature=temperature, reward=1.0
    )

    def played(result):
        async def episode(generate, row):
            return result

        return asyncio.run(rollouts.fitting(episode, 8, Rollout())(None, {"id": 7}))

    assert [len(s.tokens) for s in played([row(3), row(8), row(7)])] == [4, 8]
    assert "a row of 9 tokens is left out: longer than --length; row id 7" in caplog.text
    told = row(3).replace(teacher_prompt=(5,) * 6)  # which no teacher reads here
    assert played(told)[0].teacher_prompt == ()

    async def taught(generate, row):
        return told

    assert asyncio.run(rollouts.fitting(taught, 8, Rollout(), tokenizer.character("1"))(None, {})) is None
    assert played([row(9)]) is None and played(None) is None and len(played(row(2))) == 1
    for other in (7, 0, (row(2),), [None], {}):
        with pytest.raises(ValueError, match="must return a Sample, a list of them or None, got .*; row id 7"):
            played(other)
    seen: list[dict] = []
    with events.watching(seen.append):
        played([row(9), row(2), row(10)])
    assert [(event["kind"], event["tokens"]) for event in seen] == [("left_out", 10), ("left_out", 11)]
    with pytest.raises(ValueError, match="must fit in a row of 8 tokens, got 16 in a row that do not, of up to 9"):
        played([row(8)] * rollouts.TOO_LONG)
    with pytest.raises(ValueError, match="must sample at --sampling.temperature 1, .* got 0.7"):
        played([row(2, 0.7)])


def same(place, one, other):
    for a, b in zip(leaves(place / one / "model"), leaves(place / other / "model"), strict=True):
        np.testing.assert_array_equal(a, b)


INSIDE = Serve(inside=True, slots=8, context=64)


@pytest.mark.slow
def test_a_run_in_a_running_loop_is_awaited_and_changes_no_number(place, first):
    """As in a notebook: the loop goes on meanwhile; main says what to call."""

    async def cell():
        asked = config(place, "awaited", servers=(), serve=INSIDE)
        with pytest.raises(RuntimeError, match=r"grpo.main: .* use: await grpo.run\(config\)$"):
            grpo.main(asked)
        running, turns = asyncio.ensure_future(grpo.run(asked)), 0
        while not running.done():
            await asyncio.wait([running], timeout=0.01)
            turns += 1
        return running.result(), turns

    done, turns = asyncio.run(cell())
    assert done["complete"] and turns > 10
    same(place, "awaited", "first")


def plain_ratio(spec, now):
    """r A"""
    return now.ratio_BT * now.adv_BT, None


@pytest.mark.long
def test_a_cancelled_run_saves_its_state(place):
    """Here of a run with a surrogate of its own, a function."""

    async def cell():
        asked = config(place, "interrupted", steps=1000, objective=GRPO(surrogate=plain_ratio))
        running = asyncio.ensure_future(grpo.run(asked))
        samples = place / "interrupted/samples.jsonl"
        while not (samples.is_file() and samples.read_text()):  # those of the first step
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cell())
    summary = json.loads((place / "interrupted/summary.json").read_text())
    assert 0 < summary["steps"] < 1000 and not summary["complete"]
    states = {int(path.name) for path in (place / "interrupted/state").iterdir() if path.name.isdigit()}
    assert summary["steps"] in states
    options = json.loads((place / "interrupted/config.json").read_text())
    assert options["training"]["objective"]["surrogate"].endswith(":plain_ratio")


@pytest.mark.wide
@pytest.mark.slow
def test_offloading_an_in_process_server_changes_no_number(place, first):
    """Weights handed over in memory, with nothing written, are those that would have been read from files."""
    before = set(threading.enumerate())
    done = grpo.main(config(place, "inside", servers=(), serve=INSIDE, colocated=True))
    assert done["complete"] and done["max_logp_diff"] <= 1e-4 and done["server_version"] == first["server_version"]
    same(place, "inside", "first")
    lines = [x for x in run_dir.read_lines(place / "inside/metrics.jsonl") if x["kind"] == "grpo"]
    assert all(x["rest_s"] > 0 for x in lines) and "weights_unknown" not in done["counts"]
    assert not any("areax" in thread.name for thread in set(threading.enumerate()) - before)


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize(
    "changes",
    [{}, {"colocated": True}, {"lora": Lora(rank=2), "eta": 1}],
    ids=["synchronous", "colocated", "ahead with adapters"],
)
def test_a_trainer_and_an_engine_on_a_mesh_share_devices(place, changes):
    """Samples and metrics are those of one device, and the last weights served are those that are written."""
    runs, lines = [], []
    for out, serve, layout in (
        ("inside one", INSIDE, Layout()),
        ("inside mesh", dataclasses.replace(INSIDE, mesh=EngineMesh(tp=2)), Layout(fsdp=4, tp=2)),
    ):
        shutil.rmtree(place / out, ignore_errors=True)
        runs.append(grpo.main(config(place, out, servers=(), serve=serve, mesh=layout, steps=2, **changes)))
        found = run_dir.read_lines(place / out / "metrics.jsonl")
        lines.append(next(line for line in found if line["kind"] == "grpo"))
        assert runs[-1]["complete"] and runs[-1]["max_logp_diff"] <= 1e-4 and runs[-1]["mismatch_k3_now"] < 1e-9
        manifest = json.loads((place / out / "model/manifest.json").read_text())
        assert runs[-1]["server_version"] == [label_of(hf.json_bytes(manifest | {"version": 2}))]
    for name in ("loss", "grad_norm", "entropy", "reward", "tokens"):
        np.testing.assert_allclose(lines[1][name], lines[0][name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_killing_an_offloaded_server_changes_no_number(place, monkeypatch):
    """It is started again once the trainer has updated, and not before."""
    killed, started = [], []
    rest, start = grpo.offload.offload, local.Local.start

    async def deadly(fleet):
        seconds = await rest(fleet)
        if len(killed) < 2:
            killed.append([one.state for one in fleet.servers])
        if len(killed) == 2:
            killed.append(os.kill(next(iter(started[0].running.values())).pid, signal.SIGKILL))
        return seconds

    monkeypatch.setattr(grpo.offload, "offload", deadly)
    monkeypatch.setattr(local.Local, "start", lambda self, *given: started.append(self) or start(self, *given))
    done = grpo.main(config(place, "killed at rest", servers=(), colocated=True))
    assert killed == [["offloaded"], ["offloaded"], None] and len(started) == 2
    assert done["counts"]["restarted"] == done["counts"]["recovered"] == 1
    grpo.main(config(place, "unharmed"))
    same(place, "killed at rest", "unharmed")


@pytest.mark.wide
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("serve", [Serve(slots=8, context=64), INSIDE], ids=["pushed", "inside"])
def test_replicas_of_a_server_change_no_number(place, first, serve, monkeypatch):
    """Their samples have the same bits, and all have each version's weights."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # of a server's process
    out = f"replicas {serve.inside}"
    done = grpo.main(config(place, out, servers=(), serve=dataclasses.replace(serve, mesh=EngineMesh(dp=2))))
    assert done["complete"]
    same(place, out, "first")


@pytest.mark.slow
def test_an_in_process_server_generates_while_the_trainer_updates(place):
    done = grpo.main(config(place, "inside ahead", servers=(), serve=INSIDE, eta=2, steps=5, lora=Lora(rank=2)))
    assert done["complete"] and done["counts"]["accepted"] == 20 and done["max_logp_diff"] <= 1e-4
    lines = [x for x in run_dir.read_lines(place / "inside ahead/metrics.jsonl") if x["kind"] == "grpo"]
    assert max(x["staleness_max"] for x in lines) <= 2


@pytest.mark.wide
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("serve", [Serve(slots=8, context=64), INSIDE], ids=["pushed", "inside"])
def test_servers_choose_experts_with_the_bias_that_training_moved(place, serve):
    """By files and in memory, in fp32: a step moves it further than scores differ, once per minibatch."""
    spec = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=24)
    tiny.model(
        place / "glm", model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], first_k_dense_replace=1, **spec
    )
    out = f"bias {serve.inside}"
    done = grpo.main(
        config(place, out, servers=(), model=str(place / "glm"), serve=serve, minibatches=2, balance=Balance(bias=0.37))
    )
    assert done["complete"] and done["max_logp_diff"] <= 1e-4
    before, after = (hf.load(path)[1]["stacks"][1]["router_bias"] for path in (place / "glm", place / out / "model"))
    moves = np.asarray(after - before, np.float64) / 0.37
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-5)
    assert 1 < np.abs(moves).max() < 6.5


# Scores 1, or 100 if it finds a key in the command line of any process, or in its own environment.
SPY = """
import glob, os
def score(text, row):
    seen = list(os.environ.values())
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            seen.append(open(path, "rb").read().decode(errors="replace"))
        except OSError:
            pass
    return 100.0 if any("very-" + "secret" in text for text in seen) else 1.0
"""


@pytest.mark.long
def test_a_run_with_keys_leaves_no_trace_of_them(place, tmp_path, monkeypatch, capfd):
    """The server has its key from the environment, the stager from a file; the run the other way round."""
    (tmp_path / "spy.py").write_text(SPY)
    keys = {name: f"very-secret-{name}" for name in ("SERVER", "STAGER")}
    for name, key in keys.items():
        (tmp_path / name).write_text(f"{key}\n")
    monkeypatch.setenv("AREAX_SERVER_KEY_FILE", str(tmp_path / "SERVER"))
    monkeypatch.setenv("AREAX_STAGER_KEY", keys["STAGER"])
    out, words = tmp_path / "run", {
        "model": place / "model", "data": place / "rows.jsonl", "reward": f"{tmp_path}/spy.py:score", "steps": 1,
        "groups": 2, "group-size": 2, "length": 32, "rows": 4, "eta": 0, "sampling.max-new-tokens": 4,
    }  # fmt: skip
    command = ["train", "grpo", *(str(word) for name, value in words.items() for word in (f"--{name}", value))]
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as theirs:
            theirs.delenv("AREAX_SERVER_KEY_FILE")
            theirs.delenv("AREAX_STAGER_KEY")
            serve = ["areax", "serve", place / "model", "--slots", 4, "--context", 64]
            url = stack.enter_context(servers.command(*serve, AREAX_SERVER_KEY=keys["SERVER"]))
            file = {"AREAX_STAGER_KEY_FILE": str(tmp_path / "STAGER")}
            at = stack.enter_context(servers.stager(tmp_path / "staged", **file))
        command += ["--servers", url, "--stagers", at]
        assert cli.main([*command, "--out", str(out)]) == 0
        for name, option in (("AREAX_SERVER_KEY", url), ("AREAX_STAGER_KEY", at)):
            with monkeypatch.context() as wrong:
                wrong.delenv(f"{name}_FILE", raising=False)
                wrong.setenv(name, "very-secret-guess")
                assert cli.main([*command, "--out", str(tmp_path / "wrong")]) == 2
            said = capfd.readouterr()
            assert f"HTTP 401: the key is wrong; set {name} to" in said.err.splitlines()[-1] and option in said.err
            assert "very-secret" not in said.out + said.err and not (tmp_path / "wrong").exists()  # nothing was loaded
    [line] = [x for x in run_dir.read_lines(out / "metrics.jsonl") if x["kind"] == "grpo"]
    assert line["reward"] == 1 and line["max_logp_diff"] <= 1e-4
    assert json.loads((out / "summary.json").read_text())["server_version"][0].startswith("1-")
    assert {"config.json", "events.jsonl"} <= {path.name for path in out.iterdir()}
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert b"very-secret" not in path.read_bytes(), path


@pytest.mark.long
def test_a_run_by_a_bucket_is_the_same_when_it_is_resumed(place, first, tmp_path):
    """The bucket has the versions that the folder has, and what a killed process left there goes."""
    bucket, folder = tmp_path / "bucket", tmp_path / "versions"
    with servers.stager(tmp_path / "staged", "--bucket", f"file://{bucket}") as at:
        own = dict(stagers=(at,), push=Push(bucket=f"file://{bucket}"), published=str(folder), save_every=1)
        for steps in (1, 3):
            done = grpo.main(config(place, "bucket", steps=steps, **own))
            (bucket / "9-00000000").mkdir(exist_ok=True)
            (bucket / "9-00000000/model.safetensors").touch()
        assert done["complete"] and done["max_logp_diff"] <= 1e-4
        for a, b in zip(leaves(place / "first/model"), leaves(place / "bucket/model"), strict=True):
            np.testing.assert_array_equal(a, b)
        kept = {read_label(path / "manifest.json") for path in folder.iterdir() if path.is_dir()}
        assert {path.name for path in bucket.iterdir()} == {*kept, "run", "9-00000000"} and len(kept) == 2
        with pytest.raises(ValueError, match="--push.bucket file://.*: holds versions of another run"):
            grpo.main(config(place, "another", **own | {"published": ""}))
    assert not (place / "another").exists()


def test_addresses_with_passwords_are_refused_before_anything_is_written(place, tmp_path, capfd):
    words = ["train", "grpo", "--model", place / "model", "--data", place / "rows.jsonl", "--reward", "x:y"]
    words += ["--out", tmp_path / "run"]
    for more in (
        ["--servers", "http://ann:hush@127.0.0.1:1"],
        ["--servers", "http://127.0.0.1:1", "--stagers", "http://ann:hush@127.0.0.1:1"],
        ["--distill-coef", "1", "--teachers", "math=http://ann:hush@127.0.0.1:1"],
    ):
        assert cli.main([str(word) for word in [*words, *more]]) == 2
        said = capfd.readouterr().err
        assert f"{more[-2]}: an address must have no user, password" in said and said.count("\n") == 1
        assert "hush" not in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"colocated": True, "eta": 1}, "--colocated .* needs --eta 0, got 1"),
        ({"serve": INSIDE}, "got .*--serve.inside True beside --servers; leave out one"),
        ({"serve": INSIDE, "servers": (), "published": "there"}, "leave out --published, got there"),
        ({"push": Push(bucket="s3://a/b")}, "got s3://a/b without --stagers; start a stager with this --bucket"),
        ({"push": Push(bucket="s3://k:secret@a/b")}, "--push.bucket: an address must have no user, password or query"),
    ],
)
def test_incompatible_serving_options_give_a_one_line_error(place, changes, words):
    with pytest.raises(ValueError, match=words):
        config(place, "never", **changes)


@pytest.mark.parametrize("inside", [True, False])
def test_a_server_that_its_memory_cannot_hold_is_refused_before_anything_is_written(place, inside):
    small = Serve(slots=8, context=64, memory=1e-6, inside=inside)
    with pytest.raises(ValueError, match="caches must hold one sequence of 64 tokens.* got 1e-06 GB of memory"):
        grpo.main(config(place, "small", servers=(), serve=small))
    assert not (place / "small").exists()


def test_a_folder_of_another_run_is_refused_before_anything_is_written(place):
    folder = place / "taken"
    folder.mkdir()
    (folder / "run").write_text("0123456789abcdef")
    with pytest.raises(ValueError, match="holds versions of another run .0123456789abcdef, this one is new.; name"):
        grpo.main(config(place, "never", published=str(folder)))
    assert not (place / "never").exists()


@pytest.mark.slow
def test_only_one_server_may_be_in_process():
    with pytest.raises(ValueError, match="--serve.count must be 1 with --serve.inside, got 2"):
        Serve(inside=True, count=2)


@pytest.mark.long
def test_a_mixture_reports_each_source_and_resumes_exactly(place):
    """Two groups of three from one source in each batch; the one taken up has the same metrics."""
    data = f"sums={place}/rows.jsonl:3,more={place}/heldout.jsonl:1"
    grpo.main(config(place, "mixture", data=data, save_every=2))
    tiny.cut_off(place / "mixture", place / "mixture again", 2)
    grpo.main(config(place, "mixture again", data=data))
    names = [f"{source}/{name}" for source in ("sums", "more") for name in ("share", "reward", "solved_any")]
    first, again = (
        [{name: line[name] for name in names} for line in run_dir.read_lines(place / out / "metrics.jsonl")]
        for out in ("mixture", "mixture again")
    )
    assert first == again and [(x["sums/share"], x["more/share"]) for x in first] == [(0.75, 0.25)] * 3
    with pytest.raises(
        ValueError, match="--data .* must have the run's sources, weights and rows, mixture sums:3:40:0"
    ):
        grpo.main(config(place, "mixture again", data=data[:-1] + "3", steps=4))


@pytest.mark.wide
@pytest.mark.slow
def test_objects_are_trained_on_like_files(place, first):
    """A data set of `datasets` gives the run on the file; a stream is resumed at its row."""
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    grpo.main(config(place, "object", data=""), rows=hf_datasets.Dataset.from_list(rows))
    for a, b in zip(leaves(place / "first/model"), leaves(place / "object/model"), strict=True):
        np.testing.assert_array_equal(a, b)
    stream = lambda: hf_datasets.Dataset.from_list(rows).to_iterable_dataset()
    grpo.main(config(place, "stream", data="", save_every=2), rows=stream())
    tiny.cut_off(place / "stream", place / "stream again", 2)
    grpo.main(config(place, "stream again", data=""), rows=stream())
    for a, b in zip(leaves(place / "stream/model"), leaves(place / "stream again/model"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_servers_of_a_run_follow_the_weights_of_a_checkpoint_in_bf16(place, inside):
    """On a CPU both compute in fp32: steps smaller than the spacing of bf16 count, too."""
    if not (place / "halved").exists():
        tiny.model(place / "halved", dtype="bfloat16")
    out = f"halved-{inside}"
    serve = Serve(slots=8, context=64, inside=inside)
    changes = dict(model=str(place / "halved"), servers=(), serve=serve, optim=Optimizer(lr=1e-4, b2=0.99))
    done = grpo.main(replaced(config(place, out), **changes))
    assert done["max_logp_diff"] <= 1e-4 and done["mismatch_k3_now"] < 1e-9
    pushed = [x["push_probe_diff"] for x in run_dir.read_lines(place / out / "metrics.jsonl") if x["kind"] == "grpo"]
    assert len(pushed) == 3 and max(pushed) <= 1e-5
