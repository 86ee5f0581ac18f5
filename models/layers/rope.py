"""Rotary position embedding (arXiv:2104.09864) of every family: frequencies, tables, rotation, and its options.

A family states what its config.json leaves out as a `Rope`: theta, the part of a head that turns, pairs or halves.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.shapes import shaped

NEEDED: dict[str, tuple[str, ...]] = {  # kind -> numbers that config.json must have, each a field of Rope
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor",),
    "proportional": (),
}
OPTIONAL: dict[str, tuple[str, ...]] = {  # and those that it may have
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
    "proportional": ("factor",),
}
LISTS = {"longrope": ("short_factor", "long_factor")}  # a number for each frequency
SCALED = "llama3", "yarn", "longrope"  # kinds that know the context before scaling
BY_LENGTH = "longrope", "dynamic"  # kinds whose frequencies depend on the length of the sequence
UNUSED: dict[str, Any] = {  # options of other programs -> the value with which they change nothing; None = any
    "factor": 1.0,
    "attn_factor": 1.0,  # vLLM multiplies it into the magnitude, transformers ignores it
    "extrapolation_factor": 1.0,
    "apply_yarn_scaling": True,
    "finetuned": None,
    "mrope_section": None,  # of text, whose positions are the same on all axes
    "mrope_interleaved": None,
}
INSTEAD = {"attn_factor": "state attention_factor, the whole factor of cos and sin, instead"}
ORIGINAL, PARTIAL, LONGEST = "original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings"
SLIDING = "sliding_attention"  # a layer type


@dataclass(frozen=True)
class Rope:
    """How the queries and keys of a layer turn with their position.

    Attributes:
      theta: base of the wavelengths.
      kind: how frequencies are scaled.
        default: not at all
        linear: all divided by `factor`
        dynamic: not at all up to `original_context`, max_position_embeddings here; above it theta grows with the length
        llama3: long wavelengths divided by `factor`, short ones kept, those between interpolated
        yarn: the same over a ramp of indices (arXiv:2309.00071)
        longrope: each divided by its own factor, of `short_factor` in sequences of up to `original_context` tokens, of
          `long_factor` in longer ones (arXiv:2402.13753)
        proportional: a whole head turns, frequencies beyond the part `partial` are 0 (Gemma 4)
      low_freq_factor, high_freq_factor: turns within original_context between which llama3 interpolates.
      original_context: positions before scaling, in tokens.
      partial: part of a head that turns, its first entries; None = the whole, in families that know no other.
      pairs: entry 2i turns with 2i + 1 (GLM-4, Llama 4, DeepSeek), else i with i + half; for `rotate`.
      attention_factor: multiplied into cos and sin; None = by the rule of the kind (`magnitude`).
      beta_fast, beta_slow: turns within original_context between which yarn interpolates.
      mscale, mscale_all_dim: options of yarn's magnitude; 0 = not given. DeepSeek multiplies the softmax scale by
        `yarn_scale(factor, mscale_all_dim) ** 2`.
      truncate: yarn's ramp begins and ends at whole indices.
      sections: frequencies that turn with time, height and width (M-RoPE); `interleaved`: one each in turn, else in
        blocks. For `axis_tables`; text needs neither.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    partial: float | None = None
    pairs: bool = False
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @property
    def switch(self) -> int | None:
        """Tokens up to which all sequences turn alike, and above which the length decides; None = it never does.

        A sequence's length decides for all of its tokens. transformers goes by the longest sequence of a batch.
        """
        return self.original_context if self.kind in BY_LENGTH else None

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by, so that scores have its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn" and self.mscale and self.mscale_all_dim:
            return yarn_scale(self.factor, self.mscale) / yarn_scale(self.factor, self.mscale_all_dim)
        if self.kind == "yarn":
            return yarn_scale(self.factor)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        return 1.0


def yarn_scale(factor: float, k: float = 1.0) -> float:
    """0.1 k ln(factor) + 1, and 1 up to factor 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * k * math.log(factor) + 1 if factor > 1 else 1.0


def frequencies(rope: Rope, head_dim: int, long: bool = False) -> np.ndarray:
    """Angular frequencies in radians per position, f64[P]; the first 2P entries of a head turn.

    Args:
      long: those of longrope in sequences longer than `Rope.switch`.

    Raises:
      ValueError: longrope's factors do not fit the head; names both sizes.
    """
    part = 1.0 if rope.partial is None else rope.partial
    turned = head_dim if rope.kind == "proportional" else int(part * head_dim)
    freq = rope.theta ** -(np.arange(0, turned, 2, dtype=np.float64) / turned)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        # Long wavelengths are divided by the factor, short ones kept, those between interpolated.
        low, high = rope.low_freq_factor, rope.high_freq_factor
        turns = rope.original_context * freq / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low
        return freq * (keep + (1 - keep) / rope.factor)
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, turned, len(freq))
        return freq * (keep + (1 - keep) / rope.factor)
    if rope.kind == "longrope":
        for name in LISTS["longrope"]:
            if len(getattr(rope, name)) != len(freq):
                raise ValueError(
                    f"config.json: {name} must be {len(freq)} numbers, half of the {turned} entries of a head that "
                    f"turn, got {len(getattr(rope, name))}"
                )
        return freq / np.array(rope.long_factor if long else rope.short_factor)
    if rope.kind == "proportional":
        return np.where(np.arange(len(freq)) < int(part * head_dim // 2), freq / rope.factor, 0)
    return freq


def _yarn_ramp(rope: Rope, turned: int, count: int) -> np.ndarray:
    """0 for frequencies that yarn keeps, 1 for those that it divides by the factor, f64[count]."""

    def index(turns):  # of the frequency that makes so many turns within the original context
        return turned * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    return np.clip((np.arange(count) - low) / (high - low or 0.001), 0, 1)


@shaped
def tables(position_BT, rope: Rope, head_dim: int, length_BT=None):
    """(cos, sin) of the rotation angles times the magnitude, each f32[B, T, P]; see `frequencies`.

    Args:
      length_BT: of each token's sequence; not read if rope has no `switch`.

    Raises:
      ValueError: rope has one, and lengths are missing.
    """
    freq = jnp.asarray(frequencies(rope, head_dim), jnp.float32)[None, None]
    if rope.switch is not None:
        if length_BT is None:
            raise ValueError(f"rope_type {rope.kind} needs the length of each token's sequence, got none")
        freq = _by_length(freq, rope, head_dim, length_BT[..., None])
    return _tables(position_BT[..., None].astype(jnp.float32) * freq, rope)


def _by_length(freq_11P, rope: Rope, head_dim: int, length_BT1):
    """The frequencies of sequences of these lengths, f32[B, T, P], given those up to the switch."""
    if rope.kind == "longrope":
        long_11P = jnp.asarray(frequencies(rope, head_dim, long=True), jnp.float32)[None, None]
        return jnp.where(length_BT1 > rope.switch, long_11P, freq_11P)
    # Theta times growth ** (d / (d - 2)), d entries of a head turning: frequency i is theta ** (-2i / d).
    longer_BT1 = jnp.maximum(length_BT1 / rope.original_context, 1).astype(jnp.float32)
    P = freq_11P.shape[-1]
    return freq_11P * (rope.factor * longer_BT1 - (rope.factor - 1)) ** (-jnp.arange(P) / max(P - 1, 1))[None, None]


@shaped
def axis_tables(position_3BT, rope: Rope, head_dim: int):
    """`tables` of positions in time, height and width, each frequency by the axis of its section (arXiv:2409.12191).

    Raises:
      ValueError: the sections do not add up to the frequencies.
    """
    freq = jnp.asarray(frequencies(rope, head_dim), jnp.float32)
    position_PBT = position_3BT.astype(jnp.float32)[axes(rope, head_dim)]
    return _tables(jnp.moveaxis(position_PBT, 0, -1) * freq[None, None], rope)


def axes(rope: Rope, head_dim: int) -> np.ndarray:
    """The axis of each frequency, i64[P]: 0 time, 1 height, 2 width. Raises as `axis_tables`."""
    count = len(frequencies(rope, head_dim))
    if sum(rope.sections) != count:
        raise ValueError(f"config.json: mrope_section must add up to {count}, got {list(rope.sections)}")
    if rope.interleaved:  # t h w t h w ..., and t where height or width have had theirs
        index_P = np.arange(count)
        return np.where(index_P < 3 * np.array(rope.sections)[index_P % 3], index_P % 3, 0)
    return np.repeat(np.arange(3), rope.sections)


def _tables(angle_BTP, rope: Rope):
    cos_BTP, sin_BTP = jnp.cos(angle_BTP), jnp.sin(angle_BTP)
    return (cos_BTP, sin_BTP) if rope.magnitude == 1 else (cos_BTP * rope.magnitude, sin_BTP * rope.magnitude)


@shaped
def rotate(x_BTNH, cos_BTP, sin_BTP, pairs: bool = False):
    """Turns the first 2P entries of each head by its position, in fp32 or wider; returns x's dtype.

    Entry i turns with i + P; with `pairs`, 2i with 2i + 1. The other entries pass.
    """
    turned, rest = 2 * cos_BTP.shape[-1], None
    if turned < x_BTNH.shape[-1]:
        x_BTNH, rest = x_BTNH[..., :turned], x_BTNH[..., turned:]
    cos_BT1P, sin_BT1P = cos_BTP[..., None, :], sin_BTP[..., None, :]
    first, second = (x_BTNH[..., ::2], x_BTNH[..., 1::2]) if pairs else jnp.split(x_BTNH, 2, -1)
    both = [first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P]
    out = jnp.stack(both, -1).reshape(x_BTNH.shape) if pairs else jnp.concatenate(both, -1)
    out = out.astype(x_BTNH.dtype)
    return out if rest is None else jnp.concatenate([out, rest], -1)


def from_hf(hf: dict, default: Rope = Rope(), others: tuple[str, ...] = ()) -> Rope:
    """Reads a config.json, in the new spelling (`rope_parameters`) or the old (`rope_theta`, `rope_scaling`).

    `default` is what the family does where config.json is silent; it also states `pairs`, whether heads may turn in
    part (`partial` a number) and whether positions have axes (`sections`), which no option says. `others` are options
    in the same place that the family reads itself.

    Raises:
      ValueError: a kind of scaling that is not implemented, parameters by layer type, an option that is missing or no
        number above 0, one that the kind does not use, or spellings that disagree; names it.
    """
    for name in ("rope_parameters", "rope_scaling") if default.kind != "default" else ():
        if hf.get(name) == {}:  # which is not null to transformers: it has no default then
            raise ValueError(f"config.json: {name} must have options, or be null, got {{}}")
    # A part that belongs to the family's kind is not that of options which state a kind themselves.
    stated = replace(default, partial=None) if default.kind == "proportional" else default
    spellings = [name for name in ("rope_parameters", "rope_scaling") if hf.get(name)]
    given = {name: _read(hf, name, hf[name], stated, others) for name in spellings}
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(
            f"config.json: rope_scaling and rope_parameters must agree, got {hf['rope_scaling']} (with rope_theta "
            f"{hf.get('rope_theta')}) and {hf['rope_parameters']}; remove the wrong one"
        )
    # Without either, the family's kind with all its options.
    return next(iter(given.values())) if given else _read(hf, "rope_theta", _options(default), default)


def by_layer_type(hf: dict, defaults: Mapping[str, Rope], local: str | None = None) -> dict[str, Rope]:
    """Reads a config.json with one set of options per layer type: {layer type: its Rope}.

    One set for all, in either spelling, is that of each layer type.

    Args:
      defaults: {layer type: what the family does where config.json is silent}; see `from_hf`.
      local: the old spelling had options by layer type too: this one is theta of sliding layers, which are not scaled;
        rope_theta and rope_scaling are for the others. Gemma 3: rope_local_base_freq; Olmo 3: rope_theta, for both.

    Raises:
      ValueError: as `from_hf`, or options of a layer type that the family has not.
    """
    new = hf.get("rope_parameters")
    nested = isinstance(new, dict) and any(isinstance(options, dict) for options in new.values())
    if new and not nested and local:
        raise ValueError(
            f"config.json: rope_parameters must have options for each of {', '.join(defaults)}, got {new!r:.200}"
        )
    if not nested and not local:
        return {kind: from_hf(hf, default) for kind, default in defaults.items()}
    if nested and (unknown := new.keys() - defaults):
        raise ValueError(
            f"config.json: rope_parameters must have options for {' and '.join(defaults)} alone, got {sorted(unknown)}"
        )
    ropes = {}
    for kind, default in defaults.items():
        # As in transformers, the model's original_max_position_embeddings is not that of a layer type.
        one = {name: value for name, value in hf.items() if name not in ("rope_parameters", "rope_scaling", ORIGINAL)}
        if local and kind == SLIDING:
            one["rope_theta"] = hf.get(local, default.theta)
        elif hf.get("rope_scaling"):
            one["rope_scaling"] = hf["rope_scaling"]
        if nested and kind in new:
            one["rope_parameters"] = new[kind]
        ropes[kind] = from_hf(one, default)
        if nested and not ropes[kind].truncate:  # transformers looks for it beside the layer types and takes true
            raise ValueError("config.json: truncate must be true in rope_parameters by layer type, got false")
    return ropes


def _read(hf: dict, name: str, scaling: Any, default: Rope, others: tuple[str, ...] = ()) -> Rope:
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            f"config.json: {name} must be one set of options for all layers, got {scaling!r:.200}, which is not "
            "implemented"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "su":  # an older name, in Phi 3
        kind = "longrope"
    if kind == "mrope" and default.sections:  # an older name, in Qwen2-VL
        kind = "default"
    if kind not in list(NEEDED):
        *kinds, last = NEEDED
        raise ValueError(
            f"config.json: rope_type must be {', '.join(kinds)} or {last}, got {kind!r}, which is not implemented"
        )
    partial = scaling.get(PARTIAL, hf.get(PARTIAL, default.partial))
    if default.partial is None and kind != "proportional":
        if partial not in (None, 1.0):
            raise ValueError(f"config.json: {PARTIAL} must be 1, got {partial}")
        partial = None
    elif partial is None:
        partial = 1.0
    elif type(partial) not in (int, float) or not 0 < partial <= 1:
        raise ValueError(f"config.json: {PARTIAL} must be a number above 0 and at most 1, got {partial!r}")
    sections = scaling.get("mrope_section", list(default.sections)) if default.sections else []
    if default.sections and not (
        isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n > 0 for n in sections)
    ):
        raise ValueError(f"config.json: mrope_section must be three whole numbers above 0, got {sections!r:.80}")

    _refuse_unused(name, kind, scaling, others)

    # As in transformers, the model's original context comes first.
    scaling = {**scaling, **{name: hf[name] for name in (ORIGINAL, LONGEST) if name in hf}}

    def number(option: str, otherwise: Any = None, least: int = 0) -> float:
        """The option, above `least`."""
        value = scaling.get(option, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= sys.float_info.max:
            raise ValueError(f"config.json: {option} of rope_type {kind} must be a number above {least}, got {value!r}")
        return float(value)

    def numbers(option: str) -> tuple[float, ...]:
        values = scaling.get(option)
        most = sys.float_info.max
        if not isinstance(values, list) or not all(type(v) in (int, float) and 0 < v <= most for v in values):
            raise ValueError(
                f"config.json: {option} of rope_type {kind} must be a list of numbers above 0, got {values!r:.80}"
            )
        return tuple(map(float, values))

    theta = number("rope_theta", hf.get("rope_theta", default.theta), least=int(kind == "yarn"))  # yarn takes its log
    fields: dict[str, Any] = {}
    if kind in SCALED:
        fields["original_context"] = math.ceil(number(ORIGINAL, scaling.get(LONGEST), least=int(kind != "llama3")))
    if kind == "longrope" and scaling.get("factor") is None:
        scaling["factor"] = number(LONGEST) / fields["original_context"]
    fields |= {option: number(option) for option in NEEDED[kind]}
    for option in OPTIONAL.get(kind, ()):
        if scaling.get(option) is not None and not ("mscale" in option and scaling[option] == 0):
            fields[option] = number(option)
    if kind == "longrope":
        fields |= {option: numbers(option) for option in LISTS[kind]}
    if kind == "dynamic":
        fields["original_context"] = math.ceil(number(LONGEST))
    if kind in BY_LENGTH and sections:
        raise ValueError(f"config.json: rope_type of a model that reads images must not be {kind}: not implemented")
    if kind == "yarn" and type(fields.setdefault("truncate", scaling.get("truncate", True))) is not bool:
        raise ValueError(f"config.json: truncate must be true or false, got {scaling['truncate']!r:.80}")
    rope = Rope(
        theta, kind, partial=partial, pairs=default.pairs, sections=tuple(sections), interleaved=default.interleaved,
        **fields,
    )  # fmt: skip
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(rope, high) < getattr(rope, low):
            raise ValueError(
                f"config.json: {high} must be at least {low} {getattr(rope, low):g}, got {getattr(rope, high):g}"
            )
    return rope


def _refuse_unused(name: str, kind: str, scaling: dict, others: tuple[str, ...]) -> None:
    """Raises ValueError for an option that would change something and is not used."""
    used = {"rope_type", "type", "rope_theta", PARTIAL, ORIGINAL, LONGEST, *others}
    used |= {*NEEDED[kind], *OPTIONAL.get(kind, ()), *LISTS.get(kind, ()), *(["truncate"] if kind == "yarn" else [])}
    for option, value in scaling.items():
        if option not in used and value is not None and UNUSED.get(option, math.nan) not in (None, value):
            raise ValueError(
                f"config.json: {name} must have no option that rope_type {kind} does not use, got {option} "
                f"{value!r:.80}; {INSTEAD.get(option, 'remove it')}"
            )


def to_hf(rope: Rope, hf: Mapping[str, Any] | None = None) -> dict:
    """The rope options of a config.json, in both spellings; options of `hf` in the same places that rope does not use,
    like Ministral 3's llama_4_scaling_beta, are kept."""
    options = _options(rope)
    kept = _kept((hf or {}).get("rope_parameters") or (hf or {}).get("rope_scaling"), options)
    return {
        "rope_theta": rope.theta,
        **_partial(rope),
        "rope_scaling": None if options == {"rope_type": "default"} else {**kept, **options},
        "rope_parameters": {**kept, **options, **_partial(rope), "rope_theta": rope.theta},
    }


def to_hf_by_layer_type(ropes: Mapping[str, Rope], local: str | None = None, hf: Mapping[str, Any] | None = None):
    """`to_hf` for `by_layer_type`; in the old spelling too where there is one (`local`) that can say it."""
    sources = (hf or {}).get("rope_parameters") or {}
    parameters = {
        kind: {**_kept(sources.get(kind), _options(rope)), **_options(rope), **_partial(rope), "rope_theta": rope.theta}
        for kind, rope in ropes.items()
    }
    old: dict[str, Any] = {}
    if local:
        old = {"rope_scaling": None}  # none is left of an older file; the others stand beside what layer types state
        [full] = [rope for kind, rope in ropes.items() if kind != SLIDING]
        sliding = ropes[SLIDING]
        if sliding.kind == "default" and (local != "rope_theta" or sliding.theta == full.theta):
            old = {local: sliding.theta} | to_hf(full)
    return {**old, "rope_parameters": parameters}


def _options(rope: Rope) -> dict:
    """The options of a rope_scaling."""
    options: dict = {"rope_type": rope.kind} | {name: getattr(rope, name) for name in NEEDED[rope.kind]}
    for name in (*OPTIONAL.get(rope.kind, ()), "truncate"):
        if getattr(rope, name) != getattr(Rope, name):
            options[name] = getattr(rope, name)
    if rope.kind in SCALED:
        options[ORIGINAL] = rope.original_context
    if rope.kind == "longrope":
        options |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.sections:
        options["mrope_section"] = list(rope.sections)
    if rope.interleaved:
        options["mrope_interleaved"] = True
    return options


def _partial(rope: Rope) -> dict:
    return {} if rope.partial is None else {PARTIAL: rope.partial}


def _kept(source: Any, options: Mapping[str, Any]) -> dict:
    """The options of a config.json's rope_parameters that are neither fields of Rope nor among `options`."""
    ours = {"rope_type", "type", "rope_theta", ORIGINAL, PARTIAL, *vars(Rope()), *options}
    return {name: value for name, value in (source or {}).items() if name not in ours}
