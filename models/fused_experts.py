"""Checkpoints that have the experts of a layer as two tensors of all of them."""

import dataclasses

from ..core.param import Param, Stack, Table
from ..core.parts import Part


def fused(table: Table, transposed: bool = False) -> Table:
    """The table with tensors of all experts of a layer, as transformers' modules name them, in place of one for each.

    They are `experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj` [E, D, F]; without a gate, `experts.up_proj`.

    Args:
      transposed: they are [E, D, 2 F] and [E, F, D].
    """

    def one(name: str, p: Param, gated: bool) -> Param:
        at, found, module = p.keys[-1].partition("{expert}.")
        if not found:
            return p
        rows = table.dims[p.axes.split()[1]]
        if gated and name in ("expert_gate", "expert_up"):
            start = 0 if name == "expert_gate" else rows
            part = Part(2 * rows, start, start + rows, axis=1, transposed=transposed)
            return dataclasses.replace(p, keys=(f"{at}gate_up_proj",), part=part)
        part = Part(rows, 0, rows, axis=1, transposed=True) if transposed else None
        return dataclasses.replace(p, keys=(at + module.removesuffix(".weight"),), part=part)

    def each(stack: Stack) -> Stack:
        gated = "expert_gate" in stack.params
        return Stack(stack.layers, {name: one(name, p, gated) for name, p in stack.params.items()})

    return dataclasses.replace(table, stacks=tuple(map(each, table.stacks)))
