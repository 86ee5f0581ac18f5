"""The folder of a model: one on the Hugging Face hub, from its cache or downloaded, or unpacked from a GGUF file."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from ..tracking import run_dir
from .atomic_dir import replacing

SECONDS = 5.0
NAME = re.compile(r"[\w.-]+/[\w.-]+")
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # configs and tokenizers
GGUF, MAGIC = ".gguf", b"GGUF"
SOURCE = "gguf.txt"  # in an unpacked folder: path and content of the GGUF file, the code, and the sizes of files
PART = 1 << 22  # bytes that are hashed at a time
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def folder(name: str | os.PathLike, *, weights: bool = False, needs: Sequence[str] = ("config.json",)) -> str:
    """The directory of a model: `name` itself, its ~ expanded, if it is a path, or the cached copy of the hub's model
    `owner/name`. Of a GGUF file it is a folder in the user's cache, `areax/gguf`, with what `areax convert` makes of
    it, written again if the file has changed.

    A copy that has what is needed is used as it is, without asking the hub; else it is downloaded.

    Args:
      weights: its weights are needed, too.
      needs: files of which it must have one.

    Raises:
      ValueError: there is no such model, it is a run's folder, it has no weights in safetensors, or the hub does not
        answer; or as `gguf.unpack`.
    """
    text = os.path.expanduser(name)  # of `Path` it raises RuntimeError without such a user
    if is_gguf(text):
        return _unpacked(Path(text).resolve())
    if isinstance(name, Path) or os.path.exists(text) or not NAME.fullmatch(text) or text[0] == ".":
        if run := run_dir.folder(text):
            raise ValueError(
                f"{text}: a checkpoint is needed, got the folder of a run; name its model, {run / 'model'}, or make "
                f"one of a saved step: areax convert {run} DST"
            )
        return text
    name = os.fspath(name)
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


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes; the files of some programs have no suffix."""
    if not os.path.isfile(path):
        return False
    if os.fspath(path).endswith(GGUF):
        return True
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def content(path: str | os.PathLike) -> str:
    """xxh3-128 of a file's bytes, in hex."""
    path, found = Path(path), os.stat(path)
    return _content(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _content(path: Path, size: int, *times: int) -> str:
    """`content`; `size` and `times` say in one process that it is still the same."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(PART):
            state.update(part)
    return state.hexdigest()


def _unpacked(file: Path) -> str:
    """The folder that a GGUF file is unpacked in; again if its content or the code has changed, or files are gone."""
    from .. import gguf

    key = hashlib.sha256(os.fspath(file).encode()).hexdigest()[:16]
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areax" / "gguf"
    except RuntimeError:
        raise ValueError(f"{file}: needs a cache folder to be unpacked in; set XDG_CACHE_HOME, or convert it") from None
    target = caches / f"{file.stem}-{key}"
    with _alone(target):
        code = [content(one) for one in sorted(Path(gguf.__file__).parent.glob("*.py"))]
        origin = " ".join([str(file), content(file), *code])
        if not (target / SOURCE).is_file() or (target / SOURCE).read_text() != _stamp(origin, target):
            for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # by a process that was killed
                shutil.rmtree(left)
            with replacing(target, lambda path: True) as directory:
                gguf.unpack(file, directory)
                (directory / SOURCE).write_text(_stamp(origin, directory))
    return os.fspath(target)


def _stamp(origin: str, directory: Path) -> str:
    files = sorted(one for one in directory.rglob("*") if one.is_file() and one.name != SOURCE)
    return "\n".join([origin, *(f"{one.relative_to(directory)} {one.stat().st_size}" for one in files)])


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Waits until no other process unpacks the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
