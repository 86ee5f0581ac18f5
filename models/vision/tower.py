"""Vision towers: patches of several images, packed into rows, to features for a text model.

Attention goes both ways within a frame of an image or video, or within a window of it. Biases, learnt places and the
gate of MLPs are applied if the weights exist, so a family is defined by its table and the fields of `Tower`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.param import Table
from ...core.segments import segment_index
from ...core.shapes import shaped
from ...parallel import context, rules
from .. import remat
from ..attention import backends
from ..attention.pattern import Pattern
from ..layers import rope
from ..layers.linear import linear
from ..layers.mlp import Activation, gated_mlp, mlp
from ..layers.norm import layer_norm, rms_norm

EPS = 1e-6  # of all norms
GELU = Activation("gelu_tanh")


@dataclass(frozen=True)
class Tower:
    """Sizes and constants of a vision tower; a patch is `frames` x `patch` x `patch` pixels of `channels`.

    Attributes:
      wrapper: model_type of the wrapper.
      embed, ffn, layers, heads: sizes of the tower.
      out: size of a feature: that of the text model's embeddings.
      merge: a feature is of merge x merge patches.
      window: patches along the side of an attention window, a multiple of `merge`; None = no layer has windows.
      full: layers that attend to whole frames where the others have windows.
      places: learnt places, a square grid; 0 = none.
      taps: layers behind which features are taken for the first layers of the text model (arXiv:2406.04334).
      theta: base of the wavelengths of the rotary embedding in height and width.
      image, video: token ids that stand for a feature of an image or video.
      frames_apart: the frames of a video are apart in the text, with time stamps between them.
      per_second: positions in time of a second of video, where frames are not apart.
      trained: False = frozen.
    """

    wrapper: str
    embed: int
    ffn: int
    layers: int
    heads: int
    out: int
    patch: int
    frames: int
    channels: int
    merge: int
    image: int
    video: int
    window: int | None = None
    full: tuple[int, ...] = ()
    places: int = 0
    taps: tuple[int, ...] = ()
    theta: float = 10000.0
    frames_apart: bool = False
    per_second: float = 1.0
    init_std: float = 0.02
    trained: bool = True

    @property
    def unit(self) -> int:
        """Patches of a feature."""
        return self.merge**2

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch**2

    def kind(self, layer: int) -> tuple[bool, int]:
        """What layers of one stack have in common: whether they attend to whole frames, and the taps before them."""
        return self.window is None or layer in self.full, sum(tap < layer for tap in self.taps)


@shaped
def features(
    params, patch_BPF, patch_frame_BP, patch_place_BPC, patch_window_BP=None, *, tower: Tower, table: Table, run: Any
):
    """Encodes patches: (features [B, U, D], features for the first N text layers [N, B, U, D]).

    A feature is of merge^2 patches side by side, U = P / merge^2; N is the number of taps.

    Args:
      patch_BPF: pixels of patches in the order of `patches.arrange`, which says what the other arrays are.
      run: a `models.Run`.
    """
    dtype = run.dtype or params["patch"].dtype
    top = rules.gather({name: w for name, w in params.items() if name != "stacks"}, table.top)
    x_BPD = linear(patch_BPF.astype(dtype), top["patch"].reshape(tower.embed, -1), top.get("patch_bias"))
    if "places" in top:
        x_BPD = x_BPD + learnt_places(top["places"], patch_place_BPC).astype(dtype)
    turn = axial_tables(patch_place_BPC, tower)
    segments = {True: patch_frame_BP, False: patch_window_BP}
    steps = [
        remat.checkpoint(run.remat)(partial(_layer, stack.params, tower, run, turn, whole, segments[whole]))
        for stack in table.stacks
        for whole, _ in [tower.kind(stack.layers[0])]
    ]
    taken = []
    for turns in table.rounds:

        def one_of_each(x_BPD, each, turns=turns):
            for i, w in zip(turns, each, strict=True):
                x_BPD = steps[i](x_BPD, w)
            return x_BPD, None

        x_BPD, _ = jax.lax.scan(one_of_each, x_BPD, [params["stacks"][i] for i in turns])
        if (last := table.stacks[turns[-1]].layers[-1]) in tower.taps:
            taken.append(_merged(x_BPD, top, f"tap{tower.taps.index(last)}", tower))
    merged_BUD = _merged(x_BPD, top, "merge", tower)
    return merged_BUD, jnp.stack(taken) if taken else jnp.zeros((0, *merged_BUD.shape), dtype)


def _layer(params, tower: Tower, run, turn, whole: bool, segment_BP, x_BPD, w):
    x_BPD = checkpoint_name(x_BPD, "layer_input")
    w = rules.gather(w, params, x_BPD.dtype)
    h_BPD = _norm(x_BPD, w, "norm1")

    def heads(name):
        x = checkpoint_name(linear(h_BPD, w[name], w[f"{name}_bias"]), "qkv")
        return x.reshape(*x.shape[:2], tower.heads, -1)

    q_BPNH, k_BPNH = (rope.rotate(heads(name), *turn) for name in ("q", "k"))
    a_BPNH = _attend(q_BPNH, k_BPNH, heads("v"), segment_BP, whole, tower, run)
    out_BPD = linear(a_BPNH.reshape(*a_BPNH.shape[:2], -1), w["o"], w["o_bias"])
    x_BPD = x_BPD + checkpoint_name(out_BPD, "attention_out")
    h_BPD = _norm(x_BPD, w, "norm2")
    x_BPD = x_BPD + (gated_mlp(h_BPD, w) if "gate" in w else mlp(h_BPD, w, GELU))
    return rules.constrain(x_BPD, "batch seq hidden")


def _attend(q_BPNH, k_BPNH, v_BPNH, segment_BP, whole: bool, tower: Tower, run):
    """Attention of each patch to all of its segment."""
    index_BP = jnp.where(segment_BP > 0, segment_index(segment_BP), 0)
    pattern = Pattern(bidirectional=True, window=None if whole else tower.window**2)  # a window's patches are adjacent
    causal = partial(backends.causal, backend=run.attention, pattern=pattern, query_chunk=run.query_chunk)
    return context.attention(causal, None, q_BPNH, k_BPNH, v_BPNH, segment_BP, index_BP, pattern=pattern)


def _norm(x, w, name: str):
    if f"{name}_bias" in w:
        return layer_norm(x, w[name], w[f"{name}_bias"], EPS)
    return rms_norm(x, w[name], EPS)


def _merged(x_BPD, top, name: str, tower: Tower):
    """Features of neighbouring patches, normalised one by one, or together if the norm is as wide."""
    B, P, D = x_BPD.shape
    wide = top[f"{name}_norm"].shape[-1] > D
    join = lambda x: x.reshape(B, P // tower.unit, tower.unit * D)
    x_BUM = _norm(join(x_BPD), top, f"{name}_norm") if wide else join(_norm(x_BPD, top, f"{name}_norm"))
    hidden = jax.nn.gelu(linear(x_BUM, top[f"{name}_up"], top[f"{name}_up_bias"]), approximate=False)
    return linear(hidden, top[f"{name}_down"], top[f"{name}_down_bias"])


@shaped
def axial_tables(place_BPC, tower: Tower):
    """(cos, sin) of each patch, f32[B, P, H / 2]: half of the frequencies turn with its row, half with its column."""
    half = tower.embed // tower.heads // 2
    freq = jnp.asarray(rope.frequencies(rope.Rope(tower.theta), half), jnp.float32)
    angle_BP2F = place_BPC[..., :2, None].astype(jnp.float32) * freq[None, None, None]
    angle_BPH = angle_BP2F.reshape(*angle_BP2F.shape[:2], -1)
    return jnp.cos(angle_BPH), jnp.sin(angle_BPH)


@shaped
def learnt_places(table_ED, place_BPC):
    """Learnt embeddings of a square grid, stretched over each image's grid and interpolated bilinearly, [B, P, D]; the
    corners of both are the same places."""
    side = math.isqrt(table_ED.shape[0])

    def around(at, size):
        """The two places of the learnt grid around one of the image's, and their weights."""
        x = at * (side - 1) / jnp.maximum(size - 1, 1)
        low = jnp.floor(x)
        index = low.astype(jnp.int32)
        return (index, 1 - (x - low)), (jnp.minimum(index + 1, side - 1), x - low)

    row, column, rows, columns = jnp.moveaxis(place_BPC.astype(jnp.float32), -1, 0)
    return sum(
        jnp.take(table_ED, i * side + j, axis=0) * (a * b)[..., None]
        for i, a in around(row, rows)
        for j, b in around(column, columns)
    )
