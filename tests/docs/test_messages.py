"""docs/troubleshooting.md covers every message of the library, and lists none that is gone."""

import re

import pytest
from support.messages import messages
from support.pages_of_docs import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
_COMMON = re.compile(r"\b(expected|got|a|an|the|of|for|in|to|or|and)\b|[^a-z0-9]", re.I)


def keys():
    """First words of messages: what stands as code in the first column of the page's tables."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`(?=<br>| \|)", line.split(" | ")[0] + " |")


def covers(key, message):
    """Whether a message begins so; `…` stands for anything. A key that says little stands for itself alone."""
    if len(_COMMON.sub("", key)) < 3:
        return key == message
    beginning = ".*?".join(map(re.escape, key.split("…")))
    return key == message or re.match(beginning, message) is not None


def test_every_message_is_on_the_page():
    known = list(keys())
    missing = [f"{place}: {text}" for text, place in messages().items() if not any(covers(key, text) for key in known)]
    assert not missing, "\n".join(
        ["add the first words of these, and what to do, to docs/troubleshooting.md:", *missing]
    )


def test_nothing_on_the_page_is_gone():
    said = list(messages())
    assert [key for key in keys() if not any(covers(key, text) for text in said)] == []


def test_no_message_is_listed_twice():
    assert len(list(keys())) == len(set(keys()))


@pytest.mark.parametrize(
    ("key", "message", "covered"),
    [
        ("expected a drafter of", "expected a drafter of …, got …", True),
        ("expected … for option … of", "expected … for option … of …, got …", True),
        ("expected … of …, got …", "expected … of …, got …", True),
        ("expected … of …, got …", "expected a drafter of …, got …", False),
        ("expected a drafter of", "not accelerated: expected a drafter of …", False),
    ],
)
def test_a_key_is_the_beginning_of_a_message(key, message, covered):
    assert covers(key, message) is covered
