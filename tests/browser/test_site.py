"""The site in a browser, opened from disk: no external requests, no horizontal scrolling, a working search."""

import pytest
from support.pages_of_docs import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(ROOT)
        loaded = config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        loaded.plugins.on_startup(command="build", dirty=False)
        build.build(loaded)
    return folder


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
    )
    yield opened
    context.close()
    assert wrong == []


def test_no_page_scrolls_horizontally_on_a_phone(site, page):
    wide = []
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(file.name)
    assert wide == []


def test_search_works_without_a_server(site, page):
    page.set_viewport_size({"width": 1200, "height": 800})
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("tensor parallelism", delay=20)
    page.wait_for_selector(".md-search-result__item")
    assert "Serving" in page.locator(".md-search-result__item h1").all_text_contents()
    page.keyboard.press("Enter")
    page.wait_for_url("**/*.html?h=*")
