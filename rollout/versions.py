"""Weight labels: what a server stamps on the tokens it samples, `"{version}-{8 hex digits of a hash}"`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_LABEL = re.compile(r"(\d+)-[0-9a-f]{8}")


def number(label: str) -> int:
    """The policy version in `label`; -1 for any other word.

    A server answers with such a word ("default") until the first push: it serves weights that the
    run never numbered. -1 is also what a prompt token carries, so training finds no policy there.
    """
    match = _LABEL.fullmatch(label)
    return int(match[1]) if match else -1


def per_token(spans: Iterable[Mapping[str, Any]], tokens: int) -> list[str]:
    """The label of each of `tokens` tokens, from spans `{version, start, end}` over [start, end).

    Raises RuntimeError unless the spans, in order, cover every token exactly once.
    """
    labels: list[str] = []
    for span in spans:
        start, end = span["start"], span["end"]
        if start != len(labels) or end < start:
            raise RuntimeError(
                f"weight_versions: spans must follow each other without gap or overlap, "
                f"got [{start}, {end}) after {len(labels)} tokens"
            )
        labels += [span["version"]] * (end - start)
    if len(labels) != tokens:
        raise RuntimeError(
            f"weight_versions: spans must cover each token once, got {len(labels)} labels for {tokens} tokens"
        )
    return labels
