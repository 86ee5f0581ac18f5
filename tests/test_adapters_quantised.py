"""Checkpoints in FP8 and MXFP4 are read as the bfloat16 numbers that they stand for."""

import importlib.util
import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import quantise
import tiny
import torch
import transformers

from areax import models
from areax.adapters import hf, quantised, safetensors
from areax.adapters.commands import check, convert
from areax.adapters.hf import placing
from areax.adapters.torch import from_state_dict
from areax.models import config_json
from areax.parallel import mesh
from areax.rollout.engine import checkpoint
from areax.rollout.engine.programs import staging
from areax.rollout.engine.slots import mesh_of

BF16 = np.dtype(ml_dtypes.bfloat16)
BASE = dict(
    vocab_size=64, pad_token_id=None, hidden_size=96, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=20, initializer_range=0.2, tie_word_embeddings=False, eos_token_id=3,
)  # fmt: skip
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
LATENT = ROUTED | dict(
    num_key_value_heads=4, q_lora_rank=40, kv_lora_rank=36, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14,
    n_shared_experts=1, moe_intermediate_size=56, head_dim=6,
)  # fmt: skip
COMMON = "qwen3", "deepseek_v3", "gpt_oss"
FAMILIES = {
    "qwen3": {},
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=56),
    "glm4_moe": ROUTED | dict(moe_intermediate_size=56, use_qk_norm=True),
    "glm4": {},  # gate and up in one tensor
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2, rotary_dim=10),
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
}
BLOCK = 24, 16  # divides few of the sizes above
OSS = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, sliding_window=6, model_type="gpt_oss")


def original(path, **options):
    config = models.config_from_hf(BASE | options)
    return hf.save(path, config, tiny.weights(models.table(config), 0.2), "bfloat16")


def matrices(name):
    """What FP8 checkpoints quantise: neither norms nor router, embeddings and head."""
    return name.endswith(("_proj.weight", "_mqa.weight", "w1.weight", "w2.weight", "w3.weight"))


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def read(tree):
    return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.stack([x[i] for i in range(len(x))]), tree)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """{family: (quantised checkpoint, the same numbers in bfloat16)}"""
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, options in FAMILIES.items():
        source = original(root / f"{name}-source", model_type=name, **options)
        made[name] = quantise.in_fp8(source, root / name, matrices, BLOCK)
    made["gpt_oss"] = quantise.in_mxfp4(original(root / "oss-source", **OSS), root / "gpt_oss")
    return made


@pytest.fixture(scope="module")
def qwen(pairs):
    return pairs["qwen3"]


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [np.float32, BF16, np.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 129), (2, 130, 40)])
def test_fp8_is_the_product_of_code_and_scale(shape, scale):
    rng = np.random.default_rng(0)
    codes, scales = quantise.fp8(rng.normal(size=shape), dtype=scale)
    codes.view(np.uint8).flat[:256] = np.where(np.arange(256) % 128 == 127, 0, np.arange(256))[: codes.size]
    scales.flat[0] = 3e-4  # products that need two roundings
    wanted = quantise.of_fp8(codes, scales)
    [lazy] = quantised.opened(
        {"w": codes, "w_scale_inv": scales}, config_json.Quantisation("fp8", (128, 128)), ""
    ).values()
    assert lazy.shape == shape and lazy.dtype == BF16 and len(lazy) == shape[0]
    assert np.asarray(lazy).tobytes() == wanted.tobytes()
    for cut in (slice(0, 1), slice(100, 131), slice(127, 128), slice(1, None, 2), slice(5, 5)):
        for at in ((..., cut, slice(None)), (..., slice(None), cut), (..., cut, cut)):
            at = (slice(None),) * (len(shape) - 2) + at[1:]
            assert np.array_equal(lazy[at], wanted[at])


def test_mxfp4_is_the_product_of_code_and_power_of_two():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16)).astype(np.uint8)
    scales = rng.integers(0, 253, (3, 10, 4)).astype(np.uint8)
    wanted = quantise.of_mxfp4(blocks, scales)
    [lazy] = quantised.opened({"w_blocks": blocks, "w_scales": scales}, config_json.Quantisation("mxfp4"), "").values()
    assert lazy.shape == wanted.shape == (3, 128, 10) and lazy.dtype == BF16 and len(lazy) == 3
    assert np.array_equal(np.asarray(lazy), wanted) and np.isfinite(wanted.astype(float)).all()
    for cut in (slice(0, 1), slice(31, 33), slice(40, 50), slice(5, 5)):
        for rows in (slice(1, None, 2), slice(3, 7)):
            assert np.array_equal(lazy[slice(1, 3), cut, rows], wanted[1:3, cut, rows])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in COMMON else pytest.mark.mesh) for name in (*FAMILIES, "gpt_oss")],
)
def test_a_quantised_checkpoint_is_read_as_its_numbers_in_bfloat16(pairs, family, monkeypatch):
    coded, plain = pairs[family]
    stored = {tensor.dtype.name for tensor in safetensors.read(coded).values()}
    assert stored & {"float8_e4m3fn", "uint8"}
    monkeypatch.setattr(placing, "PIECE", 1000)  # several of most tensors
    monkeypatch.setattr(placing, "LARGE", 9000)
    for dtype in (None, "float32"):
        assert equal(hf.load(coded, dtype)[1], hf.load(plain, dtype)[1])
        assert equal(read(hf.mapped(coded, dtype)[1]), read(hf.mapped(plain, dtype)[1]))
    assert {x.dtype for x in jax.tree.leaves(hf.load(coded, None)[1])} <= {BF16, np.dtype(np.float32)}


@pytest.mark.slow
def test_the_host_holds_a_piece_of_a_large_leaf(tmp_path, monkeypatch):
    source = original(tmp_path / "source", model_type="qwen3", hidden_size=256, intermediate_size=2048)
    for path in quantise.in_fp8(source, tmp_path / "coded", matrices):
        params = hf.load(path)[1]
        leaf = max(x.nbytes for x in jax.tree.leaves(params))
        assert traced(lambda path=path: hf.load(path)) > leaf
        monkeypatch.setattr(placing, "LARGE", leaf // 4 // 12)
        assert equal(hf.load(path)[1], params)
        assert traced(lambda path=path: hf.load(path)) < leaf // 2
        monkeypatch.undo()


def traced(run):
    """The most memory of numpy that was held at a time, in bytes."""
    tracemalloc.start()
    kept = run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak if kept else 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_engine_gets_the_numbers(pairs, family):
    staged, sums = [], []
    for path in pairs[family]:
        config, params, checksums = checkpoint.read_weights(str(path), "float32")
        staged.append(staging.stage(params, models.table(config), mesh_of()))
        sums.append(checksums)
    assert equal(*staged) and sums[0] == sums[1] and len(sums[0]) > 10


EVEN = {  # sizes that blocks of 8 divide: transformers derives blocks from the number of scales
    "deepseek_v3": dict(kv_lora_rank=32, qk_rope_head_dim=8, head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family",
    [
        *COMMON,
        *(pytest.param(name, marks=pytest.mark.mesh) for name in ("qwen3_moe", "glm4_moe", "glm4", "minimax_m2")),
    ],
)
def test_the_numbers_are_those_of_transformers(family, tmp_path):
    options = {"model_type": family, **FAMILIES.get(family, OSS), **EVEN.get(family, {})}
    source = original(tmp_path / "source", **options)
    coded = tmp_path / "coded"
    quantise.in_mxfp4(source, coded) if family == "gpt_oss" else quantise.in_fp8(source, coded, matrices, (8, 8))
    model = transformers.AutoModelForCausalLM.from_pretrained(coded, dtype=torch.bfloat16)
    config, params = hf.load(coded, None)
    theirs = from_state_dict(config, model.state_dict(), None)[1]
    half = lambda tree: jax.tree.map(lambda x: x.astype(BF16), tree)  # transformers rounds a bias of MiniMax's router
    assert equal(half(params), half(theirs))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_are_those_of_the_numbers(pairs, family):
    token_BT = np.arange(24).reshape(2, 12)
    logits = [
        np.asarray(models.forward(params, token_BT, config=config)) for config, params in map(hf.load, pairs[family])
    ]
    assert np.array_equal(*logits) and logits[0].std() > 0.3


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_each_device_of_a_mesh_dequantises_its_shard(pairs, family, monkeypatch):
    coded, plain = pairs[family]
    on = mesh.make(mesh.Layout(fsdp=2, ep=2, tp=2) if family != "qwen3" else mesh.Layout(fsdp=4, tp=2))
    wanted, read_of = hf.load(plain, None)[1], []

    def counted(honest):
        return lambda lazy, cut: (read_of.append(np.empty(lazy.shape, bool)[cut].size), honest(lazy, cut))[1]

    for kind in (quantised.Float8, quantised.Float4):
        monkeypatch.setattr(kind, "__getitem__", counted(kind.__getitem__))
    config, params = hf.load(coded, None, mesh=on)
    assert equal(params, wanted)
    total = sum(x.size for x in jax.tree.leaves(params))
    assert sum(read_of) < 1.01 * total, "a number is dequantised twice"


def test_fused_experts_are_read_as_those_apart(pairs, tmp_path):
    """gate and up in one tensor whose blocks hold rows of both, as transformers' module has them."""
    tensors, fused = safetensors.read(pairs["qwen3_moe"][1]), {}
    for layer in range(3):
        stem, names = f"model.layers.{layer}.mlp.experts", ("gate", "up", "down")
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{e}.{name}_proj.weight") for e in range(4)]).astype(float) for name in names
        )
        for name, x in (("gate_up_proj", np.concatenate([gate, up], 1)), ("down_proj", down)):
            codes, scales = fused[f"{stem}.{name}"], fused[f"{stem}.{name}_scale_inv"] = quantise.fp8(x, BLOCK)
            numbers = np.split(quantise.of_fp8(codes, scales, BLOCK), 2 if name == "gate_up_proj" else 1, 1)
            for part, each in zip(("gate", "up") if len(numbers) == 2 else ("down",), numbers, strict=True):
                tensors |= {f"{stem}.{e}.{part}_proj.weight": each[e] for e in range(4)}
    source = json.loads((pairs["qwen3_moe"][0] / "config.json").read_text())
    apart = quantise.checkpoint(tmp_path / "apart", source, tensors)
    kept = {name: x for name, x in tensors.items() if ".experts." not in name}
    coded = quantise.checkpoint(tmp_path / "fused", source, kept | fused)
    assert equal(hf.load(coded, None)[1], hf.load(apart, None)[1])
    assert equal(read(hf.mapped(coded, None)[1]), read(hf.mapped(apart, None)[1]))
    odd = f"{stem}.gate_up_proj"
    wrong = {odd: fused[odd][:, 1:], f"{odd}_scale_inv": fused[f"{odd}_scale_inv"]}
    with pytest.raises(ValueError, match=f"unexpected {odd}$"):
        hf.load(quantise.checkpoint(tmp_path / "odd", source, kept | fused | wrong))


def test_one_scale_may_be_that_of_a_whole_matrix(qwen, tmp_path):
    """weight_block_size null, with scales of activations, which nothing here uses."""
    source = json.loads((qwen[0] / "config.json").read_text())
    source["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    coded, plain = {}, {}
    for i, (name, x) in enumerate(safetensors.read(qwen[1]).items()):
        coded[name] = plain[name] = x
        if matrices(name):
            coded[name], scale = quantise.fp8(x.astype(float), x.shape)
            plain[name] = quantise.of_fp8(coded[name], scale, x.shape)
            coded[f"{name}_scale_inv"] = scale.astype(BF16 if i % 2 else np.float32).reshape([(), (1,), (1, 1)][i % 3])
            plain[name] = quantise.of_fp8(coded[name], coded[f"{name}_scale_inv"].reshape(1, 1), x.shape)
            coded[name.replace("weight", "activation_scale")] = np.ones((), BF16)
    coded, plain = (quantise.checkpoint(tmp_path / at, source, x) for at, x in (("coded", coded), ("plain", plain)))
    assert equal(hf.load(coded, None)[1], hf.load(plain, None)[1])


# -- commands ------------------------------------------------------------------------------------


def compressed(strategy, **weights):
    """quantization_config as compressed-tensors writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_compressed_tensors_are_read_as_they_are_decompressed(strategy, dtype, tmp_path):
    """As dequantize(x_q, scale) of compressed-tensors 0.18: the codes in the scale's dtype, times the scale."""
    source = original(tmp_path / "source", model_type="qwen3_moe", **FAMILIES["qwen3_moe"])
    coded, plain = {}, {}
    for name, x in safetensors.read(source).items():
        coded[name] = plain[name] = np.array(x)
        if matrices(name):
            block = {"channel": (1, x.shape[1]), "tensor": x.shape, "block": BLOCK}[strategy]
            coded[name], scales = quantise.fp8(x.astype(np.float64), block, dtype)
            coded[f"{name}_scale"] = scales.reshape(1) if strategy == "tensor" else scales
            coded[f"{name.removesuffix('weight')}input_scale"] = np.ones(1, dtype)
            each = quantise.spread(scales, block, x.shape).astype(dtype)
            plain[name] = (coded[name].astype(dtype) * each).astype(BF16)
    options = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config = compressed(strategy, block_structure=list(BLOCK))
    quantise.checkpoint(tmp_path / "coded", options | {"quantization_config": config}, coded)
    quantise.checkpoint(tmp_path / "plain", options, plain)
    assert equal(hf.load(tmp_path / "coded", None)[1], hf.load(tmp_path / "plain", None)[1])
    if importlib.util.find_spec("compressed_tensors") is None:
        with pytest.raises(ValueError, match="check: transformers does not load .*compressed-tensors"):
            check.check(tmp_path / "coded", "torch")
    del coded[next(name for name in coded if name.endswith("weight_scale"))]
    quantise.checkpoint(tmp_path / "half", options | {"quantization_config": config}, coded)
    refused(tmp_path / "half", "is in FP8 and needs .*weight_scale, which is missing; copy it again")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_convert_writes_the_numbers_without_quantisation(pairs, family, tmp_path, capsys):
    coded, plain = pairs[family]
    report = convert.convert(coded, tmp_path / "coded")
    method = "mxfp4" if family == "gpt_oss" else "fp8"
    assert capsys.readouterr().err == f"{coded}: in {method}, written as floats without quantization_config\n"
    convert.convert(plain, tmp_path / "plain")
    assert capsys.readouterr().err == "" and report["dtypes"] == ["bfloat16"]
    same = {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "coded").iterdir()} == same
    assert "quantization_config" not in json.loads(same["config.json"])


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.mesh)])
def test_check_compares_with_transformers(family, tmp_path):
    options = {"model_type": family, **FAMILIES.get(family, OSS)}
    source, coded = original(tmp_path / "source", **options), tmp_path / "coded"
    quantise.in_mxfp4(source, coded) if family == "gpt_oss" else quantise.in_fp8(source, coded, matrices, (8, 8))
    report = check.check(coded, "torch")
    assert report["ok"] and report["logit_std"] > 0.3 and report["manifest"] == "none", report
    assert report["bytes"] < 2 * report["parameters"]
    assert report["dtypes"] == ["bfloat16", *(["uint8"] if family == "gpt_oss" else ["float32", "float8_e4m3fn"])]


# -- bad input -----------------------------------------------------------------------------------


def refused(path, words):
    for read in (hf.load, lambda path: convert.convert(path, path / "out"), check.check):
        with pytest.raises(ValueError) as caught:
            read(path)
        assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
        assert not (path / "out").exists()


UP = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"
INF = f"{SCALE} are not finite"  # said by what looks at the stored tensors first


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(SCALE), f"{UP} is in FP8 and needs {SCALE}, which is missing; copy it again$"),
        (lambda t: t.pop(UP), f"{SCALE} is the scale of {UP}, which is missing; copy"),
        (lambda t: t.update({UP: np.zeros((72, 96), BF16)}), f"{SCALE} is the scale of {UP}, which is bfloat16"),
        (lambda t: t.update({SCALE: t[SCALE][:2]}), rf"{SCALE} must be \[3, 6\] of float32 or bfloat16 or "
         r"float16, for blocks of \[24, 16\], got \[2, 6\] of float32$"),
        (lambda t: t.update({SCALE: t[SCALE].T}), r"must be \[3, 6\] .* got \[6, 3\] of float32"),
        (lambda t: t.update({SCALE: t[SCALE].astype("float64")}), r"got \[3, 6\] of float64"),
        (lambda t: t.update({SCALE: t[SCALE].astype(np.uint8)}), r"got \[3, 6\] of uint8"),
        (lambda t: t[SCALE].__setitem__((2, 5), np.nan), f"{UP}: scales must lie in .0, 7.6e.35., got nan|{INF}"),
        (lambda t: t[SCALE].__setitem__((0, 0), np.inf), f"{UP}: scales must lie in .*, got inf; use another|{INF}"),
        (lambda t: t[SCALE].__setitem__((0, 1), -1e37), f"{UP}: scales must lie in .*, got -1e.37; use another"),
        (lambda t: t[SCALE].__setitem__((1, 2), 0), f"{UP}: a scale must not be 0 where values are not"),
        (lambda t: t.update({UP: t[UP].ravel(), SCALE: t[SCALE]}), f"{UP} is in FP8 and must be a matrix, got .6912."),
        (lambda t: t.update({UP: t[UP].astype(np.float32).astype(ml_dtypes.float8_e5m2)}), "is float8_e5m2; copy"),
        (lambda t: t.update({UP: t[UP][:-1].copy()}), r"must be \[72, 96\] by config.json, got \[71, 96\]"),
    ],
)  # fmt: skip
def test_damaged_fp8_is_refused_by_name(qwen, change, words, tmp_path):
    tensors = {name: np.array(x) for name, x in safetensors.read(qwen[0]).items()}
    change(tensors)
    refused(quantise.checkpoint(tmp_path / "m", json.loads((qwen[0] / "config.json").read_text()), tensors), words)


def test_codes_that_are_not_numbers_are_refused(qwen, tmp_path):
    tensors = {name: np.array(x) for name, x in safetensors.read(qwen[0]).items()}
    tensors[UP].view(np.uint8)[3, 4:6] = 0x7F, 0xFF
    path = quantise.checkpoint(tmp_path / "m", json.loads((qwen[0] / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=f"2 of the 6912 numbers of {UP} are not finite; use another"):
        hf.load(path)
    assert check.check(path)["nonfinite"] == [UP]
    assert np.isnan(np.asarray(hf.mapped(path, None)[1]["stacks"][0]["up"][1], float)[3, 4:6]).all()


EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(f"{EXPERTS}_scales"), f"{EXPERTS}_blocks needs {EXPERTS}_scales, which is missing"),
        (lambda t: t.pop(f"{EXPERTS}_blocks"), f"{EXPERTS}_scales needs {EXPERTS}_blocks, which is missing"),
        (lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"][:, 1:]}),
         rf"{EXPERTS}_blocks must be \[4, 95, 2, 16\] of uint8, got \[4, 96, 2, 16\] of uint8"),
        (lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"][0]}),
         rf"{EXPERTS}_blocks must be \[experts, out, in / 32, 16\] of uint8, got \[4, 96, 2, 16\] of uint8"),
        (lambda t: t.update({f"{EXPERTS}_blocks": t[f"{EXPERTS}_blocks"].view(np.int8)}), "_blocks must be .* of int8"),
        (lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"].astype(BF16)}), "_scales must be .* bfloat16"),
        (lambda t: t[f"{EXPERTS}_scales"].__setitem__((3, 95, 1), 255),
         f"{EXPERTS}: exponents of scales must be at most 252, got 255; use another"),
        (lambda t: t.update({f"{EXPERTS}_{end}": np.ascontiguousarray(t[f"{EXPERTS}_{end}"][:, :, :1]) for end in
                             ("blocks", "scales")}), r"must be \[4, 64, 96\] by config.json, got \[4, 32, 96\]"),
    ],
)  # fmt: skip
def test_damaged_mxfp4_is_refused_by_name(pairs, change, words, tmp_path):
    coded = pairs["gpt_oss"][0]
    tensors = {name: np.array(x) for name, x in safetensors.read(coded).items()}
    change(tensors)
    refused(quantise.checkpoint(tmp_path / "m", json.loads((coded / "config.json").read_text()), tensors), words)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_truncated_and_altered_files_are_refused(pairs, family, tmp_path):
    coded, copy = pairs[family][0], tmp_path / "m"
    tensors = safetensors.read(coded)
    quantise.checkpoint(copy, json.loads((coded / "config.json").read_text()), tensors)
    described = safetensors.write(tmp_path, tensors, tensors.values())
    (copy / "manifest.json").write_text(json.dumps({"version": 0, "tensors": described}))
    assert hf.verify(copy) and check.check(copy)["manifest"] == "verified"
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    refused(copy, "does not match manifest.json; copy the checkpoint again")
    file.write_bytes(whole[:-5])
    refused(copy, "half-written or damaged")


@pytest.mark.parametrize("block", [[0, 128], [-1, 1], [128], [128, 128, 1], ["a", 2], [1.5, 2], 128, "128", [True, 2],
                                   [1 << 50, 1]])  # fmt: skip
def test_absurd_blocks_are_refused(block):
    options = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(
        ValueError, match=r"config.json: weight_block_size must be two whole numbers above 0, or null, got"
    ):
        models.config_from_hf(BASE | {"model_type": "qwen3", "quantization_config": options})


@pytest.mark.parametrize("block", [(1, 1), (1, 7), (5000, 1), (5000, 5000)])
def test_blocks_of_any_size_are_read(block):
    x = np.random.default_rng(0).normal(size=(40, 30))
    codes, scales = quantise.fp8(x, block)
    [lazy] = quantised.opened({"w": codes, "w_scale_inv": scales}, config_json.Quantisation("fp8", block), "").values()
    assert np.array_equal(np.asarray(lazy), quantise.of_fp8(codes, scales, block))


@pytest.mark.parametrize(
    "family, options, words",
    [
        ("qwen3", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt of weights in FP8 must be 'e4m3', got 'e5m2'; use"),
        ("qwen3", {"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype of weights in FP8 must be 'fp8'"),
        ("qwen3", {"quant_method": "mxfp4"}, "weights in MXFP4 are read for gpt_oss alone, got 'qwen3'"),
        ("qwen3", {"quant_method": ["fp8"]}, "weights must not be quantised"),
        ("qwen3", {"quant_method": "compressed-tensors"}, "weights must not be quantised"),
        ("qwen3", compressed("channel") | {"format": "pack-quantized"}, "weights must not be quantised"),
        ("qwen3", compressed("channel") | {"kv_cache_scheme": {"num_bits": 8}}, "weights must not be quantised"),
        ("qwen3", compressed("channel") | {"config_groups": {"a": 1}}, "weights must not be quantised"),
        ("qwen3", compressed("channel", type="int"), "weights must not be quantised"),
        ("qwen3", compressed("group"), "weights must not be quantised"),
        ("qwen3", compressed(["channel"]), "weights must not be quantised"),
        ("qwen3", compressed("block"), "weight_block_size must be two whole numbers above 0"),
        ("qwen3", "fp8", "weights must not be quantised"),
    ],
)
def test_other_ways_of_quantising_are_refused(family, options, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        models.config_from_hf(BASE | {"model_type": family, "quantization_config": options})
