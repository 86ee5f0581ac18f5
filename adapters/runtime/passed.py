"""What an export gets unchanged from the checkpoint that the model came from: tensors and files of its other parts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...models import config_json, wrappers
from .. import quantised, safetensors

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def opened(config, tensors: Mapping[str, np.ndarray], where: str) -> dict:
    """A checkpoint's tensors, quantised ones as `quantised.opened` gives them."""
    source = wrappers.text(json.loads(config.source))
    return quantised.opened(tensors, config_json.quantisation(source), where)


def loaded(config, path: str | os.PathLike):
    """The Config of a checkpoint in the folder `path`."""
    if config.rest is None:
        return config
    return dataclasses.replace(config, rest=dataclasses.replace(config.rest, folder=os.path.abspath(path)))


def folder(config, base: str | os.PathLike | None = None) -> Path | None:
    """The folder that has the tensors of `config.rest`, `base` if the one that they were in is gone; None without any.

    Raises:
      ValueError: neither is there, or it lacks some of them; or the config is a wrapper's and no checkpoint was loaded.
    """
    if config.rest is None:
        if wrappers.wraps(config) and config.vision is None:
            raise ValueError(
                "save: a wrapper needs the tensors of its other parts, which this config, read without weights, does "
                "not have; load it with hf.load, or save the text model alone with models.text_only(config)"
            )
        return None
    names, places = config.rest.names, [place for place in (config.rest.folder, base) if place]
    found = next((Path(place) for place in places if Path(place).is_dir()), None)
    shown = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}" if names else "the processor's files"
    if found is None:
        raise ValueError(
            f"save: {shown} must be copied from the checkpoint that the model came from, "
            f"{config.rest.folder or 'which is not known'}, and it is not there; put it back, or name a copy as base"
        )
    return found


def tensors(config, base: str | os.PathLike | None = None) -> dict:
    """The tensors of `config.rest`, as views of its checkpoint's files, those that are quantised to be dequantised as
    they are read; raises as `folder`, and if some are missing."""
    place = folder(config, base)
    if place is None or not config.rest.names:
        return {}
    stored = opened(config, safetensors.read(place), str(place))
    if missing := [name for name in config.rest.names if name not in stored]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(
            f"save: {missing[0]}{more} must be copied from {place}, where the model came from, and it has no such "
            "tensor any more; put the checkpoint back"
        )
    return {name: stored[name] for name in config.rest.names}


def size(config) -> int:
    """Bytes of the tensors of `config.rest`."""
    return sum(safetensors.size(safetensors.describe(name, x)) for name, x in tensors(config).items())


def copy_files(config, base: str | os.PathLike | None, directory: Path) -> None:
    """Copies what transformers' AutoProcessor reads beside the tokenizer."""
    place = folder(config, base)
    for name in PROCESSOR_FILES:
        if place is not None and (place / name).is_file():
            shutil.copyfile(place / name, directory / name)
