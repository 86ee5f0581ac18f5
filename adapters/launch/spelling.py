"""Spelling of options that become names, sizes and times of a cluster, which would refuse others only later."""

from __future__ import annotations

import re

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
_DOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_HOST = r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?/"
_PATH = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
# Kubernetes: names of objects, qualified names and quantities; image references as in distribution/reference.
NAME = _DOMAIN, "lower-case letters, digits, - and ., as data-1"
RESOURCE = rf"{_DOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", "a resource's full name, as nvidia.com/gpu"
QUANTITY = (
    r"(?=.*[1-9])([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?",
    "a quantity of Kubernetes, as 64Gi or 500M",
)
IMAGE = (
    rf"({_HOST})?{_PATH}(/{_PATH})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w+.-]*:[0-9a-fA-F]{{32,}})?",
    "an image's reference, as registry/areax:1",
)
# Slurm: sbatch splits its lines at blanks, and reads quotes, backslashes and # in them.
WORD = r"[\w.,:@%+=/-]+", "one word of letters, digits and .,:@%+=/-_"
TIME = (
    r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED|INFINITE",
    "minutes, hours:minutes:seconds or days-hours, as 30, 4:00:00 or 1-12",
)
# Ray
ADDRESS = r"([\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}", "the address of a cluster, as 10.0.0.1:6379"
# SkyPilot
ACCELERATORS = r"[A-Za-z][A-Za-z0-9._-]*(:[1-9][0-9]{0,3})?", "NAME:COUNT, as H100:8"
BUCKET = (  # SkyPilot would refuse another one only when the job has a machine
    r"(s3|gs|r2|oci|nebius|cw|vastdata)://[^\s/\x00-\x1f\x7f]+/?|cos://[\w-]+/[\w-]+/?|(https|hf)://[^\s\x00-\x1f\x7f]+",
    "the address of a whole bucket of SkyPilot's stores, as s3://mine",
)


def check(option: str, value: str, spelling: tuple[str, str]) -> None:
    """Raises ValueError unless a value is empty or spelt like this: (pattern, rule for the error)."""
    pattern, rule = spelling
    if value and not re.fullmatch(pattern, value, re.ASCII):
        raise ValueError(f"areax launch: --{option} must be {rule}, got {value!r}")
