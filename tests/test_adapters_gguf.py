"""GGUF files: round trips of every family, tokenizers, blocks as the library makes them, and what is refused."""

import json
import os
import re
import resource
import signal
import struct
import sys
import types
from pathlib import Path

import gguf as library
import jax
import numpy as np
import pytest
import tiny
from gguf_models import (
    FAMILIES,
    RECORDED,
    RECORDED_FAMILIES,
    RECORDED_IDS,
    RECORDED_TEXTS,
    byte_level,
    model,
    recorded,
    sentencepiece,
)
from tokenizers import normalizers

from areax import models
from areax.adapters import cli, gguf, hf, safetensors, tokenizer
from areax.adapters.commands import check, convert, inspect
from areax.adapters.gguf import container, tokenizer_files, tokenizer_metadata, vocabulary, writing
from areax.adapters.runtime import hub


def there_and_back(path: Path, kind: str) -> Path:
    file = path.parent / f"{path.name}.{kind}.gguf"
    convert.convert(path, file, gguf_kind=kind)
    back = path.parent / f"{path.name}.{kind}"
    convert.convert(file, back)
    return back


SLOW = {"qwen2"}  # its tokenizer imports torch


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]
)
def test_a_model_comes_back_as_it_was(tmp_path, name):
    path = model(tmp_path / "model", name)
    back = there_and_back(path, "f32")
    one, other = (safetensors.read(folder) for folder in (path, back))
    assert one.keys() == other.keys()
    atol = 1e-6 if "gemma" in name else 0  # norms are stored larger by 1, which rounds them
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_allclose(other[key], one[key], rtol=0, atol=atol if "norm" in key else 0, err_msg=key)
    wanted, got = (hf.read_config(folder) for folder in (path, back))
    same = ("records", "embed_scale", "residual_scale", "logit_scale", "logit_softcap", "norm_eps", "context", "eos")
    if name not in ("mistral",):  # which are files of llama
        assert wanted.family == got.family
    for field in (*same, "tied", "qkv_bias", "activation", "norm_offset"):
        assert getattr(wanted, field) == getattr(got, field), field
    assert hf.verify(back)


@pytest.mark.parametrize("kind, dtype", [("bf16", "bfloat16"), ("f16", "float16")])
def test_16_bits_come_back_as_they_were(tmp_path, kind, dtype):
    path = model(tmp_path / "model", "qwen3_moe", dtype)
    back = there_and_back(path, kind)
    one, other = (safetensors.read(folder) for folder in (path, back))
    assert all(np.array_equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_are_those_of_the_library(tmp_path, kind):
    path = model(tmp_path / "model", "qwen3_moe", moe_intermediate_size=48)  # experts' last axes: 64 and 48
    file = tmp_path / "x.gguf"
    convert.convert(path, file, gguf_kind=kind)
    weights, stored = safetensors.read(path), {tensor.name: tensor for tensor in library.GGUFReader(file).tensors}
    type_ = library.GGMLQuantizationType[kind.upper()]
    wanted = library.quants.quantize(np.array(weights["model.layers.1.self_attn.q_proj.weight"]), type_)
    assert np.array_equal(stored["blk.1.attn_q.weight"].data, wanted)
    up = [np.array(weights[f"model.layers.1.mlp.experts.{e}.up_proj.weight"]) for e in range(4)]
    assert np.array_equal(stored["blk.1.ffn_up_exps.weight"].data, library.quants.quantize(np.stack(up), type_))
    types = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert types["output.weight"] == "Q8_0" and types["token_embd.weight"] == kind.upper()
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down_exps.weight"] == "F16"  # 48 is no multiple of 32
    convert.convert(file, tmp_path / "back", "float32")
    back = safetensors.read(tmp_path / "back")["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(back, library.quants.dequantize(wanted, type_))


@pytest.mark.parametrize("type_", [t.name for t in library.quants._type_traits])
def test_every_type_is_dequantised(tmp_path, type_):
    rng, kind = np.random.default_rng(0), library.GGMLQuantizationType[type_]
    block, size = library.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 60, (3, 2 * size), np.uint8)
    writer = library.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    x = container.read(tmp_path / "x.gguf").tensors["x"]
    assert x.shape == (3, 2 * block)
    np.testing.assert_array_equal(x[...].astype(np.float32), library.quants.dequantize(raw, kind))


TEXTS = (
    "the thing and",
    "  a  b\n\n\tc 12345",
    "é日本語 😀👍🏽 I'm",
    "<|im_start|>the<|im_end|> <think>x",
    "",
    " ",
    "<s>a</s>",
)


@pytest.mark.parametrize("pre", dict.fromkeys(vocabulary.SPLITS[name] for name in vocabulary.SPLITS))
def test_a_byte_level_tokenizer_comes_back(tmp_path, pre):
    name = next(name for name, split in vocabulary.SPLITS.items() if split == pre)
    tokens = byte_level(name)
    values, _ = tokenizer_metadata.metadata(tokens, 320, [])
    assert values["tokenizer.ggml.pre"] == name
    assert_same_tokenizer(there_and_back(model(tmp_path / "model", "qwen3", tokens=tokens), "f16"), tokens)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_sentencepiece_tokenizer_comes_back(tmp_path, prefix):
    tokens = sentencepiece(prefix)
    back = there_and_back(model(tmp_path / "model", "gemma3_text", tokens=tokens), "f16")
    assert_same_tokenizer(back, tokens)
    made, whole = (json.loads(one.backend_tokenizer.to_str()) for one in (tokenizer.load(back), tokens))
    assert made["model"] == whole["model"] and made["normalizer"] == whole["normalizer"]


def assert_same_tokenizer(folder, tokens):
    back = tokenizer.load(folder)
    for text in TEXTS:
        assert back.encode(text) == tokens.encode(text), text
        assert back.decode(back.encode(text)) == tokens.decode(tokens.encode(text))
    for name in ("bos", "eos", "pad", "unk"):
        if getattr(tokens, f"{name}_token_id") is not None:
            assert getattr(back, f"{name}_token_id") == getattr(tokens, f"{name}_token_id")
    flags = lambda one: {id: token.special for id, token in one.added_tokens_decoder.items()}
    assert flags(back) == flags(tokens)
    assert back.chat_template == tokens.chat_template


def test_chat_templates_and_ends_come_back(tmp_path):
    tokens = byte_level()
    tokens.chat_template = {"default": "a", "tool_use": "b"}
    tokens.bos_token = "<|im_start|>"
    path = model(tmp_path / "model", "qwen3", tokens=tokens, eos_token_id=[258, 256])
    back = there_and_back(path, "f16")
    assert tokenizer.load(back).chat_template == {"default": "a", "tool_use": "b"}
    assert set(hf.read_config(back).eos) == set(hf.read_config(path).eos) > {258, 256}
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(bytes of a good file, its path)."""
    folder = tmp_path_factory.mktemp("small")
    path = model(folder / "model", "qwen3", num_hidden_layers=1)
    convert.convert(path, folder / "x.gguf", gguf_kind="q8_0")
    return (folder / "x.gguf").read_bytes(), folder / "x.gguf"


def test_a_truncated_file_is_refused(small, tmp_path):
    data, _ = small
    for size in [*range(0, 4000, 97), *range(4000, len(data), 4999), len(data) - 40]:
        (tmp_path / "x.gguf").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"x\.gguf: (half-written or damaged|a GGUF file must begin)"):
            gguf.opened(tmp_path / "x.gguf")


def test_damaged_bytes_do_not_crash(small, tmp_path):
    data, rng = small[0], np.random.default_rng(0)
    start = data.index(b"output.weight") - 5000
    for _ in range(200):
        changed = bytearray(data)
        for at in (*rng.integers(0, 600, 2), *rng.integers(start, start + 6000, 2)):
            changed[at] = rng.integers(0, 256)
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            file, config, tensors = gguf.opened(tmp_path / "x.gguf")
        except ValueError as error:
            assert "\n" not in str(error) and "x.gguf" in str(error)


def number(data: bytes, key: bytes, value: int, form: str = "<I") -> bytes:
    """The file with a number behind a key, and its type, replaced."""
    at = data.index(key) + len(key) + 4
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: b"GGML" + d[4:], "must begin with GGUF"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version must be one of"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "half-written or damaged"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], "half-written or damaged"),
        (lambda d: d.replace(b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0qwen3",
                             b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba"), "architecture must be one of"),
        (lambda d: number(d, b"tokenizer.ggml.tokens", 1 << 50, "<4xQ"), "half-written or damaged"),
        (lambda d: number(d, b"qwen3.block_count", 2), "missing model.layers.1."),
        (lambda d: number(d, b"qwen3.embedding_length", 128), "must be"),
        (lambda d: number(d, b"qwen3.block_count", 0), "must be one number above 0"),
        (lambda d: number(d, b"qwen3.attention.value_length", 7), "as long as what rotates"),
        (lambda d: d.replace(b"qwen3.rope.freq_base", b"qwen3.rope.freq_bose"), "freq_bose is not implemented"),
        (lambda d: d.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "blk.0.attn_x.weight is no tensor"),
        (lambda d: d.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "is there twice"),
        (lambda d: d.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0other"), "pre must be one of"),
        (lambda d: number(d, b"tokenizer.ggml.eos_token_id", 1 << 20), "must be below"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(small, tmp_path, change, message):
    data, _ = small
    changed = change(data)
    assert changed != data
    (tmp_path / "x.gguf").write_bytes(changed)
    with pytest.raises(ValueError, match=message) as found:
        convert.convert(tmp_path / "x.gguf", tmp_path / "out")
    assert "\n" not in str(found.value) and not (tmp_path / "out").exists()


def test_an_offset_beyond_the_file_is_refused(small, tmp_path):
    data, _ = small
    at = data.index(b"output.weight") + len(b"output.weight") + 4 + 16 + 4
    for offset, message in ((1 << 62, "the file at"), (33, "at the offset 33"), (32, "overlap")):
        (tmp_path / "x.gguf").write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])
        with pytest.raises(ValueError, match=message):
            container.read(tmp_path / "x.gguf")


def rewritten(source: Path, path: Path, values: dict, tensors: dict) -> Path:
    """A file with other values and tensors (type, bytes); None takes one away."""
    file = container.read(source)
    writer = library.GGUFWriter(path, "qwen3")
    for key, value in (file.metadata | values).items():
        if key != "general.architecture" and value is not None:
            writing._add(writer, key, value)
    for name, found in ({name: (x.kind, np.array(x.raw)) for name, x in file.tensors.items()} | tensors).items():
        if found is not None:
            writer.add_tensor(name, found[1], raw_dtype=library.GGMLQuantizationType[found[0]])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def f32(*numbers: float) -> tuple[str, np.ndarray]:
    return "F32", np.array(numbers, np.float32).view(np.uint8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, "eos_token_id must be a whole number, got \\[1, 2\\]"),
        ({"tokenizer.ggml.eot_token_id": 1 << 20}, "eot_token_id must be below 288"),
        ({"tokenizer.ggml.padding_token_id": True}, "padding_token_id must be a whole number, got True"),
        ({"tokenizer.ggml.pre": ["qwen2"]}, "pre must be a text"),
        ({"tokenizer.chat_template": 3}, "chat_template must be a text, got 3"),
        ({"tokenizer.chat_template.tools": ["a"]}, "tools must be a text"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token must be true or false, got 'no'"),
        ({"tokenizer.ggml.add_bos_token": True}, "needs tokenizer.ggml.bos_token_id, which is missing"),
        ({"split.count": "3"}, "split.count must be a whole number"),
        ({"split.count": 3, "split.no": "0"}, "split.no must be a whole number"),
        ({"general.alignment": True}, "alignment must be a whole number, got True"),
        ({"output_norm.weight": None}, "missing model.norm.weight"),
        ({"blk.0.attn_k_norm.weight": f32(*[1.0] * 16)}, r"k_norm.weight must be \[32\] by the metadata, got \[16\]"),
        ({"blk.0.attn_k_norm.weight": f32(*[np.nan] * 32)}, "k_norm.weight must be finite, got 32 numbers"),
        (
            {"output_norm.weight": ("F64", np.full(64, 1e300).view(np.uint8))},
            "64 numbers that are not in (bfloat16|float32)",
        ),
    ],
)
def test_values_and_tensors_of_other_kinds_are_refused(small, tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = {key: value for key, value in changes.items() if key.endswith(".weight")}
    file = rewritten(small[1], tmp_path / "x.gguf", {k: v for k, v in changes.items() if k not in tensors}, tensors)
    for use in (lambda: convert.convert(file, tmp_path / "out"), lambda: hub.folder(file)):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: .*{message}"):
            use()
    assert not (tmp_path / "out").exists()
    assert not [*(tmp_path / "cache").rglob("config.json")]


def test_named_templates_come_back_without_a_default(small, tmp_path):
    values = {"tokenizer.chat_template": None, "tokenizer.chat_template.tool_use": "x"}
    convert.convert(rewritten(small[1], tmp_path / "x.gguf", values, {}), tmp_path / "back")
    assert tokenizer.load(tmp_path / "back").chat_template == {"tool_use": "x"}


def test_names_of_a_file_do_not_control_the_terminal(small, tmp_path, capsys):
    file = rewritten(small[1], tmp_path / "x.gguf", {}, {"\x1b[31mred": f32(1.0)})
    assert cli.main(["convert", str(file), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert r"\x1b[31mred is no tensor" in said and "\x1b" not in said


PLAIN = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": []}


def test_a_part_of_a_file_and_a_template_with_a_path_are_refused(tmp_path):
    for name, value, message in (
        ("split.count", 3, "llama-gguf-split"),
        ("tokenizer.chat_template./../x", "a", "plain"),
    ):
        writer = library.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
            write()
        writer.close()
        with pytest.raises(ValueError, match=message):
            file = container.read(tmp_path / "x.gguf")
            file.metadata.update({f"tokenizer.ggml.{key}": value for key, value in PLAIN.items()})
            file.metadata["tokenizer.chat_template"] = "a"
            tokenizer_files.files(file, 1)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mistral", {"sliding_window": 64}, "without a sliding window, got one of 64"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob True alone, got False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("gemma3_text", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 32 for granted"),
        ("olmo2", {"head_dim": 32}, "with head_dim 16 here"),
        ("granite", {"attention_bias": True}, "attention_bias"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "every fourth layer"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of the kind dynamic"),
    ],
)
def test_what_llama_cpp_computes_in_another_way_is_refused(tmp_path, name, changes, message):
    path = model(tmp_path / "model", name, **changes)
    with pytest.raises(ValueError, match=message):
        convert.convert(path, tmp_path / "x.gguf", gguf_kind="f16")
    assert [*tmp_path.iterdir()] == [path]


def test_families_tokenizers_and_options_that_do_not_fit_are_refused(tmp_path):
    path = tiny.model(tmp_path / "characters")
    with pytest.raises(ValueError, match="writes tokenizers of the kind BPE, got WordLevel"):
        convert.convert(path, tmp_path / "x.gguf", gguf_kind="f16")
    seed = tiny.model(tmp_path / "seed", model_type="seed_oss")
    with pytest.raises(ValueError, match="--gguf writes models of llama, .*, got seed_oss"):
        convert.convert(seed, tmp_path / "x.gguf", gguf_kind="f16")
    with pytest.raises(ValueError, match="--gguf must be one of f32, f16, bf16, q8_0, q4_0, got 'q5_1'"):
        convert.convert(path, tmp_path / "x.gguf", gguf_kind="q5_1")
    with pytest.raises(ValueError, match="--gguf decides how weights are stored"):
        convert.convert(path, tmp_path / "x.gguf", "float16", gguf_kind="f16")
    tokens = byte_level()
    tokens.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="does not change texts by"):
        tokenizer_metadata.metadata(tokens, 320, [])
    with pytest.raises(ValueError, match="at most 256 ids"):
        tokenizer_metadata.metadata(byte_level(), 256, [])
    with pytest.raises(ValueError, match="needs a tokenizer with merges"):
        tokenizer_metadata.metadata(tokenizer.byte_level(), 320, [])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda made: made["model"].update(dropout=0.1), "has no dropout, got 0.1"),
        (lambda made: made["model"].update(end_of_word_suffix="</w>"), "has no end_of_word_suffix"),
        (lambda made: made["added_tokens"][0].update(single_word=True), "or are whole words alone"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(change, message):
    tokens = byte_level()
    made = json.loads(tokens.backend_tokenizer.to_str())
    change(made)
    fake = types.SimpleNamespace(backend_tokenizer=types.SimpleNamespace(to_str=lambda: json.dumps(made)))
    with pytest.raises(ValueError, match=message):
        tokenizer_metadata.metadata(fake, 320, [])


def test_ends_and_names_of_templates_that_are_not_read_again_are_refused():
    tokens = byte_level()
    with pytest.raises(ValueError, match="ends of a text must be below 320, the model's tokens, got 1000000"):
        tokenizer_metadata.metadata(tokens, 320, [256, 10**6])
    tokens.chat_template = {"default": "a", "to ol": "b"}
    with pytest.raises(ValueError, match="a chat template must have a plain name, got 'to ol'"):
        tokenizer_metadata.metadata(tokens, 320, [])


def test_of_a_wrapper_the_text_model_is_written(tmp_path, capsys):
    path = model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    text = {name: np.array(x) for name, x in safetensors.read(path).items()}
    convert.convert(tiny.wrapped(path), tmp_path / "x.gguf", gguf_kind="f32")
    assert "the text model alone, without 2 tensors such as vision_tower.cls" in capsys.readouterr().err
    convert.convert(tmp_path / "x.gguf", tmp_path / "back")
    back = safetensors.read(tmp_path / "back")
    assert back.keys() == text.keys() and all(np.array_equal(back[name], text[name]) for name in text)


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path):
    path = model(tmp_path / "model", "qwen3")
    held = {name: np.array(x) for name, x in safetensors.read(path).items()}
    held["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e5
    (path / "manifest.json").unlink()
    safetensors.write(path, held, held.values())
    with pytest.raises(ValueError, match="blk.0.attn_q.weight has 1e\\+05, more than float16 holds; use --gguf bf16"):
        convert.convert(path, tmp_path / "x.gguf", gguf_kind="f16")
    assert [*tmp_path.iterdir()] == [path]
    convert.convert(path, tmp_path / "x.gguf", gguf_kind="bf16")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = model(tmp_path / "model", "qwen3")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(OSError, match="x.gguf"):
            convert.convert(path, tmp_path / "x.gguf", gguf_kind="f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert [*tmp_path.iterdir()] == [path]


def test_two_processes_do_not_write_one_file(tmp_path, monkeypatch):
    path, file = model(tmp_path / "model", "qwen3"), tmp_path / "x.gguf"
    (tmp_path / ".x.gguf.tmp").write_bytes(b"left by a process that was killed")
    whole = writing._joined

    def meanwhile(*given):
        with pytest.raises(ValueError, match="another process is writing .*x.gguf"):
            convert.convert(path, file, gguf_kind="f16")
        return whole(*given)

    monkeypatch.setattr(writing, "_joined", meanwhile)
    convert.convert(path, file, gguf_kind="q8_0")
    assert gguf.summary(file)[1]["q8_0"] and [*tmp_path.iterdir()] == [path, file]


def test_a_folder_is_no_place_for_a_file(tmp_path):
    path = model(tmp_path / "model", "qwen3")
    (tmp_path / "x.gguf").mkdir()
    (tmp_path / "y.gguf").symlink_to("nowhere")
    for name in ("x.gguf", "y.gguf"):
        with pytest.raises(ValueError, match=f"{name} already exists"):
            convert.convert(path, tmp_path / name, gguf_kind="q8_0")


def test_files_are_known_by_their_content(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sha256-0123").write_bytes(small[0])  # as Ollama calls them
    assert check.check(tmp_path / "sha256-0123")["ok"]
    convert.convert(tmp_path / "sha256-0123", tmp_path / "out")
    before = np.array(safetensors.read(hub.folder(tmp_path / "sha256-0123"))["model.norm.weight"])
    found = (tmp_path / "sha256-0123").stat()
    norm = container.read(small[1]).tensors["output_norm.weight"].raw.tobytes()
    (tmp_path / "sha256-0123").write_bytes(small[0].replace(norm, (2 * np.frombuffer(norm, np.float32)).tobytes()))
    os.utime(tmp_path / "sha256-0123", ns=(found.st_atime_ns, found.st_mtime_ns))
    hub._content.cache_clear()  # another process
    after = safetensors.read(hub.folder(tmp_path / "sha256-0123"))["model.norm.weight"]
    np.testing.assert_array_equal(after, 2 * before)


def test_a_folder_that_lost_files_is_unpacked_again(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weights = Path(hub.folder(small[1])) / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (weights.unlink, lambda: os.truncate(weights, 1000)):
        damage()
        hub.folder(small[1])
        assert weights.read_bytes() == whole


def test_a_file_is_a_model_everywhere(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, _ = small
    (tmp_path / "x.gguf").write_bytes(data)
    folder = Path(hub.folder(tmp_path / "x.gguf", weights=True))
    assert folder.parent == tmp_path / "areax" / "gguf"
    assert check.check(tmp_path / "x.gguf")["ok"]
    seen = inspect.inspect(tmp_path / "x.gguf")
    assert (seen["path"], seen["quantised"], seen["serve"]) == (str(tmp_path / "x.gguf"), "Q8_0", "yes")
    assert tokenizer.load(tmp_path / "x.gguf").encode("the") == byte_level().encode("the")
    config, params = hf.load(folder)
    assert config.family == "qwen3" and str(params["embed"].dtype) == "float32"
    before = (folder / "config.json").stat().st_ino
    assert hub.folder(str(tmp_path / "x.gguf")) == str(folder)
    assert (folder / "config.json").stat().st_ino == before
    (tmp_path / "x.gguf").write_bytes(data + b"\0" * 32)
    (killed := folder.with_name(f".{folder.name}.0123abcd.tmp")).mkdir()  # while it unpacked
    hub.folder(tmp_path / "x.gguf")
    assert not killed.exists()
    assert (folder / "config.json").stat().st_ino != before
    (tmp_path / "x.gguf").write_bytes(data[:5000])
    with pytest.raises(ValueError, match="half-written"):
        hub.folder(tmp_path / "x.gguf")
    assert [path.name for path in folder.parent.iterdir() if path.suffix == ".tmp"] == []


def test_without_the_library_a_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"install areax\[gguf\]"):
        container.read(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["llama with rope of Llama 3", "gemma3_text"])
def test_texts_are_to_areax_what_they_are_to_llama_cpp(tmp_path, name):
    convert.convert(recorded(tmp_path, name), tmp_path / "back")
    tokens = tokenizer.load(tmp_path / "back")
    assert [tokens.encode(text) for text in RECORDED_TEXTS] == json.loads(RECORDED.read_text())[name]["ids"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED_FAMILIES)
def test_a_file_is_to_areax_what_it_is_to_llama_cpp(tmp_path, name):
    said = json.loads(RECORDED.read_text())[name]
    convert.convert(recorded(tmp_path, name), tmp_path / "back", "float32")
    config, params = hf.load(tmp_path / "back")
    ids = np.array([[*RECORDED_IDS, *said["greedy"]]])
    logits = jax.jit(models.forward, static_argnames="config")(params, ids, config=config)
    logp = np.asarray(jax.nn.log_softmax(logits[0]))
    ours = [logp[i, id] for i, id in enumerate(RECORDED_IDS[1:])]
    # llama.cpp keeps keys and values in 16 bits, and Gemma's embeddings are larger.
    np.testing.assert_allclose(ours, said["logps"], rtol=0, atol=3e-2 if "gemma" in name else 5e-3)
    after = logp[len(RECORDED_IDS) - 1 : -1]
    assert all(row.max() - row[id] < 5e-3 for row, id in zip(after, said["greedy"], strict=True))


def test_the_command_line_converts_in_both_directions(tmp_path, capsys):
    path, file = model(tmp_path / "model", "qwen3", "bfloat16"), tmp_path / "x.gguf"
    assert cli.main(["convert", str(path), str(file)]) == 2
    assert "needs --gguf" in capsys.readouterr().err and not file.exists()
    assert cli.main(["convert", str(path), str(file), "--gguf", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"] == ["bf16", "f32"]
    assert cli.main(["convert", str(file), str(tmp_path / "back")]) == 0
    assert "dtypes: bfloat16" in capsys.readouterr().out
    assert cli.main(["convert", str(path), str(file), "--gguf", "bf16"]) == 2
    assert "already exists" in capsys.readouterr().err
