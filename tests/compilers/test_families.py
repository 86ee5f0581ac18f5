"""Every family trains, scores and decodes on real chips, at the sizes of a published model, as their compilers say.

What was found is added to .cache/compiled.jsonl, from which `tests/compiled_table.py` writes docs/compiled.md.
"""

import dataclasses
import json
import os
from pathlib import Path

import asking
import family_sizes
import pytest

from areax.adapters.commands import compiled

pytestmark = pytest.mark.skipif(not os.environ.get("AREAX_COMPILERS"), reason="make test-compilers")
RESULTS = Path(__file__).parents[2] / ".cache" / "compiled.jsonl"
CORE = {
    ("qwen3", "h100", "train"), ("gemma3_text", "h100", "prefill"), ("deepseek_v2", "h100", "decode"),
    ("gpt_oss", "h100", "score"), ("qwen3_5_text", "h100", "decode"), ("qwen3", "v5p", "prefill"),
}  # fmt: skip
CASES = [(chip, family, part) for chip in ("h100", "v5p") for family in family_sizes.MODELS for part in asking.PARTS]
# What a program must call, unless the family has no such layers or is in `LATENT`.
KERNELS = {
    ("h100", "train"): {"attention_forward", "attention_dq", "attention_dkv"}, ("h100", "score"): {"attention_forward"},
    ("h100", "decode"): {"attention_pages"}, ("h100", "prefill"): {"attention_pages"},
    ("v5p", "train"): {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}, ("v5p", "score"): {"splash_mha_fwd"},
    ("v5p", "decode"): {"attention_pages"}, ("v5p", "prefill"): {"attention_pages"},
}  # fmt: skip
FULL = "RESOURCE_EXHAUSTED: Ran out of memory on HBM"
TOO_LARGE = {("v5p", "llama4_text", "train")}  # for one TPU; compilers for GPUs do not mind
LATENT = "deepseek_v2", "deepseek_v3", "kimi_k2"  # pages have keys of 576, too large for the kernel of GPUs


def marks(chip, family, part):
    return () if (family, chip, part) in CORE else pytest.mark.wide


@pytest.mark.parametrize("chip, family, part", [pytest.param(*case, marks=marks(*case)) for case in CASES])
def test_a_family_compiles(chip, family, part, tmp_path):
    found = compiled.check(asking.asked(family, chip, tmp_path)[part], chip)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        line = {"chip": chip, "family": family, "part": part, **dataclasses.asdict(found)}
        file.write(json.dumps(line) + "\n")
    if (chip, family, part) in TOO_LARGE:
        assert found.problem.startswith(FULL)
        return
    assert not found.problem
    if family not in LATENT or (chip, part) not in {("h100", "decode"), ("h100", "prefill")}:
        for kernel in KERNELS[chip, part]:
            assert any(name.startswith(kernel) for name in found.kernels), found.kernels


@pytest.mark.parametrize(
    "family, chip, most",
    [("qwen3", "h100", 1), ("qwen3", "v5p", 1), pytest.param("phi3", "v5p", 0.25, marks=pytest.mark.wide)],
)
def test_no_step_of_decoding_copies_the_cache(family, chip, most, tmp_path):
    """64 sequences of 2,048 tokens in 2 layers; phi3's values fill no register of a TPU."""
    found = compiled.check(asking.asked(family, chip, tmp_path)["decode"], chip)
    model = family_sizes.MODELS[family][1]
    heads = model["num_key_value_heads"] * model["hidden_size"] // model["num_attention_heads"]
    assert found.temporary_bytes < most * 64 * 2048 * 2 * 2 * 2 * heads
