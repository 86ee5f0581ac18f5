"""Images in the bodies of `/generate`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from ....adapters.data import images
from ...chat.fields import Refused, rule, shown
from ...types import Image
from ..pictures import Pictures, Placement

NAME = "image_data"
MOST = 256  # images of a prompt


def read(given: Any, P: int, single: bool, pictures: Pictures | None) -> list[tuple[Image, ...]]:
    """The images of each of P prompts.

    Args:
      given: of one prompt an image or a list of them; of several an image for all, or for each an image, a list of
        them, or null. An image is the base64 of a file, or a data URL.
      single: the body has a prompt and not a list of them.
      pictures: of the engine; None = it reads text alone.

    Raises:
      Refused: it is neither, or the model reads text alone.
    """
    if not given:
        return [()] * P
    if not isinstance(given, list):
        return [_of_prompt(given, pictures)] * P
    if single and not (len(given) == 1 and isinstance(given[0], list)):
        given = [given]
    rule(len(given) == P, NAME, f"must be a list for each of {P} prompts", f"{len(given)} entries")
    return [_of_prompt(one, pictures) for one in given]


def placed(pictures: Pictures | None, prompt: Sequence[int], seen: Sequence[Image], context: int) -> Placement | None:
    """Makes patches of the images of a prompt, which the engine then finds; None if there are none, or the prompt is
    too long, which the engine refuses."""
    return pictures.placed(prompt, seen) if pictures and seen and len(prompt) <= context else None


def _of_prompt(given: Any, pictures: Pictures | None) -> tuple[Image, ...]:
    several = [one for one in (given if isinstance(given, list) else [given]) if one is not None]
    rule(pictures or not several, NAME, "must be empty: the model that is served reads text alone", several)
    rule(len(several) <= MOST, NAME, f"must have at most {MOST} images for a prompt", len(several))
    return tuple(map(_image, several))


def _image(given: Any) -> Image:
    rule(isinstance(given, str), NAME, "must have images as base64 or data URLs", given)
    if given[:5].lower() == "data:":
        return images.read(given)
    rule("://" not in given[:16], NAME, "must have images as base64 or data URLs; addresses are not fetched", given)
    try:
        data = base64.b64decode(given, validate=True)
    except ValueError:
        raise Refused(NAME, f"must have images as base64 or data URLs, got {shown(given)}") from None
    return images.read(data)
