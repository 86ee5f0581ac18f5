"""Lines of the towers' parameter tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.nn.initializers import normal, ones, zeros

from ...core import param
from ...core.param import Param, Stack, Table
from ...core.parts import Part, split
from .tower import Tower

KERNEL = "vision_embed vision_channel vision_frame vision_row vision_column"  # of the convolution over patches


@dataclass(frozen=True)
class Lines:
    """Makes the lines of a tower's modules, whose checkpoint keys begin with any of `prefixes`."""

    tower: Tower
    prefixes: Sequence[str]

    def one(self, axes: str, key: str, init, part: Part | None = None) -> Param:
        keys = tuple(f"{prefix}{key}" for prefix in self.prefixes)
        return Param(axes, keys, init, trainable=self.tower.trained, part=part)

    def linear(self, name: str, key: str, axes: str, part: Part | None = None) -> dict[str, Param]:
        """A matrix and its bias."""
        bias = self.one(axes.split()[0], f"{key}.bias", zeros, part)
        return {name: self.one(axes, f"{key}.weight", normal(self.tower.init_std), part), f"{name}_bias": bias}

    def norm(self, name: str, key: str, axis: str, bias: bool) -> dict[str, Param]:
        """The weight of a norm, and its bias if it has one."""
        made = {name: self.one(axis, f"{key}.weight", ones)}
        return made | ({f"{name}_bias": self.one(axis, f"{key}.bias", zeros)} if bias else {})

    def attention(self) -> dict[str, Param]:
        """The weights of a layer's attention; those of queries, keys and values are parts of one tensor."""
        made = self.linear("o", "blocks.{layer}.attn.proj", "vision_embed vision_heads")
        for name, part in zip("qkv", split(*[self.tower.embed] * 3), strict=True):
            made |= self.linear(name, "blocks.{layer}.attn.qkv", "vision_heads vision_embed", part)
        return made

    def merger(self, name: str, norm: str, up: str, down: str, *, bias: bool, wide: bool = False) -> dict[str, Param]:
        """The weights that make features of patches, given the keys of a merger's parts."""
        axis = "vision_merged" if wide else "vision_embed"
        return {
            **self.norm(f"{name}_norm", norm, axis, bias),
            **self.linear(f"{name}_up", up, "vision_hidden vision_merged"),
            **self.linear(f"{name}_down", down, "embed vision_hidden"),
        }


def table(tower: Tower, top: dict[str, Param], layer: dict[str, Param]) -> Table:
    """The table of a tower with these weights, a stack for each kind of layer."""
    dims = {
        "embed": tower.out, "vision_embed": tower.embed, "vision_heads": tower.embed, "vision_ffn": tower.ffn,
        "vision_merged": tower.unit * tower.embed, "vision_hidden": tower.unit * tower.embed,
        "vision_channel": tower.channels, "vision_frame": tower.frames, "vision_row": tower.patch,
        "vision_column": tower.patch, "place_vocab": tower.places,
    }  # fmt: skip
    kinds = [tower.kind(i) for i in range(tower.layers)]
    return Table(top, tuple(Stack(layers, layer) for layers in param.stacks(kinds)), dims)
