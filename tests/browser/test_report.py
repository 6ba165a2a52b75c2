"""The report page in a browser: on a phone nothing scrolls sideways, and paper has what the screen has."""

import pytest
from support.measured import whole_run, write

from token_recycling.bench.report import write as report


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    rows = [each for each in whole_run(prompts=2, tokens=40) if each["study"] in (None, "k")]
    folder = write(tmp_path_factory.mktemp("report"), rows)
    report.write(folder)
    return folder / "report.html"


@pytest.fixture
def page(browser, file):
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    opened.goto(file.as_uri())
    yield opened
    opened.close()


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")


def test_nothing_scrolls_sideways_on_a_phone(page):
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('*')].filter(one => one.scrollWidth > one.clientWidth + 1 && "
    wide += "getComputedStyle(one).overflowX == 'auto').length"
    assert page.evaluate(wide) == 0


def test_the_answer_is_on_the_first_screen(page):
    page.set_viewport_size({"width": 1280, "height": 800})
    assert all(each.bounding_box()["y"] < 500 for each in page.locator(".answer").all())


def test_a_figure_stands_beside_its_head_on_a_phone(page):
    unfold(page)
    cell = page.locator("td").nth(1)
    assert (
        cell.evaluate("cell => getComputedStyle(cell, '::before').content")
        == '"' + cell.get_attribute("data-head") + '"'
    )


def test_paper_has_what_is_unfolded(page):
    page.emulate_media(media="print")
    assert page.locator(".answer").first.is_visible()
    assert not page.locator("summary").last.is_visible()
    unfold(page)
    assert page.locator("details figure").last.is_visible()
