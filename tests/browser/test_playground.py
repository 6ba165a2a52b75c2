"""The playground in a real browser, with a tiny model."""

import json
import re
import unicodedata

import pytest
import tiny
from serving import keys, serving, wait_for

PROMPT = "for index in"
NEVER_DRAWN = '<img src="x" onerror="document.title = 1"><b>bold</b>'


def fill(page, tokens=40, drafter="recycling:tree=8", **more):
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", str(tokens))
    page.select_option("#drafter", drafter)
    for name, value in more.items():
        page.fill(f"#{name}", str(value))


def generate(page, **more):
    fill(page, **more)
    page.click("#generate")
    page.wait_for_selector("#explorer:not([hidden])")


def race(page, **more):
    fill(page, **more)
    page.click("#race")
    page.wait_for_selector("#verdict:not([hidden])")


def figures(page, lane=0):
    names = page.locator(".lane").nth(lane).locator("dt").all_text_contents()
    return dict(zip(names, page.locator(".lane").nth(lane).locator("dd").all_text_contents(), strict=True))


def shown(page, lane=0):
    """The text of a lane as its steps: of each token its class and its text."""
    return page.locator(".lane .text").nth(lane).evaluate(
        "text => [...text.children].map(step => [...step.children].map(one => [one.className, one.textContent]))"
    )


def events(server, **more):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "drafter": "recycling:tree=8", **more}
    return [data for name, data in server.steps(**body) if name == "step"]


# One text


def test_the_text_appears_in_its_steps_with_drafted_tokens_apart_from_the_models_own(page, server):
    generate(page)
    expected = [
        [["accepted" if at < step["accepted"] else "own", text] for at, text in enumerate(step["texts"])]
        for step in events(server)
    ]
    assert shown(page) == expected
    assert any(len(step) > 1 for step in expected)
    whole = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0)
    assert page.locator(".lane .text").text_content() == whole.choices[0].text
    colours = page.locator(".lane .step").evaluate_all("steps => steps.map(step => step.classList[1])")
    assert colours[:4] == ["even", "odd", "even", "odd"]


def test_the_figures_are_those_of_the_steps(page, server):
    generate(page)
    found, steps = figures(page), events(server)
    assert found["tokens"] == "40"
    assert found["steps"] == str(len(steps))
    assert found["MAT"] == f"{40 / len(steps):.2f}"
    assert float(found["tokens/s"]) > 0
    assert f"40 tokens in {len(steps)} steps" in page.text_content("#status")


def test_the_first_token_is_shown_before_the_last_is_made(page):
    fill(page, tokens=3000)
    page.click("#generate")
    page.locator(".lane .step").nth(3).wait_for(state="attached")
    assert page.is_visible("#stop")
    wait_for(lambda: int(figures(page)["tokens"]) > 0)
    page.click("#stop")


def test_options_reach_the_server(page):
    fill(page, temperature=0.7, seed=11)
    page.click("#options summary")
    page.fill("#option-tree", "3")
    page.select_option("#option-suffix", "false")
    with page.expect_request("**/steps") as asked:
        page.click("#generate")
    assert asked.value.post_data_json == {
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 11,
        "drafter": "recycling:tree=8,tree=3,suffix=false",
    }  # fmt: skip
    page.wait_for_selector("#explorer:not([hidden])")
    assert re.match(r"Step \d+ of \d+: (nothing|[1-3] tokens?) drafted", page.text_content("#described"))


def test_a_chat_is_asked_as_messages(opened, model):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with serving(model, tokenizer) as server:
        page = opened(server, reduced_motion="reduce")
        page.check("#kind input[value=chat]")
        page.fill("#max-tokens", "5")
        page.fill("#prompt", PROMPT)
        with page.expect_request("**/steps") as asked:
            page.click("#generate")
        page.wait_for_selector("#explorer:not([hidden])")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": PROMPT}]


# What the server says is text, and what goes wrong is said


def answered(page, *parts, status=200):
    """Has the page get this answer for steps."""
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in parts)
    page.route("**/steps", lambda route: route.fulfill(status=status, content_type="text/event-stream", body=body))


def one_step(text):
    draft = {"parents": [-1, 0], "tokens": [1, 2], "texts": [text, text]}
    return {"index": 0, "seconds": 0.1, "tokens": [2, 3], "texts": [text, text], "accepted": 1, "path": [0, 1],
            "draft": draft}  # fmt: skip


def test_what_the_model_says_is_never_markup(page):
    answered(page, ("step", one_step(NEVER_DRAWN)), ("end", {"text": NEVER_DRAWN, "finish_reason": "stop", "usage": {}}))
    generate(page)
    assert page.locator(".lane .text").text_content() == NEVER_DRAWN * 3
    assert page.locator(".results img, .results b").count() == 0
    assert page.title() == "Playground · token recycling"


def test_nor_could_a_script_make_it_so(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("text => { document.body.innerHTML = text }", NEVER_DRAWN)
    page.close()


def test_a_stream_that_breaks_off_is_said_and_what_came_stays(page):
    answered(page, ("step", one_step("some")))
    generate(page)
    assert page.text_content("#error") == "The stream broke off before its end."
    assert page.locator(".lane .text").text_content() == "somesome"


def test_an_error_in_the_stream_is_said(page):
    answered(page, ("step", one_step("some")), ("error", {"error": {"message": "the time is over"}}))
    generate(page)
    assert page.text_content("#error") == "the time is over"
    assert page.is_visible("#generate")


def test_what_the_server_refuses_is_said_in_its_words(page):
    fill(page)
    page.fill("#prompt", PROMPT * 200)
    page.click("#generate")
    page.wait_for_selector("#error:not([hidden])")
    assert page.text_content("#error").startswith("expected a prompt of at most 300 tokens, got ")
    assert page.get_attribute("#error", "role") == "alert"
    generate(page)
    assert page.is_hidden("#error")


def test_a_server_that_is_gone_is_said(page):
    page.route("**/steps", lambda route: route.abort())
    fill(page)
    page.click("#generate")
    page.wait_for_selector("#error:not([hidden])")
    assert page.text_content("#error") == "The server cannot be reached."


def test_what_is_missing_is_said_by_the_browser(page):
    fill(page)
    page.fill("#prompt", "")
    page.click("#generate")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.locator(".lane").count() == 0


# Keys


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(opened, model):
    with serving(model, tiny.tokenizer(), keys=keys("ann"), isolation="per-key") as server:
        page = opened(server, reduced_motion="reduce")
        page.wait_for_selector("#key-field:not([hidden])")
        page.fill("#prompt", PROMPT)
        page.fill("#max-tokens", "5")
        page.fill("#key", "wrong")
        page.click("#generate")
        page.locator("#error", has_text="API key").wait_for()
        page.fill("#key", "secret-ann")
        page.click("#generate")
        page.wait_for_selector("#explorer:not([hidden])")
        assert page.is_hidden("#key-field")
        page.reload()
        page.wait_for_selector("#drafter option", state="attached")
        assert page.is_hidden("#key-field")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


# Stopping


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_ends_the_generation_at_the_server(page, server, how):
    counter = 'token_recycling_generations_total{outcome="cancelled"}'
    before = server.metrics().get(counter, 0)
    fill(page, tokens=3000)
    page.click("#generate")
    page.locator(".lane .step").nth(3).wait_for(state="attached")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    page.wait_for_selector("#generate:visible")
    assert page.text_content("#status").startswith("Stopped.")
    server.wait_until_idle()
    wait_for(lambda: server.metrics().get(counter, 0) == before + 1)
    assert 0 < int(figures(page)["tokens"]) < 3000
    assert page.is_visible("#explorer")


def test_a_race_that_is_stopped_shows_nothing(page, server):
    fill(page, tokens=3000)
    page.click("#race")
    wait_for(lambda: server.service.running == 1)
    page.click("#stop")
    page.wait_for_selector("#race:visible")
    assert "nothing to compare" in page.text_content("#status")
    assert page.locator(".lane").count() == 0
    server.wait_until_idle()


# The race


def test_a_race_shows_both_texts_and_who_was_faster(page, server):
    race(page)
    assert page.locator(".lane h2").all_text_contents() == ["plain decoding", "recycling:tree=8 (anew)"]
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] != ""
    assert "The same 40 tokens, one for one." in page.text_content("#same")
    plain, drafted = figures(page, 0), figures(page, 1)
    assert (plain["steps"], plain["MAT"]) == ("40", "1.00")
    assert drafted["steps"] == str(len(events(server)))
    ratio = float(page.text_content("#ratio").removesuffix("×"))
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


def test_what_the_drafter_knew_before_is_said(page):
    race(page)
    assert "began with nothing learned" in page.text_content("#fairness")
    race(page, drafter="accelerated")
    assert "brings what this server has learned so far" in page.text_content("#fairness")
    race(page, drafter="accelerated")
    assert "has drafted for this very prompt before" in page.text_content("#fairness")


def test_a_race_that_is_lost_is_said(page):
    plain = [one_step("a") | {"tokens": [at], "texts": ["a"], "accepted": 0, "seconds": at / 100} for at in range(1, 5)]
    drafted = [one | {"seconds": 2 * one["seconds"]} for one in plain]
    end = ("end", {"text": "", "finish_reason": "stop", "usage": {}})

    def fulfil(route):
        steps = plain if route.request.post_data_json["drafter"] == "plain" else drafted
        parts = [*(("step", step) for step in steps), end]
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in parts)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/steps", fulfil)
    race(page)
    assert page.text_content("#ratio") == "0.50×"
    assert "drafting cost more than it saved" in page.text_content("#same")


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
    page.wait_for_selector("#drafter option", state="attached")
    page.select_option("#speed", "0.25") if page.is_visible("#speed") else None
    race(page, tokens=200)
    assert page.text_content("#play") == "Pause"
    page.click("#play")
    assert page.text_content("#play") == "Play"


# Steps and their trees


def tree(page):
    nodes = page.locator("#tree .node").evaluate_all(
        "nodes => nodes.map(node => [node.classList[1], node.querySelector('text').textContent])"
    )
    return [[label for kind, label in nodes if kind == role] for role in ("root", "accepted", "own", "rejected")]


def visible(text):
    shown = text.replace("    ", "·⁴").replace(" ", "·").replace("\n", "↵")
    return "".join(f"\\u{ord(one):04x}" if unicodedata.category(one).startswith("C") else one for one in shown) or "∅"


def test_the_tree_of_a_step_is_all_that_was_drafted_with_the_accepted_path_lit(page, server):
    generate(page)
    steps = events(server)
    page.focus("#strip")
    page.keyboard.press("Home")
    owns = [following["draft"]["texts"][0] for following in steps[1:]] + [steps[-1]["texts"][-1]]
    for step, last in zip(steps, owns, strict=True):
        root, accepted, own, rejected = tree(page)
        texts = step["draft"]["texts"]
        assert root == [visible(texts[0])]
        assert accepted == [visible(texts[node]) for node in step["path"][1:]]
        assert len(root + accepted + own + rejected) in (len(texts), len(texts) + 1)
        assert own == [visible(last)]
        page.keyboard.press("ArrowRight")


def test_steps_are_chosen_by_keyboard(page, server):
    generate(page)
    count = len(events(server))
    page.focus("#strip")
    for key, now in (("Home", 1), ("ArrowRight", 2), ("ArrowUp", 3), ("ArrowLeft", 2), ("End", count)):
        page.keyboard.press(key)
        assert page.get_attribute("#strip", "aria-valuenow") == str(now)
        assert page.text_content("#described").startswith(f"Step {now} of {count}: ")
        assert page.get_attribute("#tree svg", "aria-label") == page.text_content("#described")
        chosen = page.locator(".lane .step.chosen")
        assert chosen.get_attribute("data-step") == str(now - 1)
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#strip", "aria-valuenow") == str(count)
    page.focus(".lane .text")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#strip", "aria-valuenow") == str(count - 1)


def test_steps_are_chosen_by_pointer(page):
    generate(page)
    page.locator(".lane .step").nth(3).click(position={"x": 2, "y": 5})
    assert page.get_attribute("#strip", "aria-valuenow") == "4"
    page.click("#previous")
    assert page.get_attribute("#strip", "aria-valuenow") == "3"
    box = page.locator("#strip svg").bounding_box()
    page.mouse.click(box["x"] + 1, box["y"] + 5)
    assert page.get_attribute("#strip", "aria-valuenow") == "1"


def test_a_step_of_the_plain_text_has_no_draft(page):
    race(page)
    page.locator(".lane.plain .step").nth(2).click(position={"x": 2, "y": 5})
    assert page.text_content("#explorer-title") == "Steps of plain decoding"
    root, accepted, own, rejected = tree(page)
    assert (len(root), accepted, len(own), rejected) == (1, [], 1, [])
    assert "nothing drafted" in page.text_content("#described")


# For everybody


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
    page = opened(server, width=360, height=740, is_mobile=True, has_touch=True, reduced_motion="reduce")
    page.wait_for_selector("#drafter option", state="attached")
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
    const linear = parts.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
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
