"""What a layer pays for on a mesh: collectives in the programs that the chips' compilers make, which fail when one is
added.

A number counts the places in the program's text; those in a loop over layers or microbatches run in each turn.
"""

import pytest
from test_compilers import planned

GRPO = "grpo", "--groups", "4", "--group-size", "4"
# Of two layers over two devices or four: weights gathered in both passes, their gradients scattered; tokens traded for
# the embedding and the head's gradient scattered; sums over tp of attention and MLP; keys and values around cp.
H100 = {
    ("qwen3", "fsdp 2"): {"all-gather": 4, "reduce-scatter": 2, "all-reduce": 6, "all-to-all": 2},
    ("qwen3", "tp 2"): {"all-reduce": 15},
    ("qwen3", "cp 2"): {"all-gather": 3, "reduce-scatter": 1, "all-reduce": 6},
    ("qwen3", "fsdp 2 tp 2"): {"all-gather": 3, "reduce-scatter": 2, "all-reduce": 20, "all-to-all": 2},
    ("gpt_oss", "ep 2"): {"all-gather": 7, "reduce-scatter": 6, "all-reduce": 7, "all-to-all": 2},
}
# A TPU gathers each of a layer's seven matrices by itself, and scatters their gradients together.
V5P = {
    ("qwen3", "fsdp 2"): {"all-gather": 16, "reduce-scatter": 3, "all-reduce": 6, "all-to-all": 2},
    ("qwen3", "tp 2"): {"all-reduce": 14},
    ("qwen3", "cp 2"): {"all-gather": 8, "reduce-scatter": 2, "all-reduce": 7},
    ("qwen3", "fsdp 2 tp 2"): {"all-gather": 16, "reduce-scatter": 8, "all-reduce": 21, "all-to-all": 2},
    ("gpt_oss", "ep 2"): {"all-gather": 40, "reduce-scatter": 8, "all-reduce": 8, "all-to-all": 2},
}  # fmt: skip
STEPS = [("h100", *case, counts) for case, counts in H100.items()]
STEPS += [pytest.param("v5p", *case, counts, marks=pytest.mark.wide) for case, counts in V5P.items()]


def options(mesh):
    words = mesh.split()
    return [word for axis, size in zip(words[::2], words[1::2], strict=True) for word in (f"--mesh.{axis}", size)]


@pytest.mark.parametrize("chip, family, mesh, counts", STEPS)
def test_a_step_pays_for_these_collectives(chip, family, mesh, counts, tmp_path, capsys):
    report = planned(capsys, tmp_path, family, "sft", "--batch", "8", "--chip", chip, *options(mesh), rows=4)
    assert report["compiled"]["model's step"]["collectives"] == counts


def test_decoding_sums_over_tp_twice_a_layer(tmp_path, capsys):
    """After attention and MLP of each of two layers, and for the embedding; the rest is of ways to choose a token from
    logits that are split by vocabulary, of which a step takes one. Nothing copies the cache."""
    report = planned(capsys, tmp_path, "qwen3", *GRPO, "--serve.mesh.tp", "2", rows=4)
    decoding, prefill = (report["compiled"][name] for name in ("decoding", "prefill"))
    assert decoding["collectives"] == {"all-gather": 6, "all-reduce": 18}
    assert prefill["collectives"] == {"all-reduce": 5}
    assert decoding["temporary_bytes"] < 32e6
