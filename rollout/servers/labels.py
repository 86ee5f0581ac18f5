"""Weight labels: what a server stamps on the tokens it samples, `"{version}-{8 hex digits of a hash}"`."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from ..errors import ServerError

MANIFEST = "manifest.json"  # of a checkpoint: its version and a hash of every tensor
LARGEST = 2**28  # bytes of one

_LABEL = re.compile(r"([0-9]{1,9})-[0-9a-f]{8}")


def manifest_bytes(path: str | os.PathLike, most: int = LARGEST) -> bytes | None:
    """The content of a manifest.json; None if there is none.

    Raises:
      ValueError: something else has its name, which must not pass for none, or it has more than `most` bytes.
    """
    if not os.path.lexists(path):
        return None
    if not os.path.isfile(path):
        raise ValueError(f"{path}: must be a file, got a folder, a pipe or a link without one; copy the folder again")
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: must have at most {most} bytes, got more; copy the folder again")
    return content


def read_label(manifest_path: str | os.PathLike) -> str:
    """The weight label of the published version whose manifest this is."""
    if (content := manifest_bytes(manifest_path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(manifest_path))
    return label_of(content, manifest_path)


def label_of(manifest: bytes, where: str | os.PathLike = "manifest") -> str:
    """The weight label of the version that a manifest.json with this content belongs to; errors name `where`."""
    try:
        version = json.loads(manifest)["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: a manifest needs a version ({type(error).__name__}: {error!s:.80})") from error
    if version is None:
        raise ValueError(
            f"{where}: a version to publish needs a number, got a checkpoint without one; write it by "
            "hf.write_published(root, version, config, params)"
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError(f"{where}: version must be a number from 0 on, got {version!r:.80}")
    return f"{version}-{xxhash.xxh3_128_hexdigest(manifest)[:8]}"


@functools.lru_cache(4096)  # asked for every token
def version_of(label: str) -> int:
    """The policy version in `label`; -1 if it is not a weight label.

    Before the first push a server reports such a label ("default"), because the run has not numbered its weights.
    Prompt tokens have version -1, too.
    """
    match = _LABEL.fullmatch(label)
    return int(match[1]) if match else -1


def per_token(spans: Iterable[Mapping[str, Any]], tokens: int) -> list[str]:
    """The label of each of `tokens` tokens, from spans `{version, start, end}` over [start, end).

    Raises ServerError unless the spans, in order, cover every token exactly once.
    """
    labels: list[str] = []
    for span in spans:
        start, end, label = span["start"], span["end"], span["version"]
        if start != len(labels) or not start <= end <= tokens:
            raise ServerError(
                f"weight_versions: spans must follow each other without gap or overlap, up to {tokens} tokens, "
                f"got [{start!r:.40}, {end!r:.40}) after {len(labels)}"
            )
        if not isinstance(label, str):
            raise ServerError(f"weight_versions: a version must be a string, got {label!r:.80}")
        labels += [label] * (end - start)
    if len(labels) != tokens:
        raise ServerError(
            f"weight_versions: spans must cover each token once, got {len(labels)} labels for {tokens} tokens"
        )
    return labels
