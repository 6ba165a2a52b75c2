"""Actions on the playground page, readers of its content, and canned server responses."""

import json

PROMPT = "for index in"


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
    """Return the text of a lane as a list of steps, each a list of tokens with class and text."""
    return (
        page.locator(".lane .text")
        .nth(lane)
        .evaluate(
            "text => [...text.children].map(step => [...step.children].map(one => [one.className, one.textContent]))"
        )
    )


def events(server, **more):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "drafter": "recycling:tree=8", **more}
    return [data for name, data in server.steps(**body) if name == "step"]


def answered(page, *parts, status=200):
    """Answer the page's requests for steps with these events."""
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in parts)
    page.route("**/steps", lambda route: route.fulfill(status=status, content_type="text/event-stream", body=body))


def one_step(text):
    draft = {"parents": [-1, 0], "tokens": [1, 2], "texts": [text, text]}
    return {"index": 0, "seconds": 0.1, "tokens": [2, 3], "texts": [text, text], "accepted": 1, "path": [0, 1],
            "draft": draft}  # fmt: skip
