"""The playground in a real browser: by keyboard, on a phone, in light and dark, for screen readers."""

import re

import pytest
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


def test_on_a_phone_the_results_come_into_view_with_stop_at_hand(opened, server):
    page = opened(server, **PHONE)
    fill(page, tokens=3000)
    page.tap("#generate")
    page.locator(".lane .step").nth(3).wait_for(state="attached")
    assert page.locator("#status").bounding_box()["y"] < 100
    stop = page.locator("#stop").bounding_box()
    assert 0 < stop["y"] < 740 - stop["height"]
    page.tap("#stop")
    page.wait_for_selector("#generate:visible")


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


LUMINANCE = """
([back, front]) => {
  const light = (name) => {
    const probe = document.createElement("i");
    probe.style.color = getComputedStyle(document.documentElement).getPropertyValue(name);
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
    probe.remove();
    const linear = parts
      .map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const [one, other] = [light(back), light(front)].sort((a, b) => b - a);
  return (one + 0.05) / (other + 0.05);
}
"""
TEXTS = [
    ("--paper", "--ink"), ("--card", "--ink"), ("--paper", "--soft"), ("--card", "--soft"), ("--even-tint", "--ink"),
    ("--odd-tint", "--ink"), ("--accent", "--on-accent"), ("--card", "--wrong"),
]  # fmt: skip
SHAPES = [("--card", "--even"), ("--card", "--odd"), ("--card", "--field"), ("--paper", "--accent")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_shapes_stand_out(opened, server, scheme):
    page = opened(server, color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) > 128) == (scheme == "light")
    for pairs, least in ((TEXTS, 4.5), (SHAPES, 3)):
        for pair in pairs:
            assert page.evaluate(LUMINANCE, list(pair)) >= least, pair


def test_every_control_has_a_name(page):
    race(page, drafter="published")
    page.click("#options summary")
    tree = page.locator("body").aria_snapshot()
    controls = re.findall(r"^\s*- (button|textbox|spinbutton|combobox|slider|radio)(.*)$", tree, re.M)
    assert len(controls) >= 12
    assert [kind for kind, rest in controls if not re.match(r' "[^"]', rest)] == []
    assert page.get_attribute("#status", "role") == "status"
