"""Quantisers in numpy, written from the formats, and what their codes mean in float64."""

import json

import ml_dtypes
import numpy as np

from areax.adapters import safetensors

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = [sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def e4m3(code: int) -> float:
    """The number of an FP8 code (arXiv:2209.05433, E4M3): sign, 4 bits of exponent with bias 7, 3 of fraction."""
    sign, exponent, fraction = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return np.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


E4M3_VALUES = np.array([e4m3(code) for code in range(256)])


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each entry."""
    for axis, size in zip((-2, -1), block, strict=True):
        scales = scales.repeat(size, axis)
    return scales[..., : shape[-2], : shape[-1]].astype(np.float64)


def fp8(x: np.ndarray, block=(128, 128), dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of matrices [..., rows, columns]."""
    rows, columns = (-(-size // step) for size, step in zip(x.shape[-2:], block, strict=True))
    scales = np.zeros((*x.shape[:-2], rows, columns))
    for i in range(rows):
        for j in range(columns):
            part = x[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[..., i, j] = np.abs(part).max((-2, -1)) / 448
    scales = scales.astype(dtype)
    return (x / spread(scales, block, x.shape)).clip(-448, 448).astype(E4M3), scales


def of_fp8(codes: np.ndarray, scales: np.ndarray, block=(128, 128)) -> np.ndarray:
    """The bfloat16 numbers: products rounded to float32, then to bfloat16."""
    exact = E4M3_VALUES[codes.view(np.uint8)] * spread(scales, block, codes.shape)  # 28 bits
    return exact.astype(np.float32).astype(BF16)


def mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, scales) of experts [E, in, out], as GPT-OSS stores them: [E, out, in / 32, 16] and [E, out, in / 32]."""
    groups = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, 32).astype(np.float64)
    scales = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / 2.0 ** scales[..., None]
    codes = np.abs(scaled[..., None] - np.array(E2M1)).argmin(-1).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (scales + 127).astype(np.uint8)


def of_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bfloat16 numbers [E, in, out], which are exact."""
    E, out, groups, _ = blocks.shape
    x = np.empty((E, out, groups, 32))
    for half in (0, 1):
        x[..., half::2] = np.array(E2M1)[blocks >> 4 * half & 15]
    x *= 2.0 ** (scales.astype(int) - 127)[..., None]
    return x.reshape(E, out, -1).swapaxes(1, 2).astype(BF16)


def checkpoint(path, hf: dict, tensors: dict):
    """Writes a checkpoint without a manifest, as other tools do."""
    path.mkdir()
    safetensors.write(path, tensors, tensors.values())
    (path / "config.json").write_text(json.dumps(hf))
    return path


def in_fp8(source, path, chosen, block=(128, 128), dtype=np.float32):
    """Quantises the matrices `chosen(name)` of a checkpoint in bfloat16. Returns two checkpoints of the same numbers:
    `path` in FP8, and one beside it in bfloat16."""
    hf = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    coded, plain = {}, {}
    for name, x in safetensors.read(source).items():
        coded[name] = plain[name] = x
        if chosen(name):
            coded[name], coded[f"{name}_scale_inv"] = fp8(x.astype(np.float64), block, dtype)
            plain[name] = of_fp8(coded[name], coded[f"{name}_scale_inv"], block)
    options = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    checkpoint(path, hf | {"quantization_config": options}, coded)
    return path, checkpoint(path.with_name(f"{path.name}-bf16"), hf, plain)


def in_mxfp4(source, path):
    """As `in_fp8`, with the experts of GPT-OSS in MXFP4."""
    hf = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    coded, plain = {}, {}
    for name, x in safetensors.read(source).items():
        coded[name] = plain[name] = x
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del coded[name]
            coded[f"{name}_blocks"], coded[f"{name}_scales"] = mxfp4(x)
            plain[name] = of_mxfp4(coded[f"{name}_blocks"], coded[f"{name}_scales"])
    options = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    checkpoint(path, hf | {"quantization_config": options}, coded)
    return path, checkpoint(path.with_name(f"{path.name}-bf16"), hf, plain)
