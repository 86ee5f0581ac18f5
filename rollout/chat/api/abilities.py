"""What requests can ask of the served model: switches of its chat template, and whether it reads images."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import images, parsers, template
from ..fields import Refused, rule
from . import image_parts

EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
OFF = "none", "minimal"  # where reasoning can only be turned on and off
GRADED = "low", "medium", "high"
SWITCHES = "enable_thinking", "thinking"


@dataclass(frozen=True)
class Abilities:
    """What a model can be asked for.

    Attributes:
      switch: the chat template's variable that turns reasoning on and off; "" = none.
      efforts: values of its variable `reasoning_effort`; () = it has none.
      verbosity: it has a variable of this name.
      reasons: it knows reasoning between <think> and </think>.
      images: the model reads images.
    """

    switch: str = ""
    efforts: tuple[str, ...] = ()
    verbosity: bool = False
    reasons: bool = False
    images: bool = False

    def effort(self, value: Any, name: str, default: str = "medium") -> dict[str, Any]:
        """The template's variables for an effort of reasoning; none for null and where the default asks for nothing.

        Raises:
          Refused: the model has no such effort; `name` is the field.
        """
        if value is None:
            return {}
        rule(value in EFFORTS, name, f"must be one of {', '.join(EFFORTS)}", value)
        if value in self.efforts:
            return {"reasoning_effort": value}
        if self.switch and value in OFF:
            return {self.switch: False}
        if value == default and (self.efforts or not self.switch):
            return {}
        rule(not self.efforts, name, f"must be one of {', '.join(self.efforts)} for this model", value)
        if self.switch:
            return {self.switch: True}
        rule(value == "none" and not self.reasons, name, "this model's chat template has no switch for it", value)
        return {}

    def verbosities(self, value: Any, name: str) -> dict[str, Any]:
        """As `effort`, for the verbosity of an answer."""
        if value is None:
            return {}
        rule(value in GRADED, name, f"must be one of {', '.join(GRADED)}", value)
        rule(self.verbosity or value == "medium", name, "this model's chat template has no switch for it", value)
        return {"verbosity": value} if self.verbosity else {}

    def check_images(self, body: Mapping[str, Any], name: str) -> None:
        """Raises Refused if the field `name` has images, in the form of any API, which the model does not read."""
        if not self.images and image_parts.within(body.get(name)):
            raise Refused(name, images.UNREAD)


def of(tokenizer: Any, processor: images.Processor | None = None) -> Abilities:
    """Those of a model with this tokenizer, None = it has none, and image processor."""
    chat = getattr(tokenizer, "chat_template", None) or ""
    variables = template.variables_of(tokenizer) if chat else frozenset()
    text = "\n".join(chat.values()) if isinstance(chat, Mapping) else chat
    return Abilities(
        switch=next((name for name in SWITCHES if name in variables), ""),
        efforts=_efforts(text) if "reasoning_effort" in variables else (),
        verbosity="verbosity" in variables,
        reasons=parsers.THINK in text,
        images=processor is not None,
    )


@functools.lru_cache(maxsize=32)  # once per template, not per request
def _efforts(text: str) -> tuple[str, ...]:
    """The efforts that a template with `reasoning_effort` names; GRADED if it names fewer than two."""
    named = tuple(effort for effort in EFFORTS if re.search(rf"""(["']){effort}\1""", text))
    return named if len(named) > 1 else GRADED
