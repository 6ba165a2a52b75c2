"""Chromium, driven by playwright, and its pages. Without either, tests skip, or fail if REQUIRE_BROWSER is set."""

import os
import shutil

import pytest
from support import tiny
from support.serving import serving
from support.speaking import ascii_llama

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def skip_or_fail(what):
    """Skip the tests, or fail if REQUIRE_BROWSER is set."""
    (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(f"{what}; `nox -s install-browser` installs it")


@pytest.fixture(scope="module")
def browser():
    """Closed after each file, since playwright's event loop would disturb other tests."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        skip_or_fail(f"no browser of {', '.join(BROWSERS)}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(scope="module")
def model():
    return ascii_llama()


@pytest.fixture(scope="module")
def server(model):
    settings = {"offers": ("recycling:tree=8", "published"), "max_prompt_tokens": 300}
    with serving(model, tiny.tokenizer(), **settings) as running:
        yield running


@pytest.fixture
def opened(browser):
    """Open a page of a server, by default with reduced motion, and wait for the selector `ready`; fail at the end if
    the page logged errors or sent requests to another server.
    """
    contexts, wrong, asked = [], [], []

    def open_page(server, width=1200, height=800, ready="#drafter option", **context):
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

    yield open_page
    for context in contexts:
        context.close()
    assert [url for origin, url in asked if not url.startswith(f"{origin}/")] == []
    # The browser logs every refused request.
    assert [text for text in wrong if not text.startswith("Failed to load resource: ")] == []


@pytest.fixture
def page(opened, server):
    return opened(server)
