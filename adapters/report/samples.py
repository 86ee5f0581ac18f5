"""The samples of the report: what the policy wrote, token by token, coloured by probability, version or mismatch.

Without a script: steps and samples fold, and the style sheet colours tokens by the values that each one carries.
"""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Iterator, Sequence

from . import charts, rows
from . import html as page
from .html import escape

TOKEN_BUDGET = 40_000  # tokens of samples in the report: about 5 MB
LONGEST = 10_000  # tokens of a sample that are shown
LONGEST_TEXT, LONGEST_TOKEN = 100_000, 200  # characters of a prompt or an answer, and of a token
A_TOKEN = 100  # characters that count as a token: as many as the page has for one

FIELDS: rows.Types = rows.FIELDS | {name: (list,) for name in ("tokens", "logp", "version_of_token")}
FIELDS["trainer_logp"] = list, type(None)
MODES = ("logp", "log-probability"), ("version", "policy version"), ("gap", "trainer − sampler")
SCALES = {
    "logp": "white: certain; orange: unlikely, strongest at -4 nats",
    "version": "one colour per policy version that sampled the token",
    "gap": "blue: the trainer's log-probability is higher; red: lower; log scale from 1e-6 to 1 nat",
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
    notes = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in WORDS)
    choices = "".join(
        f'<label><input type="radio" name="colour" value="{mode}"{" checked" if mode == "logp" else ""}>'
        f"<span>{text}</span></label>"
        for mode, text in MODES
    )
    scales = "".join(f'<p class="scale {mode}">{escape(text)}</p>' for mode, text in SCALES.items())
    return (
        f'<p class="lead">{escape(words)}. What the policy wrote, token by token; a token shows its numbers under the '
        f'pointer.</p><div class="samples"><div class="modes">colour by {choices}</div>{scales}'
        + "".join(
            page.folded(_head(kind, step, own), "".join(_prompts(own)), open=i == len(steps) - 1)
            for i, ((kind, step), own) in enumerate(sorted(steps.items()))
        )
        + f"</div>{page.folded('what these numbers mean', f'<dl>{notes}</dl>')}"
    )


def _cut(line: dict) -> dict:
    """A line with as much of its tokens and texts as is shown."""
    shorten = lambda text, most: text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    tokens = [shorten(str(token), LONGEST_TOKEN) for token in line.get("tokens", ())[:LONGEST]]
    most = {"prompt": LONGEST_TEXT, "text": LONGEST_TEXT, "finish": LONGEST_TOKEN}
    texts = {name: shorten(str(line[name]), most[name]) for name in most if name in line}
    known = lambda name: [x if rows.is_number(x) else None for x in (line.get(name) or ())[:LONGEST]]
    numbers = {name: known(name) for name in ("logp", "version_of_token", "trainer_logp")}
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
            yield f'<h4>Prompt</h4><pre class="text">{escape(prompt)}</pre>'
        last = prompt
        yield _sample(line)


def _sample(line: dict) -> str:
    tokens, logp = [str(t) for t in line.get("tokens", ())], list(line.get("logp", ()))
    versions, trainer = list(line.get("version_of_token", ())), list(line.get("trainer_logp") or ())
    sampled_by = sorted({v for v in versions if v is not None and v >= 0})
    known = [p for p in logp if rows.is_number(p)]
    mean = sum(known) / len(known) if known else None
    trained = line["version"] if rows.is_number(line.get("version")) else None
    facts = (
        ("reward", _number(line.get("reward"))), ("advantage", _number(line.get("adv"))),
        ("finish", str(line.get("finish", ""))), ("tokens", charts.number(len(tokens))),
        ("mean log-probability", _number(mean)),
        ("trained at", "–" if trained is None else f"version {trained}"),
        ("sampled by", f"version {', '.join(map(str, sampled_by))}" if sampled_by else "–"),
    )  # fmt: skip
    at = lambda values, i: values[i] if i < len(values) else None
    answer = "".join(
        _token(token, at(logp, i), at(versions, i), at(trainer, i), trained) for i, token in enumerate(tokens)
    )
    text = str(line.get("text", ""))
    other = "" if "".join(tokens).startswith(text) else f'<h4>Answer as text</h4><pre class="text">{escape(text)}</pre>'
    return (
        '<dl class="facts">' + "".join(f"<div><dt>{term}</dt><dd>{escape(x)}</dd></div>" for term, x in facts)
        + f'</dl><pre class="text answer">{answer}</pre>{other}'
    )  # fmt: skip


def _token(token: str, logp, version, trainer, trained) -> str:
    """A token with its numbers as a tooltip, and for the style sheet: --p and --g from 0 to 1, a class per version."""
    words = escape(token).replace("\n", '<span class="mark">⏎</span>\n')
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
    return f'<i class="{" ".join(names)}" style="{style}" title="{escape(" · ".join(parts))}">{words}</i>'


def _number(x) -> str:
    return charts.number(float(f"{x:.4g}")) if rows.is_number(x) else "–"
