"""Builds a run's self-contained HTML report: results, curves, distributions, time, samples."""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tracking import metric_catalog
from ..tracking import run_dir as tracker
from . import charts, chrome_trace, results, rows, samples
from . import html as page
from .html import escape

FEWEST = 3  # points of a chart; fewer are numbers
OPEN = "summary", "look", "learning"  # sections that are not folded at first
MAIN_CHARTS = 6  # of a section; further ones are folded
OTHER = "Other"  # the group of metrics that no chart is of


@dataclass(frozen=True)
class Run:
    """What the page shows of a run.

    Attributes:
      table: {kind: rows by increasing step}.
      summary, config: of its files; {} without.
    """

    name: str
    table: Mapping[str, rows.Rows]
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def report(run_dir, out=None, *, trace: bool = True) -> pathlib.Path:
    """Writes the report of a run directory (see `run_dir`) and returns its path; any of the data may be missing.

    Args:
      out: file to write; None = report.html in the run directory.
      trace: also writes `trace.json`, if there is a journal, which may be long.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"report: needs a run directory, got {run_dir}; pass one, such as runs/demo")
    names = tracker.METRICS, tracker.SAMPLES, tracker.SUMMARY, tracker.CONFIG, tracker.REPLAY
    if not any((run_dir / name).exists() for name in names):
        raise ValueError(f"report: a run directory must contain {tracker.METRICS}, got {run_dir} without it")
    out = pathlib.Path(out) if out is not None else run_dir / "report.html"
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"report: out must be a file in a directory that exists, got {out}")
    if trace:
        chrome_trace.write(run_dir)
    page = _page(run_dir, trace)
    tracker.write_text(out, page.encode(errors="replace").decode())  # JSON may hold halves of characters
    return out


def _page(run_dir: pathlib.Path, trace: bool) -> str:
    table = rows.read(run_dir / tracker.METRICS) | rows.read(run_dir / tracker.REPLAY)
    name, summary, config = run_dir.resolve().name, json_object(run_dir / tracker.SUMMARY), run_dir / tracker.CONFIG
    busy = (lambda: _servers(chrome_trace.file(run_dir))) if trace else str
    made = sections([Run(name, table, summary, json_object(config))], busy)
    made["samples"] = "Samples", lambda: samples.samples(run_dir / tracker.SAMPLES)
    return page.document(
        title=name,
        subtitle=results.subtitle(summary, table),
        sections=[(id_, title, body, id_ in OPEN) for id_, (title, make) in made.items() if (body := make())],
    )


def sections(runs: Sequence[Run], busy: Callable[[], str] = str) -> dict[str, tuple[str, Callable[[], str]]]:
    """{id: (heading, function that makes the body, "" without data)} of all sections but that of samples, which is
    empty. Several runs share their curves; of the rest each has its own.

    Args:
      busy: makes what stands behind the table of times.
    """
    made: dict[str, tuple[str, Callable[[], str]]] = {
        "summary": ("Summary", lambda: _each(runs, lambda run: results.summary(run.summary, run.table))),
        "look": ("What to look at", lambda: _each(runs, lambda run: results.look(run.table))),
    }
    for group in metric_catalog.GROUPS:
        made[group.lower()] = group, functools.partial(_curves, runs, group)
    return made | {
        "distributions": ("Distributions", lambda: _each(runs, lambda run: _distributions(run.table))),
        "time": ("Time", lambda: _each(runs, lambda run: _time(run.table)) + busy()),
        "samples": ("Samples", str),
        "numbers": ("All metrics", lambda: _each(runs, lambda run: _numbers(run.table))),
        "configuration": ("Configuration", lambda: _each(runs, lambda run: _configuration(run.config))),
    }


def _each(runs: Sequence[Run], body: Callable[[Run], str]) -> str:
    """What `body` makes of each run, behind its name if there are several."""
    if len(runs) == 1:
        return body(runs[0])
    return "".join(f"<h3>{escape(run.name)}</h3>{made}" for run in runs if (made := body(run)))


def json_object(path: pathlib.Path) -> dict:
    """A file's JSON object; {} without the file. Raises ValueError for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be a JSON object, got a parse error ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


# ---------------------------------------------------------------- curves


def _curves(runs: Sequence[Run], group: str) -> str:
    """The charts of a group; constant metrics become a line of text."""
    cards: list[str] = []
    still: list[str] = []
    for kind, chart, lines in _charts(runs, group):
        values = [rows.values(steps, name) for _, name, steps in lines]
        if len(values[0]) > 1 and all(len(set(v)) == 1 for v in values):
            still += [
                f"<li>{escape(_line(runs, run, name))} <b>{charts.number(v[0])}</b> "
                f"at every step of {escape(kind)}: {escape(metric_catalog.meaning(name))}</li>"
                for (run, name, _), v in zip(lines, values, strict=True)
            ]
            continue
        alone = len({name for _, name, _ in lines}) == 1  # the title says which
        order = [(run.name, name) for name in chart.names for run in runs]  # a run keeps its colour
        series = [
            charts.Series(
                run if alone and len(runs) > 1 else _line(runs, run, name), rows.points(steps, name),
                order.index((run, name)) if len(runs) > 1 else None,
            )
            for run, name, steps in lines
        ]  # fmt: skip
        if max(map(len, values)) < FEWEST:
            picture = "".join(map(_few, series))
        else:
            picture = charts.curves(series, log=chart.log, zero=chart.zero, y_range=chart.y_range)
        cards.append(page.card(chart.title, kind, chart.meaning, picture))
    body = page.cards(cards, MAIN_CHARTS)
    if still:
        body += f'<ul class="still">{"".join(still)}</ul>'
    return f'<p class="lead">{escape(metric_catalog.GROUPS[group])}</p>{body}' if body else ""


def _line(runs: Sequence[Run], run: str, name: str) -> str:
    """The name of a curve."""
    return f"{run}: {metric_catalog.label(name)}" if len(runs) > 1 else metric_catalog.label(name)


def _few(series: charts.Series) -> str:
    """A curve of one or two points, as numbers."""
    known = [(step, y) for step, y in series.points if y is not None]
    words = " → ".join(charts.number(y) for _, y in known)
    steps = " and ".join(charts.number(step) for step, _ in known)
    where = f"step{'s' * (len(known) > 1)} {steps}"
    return f'<p class="numbers">{words}<small>{escape(series.name)}, {where}</small></p>'


def _charts(runs: Sequence[Run], group: str):
    """(kind, chart, its curves (run, metric, rows)) of a group: the catalogued charts, in the last group also one for
    each other metric."""
    for chart in (chart for chart in metric_catalog.CHARTS if chart.group == group):
        for kind in _kinds(runs):
            if lines := _logged(runs, kind, chart.names, chart.unless):
                yield kind, chart, lines
    if group != OTHER:
        return
    drawn = {name for chart in metric_catalog.CHARTS for name in chart.names}
    for kind in _kinds(runs):
        for name in {name: None for run in runs for name in rows.names(run.table.get(kind, ()))}:
            if name not in drawn and not name.startswith("time_") and not name.endswith("_max"):
                title, words = metric_catalog.label(name).capitalize(), metric_catalog.meaning(name).capitalize()
                chart = metric_catalog.Chart(OTHER, title, (name,), f"{words}.")
                yield kind, chart, _logged(runs, kind, (name,))


def _kinds(runs: Sequence[Run]) -> list[str]:
    return [*{kind: None for run in runs for kind in run.table}]


def _logged(runs: Sequence[Run], kind: str, names: Sequence[str], unless: str = ""):
    """(run, metric, rows) of those that were logged, by runs without the metric `unless`."""
    tables = [(run.name, run.table.get(kind, ())) for run in runs]
    return [
        (run, name, steps)
        for run, steps in tables
        for name in names
        if rows.has(steps, name) and not (unless and rows.has(steps, unless))
    ]


# ---------------------------------------------------------------- distributions, time


def _distributions(table) -> str:
    cards = []
    for kind, steps in table.items():
        names = {n: None for r in steps for n, v in r.items() if isinstance(v, Mapping) and "edges" in v}
        order = ("length", "staleness")
        for name in sorted(names, key=lambda n: (not n.startswith(order), n)):
            base = name.removesuffix("_hist")
            found = [r[name] for r in steps if isinstance(r.get(name), Mapping)]
            edges = max((h["edges"] for h in found), key=len)
            # Histograms only have as many bins as their step needed; pad with empty ones.
            part = [h for h in found if h["edges"] == edges[: len(h["edges"])]]
            same = [h["counts"] + [0] * (len(edges) - len(h["edges"])) for h in part]
            fifth = len(same) // 5
            if base == "length" and fifth:  # to show the trend
                parts = [("first fifth of the steps", same[:fifth]), ("last fifth", same[-fifth:])]
            else:
                parts = [("all steps", same)]
            series = [(what, [sum(c) for c in zip(*counts, strict=True)]) for what, counts in parts]
            if any(sum(counts) for _, counts in series):
                words = f"{metric_catalog.meaning(base).capitalize()}. The end bins include all values beyond."
                picture = charts.histogram(edges, series, x_name=metric_catalog.label(base))
                cards.append(page.card(metric_catalog.label(base).capitalize(), kind, words, picture))
    lead = '<p class="lead">Distribution of values over all steps, in percent.</p>'
    return lead + page.cards(cards) if cards else ""


def _time(table) -> str:
    parts = []
    for kind, steps in table.items():
        phases = [n for n in rows.names(steps) if n.startswith("time_") and n != "time_step"]
        steps = [r for r in steps if any(rows.is_number(r.get(n)) for n in phases)]
        if not steps:
            continue
        phases.sort(key=_phase_order)
        spent = [(r["step"], [max(0.0, r.get(n) or 0.0) for n in phases]) for r in steps]
        rest = [max(0.0, (r.get("time_step") or 0.0) - sum(s)) for r, (_, s) in zip(steps, spent, strict=True)]
        if sum(rest) > 0.01 * sum(sum(s) for _, s in spent) and "time_other" not in phases:
            phases.append("time_other")
            spent = [(step, [*s, more]) for (step, s), more in zip(spent, rest, strict=True)]
        known = [
            metric_catalog.PHASES.get(n[5:], (metric_catalog.label(n[5:]), "logged by the recipe")) for n in phases
        ]
        parts.append(_time_of(kind, spent, known))
    lead = '<p class="lead">What the trainer did and waited for.</p>'
    return lead + "".join(parts) if parts else ""


def _servers(path: pathlib.Path) -> str:
    """Mean number of concurrent completions per server, and a pointer to the trace."""
    if not path.is_file():
        return ""
    busy = chrome_trace.in_flight(tracker.read_lines(path))
    lines = [(escape(url), charts.number(round(n, 2))) for url, n in busy.items()]
    return (page.table(("server", "concurrent completions, mean"), lines) if lines else "") + (
        f"<p>{chrome_trace.TRACE} in the run directory has all phases, pushes and completions: open it at "
        "ui.perfetto.dev.</p>"
    )


def _phase_order(name: str) -> int:
    """Sort key of a phase: known ones in order, unknown ones last."""
    known = [f"time_{phase}" for phase in metric_catalog.PHASES]
    return known.index(name) if name in known else len(known)


def _time_of(kind, spent, known) -> str:
    columns = list(zip(*(seconds for _, seconds in spent), strict=True))
    means = [sum(c) / len(c) for c in columns]
    total = sum(means) or 1.0
    bar = "".join(
        f'<i class="c{k % charts.COLOURS}" style="flex:{mean / total:.5f}" '
        f'title="{escape(what)}: {100 * mean / total:.1f}%"></i>'
        for k, ((what, _), mean) in enumerate(zip(known, means, strict=True))
    )
    lines = [
        (
            f'<i class="swatch c{k % charts.COLOURS}"></i>{escape(what)}',
            f"{charts.number(float(f'{mean:.3g}'))} s",
            f"{charts.number(float(f'{statistics.median(column):.3g}'))} s",
            f"{100 * mean / total:.1f}%",
            escape(words),
        )
        for k, ((what, words), mean, column) in enumerate(zip(known, means, columns, strict=True))
    ]
    heads = "phase", "mean", "median", "share", "what it means"
    picture = charts.stack([what for what, _ in known], spent, x_name="step", unit="seconds")
    words = "Seconds per step by phase; a column may average several steps."
    return (
        f"<h3>{escape(kind)}: {charts.number(float(f'{total:.3g}'))} s per step on average</h3>"
        f'<div class="split">{bar}</div><div class="pair"><div class="plain">{page.table(heads, lines)}</div>'
        f"{page.card('Seconds per step', kind, words, picture)}</div>"
    )


# ---------------------------------------------------------------- tables


def _numbers(table) -> str:
    parts = []
    for kind, steps in table.items():
        lines = []
        for name in rows.names(steps):
            v = rows.values(steps, name)
            figures = [f'<span class="n">{charts.number(x)}</span>' for x in (v[0], v[-1], min(v), max(v))]
            healthy = escape(metric_catalog.healthy(name)) or "–"
            lines.append((f"<code>{escape(name)}</code>", *figures, healthy, escape(metric_catalog.meaning(name))))
        heads = "name", "first", "last", "smallest", "largest", "healthy", "what it means"
        if lines:
            parts.append(page.folded(f"{len(lines)} metrics of {kind}", page.table(heads, lines)))
    return '<p class="lead">All steps are in metrics.jsonl.</p>' + "".join(parts) if parts else ""


def _configuration(config) -> str:
    lines = [(f"<code>{escape(name)}</code>", _setting(value)) for name, value in _flat(config)]
    return f'<p class="lead">As in config.json.</p>{page.table(("setting", "value"), lines)}' if lines else ""


def _setting(value) -> str:
    """An option's value as it is given on the command line."""
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list):
        return f'<span class="words">{escape(" ".join(map(str, value)))}</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    return charts.number(value) if rows.is_number(value) else f'<span class="words">{escape(value)}</span>'


def _flat(value, prefix=""):
    for name, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield from _flat(entry, f"{prefix}{name}.")
        else:
            yield prefix + str(name), entry
