"""The chips' own compilers take each kernel at every kind of size, dtype and pattern that it promises to compute."""

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import kernels
import pytest

from areax.adapters.commands import compiled
from areax.models.attention.pattern import PLAIN, Pattern

pytestmark = pytest.mark.skipif(not os.environ.get("AREAX_COMPILERS"), reason="make test-compilers")
FLOATS, EIGHT = ("bfloat16", "float16", "float32"), "float8_e4m3fn"
PATTERNS = {
    "window": Pattern(window=300), "chunk": Pattern(chunk=300), "softcap": Pattern(softcap=20.0),
    "bidirectional": Pattern(bidirectional=True), "around": Pattern(window=300, bidirectional=True),
    "all": kernels.ALL,
}  # fmt: skip
OF_SPLASH = {"all": Pattern(window=300, scale=0.3, softcap=20.0)} | {
    name: PATTERNS[name] for name in ("window", "softcap", "bidirectional", "around")
}
MATRICES = (8, 16, 48), (128, 768, 2048), (32, 2880, 2880), (16, 1856, 2688), (60, 1408, 2048)  # experts, F, D


def _begin():
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="module")
def made():
    """f(function of `kernels`, chip, ...) -> `compiled.Compiled`, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin) as pool:
        yield lambda lower, chip, *args, **options: pool.submit(
            compiled.compiled, kernels.program(lower, *args, **options), chip
        ).result()


def taken(found, count):
    assert not found.problem and sum(found.kernels.values()) == count, found


def wide(cases, core):
    """The cases, marked `wide` but for those in `core`."""
    return [pytest.param(*case, marks=() if case in core else pytest.mark.wide) for case in cases]


SIZES = (16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (128, 256)


@pytest.mark.parametrize("dtype, H, V", wide([(d, *s) for d in FLOATS for s in SIZES], [("bfloat16", 256, 256)]))
def test_triton_computes_heads_of_every_size(dtype, H, V, made):
    taken(made(kernels.packed, "h100", "triton", H, V, dtype=dtype), 3)


@pytest.mark.parametrize(
    "dtype, H, name", wide(list(itertools.product(FLOATS, (64, 256), PATTERNS)), [("float32", 256, "all")])
)
def test_triton_computes_every_pattern(dtype, H, name, made):
    taken(made(kernels.packed, "h100", "triton", H, dtype=dtype, pattern=PATTERNS[name], sinks=name == "all"), 3)


@pytest.mark.wide
@pytest.mark.parametrize("pattern", [PLAIN, kernels.ALL], ids=["plain", "all"])
@pytest.mark.parametrize("H", [64, 256])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lower", [kernels.gathered, kernels.block, kernels.tries])
def test_triton_computes_other_keys_rings_and_tries(lower, dtype, H, pattern, made):
    named = ("triton",) if lower is kernels.gathered else ()
    taken(made(lower, "h100", *named, H, dtype=dtype, pattern=pattern), 3)


@pytest.mark.wide
@pytest.mark.parametrize("chip", ["a100", "b200"])
@pytest.mark.parametrize("H", [128, 256])
def test_triton_computes_on_other_gpus(H, chip, made):
    taken(made(kernels.packed, chip, "triton", H, pattern=kernels.ALL, sinks=True), 3)


PAGED = (16, 16), (64, 64), (80, 96), (96, 96), (128, 128), (192, 128), (240, 240), (224, 256), (256, 256)


@pytest.mark.parametrize(
    "chip, H, V, T, kept",
    wide(
        [
            (c, *s, T, k)
            for c in ("a100", "h100", "b200")
            for s in PAGED
            for T in (1, 16)
            for k in (None, EIGHT)
            if (c, k) != ("a100", EIGHT)
        ],  # fmt: skip
        [("h100", 256, 256, 16, None), ("a100", 256, 256, 16, None), ("h100", 128, 128, 1, EIGHT)],
    ),
)
def test_gpus_read_pages(chip, H, V, T, kept, made):
    taken(made(kernels.pages, chip, "gpu", H, V, T=T, kept=kept), 1)


@pytest.mark.wide
@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("H, V, C", [(128, 128, 128), (192, 128, 128), (256, 256, 16), (256, 256, 64), (64, 64, 256)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpus_read_pages_of_every_dtype(dtype, H, V, C, T, made):
    taken(made(kernels.pages, "h100", "gpu", H, V, dtype=dtype, C=C, T=T, pattern=kernels.ALL), 1)


@pytest.mark.parametrize(
    "dtype, sizes", wide(list(itertools.product(FLOATS, MATRICES)), [("bfloat16", (128, 768, 2048))])
)
def test_triton_multiplies_experts(dtype, sizes, made):
    taken(made(kernels.experts, "h100", "triton", *sizes, dtype=dtype), 3)


@pytest.mark.parametrize(
    "dtype, H, V",
    wide([(d, *s) for d in ("bfloat16", "float32") for s in (*SIZES, (512, 512))], [("bfloat16", 128, 128)]),
)
def test_splash_computes_heads_of_every_size(dtype, H, V, made):
    taken(made(kernels.packed, "v5p", "splash", H, V, dtype=dtype), 3)


@pytest.mark.wide
@pytest.mark.parametrize("name", OF_SPLASH)
@pytest.mark.parametrize("H", [128, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_splash_computes_every_pattern(dtype, H, name, made):
    pattern = OF_SPLASH[name]
    taken(made(kernels.packed, "v5p", "splash", H, dtype=dtype, pattern=pattern, sinks=name == "all"), 3)
    if not pattern.bidirectional and H == 128:
        taken(made(kernels.gathered, "v5p", "splash", H, dtype=dtype, pattern=pattern), 3)


HEADS = (32, 8), (32, 32), (32, 2), (96, 8)


@pytest.mark.parametrize(
    "heads, T, dtype, kept",
    wide(
        list(itertools.product(HEADS, (1, 128), ("bfloat16", "float32"), (None, EIGHT))),
        [((32, 8), 128, "bfloat16", None), ((96, 8), 128, "bfloat16", EIGHT)],
    ),
)
def test_tpus_read_pages(heads, T, dtype, kept, made):
    taken(made(kernels.pages, "v5p", "tpu", 128, heads=heads, T=T, dtype=dtype, kept=kept), 1)


@pytest.mark.wide
@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize(
    "H, V, heads, T, C",
    [
        (72, 60, (8, 2), 1, 128), (256, 256, (32, 32), 128, 128), (576, 512, (128, 1), 1, 128),
        (576, 512, (128, 1), 128, 128), (128, 128, (56, 56), 128, 128), (128, 128, (8, 2), 16, 512),
    ],
)  # fmt: skip
def test_tpus_read_pages_of_every_size(H, V, heads, T, C, chip, made):
    taken(made(kernels.pages, chip, "tpu", H, V, heads=heads, T=T, C=C, pattern=kernels.ALL), 1)


@pytest.mark.parametrize(
    "dtype, sizes",
    wide(list(itertools.product(("bfloat16", "float32"), MATRICES)), [("bfloat16", (32, 2880, 2880))]),
)
def test_megablox_multiplies_experts(dtype, sizes, made):
    taken(made(kernels.experts, "v5p", "megablox", *sizes, dtype=dtype), 3)
