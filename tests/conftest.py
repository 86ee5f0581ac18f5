"""How every test runs: offline, on eight virtual CPU devices, with implicit broadcasting refused.

The environment is set before JAX and torch load, and child processes inherit it.
`JAX_PLATFORMS=cuda pytest -m gpu` runs the tests of an accelerator.
"""

import os
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "OMP_NUM_THREADS": "2",  # torch's threads: the suite is meant for two cores
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers warns in every forked child
}.items():
    os.environ.setdefault(name, value)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # JAX does not write its cache in one piece: none is shared
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples in every run, and no deadline: the first call of a jitted function compiles it.
hypothesis.settings.register_profile("areax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("areax")
