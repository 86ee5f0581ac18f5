"""What a layer pays for on a mesh: collectives in the programs that the chips' compilers make, which fail when one is
added.

A number counts the places in the program's text; those in a loop over layers or microbatches run in each turn.
"""

import pytest
from test_compilers import planned

GRPO = "grpo", "--chip", "h100", "--groups", "4", "--group-size", "4"
# Of four layers over two devices or four: weights gathered in both passes, their gradients scattered; tokens traded for
# the embedding and the head's gradient scattered; sums over tp of attention and MLP; keys and values around cp.
STEPS = {
    ("qwen3", "fsdp 2"): {},
    ("qwen3", "tp 2"): {},
    ("qwen3", "cp 2"): {},
    ("qwen3", "fsdp 2 tp 2"): {},
    ("gpt_oss", "ep 2"): {},
    ("gpt_oss", "fsdp 2 ep 2"): {},
}


def options(mesh):
    words = mesh.split()
    return [word for axis, size in zip(words[::2], words[1::2], strict=True) for word in (f"--mesh.{axis}", size)]


@pytest.mark.parametrize("family, mesh", STEPS, ids=" ".join)
def test_a_step_pays_for_these_collectives(family, mesh, tmp_path, capsys):
    report = planned(capsys, tmp_path, family, *GRPO, *options(mesh), rows=4)
    assert report["compiled"]["policy's step"]["collectives"] == STEPS[family, mesh]


def test_decoding_sums_over_tp_twice_a_layer(tmp_path, capsys):
    """After attention and MLP of each of two layers, and for the embedding; logits are gathered to be drawn from."""
    report = planned(capsys, tmp_path, "qwen3", *GRPO, "--serve.mesh.tp", "2", rows=4)
    decoding = report["compiled"]["decoding"]
    assert decoding["collectives"] == {}
    assert decoding["temporary_bytes"] < 32e6  # no copy of the cache
    assert report["compiled"]["prefill"]["collectives"] == {}
