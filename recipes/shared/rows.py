"""Rows of a run: read, converted by `--row`, and each checked before anything starts."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from areax.adapters.data import datasets, formats
from areax.adapters.tracking import progress
from areax.rollout import object_path, workflows
from areax.rollout.chat import conversation, images, template
from areax.rollout.chat.conversation import tried
from areax.rollout.chat.cross_tokenizer import Pair
from areax.rollout.processes.printable import shown
from areax.rollout.rewards.signatures import LARGEST
from areax.rollout.workflows import multi_turn, resolve

TOGETHER = 256  # rows that are checked at a time

Bad = Literal["stop", "skip"]
Check = Callable[[dict], str | None]
Outcome = tuple[dict | None, str | None] | ValueError  # a record's row, and why it is left out or None

PROMPTED = (workflows.single_turn, multi_turn.multi_turn, multi_turn.tool_loop, multi_turn.judged)


KNOWN = f"{', '.join('/'.join(pair) for pair in formats.PAIRS)}, instruction/output and conversations"


@dataclass(frozen=True)
class Prepared:
    """A Check of which `ahead` does a part for many rows at once, before each is checked. It raises nothing for bad
    rows: checks do."""

    check: Check
    ahead: Callable[[list[dict]], None]

    def __call__(self, row: dict) -> str | None:
        return self.check(row)


def read(
    source: str, row: str = "", limit: int = 0, *, check: Check = lambda row: None, bad: Bad = "stop",
    recognise: bool = False, quiet: bool = False,
) -> list[dict]:  # fmt: skip
    """Reads rows from a file, a folder or the hub, converted by the function that `row` names, and checks each.

    Prints to stderr how many are left out, and why, and the format that was recognised.

    Args:
      row: `module:function` that returns a row, or None to leave a record out; "" = records are rows, or if
        `recognise` of the format that the first one has.
      limit: records to read; 0 = all.
      check: raises ValueError for a bad row; returns why a good one is left out all the same, or None.
      bad: "stop" raises at the first bad row; "skip" leaves out lines that are not JSON objects, records that `row`
        raises for, and rows that fail the check.
      quiet: prints nothing.

    Raises:
      ValueError: a bad row, or no row is left.
    """
    refused: list[ValueError] = []
    records = datasets.placed(source, limit=limit or None, bad=refused.append if bad == "skip" else None)
    return made(records, refused, source, row, check=check, bad=bad, recognise=recognise, quiet=quiet)


def made(
    records: Sequence[tuple[dict, str]], refused: list[ValueError], source: str, row: str, *, check: Check, bad: Bad,
    recognise: bool, quiet: bool,
) -> list[dict]:  # fmt: skip
    """The rows of records that were read, with their places; as `read`.

    Args:
      refused: what was read and is no record.
    """
    left: Counter[str] = Counter()
    rows: list[dict] = []
    total, recognise = len(records) + len(refused), recognise and not row
    if recognise:
        known = (formats.recognised(record) for record, _ in records[: 1 if bad == "stop" else None])
        row = next((name for name in known if name is not None), "")
        if row and not quiet:
            progress.say(f"{source}: rows are made of the fields {sorted(records[0][0])} by --row {row}")
    elif not row and not quiet and records and (known_as := formats.recognised(records[0][0])):
        progress.say(f"{source}: the workflow gets records as they are; --row {known_as} makes prompts of them")
    use = reader(row, check, recognise)
    words, done = f"checking {total:,} rows of {source}", lambda: f", {len(rows) + len(refused) + left.total():,} done"
    with contextlib.nullcontext() if quiet else progress.reminding(words, done):
        for start in range(0, len(records), TOGETHER):
            chunk = records[start : start + TOGETHER]
            for (record, place), outcome in zip(chunk, use([record for record, _ in chunk]), strict=True):
                if isinstance(outcome, ValueError):
                    refused.append(ValueError(f"{place}: {outcome}{'' if row else _read_by(record)}"))
                    if bad == "stop":
                        raise refused[0] from outcome
                    continue
                own, why = outcome
                if own is not None and why is None:
                    rows.append(own)
                elif why:
                    left[why] += 1
    if refused:
        left[f"bad (--bad-rows skip), the first: {refused[0]}"] = len(refused)
    if not rows:
        raise ValueError(f"{source}: all {total} rows are left out, {'; '.join(left)}; at least one is needed")
    for why, count in left.items() if not quiet else ():
        progress.say(f"{count:,} of {total:,} rows are left out, {why}")
    return rows


def _read_by(record: dict) -> str:
    """The `--row` that reads a record of a known form."""
    known = formats.recognised(record)
    return f"; --row {known} reads such records" if known else ""


def reader(row: str, check: Check, recognise: bool) -> Callable[[Sequence[dict]], Iterator[Outcome]]:
    """Makes f(records) -> the Outcome of each; arguments as `read`."""
    convert = object_path.resolve(row) if row else None

    def made(record: dict) -> dict | None:
        if recognise and formats.recognised(record) is None:
            raise ValueError(
                f"a row needs either 'prompt' or 'messages', got the fields {sorted(record)}; also read are "
                f"{KNOWN}, and --row FILE.py:FUNCTION converts other records"
            )
        return _converted(convert, row, record) if convert else record

    def use(records: Sequence[dict]) -> Iterator[Outcome]:
        rows = [tried(made, record) for record in records]
        if ahead := getattr(check, "ahead", None):  # as of `Prepared`
            ahead([own for own in rows if isinstance(own, dict)])
        for own in rows:
            if own is None or isinstance(own, ValueError):
                yield own or (None, f"by {row}")
            else:
                why = tried(check, own)
                yield why if isinstance(why, ValueError) else (own, why)

    return use


def _converted(convert: Callable[[dict], Any], name: str, record: dict) -> dict | None:
    try:
        made = convert(record)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # of the user's function, for which the record is to blame
        raise ValueError(f"--row {name}: {object_path.line(error, convert)}") from error
    if not isinstance(made, dict | None):
        raise ValueError(f"--row {name}: must return a row, which is a dict, or None, got {type(made).__name__}")
    return made


def asks(workflow: str) -> bool:
    """Whether a workflow samples from the row's prompt; others may read any fields."""
    return resolve.find(workflow) in PROMPTED


def check_vocabulary(ids: Sequence[int] | np.ndarray, vocabulary: int) -> None:
    """Raises ValueError if a token is outside the model's vocabulary: indexing would clip it, without a word."""
    if (highest := int(np.max(ids, initial=0))) >= vocabulary:
        raise ValueError(
            f"token ids must be below {vocabulary}, the model's vocab_size, got {highest}; is its tokenizer of another "
            "model?"
        )


def reference_rewards(row: Mapping[str, Any]) -> list[float]:
    """The row's "reference_rewards"; raises ValueError unless it is a list of numbers that a reward may be."""
    given = row.get("reference_rewards")
    held = lambda x: type(x) in (int, float) and abs(x) <= LARGEST
    if not (isinstance(given, list) and given and all(map(held, given))):
        raise ValueError(
            "--objective.advantage.mean optimal_value: rows must have 'reference_rewards', a list of the rewards that "
            f"completions of the reference policy got, numbers of at most {LARGEST:g}, got {shown(given)}"
        )
    return given


def valued(check: Any) -> Prepared:
    """The check, of rows that also need "reference_rewards"."""

    def both(row: dict) -> str | None:
        reference_rewards(row)
        return check(row)

    return Prepared(both, check.ahead)


def prompts(
    tokens, workflow: str, processor: images.Processor | None = None, *, most: int = 0, room: int = 0,
    vocabulary: int = 0, context: int = 0, new: int = 0, taught: int = 0,
    pair: Pair | None = None,
) -> Prepared:  # fmt: skip
    """Makes the check of rows whose prompt is sampled from: it has tokens, and leaves room for one more.

    Rows of workflows that read other fields than "prompt" or "messages" are not checked.

    Args:
      processor: of a model that reads images; None = rows with images are refused.
      most: longest prompt in tokens; a longer one is left out; 0 = no limit.
      room: longest sequence in tokens, prompt and completion; 0 = unknown.
      vocabulary: size of the model's vocabulary; 0 = unknown.
      context: longest sequence that the servers take; 0 = unknown.
      new: tokens that a completion may have; servers refuse a request that could become longer than the context.
      taught: longest sequence of a teacher, which reads the "teacher_prompt" of rows; 0 = there is none.
      pair: of tokenizers, if the teacher's is another; it then reads every row's prompt.
    """
    prompted = asks(workflow)
    found: dict[int, template.Prompt | ValueError] = {}  # by id of the rows in `held`, which no other object can have
    held: list[dict] = []

    def ahead(rows: list[dict]) -> None:
        found.clear()
        held[:] = rows
        if prompted or most:
            made = template.prompted_together(tokens, rows, processor)
            found.update(zip(map(id, rows), made, strict=True))

    def check(row: dict) -> str | None:
        if taught and (pair or row.get("teacher_prompt") is not None):
            read = pair.prompt(row) if pair else template.prompted(tokens, conversation.read_by_teacher(row)).tokens
            if not pair:
                check_vocabulary(read, vocabulary or 2**31)
            if len(read) >= taught:
                raise ValueError(
                    f"what a teacher reads must leave room for a completion within {taught} tokens, got {len(read)}; "
                    "raise --length"
                )
        if not prompted and not most:
            return None
        own = found.pop(id(row)) if id(row) in found else template.prompted(tokens, row, processor)
        if isinstance(own, ValueError):
            raise own
        ids = own.tokens
        n = len(ids)
        if not n:
            raise ValueError("the prompt must have at least one token, got none")
        if vocabulary:
            check_vocabulary(ids, vocabulary)
        if most and n > most:
            return f"longer than --max-prompt {most}"
        if prompted and room and n >= room:
            raise ValueError(
                f"a prompt must leave room for a completion within {room} tokens, got {n}; leave out longer ones with "
                f"--max-prompt, or raise --length or --serve.context"
            )
        if prompted and context and n + new > context:
            raise ValueError(
                f"prompt and completion must fit in --serve.context {context} (at most the model's), got {n} tokens "
                f"and --sampling.max-new-tokens {new}; lower it, or leave out longer prompts with --max-prompt"
            )
        return None

    return Prepared(check, ahead)
