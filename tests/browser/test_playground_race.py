"""The playground in a real browser: the race."""

import re

import pytest
from support.pages import events, figures, race, shown
from support.serving import wait_for


def test_race_shows_both_outputs_and_the_speedup(page, server):
    race(page)
    assert page.locator(".lane h2").all_text_contents() == ["plain decoding", "recycling:tree=8 (untrained)"]
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] != ""
    assert "Both outputs have the same 40 tokens." in page.text_content("#same")
    plain, drafted = figures(page, 0), figures(page, 1)
    assert (plain["steps"], plain["MAT"]) == ("40", "1.00")
    assert drafted["steps"] == str(len(events(server)))
    ratio = float(page.text_content("#ratio")[:-1])
    assert ratio == pytest.approx(float(drafted["tokens/s"]) / float(plain["tokens/s"]), rel=0.05)
    assert all(kind == "own" for step in shown(page, 0) for kind, _ in step)


def test_race_starts_untrained_and_reports_a_hot_start_separately(page):
    race(page)
    assert "started untrained" in page.text_content("#fairness")
    assert not page.is_visible("#warmed")
    steps = []
    for said in ("has learned from earlier requests", "has already decoded this prompt"):
        race(page, drafter="accelerated")
        assert page.locator(".lane h2").all_text_contents() == ["plain decoding", "recycling (untrained)"]
        assert "started untrained" in page.text_content("#fairness")
        warmed = page.text_content("#warmed")
        assert said in warmed
        found = re.match(r"Hot start: [\d.]+., (\d+) steps", warmed)
        steps.append((int(figures(page, 1)["steps"]), int(found[1])))
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] < steps[1][0]


def test_replay_follows_the_clock(page):
    race(page)
    ahead = "text => [...text.querySelectorAll('.step')].filter(step => !step.classList.contains('ahead')).length"

    def seen():
        return page.locator(".lane .text").evaluate_all(f"texts => texts.map({ahead})")

    everything = seen()
    page.focus("#clock")
    page.keyboard.press("Home")
    assert seen() == [0, 0]
    assert page.locator(".finished").all_text_contents() == ["", ""]
    page.keyboard.press("End")
    assert seen() == everything
    page.click("#play")
    wait_for(lambda: page.text_content("#play") == "Play")
    assert seen() == everything
