"""The Hugging Face hub: whether it answers, and models by name, from its cache or downloaded."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

SECONDS = 5.0
NAME = re.compile(r"[\w.-]+/[\w.-]+")
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # configs and tokenizers
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def folder(name: str | os.PathLike, *, weights: bool = False, needs: Sequence[str] = ("config.json",)) -> str:
    """The directory of a model: `name` itself if it is a path, or the cached copy of the hub's model `owner/name`.

    A copy that has what is needed is used as it is, without asking the hub; else it is downloaded.

    Args:
      weights: its weights are needed, too.
      needs: files of which it must have one.

    Raises:
      ValueError: there is no such model, it has no weights in safetensors, or the hub does not answer.
    """
    text = os.fspath(name)
    if isinstance(name, Path) or Path(os.path.expanduser(text)).exists() or not NAME.fullmatch(text) or text[0] == ".":
        return text
    name = text
    import huggingface_hub
    from huggingface_hub import constants, errors

    patterns = [*SMALL, *(["*.safetensors"] if weights else [])]
    try:
        found = huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        if any((Path(found) / file).is_file() for file in needs) and not (weights and _missing(Path(found))):
            return found
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{name}: no such folder here, and no complete copy in the hub's cache, {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; give a directory, or fetch it with `hf download`"
        )
    check(name)
    try:
        found = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name}: neither a folder here nor a model that the hub, {constants.ENDPOINT}, gives: {reason}"
        ) from None
    if weights and not any(Path(found).glob("*.safetensors")):
        raise ValueError(
            f"{name}: weights must be in safetensors, of which the hub has none; fetch all files with `hf download "
            f"{name}`, and give the folder that it prints instead, to be told how to convert them"
        )
    return found


def _missing(copy: Path) -> bool:
    """Whether a cached copy lacks weights, as one does of which only the tokenizer was used before."""
    if not (copy / INDEX).is_file():
        return not (copy / WEIGHTS).is_file()
    try:
        files = set(json.loads((copy / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):  # for the reader of weights to explain
        return False
    return not all((copy / str(file)).is_file() for file in files)


def check(name: str) -> None:
    """Raises ValueError if the hub does not answer within seconds; with HF_HUB_OFFLINE it is not asked.

    Its clients retry for most of a minute before they say so.

    Args:
      name: what is to be loaded from it, for the message.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:  # it answers, if only that it does not like the question
        return
    except OSError as error:
        raise ValueError(
            f"{name}: no such file or folder here, and the hub, {constants.ENDPOINT}, does not answer "
            f"({getattr(error, 'reason', error)}); give a path, or set HF_HUB_OFFLINE=1 if it has been downloaded"
        ) from None
