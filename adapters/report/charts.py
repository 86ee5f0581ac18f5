"""SVG charts: curves, histograms and stacked columns, with axes, ticks, legends and tooltips.

Colours are classes (`c0` ... `c7`) defined by the page's style sheet, for light and dark mode. All text is escaped;
chart functions return one well-formed <svg> element.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 28, 32
COLOURS = 8
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """A curve: points (x, y), x increasing; a y of None is a gap. Its place in the chart is its colour without one."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int | None = None


def number(x: float | None) -> str:
    """Formats x for reading: four significant digits, thousands separators, exponents like 1.2e-9 for tiny values."""
    if x is None:
        return "–"
    if math.isnan(x) or math.isinf(x):
        return str(x)
    if x == int(x) and abs(x) < 1e7:
        return f"{int(x):,}"
    if abs(x) >= 1e7 or abs(x) < 1e-3:
        digits, exponent = f"{x:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.4g}"


def ticks(low: float, high: float, count: int = 5, *, integer: bool = False) -> list[float]:
    """About `count` round numbers, from the last one <= `low` to the first one >= `high`.

    Steps are 1, 2, 2.5 or 5 times a power of ten; integers if `integer`.
    """
    if high - low < 1e-300:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 10, low + abs(low) / 10)
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    factors = (1, 2, 5, 10) if integer else (1, 2, 2.5, 5, 10)
    step = next(f * power for f in factors if f * power >= least * (1 - 1e-9))
    step = max(1.0, step) if integer else step
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks, all with the same number of decimals."""
    step = min((b - a for a, b in zip(values, values[1:], strict=False)), default=1.0)
    largest = max(abs(v) for v in values)
    if largest >= 1e4:
        unit, suffix = (1e9, "G") if largest >= 1e9 else (1e6, "M") if largest >= 1e6 else (1e3, "k")
        return ["0" if v == 0 else f"{round(v / unit, 6):g}{suffix}" for v in values]
    if largest < 1e-3:
        return [number(v) for v in values]
    decimals = next(d for d in range(12) if abs(round(step, d) - step) < step * 1e-6)
    return [f"{v:.{decimals}f}" for v in values]


def downsample(points, limit: int = 240):
    """Downsamples points to at most `limit` groups [(x, mean, low, high)]; mean is None if all are gaps."""
    size = math.ceil(len(points) / limit) or 1
    out = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        ys = [y for _, y in group if y is not None]
        x = group[len(group) // 2][0]
        out.append((x, sum(ys) / len(ys), min(ys), max(ys)) if ys else (x, None, None, None))
    return out


def running_mean(values, window: int):
    """Centred running mean over `window` values; gaps stay gaps.

    Near the ends, where the window cannot be centred, uses a line fitted to the window instead of its mean, clipped to
    the window's values, so that slopes are not flattened.
    """
    out, reach = [], min(window, len(values))
    for i, value in enumerate(values):
        start = min(max(0, i - window // 2), len(values) - reach)
        near = [(k - i, v) for k, v in enumerate(values[start : start + reach], start) if v is not None]
        out.append(None if value is None else _line_at_zero(near))
    return out


def _smooth(values, window, log):
    """The running mean to draw; of logarithms on a log axis."""
    if window == 1 or not log:
        return running_mean(values, window)
    means = running_mean([None if v is None else math.log10(v) for v in values], window)
    return [None if m is None else 10.0**m for m in means]


def _line_at_zero(points) -> float:
    """Value at x = 0 of the least-squares line through (x, y), clipped to the range of y."""
    n = len(points)
    x_mean, y_mean = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    if not x_mean:  # most windows are centred and without gaps
        return y_mean
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * y for x, y in points) / spread if spread else 0.0
    ys = [y for _, y in points]
    return min(max(y_mean - slope * x_mean, min(ys)), max(ys))


def _window(values) -> int:
    """Window of the running mean: 1 if a curve is short, already smooth, or has only a few levels."""
    known = [v for v in values if v is not None]
    if len(known) < 40 or len(set(known)) < 8:
        return 1
    window = 2 * (len(values) // 40) + 1
    travel = lambda v: sum(abs(b - a) for a, b in zip(v, v[1:], strict=False))
    return window if travel(known) > 2 * travel(running_mean(known, window)) else 1


def curves(
    series: Sequence[Series],
    *,
    x_name: str = "step",
    log: bool = False,
    zero: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Curves over a common x axis.

    For long, noisy curves the bold line is a running mean and the pale one the raw values; if points were downsampled,
    the pale area is their range.

    Args:
      log: log-scale y axis, if all values are positive and span more than a factor of 30.
      zero: includes 0 in the y axis.
      y_range: minimum range of the y axis.
    """
    series = [s for s in series if any(y is not None for _, y in s.points)]
    colours = [(i if s.colour is None else s.colour) % COLOURS for i, s in enumerate(series)]
    ys = [y for s in series for _, y in s.points if y is not None]
    xs = [x for s in series for x, _ in s.points]
    log = log and min(ys) > 0 and max(ys) > 30 * min(ys)
    grouped = [downsample(s.points) for s in series]
    windows = [_window([g[1] for g in group]) for group in grouped]
    note = f"bold: running mean over {number(_span(series, grouped, windows))} {x_name}s"
    top, legend = _legend([s.name for s in series], note if max(windows) > 1 else "", colours)

    low, high = min(ys), max(ys)
    if y_range and not log:
        low, high = min(low, y_range[0]), max(high, y_range[1])
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    y_of, marks = _scale_y(low, high, top, log)
    x_low, x_high = min(xs), max(xs)
    if x_high == x_low:
        x_low, x_high = x_low - 1, x_high + 1
    x_of = lambda x: LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    parts = [*_grid(marks)]
    x_ticks = [x for x in ticks(x_low, x_high, 6, integer=True) if x_low <= x <= x_high]
    for x, word in zip(x_ticks, tick_labels(x_ticks) if x_ticks else (), strict=True):
        parts.append(_text(x_of(x), HEIGHT - BOTTOM + 15, word, "tick middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 3, x_name, "name end"))
    for i, (group, window) in enumerate(zip(grouped, windows, strict=True)):
        colour = f"c{colours[i]}"
        strong = _smooth([g[1] for g in group], window, log)
        if window > 1 or len(group) < len(series[i].points):
            parts.append(_raw_curve(group, x_of, y_of, colour))
        dots = [(x_of(g[0]), None if y is None else y_of(y)) for g, y in zip(group, strong, strict=True)]
        parts.append(f'<path class="line {colour}" d="{_path(dots)}"/>')
        if len(group) <= 24:
            parts += [
                f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in dots if y is not None
            ]
    parts += _hover_bands(series, colours, x_of, y_of, x_name, top)
    return _svg([*legend, *parts], ", ".join(s.name for s in series))


def histogram(edges: Sequence[float], series: Sequence[tuple[str, Sequence[float]]], *, x_name: str) -> str:
    """Percentages of counts over common bins, drawn as bars of equal width whatever the bins' widths.

    Empty bins at both ends are omitted. Bins of width 1 are labelled by their integer, others by their edges.
    """
    edges, series = _merge_bins(list(edges), [(name, list(counts)) for name, counts in series])
    totals = [sum(counts) or 1 for _, counts in series]
    shares = [[100 * c / t for c in counts] for (_, counts), t in zip(series, totals, strict=True)]
    top, legend = _legend([name for name, _ in series] if len(series) > 1 else [], "")
    y_of, marks = _scale_y(0.0, max(max(s) for s in shares), top, False)
    n = len(edges) - 1
    slot = (WIDTH - LEFT - RIGHT) / n
    singles = all(b - a == 1 for a, b in zip(edges, edges[1:], strict=False))
    names = [number(math.ceil(e)) for e in edges[:-1]] if singles else [number(e) for e in edges]
    parts = [*_grid([(y, f"{word}%") for y, word in marks])]
    every = _round_up(n / (8 if max(map(len, names)) > 3 else 12))
    for i in range(0, len(names), every):
        x = LEFT + slot * (i + 0.5 if singles else i)
        parts.append(_text(x, HEIGHT - BOTTOM + 15, names[i], "tick middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 3, x_name, "name end"))
    width = slot * 0.84 / len(series)
    for k, ((name, counts), share) in enumerate(zip(series, shares, strict=True)):
        for i, (count, percent) in enumerate(zip(counts, share, strict=True)):
            if count:
                what = names[i] if singles else f"{number(edges[i])} to {number(edges[i + 1])}"
                title = f"{x_name}: {what}\n{name}: {percent:.3g}% ({number(count)})"
                x, y = LEFT + slot * (i + 0.08) + k * width, y_of(percent)
                parts.append(_bar(x, y, width, HEIGHT - BOTTOM - y, k, title))
    return _svg([*legend, *parts], x_name)


def stack(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], *, x_name: str, unit: str) -> str:
    """Stacked columns: rows (x, one value >= 0 per name), x increasing; averaged to at most 60 columns.

    A column more than three times as high as the median is cut off and labelled with its height: the first step
    compiles.
    """
    size = math.ceil(len(rows) / 60)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    means = [[sum(r[1][k] for r in g) / len(g) for k in range(len(names))] for g in groups]
    heights = sorted(map(sum, means))
    roof = max((h for h in heights if h <= 3 * heights[len(heights) // 2]), default=heights[-1])
    top, legend = _legend(names, "")
    y_of, marks = _scale_y(0.0, roof, top, False)
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    parts = [*_grid(marks), _text(WIDTH - RIGHT, HEIGHT - 3, x_name, "name end")]
    gap = min(0.5, slot * 0.06)
    for i, (group, mean) in enumerate(zip(groups, means, strict=True)):
        span = number(group[0][0]) + ("" if len(group) == 1 else f" to {number(group[-1][0])}")
        floor, x = 0.0, LEFT + slot * i + gap
        for k, (name, value) in enumerate(zip(names, mean, strict=True)):
            low, high = max(y_of(floor), top), max(y_of(floor + value), top)
            if low > high:
                title = f"{x_name} {span}\n{name}: {number(value)} {unit}\nall: {number(sum(mean))} {unit}"
                parts.append(_bar(x, high, slot - 2 * gap, low - high, k, title))
            floor += value
        if y_of(floor) < top - 0.5:
            parts.append(_text(x, top - 3, f"↑ {number(float(f'{floor:.3g}'))}", "note"))
    firsts = [g[0][0] for g in groups]
    x_ticks = [x for x in ticks(rows[0][0], rows[-1][0], 5, integer=True) if firsts[0] <= x <= rows[-1][0]]
    for x, word in zip(x_ticks, tick_labels(x_ticks) if x_ticks else (), strict=True):
        at = bisect.bisect_right(firsts, x) - 1
        parts.append(_text(LEFT + slot * (at + 0.5), HEIGHT - BOTTOM + 15, word, "tick middle"))
    return _svg([*legend, *parts], f"{unit} per {x_name}: " + ", ".join(names))


def _round_up(x: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least x."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= x:
                return factor * power
        power *= 10


def _merge_bins(edges, series):
    used = [i for i in range(len(edges) - 1) if any(counts[i] for _, counts in series)] or [0]
    first, last = used[0], used[-1] + 1
    edges = edges[first : last + 1]
    series = [(name, counts[first:last]) for name, counts in series]
    size = math.ceil((len(edges) - 1) / 40)
    starts = range(0, len(edges) - 1, size)
    merged = [(name, [sum(counts[i : i + size]) for i in starts]) for name, counts in series]
    return [*(edges[i] for i in starts), edges[-1]], merged


def _span(series, grouped, windows):
    """Width, in x, of the widest running mean."""
    k = max(range(len(windows)), key=lambda i: windows[i])
    xs = [g[0] for g in grouped[k]]
    return max(1, round(windows[k] * (xs[-1] - xs[0]) / max(len(xs) - 1, 1)))


def _scale_y(low, high, top, log):
    """(function from a value to its y coordinate, [(y coordinate, label)] of the ticks)."""
    place = lambda share: HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - top)
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        y_of = lambda y: place((math.log10(y) - first) / (last - first))
        decades = range(first, last + 1, math.ceil((last - first) / 5))
        return y_of, [(y_of(10.0**d), "10" + str(d).translate(SUPERSCRIPT)) for d in decades]
    least = 2e-3 * max(abs(low), abs(high))  # finer ticks would all have the same label
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    values = ticks(low, high, 4)
    y_of = lambda y: place((y - values[0]) / (values[-1] - values[0]))
    return y_of, list(zip(map(y_of, values), tick_labels(values), strict=True))


def _grid(marks):
    for i, (y, word) in enumerate(marks):
        kind = "axis" if i == 0 else "grid"
        yield f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 7, y + 3.8, word, "tick end")


def _legend(names, note, colours=None):
    """(y where the chart starts, elements of the legend), in as many rows as needed."""
    colours = colours or [i % COLOURS for i in range(len(names))]
    parts, x, row = [], float(LEFT), 0
    for i, name in enumerate(names):
        wide = 20 + 6.1 * len(name)
        if x + wide > WIDTH and x > LEFT:
            x, row = float(LEFT), row + 1
        y = 12 + 16 * row
        parts.append(f'<rect class="key c{colours[i]}" x="{x:.1f}" y="{y - 6}" width="11" height="5" rx="2.5"/>')
        parts.append(_text(x + 16, y, name, "name"))
        x += wide + 8
    if note:
        if x + 6.0 * len(note) > WIDTH and x > LEFT:
            row += 1
        parts.append(_text(WIDTH - RIGHT, 12 + 16 * row, note, "note end"))
    return TOP + 16 * row - (14 if not parts else 0), parts


def _raw_curve(group, x_of, y_of, colour):
    """Raw values behind the running mean: a line, or the range if points were downsampled."""
    if all(g[2] == g[3] for g in group):
        dots = [(x_of(g[0]), None if g[1] is None else y_of(g[1])) for g in group]
        return f'<path class="raw {colour}" d="{_path(dots)}"/>'
    known = [g for g in group if g[1] is not None]
    edge = [(x_of(g[0]), y_of(g[3])) for g in known] + [(x_of(g[0]), y_of(g[2])) for g in known[::-1]]
    return f'<path class="range {colour}" d="{_path(edge)}Z"/>'


def _path(dots) -> str:
    out, pen = [], "M"
    for x, y in dots:
        if y is None:
            pen = "M"
        else:
            out.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
    return "".join(out)


def _hover_bands(series, colours, x_of, y_of, x_name, top, limit=80):
    """Invisible vertical bands that show the values at their x on hover."""
    xs = sorted({x for s in series for x, y in s.points if y is not None})
    xs = xs[:: math.ceil(len(xs) / limit)]
    edges = [LEFT, *(x_of((a + b) / 2) for a, b in zip(xs, xs[1:], strict=False)), WIDTH - RIGHT]
    known = [[p for p in s.points if p[1] is not None] for s in series]
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        words, dots = [f"{x_name} {number(x)}"], []
        for i, (one, points) in enumerate(zip(series, known, strict=True)):
            at = min(bisect.bisect_left(points, x, key=lambda p: p[0]), len(points) - 1)
            px, py = points[at]
            if left <= x_of(px) <= right:
                words.append(f"{one.name}: {number(py)}")
                dots.append(f'<circle class="dot c{colours[i]}" cx="{x_of(px):.1f}" cy="{y_of(py):.1f}" r="3.4"/>')
        yield (
            f'<g class="band"><rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" '
            f'height="{HEIGHT - BOTTOM - top}"/><line x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{top}" '
            f'y2="{HEIGHT - BOTTOM}"/>{"".join(dots)}<title>{html.escape(chr(10).join(words))}</title></g>'
        )


def _bar(x, y, width, height, colour, title) -> str:
    return (
        f'<rect class="bar c{colour % COLOURS}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}"><title>{html.escape(title)}</title></rect>'
    )


def _text(x, y, words, kind) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>'


def _svg(parts, label) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )
