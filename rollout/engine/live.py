"""A request in the engine, and what it holds there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..chat.detokenizer import Text
from .adapters import Loaded
from .grammar import Matcher
from .pictures import Placement
from .prefixes import Prefix
from .request import Progress, Request


@dataclass(frozen=True)
class Saved:
    """The memory of a request that had to give it up, which `DeviceState.save` keeps in host memory by its number.

    Attributes:
      whole: tokens of whole chunks that were computed as a prompt: they are computed again, with the same bits.
      position: how many tokens had been computed, those of `whole` and of later pages, which are kept.
    """

    whole: int
    position: int


@dataclass(eq=False)
class Live:
    """A request in the engine, waiting or in a slot.

    Attributes:
      number: of its arrival; when memory is short, the latest gives way.
      matcher: follows its text, if that must obey a grammar.
      images: those of its prompt; None = text alone.
      switches: lengths above which the model's rotary embeddings are others (`models.layer.rope_switches`).
      done: the number of its tokens that have been computed as a prompt, while it has a slot.
      pages: the pages of its slot by kind and number; 0 = not needed any more.
      last: the last chunk of its prompt among the cached prefixes; None = before the first one.
      filled: the number of tokens that were computed as a prompt, when it began to decode.
    """

    request: Request
    tell: Callable[[Progress], None]
    seed: int
    stops: frozenset[int]
    text: Text | None
    progress: Progress
    number: int
    adapter: Loaded | None = None
    matcher: Matcher | None = None
    images: Placement | None = None
    switches: tuple[int, ...] = ()
    slot: int | None = None
    done: int = 0
    pages: list[list[int]] = field(default_factory=list)
    last: Prefix | None = None
    filled: int = 0
    saved: Saved | None = None

    @property
    def seat(self) -> int:
        """Its slot, which it must have."""
        assert self.slot is not None
        return self.slot

    @property
    def total(self) -> int:
        """The number of its tokens, those of the answer so far included."""
        return len(self.request.prompt) + len(self.progress.tokens)

    @property
    def variant(self) -> int:
        """Identifies what the keys and values of its tokens depend on beside tokens and images: its adapter, and which
        of `switches` it is longer than."""
        adapter = self.adapter.number if self.adapter else 0
        return adapter * (len(self.switches) + 1) + sum(self.total > switch for switch in self.switches)

    @property
    def end(self) -> int:
        """Its length when decoding must stop: by its request, or as it gets longer than the next of `switches` and so
        has to be computed again."""
        most = len(self.request.prompt) + self.request.sampling.max_new_tokens
        return min([most, *(switch + 1 for switch in self.switches if switch >= self.total)])

    @property
    def length(self) -> int:
        """The number of tokens in `prefix`."""
        return self.saved.whole if self.saved else self.total - 1

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens to compute as a prompt before decoding continues: all but the last, or the whole chunks before
        what is saved."""
        return (*self.request.prompt, *self.progress.tokens)[: self.length]

    def token(self, i: int) -> int:
        """Token i of its prompt and answer."""
        prompt = self.request.prompt
        return prompt[i] if i < len(prompt) else self.progress.tokens[i - len(prompt)]

    def seen(self, start: int, end: int) -> bytes:
        """Identifies the features of images among tokens [start, end)."""
        return self.images.key(start, end) if self.images else b""

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of its prompt are needed, which are known only while it is computed."""
        return self.request.input_logprobs_from is not None and not (self.progress.tokens or self.saved)

    @property
    def routed(self) -> bool:
        """Whether experts of its prompt are needed."""
        return self.request.routed_experts and len(self.progress.routed) < self.length

    def add(
        self, tokens: list[int], logp: list[float], top: list, routed: list, masks: list, version: str
    ) -> dict | None:  # fmt: skip
        """Adds the output of a dispatch, up to the request's end; returns why it has finished, if it has.

        Args:
          version: of the weights that sampled the tokens.
        """
        sampling, progress, text = self.request.sampling, self.progress, self.text
        start, finish = len(progress.tokens), None
        if tokens[-1] in self.stops:
            finish = {"type": "stop", "matched": tokens[-1]}
        elif start + len(tokens) == sampling.max_new_tokens:
            finish = {"type": "length", "length": sampling.max_new_tokens}
        elif self.matcher and self.matcher.problem:
            finish = {"type": "abort", "message": self.matcher.problem}
        if text:
            shown = tokens[:-1] if finish and finish["type"] == "stop" else tokens
            hit = text.feed(shown, sampling.stop)
            if hit:
                count, matched = hit
                tokens, logp, top = tokens[:count], logp[:count], top[:count]
                routed, masks = routed[:count], masks[:count]
                finish = {"type": "stop", "matched": matched}
            elif finish:
                text.end()
            progress.decoded = text.text
        progress.tokens += tokens
        progress.logp += logp
        progress.top += top
        progress.routed += routed
        progress.masks += masks
        end = start + len(tokens)
        if progress.versions and progress.versions[-1][0] == version:
            progress.versions[-1] = (version, progress.versions[-1][1], end)
        else:
            progress.versions.append((version, start, end))
        return finish
