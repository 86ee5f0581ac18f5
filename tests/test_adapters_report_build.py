import html
import html.parser
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from areax.adapters.report import build, samples
from areax.adapters.report import html as page_
from areax.adapters.tracking import metric_catalog
from areax.adapters.tracking import run_dir as tracker
from areax.rollout import rewards
from areax.rollout.fleet import fleet

NASTY = "</script><img src=x onerror=alert(1)>\"'&<b>"
VOID = {"meta", "input", "br"}


class Page(html.parser.HTMLParser):
    """Tags, ids, headings and texts of a page; fails if tags are not nested properly."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.texts, self.attributes = [], [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def said(self, tag):
        return "".join(self.texts.get(tag, []))


def write(path, steps=30):
    rng = np.random.default_rng(0)
    with tracker.open_run(path, config={"optim": {"learning_rate": 1e-3}, "note": NASTY, "empty": {}}) as run:
        for step in range(steps):
            run.log("sft", step, nll=3 / (step + 1), loss=3 / (step + 1), grad_norm=1.0, time_update=0.1)
        for step in range(steps):
            counts = np.histogram(rng.integers(1, 30, 64), np.arange(0, 33, 4))[0]
            run.log(
                "grpo",
                step,
                reward=step / steps,
                mismatch_k3=10.0 ** -rng.integers(4, 9),
                entropy=1 / (step + 1),
                length=12 + step,
                length_max=30,
                length_hist={"edges": np.arange(0, 33, 4), "counts": counts},
                staleness=0.4,
                staleness_max=2,
                staleness_hist={"edges": np.arange(4), "counts": [40, 20, 4]},
                clip_fraction=0.01 * (step % 3),
                grad_norm=float("inf") if step == 7 else 0.5 + step,
                version=step,
                server_version=step,
                time_rollout=0.2,
                time_update=0.3,
                time_publish=0.05,
                time_step=0.75,
                homemade=float(step),
                **{NASTY: float(step)},
            )
            for k in range(3):
                run.sample(
                    step,
                    version=step,
                    prompt=NASTY,
                    text="41" + NASTY,
                    reward=float("nan") if k == 2 else float(k),
                    finish="stop",
                    tokens=["41", NASTY],
                    logp=[-0.25, -1e-7],
                    version_of_token=[step - 1 if step else 0, step],
                    adv=0.5,
                    trainer_logp=[-0.25 + 1e-3, -2e-7],
                )
        run.log("eval", 0, accuracy=0.25)
        run.log("eval", steps, accuracy=0.95)
    done = {"sft_accuracy": 0.25, "rl_accuracy": 0.95, "heldout_rows": 512, "mismatch_k3": 1e-12, "seconds": 231.4}
    tracker.write_json(path / "summary.json", done | {"checkpoint": "runs/x/model", NASTY: NASTY, "flag": True})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a<b>"
    write(path)
    return path


@pytest.fixture(scope="module")
def text(run_dir):
    return build.report(run_dir).read_text(encoding="utf-8")


def test_every_section_exists_and_is_linked(text):
    page = Page(text)
    ids = ["summary", "look", "learning", "agreement", "optimiser", "asynchrony", "other", "distributions", "time"]
    for name in [*ids, "samples", "numbers", "configuration"]:
        assert name in page.ids and f"#{name}" in [v for k, v in page.attributes if k == "href"]
    assert len(page.ids) == len(set(page.ids))
    for title in ("Likelihood loss", "Reward", "Held-out accuracy", "Mismatch (k3)", "Entropy", "Answer length"):
        assert title in page.said("h4")
    for title in ("Clipped tokens", "Gradient norm", "Policy version", "Staleness", "Length", "Seconds per step"):
        assert title in page.said("h4")
    assert page.said("h1") == "a<b>"


def test_the_page_makes_no_network_requests(text):
    page = Page(text)
    names = {name for name, _ in page.attributes}
    assert "src" not in names and not names & {"srcset", "action", "ping"}
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert "link" not in page.tags and "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text and "script" not in page.tags and "script-src" not in text


def test_logged_text_never_becomes_markup(text):
    page = Page(text)
    assert "img" not in page.tags and "script" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert NASTY in page.said("code") or NASTY in page.said("span")


def test_every_chart_is_well_formed_svg(text):
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) > 12
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.get("viewBox") and any(e.tag.endswith("title") for e in root.iter())


def test_results_are_shown_with_their_meaning(text):
    page = Page(text)
    assert "95.0%" in page.said("b") and "25.0% before" in page.said("small")
    for name in ("sft_accuracy", "heldout_rows", "seconds"):
        assert metric_catalog.SUMMARY[name] in page.said("td")
    assert "runs/x/model" in page.said("span")
    assert "grad norm was inf in grpo at step 7" in page.said("li")
    for cells in re.findall(r"<tr>(<td.*?)</tr>", text):
        words = re.findall(r"<td[^>]*>(.*?)</td>", cells)
        assert len(words) == 2 or words[-1]  # settings are self-explanatory, everything else has a description


def test_a_constant_metric_is_a_line_of_text_not_a_chart(text):
    assert "grad norm <b>1</b> at every step of sft" in text


def test_the_time_table_adds_up_with_a_row_for_the_rest(text):
    page = Page(text)
    time = text[text.index('<div id="time">') : text.index('<div id="samples">')]
    for what, share in (("waiting for rollout", "26.7%"), ("update", "40.0%"), ("the rest", "26.7%")):
        assert re.search(rf"{what}</td>.*?{share}", time)
    assert "0.75 s per step on average" in page.said("h3")


def tokens_of(text):
    """(class, style, title) of every token of a sample."""
    return re.findall(r'<i class="([^"]*)" style="([^"]*)" title="(log[^"]*)">', text)


def test_a_sample_shows_every_token_with_logp_version_and_gap(text):
    page = Page(text)
    at = text[text.index("grpo step 1: 3 samples, mean reward 0.5") :]
    assert at.count(html.escape(NASTY)) > 3 and "–" in page.said("dd")  # the reward that is not a number
    first, second = tokens_of(at)[:2]
    assert first == ("v0 up gain", "--p:0.062;--g:0.5;--a:0.25;", "log-probability -0.25 (77.9%) · version 0, 1 behind "
                     "· trainer − sampler 0.001 · advantage 0.5")  # fmt: skip
    assert second[0] == "v1 down gain" and "version 1 · trainer − sampler -1e-7" in second[2] and "--g:0;" in second[1]
    for mode in ("logp", "version", "gap", "advantage"):
        assert f'name="colour" value="{mode}"' in text and f"[value={mode}]:checked" in text
    assert "Answer as text" not in text  # it is that of the tokens


def test_a_sample_of_any_size_is_cut(tmp_path):
    huge = {"kind": "grpo", "step": 1, "prompt": "p" * 10**6, "text": "t" * 10**6, "reward": 1.0}
    huge["finish"] = "f" * 10**6
    lines = [huge | {"tokens": ["x" * 10**5] + ["y"] * 50_000, "logp": [-1.0] * 50_001}, huge]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    made = samples.samples(tmp_path / "samples.jsonl")
    assert len(made) < 3_000_000 and made.count("<i ") == samples.LONGEST and made.count("(1,000,000 characters)") == 5
    assert "f" * 201 not in made


def test_odd_samples_are_shown(tmp_path):
    odd = {"kind": "grpo", "step": 1, "prompt": "\ud800", "text": 5, "reward": "x", "version": "one", "finish": None}
    odd |= {"tokens": ["\udfff", None, 7], "logp": ["a", None, -1.0], "version_of_token": ["v", None, 3]}
    beyond = odd | {"reward": 10**400, "version_of_token": [10**400, None, 3]}
    (tmp_path / "samples.jsonl").write_text(f"{json.dumps(odd)}\n{json.dumps(beyond)}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "grpo", "step": 1, "reward": 0.5, "loss": 10**400}))
    page = build.report(tmp_path).read_text(encoding="utf-8")
    assert page.count("<i ") == 6 and "version 3" in page


def test_a_large_run_is_thinned_to_whole_steps_including_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "TOKEN_BUDGET", 40)
    write(tmp_path)
    text = build.report(tmp_path).read_text(encoding="utf-8")
    steps = [(int(step), int(count)) for step, count in re.findall(r"grpo step (\d+): (\d+) samples", text)]
    assert len(tokens_of(text)) <= 40 and steps[0] == (0, 3) and steps[-1] == (29, 3)
    assert all(count == 3 for _, count in steps) and f"{3 * len(steps)} of 90 samples" in text


def test_sections_fold_and_only_the_first_are_open(text):
    """Links open the section that holds their target."""
    found = re.findall(r'<details class="section"( open)?><summary><h2>([^<]*)</h2></summary><div id="([^"]*)">', text)
    assert [name for shown, _, name in found if shown] == ["summary", "look", "learning"]
    assert len(found) == text.count('href="#') > 8
    cards = page_.cards(["<b></b>"] * 8, 6)
    assert cards.count("<b>") == 8 and cards.index("<details><summary>2 more charts") > cards.index("</b></div>")


def test_a_narrow_screen_shows_the_rows_of_a_table_as_blocks(text):
    """Each cell then carries its own head, and nothing but its own width."""
    for heads, body in re.findall(r"<thead><tr>(.*?)</tr></thead><tbody>(.*?)</tbody>", text):
        names = re.findall(r"<th>(.*?)</th>", heads)
        assert re.findall(r'<td data-head="(.*?)">', body) == names * body.count("<tr>")
    narrow = text[text.index("@media (max-width:700px)") :]
    assert "tr{display:block" in narrow and "content:attr(data-head)" in narrow


def test_results_are_in_words_not_in_json(tmp_path):
    summary = {
        "steps": 3, "complete": False, "accuracy": None, "accuracies": {"0": 0.25, "3": 0.5},
        "server_version": ["3-a1f"],
        "time": {"update_s": 75.2}, "counts": {"accepted": 12, "rewards": {"late": 1}}, "seconds": 3725.0, "lost": [],
        "homemade": {"a": {"0": 0.5}},
    }  # fmt: skip
    tracker.write_json(tmp_path / "summary.json", summary)
    text = build.report(tmp_path).read_text()
    assert "null" not in text and "[&quot;" not in text and "{&quot;" not in text
    cells = {words[0]: words[1:] for words in (re.findall(r"<td[^>]*>(.*?)</td>", row) for row in text.split("<tr>"))
             if words}  # fmt: skip
    assert cells["complete"][0] == "no" and cells["accuracy"][0] == "unknown" and cells["lost"][0] == "none"
    assert cells["accuracies"][0] == "25.0% at 0, 50.0% at 3" and cells["server version"][0] == "3"
    assert cells["time: update (s)"] == ["1 min 15 s", "forward, backward and optimiser"]
    assert cells["counts: rewards: late"] == ["1", "rewards that took too long"]
    assert cells["seconds"][0] == "1 h 2 min" and cells["homemade: a"][0] == "0.5 at 0"
    assert "Stopped; the same command goes on from here." in text


def test_every_count_of_a_summary_has_a_description():
    counts = (*re.findall(r"`([a-z_, ]+)`", fleet.Fleet.__doc__.partition("counts:")[2].partition("waits:")[0]),)
    names = [name.strip() for group in counts for name in group.split(",")]
    names += re.findall(r"[a-z]+(?= \(|,|;)", rewards.Pool.__doc__.partition("by outcome:")[2].partition(")")[0])
    assert len(names) > 15
    for name in ("accepted", "running", "rejected", "refused", "failed", *names):
        assert metric_catalog.result(("counts", name)) not in (metric_catalog.SUMMARY["counts"], metric_catalog.UNKNOWN)


def test_one_or_two_points_are_numbers_not_a_chart(tmp_path):
    with tracker.open_run(tmp_path) as run:
        for step, accuracy in enumerate((0.25, 0.75)):
            run.log("eval", step, accuracy=accuracy)
    text = build.report(tmp_path).read_text()
    assert "0.25 → 0.75<small>accuracy, steps 0 and 1</small>" in text and "<svg" not in text


@pytest.mark.parametrize("kept", ["metrics.jsonl", "samples.jsonl", "summary.json", "config.json"])
def test_any_one_file_of_a_run_is_enough(run_dir, tmp_path, kept):
    (tmp_path / kept).write_bytes((run_dir / kept).read_bytes())
    page = Page(build.report(tmp_path).read_text(encoding="utf-8"))
    ids = {"metrics.jsonl": "learning", "samples.jsonl": "samples", "summary.json": "summary"}
    assert ids.get(kept, "configuration") in page.ids


def test_a_run_with_only_sft_and_a_truncated_line(tmp_path):
    with tracker.open_run(tmp_path) as run:
        run.log("sft", 0, nll=2.5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "kind": "sft", "nl')
    out = build.report(tmp_path, tmp_path / "page.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert out == tmp_path / "page.html" and "Likelihood loss" in page.said("h4")
    assert "samples" not in page.ids and "time" not in page.ids and "configuration" not in page.ids
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "page.html", "samples.jsonl"]


@pytest.mark.parametrize("case", ["missing", "empty", "out", "summary"])
def test_bad_input_gives_a_one_line_error(tmp_path, case):
    path, out, said = tmp_path / "run", None, "needs a run directory, got .*run"
    if case != "missing":
        path.mkdir()
        said = "must contain metrics.jsonl, got .*run"
    if case in ("out", "summary"):
        (path / "metrics.jsonl").write_text("")
    if case == "out":
        out, said = tmp_path / "nowhere" / "page.html", "out must be a file in a directory that exists, got .*nowhere"
    if case == "summary":
        (path / "summary.json").write_text("{")
        said = "summary.json: must be a JSON object, got a parse error"
    with pytest.raises(ValueError, match=said) as caught:
        build.report(path, out)
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.html*"))


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("metrics.jsonl", {"kind": "sft", "step": "x"}, "step must be a number, got 'x'"),
        ("metrics.jsonl", {"kind": "sft", "step": 10**400}, f"step must be a number, got 1{'0' * 79}"),
        ("metrics.jsonl", {"kind": "sft", "step": 1, "seconds": "long"}, "seconds must be a number, got 'long'"),
        ("metrics.jsonl", {"kind": "sft", "step": 1, "nonfinite": 3}, "nonfinite must be an object, got 3"),
        ("metrics.jsonl", {"kind": ["sft"], "step": None}, "step must be a number, got None"),
        ("samples.jsonl", {"kind": "sft", "step": 1, "tokens": 3}, "tokens must be a list, got 3"),
        ("samples.jsonl", {"kind": "sft", "step": 1, "components": [1]}, "components must be an object, got [1]"),
        ("samples.jsonl", {"kind": "sft", "step": 1, "adv_of_token": 5}, "adv_of_token must be a list, got 5"),
    ],
)
def test_a_line_with_a_field_of_another_type_is_named(tmp_path, file, line, said):
    """In metrics "tokens" is a number, in samples a list."""
    for name, tokens in (("metrics.jsonl", 3), ("samples.jsonl", [])):
        first = {"kind": "sft", "step": 0, "tokens": tokens}
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in [first, line][: 1 + (name == file)]))
    with pytest.raises(ValueError, match=f"{file}:2: {re.escape(said)}; remove the line"):
        build.report(tmp_path)


def test_every_charted_or_derived_metric_has_a_description():
    for chart in metric_catalog.CHARTS:
        assert chart.group in metric_catalog.GROUPS and chart.meaning
        for name in chart.names:
            assert metric_catalog.meaning(name) != "logged by the recipe under this name", name
    assert metric_catalog.meaning("grad_norm_max") == f"largest single value of: {metric_catalog.METRICS['grad_norm']}"
    assert metric_catalog.label("grad_norm_max") == "grad norm, largest"
    assert metric_catalog.meaning("heldout_nll") == f"over held-out rows: {metric_catalog.METRICS['nll']}"
    assert metric_catalog.result(("nll",)) == metric_catalog.meaning("nll") != metric_catalog.result(("seconds",))
    assert metric_catalog.meaning("time_wait").startswith("seconds: ")
    for name in ("stderr", "samples", "unscorable"):  # numbers of completions, not shares of a step's
        words = metric_catalog.EVALUATED[name]
        assert metric_catalog.result(("evaluation", name)) == words
        assert metric_catalog.meaning(f"a/{name}") == f"of the held-out set a: {words}"


def test_histograms_with_different_numbers_of_bins_are_summed(tmp_path):
    with tracker.open_run(tmp_path) as run:
        for step, counts in enumerate(([4], [1, 3], [0])):
            run.log("grpo", step, staleness_hist={"edges": list(range(len(counts) + 1)), "counts": counts})
    page = build.report(tmp_path).read_text()
    assert "staleness: 0\nall steps: 62.5% (5)" in page and "staleness: 1\nall steps: 37.5% (3)" in page


def test_unhealthy_metrics_are_reported_at_the_top(tmp_path):
    lines = [
        {"kind": "grpo", "step": i, "prob_error": 1.01 + 0.1 * (i > 3), "ess": 0.9 - 0.5 * (i > 6), "reward": 1.0}
        for i in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = build.report(tmp_path).read_text()
    held = "in 6 of 10 steps of grpo, alarm at 8, last 9"
    assert f"<b>Trainer and sampler disagree about tokens</b> (prob_error 1.11) {held}. mismatch_k3_now " in page
    assert "Few samples carry" not in page and "from 0.9 to 1.1" not in page and "to 1.05" in page
    for name in metric_catalog.ALARMS:
        assert name in metric_catalog.METRICS and metric_catalog.healthy(name)
