"""The first sections of the report: the results of a run in words and numbers, and what to look at."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from ..tracking import diagnosis, metric_catalog
from . import charts, rows
from . import html as page
from .html import escape

Table = Mapping[str, rows.Rows]


def subtitle(summary: Mapping, table: Table) -> str:
    parts = [f"{charts.number(len(steps))} step{'s' * (len(steps) > 1)} of {kind}" for kind, steps in table.items()]
    seconds = _seconds(summary, table)
    return " · ".join([*parts, *([duration(seconds)] if seconds else [])])


def duration(seconds: float) -> str:
    """12.3 s, 6 min 27 s, 3 h 5 min."""
    if seconds < 10:
        return f"{charts.number(float(f'{seconds:.2g}'))} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def summary(summary: Mapping, table: Table) -> str:
    """Tiles with the most important results, and all results, folded."""
    tiles = "".join(_tiles(summary, table))
    results = {name: entry for name, entry in summary.items() if name != "alarms"}  # which `look` shows
    lines = [
        (escape(_label(path)), value(path[-1], entry), escape(metric_catalog.result(path)))
        for path, entry in _flat(results)
    ]
    return (f'<div class="tiles">{tiles}</div>' if tiles else "") + (
        page.folded("all results, as in summary.json", page.table(("result", "value", "what it means"), lines))
        if lines
        else ""
    )


def value(name: str, entry: Any) -> str:
    """A value for reading, as HTML: shares in percent, seconds as a duration, yes, no, unknown; lists in words."""
    if entry is None:
        return "unknown"
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    if name == "server_version":
        labels = entry if isinstance(entry, list) else [entry]
        return escape(", ".join(str(label).partition("-")[0] for label in labels)) or "none"
    if isinstance(entry, list | tuple):
        return ", ".join(value(name, one) for one in entry) or "none"
    if isinstance(entry, Mapping):  # of versions
        return ", ".join(f"{value(name, one)} at {escape(version)}" for version, one in entry.items()) or "none"
    if not rows.is_number(entry):
        return f'<span class="words">{escape(entry)}</span>' if entry else "none"
    if "accurac" in name:
        return f"{100 * entry:.1f}%"
    return duration(entry) if name == "seconds" or name.endswith("_s") else charts.number(entry)


def _flat(entries: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of all entries; those by version stay together."""
    for name, entry in entries.items():
        if isinstance(entry, Mapping) and entry and not all(str(key).isdigit() for key in entry):
            yield from _flat(entry, (*path, str(name)))
        else:
            yield (*path, str(name)), entry


def _label(path: tuple[str, ...]) -> str:
    return ": ".join(metric_catalog.label(name) for name in path)


def _seconds(summary: Mapping, table: Table) -> float:
    logged = max((r.get("seconds", 0.0) for steps in table.values() for r in steps), default=0.0)
    return summary["seconds"] if rows.is_number(summary.get("seconds")) else logged


def _tiles(summary: Mapping, table: Table) -> Iterator[str]:
    def logged(name):
        return next((found for steps in table.values() if (found := rows.values(steps, name))), [])

    if isinstance(summary.get("complete"), bool):
        steps = summary.get("steps", summary.get("rl_steps"))
        words = "All steps were trained, the last weights evaluated and exported."
        words = words if summary["complete"] else "Stopped; the same command goes on from here."
        yield page.tile("Complete", value("complete", summary["complete"]), f"{charts.number(steps)} steps. {words}")
    accuracy = logged("accuracy")
    before = summary.get("sft_accuracy", accuracy[0] if accuracy else None)
    after = summary.get("rl_accuracy", accuracy[-1] if accuracy else None)
    if rows.is_number(after):
        first = f"{100 * before:.1f}% before. " if rows.is_number(before) and before != after else ""
        yield page.tile("Held-out accuracy", f"{100 * after:.1f}%", f"{first}Problems never trained on.")
    reward = logged("reward")
    if reward:
        n = max(1, len(reward) // 10)
        first, last = sum(reward[:n]) / n, sum(reward[-n:]) / n
        yield page.tile(
            "Reward", charts.number(round(last, 3)),
            f"{charts.number(round(first, 3))} at first. Means of the last and first {n} step{'s' * (n > 1)}.",
        )  # fmt: skip
    nll = logged("nll")
    if nll and not reward:
        words = f"{charts.number(nll[0])} at first. Nats per token, at the last step."
        yield page.tile("Likelihood loss", charts.number(nll[-1]), words)
    k3 = summary.get("mismatch_k3", (logged("mismatch_k3") or [None])[-1])
    if rows.is_number(k3):
        yield page.tile("Mismatch k3", charts.number(k3), "Trainer against sampler; 0 = the same probabilities.")
    if stale := logged("staleness_max"):
        yield page.tile("Oldest token", charts.number(max(stale)), "Maximum staleness of a trained token, in batches.")
    version = summary.get("server_version", (logged("server_version") or [None])[-1])
    if version is not None:
        words = "Policy version on the server, in batches consumed."
        yield page.tile("Server version", value("server_version", version), words)
    if seconds := _seconds(summary, table):
        yield page.tile("Wall time", duration(seconds), "Of the whole run.")


def look(table: Table) -> str:
    """What was wrong with steps, and what to look at."""
    items = [*_alarms(table), *_not_finite(table)]
    return f'<ul class="warnings">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""


def _alarms(table: Table) -> Iterator[str]:
    """The alarms that the run has raised, by the rule by which it says them while it goes on."""
    for alarm in diagnosis.alarms(table):
        what = f"<b>{_sentence(alarm.condition.what)}</b> ({escape(alarm.shown)})"
        when = f"{alarm.steps} of {len(table[alarm.kind])} steps of {alarm.kind}, alarm at {alarm.first}"
        yield f"{what} in {escape(when)}, last {alarm.last}. {_sentence(alarm.condition.advice)}."


def _sentence(words: str) -> str:
    return escape(words if "_" in words.split()[0] else words[0].upper() + words[1:])  # a metric keeps its name


def _not_finite(table: Table) -> Iterator[str]:
    """Metrics that were not finite."""
    seen: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for kind, steps in table.items():
        for row in steps:
            for name, what in row.get("nonfinite", {}).items():
                seen[kind, name, what].append(row["step"])
    for (kind, name, what), at in seen.items():
        where = ", ".join(str(s) for s in at[:8]) + (f" and {len(at) - 8} more" if len(at) > 8 else "")
        yield escape(f"{metric_catalog.label(name)} was {what} in {kind} at step {where}")
