"""Tokenizers of teachers, and connections to `--teachers`, generation servers whose tokenizer is compared."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from areax.adapters import tokenizer
from areax.adapters.tracking import progress
from areax.rollout import client
from areax.rollout.chat.cross_tokenizer import Pair
from areax.rollout.errors import ServerError
from areax.rollout.workflows import teacher

START_S = 600.0  # for servers that start together with a run, which asks them first
STUDENTS = "the student's tokenizer"
COMPARED = 500  # tokens, about, in addition to those that were added to the vocabulary


def pair(options: Any, tokens: Any, say: bool = False) -> Pair | None:
    """The tokenizers of student and teacher, if they differ; None = each token of the student has its id in the
    teacher's, too, or none is named.

    Args:
      options: with `teacher` and `teacher_tokenizer`.
      tokens: the student's tokenizer.
      say: says how much they have in common, if they differ.

    Raises:
      ValueError: as `Pair`.
    """
    path = options.teacher or options.teacher_tokenizer
    if not path:
        return None
    theirs, own = tokenizer.load(path), tokens.get_vocab()
    ids = theirs.get_vocab()
    if all(ids.get(token) == i for token, i in own.items()):
        return None
    ends = tokenizer.end_of_turn(tokens), tokenizer.end_of_turn(theirs)
    try:
        made = Pair(tokens, theirs, tokenizer.stop_ids(tokens), ends)
    except ValueError as error:
        raise ValueError(f"{path}: has not the trained model's tokenizer, and {error}") from None
    if say:
        progress.say(
            f"{path}: has another tokenizer than the trained model, with {made.common.shape[1]:,} of its {len(own):,} "
            "tokens; teaches where both split a text alike (docs/distillation.md)"
        )
    return made


@contextlib.asynccontextmanager
async def connected(teachers: Sequence[str], tokens: Any, own: bool = False) -> AsyncIterator[dict[str, client.Fleet]]:
    """Yields the fleets of `--teachers` by name; a server that reports no texts of tokens is named, not compared.

    Args:
      teachers: addresses, as `teacher.named`.
      tokens: the student's tokenizer, or that of the teachers, if they have their `own`.

    Raises:
      ValueError: a token of it is another text for a server, or none; as `client.connect`.
      ServerError: as `client.connect`.
    """
    async with contextlib.AsyncExitStack() as stack:
        fleets = {
            name: await stack.enter_async_context(client.connect(urls, key_variable=teacher.KEY))
            for name, urls in teacher.named(teachers).items()
        }
        for server in itertools.chain(*(fleet.servers for fleet in fleets.values())):
            await _compare(server.api, tokens, "the tokenizer of --teacher-tokenizer" if own else STUDENTS)
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


async def _compare(api, tokens, whose: str) -> None:
    ids = sorted(tokens.get_vocab().values())
    ids = sorted({*tokens.added_tokens_decoder, *ids[:: len(ids) // COMPARED + 1]})
    try:
        await api.texts(ids[:1])
    except (ValueError, ServerError) as error:
        progress.say(f"--teachers {api.url}: whether it has {whose} is not checked ({error})")
        return
    wrong = (
        f"--teachers {api.url}: must have {whose}, got %s; serve a teacher of the same family, or name its tokenizer "
        "with --teacher-tokenizer"
    )
    try:
        texts = await api.texts(ids)
    except ValueError as error:  # it has fewer tokens
        raise ValueError(wrong % error) from error
    for i, text in zip(ids, texts, strict=True):
        own = tokens.decode([i], skip_special_tokens=False)
        if text.strip() != own.strip():  # of a word's first piece, decoders of SentencePiece keep or drop the space
            raise ValueError(wrong % f"{text!r} for token {i} instead of {own!r}")
