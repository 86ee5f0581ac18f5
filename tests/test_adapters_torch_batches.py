"""Packed batches for torch, and the module trained on them by a loop of torch's and by transformers' Trainer."""

import itertools
import os
import subprocess
import sys

import ddp_program
import jax
import numpy as np
import pytest
import tiny
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from areax.adapters import hf, tokenizer
from areax.adapters.data import chat_sft
from areax.adapters.torch.batches import collate
from areax.adapters.torch.module import Model, params
from areax.adapters.tracking import run_dir
from areax.core.optim import Optimizer
from areax.recipes import sft
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sample, demonstration

ROWS = list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 48))
STEPS, BATCH, LENGTH, RATE = 6, 8, 64, 1e-2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and the losses of `areax train sft` on it, by ROWS in their order."""
    path = tmp_path_factory.mktemp("torch")
    tiny.model(path / "model")
    optim = Optimizer(lr=RATE, schedule="linear", b2=0.95, weight_decay=0.1, clip=1.0)
    config = sft.Config(
        model=str(path / "model"), data="", out=str(path / "out"), steps=STEPS, batch=BATCH, length=LENGTH, rows=4,
        optim=optim,
    )  # fmt: skip
    sft.main(config, rows=DataLoader(ROWS, batch_size=None))
    return path


@pytest.fixture(scope="module")
def wanted(place):
    return [line["loss"] for line in run_dir.read_lines(place / "out/metrics.jsonl")]


def samples(place):
    tokens = tokenizer.load(place / "model")
    return [demonstration(*chat_sft.demonstration(tokens, row)) for row in ROWS]


def packed(samples):
    return collate(samples, LENGTH)


def decayed(model):
    return [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]


def kinds(model):
    """Parameter groups: matrices decay, vectors do not."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


@pytest.mark.slow
def test_a_loop_of_torch_has_the_losses_of_areax(place, wanted):
    model, got = Model(*hf.load(place / "model")), []
    optimizer = torch.optim.AdamW(kinds(model), lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=STEPS)
    for batch in DataLoader(samples(place), batch_size=BATCH, collate_fn=packed):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        got.append(loss.item())
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    trained = hf.load(place / "out/model")[1]
    for ours, theirs in zip(*map(jax.tree.leaves, (params(model), trained)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def train(model, path, samples, resume=None, **changes):
    """(trainer, losses)."""
    arguments = transformers.TrainingArguments(
        path, **dict(
            per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE, adam_beta2=0.95,
            weight_decay=0.1, max_grad_norm=1.0, lr_scheduler_type="linear", logging_steps=1, save_steps=3,
            train_sampling_strategy="sequential", report_to=[], disable_tqdm=True, use_cpu=True,
        ) | changes,
    )  # fmt: skip
    collator = packed if isinstance(samples[0], Sample) else None
    trainer = transformers.Trainer(
        model, arguments, data_collator=collator, train_dataset=samples, eval_dataset=samples[:BATCH]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_a_trainer_has_the_losses_of_areax_and_resumes(place, wanted, tmp_path):
    new, rows = lambda: Model(*hf.load(place / "model")), samples(place)
    trainer, got = train(new(), tmp_path, rows)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    again, got = train(new(), tmp_path, rows, resume=tmp_path / "checkpoint-3")
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    for ours, theirs in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    # Accumulated over two batches, and divided by the number of labels in both.
    halves = dict(per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2)
    np.testing.assert_allclose(train(new(), tmp_path / "two", rows, **halves)[1], wanted, atol=1e-5)
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions.shape == (3, LENGTH, trainer.model.settings.vocab)


@pytest.mark.slow
def test_a_trainer_treats_it_as_a_model_of_transformers(place, tmp_path):
    """Plain rows, whose first tokens have labels too."""
    tokens = np.random.default_rng(0).integers(4, 16, (16, 12))
    rows = [{"input_ids": row, "labels": row} for row in tokens.tolist()]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    got, wanted = (
        train(model, tmp_path / name, rows)[1]
        for name, model in (("ours", Model(*hf.load(place / "model"))), ("theirs", theirs))
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
def test_rows_have_every_sample_once_and_learn_its_mask(place):
    made = samples(place)[:BATCH]
    batch = {name: x.numpy() for name, x in packed(made).items()}
    assert {(x.shape, x.dtype.name) for x in batch.values()} == {((3, LENGTH), "int64")}
    found = []
    for row in range(3):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            own = batch["segment_ids"][row] == segment
            tokens, labels = batch["input_ids"][row][own], batch["labels"][row][own]
            assert batch["position_ids"][row][own].tolist() == list(range(len(tokens)))
            assert set(labels[labels != -100] - tokens[labels != -100]) <= {0}
            found.append((tokens.tolist(), (labels != -100).tolist()))
    assert sorted(found) == sorted((x.tokens.tolist(), x.mask.tolist()) for x in made)
    assert (batch["labels"][batch["segment_ids"] == 0] == -100).all()


class Stream(IterableDataset):
    def __init__(self, samples):
        self._samples = samples

    def __iter__(self):
        return iter(self._samples)


@pytest.mark.slow
def test_loaders_take_data_sets_of_both_kinds(place):
    made = samples(place)
    for one, other in zip(*(DataLoader(x, BATCH, collate_fn=packed) for x in (made, Stream(made))), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_of_samples_are_refused(place):
    with pytest.raises(ValueError, match="collate: samples must have weight 1, .* got 0.5"):
        packed([samples(place)[0].replace(weight=0.5)])


@pytest.mark.long
def test_two_processes_of_torchrun_train_as_one(place, tmp_path):
    model = Model(*hf.load(place / "model"))
    ddp_program.train(model, ddp_program.ROWS)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, sys.path))
    arguments = [ddp_program.__file__, place / "model", tmp_path / "state"]
    subprocess.run([*program, *map(str, arguments)], check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    for name, x in torch.load(tmp_path / "state").items():
        torch.testing.assert_close(x, model.state_dict()[name], rtol=1e-5, atol=1e-6)
