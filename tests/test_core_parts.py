"""Weights that are parts of fused tensors: read, held, written and pushed, exactly and in every form."""

import base64
import dataclasses
import json
import pickle
import tracemalloc

import fused
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
import torch

from areax import models
from areax.adapters import hf, peft, safetensors
from areax.adapters import torch as torch_dicts
from areax.core import param
from areax.core.parts import Part, split
from areax.models import lora
from areax.parallel import mesh, rules
from areax.rollout.engine import slots
from areax.rollout.engine.programs import staging

BF16 = ml_dtypes.bfloat16
FORMS = {  # the tensor's shape, its parts
    "rows": ((9, 5), split(4, 3, 2)),
    "stripes": ((3 * 8, 5), split(2, 6)),
    "transposed": ((2, 5, 12), split(12, axis=1, transposed=True)),
    "interleaved": ((2, 5, 12), split(1, 1, axis=1, transposed=True)),
    "halves": ((2, 5, 12), split(6, 6, axis=1, transposed=True)),
    "last axis": ((2, 12), split(1, 1, axis=1)),
    "dropped axis": ((9, 1, 4), split(4, 5, dropped=1)),
}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "fused", fused.FAMILY)


def write(path, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fused.HF))
    safetensors.write(path, tensors, tensors.values())
    return path


def wanted(tensors):
    """The parameter tree of a checkpoint, by hand."""
    layer = lambda i: fused.by_hand({name: tensors[f"model.layers.{i}.{name}"] for name in fused.STORED})
    stack = lambda *layers: {name: np.stack([layer(i)[name] for i in layers]) for name in layer(0)}
    top = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    return {name: tensors[key] for name, key in top.items()} | {"stacks": [stack(0), stack(1, 2)]}


def equal(got, wanted):
    same = lambda x, y: np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(x, y)
    return jax.tree.all(jax.tree.map(same, got, wanted))


# -- one tensor ----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_parts_put_together_are_the_tensor(form):
    shape, parts = FORMS[form]
    tensor = np.random.default_rng(0).normal(size=shape)
    weights = [part.take(tensor) for part in parts]
    assert sum(x.size for x in weights) == tensor.size
    for whole in (np.full(shape, np.nan), torch.full(shape, torch.nan, dtype=torch.float64)):
        for part, x in zip(parts, weights, strict=True):
            assert part.whole(x.shape) == shape
            part.put(whole, x if isinstance(whole, np.ndarray) else torch.from_numpy(x.copy()))
        assert np.array_equal(whole, tensor)
    for part, x in zip(parts, weights, strict=True):
        assert np.array_equal(part.take(torch.from_numpy(tensor)), x)
        assert np.array_equal(part.take(jax.numpy.asarray(tensor, "float32")), x.astype("float32"))


def test_a_part_is_a_view_unless_it_joins_stripes():
    views = {form: [np.shares_memory(part.take(x := np.zeros(shape)), x) for part in parts]
             for form, (shape, parts) in FORMS.items()}  # fmt: skip
    assert views.pop("stripes") == [False, False]
    assert all(map(all, views.values())), views


@pytest.mark.parametrize("form", FORMS)
def test_any_entries_of_a_part_can_be_read_alone(form):
    shape, parts = FORMS[form]
    tensor = np.random.default_rng(0).normal(size=shape)
    for part in parts:
        whole = part.take(tensor)
        for start in range(whole.shape[part.axis]):
            for stop in range(start + 1, whole.shape[part.axis] + 1):
                cut = [slice(0, size) for size in whole.shape]
                cut[-1] = slice(1, whole.shape[-1])
                cut[part.axis] = slice(start, stop)
                assert np.array_equal(part.take(tensor, tuple(cut)), whole[tuple(cut)])


def test_a_cut_reads_no_other_stripes():
    """An array that fails on entries outside the groups that are asked for."""
    tensor = np.full((8 * 4, 3), np.nan)
    tensor[8:16] = 1
    assert np.array_equal(split(2, 2)[1].take(tensor, (slice(4, 8), slice(0, 3))), np.ones((4, 3)))
    assert split(2, 2)[1].take(tensor, (slice(4, 8), slice(0, 3))).base.size == 12  # what was copied


@pytest.mark.parametrize(
    "parts",
    [
        dict(a=None, b=None),
        dict(a=Part(4, 0, 2)),
        dict(a=Part(4, 0, 2), b=None),
        dict(a=Part(4, 0, 2), b=Part(4, 1, 3)),
        dict(a=Part(4, 0, 2), b=Part(4, 0, 2)),
        dict(a=Part(5, 0, 2), b=Part(5, 3, 5)),
        dict(a=Part(4, 0, 2), b=Part(4, 2, 4, axis=1)),
        dict(a=Part(4, 0, 2), b=Part(4, 2, 4, transposed=True)),
        dict(a=Part(2, 0, 2), b=Part(4, 2, 4)),
    ],
    ids=str,
)
def test_tables_whose_parts_leave_gaps_or_overlap_are_refused(parts):
    one = lambda part: param.Param("x x", ("{prefix}layers.{layer}.w",), None, part=part)
    table = param.Table({}, (param.Stack((0,), {name: one(part) for name, part in parts.items()}),), {"x": 4})
    with pytest.raises(ValueError, match=r"layers.\{layer\}.w: stacks.0.a.* must be parts of one tensor and have all"):
        param.check_parts(table)


def test_the_parts_of_every_family_are_checked(monkeypatch):
    def lacking(config):
        made = fused.table(config)
        less = lambda params: {name: p for name, p in params.items() if name != "hk"}
        return dataclasses.replace(made, stacks=tuple(param.Stack(one.layers, less(one.params)) for one in made.stacks))

    config = models.config_from_hf(fused.HF)
    models.table(config)
    monkeypatch.setattr(fused.FAMILY, "table", lacking)
    with pytest.raises(ValueError, match="in_proj_qkvz.weight: .*stacks.0.hq.* must be parts of one tensor"):
        models.table(config)


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_loaded_leaves_are_what_they_are_by_hand(tmp_path, dtype):
    tensors = fused.tensors(BF16)
    params = hf.load(write(tmp_path / "m", tensors), dtype=dtype)[1]
    cast = lambda name, x: x if name.endswith(fused.WIDE) else x.astype(np.dtype(dtype or BF16))
    assert equal(params, wanted({name: cast(name, x) for name, x in tensors.items()}))


@pytest.mark.slow
def test_each_device_of_a_mesh_reads_its_shard(tmp_path):
    tensors = fused.tensors()
    on = mesh.make(mesh.Layout(fsdp=2, tp=4))
    config, params = hf.load(write(tmp_path / "m", tensors), mesh=on)
    assert equal(params, wanted(tensors))
    for x, sharding in zip(*map(jax.tree.leaves, (params, rules.of_params(models.table(config), on))), strict=True):
        assert x.sharding == sharding
    hf.save(tmp_path / "again", config, params)
    hf.save(tmp_path / "one", *hf.load(tmp_path / "m"))
    assert files(tmp_path / "again") == files(tmp_path / "one")


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_load_export_is_bit_identical(tmp_path, dtype):
    tensors = fused.tensors(np.dtype(dtype))
    config, params = hf.load(write(tmp_path / "m", tensors), dtype=None)
    hf.save(tmp_path / "a", config, params, dtype)
    stored = safetensors.read(tmp_path / "a")
    assert stored.keys() == tensors.keys()
    for name, x in tensors.items():
        assert stored[name].dtype == x.dtype and stored[name].tobytes() == x.tobytes(), name
    leaves = [leaf for leaf in param.leaf_list(models.table(config)) if leaf.layers]
    first = dict.fromkeys(key for leaf in leaves for (key, *_) in leaf.keys("model.").values())
    assert [name for name in stored if ".layers." in name] == list(first)
    hf.save(tmp_path / "b", *hf.load(tmp_path / "a"), dtype)
    hf.save(tmp_path / "c", *hf.mapped(tmp_path / "a")[:2], dtype)
    hf.save(tmp_path / "d", config, hf.host_copy(config, params, dtype), dtype)
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c") == files(tmp_path / "d")
    assert hf.manifest(config, params, dtype) == json.loads((tmp_path / "a/manifest.json").read_text())
    assert hf.verify(tmp_path / "a")


def test_no_second_copy_is_held(tmp_path):
    """Loading holds the largest leaf, and saving two tensors, one of which is being made."""
    wide = dict(hidden_size=128, intermediate_size=512, num_attention_heads=80, num_key_value_heads=40)
    config = models.config_from_hf(fused.HF | wide | dict(model_type="phi3", num_hidden_layers=8))
    params = tiny.weights(models.table(config), 0.02)
    leaf, tensor = params["stacks"][0]["up"].nbytes, 2 * 512 * 128 * 4
    path = hf.save(tmp_path / "model", config, params, "float32")
    hf.load(path)  # imports and compilation
    peaks = [traced(lambda: hf.load(path)), traced(lambda: hf.save(tmp_path / "again", config, params, "float32"))]
    assert peaks[0] < 2.5 * leaf < 0.5 * sum(x.nbytes for x in jax.tree.leaves(params))  # JAX frees it during the next
    assert peaks[1] < 2.5 * tensor < leaf


def traced(run):
    """The most memory that was held at a time, in bytes."""
    tracemalloc.start()
    kept = run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak if kept else 0


def test_mapped_leaves_are_read_from_the_file(tmp_path):
    tensors = fused.tensors()
    config, params, verify = hf.mapped(write(tmp_path / "m", tensors))
    read = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.stack([x[i] for i in range(len(x))]), params)
    assert equal(read, wanted(tensors)) and verify() is None
    for name in ("q", "k", "v", "expert_up", "cv"):
        assert params["stacks"][1][name][1].flags.owndata is False, name
    table, on = models.table(config), slots.mesh_of()
    staged, one = (staging.stage(x, table, on) for x in (params, hf.load(tmp_path / "m")[1]))
    assert jax.tree.all(jax.tree.map(np.array_equal, staged, one))


def test_mistakes_in_fused_tensors_are_named_once_with_the_shape_of_the_whole(tmp_path):
    tensors, key = fused.tensors(), "model.layers.1.in_proj_qkvz.weight"
    with pytest.raises(ValueError) as caught:
        hf.load(write(tmp_path / "a", {name: x for name, x in tensors.items() if name != key}))
    assert str(caught.value).endswith(f": missing {key}")
    with pytest.raises(ValueError, match=rf"{key} must be \[72, 16\] by config.json, got \[71, 16\]"):
        hf.load(write(tmp_path / "b", tensors | {key: tensors[key][1:]}))
    key = "model.layers.1.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"{key} must be \[3, 16, 24\] by config.json, got \[3, 24, 16\]"):
        hf.load(write(tmp_path / "c", tensors | {key: tensors[key].swapaxes(1, 2)}))
    with pytest.raises(ValueError, match="unexpected model.layers.1.k_proj.weight$"):
        hf.load(write(tmp_path / "d", tensors | {"model.layers.1.k_proj.weight": tensors[key]}))


def test_state_dicts_go_both_ways():
    tensors = fused.tensors()
    state = {name: torch.from_numpy(x) for name, x in tensors.items()}
    config, params = torch_dicts.from_state_dict(models.config_from_hf(fused.HF), state)
    assert equal(params, wanted(tensors))
    back = torch_dicts.to_state_dict(config, params)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    half = torch_dicts.to_state_dict(config, hf.host_copy(config, params, "bfloat16"))
    for name, x in half.items():
        kind = torch.float32 if name.endswith(fused.WIDE) else torch.bfloat16
        assert x.dtype == kind and torch.equal(x, state[name].to(kind)), name


# -- weights that stay in fp32 -------------------------------------------------------------------


def test_fp32_weights_of_a_bf16_model_stay_so_on_every_way(tmp_path):
    """Values that bf16 cannot hold come through reading, host copies, versions and messages."""
    tensors = fused.tensors(BF16)
    narrow = lambda name: not name.endswith(fused.WIDE)
    assert all(narrow(name) or (x.astype(BF16) != x).any() for name, x in tensors.items())
    path = write(tmp_path / "m", tensors)
    for config, params in (hf.load(path, None), hf.load(path, "bfloat16"), hf.mapped(path, "bfloat16")[:2]):
        config = dataclasses.replace(config, source=json.dumps(fused.HF | {"dtype": "bfloat16"}))
        host = hf.host_copy(config, params)
        hf.write_published(tmp_path / "published", 7, config, host)
        sent = {}
        for message, _ in torch_dicts.messages(config, host, size=4096):
            sent |= dict(pickle.loads(base64.b64decode(message)))
        stored = safetensors.read(tmp_path / "published/7")
        assert stored.keys() == sent.keys() == tensors.keys()
        for name, x in tensors.items():
            assert stored[name].dtype == x.dtype and stored[name].tobytes() == x.tobytes(), name
            kind = torch.bfloat16 if narrow(name) else torch.float32
            assert sent[name].dtype == kind and np.array_equal(sent[name].float(), x.astype("float32")), name
        _, read, _ = hf.mapped(tmp_path / "published/7", "bfloat16")
        assert read["stacks"][1]["decay"].dtype == read["stacks"][1]["slow"][0].dtype == np.float32


# -- adapters ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_of_parts_change_the_tensor_as_their_fused_form_does(tmp_path):
    """By slices and stripes: W + scale B A of the file is the merged checkpoint; and the file is read back."""
    config, params = hf.load(write(tmp_path / "m", fused.tensors()))
    spec = lora.Lora(rank=2, alpha=3, targets=("q", "v", "sigmoid", "h[qkvz]", "up"))
    adapters = tiny.weights(lora.table(models.table(config), spec), 0.3, seed=1)
    peft.save(tmp_path / "adapter", config, adapters, spec)
    hf.save(tmp_path / "merged", config, lora.join(params, adapters, spec), "float32")
    before, after = (safetensors.read(tmp_path / name) for name in ("m", "merged"))
    changes = safetensors.read(tmp_path / "adapter/adapter_model.safetensors")
    for name, x in before.items():
        stem = f"base_model.model.{name.removesuffix('weight')}"
        if f"{stem}lora_A.weight" in changes:
            x = x + 1.5 * changes[f"{stem}lora_B.weight"] @ changes[f"{stem}lora_A.weight"]
        np.testing.assert_allclose(after[name], x, atol=1e-5, err_msg=name)
    assert len(changes) == 2 * 3 * 4 and peft.exported_rank(config, spec) == 8
    assert peft.modules(config, spec) == ["gate_up_proj", "in_proj_qkvz", "q_proj", "qkv_proj"]
    again, read = peft.load(tmp_path / "adapter", config)
    assert equal(read, adapters) and (again.rank, again.alpha) == (2, 3)


@pytest.mark.parametrize("target", ["expert_down", "half_up", "cq"])
def test_adapters_of_what_is_no_matrix_in_checkpoints_are_refused(target):
    config = models.config_from_hf(fused.HF)
    with pytest.raises(ValueError, match=rf"must be matrices \[out, in\] in checkpoints, got {target}, which fused "):
        peft.modules(config, lora.Lora(rank=2, targets=("q", target)))
