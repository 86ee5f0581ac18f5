"""`areax convert` of adapters: merged like PEFT, and the closest ones to a difference like a singular value
decomposition; of torch's distributed checkpoints; what may be chosen of the files."""

import enum
import json
import pickle
import socket
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import tiny_families
import torch
import transformers
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from areax import models
from areax.adapters import hf, peft, safetensors, tokenizer
from areax.adapters.commands import convert, dcp, extract, files, inspect
from areax.models import lora


def saved(path, family="qwen3", std=0.2, dtype=None, seed=0, **options):
    config = tiny_families.config(family, **options)
    hf.save(path, config, tiny.weights(models.table(config), std, seed), dtype)
    return path, config


def adapters(path, config, base, rank=3, alpha=5.0, std=0.3, **spec):
    spec = lora.Lora(rank, alpha, **spec)
    peft.save(path, config, tiny.weights(lora.table(models.table(config), spec), std, seed=1), spec, base=str(base))
    return path


def same(one, other):
    """Asserts that two folders have the same files."""
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, dtype, spec",
    [
        ("phi3", "float32", dict(rslora=True)),
        ("phi3", "bfloat16", dict(dora=True)),
        ("qwen3_moe", "bfloat16", dict(rslora=True)),
    ],
    ids=str,
)
def test_merged_adapters_are_those_of_training(family, dtype, spec, tmp_path):
    base, config = saved(tmp_path / "base", family, dtype=dtype)
    folder = adapters(tmp_path / "adapter", config, base, **spec)
    report = convert.convert(folder, tmp_path / "merged", merge=True)
    assert report["family"] == family and report["dtypes"] == [dtype]
    config, params = hf.load(base, dtype=None)
    spec, drawn = peft.load(folder, config)
    hf.save(tmp_path / "wanted", config, lora.merge(params, drawn, spec), base=base)
    for name in ("model.safetensors", "config.json", "manifest.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


@pytest.mark.slow  # to import
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")
def test_merged_adapters_are_those_of_peft(tmp_path):
    """fp32: up to rounding; bf16, where PEFT rounds the change before it adds it, too: one rounding more."""
    import peft as theirs

    for dtype, most in (("float32", 1e-6), ("bfloat16", 2**-7)):
        base, config = saved(tmp_path / dtype, "qwen2", dtype=dtype)
        folder = adapters(tmp_path / f"{dtype} adapter", config, base)
        convert.convert(folder, tmp_path / f"{dtype} merged", merge=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        wanted = theirs.PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
        for name, x in safetensors.read(tmp_path / f"{dtype} merged").items():
            y = wanted[name].float().numpy()
            np.testing.assert_allclose(x.astype(np.float32), y, rtol=0, atol=most * np.abs(y).max())


def test_the_base_of_adapters_may_be_named(tmp_path):
    base, config = saved(tmp_path / "base")
    folder = adapters(tmp_path / "adapter", config, "")
    with pytest.raises(ValueError, match="names no base model; name it with --base"):
        convert.convert(folder, tmp_path / "new", merge=True)
    with pytest.raises(ValueError, match=r"needs its base model, .*gone \(.*name a copy with --base"):
        convert.convert(folder, tmp_path / "new", merge=True, base=str(tmp_path / "gone"))
    wide, _ = saved(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ValueError, match=r"must be \[48, 3\] by config.json, got \[32, 3\]"):
        convert.convert(folder, tmp_path / "new", merge=True, base=str(wide))
    with pytest.raises(ValueError, match="holds adapters; merge them into their base with --merge"):
        convert.convert(folder, tmp_path / "new")
    with pytest.raises(ValueError, match=r"--merge needs a folder with adapter_config.json"):
        convert.convert(base, tmp_path / "new", merge=True)
    with pytest.raises(ValueError, match="--base is for adapters and runs"):
        convert.convert(base, tmp_path / "new", base=str(base))
    large = adapters(tmp_path / "large", config, str(base), alpha=3e38, std=9.0)
    with pytest.raises(
        ValueError, match=r"merge: .* with its adapters has \d+ of \d+ numbers that float32 does not hold; use"
    ):
        convert.convert(large, tmp_path / "new", merge=True)
    about = json.loads((large / "adapter_config.json").read_text())
    (large / "manifest.json").unlink()
    (large / "adapter_config.json").write_text(json.dumps({**about, "lora_alpha": 1e39}))
    with pytest.raises(ValueError, match=r"lora_alpha must be a number above 0 that float32 holds, got 1e\+39"):
        convert.convert(large, tmp_path / "new", merge=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "wide", "large"}
    convert.convert(folder, tmp_path / "new", merge=True, base=str(base), shard_size="20kB")
    assert len([*(tmp_path / "new").glob("*.safetensors")]) > 2


def test_a_base_that_cannot_be_named_is_said_in_one_line(tmp_path):
    """Too long a name, no file that can be read; and a name that is not the one that was written."""
    base, config = saved(tmp_path / "base")
    folder = adapters(tmp_path / "adapter", config, base)
    about = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(about.replace("base", "bare"))
    with pytest.raises(ValueError, match=r"adapter_config.json does not match manifest.json; copy"):
        convert.convert(folder, tmp_path / "new", merge=True)
    assert "does not match manifest.json" in inspect.inspect(folder)["merge"]
    (folder / "manifest.json").unlink()
    for name in ("x" * 5000, "/proc/self/mem", str(tmp_path / "x\0")):
        (folder / "adapter_config.json").write_text(json.dumps(json.loads(about) | {"base_model_name_or_path": name}))
        with pytest.raises(
            ValueError, match=r"adapter: needs its base model, .* \(.*\); name a copy with --base$"
        ) as said:
            convert.convert(folder, tmp_path / "new", merge=True)
        assert len(str(said.value)) < 1000
        assert inspect.inspect(folder)["merge"] == "its base is not here"


def test_merged_adapters_have_the_tokenizer_that_they_were_trained_with(tmp_path):
    """As TRL and others save it beside adapters: a base model has no chat template, and does not end turns."""
    base, config = saved(tmp_path / "base", vocab_size=288, eos_token_id=0)
    plain, chat = tokenizer.byte_level(), tokenizer.byte_level()
    plain.eos_token, plain.chat_template = tokenizer.PAD, None
    tokenizer.save(plain, base)
    folder = adapters(tmp_path / "adapter", config, base)
    convert.convert(folder, tmp_path / "before", merge=True)
    tokenizer.save(chat, folder)
    convert.convert(folder, tmp_path / "merged", merge=True)
    before, merged = (tokenizer.load(tmp_path / name) for name in ("before", "merged"))
    assert (before.chat_template, merged.chat_template) == (None, chat.chat_template)
    ends = [json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("before", "merged")]
    assert ends == [{"eos_token_id": 0}, {"eos_token_id": [0, chat.eos_token_id]}]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_ends_early_leaves_nothing(error, tmp_path, monkeypatch):
    base, config = saved(tmp_path / "base")
    folder = adapters(tmp_path / "adapter", config, base)
    tuned, _ = saved(tmp_path / "tuned", seed=3)
    before, written = sorted(tmp_path.iterdir()), []

    def put(file, data, put=safetensors._put_hashed):
        written.append(file.name)
        if len(written) > 5:
            raise error("half-way")
        return put(file, data)

    monkeypatch.setattr(safetensors, "_put_hashed", put)
    for source, options in ((base, {}), (folder, {"merge": True}), (tuned, {"extract": 2, "base": str(base)})):
        written.clear()
        with pytest.raises(error, match="half-way"):
            convert.convert(source, tmp_path / "new", **options)
        assert len(written) == 6 and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_extracted_adapters_are_the_truncated_decomposition(family, tmp_path):
    """numpy's decomposition of each matrix in float64; with the merged ones of rank 3 all but rounding is kept."""
    base, config = saved(tmp_path / "base", family)
    tuned, _ = saved(tmp_path / "tuned", family, seed=7)
    report = convert.convert(tuned, tmp_path / "extracted", extract=2, base=str(base))
    (_, before), (_, after) = hf.load(base), hf.load(tuned)
    spec, found = peft.load(tmp_path / "extracted", config)
    assert (spec.rank, spec.scale) == (2, 1.0) and report["kept_of"].keys() == set(spec.targets)
    leaves = zip(*map(jax.tree.leaves, (before, after)), strict=True)
    kept, whole = 0.0, sum(float(np.sum((np.asarray(y, np.float64) - np.asarray(x)) ** 2)) for x, y in leaves)
    for x, y, pairs in zip(before["stacks"], after["stacks"], found["stacks"], strict=True):
        for name in spec.targets:
            if name not in x:
                continue
            difference = np.asarray(y[name], np.float64) - np.asarray(x[name])
            u, s, v = np.linalg.svd(difference)
            wanted = (u[..., :2] * s[..., None, :2]) @ v[..., :2, :]
            got = np.matmul(pairs[f"{name}_b"], pairs[f"{name}_a"], dtype=np.float64)
            np.testing.assert_allclose(got, wanted, atol=1e-6 * np.abs(wanted).max())
            kept += float(np.sum(s[..., :2] ** 2))
    np.testing.assert_allclose(report["kept"], kept / whole, rtol=1e-5)
    assert 0 < report["outside"] < 1 - report["kept"]


def test_extracted_adapters_give_back_merged_ones(tmp_path):
    base, config = saved(tmp_path / "base", "qwen3_moe")
    convert.convert(adapters(tmp_path / "adapter", config, base), tmp_path / "tuned", merge=True)
    report = convert.convert(tmp_path / "tuned", tmp_path / "again", extract=4, base=str(base))
    assert report["kept"] > 1 - 1e-9 and report["outside"] == 0 and report["rank"] == 4
    convert.convert(tmp_path / "again", tmp_path / "merged", merge=True)
    for name, x in safetensors.read(tmp_path / "merged").items():
        np.testing.assert_allclose(x, safetensors.read(tmp_path / "tuned")[name], atol=2e-6)


def test_what_cannot_be_extracted_is_refused(tmp_path):
    base, config = saved(tmp_path / "base")
    wide, _ = saved(tmp_path / "wide", hidden_size=48)
    for source, options, said in (
        (base, dict(base=str(base)), "must differ from its base"),
        (wide, dict(base=str(base)), r"must have the shapes of its base .*, got embed \(64, 48\) and \(64, 32\)"),
        (wide, dict(), "--extract needs --base"),
        (wide, dict(base=str(base), extract=-1), "must be a rank of 1 to 4,096, got -1"),
    ):
        with pytest.raises(ValueError, match=said):
            convert.convert(source, tmp_path / "new", **{"extract": 2} | options)


def test_of_large_matrices_only_what_is_kept_is_decomposed():
    """Against numpy's decomposition: of falling singular values, and of noise, whose are alike."""
    rng = np.random.default_rng(0)
    (u, _), (v, _) = (np.linalg.qr(rng.normal(size=(n, 300))) for n in (400, 300))
    falling = (u / np.arange(1, 301)) @ v.T
    for matrix in (falling, falling.T, rng.normal(size=(400, 300))):
        s = np.linalg.svd(matrix, compute_uv=False)
        b, a = extract.truncated(matrix, 16)
        kept = np.sum(s**2) - np.sum((matrix - b @ a) ** 2)
        assert extract.PART * 16 < 300 and abs(1 - kept / np.sum(s[:16] ** 2)) < 1e-12


def test_a_matrix_of_low_rank_has_zeros_beside():
    rng = np.random.default_rng(0)
    for shape in ((5, 9), (9, 5)):
        b, a = extract.truncated(np.zeros(shape), 3)
        assert b.shape == (shape[0], 3) and a.shape == (3, shape[1]) and not b.any() and not a.any()
        full = rng.normal(size=shape)
        b, a = extract.truncated(full, 8)  # more than it has
        np.testing.assert_allclose(b @ a, full, atol=1e-12)
        assert not b[:, 5:].any() and not a[5:].any()


OTHERS = "qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "glm4_moe", "deepseek_v2", "deepseek_v3", "minimax_m2"


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "mixtral", "nemotron_h", *(pytest.param(family, marks=pytest.mark.wide) for family in OTHERS)],
)
def test_experts_may_be_fused(family, tmp_path):
    """As transformers hold them in memory: it and areax read both, and from either come the same files."""
    apart, config = saved(tmp_path / "apart", family)
    report = convert.convert(apart, tmp_path / "fused", experts="fused")
    stored = safetensors.read(tmp_path / "fused")
    gated = family != "nemotron_h"
    name = "experts.gate_up_proj" if gated else "experts.up_proj"
    first = next(x for key, x in stored.items() if key.endswith(name))
    assert first.shape[:2] == (config.experts, config.expert_ffn * (1 + gated))
    assert report["tensors"] == len(stored) < len(safetensors.read(apart))
    convert.convert(tmp_path / "fused", tmp_path / "again")
    same(tmp_path / "again", apart)
    logits = []
    for path in (apart, tmp_path / "fused"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            logits.append(model(torch.arange(9)[None]).logits.numpy())
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_embeddings_may_be_untied_and_tied(tmp_path):
    tied, _ = saved(tmp_path / "tied", "qwen3")
    convert.convert(tied, tmp_path / "untied", embeddings="untied")
    stored = safetensors.read(tmp_path / "untied")
    np.testing.assert_array_equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "untied/config.json").read_text())["tie_word_embeddings"] is False
    assert hf.load(tmp_path / "untied")[0].tied is False
    convert.convert(tmp_path / "untied", tmp_path / "again", embeddings="tied")
    same(tmp_path / "again", tied)
    other, _ = saved(tmp_path / "other", "qwen3", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="--embeddings tied needs a lm_head.weight that equals the embeddings"):
        convert.convert(other, tmp_path / "new", embeddings="tied")


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@ALONE
@pytest.mark.parametrize("prefix, family", [("", "qwen3"), ("model.", "qwen3_moe")])
def test_a_checkpoint_of_fsdp2_is_converted(prefix, family, tmp_path, monkeypatch):
    """As transformers' module has its tensors, with experts fused, beside an optimiser's; the same files come out."""
    base, config = saved(tmp_path / "base", family)
    module = transformers.AutoModelForCausalLM.from_pretrained(base)
    state = {f"{prefix}{name}": x for name, x in module.state_dict().items()}
    state["optimizer.state.model.embed_tokens.weight.exp_avg"] = torch.ones(3)
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    read, load = [], checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda into, **how: (read.extend(into), load(into, **how)))
    convert.convert(tmp_path / "dcp", tmp_path / "converted", base=str(base))
    same(tmp_path / "converted", base)
    assert len(read) <= 2 * (len(state) - 1)  # not once for each expert
    with pytest.raises(ValueError, match="name that model's folder with --base"):
        convert.convert(tmp_path / "dcp", tmp_path / "new")
    wide, _ = saved(tmp_path / "wide", family, hidden_size=48)
    with pytest.raises(ValueError, match=r"must be \[64, 48\] by config.json, got \[64, 32\]"):
        convert.convert(tmp_path / "dcp", tmp_path / "new", base=str(wide))
    state[f"{prefix}model.norm.weight"][0] = torch.inf
    checkpoint.save(state, checkpoint_id=tmp_path / "inf", no_dist=True)
    with pytest.raises(ValueError, match="1 of the 32 numbers of .*model.norm.weight are not finite"):
        convert.convert(tmp_path / "inf", tmp_path / "new", base=str(base))
    assert not (tmp_path / "new").exists()


@ALONE
def test_other_distributed_checkpoints_are_refused(tmp_path):
    """Other names, and an index that would run a program when it is read."""
    base, _ = saved(tmp_path / "base")
    checkpoint.save({"decoder.layers.0.weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match="must have Hugging Face's names, .* got decoder.layers.0.weight; convert it"):
        convert.convert(tmp_path / "dcp", tmp_path / "new", base=str(base))
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93\x8c\x04true\x85R."
    bare = pickle.dumps(metadata.Metadata.__new__(metadata.Metadata))
    for index in (b"", b"\x80\x04.", b"\x80\x04\x95\x01", pickle.dumps({}), pickle.dumps(print), dotted, bare):
        (tmp_path / "dcp/.metadata").write_bytes(index)
        with pytest.raises(ValueError, match="must be an index of torch.distributed.checkpoint, got"):
            convert.convert(tmp_path / "dcp", tmp_path / "new", base=str(base))
    assert not (tmp_path / "new").exists()


class EarlyPython311(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_indexes_that_early_releases_of_python_311_wrote_are_read(tmp_path):
    properties = [
        metadata.TensorProperties(memory_format=each) for each in (torch.contiguous_format, torch.channels_last)
    ]
    wanted = metadata.Metadata({str(n): metadata.BytesStorageMetadata() for n in range(2)}, properties, {})
    with open(tmp_path / ".metadata", "wb") as file:
        EarlyPython311(file).dump(wanted)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert dcp._index(tmp_path) == wanted


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_indexes_with_paths_of_any_python_are_read(module, tmp_path):
    """Python 3.13 pickles paths as those of pathlib._local, which others lack."""
    wanted = metadata.Metadata({}, None, {}, storage_meta=metadata.StorageMeta(checkpoint_id=Path("step")))
    written = pickle.dumps(wanted, 2)
    names = {one: f"c{one}\nPosixPath\n".encode() for one in ("pathlib", "pathlib._local")}
    here = next(name for name in names.values() if name in written)
    (tmp_path / ".metadata").write_bytes(written.replace(here, names[module]))
    assert dcp._index(tmp_path).storage_meta.checkpoint_id == Path("step")


class Calls:
    """Pickled, a call, whose result gets attributes if some are given."""

    def __init__(self, function, *args, **attributes):
        self.call = function, args, (None, attributes)

    def __reduce__(self):
        return self.call if self.call[2][1] else self.call[:2]


FORMATS = metadata._MEM_FORMAT_ENCODING


@pytest.mark.parametrize(
    "attack, said",
    [
        (Calls(getattr, getattr, "__call__"), "it asks for '__call__' of <function"),
        (Calls(getattr, Calls(getattr, FORMATS, "TORCH_CHANNELS_LAST"), "name"), "it asks for 'name' of <_MEM"),
        (Calls(getattr, Calls(getattr, FORMATS, "__class__"), "mro"), "it asks for '__class__' of <enum"),
        (Calls(getattr, FORMATS, "__init__"), "it asks for '__init__' of"),
        (Calls(getattr, FORMATS, "_member_map_"), "it asks for '_member_map_' of"),
        (Calls(getattr, FORMATS, "TORCH_CHANNELS_LAST.__class__"), "it asks for 'TORCH_CHANNELS_LAST.__class__' of"),
        (Calls(getattr, FORMATS, 1), "it asks for 1 of"),
        (Calls(getattr, FORMATS, "none", FORMATS), "takes 2 positional arguments"),
        (Calls(getattr, metadata.Metadata, "__init__"), "it asks for '__init__' of <class"),
        (Calls(getattr, torch.Size, "__new__"), "it asks for '__new__' of <class"),
        (Calls(getattr, socket.AddressFamily, "AF_INET"), "it asks for socket.AddressFamily"),
        (b"\x80\x04\x8c\x08builtins\x8c\x10getattr.__call__\x93.", "it asks for builtins.getattr.__call__"),
        (Calls(getattr, FORMATS, "TORCH_CHANNELS_LAST", _value_=0), "it changes <_MEM_FORMAT"),
        (Calls(torch.Size, (1,), __doc__="x"), "it changes torch.Size"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93N}\x8c\x01xK\x01s\x86b.", "it changes <function"),
        (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x01xK\x01s\x86b.",
            "it changes <class",
        ),
    ],
)
def test_an_index_gets_no_attribute_but_members_and_changes_no_class(attack, said, tmp_path):
    before = dict(vars(metadata.Metadata))
    (tmp_path / ".metadata").write_bytes(attack if isinstance(attack, bytes) else pickle.dumps(attack, 4))
    with pytest.raises(ValueError, match="must be an index of torch.distributed.checkpoint, got") as error:
        dcp._index(tmp_path)
    assert said in str(error.value) and vars(metadata.Metadata) == before


def doubled(times):
    """A list that holds 2 ** times lists."""
    made = []
    for _ in range(times):
        made = [made, made]
    return made


@pytest.mark.parametrize(
    "attack, said",
    [
        (Calls(getattr, FORMATS, doubled(64)), "it asks for a list of <enum"),
        (Calls(list), "it asks for builtins.list"),
        (b"\x80\x02" + pickle.dumps(doubled(64), 2)[2:-1] + b"}b.", "it changes a list"),
        (metadata.Metadata({}, storage_data={1: _StorageInfo(doubled(64), 0, 0)}), "got a list; use another"),
        (metadata.Metadata({}, storage_data={1: _StorageInfo("x" * 9999, 0, 0)}), "got 'xxx"),
        (Calls(torch.device, "a\nb" * 9999), "Invalid device string: 'a ba ba"),
        (b"cos\n" + b"x" * 9999 + b"\n.", "it asks for os.xxx"),
        (b"", "got another (EOFError: )"),
    ],
)
def test_what_an_index_holds_makes_no_refusal_long(attack, said, tmp_path):
    (tmp_path / ".metadata").write_bytes(attack if isinstance(attack, bytes) else pickle.dumps(attack, 4))
    with pytest.raises(ValueError, match="use another checkpoint$") as error:
        dcp._index(tmp_path)
    assert said in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_indexes_that_python_313_wrote_are_read(tmp_path):
    wanted = metadata.Metadata({}, storage_data={}, storage_meta=metadata.StorageMeta(checkpoint_id=Path("a")))
    written = pickle.dumps(wanted, 2)
    assert written.count(b"cpathlib\n") == 1 or sys.version_info[:2] == (3, 13)
    (tmp_path / ".metadata").write_bytes(written.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert dcp._index(tmp_path) == wanted


class Runs:
    """Pickled, a program that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@ALONE
def test_torch_unpickles_no_index_and_fills_every_tensor(tmp_path):
    """It would read another index where it does not like the first one, and leave memory as it is that has no part."""
    base, _ = saved(tmp_path / "base")
    state = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file, made = tmp_path / "dcp/.metadata", tmp_path / "made"
    (tmp_path / "dcp/__0.metadata").write_bytes(pickle.dumps(Runs(made)))
    good = file.read_bytes()
    index = pickle.loads(good)
    index.storage_meta = 5
    file.write_bytes(pickle.dumps(index))
    convert.convert(tmp_path / "dcp", tmp_path / "fine", base=str(base))
    assert not made.exists()
    first = lambda x: next(iter(x.storage_data.values()))
    for spoil, said in (
        (lambda x: x.state_dict_metadata["model.norm.weight"].chunks.clear(), "numbers of model.norm.weight are not"),
        (lambda x: setattr(first(x), "relative_path", "../x"), r"parts must be .*got '\.\./x'"),
        (lambda x: setattr(x, "storage_data", None), "must be an index"),
    ):
        index = pickle.loads(good)
        spoil(index)
        file.write_bytes(pickle.dumps(index))
        with pytest.raises(ValueError, match=said):
            convert.convert(tmp_path / "dcp", tmp_path / "new", base=str(base))
    file.write_bytes(good)
    part = next((tmp_path / "dcp").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read: .*; use another checkpoint"):
        convert.convert(tmp_path / "dcp", tmp_path / "new", base=str(base))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("20kb", 20_000), ("7B", 7)])
def test_sizes(text, size):
    assert files.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "-1GB", "5 XB", "nanGB", "9" * 400 + "GB"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="--shard-size must be a size such as 5GB or 500MB, got"):
        files.Files(shard_size=text)
