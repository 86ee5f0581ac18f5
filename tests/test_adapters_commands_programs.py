"""The programs that `areax plan --compile` asks a chip's compiler about, lowered here for virtual CPUs."""

import pickle
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from test_adapters_commands_jobs import CHIP, folder, rl  # noqa: F401

from areax.adapters.command_line import options
from areax.adapters.commands import buffers, jobs, programs, remedy
from areax.core import losses
from areax.core.kl import KL
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.parallel.planner import memory

SERVER = {"decoding", "prefill", "scores of prompts"}
PENALISED = losses.Policy(kl=KL(coef=0.1))


def asked(config):
    """(programs, what they are made of)."""
    flat = options.flat(config)
    made = jobs.made(flat, CHIP)
    return programs.programs(flat, made, CHIP), made


def test_a_run_has_these_programs(folder):  # noqa: F811
    names = lambda **training: asked(rl(folder("qwen3"), **training))[0].keys() - SERVER
    own = {"policy's step", "policy's scores"}
    assert names() == own
    assert names(objective=PENALISED) == own | {"reference's scores"}
    assert names(optim=Optimizer(offload=True)) == own | {"policy's update"}
    assert asked(rl(folder("qwen3")))[0].keys() > SERVER


HOW = [dict(mesh=Layout(fsdp=2)), dict(lora=Lora(rank=2)), dict(optim=Optimizer(offload=True))]


@pytest.mark.parametrize("how", HOW)
def test_each_program_is_lowered_from_what_can_be_sent_to_a_process(folder, how):  # noqa: F811
    """Their arguments are of the planned sizes, and what lies beside them is the rest of what the device holds."""
    found, made = asked(rl(folder("qwen3"), objective=PENALISED, **how))
    m = memory.memory(made.job)
    for name, program in pickle.loads(pickle.dumps({name: found[name] for name in found.keys() - SERVER})).items():
        lowered = program.lower(jax.devices()[: program.devices])
        assert "func.func public @main" in lowered.as_text()
        assert 0 <= program.beside <= m.held, name
    assert found["policy's step"].beside == m.reference
    assert found["policy's scores"].beside == m.held - m.params


def test_an_option_changes_a_config_as_the_command_line_does(folder):  # noqa: F811
    config = options.flat(rl(folder("qwen3"), objective=PENALISED))
    changed = remedy.with_option(config, "--run.remat full --rows 2 --optim.offload --mesh.fsdp 4 --offload-reference")
    assert (changed.run.remat, changed.rows, changed.optim.offload) == ("full", 2, True)
    assert (changed.mesh, changed.offload_reference) == (Layout(fsdp=4), True)
    assert (config.rows, config.optim.offload, config.mesh) == (8, False, Layout())
    assert replace(changed.optim, offload=False) == config.optim


DUMP = """BufferAssignment:
allocation 0: size 77791232, preallocated-temp:
 value: <1 fusion.1 @0> (size=38895616,offset=0): f32[64,151936]{1,0}
 value: <2 copy.2{0} @0> (size=33554432,offset=38895616): bf16[4,8,1024,512]{3,2,1,0}
 value: <3 fusion.3 (phi) @0> (size=1024,offset=0): f32[256]{0}
 value: <4 fusion.4 @0> (size=4194304,offset=73400320): f32[1024,1024]{0,1:T(8,128)}
allocation 1: size 99999999, color 1, preallocated-temp:
 value: <5 fusion.5 @1> (size=99999999,offset=0): f32[5000,5000]{1,0:T(8,128)S(1)}
allocation 2: size 88888888, parameter 0, shape |f32[151936,146]| at ShapeIndex {}:
 value: <6 p.1 @0> (size=88888888,offset=0): f32[151936,146]{1,0}
"""


def test_the_largest_temporaries_are_named(tmp_path: Path):
    """Those of a device's main memory that are there at once; the format is that of JAX 0.10's compilers."""
    (tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt").write_text(DUMP)
    text = '  %fusion.1 = f32[64,151936]{1,0} fusion(%a), metadata={op_name="jit(step)/mul" stack_frame_id=1}\n'
    names = buffers.Names(vocab=(151936,), depths=(4,), weights={(1024, 1024): "stacks.0.o"})
    found = buffers.largest(tmp_path, text, names)
    assert [one.meaning for one in found] == ["logits", "saved by 4 layers", "stacks.0.o, or its gradient"]
    assert found[0] == buffers.Buffer(38895616, "logits", "f32[64,151936]", "jit(step)/mul")
