"""Loads and saves Hugging Face checkpoints of every family, driven by the families' parameter tables.

Weights keep Hugging Face's orientation, so loading stacks the tensors of layers into leaves and saving splits them
again; leaves may also be parts of fused tensors (`core.parts`). Leaves are read, and tensors written, one at a time;
there is never a second copy of a model.
"""

from ...rollout.servers.labels import MANIFEST
from .config_files import (
    SETTINGS,
    json_bytes,
    json_object,
    loaded_config,
    read_bytes,
    read_config,
    read_json,
    save_dtype,
    settings,
    tokenizer_in,
    with_ends,
)
from .lazy import Cast, Deferred, Mapped, cast
from .manifests import compare, left_manifest, read_manifest, verify
from .matching import HEADS, SCALAR, check_tensor, complaint, equal, listed
from .placing import on_host, place
from .reading import check, fingerprint, from_tensors, load, mapped, mapped_mtp, mapped_tensors
from .saving import manifest, save, write_part, write_published
from .tensors import Part, copied, host_copy, host_part, tensors_of, to_tensors

__all__ = [
    "HEADS", "MANIFEST", "SCALAR", "SETTINGS", "Cast", "Deferred", "Mapped", "Part", "cast", "check", "check_tensor",
    "compare", "complaint", "copied", "equal", "fingerprint", "from_tensors", "host_copy", "host_part", "json_bytes",
    "json_object", "left_manifest", "listed", "load", "loaded_config", "manifest", "mapped", "mapped_mtp",
    "mapped_tensors", "on_host", "place", "read_bytes", "read_config", "read_json", "read_manifest", "save",
    "save_dtype", "settings", "tensors_of", "to_tensors", "tokenizer_in", "verify", "with_ends", "write_part",
    "write_published",
]  # fmt: skip
