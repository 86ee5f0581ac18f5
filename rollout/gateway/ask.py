"""What a request asks of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """What a request asks of a session: `Session.ask` of messages, or `Session.complete` of prompts.

    Attributes:
      body: the request.
      n: answers wanted, of each prompt.
      prompts: of tokens, where there are no messages.
    """

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    prompts: Sequence[Sequence[int]] = ()
