"""A router's bias in a run follows the load of each batch, and is resumed, written and sharded like a weight."""

import itertools
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers

from areax.adapters import hf, tokenizer
from areax.adapters.tracking import run_dir
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.parallel.mesh import Layout
from areax.recipes import sft
from areax.recipes.shared import offline
from areax.rollout.tasks import arithmetic

E, K, RATE = 8, 2, 0.03
GLM = dict(
    model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], num_hidden_layers=3, first_k_dense_replace=1,
    n_routed_experts=E, num_experts_per_tok=K, n_shared_experts=1, moe_intermediate_size=16, num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("learner")
    tiny.model(path / "model", **GLM)
    rows = list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 24))
    tiny.rows(path / "rows.jsonl", rows)
    return path


def config(place, out, **changes):
    """Every batch is all rows, in several microbatches of packed rows that end with padding."""
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(place / out), steps=3, batch=24, length=20,
        rows=4, optim=Optimizer(lr=1e-2), balance=Balance(bias=RATE),
    )  # fmt: skip
    return replace(base, **changes)


def biases(path):
    """Those of the layers with experts, [layers, experts]."""
    return np.concatenate([stack["router_bias"] for stack in hf.load(path)[1]["stacks"] if "router_bias" in stack])


def load(place):
    """Times each layer's experts are chosen by transformers, which reads one row at a time, [layers, experts]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    count_LE = np.zeros((len(gates), E))
    for i, gate in enumerate(gates):
        gate.register_forward_hook(lambda _, __, out, i=i: np.add.at(count_LE[i], out[2].flatten().numpy(), 1))
    sample = offline.Demonstrations(tokenizer.load(place / "model"), "last")
    with torch.no_grad():
        for row in run_dir.read_lines(place / "rows.jsonl"):
            model(torch.tensor([list(sample(row).tokens)]))
    return count_LE


@pytest.mark.wide
@pytest.mark.slow
def test_a_routers_bias_moves_by_the_load_of_the_whole_batch_and_is_resumed(place):
    sft.main(config(place, "parts", steps=1))
    before, after, count_LE = biases(place / "model"), biases(place / "parts/model"), load(place)
    assert count_LE.sum(1).tolist() == [K * count_LE.sum() / K / 2] * 2 and len(set(count_LE.flatten())) > 5
    wanted = before.astype(np.float64) + RATE * np.sign(count_LE.mean(-1, keepdims=True) - count_LE)
    np.testing.assert_allclose(after, wanted, atol=1e-7)
    shutil.copytree(place / "parts", place / "resumed")
    sft.main(config(place, "resumed"))
    sft.main(config(place, "whole"))
    weights = [jax.tree.leaves(hf.load(place / out / "model")[1]) for out in ("resumed", "whole")]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
    moved = np.abs(biases(place / "whole/model") - before) / RATE
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)
    assert moved.max() > 2.9


@pytest.mark.long
def test_a_moving_bias_evens_out_a_skewed_start(place):
    """The most used expert has four times its share at first, and keeps it unless the bias moves."""
    settings, params = hf.load(place / "model")
    favoured = lambda stack: stack | {"router_bias": stack["router_bias"].at[:, :K].add(1.0)}
    skewed = params | {"stacks": [favoured(stack) if "router" in stack else stack for stack in params["stacks"]]}
    hf.save(place / "skewed", settings, skewed, tokenizer=tokenizer.load(place / "model"))
    loads = {}
    for rate in (0.0, 0.02):
        run = config(place, f"rate {rate}", steps=80, optim=Optimizer(lr=1e-3), balance=Balance(bias=rate))
        sft.main(replace(run, model=str(place / "skewed")))
        loads[rate] = [line["expert_load"] for line in run_dir.read_lines(place / f"rate {rate}/metrics.jsonl")]
    assert min(loads[0.0]) > 3.9 and loads[0.02][0] > 3.9, loads
    assert max(loads[0.02][-10:]) < 1.5, loads


@pytest.mark.long
def test_a_routers_bias_is_the_same_on_a_mesh(place):
    """Each device sees a part of the batch and some of the experts; the load is that of all."""
    for out, mesh in (("one", Layout()), ("mesh", Layout(fsdp=2, ep=2, tp=2))):
        sft.main(config(place, out, mesh=mesh))
    np.testing.assert_array_equal(biases(place / "mesh/model"), biases(place / "one/model"))
