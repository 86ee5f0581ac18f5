"""The samples of the report: what the policy wrote, token by token, coloured by probability, version, advantage, ...

Without a script: steps and samples fold, and the style sheet colours tokens by the values that each one carries.
"""

from __future__ import annotations

import bisect
import collections
import math
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from ...rollout.processes.printable import one_line
from . import charts, rows
from . import html as page
from .html import escape

TOKEN_BUDGET = 40_000  # tokens of samples in the report: about 5 MB
LONGEST = 10_000  # tokens of a sample that are shown
LONGEST_TEXT, LONGEST_TOKEN = 100_000, 200  # characters of a prompt or an answer, and of a token
A_TOKEN = 100  # characters that count as a token: as many as the page has for one
FULL = 2.0  # absolute advantage from which on the colour is strongest
# Characters that are not seen, and that turn the direction of others: a token shows their numbers.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)

FIELDS: rows.Types = rows.FIELDS | {name: (list,) for name in ("tokens", "logp", "version_of_token")}
FIELDS |= {"trainer_logp": (list, type(None)), "adv_of_token": (list, type(None)), "components": (dict, type(None))}
MODES = (
    ("logp", "log-probability"), ("version", "policy version"), ("gap", "trainer − sampler"), ("advantage", "advantage")
)  # fmt: skip
SCALES = {
    "logp": "white: certain; orange: unlikely, strongest at -4 nats",
    "version": "one colour per policy version that sampled the token",
    "gap": "blue: the trainer's log-probability is higher; red: lower; log scale from 1e-6 to 1 nat",
    "advantage": f"blue: above 0, reinforced; red: below 0, made less likely; strongest from {FULL:g} on",
}
WORDS = (
    ("reward", "reward of the answer; – means it could not be scored"),
    ("advantage", "reward relative to the other answers to the same prompt; above 0 is reinforced"),
    ("finish", "stop: the policy ended its answer; length: truncated"),
    ("trained at", "policy version trained on the sample"),
    ("sampled by", "policy versions that generated its tokens; several if weights changed during generation"),
    ("log-probability", "of the token when it was sampled, in nats; 0 is certain, -2.3 one in ten"),
    ("trainer − sampler", "difference between the token's two log-probabilities: rounding, or staleness"),
)


def samples(path: pathlib.Path) -> str:
    """All samples of evenly spaced steps of samples.jsonl, within the token budget."""
    sizes: dict[tuple[str, int], int] = collections.Counter()
    total = 0
    for line in rows.lines(path, FIELDS):
        sizes[_step(line)] += _size(_cut(line))
        total += 1
    if not total:
        return ""
    keys, stride = sorted(sizes), 1
    while stride < len(keys) and sum(sizes[k] for k in _every_nth(keys, stride)) > TOKEN_BUDGET:
        stride += 1
    chosen, room = set(_every_nth(keys, stride)), TOKEN_BUDGET
    steps: dict[tuple[str, int], list[dict]] = collections.defaultdict(list)
    for line in rows.lines(path, FIELDS):
        if _step(line) in chosen and room > 0:
            steps[_step(line)].append(line := _cut(line))
            room -= _size(line)
    kept = sum(map(len, steps.values()))
    words = f"{charts.number(total)} samples" if kept == total else (
        f"{charts.number(kept)} of {charts.number(total)} samples, from steps across the run"
    )  # fmt: skip
    return (
        f'<p class="lead">{escape(words)}. What the policy wrote, token by token; a token shows its numbers under the '
        f'pointer.</p><div class="samples">{_modes()}'
        + "".join(
            page.folded(_head(kind, step, own), "".join(_prompts(own)), open=i == len(steps) - 1)
            for i, ((kind, step), own) in enumerate(sorted(steps.items()))
        )
        + f"</div>{_notes()}"
    )


class Source(Protocol):
    """The samples of a run, as it goes on."""

    def steps(self) -> Mapping[str, Sequence[int]]:
        """{kind: steps with samples, in order}."""

    def rewards(self, kind: str, step: int) -> Sequence[Sequence[float | None]]:
        """The rewards of a step's samples, by group."""

    def line(self, kind: str, step: int, group: int, index: int) -> dict:
        """A sample as in samples.jsonl, perhaps with more: `components` of the reward, the advantage `adv_of_token`,
        and a `note` where something is missing."""

    def close(self) -> None:
        """Ends the use of its files."""


def browser(sources: Mapping[str, Source], chosen: Mapping[str, str]) -> str:
    """One sample, or why it cannot be read, and a form to choose another: its fields are run, kind, step, group and
    sample.

    Args:
      sources: by the names of the runs.
      chosen: the values of the form; of one that is not there, or for which there is no sample, the nearest. No step is
        the newest.
    """
    fields: list[str] = []
    try:
        body = _chosen(sources, chosen, fields)
    except (ValueError, OSError) as error:
        body = f'<p class="lead">{escape(one_line(error))}</p>'
    return f'<form class="choose" autocomplete="off">{"".join(fields)}</form>{body}'


def _chosen(sources: Mapping[str, Source], chosen: Mapping[str, str], fields: list[str]) -> str:
    """The chosen sample; adds the fields of the form to `fields`."""
    run = chosen["run"] if chosen.get("run") in sources else next(iter(sources))
    fields += [_select("run", [*sources], run)] if len(sources) > 1 else []
    kinds = {kind: steps for kind, steps in sources[run].steps().items() if steps}
    if not kinds:
        return '<p class="lead">There are no samples so far.</p>'
    kind = chosen["kind"] if chosen.get("kind") in kinds else next(iter(kinds))
    fields += [_select("kind", [*kinds], kind)] if len(kinds) > 1 else []
    steps, wanted = kinds[kind], _whole(chosen.get("step"))
    step = steps[-1] if wanted is None else steps[max(0, bisect.bisect_right(steps, wanted) - 1)]
    fields.append(
        f'<label>step <input type="number" name="step" min="{steps[0]}" max="{steps[-1]}" placeholder="{step}" '
        f'value="{"" if wanted is None else step}"></label>'
    )
    groups = sources[run].rewards(kind, step)
    at = min(_whole(chosen.get("group")) or 0, len(groups) - 1)
    i = min(_whole(chosen.get("sample")) or 0, len(groups[at]) - 1)
    names = [f"{k + 1} of {len(groups)}{_rewarded(group)}" for k, group in enumerate(groups)]
    own = [f"{k + 1} of {len(groups[at])}{_rewarded([reward])}" for k, reward in enumerate(groups[at])]
    fields += [_select("group", names, names[at], numbered=True), _select("sample", own, own[i], numbered=True)]
    line = _cut(sources[run].line(kind, step, at, i))
    which = "the newest; without a number the page follows" if step == steps[-1] else f"the newest is {steps[-1]}"
    note = f'<p class="lead">{escape(line["note"])}</p>' if line.get("note") else ""
    known = {"gap": line["trainer_logp"], "advantage": line["adv_of_token"] or rows.is_number(line.get("adv"))}
    modes = _modes([mode for mode, has in known.items() if not has])
    return (
        f'<p class="lead">Step {charts.number(step)} of {escape(kind)}, {which}.</p>{note}'
        f'<div class="samples">{modes}{"".join(_prompts([line]))}</div>{_notes()}'
    )


def _rewarded(rewards: Sequence[float | None]) -> str:
    scored = [x for x in rewards if x is not None and rows.is_number(x)]
    return f": reward {charts.number(round(sum(scored) / len(scored), 3))}" if scored else ""


def _select(name: str, options: Sequence[str], value: str, numbered: bool = False) -> str:
    """A field to choose one of the options, by its number if they are numbered."""
    shown = "".join(
        f'<option value="{i if numbered else escape(one)}"{" selected" if one == value else ""}>{escape(one)}</option>'
        for i, one in enumerate(options)
    )
    return f'<label>{name} <select name="{name}">{shown}</select></label>'


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


def _modes(without: Collection[str] = ()) -> str:
    """What to colour tokens by, and the scale of that."""
    choices = "".join(
        f'<label><input type="radio" name="colour" value="{mode}"{" checked" if mode == "logp" else ""}>'
        f"<span>{text}</span></label>"
        for mode, text in MODES
        if mode not in without
    )
    scales = "".join(f'<p class="scale {mode}">{escape(text)}</p>' for mode, text in SCALES.items())
    return f'<div class="modes">colour by {choices}</div>{scales}'


def _notes() -> str:
    notes = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in WORDS)
    return page.folded("what these numbers mean", f"<dl>{notes}</dl>")


def _cut(line: dict) -> dict:
    """A line with as much of its tokens and texts as is shown."""
    shorten = lambda text, most: text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    tokens = [shorten(str(token), LONGEST_TOKEN) for token in line.get("tokens", ())[:LONGEST]]
    most = {"prompt": LONGEST_TEXT, "text": LONGEST_TEXT, "finish": LONGEST_TOKEN}
    texts = {name: shorten(str(line[name]), most[name]) for name in most if name in line}
    known = lambda name: [x if rows.is_number(x) else None for x in (line.get(name) or ())[:LONGEST]]
    numbers = {name: known(name) for name in ("logp", "version_of_token", "trainer_logp", "adv_of_token")}
    return {**line, "tokens": tokens, **texts, **numbers}


def _size(line: dict) -> int:
    """What a cut line takes of the budget, in tokens."""
    texts = len(line.get("prompt", "")) + len(line.get("text", "")) + sum(map(len, line["tokens"]))
    return 1 + len(line["tokens"]) + texts // A_TOKEN


def _step(line: dict) -> tuple[str, int]:
    return str(line.get("kind", "")), line.get("step", 0)


def _every_nth(keys, stride: int) -> list:
    """Every stride-th key, and the last one."""
    return keys if stride == 1 else sorted({*keys[::stride], keys[-1]})


def _head(kind: str, step: int, lines: Sequence[dict]) -> str:
    rewards = [line["reward"] for line in lines if rows.is_number(line.get("reward"))]
    mean = f", mean reward {charts.number(round(sum(rewards) / len(rewards), 3))}" if rewards else ""
    return f"{kind} step {charts.number(step)}: {len(lines)} samples{mean}"


def _prompts(lines: Sequence[dict]) -> Iterator[str]:
    """Each prompt once, with its samples."""
    last = None
    for line in lines:
        if (prompt := str(line.get("prompt", ""))) != last:
            yield f'<h4>Prompt</h4><pre class="text">{_text(prompt)}</pre>'
        last = prompt
        yield _sample(line)


def _sample(line: dict) -> str:
    tokens, logp = [str(t) for t in line.get("tokens", ())], list(line.get("logp", ()))
    versions, trainer = list(line.get("version_of_token", ())), list(line.get("trainer_logp") or ())
    advantages = list(line.get("adv_of_token") or ()) or [line.get("adv")] * len(tokens)
    sampled_by = sorted({v for v in versions if v is not None and v >= 0})
    known = [p for p in logp if rows.is_number(p)]
    mean = sum(known) / len(known) if known else None
    trained = line["version"] if rows.is_number(line.get("version")) else None
    colours = "".join(f'<span class="swatch c{v % charts.COLOURS}"></span>{v} ' for v in sampled_by)
    facts = (
        ("reward", _number(line.get("reward"))),
        *((str(name), _number(x)) for name, x in (line.get("components") or {}).items()),
        ("advantage", _number(line.get("adv"))),
        ("finish", str(line.get("finish", ""))), ("tokens", charts.number(len(tokens))),
        ("mean log-probability", _number(mean)),
        ("trained at", "–" if trained is None else f"version {trained}"),
    )  # fmt: skip
    at = lambda values, i: values[i] if i < len(values) else None
    answer = "".join(
        _token(token, at(logp, i), at(versions, i), at(trainer, i), at(advantages, i), trained)
        for i, token in enumerate(tokens)
    )
    text = str(line.get("text", ""))
    other = "" if "".join(tokens).startswith(text) else f'<h4>Answer as text</h4><pre class="text">{_text(text)}</pre>'
    return (
        '<dl class="facts">' + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(x)}</dd></div>" for name, x in facts)
        + (f"<div><dt>sampled by version</dt><dd>{colours}</dd></div>" if colours else "")
        + f'</dl><pre class="text answer">{answer}</pre>{other}'
    )  # fmt: skip


def _text(text: str) -> str:
    """A text as HTML, in which every character is seen."""
    return UNSEEN.sub(lambda found: f'<span class="mark">U+{ord(found[0]):04X}</span>', escape(text))


def _token(token: str, logp, version, trainer, advantage, trained) -> str:
    """A token with its numbers as a tooltip, and for the style sheet: --p, --g and --a from 0 to 1, a class per
    version."""
    words = _text(token).replace("\n", '<span class="mark">⏎</span>\n')
    if version is not None and version < 0:
        return f'<i class="given" title="not sampled by the policy">{words}</i>'
    parts, style, names = [], "", []
    if rows.is_number(logp):
        parts.append(f"log-probability {_number(logp)} ({100 * math.exp(min(0.0, logp)):.1f}%)")
        style += f"--p:{min(1.0, max(0.0, -logp / 4)):.2g};"
    if version is not None:
        late = version if trained is None else trained - version
        parts.append(f"version {version}" + (f", {late} behind" if trained is not None and late > 0 else ""))
        names.append(f"v{version % charts.COLOURS}")
    if rows.is_number(trainer) and rows.is_number(logp):
        gap = trainer - logp
        parts.append(f"trainer − sampler {_number(gap)}")
        names.append("down" if gap < 0 else "up")
        style += f"--g:{max(0.0, min(1.0, math.log10(abs(gap)) / 6 + 1)) if gap else 0:.2g};"
    if rows.is_number(advantage):
        parts.append(f"advantage {_number(advantage)}")
        names.append("loss" if advantage < 0 else "gain")
        style += f"--a:{min(1.0, abs(advantage) / FULL):.2g};"
    return f'<i class="{" ".join(names)}" style="{style}" title="{escape(" · ".join(parts))}">{words}</i>'


def _number(x) -> str:
    return charts.number(float(f"{x:.4g}")) if rows.is_number(x) else "–"
