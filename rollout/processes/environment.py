"""The environment of reward workers and agents' programs, which must not inherit the trainer's secrets.

Keys and tokens are in environment variables (WANDB_API_KEY, HF_TOKEN, AREAX_SERVER_KEY). A program gets those below,
which hold no secrets, and those that the user names. This keeps accidents away, not attackers: a process of the same
user can read the trainer's memory and files. Code that is not trusted belongs in `sandbox`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
)  # fmt: skip
PREFIXES = ("LC_", "PYTHON")


def passed(names: Sequence[str], option: str) -> dict[str, str]:
    """The variables of this process named in PASSED, beginning with PREFIXES, or in `names`.

    Args:
      option: the option that gives the names, for errors.

    Raises:
      ValueError: a variable in `names` is not set.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"{option}: must name variables that are set, got {', '.join(missing)}")
    wanted = {*PASSED, *names}
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(PREFIXES)}
