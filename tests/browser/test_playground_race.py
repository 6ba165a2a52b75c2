"""The playground in a real browser: the race."""

import json
import re

import pytest
from support.pages import answered, events, figures, generate, one_step, race, shown
from support.serving import wait_for

NUMBERS = range(1, 5)


def test_a_race_shows_both_texts_and_who_was_faster(page, server):
    race(page)
    assert page.locator(".lane h2").all_text_contents() == ["plain decoding", "recycling:tree=8 (anew)"]
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] != ""
    assert "The same 40 tokens, one for one." in page.text_content("#same")
    plain, drafted = figures(page, 0), figures(page, 1)
    assert (plain["steps"], plain["MAT"]) == ("40", "1.00")
    assert drafted["steps"] == str(len(events(server)))
    ratio = float(page.text_content("#ratio")[:-1])
    assert ratio == pytest.approx(float(drafted["tokens/s"]) / float(plain["tokens/s"]), rel=0.05)
    assert all(kind == "own" for step in shown(page, 0) for kind, _ in step)


def test_who_is_measured_first_alternates_and_is_said(page):
    orders = []
    for _ in range(2):
        with page.expect_request("**/steps") as first:
            race(page)
        orders.append(first.value.post_data_json["drafter"])
        said = re.search(r"one after the other, (.+) first", page.text_content("#fairness"))
        assert said[1] == ("plain decoding" if orders[-1] == "plain" else f"{orders[-1]} (anew)")
    assert orders == ["plain", "recycling:tree=8"]


def test_a_race_begins_with_nothing_learned_and_memory_is_a_figure_of_its_own(page):
    race(page)
    assert "began with nothing learned" in page.text_content("#fairness")
    assert not page.is_visible("#warmed")
    steps = []
    for said in ("brings what this server has learned so far", "has drafted for this very prompt before"):
        race(page, drafter="accelerated")
        assert page.locator(".lane h2").all_text_contents() == ["plain decoding", "recycling (anew)"]
        assert "began with nothing learned" in page.text_content("#fairness")
        warmed = page.text_content("#warmed")
        assert said in warmed
        found = re.match(r"With memory [\d.]+., (\d+) steps", warmed)
        steps.append((int(figures(page, 1)["steps"]), int(found[1])))
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] < steps[1][0]


def measured(page, plain, drafted):
    """Answers the page's requests with runs of four tokens, each of `plain` or `drafted` seconds."""

    def fulfil(route):
        seconds = plain if route.request.post_data_json["drafter"] == "plain" else drafted
        steps = [
            one_step("a") | {"tokens": [3], "texts": ["a"], "accepted": 0, "seconds": at * seconds} for at in NUMBERS
        ]
        parts = [*(("step", step) for step in steps), ("end", {"text": "", "finish_reason": "stop", "usage": {}})]
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in parts)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/steps", fulfil)


def test_a_race_that_is_lost_is_said(page):
    measured(page, plain=0.01, drafted=0.02)
    race(page)
    assert page.text_content("#ratio").startswith("0.50")
    assert "drafting cost more than it saved" in page.text_content("#same")


@pytest.mark.parametrize(
    ("ids", "said"), [([1, 2, 3] * 10, "From token 1 on it repeats the same 3 tokens"), (range(30), None)]
)
def test_a_text_that_loops_says_so(page, ids, said):
    steps = [
        ("step", one_step("a") | {"tokens": [token], "texts": ["a"], "accepted": 0, "seconds": 0.1 * at})
        for at, token in enumerate([70, 71, *ids] if said is None else ids, start=1)
    ]
    answered(page, *steps, ("end", {"text": "", "finish_reason": "stop", "usage": {}}))
    race(page)
    assert ("repeats" in page.text_content("#same")) == (said is not None)
    assert (said or "") in page.text_content("#same")
    generate(page)
    assert (said or "") in page.text_content("#status")


def test_the_replay_follows_the_clock(page):
    race(page)
    ahead = "text => [...text.querySelectorAll('.step')].filter(step => !step.classList.contains('ahead')).length"

    def seen():
        return page.locator(".lane .text").evaluate_all(f"texts => texts.map({ahead})")

    everything = seen()
    assert page.text_content("#play") == "Play", "it plays although the user wants things to keep still"
    page.focus("#clock")
    page.keyboard.press("Home")
    assert seen() == [0, 0]
    assert page.locator(".finished").all_text_contents() == ["", ""]
    half = page.evaluate("Number(document.getElementById('clock').max) / 2")
    page.evaluate(
        "at => { const clock = document.getElementById('clock'); clock.value = at; "
        "clock.dispatchEvent(new Event('input')) }",
        half,
    )
    assert 0 < sum(seen()) < sum(everything)
    page.keyboard.press("End")
    assert seen() == everything
    page.click("#play")
    wait_for(lambda: page.text_content("#play") == "Play")
    assert seen() == everything


def test_the_replay_plays_by_itself_where_motion_is_welcome(opened, server):
    page = opened(server, reduced_motion="no-preference")
    measured(page, plain=20, drafted=10)
    race(page)
    assert page.text_content("#play") == "Pause"
    wait_for(lambda: page.text_content("#time") not in ("0.00 s of 80.00 s", "80.00 s of 80.00 s"))
    page.click("#play")
    assert page.text_content("#play") == "Play"
    stopped = page.text_content("#time")
    page.wait_for_timeout(100)
    assert page.text_content("#time") == stopped
