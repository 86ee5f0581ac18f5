"""Vision-language models compute what transformers computes: images of odd sizes in packed rows, the tower included."""

import functools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers
import vlm

from areax import models
from areax.adapters import hf, safetensors
from areax.adapters import torch as torch_dicts
from areax.adapters.torch.module import Model
from areax.core import losses, optim, packing, param, step
from areax.core.batch import Batch
from areax.models import vision
from areax.parallel import batches, mesh, offload, rules
from areax.rollout import types

T = 56
RUN = models.Run(query_chunk=40)
COMMON = "qwen2_5_vl", "qwen3_vl"  # their towers are those of all
NAMES = [pytest.param(name, marks=[pytest.mark.mesh] * (name not in COMMON)) for name in vlm.CASES]


@dataclass(frozen=True)
class Case:
    name: str
    model: Any
    path: Any
    config: Any
    params: Any
    batch: Batch
    logits: list
    gradient: Any


def packed(name, tower, rows=2) -> Batch:
    """The sequences in two rows, [M, B, T]."""
    found = vlm.sequences(name)
    samples = [types.supervised(tokens[:1], tokens[1:]) for tokens, _ in found]
    batch = vision.attach(packing.pack(samples, T, rows=rows), [seen for _, seen in found], tower)
    assert batch.token_BT.shape == (2 // rows, rows, T)
    return batch


@functools.partial(jax.jit, static_argnames="config")
def run(params, batch, config):
    """(logits, gradient of minus the sum of all log-probabilities)."""

    def loss(params):
        out = models.score(params, batch, config=config, run=RUN)
        last_BT = jnp.pad(batch.segment_BT[:, 1:] != batch.segment_BT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        return -jnp.sum(jnp.where((batch.segment_BT > 0) & ~last_BT, out.logp_BT, 0))

    logits_BTV = models.forward(
        params, batch.token_BT, config=config, segment_BT=batch.segment_BT, run=RUN, images=batch.input
    )
    return logits_BTV, jax.grad(loss)(params)


def by_sequence(x_BT, batch) -> list:
    """What belongs to each sequence, in the order in which they were packed."""
    found = {}
    for b, j in np.argwhere(np.asarray(batch.sample_BJ) >= 0):
        found[int(batch.sample_BJ[b, j])] = np.asarray(x_BT)[b, np.asarray(batch.segment_BT)[b] == j + 1]
    return [found[i] for i in sorted(found)]


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    path, model = tmp_path_factory.mktemp("vlm"), vlm.reference(request.param)
    vlm.save(model, path)
    config, params = hf.load(path, vision=True)
    batch = jax.tree.map(lambda x: x[0], packed(request.param, config.vision))
    logits_BTV, gradient = run(params, batch, config)
    return Case(request.param, model, path, config, params, batch, by_sequence(logits_BTV, batch), gradient)


@pytest.mark.sweep
def test_logits(case):
    with torch.no_grad():
        wanted = [vlm.logits(case.model, *each).numpy() for each in vlm.sequences(case.name)]
    assert np.concatenate(wanted).std() >= 1
    for got, want in zip(case.logits, wanted, strict=True):
        assert got.shape == want.shape and np.abs(got - want).max() <= 1e-4 * max(1, np.abs(want).max())


@pytest.mark.sweep
def test_gradients(case):
    case.model.zero_grad()
    for tokens, seen in vlm.sequences(case.name):
        target = torch.from_numpy(tokens[1:].astype(np.int64))
        torch.nn.functional.cross_entropy(vlm.logits(case.model, tokens, seen)[:-1], target, reduction="sum").backward()
    specs, arrays = hf.to_tensors(case.config, case.gradient, "float32")
    got = dict(zip(specs, arrays, strict=True))
    wanted = named(case.model, case.name)
    assert got.keys() == wanted.keys()
    largest = max(np.abs(g).max() for g in wanted.values())
    worst = {name: np.abs(got[name] - g).max() / max(np.abs(g).max(), 1e-4 * largest) for name, g in wanted.items()}
    assert max(worst.values()) <= 1e-4, sorted(worst.items(), key=lambda item: -item[1])[:5]


def named(model, name):
    """Gradients by the names that checkpoints have."""
    found = {}
    for key, weight in model.named_parameters():
        if name == "qwen2_5_vl":
            key = key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        x = weight.grad.numpy()
        stem, _, last = key.rpartition(".experts.")
        if stem and name == "qwen3_vl_moe":
            found[key] = x.swapaxes(1, 2)
        elif last == "gate_up_proj":
            for e, (gate, up) in enumerate(zip(*np.split(x, 2, 1), strict=True)):
                found |= {f"{stem}.experts.{e}.gate_proj.weight": gate, f"{stem}.experts.{e}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{stem}.experts.{e}.down_proj.weight": each for e, each in enumerate(x)}
        else:
            found[key] = x
    return found


@pytest.mark.sweep
def test_axes_places_and_features_matter(case):
    """What parity would not notice if weights were small: each moves logits."""

    def moved(**changes):
        batch = case.batch.replace(input={**case.batch.input, **changes})
        rows = by_sequence(run(case.params, batch, case.config)[0], batch)
        return max(np.abs(got - same).max() for got, same in zip(rows, case.logits, strict=True))

    given = case.batch.input
    assert moved() < 1e-5
    assert moved(axis_position=given["axis_position"][..., [0, 2, 1]]) > 0.05
    assert moved(axis_position=given["axis_position"][..., [1, 0, 2]]) > 0.05
    assert moved(patch_place=given["patch_place"][..., [1, 0, 3, 2]]) > 0.05
    assert moved(patch_frame=np.minimum(given["patch_frame"], 1)) > 0.05
    assert moved(feature=np.where(given["feature"] > 0, given["feature"] - 1, given["feature"])) > 0.05
    if "patch_window" in given:
        assert moved(patch_window=given["patch_frame"]) > 0.05


@functools.partial(jax.jit, static_argnames=("config", "run"))
def forward(params, batch, config, run=RUN):
    return models.forward(
        params, batch.token_BT, config=config, segment_BT=batch.segment_BT, run=run, images=batch.input
    )


@pytest.mark.sweep
def test_text_is_computed_as_without_a_tower(case):
    """Alone to the bit, since nothing else is computed; in a batch with images within rounding."""
    config, params = hf.load(case.path)
    assert config.vision is None and "vision" not in params
    text = case.batch.replace(input={})
    alone = np.asarray(forward(params, text, config))
    np.testing.assert_array_equal(forward(case.params, text, case.config), alone)
    np.testing.assert_allclose(by_sequence(alone, text)[1], case.logits[1], atol=1e-5)


@pytest.mark.sweep
def test_a_checkpoint_comes_back_to_the_bit(case, tmp_path):
    hf.save(tmp_path / "out", case.config, case.params)
    before, after = safetensors.read(case.path), safetensors.read(tmp_path / "out")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    written, source = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "out", case.path))
    assert written["vision_config"] == source["vision_config"]
    auto = transformers.AutoModelForImageTextToText
    loaded, found = auto.from_pretrained(tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert type(loaded) is type(case.model) and not any(found.values())
    for name, x in case.model.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name]), name
    config, params = hf.load(tmp_path / "out", vision=True)
    assert config.vision == case.config.vision and jax.tree.all(jax.tree.map(np.array_equal, params, case.params))
    # Text alone still passes the tower on, as it is.
    hf.save(tmp_path / "text", *hf.load(case.path))
    assert all(np.array_equal(x, before[name]) for name, x in safetensors.read(tmp_path / "text").items())


def test_experts_are_read_either_way_round(tmp_path):
    """As on the hub, and as transformers 5 writes them; if gate_up_proj is square, down_proj tells."""
    name = "qwen3_vl_moe"
    model = vlm.reference(name, moe_intermediate_size=20)
    assert model.state_dict()["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (5, 40, 40)
    vlm.save(model, tmp_path / "hub")
    model.save_pretrained(tmp_path / "transformers")
    (_, params), (config, same) = (hf.load(tmp_path / of, vision=True) for of in ("hub", "transformers"))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
    hf.save(tmp_path / "out", config, same)  # as on the hub, which servers read
    before, after = safetensors.read(tmp_path / "hub"), safetensors.read(tmp_path / "out")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    ours, theirs = Model(*hf.load(tmp_path / "hub")).state_dict(), model.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.sweep
def test_state_dicts_of_modules_have_the_tower(case):
    config = models.with_vision(models.config_from_hf(case.model.config.to_dict()))
    config, params = torch_dicts.from_state_dict(config, case.model.state_dict())
    assert jax.tree.all(jax.tree.map(np.array_equal, params, case.params))
    again = torch_dicts.to_state_dict(config, params)
    others = [name for name in case.model.state_dict() if ".experts." not in name]  # or all of a layer in one
    assert all(torch.equal(again[name], case.model.state_dict()[name]) for name in others)


def made(name, trained=True):
    """(config, random weights) without transformers."""
    source = {"model_type": name, "architectures": ["Any"], **vlm.CASES[name]}
    config = models.with_vision(models.config_from_hf(source), trained)
    return config, tiny.weights(models.table(config), 0.2)


def step_of(config, params, batch, run=RUN, mesh=None):
    """(metrics, weights) after a step of supervised training by SGD."""
    table, objective = models.table(config), losses.SFT()
    batch = objective.prepare(batch)
    optimizer = optim.make_optimizer(optim.Optimizer(name="sgd", lr=0.1, weight_decay=0.0, clip=0.0), table)
    shardings = None if mesh is None else rules.of_state(optimizer, table, mesh)
    score = functools.partial(models.score, config=config, run=run)
    if mesh is not None:
        params, batch = jax.tree.map(jax.device_put, params, shardings.params), batches.batch(batch, mesh)
    state = step.init(jax.tree.map(jnp.array, params), optimizer, shardings)
    state, metrics = step.make_step(score, objective, optimizer, shardings)(state, batch)
    return metrics, state.params


@pytest.mark.wide
@pytest.mark.mesh
def test_a_frozen_tower_stays_as_it_is():
    """In a step of training on two microbatches, the text model learns as with the tower in training."""
    name = "qwen3_vl"
    (config, params), (frozen, _) = made(name), made(name, trained=False)
    batch = packed(name, config.vision, rows=1)
    _, trained = step_of(config, params, batch)
    _, still = step_of(frozen, params, batch)
    for (path, before), a, b in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(trained), jax.tree.leaves(still), strict=True
    ):
        if "vision" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(before, b)
            assert np.abs(np.asarray(a) - before).max() > 0, path
        else:
            np.testing.assert_allclose(a, b, atol=1e-5)


def assert_same_step(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(initial=1))


LAYOUTS = dict(fsdp=dict(dp=2, fsdp=2), tp=dict(fsdp=2, tp=2), cp=dict(cp=2, tp=2))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize(
    "name, layout",
    [("qwen2_5_vl", "fsdp"), ("qwen2_5_vl", "cp"), ("qwen3_vl", "tp")],
)
def test_a_step_on_a_mesh_is_that_of_one_device(name, layout):
    config, params = made(name)
    batch = packed(name, config.vision, rows=2)
    if layout == "fsdp":  # four rows
        batch = jax.tree.map(lambda x: np.concatenate([x, x], 1), batch)
    on = mesh.make(mesh.Layout(**LAYOUTS[layout]))
    with jax.set_mesh(on):
        got = step_of(config, params, batch, mesh=on)
    assert_same_step(got, step_of(config, params, batch))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_mesh_loads_its_shards(name, tmp_path):
    config, params = made(name)
    hf.save(tmp_path, config, params)
    on = mesh.make(mesh.Layout(fsdp=2, tp=2))
    _, loaded = hf.load(tmp_path, mesh=on, vision=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, loaded))
    table = models.table(config)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, loaded, rules.of_params(table, on)))
    split = {name for name, x in loaded["vision"]["stacks"][0].items() if not x.sharding.is_fully_replicated}
    assert split >= {"q", "k", "v", "o", "up", "down"}
    explained = models.explain(config, on)
    assert "vision.stacks.0.q " in explained and "vision_heads/tp, vision_embed/fsdp" in explained


@pytest.mark.mesh
def test_no_array_has_a_place_for_every_pair_of_patches():
    """In windows and whole frames, forwards and backwards; 7 patches of queries at a time."""
    tower, P = made("qwen2_5_vl")[0].vision, 1248
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    images = {
        "patch": jnp.zeros((1, P, 24)), "patch_frame": zeros(1, P), "patch_place": zeros(1, P, 4),
        "patch_window": zeros(1, P), "feature": zeros(1, 9), "axis_position": zeros(1, 9, 3),
    }  # fmt: skip
    loss = lambda params: vision.see(params, images, tower, models.Run(query_chunk=7)).merged_BUD.sum()
    program = str(jax.make_jaxpr(jax.grad(loss))(param.abstract(vision.table(tower))))
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", program)}
    assert max(shape.count(P) for shape in shapes) == 1 and max(map(math.prod, shapes)) <= P * 240


@pytest.mark.wide
@pytest.mark.mesh
def test_masters_on_the_host_step_as_those_on_the_device():
    """Also with a learning rate of the tower's own."""
    config, params = made("qwen3_vl")
    table, spec, objective = models.table(config), optim.Optimizer(lr=0.02, vision_lr=0.005, clip=0.5), losses.SFT()
    batch = objective.prepare(packed("qwen3_vl", config.vision))
    score, on = functools.partial(models.score, config=config, run=RUN), mesh.make(mesh.Layout())
    with jax.set_mesh(on):
        state = offload.init(jax.tree.map(jnp.array, params), table, spec, "float32", on)
        state, report = offload.make_step(score, objective, table, spec, "float32", on)(state, batch)
        optimizer = optim.make_optimizer(spec, table)
        wanted = step.init(jax.tree.map(jnp.array, params), optimizer)
        wanted, expected = step.make_step(score, objective, optimizer)(wanted, batch)
    assert_same_step((report, state.params), (expected, wanted.params))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("how", [dict(remat="dots"), dict(remat="none", query_chunk=7)], ids=str)
def test_no_option_of_a_run_changes_a_step(how):
    config, params = made("qwen2_5_vl")
    batch = packed("qwen2_5_vl", config.vision)
    assert_same_step(step_of(config, params, batch, models.Run(**how)), step_of(config, params, batch))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("name", vlm.CASES)
def test_bfloat16_is_near(name):
    config, params = made(name)
    batch = jax.tree.map(lambda x: x[0], packed(name, config.vision))
    real = batch.segment_BT > 0
    low, full = (
        np.asarray(forward(params, batch, config, models.Run(dtype=dtype)))[real] for dtype in ("bfloat16", "float32")
    )
    assert np.abs(low - full).mean() < 0.05 * full.std()


@pytest.mark.slow
def test_a_model_of_text_alone_refuses_images():
    config, params = made("qwen3_vl")
    batch = jax.tree.map(lambda x: x[0], packed("qwen3_vl", config.vision))
    alone = models.config_from_hf({"model_type": "qwen3_vl", **vlm.CASES["qwen3_vl"]})
    text = {name: x for name, x in params.items() if name != "vision"}
    traced = lambda params, config, **more: jax.eval_shape(lambda: models.score(params, batch, config=config, **more))
    with pytest.raises(ValueError, match=r"images need a model with a vision tower.*hf.load\(path, vision=True\)"):
        traced(text, alone)
    with pytest.raises(ValueError, match=r"images need a model with a vision tower"):  # of a teacher
        traced(params, config, others=[(text, alone)], per_chunk=lambda *each: ())
    with pytest.raises(ValueError, match="images need all arrays of vision.arrange, got none for patch_frame\n"):
        batch = batch.without("patch_frame")
        traced(params, config)


def test_a_model_with_a_tower_has_no_score_head(tmp_path):
    config, params = made("qwen3_vl")
    hf.save(tmp_path, config, params)
    with pytest.raises(ValueError, match="a model with a score head reads no images"):
        hf.load(tmp_path, init_missing=("score",), vision=True)
