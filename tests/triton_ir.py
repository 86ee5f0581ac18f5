"""Kernels for Triton, as far as they can be checked without a GPU."""

import importlib.util

from jax._src.pallas.triton import lowering
from jax.extend import core


def verify(monkeypatch) -> list:
    """Every kernel that is lowered from here on, for an H100, must be valid: JAX leaves that to the compiler on the
    device. The list that is returned gets each of them."""
    lower, modules = lowering.lower_jaxpr_to_triton_module, []

    def verified(*args, **options):
        result = lower(*args, **options)
        assert result.module.operation.verify()
        modules.append(result.module)
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", verified)
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info"):  # from 0.11.2 on; older ones assume an H100
        monkeypatch.setattr("jax._src.pallas.triton.gpu_info.get_device_kind", lambda: "NVIDIA H100")
    return modules


def live_kernels(program):
    """Names of the kernels of a program, calls within calls included, whose output anything reads."""
    read = {v for e in program.eqns for v in e.invars if isinstance(v, core.Var)} | set(program.outvars)
    for e in program.eqns:
        if e.primitive.name == "pallas_call":
            if read & set(e.outvars):
                yield e.params["name"] or e.params["name_and_src_info"].name
        else:
            for inner in core.jaxprs_in_params(e.params):
                yield from live_kernels(inner)
