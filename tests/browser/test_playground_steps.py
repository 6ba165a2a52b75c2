"""The playground in a real browser: the steps and their trees."""

import unicodedata

from support.pages import events, generate


def tree(page):
    nodes = page.locator("#tree .node").evaluate_all(
        "nodes => nodes.map(node => [node.classList[1], node.querySelector('text').textContent])"
    )
    return [[label for kind, label in nodes if kind == role] for role in ("root", "accepted", "own", "rejected")]


def visible(text):
    shown = text.replace("    ", "·⁴").replace(" ", "·").replace("\n", "↵")
    return "".join(f"\\u{ord(one):04x}" if unicodedata.category(one).startswith("C") else one for one in shown) or "∅"


def test_tree_of_a_step_shows_all_drafted_nodes_and_the_accepted_path(page, server):
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


def test_steps_are_selected_by_keyboard_and_pointer(page, server):
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
    page.locator(".lane .step").nth(3).click(position={"x": 2, "y": 5})
    assert page.get_attribute("#strip", "aria-valuenow") == "4"
