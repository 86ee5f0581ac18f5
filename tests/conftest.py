"""How every test runs: offline, on eight virtual CPU devices, with implicit broadcasting refused.

The environment is set before JAX and torch load, and child processes inherit it.
`JAX_PLATFORMS=cuda pytest -m gpu` runs the tests of an accelerator.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"
collect_ignore = ["clients", "environments", "tinker"]  # their targets of make have packages of their own

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "OMP_NUM_THREADS": "1",  # of torch: two test processes share two cores, and idle threads busy-wait
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers warns in every forked child
}.items():
    os.environ.setdefault(name, value)
# Eight devices on two cores may be late to a collective: by default XLA aborts the process after 40 s.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def exchange(root):
    """Gives each worker the programs that the others compiled in earlier runs. Within a run none are
    shared: JAX does not write files atomically."""
    folders = [root, *root.glob("gw*")]
    for one, other in itertools.permutations(folders, 2):
        for path in one.glob("*-cache"):
            with contextlib.suppress(OSError):  # there already, or a file system without links
                (other / path.name).hardlink_to(path)


if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"
else:
    exchange(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# XLA's pool has a thread a device; where devices wait for each other in all of them, nothing is left to go on with.
os.environ["NPROC"] = "32"  # read once, when the devices are made
jax.config.update("jax_num_cpu_devices", 8)
# As recipes do: no two programs wait for each other's devices.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.devices()
del os.environ["NPROC"]  # child processes have fewer devices

# The same examples in every run, and no limit of time: the first call of a jitted function compiles it, and machines of
# continuous integration stand still for seconds.
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "areax", deadline=None, derandomize=True, database=None, suppress_health_check=slow
)
hypothesis.settings.load_profile("areax")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects no garbage while test files are imported: what imports make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Leaves the modules that are loaded out of garbage collections: what torch, transformers and JAX hold takes a
    second to walk through, and tracing starts hundreds of collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


TIERS = {"slow", "cases", "long", "mesh", "wide", "kernel", "learning", "agents", "docs", "gpu", "tpu"}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects
def pytest_collection_modifyitems(items):
    """Of a test marked `sweep`, leaves the first case where it is, and moves the others one tier down: from `make test`
    to `cases`, from any other to `wide`."""
    seen = set()
    for item in items:
        if item.get_closest_marker("sweep"):
            marks = {mark.name for mark in item.iter_markers()} & TIERS
            case = item.path, item.originalname, frozenset(marks)
            if case in seen:
                item.add_marker("wide" if marks else "cases")
            seen.add(case)


def pytest_runtest_setup(item):
    """Skips tests of an accelerator that JAX does not have here."""
    for platform in ("gpu", "tpu"):
        if item.get_closest_marker(platform) and jax.default_backend() != platform:
            pytest.skip(f"needs a {platform.upper()}, JAX's backend is {jax.default_backend()}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Unloads the compiled programs between two files if the process holds 1.2 GB, within one if it holds 1.9: each
    keeps megabytes, and four of the 65,530 memory mappings that Linux allows. Those that later tests need are read from
    the cache on disk, which takes time."""
    memory = Path("/proc/self/statm")
    if memory.exists():
        _, resident, shared, *_ = map(int, memory.read_bytes().split())
        within = nextitem is not None and nextitem.path == item.path
        if (resident - shared) * os.sysconf("SC_PAGE_SIZE") > (1.9e9 if within else 1.2e9):
            jax.clear_caches()
            if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # else glibc keeps what was freed
                libc.malloc_trim(0)


@pytest.fixture
def compiled():
    """For tests of what C code computes: they are skipped where there is no compiler, and fail where it fails."""
    from areax.models.layers import native

    why = native.missing()
    if shutil.which("cc") is None:
        pytest.skip(why)
    assert not why, why


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Imports modules of benchmarks/ by name, and removes them afterwards, since their names are generic."""
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def warnings_anew():
    """A test's warnings do not depend on those of the test before: of a kind one is logged every ten seconds."""
    if episodes := sys.modules.get("areax.rollout.scheduling.episodes"):
        episodes._warned.clear()
