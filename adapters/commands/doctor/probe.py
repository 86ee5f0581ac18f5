"""Prints what JAX sees, as JSON on the last line: devices, their memory, and the attention kernels that run on them.

It is run in a process of its own, which may crash or hang.
"""

from __future__ import annotations

import json
from typing import get_args


def main() -> None:
    import jax

    devices = jax.devices()
    first = devices[0]
    try:
        memory = (first.memory_stats() or {}).get("bytes_limit", 0)
    except jax.errors.JaxRuntimeError:  # not every platform says
        memory = 0
    seen = {"platform": first.platform, "kind": first.device_kind, "count": len(devices), "memory": memory}
    try:
        from ...launch.devices import tpu_chips

        seen["tpu_chips"] = tpu_chips({})
        seen["kernels"] = kernels(first.platform)
    except ImportError as error:  # a package is missing: the devices are told all the same
        seen["error"] = line_of(error)
    print(f"\n{json.dumps(seen)}", flush=True)


def kernels(platform: str) -> dict[str, str]:
    """{attention backend of this platform: "" or why it failed}, each tried on one row of 128 tokens."""
    import jax
    import jax.numpy as jnp

    from ....models.attention import backends

    found = {}
    for name in get_args(backends.Name):
        supports = backends.BACKENDS.get(name)
        if supports is None or supports.platforms is not None and platform not in supports.platforms:
            continue
        q_BTNH = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
        segment_BT = jnp.ones((1, 128), jnp.int32)
        index_BT = jnp.arange(128)[None]
        try:
            jax.block_until_ready(
                backends.causal(q_BTNH, q_BTNH, q_BTNH, segment_BT, index_BT, backend=name, packing=supports.packing)
            )
            found[name] = ""
        except Exception as error:  # whatever a compiler raises is what is to be reported
            found[name] = line_of(error)
    return found


def line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


if __name__ == "__main__":
    main()
