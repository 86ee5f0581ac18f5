"""Kernels for Triton, as far as they can be checked without a GPU."""

from jax._src.pallas.triton import lowering


def verify(monkeypatch) -> list:
    """Every kernel that is lowered from here on must be valid: JAX leaves that to the compiler on the device. The list
    that is returned gets each of them."""
    lower, modules = lowering.lower_jaxpr_to_triton_module, []

    def verified(*args, **options):
        result = lower(*args, **options)
        assert result.module.operation.verify()
        modules.append(result.module)
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", verified)
    return modules
