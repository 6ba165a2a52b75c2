"""A browser, and pages of it: Debian's chromium, driven by playwright. Without either these tests are skipped, or fail
where REQUIRE_BROWSER is set.
"""

import os
import shutil

import pytest
from support import tiny
from support.serving import serving
from support.speaking import speaking_llama

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def missing(what):
    """Skips the tests; fails where a browser was installed for them."""
    (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(f"{what}; `nox -s install-browser` installs it")


@pytest.fixture(scope="module")
def browser():
    """Ended with each file: playwright's loop would be in the way of other tests."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing(f"no browser of {', '.join(BROWSERS)}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(scope="module")
def model():
    return speaking_llama()


@pytest.fixture(scope="module")
def server(model):
    settings = {"offers": ("recycling:tree=8", "published"), "max_prompt_tokens": 300}
    with serving(model, tiny.tokenizer(), **settings) as running:
        yield running


@pytest.fixture
def opened(browser):
    """Opens a page of a server, without motion unless it is asked for, and waits for what is `ready`; fails at the end
    if it logged errors or made requests to another server.
    """
    contexts, wrong, asked = [], [], []

    def opening(server, width=1200, height=800, ready="#drafter option", **context):
        context = {"reduced_motion": "reduce", **context}
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **context))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: asked.append((server.url, request.url)))
        page.goto(server.url)
        page.wait_for_selector(ready, state="attached")
        return page

    yield opening
    for context in contexts:
        context.close()
    assert [url for origin, url in asked if not url.startswith(f"{origin}/")] == []
    # What the server refuses, the browser logs.
    assert [text for text in wrong if not text.startswith("Failed to load resource: ")] == []


@pytest.fixture
def page(opened, server):
    return opened(server)
