"""Strict loading and atomic saving of checkpoints. For parity with transformers see test_models_parity.py."""

import dataclasses
import json
import os
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_families
import torch
import transformers

from areax import models
from areax.adapters import hf, safetensors, tokenizer
from areax.adapters.commands import convert, inspect
from areax.adapters.hf import reading, saving
from areax.rollout.engine.server import published_label
from areax.rollout.servers.labels import read_label
from areax.rollout.weights import store

CONFIG = dict(
    model_type="qwen3", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, eos_token_id=3,
)  # fmt: skip


def made(**options):
    config = models.config_from_hf(CONFIG | options)
    return config, tiny.weights(models.table(config), 0.02)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def contents(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def rewritten(path, change):
    """Replaces a checkpoint's tensors with `change(tensors)`, as a tool does that writes no manifest."""
    (path / "manifest.json").unlink(missing_ok=True)
    tensors = {name: np.array(x) for name, x in safetensors.read(path).items()}
    tensors = change(tensors)
    safetensors.write(path, tensors, tensors.values())


@pytest.fixture
def saved(tmp_path):
    config, params = made()
    return hf.save(tmp_path / "model", config, params)


# -- loading -------------------------------------------------------------------------------------


def refused(path, *words, **options):
    with pytest.raises(ValueError) as caught:
        hf.load(path, **options)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text and all(word in text for word in words), text


def test_unusable_paths_are_refused(saved, tmp_path):
    refused(tmp_path / "nowhere", "must be a directory that exists")
    refused(saved / "config.json", "got a file")
    refused(tmp_path, "needs config.json")
    with pytest.raises(ValueError, match="load: dtype must be one of bfloat16, float16, float32, float64, got bf16"):
        hf.load(saved, "bf16")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "got adapters; merge them: areax convert")
    (saved / "config.json").write_text('{"model_type": "qwen3",')
    refused(saved, "config.json: damaged or half-written JSON")
    with open(saved / "config.json", "wb") as file:
        file.truncate(2**40)
    refused(saved, "config.json: damaged or half-written JSON (more than 256 MiB)")
    (saved / "config.json").write_text("[]")
    refused(saved, "config.json: must hold a JSON object, got list")
    (saved / "config.json").write_text('{"model_type": "mamba"}')
    refused(saved, "model_type must be one of", "llama", "'mamba'")
    (saved / "config.json").write_text("{}")
    refused(saved, "got None")


def test_missing_and_unexpected_tensors_are_named(saved):
    rewritten(saved, lambda ts: {name.replace("norm.weight", "norm.scale"): x for name, x in ts.items()})
    refused(saved, "missing model.", "unexpected model.", "norm.scale", "more")


def test_one_missing_tensor(saved):
    rewritten(saved, lambda ts: {n: x for n, x in ts.items() if n != "model.layers.1.mlp.up_proj.weight"})
    refused(saved, "missing model.layers.1.mlp.up_proj.weight")


def test_a_wrong_shape_is_named(saved):
    rewritten(saved, lambda ts: ts | {"model.norm.weight": np.ones(17, np.float32)})
    refused(saved, "model.norm.weight must be [16] by config.json, got [17]")


def test_quantised_weights_are_refused(saved):
    rewritten(saved, lambda ts: ts | {"model.norm.weight": np.ones(16, np.int8)})
    refused(saved, "model.norm.weight", "int8", "quantised")


def test_rotary_buffers_of_old_checkpoints_are_ignored(saved):
    config, params = hf.load(saved)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(3)}
    rewritten(saved, lambda ts: ts | buffers)
    assert equal(hf.load(saved)[1], params)


def test_layers_that_predict_further_tokens_are_passed_to_exports(tmp_path):
    """As many as config.json says, behind the model's own; others are a mistake."""
    config, params = made(
        model_type="glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    path, zeros = hf.save(tmp_path / "model", config, params), np.zeros((2, 2), np.float32)
    more = ("eh_proj.weight", "shared_head.norm.weight", "mlp.experts.0.up_proj.weight")
    rewritten(path, lambda tensors: tensors | {f"model.layers.3.{name}": zeros for name in more})
    again, loaded = hf.load(path)
    assert equal(params, loaded)
    low = hf.load(path, "bfloat16")[1]["stacks"][1]
    assert low["router"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low["router_bias"], params["stacks"][1]["router_bias"])  # fp32: it decides choices
    assert again.rest.names == tuple(f"model.layers.3.{name}" for name in more)
    hf.save(tmp_path / "again", again, loaded)
    old, new = safetensors.read(path), safetensors.read(tmp_path / "again")
    assert old.keys() == new.keys() and all(np.array_equal(old[name], new[name]) for name in old)
    rewritten(path, lambda tensors: tensors | {"model.layers.4.eh_proj.weight": zeros})
    refused(path, "unexpected model.layers.4.eh_proj.weight")


def test_a_stored_head_must_equal_tied_embeddings(tmp_path):
    config, params = made(tie_word_embeddings=True)
    path = hf.save(tmp_path / "model", config, params)
    assert "lm_head.weight" not in safetensors.read(path)
    rewritten(path, lambda ts: ts | {"lm_head.weight": ts["model.embed_tokens.weight"]})
    assert equal(hf.load(path)[1], params)
    rewritten(path, lambda ts: ts | {"lm_head.weight": ts["lm_head.weight"] + 1})
    refused(path, "tie_word_embeddings is true, but lm_head.weight differs")


def test_a_checkpoint_that_does_not_match_its_manifest_is_refused(tmp_path):
    """Whichever byte of a tensor is damaged; without a manifest nothing can be compared."""
    path = hf.save(tmp_path / "model", *made())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in range(start, len(whole), (len(whole) - start) // 7):
        data = bytearray(whole)
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"model: \S+ does not match manifest.json; copy the checkpoint again"):
            hf.load(path)
        with pytest.raises(ValueError, match="does not match manifest.json"):
            convert.convert(path, tmp_path / "other")
    (path / "manifest.json").write_text('{"tensors": null}')
    with pytest.raises(ValueError, match="manifest.json must list the tensors"):
        hf.load(path)
    (path / "manifest.json").write_text('{"a":' * 10**5)
    with pytest.raises(ValueError, match="manifest.json: damaged or half-written JSON"):
        hf.load(path)
    (path / "manifest.json").write_bytes(b" " * 2**22)
    with pytest.raises(ValueError, match=r"manifest.json: must have at most \d{7} bytes, got more; copy"):
        hf.load(path)
    (path / "manifest.json").unlink()
    hf.load(path)


def test_what_is_no_file_does_not_pass_for_no_manifest(tmp_path):
    path = hf.save(tmp_path / "model", *made())
    manifest = path / "manifest.json"
    for make in (manifest.mkdir, lambda: os.mkfifo(manifest), lambda: manifest.symlink_to("gone")):
        shutil.rmtree(manifest) if manifest.is_dir() else manifest.unlink()
        make()
        for read in (hf.load, hf.verify, inspect.inspect, published_label, lambda path: read_label(manifest)):
            with pytest.raises(
                ValueError, match="manifest.json: must be a file, got a folder, a pipe or a link without"
            ):
                read(path)


def test_a_fingerprint_tells_any_number(tmp_path):
    def of(*ones, shape=(300, 400)):
        x = np.zeros(shape, np.float32)
        x.reshape(-1)[list(ones)] = 1
        safetensors.write(tmp_path, {"a": x, "b": np.zeros(())}, [x, np.zeros(())])
        return hf.fingerprint(tmp_path)

    marks = [of(), of(0), of(5000), of(-1), of(0), of(shape=(400, 300))]
    assert marks[1] == marks[4] and len({mark["a"] for mark in marks}) == 5 and len({mark["b"] for mark in marks}) == 1
    assert of()["a"].startswith("float32[300, 400] ")


def test_a_fingerprint_of_large_weights_reads_pieces_of_each_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WHOLE", 0)

    def of(*ones):
        x = np.zeros(300_000, np.float32)
        x[list(ones)] = 1
        safetensors.write(tmp_path, {"a": x, "b": x[:50]}, [x, x[:50]])
        return hf.fingerprint(tmp_path)

    assert of()["a"] == of(5000)["a"] != of(0)["a"] != of(-1)["a"] and of()["b"] != of(49)["b"]
    assert of()["a"] != of(*range(100_000, 130_000))["a"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_not_finite_are_named_and_counted(tmp_path, dtype):
    """Also in a checkpoint whose hashes match: a run that diverged wrote it."""
    config, params = made()
    bad = params["embed"].at[3, :2].set(jnp.nan).at[1, 0].set(-jnp.inf)
    path = hf.save(tmp_path / "model", config, {**params, "embed": bad}, dtype)
    with pytest.raises(ValueError, match=rf"3 of the {bad.size} numbers of model.embed_tokens.weight are not finite;"):
        hf.load(path)


def test_numbers_of_float64_must_fit_into_float32(saved):
    huge = lambda x: np.where(np.arange(x.size).reshape(x.shape) < 2, 1e39, x)
    rewritten(saved, lambda ts: ts | {"model.norm.weight": huge(ts["model.norm.weight"].astype(np.float64))})
    refused(saved, "2 of the 16 numbers of model.norm.weight are not finite")


def test_a_missing_head_is_initialised_only_on_request(saved):
    config, params = hf.load(saved, init_missing=("score",))
    assert config.score_head and params.pop("score").shape == (1, 16)
    assert equal(params, hf.load(saved)[1])
    rewritten(saved, lambda ts: {n: x for n, x in ts.items() if n != "lm_head.weight"})
    refused(saved, "missing lm_head.weight (init_missing=('head',)")
    config, params = hf.load(saved, init_missing=("head",))
    assert 0 < float(jnp.std(params["head"])) < 0.1
    refused(saved, "init_missing may hold head and score, got ['norm']", init_missing=("norm",))


def test_an_existing_head_is_loaded_even_if_initialising_is_allowed(saved, tmp_path):
    config, params = hf.load(saved, init_missing=("score",))
    hf.save(tmp_path / "scored", config, params)
    again, same = hf.load(tmp_path / "scored", init_missing=("score", "head"))
    assert again.score_head and equal(params, same)


def test_bare_backbones_are_loaded_and_saved_without_the_prefix(tmp_path):
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert config.prefix == ""
    hf.save(tmp_path / "ours", config, params)
    again, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()) and type(again) is type(model)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    # With a head it is a full model, for which servers expect the usual keys.
    config, params = hf.load(tmp_path / "theirs", init_missing=("score",))
    hf.save(tmp_path / "scored", config, params)
    assert all(name.startswith(("model.", "score.")) for name in safetensors.read(tmp_path / "scored"))


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path):
    config, params = made()
    path = hf.save(tmp_path / "model", config, {**params, "embed": params["embed"].at[3, 2].set(1e5)})
    held = jax.tree.map(np.asarray, hf.load(path)[1])
    for tree in (hf.mapped(path, dtype=None)[1], held):
        with pytest.raises(ValueError, match="save: embed has numbers that float16 does not hold"):
            hf.save(tmp_path / "narrow", config, tree, "float16")
    assert not (tmp_path / "narrow").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_dtypes(tmp_path, dtype):
    config, params = made()
    path = hf.save(tmp_path / "model", config, params, "bfloat16")
    loaded = hf.load(path, dtype=dtype)[1]
    stored = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), params)
    wanted = jax.tree.map(lambda x: x.astype(dtype or "bfloat16"), stored)
    assert equal(loaded, wanted)


def test_layers_of_both_16_bit_dtypes_are_held_exactly(tmp_path):
    """A stack of bfloat16 and float16 layers is float32 as stored, of which each layer is exact, and is saved again."""
    config, params = made()
    path = hf.save(tmp_path / "model", config, params, dtype="bfloat16")

    def mixed(tensors):
        narrow = lambda name: np.float16 if ".layers.1." in name else ml_dtypes.bfloat16
        return {name: np.asarray(x, np.float32).astype(narrow(name)) for name, x in tensors.items()}

    rewritten(path, mixed)
    stored = {name: np.asarray(x, np.float32) for name, x in safetensors.read(path).items()}
    for config, params in (hf.load(path, dtype=None), hf.mapped(path, dtype=None)[:2]):
        again = hf.save(tmp_path / "again", config, params, dtype="float32")
        assert all(np.array_equal(x, stored[name]) for name, x in safetensors.read(again).items())
        narrow = safetensors.read(hf.save(tmp_path / "narrow", config, params))  # config.json's dtype
        assert {x.dtype for x in narrow.values()} == {np.dtype(ml_dtypes.bfloat16)}
        assert all(np.array_equal(x, stored[name].astype(x.dtype)) for name, x in narrow.items())
    config, params = hf.load(path, dtype=None)
    assert {str(x.dtype) for x in jax.tree.leaves(params["stacks"])} == {"float32"}
    assert str(params["embed"].dtype) == "bfloat16"


def test_stop_tokens_of_both_config_files_are_used(saved):
    (saved / "generation_config.json").write_text('{"eos_token_id": [7, 3, 9]}')
    assert hf.read_config(saved).eos == (3, 7, 9)


def test_without_stop_tokens_those_of_the_tokenizer_are_used_and_saved(tmp_path):
    """A config made with transformers' defaults names none: no completion would end."""
    path = hf.save(tmp_path / "model", *made(eos_token_id=None), tokenizer=tokenizer.character("0123456789+"))
    for name in ("config.json", "generation_config.json"):
        said = json.loads((path / name).read_text())
        assert said.pop("eos_token_id") == 3
        (path / name).write_text(json.dumps(said))
    assert hf.read_config(path).eos == (3,)
    again = hf.save(tmp_path / "again", *hf.load(path), base=path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((again / name).read_text())["eos_token_id"] == 3
    (path / "tokenizer.json").unlink(), (path / "tokenizer_config.json").unlink()
    assert hf.read_config(path).eos == ()


def test_a_config_without_stop_tokens_is_saved_with_those_of_its_base(tmp_path):
    base = hf.save(tmp_path / "base", *made(), tokenizer=tokenizer.character("0123456789+"))
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    path = hf.save(tmp_path / "model", *made(eos_token_id=None), base=base)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((path / name).read_text())["eos_token_id"] == [0, 5, 3]  # 3: its tokenizer's


def test_exports_name_the_end_of_turn_that_training_learns(tmp_path):
    """A base model's files name its end of text alone; the chat template ends a turn with another token."""
    tokens = tokenizer.character("0123456789+")
    tokens.eos_token = "<pad>"
    base = hf.save(tmp_path / "base", *made(eos_token_id=0))
    config, params = hf.load(base)
    written = hf.save(tmp_path / "by recipes", config, params, tokenizer=tokens)
    tokenizer.save(tokens, base)
    copied = hf.save(tmp_path / "converted", config, params, base=base)
    end = tokenizer.end_of_turn(tokens)
    assert end != 0
    for path in (written, copied):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((path / name).read_text())["eos_token_id"] == [0, end]
        assert hf.read_config(path).eos == (0, end)
    assert hf.with_ends(dataclasses.replace(config, vocab=end), tokens).eos == (0,)  # not beyond the vocabulary
    assert hf.with_ends(hf.read_config(written), tokens).eos == (0, end)


def test_loading_holds_no_second_copy(tmp_path):
    config, params = made(hidden_size=128, intermediate_size=256, num_attention_heads=32, num_hidden_layers=8)
    path = hf.save(tmp_path / "model", config, params, "bfloat16")
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    hf.load(path)  # imports and compilation
    tracemalloc.start()
    loaded = hf.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded and peak < 2.5 * largest < 0.5 * total  # JAX frees one leaf while the next is filled


def test_loading_onto_a_mesh_replicates(saved):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = hf.load(saved, mesh=mesh)[1]
    assert all(len(x.devices()) == 8 and x.is_fully_replicated for x in jax.tree.leaves(params))
    assert equal(params, hf.load(saved)[1])


def test_loaded_parameters_can_be_donated(saved):
    params = hf.load(saved)[1]
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(params)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(doubled)} == pointers


# -- saving --------------------------------------------------------------------------------------


def test_weights_are_saved_in_the_dtype_of_the_source(tmp_path):
    for options, dtype, stored in (
        ({}, None, "F32"),
        ({"torch_dtype": "bfloat16"}, None, "BF16"),
        ({"dtype": "float16"}, None, "F16"),
        ({"dtype": "float16"}, "bfloat16", "BF16"),
    ):
        config, params = made(**options)
        path = hf.save(tmp_path / "model", config, params, dtype)
        manifest = json.loads((path / "manifest.json").read_text())
        assert {entry["dtype"] for entry in manifest["tensors"].values()} == {stored}
    with pytest.raises(ValueError, match="dtype must be one of .* got int8"):
        hf.save(tmp_path / "other", config, params, "int8")
    with pytest.raises(ValueError, match="dtype must be one of .* got half-ish"):
        hf.save(tmp_path / "other", config, params, "half-ish")
    assert not (tmp_path / "other").exists()


def test_parameters_must_fit_the_config(tmp_path):
    config, params = made()
    with pytest.raises(ValueError, match=r"save: stacks.0.down must be \[3, 16, 25\], got \[3, 16, 24\]"):
        hf.save(tmp_path / "m", dataclasses.replace(config, ffn=25), params)
    with pytest.raises(ValueError, match="unexpected head"):
        hf.save(tmp_path / "m", dataclasses.replace(config, tied=True), params)
    with pytest.raises(ValueError, match="missing score"):
        hf.save(tmp_path / "m", dataclasses.replace(config, score_head=models.ScoreHead()), params)
    assert not list(tmp_path.iterdir())


def test_the_manifest_describes_the_files(saved):
    manifest = hf.verify(saved)
    tensors = safetensors.read(saved)
    assert manifest["version"] is None and manifest["base"] is None
    assert manifest["bytes"] == sum(x.nbytes for x in tensors.values())
    assert manifest["tensors"]["model.norm.weight"].keys() == {"dtype", "shape", "xxh3_128"}
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="does not match manifest.json; copy"):
        hf.verify(saved)
    described = (saved / "manifest.json").read_bytes()
    rewritten(saved, lambda ts: ts | {"extra": np.ones(1, np.float32)})
    (saved / "manifest.json").write_bytes(described)
    with pytest.raises(ValueError, match="extra only in the manifest or only in the files"):
        hf.verify(saved)
    (saved / "manifest.json").unlink()
    assert hf.verify(saved) is None


def test_tokenizer_and_generation_settings_come_from_the_base(tmp_path):
    config, params = made()
    words = tokenizer.character("0123456789+-=", multiple=32)
    words.chat_template = {"default": words.chat_template, "tool_use": "{{ tools }}" + words.chat_template}
    base = hf.save(tmp_path / "base", config, params, tokenizer=words)
    (base / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [3, 5]}')
    config, params = hf.load(base)
    path = hf.save(tmp_path / "next", config, params, base=base)
    loaded = tokenizer.load(path)
    assert (loaded.encode("12+3"), loaded.chat_template) == (words.encode("12+3"), words.chat_template)
    assert json.loads((path / "generation_config.json").read_text()) == {"temperature": 0.6, "eos_token_id": [3, 5]}
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == [3, 5]
    with pytest.raises(ValueError, match="base must be a checkpoint directory"):
        hf.save(tmp_path / "other", config, params, base=tmp_path / "nowhere")
    # Saving over the base itself: its files are read before anything is replaced.
    before = contents(path)
    hf.save(path, config, params, base=path)
    assert contents(path) == before


def test_a_foreign_directory_is_not_overwritten(tmp_path):
    config, params = made()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(ValueError, match="contains files other than a checkpoint"):
        hf.save(tmp_path / "home", config, params)
    assert contents(tmp_path / "home") == {"letters.txt": b"dear"} and len(list(tmp_path.iterdir())) == 1


def test_what_is_left_of_a_checkpoint_is_replaced(saved):
    config, params = made()
    before = contents(saved)
    for name in ("model.safetensors", "config.json"):
        (saved / name).unlink()
        hf.save(saved, config, params)
        assert contents(saved) == before


def test_a_checkpoint_is_replaced_atomically(saved, tmp_path, monkeypatch):
    config, params = made(torch_dtype="bfloat16")
    before = contents(saved)

    full = OSError("no space left on device")

    def fails(specs, arrays):
        yield next(arrays)
        raise full

    copies = saving.with_copies
    with monkeypatch.context() as patch:
        patch.setattr(saving, "with_copies", lambda *given: (copies(*given)[0], fails(*copies(*given))))
        with pytest.raises(OSError, match="no space left"):
            hf.save(saved, config, params)
    assert contents(saved) == before and len(list(tmp_path.iterdir())) == 1
    hf.save(saved, config, params)
    assert contents(saved) != before and len(list(tmp_path.iterdir())) == 1
    assert hf.verify(saved)


def test_a_published_version_is_a_numbered_directory(tmp_path):
    config, params = made()
    path = hf.write_published(tmp_path / "versions", 4, config, params, "bfloat16")
    assert path == tmp_path / "versions" / "4" and os.listdir(tmp_path / "versions") == ["4"]
    assert json.loads((path / "manifest.json").read_text())["version"] == 4
    assert read_label(path / "manifest.json").startswith("4-")
    plain = hf.save(tmp_path / "plain", config, params, "bfloat16")
    with pytest.raises(ValueError, match=r"without one; write it by hf.write_published\(root, version, config, params"):
        read_label(plain / "manifest.json")
    for version in (5, 6):
        hf.write_published(tmp_path / "versions", version, config, params, "bfloat16")
    assert store.prune(tmp_path / "versions") == [path]
    with pytest.raises(ValueError, match="version must be"):
        hf.write_published(tmp_path / "versions", -1, config, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_host_copy_outlives_the_device_parameters(tmp_path, dtype):
    config, params = made()
    whole = contents(hf.save(tmp_path / "whole", config, params, dtype))
    held = hf.host_copy(config, params, dtype)
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params))
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert contents(hf.save(tmp_path / "held", config, held, dtype)) == whole


def test_a_host_copy_in_the_same_dtype_is_not_a_view():
    config, params = made()
    held = hf.host_copy(config, params)
    assert all(x.flags.owndata and x.flags.writeable for x in jax.tree.leaves(held))


def test_sharded_parameters_give_the_same_files(tmp_path):
    config, params = made()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    sharded = params | {"stacks": [jax.device_put(params["stacks"][0], spread)]}
    one = contents(hf.save(tmp_path / "one", config, params, "bfloat16"))
    assert contents(hf.save(tmp_path / "eight", config, sharded, "bfloat16")) == one


def test_large_models_are_saved_in_shards(tmp_path):
    config, params = made()
    path = hf.save(tmp_path / "model", config, params, shard_bytes=4000)
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 3
    assert equal(hf.load(path)[1], params) and hf.verify(path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize(
    ("family", "stated"),
    [
        ("deepseek_v2", {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        ("minimax_m2", {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_exports_state_what_sglang_needs(family, stated):
    """Published files have these options; those that transformers writes have not."""
    source = {name: value for name, value in tiny_families.hf(family).items() if name not in stated}
    assert stated.items() <= models.config_to_hf(models.config_from_hf(source)).items()
    if family == "deepseek_v2":
        grouped = models.config_from_hf(source | {"topk_method": "group_limited_greedy"})
        assert models.config_to_hf(grouped)["topk_method"] == "group_limited_greedy"
