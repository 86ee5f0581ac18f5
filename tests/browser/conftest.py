"""Only `make test-browser` runs these tests: they need Playwright and a Chromium."""

import contextlib
import os

import pytest

collect_ignore_glob = [] if os.environ.get("AREAX_BROWSER") else ["test_*.py"]


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which needs namespaces that containers often lack: it opens this machine's pages alone.
        browser = playwright.chromium.launch(executable_path=os.environ.get("AREAX_CHROMIUM"), chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens a page of some width; fails if it asks another server, logs an error, opens a dialog or breaks a policy."""
    wrong = []
    with contextlib.ExitStack() as stack:

        def open_page(url, width=1280, ends=(), **options):
            context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.on("request", lambda request: request.url.startswith(url) or wrong.append(request.url))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
            page.on(
                "console", lambda said: said.type == "error" and not said.text.startswith(ends) and wrong.append(said)
            )
            page.goto(url)
            return page

        yield open_page
        assert not wrong
