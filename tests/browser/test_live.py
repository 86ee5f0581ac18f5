"""The page of a run that goes on, in a real browser: it follows, shows samples as text, and fits a narrow screen."""

import asyncio
import threading
import time

import followed
import numpy as np
import pytest

from areax.adapters import tokenizer
from areax.adapters.tracking import metric_catalog
from areax.rollout.journal import store
from areax.rollout.types import Completion, sampled

WIDTHS = 1280, 390
EVIL = (
    "</script><script>alert('no')</script><img src=x onerror=alert('no')><svg onload=alert('no')>\u202eright\x00\x1b[1m"
)
PROBE = "'\"><iframe srcdoc=\"<script>parent.alert('no')</script>\"></iframe><a href=\"javascript:alert('no')\">x</a>"


@pytest.fixture
def run(tmp_path):
    """A run of three steps, with a journal of what an evil model wrote."""
    tokens = tokenizer.character({*EVIL, *"a prompt"})
    tokenizer.save(tokens, tmp_path / "policy")
    path = tmp_path / "run"
    model = str(tmp_path / "policy")
    options = {"model": model, "data": "x", "reward": "areax.rollout.tasks.arithmetic:reward", "rollout": {"eta": 1}}
    with followed.opened(path, **options) as run:
        for step in range(1, 4):
            followed.log(run, step, **{PROBE: float(step)})
        thread = threading.Thread(target=lambda: asyncio.run(record(path, tokens)))  # Playwright has a loop here
        thread.start()
        thread.join()
        yield path, run


async def record(path, tokens):
    async with store.opened(path, 0, {"run": "one"}) as journal:
        for version in range(3):
            groups = [[evil(tokens, 4 * p + k, p, version) for k in range(4)] for p in range(3)]
            journal.close_batch(version, groups, {}, ()).result()


def evil(tokens, k, prompt, version):
    ids = tokens.encode(EVIL, add_special_tokens=False)
    half = len(ids) // 2
    versions = [max(0, version - 1)] * half + [version] * (len(ids) - half)
    answer = Completion(ids, [-(i % 5) / 2 for i in range(len(ids))], versions, "stop")
    return sampled(
        tokens.encode("a prompt", add_special_tokens=False), answer, temperature=1.0, reward=float(k % 2), group=prompt,
        prompt=prompt, rollout=k, sample=k, components={PROBE: 1.0}, info={"prompt": EVIL, "text": EVIL},
    )  # fmt: skip


def unfold(page):
    """Opens every section, and everything that is folded in them."""
    page.evaluate("document.querySelectorAll('details.section').forEach(x => x.open = true)")
    page.wait_for_selector("#samples .answer i")
    page.wait_for_selector("#configuration table")
    page.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")


def overflow(page):
    """How many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_follows_a_run_without_a_reload(run, opened, width):
    path, log = run
    with followed.running(path) as url:
        page = opened(url, width)
        assert page.inner_text("#subtitle").startswith("3 steps of grpo")
        unfold(page)
        page.click(".modes span:text-is('policy version')")
        page.evaluate("window.mine = document.querySelector('#learning .card')")
        stop = threading.Event()

        def train():
            for step in range(4, 60):
                followed.log(log, step, **{PROBE: float(step)})
                if stop.wait(0.2):
                    return

        thread = threading.Thread(target=train)
        thread.start()
        page.wait_for_function("() => parseInt(document.querySelector('#subtitle').textContent) > 15", timeout=30_000)
        stop.set()
        thread.join()
        page.wait_for_timeout(2500)
        steps = int(page.inner_text("#subtitle").split()[0])
        last = page.locator("#learning .card:has-text('Mean reward') .band title").last.text_content()
        assert f"step {steps}" in last and steps > 15
        assert page.evaluate("window.mine === document.querySelector('#learning .card')")  # its content alone changed
        assert page.evaluate("[...document.querySelectorAll('details')].every(x => x.open)")
        assert page.is_checked("[value=version]")
        assert overflow(page) <= 0


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sample_is_shown_token_by_token_and_nothing_in_it_runs(run, opened, width):
    path, _ = run
    with followed.running(path) as url:
        page = opened(url, width)
        unfold(page)
        assert page.inner_text("#samples .lead >> nth=0").startswith("Step 3 of grpo, the newest")
        page.fill("[name=step]", "2")
        page.locator("[name=step]").blur()
        page.wait_for_selector("text=Step 2 of grpo, the newest is 3")
        page.select_option("[name=group]", "2")
        page.wait_for_function("() => document.querySelector('[name=group]').value === '2'")
        with page.expect_response("**/parts?**"):
            page.select_option("[name=sample]", "3")
        page.wait_for_function("() => document.querySelector('.facts').textContent.includes('reward1')")
        marks = page.locator(".answer .mark")
        shown = page.evaluate(
            "[...document.querySelectorAll('.answer i:not(.given)')].map(x => x.textContent).join('')"
        )
        assert shown.startswith(EVIL[:80]) and "U+0000" in shown and "U+001B[1m" in shown and marks.count() >= 2
        titles = page.evaluate("[...document.querySelectorAll('.answer i')].map(x => x.title)")
        assert "version 0, 1 behind" in titles[0] and "version 1 ·" in titles[-1]
        assert all("log-probability" in title and "advantage 0.8" in title for title in titles)
        colours = "[...document.querySelectorAll('.answer i')].map(x => getComputedStyle(x).backgroundColor)"
        for mode, different in (("policy version", 2), ("log-probability", 5), ("advantage", 1)):
            page.click(f".modes span:text-is('{mode}')")
            found = {*page.evaluate(colours)}
            assert len(found) == different and found != {"rgba(0, 0, 0, 0)"}
        assert page.locator(".modes input").count() == 3  # the journal has no log-probabilities of the trainer
        assert "sampled by version0 1" in page.text_content(".facts").strip()
        count = "document.querySelectorAll('main img, main iframe, main script, main svg[onload], main a').length"
        assert page.evaluate(count) == 0 and EVIL[:80] in page.text_content("#samples pre >> nth=0")
        assert overflow(page) <= 0


def test_two_thousand_steps_open_in_two_seconds(tmp_path, opened):
    numbers = np.random.default_rng(0)
    names = [name for name in metric_catalog.METRICS if not name.startswith(("own_", "other_", *followed.run_dir.OURS))]
    for name in ("one", "two"):
        with followed.opened(tmp_path / name) as run:
            for step in range(1, 2001):
                run.log("grpo", step, **dict(zip(names, numbers.random(len(names)), strict=True)), time_step=1.0,
                        length_hist={"edges": [*range(33)], "counts": numbers.integers(1, 9, 32)},
                        staleness_hist={"edges": [0, 1, 2], "counts": [40, 20]})  # fmt: skip
    for paths in ((tmp_path / "one",), (tmp_path / "one", tmp_path / "two")):
        with followed.running(*paths) as url:  # which has read nothing yet
            seconds, computed = [], time.process_time()
            for i in range(3):
                began = time.monotonic()
                page = opened(url)
                page.wait_for_selector("#learning svg .line")
                seconds.append(round(time.monotonic() - began, 2))
                computed = computed if i else time.process_time() - computed  # by the server, to read it all
                assert page.inner_text("#subtitle").count("2,000 steps of grpo") == len(paths)
                page.close()
        print(f"{len(paths)} runs: {seconds} s, of which the server computed {computed:.2f} s")
        assert computed < 2 * len(paths) and min(seconds) < 2  # the machine may be busy with something else


@pytest.mark.parametrize("width", WIDTHS)
def test_two_runs_are_beside_each_other(run, tmp_path, opened, width):
    path, _ = run
    with followed.opened(tmp_path / "a-run-with-a-long-name-that-says-everything") as other:
        for step in range(1, 9):
            followed.log(other, step)
    with followed.running(path, other.path) as url:
        page = opened(url, width)
        unfold(page)
        names = page.locator("#learning .card:has-text('Mean reward') svg .name").all_text_contents()
        assert names == ["run", other.path.name, "step"] and overflow(page) <= 0
        page.select_option("[name=run]", other.path.name)
        page.wait_for_selector("text=There are no samples so far.")
        page.select_option("[name=run]", "run")
        page.wait_for_selector("#samples .answer")


def test_a_browser_asks_for_the_key(run, opened):
    path, log = run
    with followed.running(path, key="opensesame") as url:
        page = opened(url, http_credentials={"username": "", "password": "opensesame"})
        followed.log(log, 4)
        page.wait_for_selector("text=4 steps of grpo")
        page = opened(url, ends=("Failed to load resource: the server responded with a status of 401",))
        assert "the key is missing or wrong" in page.content() and "grpo" not in page.content()


def test_a_server_that_ends_is_a_line_on_the_page(run, opened):
    path, _ = run
    with followed.running(path) as url:
        page = opened(url, ends=("Failed to load resource: net::ERR_CONNECTION_REFUSED",))
    page.wait_for_selector("text=no answer from areax report")
    assert page.locator("#learning svg").count() > 0
