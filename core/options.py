"""Types of the options that presets take, so that type checkers know them: `losses.GRPO(clip_hihg=0.3)` is an error.

Each has the fields of its dataclass, all optional; a test compares them.
"""

from typing import Literal, TypedDict

from .advantages import Advantage
from .corrections import Correction
from .denominators import Denominator
from .entropy import Entropy
from .kl import KL
from .observation import Observation
from .shaping import Shaping
from .surrogates import Choice


class ShapingOptions(TypedDict, total=False):
    bias: float
    scale: float
    low: float
    high: float
    overlong_tokens: int
    overlong_buffer: int
    overlong_penalty: float
    unfinished_penalty: float
    truncated: Literal["keep", "mask", "drop"]
    dynamic_sampling: bool


class AdvantageOptions(TypedDict, total=False):
    credit: Literal["rollout", "return", "gae"]
    mean: Literal["group", "batch", "none", "greedy", "moving", "optimal_value", "optimal_token"]
    std: Literal["group", "batch", "none", "mean"]
    leave_one_out: bool
    length_weighted: bool
    ddof: int
    eps: float
    components: tuple[str, ...]
    component_weights: tuple[float, ...]
    whiten: Literal["none", "token", "rollout"]
    gamma: float
    lam: float
    lam_alpha: float
    moving_decay: float
    value_temperature: float
    state_coef: float
    state_gamma: float
    teacher: float


class CorrectionOptions(TypedDict, total=False):
    proximal: Literal["recompute", "interpolate", "behaviour"]
    level: Literal["token", "sequence", "geometric"]
    action: Literal["mask", "truncate", "clip"]
    low: float
    cap: float
    normalise: bool
    mask: Literal["none", "ratio", "k1", "k2", "k3"]
    mask_over: Literal["token", "sum", "mean", "max"]
    mask_low: float
    mask_high: float
    veto: float
    drift: float
    binary_kl: float
    second_moment: float
    count_masked: bool


class KLOptions(TypedDict, total=False):
    coef: float
    estimator: Literal["k1", "k2", "k3", "k3_k2"]
    place: Literal["loss", "reward"]
    over: Literal["token", "sequence"]
    ratio: bool
    target: float
    horizon: int


class EntropyOptions(TypedDict, total=False):
    coef: float
    floor: float
    classes: tuple[float, ...]


class ObservationOptions(TypedDict, total=False):
    coef: float
    kinds: tuple[str, ...]


class PolicyOptions(TypedDict, total=False):
    name: str
    note: str
    shaping: Shaping | ShapingOptions
    advantage: Advantage | AdvantageOptions
    correction: Correction | CorrectionOptions
    ratio: Literal["token", "sequence", "sequence_token", "product"]
    surrogate: Choice
    clip_low: float
    clip_high: float
    dual_clip: float
    ratio_cap: float
    tau_pos: float
    tau_neg: float
    vespo_pos: tuple[float, float]
    vespo_neg: tuple[float, float]
    cov_fraction: float
    cov_low: float
    cov_high: float
    cov_coef: float
    tv_low: float
    tv_high: float
    tv_coef: float
    binary_kl_low: float
    binary_kl_high: float
    score_centering: bool
    denominator: Denominator
    denominator_tokens: int
    kl: KL | KLOptions
    entropy: Entropy | EntropyOptions
    observation: Observation | ObservationOptions


class PreferenceOptions(TypedDict, total=False):
    name: str
    note: str
    score: Literal["sum", "mean", "odds"]
    reference: bool
    link: Literal["sigmoid", "square"]
    beta: float
    gamma: float
    label_smoothing: float
    coef: float
    sft_coef: float
