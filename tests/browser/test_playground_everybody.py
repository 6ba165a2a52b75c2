"""The playground in a real browser: by keyboard, on a phone, in light and dark, for screen readers."""

import re

from support.pages import PROMPT, fill, race

PHONE = {"width": 360, "height": 740, "is_mobile": True, "has_touch": True}


def test_all_is_done_by_keyboard_with_the_focus_in_sight(page):
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    seen = []
    while page.evaluate("document.activeElement.id") != "generate":
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", f"no outline around {seen[-1]}"
    assert {"drafter", "max-tokens", "temperature", "seed"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_selector("#explorer:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "generate"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#explorer:not([hidden])")


def test_the_focus_goes_to_stop_and_back(page):
    fill(page, tokens=3000)
    page.focus("#race")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:visible")
    assert page.evaluate("document.activeElement.id") == "stop"
    page.keyboard.press("Enter")
    page.wait_for_selector("#race:visible")
    assert page.evaluate("document.activeElement.id") in ("generate", "race")


def test_nothing_is_wider_than_a_phone(opened, server):
    page = opened(server, **PHONE)
    wide = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert max(page.evaluate(wide)) <= 360
    fill(page, drafter="published")
    page.click("#options summary")
    page.tap("#race")
    page.wait_for_selector("#verdict:not([hidden])")
    assert max(page.evaluate(wide)) <= 360
    page.locator(".lane:not(.plain) .step").nth(1).tap(position={"x": 2, "y": 5})
    assert page.get_attribute("#strip", "aria-valuenow") == "2"
    page.tap("#next")
    assert page.get_attribute("#strip", "aria-valuenow") == "3"
    small = page.locator("button:visible, select:visible, #form input:visible").evaluate_all(
        "all => all.filter(one => one.getBoundingClientRect().height < 40).map(one => one.id)"
    )
    assert small == []


def test_every_control_has_a_name(page):
    race(page, drafter="published")
    page.click("#options summary")
    tree = page.locator("body").aria_snapshot()
    controls = re.findall(r"^\s*- (button|textbox|spinbutton|combobox|slider|radio)(.*)$", tree, re.M)
    assert len(controls) >= 12
    assert [kind for kind, rest in controls if not re.match(r' "[^"]', rest)] == []
    assert page.get_attribute("#status", "role") == "status"
