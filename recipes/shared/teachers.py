"""Connections to `--teachers`, generation servers whose tokenizer is compared with the student's."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from areax.adapters.tracking import progress
from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.workflows import teacher

START_S = 600.0  # for servers that start together with a run, which asks them first
COMPARED = 500  # tokens, about, in addition to those that were added to the vocabulary


@contextlib.asynccontextmanager
async def connected(teachers: Sequence[str], tokens: Any) -> AsyncIterator[dict[str, client.Fleet]]:
    """Yields the fleets of `--teachers` by name; a server that reports no texts of tokens is named, not compared.

    Args:
      teachers: addresses, as `teacher.named`.
      tokens: the student's tokenizer.

    Raises:
      ValueError: a token of the student is another text for a server, or none; as `client.connect`.
      ServerError: as `client.connect`.
    """
    async with contextlib.AsyncExitStack() as stack:
        fleets = {
            name: await stack.enter_async_context(client.connect(urls, key_variable=teacher.KEY))
            for name, urls in teacher.named(teachers).items()
        }
        for server in itertools.chain(*(fleet.servers for fleet in fleets.values())):
            await _compare(server.api, tokens)
        yield fleets


async def weights(teachers: Sequence[str]) -> dict[str, list]:
    """{what: checksums} of the weights of `--teachers`, for each name and layout; of servers that compute some.

    A server with other parallelism or another dtype has other tensors, whose checksums say nothing about the same ones.
    """
    found: dict[str, list] = {}
    for name, urls in teacher.named(teachers).items():
        async with client.connect(urls, key_variable=teacher.KEY, ready_s=START_S) as fleet:
            for server in fleet.servers:
                sums = await server.api.checksums()
                what = f"weights{f' of {name}' if name else ''} in layout {server.layout}"
                if sums and sums not in (known := found.setdefault(what, [])):
                    known.append(sums)
    return found


async def _compare(api, tokens) -> None:
    ids = sorted(tokens.get_vocab().values())
    ids = sorted({*tokens.added_tokens_decoder, *ids[:: len(ids) // COMPARED + 1]})
    try:
        await api.texts(ids[:1])
    except (ValueError, ServerError) as error:
        progress.say(f"--teachers {api.url}: whether it has the student's tokenizer is not checked ({error})")
        return
    wrong = f"--teachers {api.url}: must have the student's tokenizer, got %s; serve a teacher of the same family"
    try:
        texts = await api.texts(ids)
    except ValueError as error:  # it has fewer tokens
        raise ValueError(wrong % error) from error
    for i, text in zip(ids, texts, strict=True):
        own = tokens.decode([i], skip_special_tokens=False)
        if text.strip() != own.strip():  # of a word's first piece, decoders of SentencePiece keep or drop the space
            raise ValueError(wrong % f"{text!r} for token {i} instead of {own!r}")
