"""Measures how fast an engine generates: `areax serve PATH --bench`."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ...models.paging import STEPS
from .engine import Engine
from .request import Progress, Request, Sampling

PROMPT, ANSWER = 512, 128  # tokens, as far as the context allows


@dataclass(frozen=True)
class Row:
    """What was measured with `requests` at a time.

    Attributes:
      prompts: tokens of prompts computed per second, until the last request has its first token.
      first_s: seconds until the last request had its first token.
      tokens: tokens generated per second, by all requests together, from then on.
    """

    requests: int
    prompts: float
    first_s: float
    tokens: float


def measure(engine: Engine) -> Iterator[Row]:
    """Generates for 1, 2, 4, ... requests at a time, up to the engine's slots; yields a row for each.

    Prompts are random and share nothing; answers have a fixed length. The first run of each size, which may compile
    programs, does not count.
    """
    prompt, answer = lengths(engine.context, engine.stats()["draft"])
    draw = random.Random(0)
    sampling = Sampling(max_new_tokens=answer, ignore_eos=True)
    sizes = [1 << i for i in range(engine.slots.bit_length()) if 1 << i < engine.slots]
    for n in [*sizes, engine.slots]:
        for counts in (False, True):
            prompts = [tuple(draw.choices(range(engine.config.vocab), k=prompt)) for _ in range(n)]
            row = _run(engine, [Request(f"bench {i}", each, sampling) for i, each in enumerate(prompts)])
            if counts:
                yield row


def lengths(context: int, draft: int = 1) -> tuple[int, int]:
    """Tokens of each prompt and answer. An answer takes several dispatches, even if every draft is accepted: the first
    one is not in the rate.

    Raises:
      ValueError: the context is too short for that.
    """
    least = max(64, 4 * STEPS * draft)
    if context < least:
        drafted = f" with --draft {draft}" if draft > 1 else ""
        raise ValueError(f"--bench needs a context of at least {least} tokens{drafted}, got {context}")
    answer = min(max(ANSWER, 2 * STEPS * draft), context // 2)
    return min(PROMPT, context - answer), answer


def _run(engine: Engine, requests: list[Request]) -> Row:
    engine.flush()
    made: dict[str, int] = {}
    first: list[tuple[float, int]] = []  # when all had a token, and how many tokens there were
    waiting, done = {request.rid for request in requests}, threading.Event()

    def note(progress: Progress) -> None:
        made[progress.rid] = len(progress.tokens)
        if not first and len(made) == len(requests):
            first.append((time.perf_counter(), sum(made.values())))
        if progress.finish:
            waiting.discard(progress.rid)
            if not waiting:
                done.set()

    start = time.perf_counter()
    engine.submit_all(requests, note)
    done.wait()
    ended, (begun, there) = time.perf_counter(), first[0]
    prompts, total = sum(len(request.prompt) for request in requests), sum(made.values())
    return Row(len(requests), prompts / (begun - start), begun - start, (total - there) / (ended - begun))


def table(rows: Iterator[Row]) -> Iterator[str]:
    """The lines of a table, as rows are measured."""
    yield f"{'requests':>8}  {'prompt tokens/s':>15}  {'first token s':>13}  {'tokens/s':>9}  {'ms a token':>10}"
    for row in rows:
        each = 1000 * row.requests / row.tokens
        yield f"{row.requests:8}  {row.prompts:15,.0f}  {row.first_s:13.3f}  {row.tokens:9,.0f}  {each:10.1f}"
