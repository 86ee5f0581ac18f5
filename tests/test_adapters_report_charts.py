import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.adapters.report import charts

SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(-1e12, 1e12)


def texts(root, kind):
    return [e.text for e in root.iter(SVG + "text") if kind in e.get("class", "").split()]


def dots(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


@given(low=finite, high=finite, count=st.integers(2, 10), whole=st.booleans())
def test_ticks_are_round_evenly_spaced_and_cover_the_range(low, high, count, whole):
    low, high = min(low, high), max(low, high)
    if high - low < 1e-6 * max(abs(low), abs(high)):  # below the resolution that charts need
        high = low
    ticks = charts.ticks(low, high, count, integer=whole)
    steps = np.diff(ticks)
    assert ticks[0] <= low + 1e-6 * steps[0] and ticks[-1] >= high - 1e-6 * steps[0]
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert len(ticks) <= count + 3
    mantissa = steps[0] / 10.0 ** math.floor(math.log10(steps[0] * (1 + 1e-9)))
    assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5)) < 1e-3
    if whole and high > low:
        assert all(t == round(t) for t in ticks)


@pytest.mark.parametrize(
    "x, said",
    [(0, "0"), (1234567, "1,234,567"), (0.12345, "0.1235"), (1.2e-9, "1.2e-9"), (2.5e8, "2.5e8"), (12345.6, "12,346")]
    + [(None, "–"), (-0.5, "-0.5"), (1e-4, "1e-4"), (True, "1"), (math.nan, "nan")],
)
def test_numbers_are_formatted_for_readers(x, said):
    assert charts.number(x) == said


@pytest.mark.parametrize(
    "values, said",
    [
        ([0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        ([0, 5000, 10000], ["0", "5k", "10k"]),
        ([0, 1e-4, 2e-4], ["0", "1e-4", "2e-4"]),
        ([0, 2e6], ["0", "2M"]),
        ([3], ["3"]),
    ],
)
def test_tick_labels_of_an_axis_have_equal_precision(values, said):
    assert charts.tick_labels(values) == said


def test_a_curve_goes_through_its_points_and_breaks_at_gaps():
    text = charts.curves([charts.Series("reward", [(0, 0.0), (1, 1.0), (2, None), (3, 0.5), (4, 0.5)])], y_range=(0, 1))
    root = ET.fromstring(text)
    (line,) = [e for e in root.iter(SVG + "path") if "line" in e.get("class")]
    assert line.get("d").count("M") == 2
    (x0, y0), (x1, y1), (x3, y3), _ = dots(line.get("d"))
    assert y0 > y3 > y1 and math.isclose((y0 + y1) / 2, y3, abs_tol=0.2)
    assert math.isclose(x3 - x1, 2 * (x1 - x0), abs_tol=0.2)
    assert texts(root, "name") == ["reward", "step"]
    assert {"0.00", "1.00", "4"} <= set(texts(root, "tick"))
    titles = [e.text for e in root.iter(SVG + "title")]
    assert titles[0] == "step 0\nreward: 0" and len(titles) == 4


def test_a_logarithmic_axis_has_decades_and_needs_positive_values():
    points = [(i, 10.0**-i) for i in range(1, 9)]
    root = ET.fromstring(charts.curves([charts.Series("k3", points)], log=True, zero=True))
    assert "10⁻⁸" in texts(root, "tick")
    (line,) = [e for e in root.iter(SVG + "path") if "line" in e.get("class")]
    np.testing.assert_allclose(np.diff([y for _, y in dots(line.get("d"))], 2), 0, atol=0.21)
    root = ET.fromstring(charts.curves([charts.Series("k3", [*points, (9, 0.0)])], log=True))
    assert not any("10" in t and "⁻" in t for t in texts(root, "tick"))


def test_a_long_noisy_curve_gets_a_running_mean_and_keeps_its_extremes():
    rng = np.random.default_rng(0)
    points = [(i, float(v)) for i, v in enumerate(rng.normal(size=5000))]
    root = ET.fromstring(charts.curves([charts.Series("loss", points)]))
    (band,) = [e for e in root.iter(SVG + "path") if "range" in e.get("class")]
    (line,) = [e for e in root.iter(SVG + "path") if "line" in e.get("class")]
    spread = lambda e: np.ptp([y for _, y in dots(e.get("d"))])
    assert spread(band) > 4 * spread(line) and len(dots(line.get("d"))) <= 240
    assert any("running mean" in t for t in texts(root, "note"))
    ys = [v for _, v in points]
    groups = charts.downsample(points)
    assert min(g[2] for g in groups) == min(ys) and max(g[3] for g in groups) == max(ys)


def test_the_running_mean_preserves_straight_lines_and_gaps():
    np.testing.assert_allclose(charts.running_mean([2.0 * i for i in range(30)], 7), np.arange(30) * 2.0, atol=1e-9)
    assert charts.running_mean([1.0, None, 3.0], 3)[1] is None
    noisy = list(np.random.default_rng(1).normal(size=50))
    np.testing.assert_allclose(charts.running_mean(noisy, 5)[2:-2], np.convolve(noisy, np.ones(5) / 5, "valid"))


@given(
    series=st.lists(
        st.tuples(st.text(max_size=12), st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=60)),
        min_size=1,
        max_size=4,
    ),
    log=st.booleans(),
    zero=st.booleans(),
)
def test_any_curves_are_well_formed_and_stay_inside_the_frame(series, log, zero):
    given_ = [charts.Series("s", [(0, 1.0)])]
    for name, ys in series:
        name = "".join(c for c in name if c.isprintable())
        given_.append(charts.Series(name, list(enumerate(ys))))
    root = ET.fromstring(charts.curves(given_, log=log, zero=zero))
    for path in root.iter(SVG + "path"):
        for x, y in dots(path.get("d")):
            assert charts.LEFT - 0.1 <= x <= charts.WIDTH - charts.RIGHT + 0.1
            assert 0 <= y <= charts.HEIGHT - charts.BOTTOM + 0.1


def test_text_is_escaped():
    name = "<b>\"&'"
    for text in (
        charts.curves([charts.Series(name, [(0, 1.0), (1, 2.0)])], x_name=name),
        charts.histogram([0, 1, 2], [(name, [1, 2]), ("b", [0, 1])], x_name=name),
        charts.stack([name], [(0, [1.0])], x_name=name, unit=name),
    ):
        assert "<b>" not in text and name in texts(ET.fromstring(text), "name")


def test_a_histogram_shows_the_shares_of_nonempty_bins():
    root = ET.fromstring(charts.histogram([0, 1, 2, 3, 4, 5], [("all", [0, 30, 10, 0, 0])], x_name="staleness"))
    bars = [e for e in root.iter(SVG + "rect") if "bar" in e.get("class")]
    assert [e.find(SVG + "title").text for e in bars] == ["staleness: 1\nall: 75% (30)", "staleness: 2\nall: 25% (10)"]
    tall, short = (float(e.get("height")) for e in bars)
    assert math.isclose(tall, 3 * short, rel_tol=0.01)
    assert {"1", "2"} <= set(texts(root, "tick")) and "4" not in texts(root, "tick")


def test_merging_bins_keeps_the_total_count():
    counts = list(np.random.default_rng(0).integers(1, 9, 300))
    root = ET.fromstring(charts.histogram(list(range(0, 602, 2)), [("all", counts)], x_name="length"))
    titles = [e.find(SVG + "title").text for e in root.iter(SVG + "rect") if "bar" in e.get("class")]
    assert len(titles) <= 40
    assert sum(int(re.search(r"\((\d+)\)", t)[1]) for t in titles) == sum(counts)


def test_an_empty_histogram_is_still_valid_svg():
    ET.fromstring(charts.histogram([0.0, 0.5, 1.0], [("all", [0, 0])], x_name="x"))


def test_stacked_columns_add_up_and_a_tall_first_one_is_cut_off():
    rows = [(i, [0.5, 0.25]) for i in range(20)]
    rows[0] = (0, [20.0, 0.25])
    root = ET.fromstring(charts.stack(["update", "publish"], rows, x_name="step", unit="seconds"))
    bars = [e for e in root.iter(SVG + "rect") if "bar" in e.get("class")]
    update, publish = bars[-2:]
    assert math.isclose(float(update.get("height")), 2 * float(publish.get("height")), rel_tol=0.01)
    assert math.isclose(float(publish.get("y")) + float(publish.get("height")), float(update.get("y")), abs_tol=0.02)
    assert min(float(e.get("y")) for e in bars) >= 0
    assert texts(root, "note") == ["↑ 20.2"]  # 20.25 s, three digits
    assert set(texts(root, "name")) == {"update", "publish", "step"}


def test_columns_of_a_long_run_are_means_over_steps():
    rows = [(i, [float(i % 2)]) for i in range(600)]
    root = ET.fromstring(charts.stack(["wait"], rows, x_name="step", unit="seconds"))
    titles = [e.find(SVG + "title").text for e in root.iter(SVG + "rect") if "bar" in e.get("class")]
    assert len(titles) == 60 and titles[0] == "step 0 to 9\nwait: 0.5 seconds\nall: 0.5 seconds"
