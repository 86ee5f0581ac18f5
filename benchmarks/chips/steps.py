"""The list of steps, the most valuable first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Case = tuple[str, str, str]  # shape, system, remat


@dataclass(frozen=True)
class Step:
    """One row of chips.json.

    Attributes:
      name: unique; the part before the first slash names a section of CHIPS.md.
      kind: the module of this package whose `measure` takes `settings`.
      limit_s: seconds before its process group is killed.
      after: a step that must not have failed for this one to run: if a row does not fit, a longer one does not either.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    limit_s: int
    after: str = ""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      shape: the model for decoding, GRPO and long rows.
      dtype: of the computation.
      lengths: tokens per training step.
      first, later: training cases; the later ones come last of all steps.
      timed: `steps` timed training steps after `uncounted` warm-up steps.
      slots: sequences that the engine decodes at a time.
      decode: its other settings.
      grpo: settings of each run, by name: "defaults" leaves out all options that a run needs not have.
      trie: settings of an update on samples that share their prompt.
      offload: settings of a training step whose state is in the host's memory.
      rows: {length of a row of one sequence: time limit}.
      limits_s: time limits of the other steps, by kind.
    """

    shape: str
    dtype: str
    lengths: tuple[int, ...]
    first: tuple[Case, ...]
    later: tuple[Case, ...]
    timed: dict[str, int]
    slots: tuple[int, ...]
    decode: dict[str, int]
    grpo: dict[str, dict]
    trie: dict[str, Any]
    offload: dict[str, Any]
    rows: dict[int, int]
    limits_s: dict[str, int]


DENSE, MIXTURE, LARGE = "Qwen3-0.6B", "Qwen3-30B-A3B-2-layers", "Qwen3-8B-4-layers"
FAST, FRUGAL = (("areax", "dots"), ("transformers", "none")), (("areax", "full"), ("transformers", "full"))
FULL = Sizes(
    shape=DENSE, dtype="bfloat16", lengths=(16384, 4096),
    first=tuple((shape, *case) for shape in (DENSE, MIXTURE) for case in FAST),
    later=(
        *((shape, *case) for shape in (DENSE, MIXTURE) for case in FRUGAL),
        *((LARGE, *case) for case in (*FAST, *FRUGAL)),
    ),
    timed=dict(steps=10, uncounted=3), slots=(16, 64, 128, 256), decode=dict(prompt=128, new=512, repeats=3),
    grpo={
        "defaults": dict(shape=DENSE, length=1024, prompt=224, steps=20, options={}),
        "eta 1, 128 slots": dict(
            shape=DENSE, length=1024, prompt=224, steps=6, options={
                "groups": 16, "group-size": 8, "eta": 1, "max-concurrent": 32, "length": 1024, "rows": 8,
                "sampling.max-new-tokens": 768, "run.dtype": "bfloat16", "run.remat": "dots", "serve.slots": 128,
                "serve.context": 1024, "serve.dtype": "bfloat16",
            },
        ),
    },
    trie=dict(shape=DENSE, samples=16, prompt=2048, completion=256, remat="dots"),
    offload=dict(shape="Qwen3-8B", dtype="bfloat16", length=4096, rows=2, microbatches=4, steps=2),
    rows={65536: 100, 131072: 150, 163840: 180, 196608: 240, 229376: 300, 262144: 360, 393216: 480},
    limits_s=dict(smoke=240, train=120, trie=120, decode=120, grpo=420, offload=300),
)  # fmt: skip
TINY = Sizes(
    shape="tiny", dtype="float32", lengths=(64,),  # XLA's CPU backend lacks some bf16 matmuls
    first=(("tiny", "areax", "dots"), ("tiny", "transformers", "full"), ("tiny-moe", "areax", "dots")), later=(),
    timed=dict(steps=2, uncounted=1), slots=(4,), decode=dict(prompt=8, new=8, repeats=1),
    grpo={
        "small": dict(
            shape="tiny", length=64, prompt=8, steps=4, options={
                "groups": 2, "group-size": 2, "eta": 1, "max-concurrent": 4, "length": 64, "rows": 2,
                "sampling.max-new-tokens": 8, "run.dtype": "float32", "run.remat": "dots", "serve.slots": 4,
                "serve.context": 64, "serve.dtype": "float32",
            },
        ),
    },
    trie=dict(shape="tiny", samples=4, prompt=32, completion=8, remat="dots"),
    offload=dict(shape="tiny", dtype="float32", length=64, rows=2, microbatches=2, steps=1), rows={128: 240},
    limits_s=dict(smoke=240, train=240, trie=240, decode=240, grpo=240, offload=240),
)  # fmt: skip


def steps(sizes: Sizes, mark: str, peer: bool) -> list[Step]:
    """All steps.

    Args:
      mark: pytest mark of the kernel tests: "gpu" or "tpu".
      peer: also measure transformers.
    """
    limit_s, same = sizes.limits_s, {"shape": sizes.shape, "dtype": sizes.dtype}
    slots = ({**same, "slots": n, **sizes.decode} for n in sizes.slots)
    return [
        Step("smoke", "smoke", {"mark": mark}, limit_s["smoke"]),
        *_training(sizes, sizes.first, peer),
        *_tries(sizes),
        *(Step(f"decode/{sizes.shape}/{its['slots']}", "decode", its, limit_s["decode"]) for its in slots),
        *(Step(f"grpo/{its['shape']}/{name}", "grpo", its, limit_s["grpo"]) for name, its in sizes.grpo.items()),
        Step(f"offload/{sizes.offload['shape']}", "offload", sizes.offload, limit_s["offload"]),
        *_rows(sizes),
        *_training(sizes, sizes.later, peer),
    ]


def _training(sizes: Sizes, cases: tuple[Case, ...], peer: bool) -> Iterator[Step]:
    for length in sizes.lengths:
        for shape, system, remat in cases:
            if peer or system == "areax":
                settings = dict(
                    shape=shape, length=length, sequences=4, system=system, remat=remat, dtype=sizes.dtype
                )  # fmt: skip
                name = f"train/{shape}/{length}/{system}/{remat}"
                yield Step(name, "train", settings | sizes.timed, sizes.limits_s["train"])


def _tries(sizes: Sizes) -> Iterator[Step]:
    for layout in ("trie", "rows"):
        settings = sizes.trie | {"layout": layout, "dtype": sizes.dtype} | sizes.timed
        yield Step(f"trie/{sizes.trie['shape']}/{layout}", "trie", settings, sizes.limits_s["trie"])


def _rows(sizes: Sizes) -> Iterator[Step]:
    """Training steps on one row of one sequence, of increasing length."""
    shorter = ""
    for length, limit_s in sizes.rows.items():
        settings = dict(
            shape=sizes.shape, length=length, sequences=1, system="areax", remat="full", dtype=sizes.dtype, steps=1,
            uncounted=1,
        )  # fmt: skip
        yield Step(f"row/{sizes.shape}/{length}", "train", settings, limit_s, after=shorter)
        shorter = f"row/{sizes.shape}/{length}"
