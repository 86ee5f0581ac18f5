"""Weights that a trainer hands to an engine of its process, from mesh to mesh, are those of a load from files."""

import jax
import numpy as np
import pytest
import tiny
from test_rollout_engine_programs_decode import CASES, TINY

from areax import models
from areax.adapters import hf
from areax.models import lora
from areax.parallel import mesh, rules
from areax.recipes.shared import publishing
from areax.rollout.engine.programs import staging
from areax.rollout.servers.labels import read_label

FSDP2_TP2, FSDP4_TP2, FSDP2_EP2 = mesh.Layout(fsdp=2, tp=2), mesh.Layout(fsdp=4, tp=2), mesh.Layout(fsdp=2, ep=2)
SPEC = lora.Lora(rank=2)


def trainer(case, layout, dtype, adapters, devices):
    """(config, sharded fp32 weights, of which some have adapters) of a trainer of a model stored in this dtype."""
    sizes = {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = models.config_from_hf({"model_type": case} | TINY | CASES[case] | sizes | {"dtype": dtype})
    on, table = mesh.make(layout, devices[: layout.devices]), models.table(config)
    params = jax.device_put(tiny.weights(table, 0.16), rules.of_params(table, on))
    if adapters:
        low = lora.table(table, SPEC)
        params = lora.join(params, jax.device_put(tiny.weights(low, 0.16, 1), rules.of_params(low, on)), SPEC)
    return config, params


def never_gathered(x):
    raise AssertionError(f"an array on {len(x.devices())} devices was copied to the host")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "case, layout, dtype, adapters, engine, first",
    [
        ("qwen3", FSDP2_TP2, "bfloat16", False, mesh.Layout(tp=2), 0),
        *(
            pytest.param(*one, marks=pytest.mark.mesh)
            for one in (
                ("qwen3", FSDP2_TP2, "bfloat16", True, mesh.Layout(tp=1), 0),
                ("qwen3", FSDP2_TP2, "bfloat16", False, mesh.Layout(tp=4), 0),
                ("qwen3", FSDP2_TP2, "float32", True, mesh.Layout(tp=4), 2),  # two devices are the trainer's
                ("qwen3", FSDP2_TP2, "float32", False, mesh.Layout(tp=2), 6),  # none is
                ("qwen3", mesh.Layout(), "float32", True, mesh.Layout(tp=4), 0),
                ("qwen3", FSDP4_TP2, "bfloat16", True, mesh.Layout(tp=4), 0),
                ("qwen3_moe", FSDP2_EP2, "bfloat16", False, mesh.Layout(tp=2), 1),
                ("qwen3_moe", FSDP2_TP2, "bfloat16", False, mesh.Layout(tp=1), 5),
                ("qwen3_moe", FSDP4_TP2, "bfloat16", False, mesh.Layout(ep=2, tp=2), 0),
                ("qwen3", mesh.Layout(fsdp=2), "bfloat16", False, mesh.Layout(tp=4), 1),  # more than the trainer has
            )
        ),
    ],
)
@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_a_swap_from_mesh_to_mesh_is_a_load_from_files(
    tmp_path, case, layout, dtype, adapters, engine, first, engine_dtype, monkeypatch
):
    """To the bit: every leaf, and the label."""
    config, params = trainer(case, layout, dtype, adapters, jax.devices())
    written = hf.write_published(tmp_path, 3, config, params)
    label, weights = publishing.in_memory(config, 3, params)
    assert label == read_label(written / "manifest.json")
    on = mesh.make(engine, jax.devices()[first : first + engine.devices])
    with jax.set_mesh(on):
        _, files, _ = hf.mapped(written, engine_dtype)
        wanted = staging.stage(files, models.table(config), on)
        with monkeypatch.context() as patched:
            patched.setattr(type(jax.tree.leaves(params)[0]), "_value", property(never_gathered))
            found = staging.stage(weights.cast(engine_dtype), models.table(config), on)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert (other.dtype, other.sharding) == (leaf.dtype, leaf.sharding)
        np.testing.assert_array_equal(np.asarray(other), np.asarray(leaf))
