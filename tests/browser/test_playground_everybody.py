"""Accessibility of the playground in a real browser: keyboard, phone, screen readers."""

import re

from support.pages import PROMPT, race

PHONE = {"width": 360, "height": 740, "is_mobile": True, "has_touch": True}


def test_playground_works_by_keyboard(page):
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    seen = []
    while page.evaluate("document.activeElement.id") != "generate":
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    assert {"drafter", "max-tokens", "temperature", "seed"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_selector("#explorer:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "generate"


def test_playground_fits_a_phone_and_works_by_touch(opened, server):
    page = opened(server, **PHONE)
    race(page)
    assert page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)") <= 360
    page.locator(".lane:not(.plain) .step").nth(1).tap(position={"x": 2, "y": 5})
    page.tap("#next")
    assert page.get_attribute("#strip", "aria-valuenow") == "3"


def test_every_control_has_an_accessible_name(page):
    race(page, drafter="published")
    tree = page.locator("body").aria_snapshot()
    controls = re.findall(r"^\s*- (button|textbox|spinbutton|combobox|slider|radio)(.*)$", tree, re.M)
    assert len(controls) >= 12
    assert [kind for kind, rest in controls if not re.match(r' "[^"]', rest)] == []
    assert page.get_attribute("#status", "role") == "status"
