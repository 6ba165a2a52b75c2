"""The playground in a real browser: a single output, errors, keys, stopping."""

import re

import pytest
from support import tiny
from support.pages import PROMPT, answered, events, figures, fill, generate, one_step, shown
from support.serving import keys, serving, wait_for
from support.speaking import chat_tokenizer

MARKUP = '<img src="x" onerror="document.title = 1"><b>bold</b>'


# A single output


def test_output_is_shown_by_step_with_accepted_and_own_tokens(page, server):
    generate(page)
    steps = events(server)
    expected = [
        [["accepted" if at < step["accepted"] else "own", text] for at, text in enumerate(step["texts"])]
        for step in steps
    ]
    assert shown(page) == expected
    assert any(len(step) > 1 for step in expected)
    whole = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0)
    assert page.locator(".lane .text").text_content() == whole.choices[0].text
    found = figures(page)
    assert (found["tokens"], found["steps"], found["MAT"]) == ("40", str(len(steps)), f"{40 / len(steps):.2f}")


def test_form_options_reach_the_server(page):
    fill(page, temperature=0.7, seed=11)
    page.select_option("#drafter", "recycling:tree=8")
    with page.expect_request("**/steps") as asked:
        page.click("#generate")
    assert asked.value.post_data_json == {
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 11,
        "drafter": "recycling:tree=8",
    }  # fmt: skip
    page.wait_for_selector("#explorer:not([hidden])")
    assert re.match(r"Step \d+ of \d+: (nothing|[1-8] tokens?) drafted", page.text_content("#described"))


def test_chat_has_several_turns(opened, model):
    with serving(model, chat_tokenizer()) as server:
        page = opened(server)
        assert page.is_checked("#kind input[value=chat]")
        assert page.is_hidden("#turns")
        page.fill("#max-tokens", "5")
        first, asked = [{"role": "user", "content": PROMPT}], []
        for question in (PROMPT, "and?"):
            page.fill("#prompt", question)
            with page.expect_request("**/steps") as request:
                page.click("#generate")
            page.wait_for_selector("#generate:visible")
            asked.append(request.value.post_data_json["messages"])
        answer = page.locator("#turns .assistant").first.text_content()
        assert asked == [first, [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]]
        said = page.locator("#turns .assistant").last.text_content()
        assert said == page.locator(".lane .text").text_content() != ""
        page.click("#new-conversation")
        assert page.is_hidden("#turns")


# Output is text, and errors are shown


def test_output_is_never_rendered_as_markup(page):
    answered(page, ("step", one_step(MARKUP)), ("end", {"text": MARKUP, "finish_reason": "stop", "usage": {}}))
    generate(page)
    assert page.locator(".lane .text").text_content() == MARKUP * 3
    assert page.locator(".results img, .results b").count() == 0
    assert page.title() == "Playground · token recycling"


def schema_of(page, text):
    page.click("summary:has-text('JSON schema')")
    page.fill("#schema", text)


NOT_ACCELERATED = {"speculation": {"accelerated": False, "not_accelerated_because": "beams"}}
FAILED = {
    "a stream that breaks off": (lambda page: answered(page, ("step", one_step("some"))), "broke off"),
    "an error in a stream": (
        lambda page: answered(page, ("error", {"error": {"message": "time is over"}})),
        "time is over",
    ),
    "no acceleration": (
        lambda page: answered(page, ("end", {"text": "", "finish_reason": "stop", "usage": NOT_ACCELERATED})),
        "beams",
    ),
    "a prompt that is too long": (lambda page: page.fill("#prompt", PROMPT * 200), "300 maximum"),
    "a schema for a model without an EOS token": (lambda page: schema_of(page, "{}"), "eos_token_id"),
    "an unreachable server": (lambda page: page.route("**/steps", lambda route: route.abort()), "reached"),
}


@pytest.mark.parametrize("name", FAILED)
def test_errors_are_shown_and_the_page_stays_usable(page, name):
    prepare, said = FAILED[name]
    fill(page)
    prepare(page)
    page.click("#generate")
    page.wait_for_selector("#error:not([hidden])")
    assert said in page.text_content("#error")
    assert page.get_attribute("#error", "role") == "alert"
    assert page.is_visible("#generate")


def test_empty_prompt_and_invalid_schema_are_not_sent(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/steps") else None)
    fill(page)
    page.fill("#prompt", "")
    page.click("#generate")
    assert page.evaluate("document.activeElement.id") == "prompt"
    fill(page)
    schema_of(page, "{")
    page.click("#generate")
    assert page.evaluate("document.getElementById('schema').validity.valid") is False
    assert asked == []


# Keys


def test_key_is_requested_and_stored_only_in_this_tab(opened, model):
    with serving(model, tiny.tokenizer(), keys=keys("ann"), isolation="per-key") as server:
        page = opened(server, ready="#key-field:not([hidden])")
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
def test_stop_cancels_the_generation_on_the_server(page, server, how):
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
