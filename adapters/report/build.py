"""Builds a run's self-contained HTML report: results, curves, distributions, time, samples."""

from __future__ import annotations

import collections
import html
import json
import pathlib
import statistics
from collections.abc import Mapping

from ..tracking import diagnosis, metric_catalog
from ..tracking import run_dir as tracker
from . import charts, chrome_trace
from . import html as page

TOKEN_BUDGET = 200_000  # tokens of samples in the report: about 6 MB
RESERVED = set(tracker.OURS)
DIAGNOSED = {  # metrics whose healthy bound is that of a condition
    name
    for condition in diagnosis.CONDITIONS
    for name, _, bound in condition.tests
    if bound in metric_catalog.ALARMS.get(name, ())
}


def report(run_dir, out=None, *, trace: bool = True) -> pathlib.Path:
    """Writes the report of a run directory (see `run_dir`) and returns its path; any of the data may be missing.

    Args:
      out: file to write; None = report.html in the run directory.
      trace: also writes `trace.json`, if there is a journal, which may be long.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"report: needs a run directory, got {run_dir}; pass one, such as runs/demo")
    names = tracker.METRICS, tracker.SAMPLES, tracker.SUMMARY, tracker.CONFIG
    if not any((run_dir / name).exists() for name in names):
        raise ValueError(f"report: a run directory must contain {tracker.METRICS}, got {run_dir} without it")
    out = pathlib.Path(out) if out is not None else run_dir / "report.html"
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"report: out must be a file in a directory that exists, got {out}")
    if trace:
        chrome_trace.write(run_dir)
    tracker.write_text(out, _page(run_dir))
    return out


def _page(run_dir: pathlib.Path) -> str:
    summary, config = _object(run_dir / tracker.SUMMARY), _object(run_dir / tracker.CONFIG)
    table = _table(run_dir / tracker.METRICS)
    sections = [
        ("summary", "Summary", _summary(summary, table)),
        ("look", "What to look at", _look(table)),
        *_curves(table),
        ("distributions", "Distributions", _distributions(table)),
        ("time", "Time", _time(table) + _servers(run_dir / chrome_trace.JOURNAL)),
        ("samples", "Samples", _samples(run_dir / tracker.SAMPLES)),
        ("numbers", "All metrics", _numbers(table)),
        ("configuration", "Configuration", _configuration(config)),
    ]
    return page.document(
        title=run_dir.resolve().name,
        subtitle=_subtitle(summary, table),
        sections=[s for s in sections if s[2]],
    )


def _object(path: pathlib.Path) -> dict:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: must be a JSON object, got a parse error ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def _table(path: pathlib.Path) -> dict[str, list[dict]]:
    """{kind: rows by increasing step}; merges lines of the same kind and step into one row."""
    kinds: dict[str, dict[int, dict]] = {}
    for line in tracker.read_lines(path) if path.exists() else ():
        rows = kinds.setdefault(str(line.get("kind", "run")), {})
        rows.setdefault(line.get("step", 0), {}).update(line)
    return {kind: [rows[step] for step in sorted(rows)] for kind, rows in kinds.items()}


def _names(rows) -> list[str]:
    """Names of numeric metrics in the rows, in order of appearance."""
    found = {n: None for r in rows for n, v in r.items() if n not in RESERVED and _is_number(v)}
    return list(found)


def _is_number(value) -> bool:
    return isinstance(value, int | float)


def _points(rows, name):
    """(step, value) of the rows that have the metric; value None if it was not finite."""
    return [(r["step"], r[name]) for r in rows if name in r]


def _values(rows, name) -> list[float]:
    return [r[name] for r in rows if _is_number(r.get(name))]


def _escape(value) -> str:
    return html.escape(str(value))


# ---------------------------------------------------------------- summary


def _subtitle(summary, table) -> str:
    parts = [f"{charts.number(len(rows))} steps of {kind}" for kind, rows in table.items()]
    seconds = _seconds(summary, table)
    return " · ".join([*parts, *([_duration(seconds)] if seconds else [])])


def _seconds(summary, table) -> float:
    logged = max((r.get("seconds", 0.0) for rows in table.values() for r in rows), default=0.0)
    return summary["seconds"] if _is_number(summary.get("seconds")) else logged


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds:02} s"


def _summary(summary, table) -> str:
    tiles = "".join(_tiles(summary, table))
    rows = [
        (_escape(metric_catalog.label(name)), _value(value), _escape(metric_catalog.result(name)))
        for name, value in summary.items()
    ]
    return (f'<div class="tiles">{tiles}</div>' if tiles else "") + (
        page.table(("result", "value", "what it means"), rows) if rows else ""
    )


def _value(value) -> str:
    if isinstance(value, bool) or not _is_number(value):
        text = value if isinstance(value, str) else json.dumps(value)
        return f'<span class="words">{_escape(text)}</span>'
    return charts.number(value)


def _tiles(summary, table):
    """Yields tiles with the most important results."""

    def ends(name):
        for rows in table.values():
            values = _values(rows, name)
            if values:
                return values
        return []

    accuracy = ends("accuracy")
    before = summary.get("sft_accuracy", accuracy[0] if accuracy else None)
    after = summary.get("rl_accuracy", accuracy[-1] if accuracy else None)
    if _is_number(after):
        first = f"{100 * before:.1f}% before. " if _is_number(before) and before != after else ""
        yield page.tile("Held-out accuracy", f"{100 * after:.1f}%", f"{first}Problems never trained on.")
    reward = ends("reward")
    if reward:
        n = max(1, len(reward) // 10)
        first, last = sum(reward[:n]) / n, sum(reward[-n:]) / n
        yield page.tile(
            "Reward", charts.number(round(last, 3)),
            f"{charts.number(round(first, 3))} at first. Means of the last and first {n} steps.",
        )  # fmt: skip
    nll = ends("nll")
    if nll and not reward:
        yield page.tile(
            "Likelihood loss",
            charts.number(nll[-1]),
            f"{charts.number(nll[0])} at first. Nats per token, at the last step.",
        )
    k3 = summary.get("mismatch_k3", (ends("mismatch_k3") or [None])[-1])
    if _is_number(k3):
        yield page.tile("Mismatch k3", charts.number(k3), "Trainer against sampler; 0 = the same probabilities.")
    stale = ends("staleness_max")
    if stale:
        yield page.tile("Oldest token", charts.number(max(stale)), "Maximum staleness of a trained token, in batches.")
    version = summary.get("server_version", (ends("server_version") or [None])[-1])
    if version is not None:
        yield page.tile("Server version", _value(version), "Policy version on the server, in batches consumed.")
    seconds = _seconds(summary, table)
    if seconds:
        yield page.tile("Wall time", _duration(seconds), "Of the whole run.")


def _look(table) -> str:
    """What was wrong with steps, and what to look at."""
    items = _diagnosed(table) + _warnings(table) + _alarms(table)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _diagnosed(table) -> str:
    """Conditions of `diagnosis` that held, as list items."""
    items = []
    for kind, rows in table.items():
        held: dict[diagnosis.Condition, list[int]] = {}
        now: Mapping[str, float] = {}
        for row in rows:
            before, now = now, tracker.numbers(row)
            for condition in diagnosis.of(now, before):
                held.setdefault(condition, []).append(row["step"])
        for condition, steps in held.items():
            when = f"{len(steps)} of {len(rows)} steps of {kind}, first {steps[0]}, last {steps[-1]}"
            words = condition.what[0].upper() + condition.what[1:]
            advice = condition.advice[0].upper() + condition.advice[1:]
            items.append(f"<li><b>{_escape(words)}</b>: {_escape(when)}. {_escape(advice)}.</li>")
    return "".join(items)


def _warnings(table) -> str:
    """Metrics that were not finite, as list items."""
    seen: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for kind, rows in table.items():
        for row in rows:
            for name, what in row.get("nonfinite", {}).items():
                seen[kind, name, what].append(row["step"])
    items = []
    for (kind, name, what), steps in seen.items():
        where = ", ".join(str(s) for s in steps[:8]) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
        items.append(
            f"<li>{_escape(metric_catalog.label(name))} was {_escape(what)} in {_escape(kind)} at step {where}</li>"
        )
    return "".join(items)


def _alarms(table) -> str:
    """Metrics outside their healthy range, as list items."""
    items = []
    for kind, rows in table.items():
        for name in metric_catalog.ALARMS:
            if name in DIAGNOSED:
                continue
            checked = [(r["step"], metric_catalog.alarm(name, r[name])) for r in rows if _is_number(r.get(name))]
            off = [(step, words) for step, words in checked if words]
            if off:
                share = f"{len(off)} of {len(checked)} steps of {kind}, most recently at step {off[-1][0]}"
                what = f"{metric_catalog.label(name)} was {off[-1][1]} in {share}: {metric_catalog.meaning(name)}"
                items.append(f"<li>{_escape(what)}</li>")
    return "".join(items)


# ---------------------------------------------------------------- curves


def _curves(table):
    """Sections (id, title, body), one per group of charts; constant metrics become a line of text."""
    cards: dict[str, list[str]] = {group: [] for group in metric_catalog.GROUPS}
    still: dict[str, list[str]] = {group: [] for group in metric_catalog.GROUPS}
    for kind, chart, names, rows in _charts(table):
        values = [_values(rows, name) for name in names]
        if len(values[0]) > 1 and all(len(set(v)) == 1 for v in values):
            still[chart.group] += [
                f"<li>{_escape(metric_catalog.label(n))} <b>{charts.number(v[0])}</b> "
                f"at every step of {_escape(kind)}: {_escape(metric_catalog.meaning(n))}</li>"
                for n, v in zip(names, values, strict=True)
            ]
            continue
        series = [charts.Series(metric_catalog.label(n), _points(rows, n)) for n in names]
        picture = charts.curves(series, log=chart.log, zero=chart.zero, y_range=chart.y_range)
        cards[chart.group].append(page.card(chart.title, kind, chart.meaning, picture))
    for group, found in cards.items():
        body = f'<div class="cards">{"".join(found)}</div>' if found else ""
        if still[group]:
            body += f'<ul class="still">{"".join(still[group])}</ul>'
        lead = f'<p class="lead">{_escape(metric_catalog.GROUPS[group])}</p>'
        yield group.lower(), group, lead + body if body else ""


def _charts(table):
    """(kind, chart, its logged metrics, rows): the catalogued charts, then one for each other metric."""
    for chart in metric_catalog.CHARTS:
        for kind, rows in table.items():
            names = [name for name in chart.names if _values(rows, name)]
            if names and not _values(rows, chart.unless):
                yield kind, chart, names, rows
    drawn = {name for chart in metric_catalog.CHARTS for name in chart.names}
    for kind, rows in table.items():
        for name in _names(rows):
            if name not in drawn and not name.startswith("time_") and not name.endswith("_max"):
                title, words = metric_catalog.label(name).capitalize(), metric_catalog.meaning(name).capitalize()
                yield kind, metric_catalog.Chart("Other", title, (name,), f"{words}."), [name], rows


# ---------------------------------------------------------------- distributions, time


def _distributions(table) -> str:
    cards = []
    for kind, rows in table.items():
        names = {n: None for r in rows for n, v in r.items() if isinstance(v, Mapping) and "edges" in v}
        order = ("length", "staleness")
        for name in sorted(names, key=lambda n: (not n.startswith(order), n)):
            base = name.removesuffix("_hist")
            found = [r[name] for r in rows if isinstance(r.get(name), Mapping)]
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
    return f'{lead}<div class="cards">{"".join(cards)}</div>' if cards else ""


def _time(table) -> str:
    parts = []
    for kind, rows in table.items():
        phases = [n for n in _names(rows) if n.startswith("time_") and n != "time_step"]
        rows = [r for r in rows if any(_is_number(r.get(n)) for n in phases)]
        if not rows:
            continue
        phases.sort(key=_phase_order)
        spent = [(r["step"], [max(0.0, r.get(n) or 0.0) for n in phases]) for r in rows]
        rest = [max(0.0, (r.get("time_step") or 0.0) - sum(s)) for r, (_, s) in zip(rows, spent, strict=True)]
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
    rows = "".join(f"<tr><td>{_escape(url)}</td><td>{charts.number(round(n, 2))}</td></tr>" for url, n in busy.items())
    table = f"<table><tr><th>Server</th><th>Concurrent completions, mean</th></tr>{rows}</table>" if busy else ""
    return (
        table
        + f"<p>{chrome_trace.TRACE} in the run directory has all phases, pushes and completions: open it at "
        + "ui.perfetto.dev.</p>"
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
        f'title="{_escape(what)}: {100 * mean / total:.1f}%"></i>'
        for k, ((what, _), mean) in enumerate(zip(known, means, strict=True))
    )
    rows = [
        (
            f'<i class="swatch c{k % charts.COLOURS}"></i>{_escape(what)}',
            f"{charts.number(float(f'{mean:.3g}'))} s",
            f"{charts.number(float(f'{statistics.median(column):.3g}'))} s",
            f"{100 * mean / total:.1f}%",
            _escape(words),
        )
        for k, ((what, words), mean, column) in enumerate(zip(known, means, columns, strict=True))
    ]
    heads = "phase", "mean", "median", "share", "what it means"
    picture = charts.stack([what for what, _ in known], spent, x_name="step", unit="seconds")
    words = "Seconds per step by phase; a column may average several steps."
    return (
        f"<h3>{_escape(kind)}: {charts.number(float(f'{total:.3g}'))} s per step on average</h3>"
        f'<div class="split">{bar}</div><div class="pair"><div class="plain">{page.table(heads, rows)}</div>'
        f"{page.card('Seconds per step', kind, words, picture)}</div>"
    )


# ---------------------------------------------------------------- samples


def _samples(path: pathlib.Path) -> str:
    """The sample browser with its data: all samples of evenly spaced steps, within the token budget."""
    sizes: dict[tuple[str, int], int] = collections.Counter()
    total = 0
    for line in tracker.read_lines(path) if path.exists() else ():
        sizes[str(line.get("kind", "")), line.get("step", 0)] += max(1, len(line.get("tokens", ())))
        total += 1
    if not total:
        return ""
    keys, stride = sorted(sizes), 1
    while stride < len(keys) and sum(sizes[k] for k in _every_nth(keys, stride)) > TOKEN_BUDGET:
        stride += 1
    chosen, room, kept = set(_every_nth(keys, stride)), TOKEN_BUDGET, []
    for line in tracker.read_lines(path):
        if (str(line.get("kind", "")), line.get("step", 0)) in chosen and room > 0:
            kept.append(_sample_fields(line))
            room -= len(kept[-1]["tokens"])
    kept.sort(key=lambda s: (s["kind"], s["step"]))
    words = f"{charts.number(total)} samples" if len(kept) == total else (
        f"{charts.number(len(kept))} of {charts.number(total)} samples, from steps across the run"
    )  # fmt: skip
    return page.browser(kept, words)


def _every_nth(keys, stride: int) -> list:
    """Every stride-th key, and the last one."""
    return keys if stride == 1 else sorted({*keys[::stride], keys[-1]})


def _sample_fields(line: dict) -> dict:
    """The fields of a sample that the report needs, with numbers rounded (after taking differences)."""
    short = lambda x, digits: float(f"{x:.{digits}g}") if _is_number(x) else None
    tokens = [str(t) for t in line.get("tokens", ())]
    logp = list(line.get("logp", ()))
    gap = [
        short(a - b, 3) if _is_number(a) and _is_number(b) else None
        for a, b in zip(line.get("trainer_logp") or (), logp, strict=False)
    ]
    text = str(line.get("text", ""))
    return {
        "kind": str(line.get("kind", "")),
        "step": line.get("step", 0),
        "version": line.get("version"),
        "prompt": str(line.get("prompt", "")),
        "text": "" if text == "".join(tokens) else text,
        "reward": short(line.get("reward"), 4),
        "adv": short(line.get("adv"), 4),
        "finish": str(line.get("finish", "")),
        "tokens": tokens,
        "logp": [short(x, 5) for x in logp],
        "versions": list(line.get("version_of_token", ())),
        "gap": gap,
    }


# ---------------------------------------------------------------- tables


def _numbers(table) -> str:
    rows = []
    for kind, lines in table.items():
        for name in _names(lines):
            v = _values(lines, name)
            figures = [f'<span class="n">{charts.number(x)}</span>' for x in (v[0], v[-1], min(v), max(v))]
            words = _escape(metric_catalog.healthy(name)), _escape(metric_catalog.meaning(name))
            rows.append((_escape(kind), f"<code>{_escape(name)}</code>", *figures, *words))
    heads = "kind", "name", "first", "last", "smallest", "largest", "healthy", "what it means"
    return page.folded(f"{len(rows)} metrics; all steps are in metrics.jsonl", page.table(heads, rows)) if rows else ""


def _configuration(config) -> str:
    rows = [(f"<code>{_escape(name)}</code>", _value(value)) for name, value in _flat(config)]
    return (
        page.folded(f"{len(rows)} settings, as in config.json", page.table(("setting", "value"), rows)) if rows else ""
    )


def _flat(value, prefix=""):
    for name, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield from _flat(entry, f"{prefix}{name}.")
        else:
            yield prefix + str(name), entry
